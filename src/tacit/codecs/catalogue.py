"""Every method of the table: what it is called, where it was published, its formula in one line, and what it promises.

Facts only; bits, rounds and schemes are asked of the codecs, errors and costs are measured: `tacit codecs table`, docs/codecs.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the literature, as a strategy writes it.

    Args:
        name: What its paper calls it.
        codec: How it is written here; with error feedback where the paper has it.
        paper: Authors and year.
        link: Where the paper is; empty where there is none.
        formula: What becomes of x, in one line.
        bound: The property that its paper rests on; what the codec claims beside it (adds, unbiased, ...) is asked of the codec.
        when: The rule, where the method is more than a codec.
        passes: How often a rank goes through all of x, to encode and to decode.
        why: What takes its time where a pass costs more than 5 copies.

    Example:
        >>> next(method.codec for method in METHODS if method.name == "EF-signSGD")
        'ef(sign)'
    """

    name: str
    codec: str
    paper: str
    link: str
    formula: str
    bound: str
    when: str = "every"
    passes: tuple[int, int] = (2, 1)
    why: str = ""

    @property
    def text(self) -> str:
        """As a strategy has it, without the scheme."""
        return self.codec if self.when == "every" else f"{self.when} / {self.codec}"


_ARXIV = "https://arxiv.org/abs/"
_SEIDE = "https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html"
_STROM = "https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html"

METHODS = (
    Method("plain sum", "none", "", "", "x", "nothing is lost", passes=(1, 1)),
    Method("half precision", "fp16", "", "", "fp16(x / n)", "error at most 2^-11 of each number, within its range", passes=(2, 2)),
    Method("bfloat16", "bf16", "", "", "bf16(x)", "error at most 2^-8 of each number", passes=(1, 1)),
    Method(
        "FP8 in blocks", "fp8", "Micikevicius 2022", f"{_ARXIV}2209.05433",
        "s e4m3(x / s),  s = max|block| / 448", "error at most 1/16 of each number (e5m2: 1/8), down to a range of 2^-15",
    ),
    Method(
        "8-bit integers in blocks", "int8", "Alistarh 2017", f"{_ARXIV}1610.02132",
        "s floor(x / s + u),  s = max|block| / 127", "error at most s of each number; rounding=nearest contracts",
    ),
    Method(
        "4-bit integers in blocks", "int4", "Alistarh 2017", f"{_ARXIV}1610.02132",
        "s floor(x / s + u),  s = max|block| / 7", "error at most s of each number; rounding=nearest contracts",
    ),
    Method(
        "natural compression", "natural", "Horvath 2019", f"{_ARXIV}1905.10988",
        "sign(x) 2^a or 2^(a+1) around |x|", "error at most 1/8 of the energy", passes=(1, 1),
    ),
    Method(
        "statistical levels, 2 bits", "ef(twobit)", "Therien 2025", f"{_ARXIV}2505.23725",
        "sign(x) mean of the |x| on its side of t", "contracts: |x - C(x)|^2 = |x|^2 - |C(x)|^2",
        when="diloco(64)", passes=(7, 7),
    ),
    Method(
        "QSGD", "qsgd", "Alistarh 2017", f"{_ARXIV}1610.02132",
        "|x| sign(x_i) l_i / s,  l_i random of two levels", "error at most min(d/s^2, sqrt(d)/s) of the energy",
    ),
    Method(
        "TernGrad", "terngrad", "Wen 2017", f"{_ARXIV}1705.07878",
        "s sign(x_i) Bernoulli(|x_i| / s),  cut at 2.5 sigma", "integers add in flight; clip=0 is unbiased", passes=(4, 1),
    ),
    Method(
        "1-bit SGD", "ef(onebit)", "Seide 2014", _SEIDE,
        "mean of the block's own side of zero", "contracts at least as much as sign", passes=(5, 7),
    ),
    Method(
        "EF-signSGD", "ef(sign)", "Karimireddy 2019", f"{_ARXIV}1901.09847",
        "(|x|_1 / d) sign(x)", "contracts to 1 - |x|_1^2 / (d |x|_2^2) of the energy", passes=(4, 7),
    ),
    Method(
        "signSGD, majority vote", "signsgd", "Bernstein 2018", f"{_ARXIV}1810.05291",
        "s sign(sum of sign(x_i))", "integers add in flight; a minority has no voice", passes=(2, 1),
    ),
    Method(
        "THC", "thc", "Li 2024", f"{_ARXIV}2302.08545",
        "T[i],  i = rounded Hadamard rotation", "integers add in flight; error .0203 / n for normal numbers", passes=(5, 4),
        why="20 butterfly stages over the whole slice, which no cache holds",
    ),
    Method("hush", "hush", "tacit", "decisions/0006-hush.md", "THC's wire, block norms, nearest levels, dither", "integers add in flight; half of THC's error", passes=(3, 2)),
    Method(
        "threshold", "ef(threshold(0.01))", "Strom 2015", _STROM,
        "x_j where |x_j| >= value", "what is left is below value everywhere", passes=(4, 7),
    ),
    Method(
        "top-k", "ef(topk(0.01, chunk=bucket) > none)", "Aji 2017", f"{_ARXIV}1704.05021",
        "x_j on the k largest |x_j|", "contracts to 1 - k/d of the energy or less", passes=(4, 7),
        why="picking takes 6 copies in one pass: comparisons and places, not memory",
    ),
    Method(
        "chunked top-k in 2 bits", "ef(topk, decay=0.95)", "Sarfi 2025", f"{_ARXIV}2508.15706",
        "of 4096 the 64 largest, sign and 2 levels", "contracts; the memory forgets a 20th a round", passes=(4, 7),
        why="places, levels and codes of 64 numbers a chunk, and those of 4 ranks to decode: per number sent, not per pass",
    ),
    Method(
        "random-k, shared seed", "ef(randomk(0.01))", "Stich 2018", f"{_ARXIV}1809.07599",
        "x_j on k places that all ranks draw", "contracts to 1 - k/d of the energy on average", passes=(4, 6),
    ),
    Method(
        "DGC", "dgc", "Lin 2018", f"{_ARXIV}1712.01887",
        "u = m u + g,  v = v + u,  top-k of v;  u = v = 0 there", "momentum waits where the gradient does", passes=(4, 1),
    ),
    Method(
        "DeMo", "ef(dct, decay=0.999)", "Peng 2024", f"{_ARXIV}2411.19870",
        "D' top-k(D t D') D of tiles t, 64 x 64", "contracts, as top-k of the tile does", passes=(4, 7),
        why="four products with 64 x 64 cosines, and top-k's places and levels in each tile: arithmetic, not memory",
    ),
    Method(
        "gTop-k", "ef(gtopk(0.001))", "Shi 2019", f"{_ARXIV}1901.04359",
        "top-k of (own top-k + received), up a tree", "k numbers on every link, whatever the world", passes=(4, 6),
    ),
    Method(
        "ScaleCom", "ef(scalecom(0.01))", "Chen 2020", f"{_ARXIV}2104.11125",
        "x_j on the k largest of a leader, another each step", "k numbers in the sum, whatever the world", passes=(4, 6),
    ),
    Method(
        "OmniReduce", "omnireduce", "Fei 2021", "https://doi.org/10.1145/3452296.3472904",
        "blocks that some rank uses", "nothing is lost", passes=(4, 4),
    ),
    Method(
        "PowerSGD", "lowrank(4, p=none, q=none, rest=none, embeddings=True)", "Vogels 2019", f"{_ARXIV}1905.13727",
        "P R^T,  P = orth(sum M Q),  R = sum M^T P", "follows the best subspace of rank r over the steps", passes=(3, 3),
        why="two products of the matrix with a factor: arithmetic, not memory",
    ),
    Method(
        "low rank in 4 bits", "lowrank(8)", "tacit", "decisions/0015-low-rank.md",
        "P R^T, both factors as int4", "rank 8 in 28 % of the bytes of rank 4 in float32", passes=(3, 3),
        why="two products of the matrix with a factor: arithmetic, not memory",
    ),
    Method(
        "error feedback (EF14)", "ef(int4(rounding=nearest))", "Seide 2014", _SEIDE,
        "C(x + e),  e = x + e - C(x + e)", "sent and left add up to the input", passes=(3, 7),
    ),
    Method(
        "EF21", "ef21(topk)", "Richtarik 2021", f"{_ARXIV}2106.05203",
        "h,  h = h + C(x - h)", "constant gradients arrive exactly in time", passes=(4, 7),
        why="top-k's own, as above",
    ),
    Method(
        "Qsparse-local", "ef(topk(0.01, chunk=bucket) > qsgd)", "Basu 2019", f"{_ARXIV}1906.02367",
        "every H steps: Q(top-k(w - anchor + e))", "rounds x sparsify x quantise x memory", when="local(8)", passes=(4, 7),
    ),
)  # fmt: skip
