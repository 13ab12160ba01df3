"""The kit finds liars, each for the right reason."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rank_one import RankOne

from tacit.cli.codecs import DEFAULT
from tacit.codecs import ErrorFeedback, Int4, Int8
from tacit.errors import ConformanceError
from tacit.requests import Lanes, Payload, Reduced, Sum, TableSum, Traits
from tacit.strategy import parse_codec
from tacit.testing import CHECKS, LAYOUTS, check, nmse, require, vectors

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.mark.parametrize("text", DEFAULT)
def test_every_codec_keeps_every_rule(text):
    findings = check(parse_codec(text))
    assert not [f for f in findings if not f.passed]
    assert {f.check for f in findings} >= set(CHECKS) - {"unbiased", "contracting", "memory", "published"}


def test_the_codec_of_the_docs_keeps_every_rule_and_the_docs_show_that_very_code():
    from own_codec import Uniform4

    require(Uniform4())
    require(ErrorFeedback(Uniform4()))
    source = (EXAMPLES / "own_codec.py").read_text()
    code = source[source.index("@dataclass") :]
    assert code in (EXAMPLES.parent / "docs" / "write-a-codec.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("codec", [RankOne(), ErrorFeedback(RankOne())], ids=str)
def test_a_codec_of_forty_lines_that_uses_shapes_keeps_every_rule(codec):
    findings = check(codec)
    assert not [f for f in findings if not f.passed]
    assert {f.layout for f in findings if f.check in ("bytes", "resume", "world")} == {None, *LAYOUTS}
    _, _, code = Path(sys.modules["rank_one"].__file__).read_text().split('"""')
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


class Honest(Int8):
    """int8 that the liars below inherit from; not registered, so its text is not read."""

    __slots__ = ()

    def __str__(self):
        return type(self).__name__.lower()


class SaysLess(Honest):
    def nbytes(self, numel):
        return numel  # forgets the scales


class SendsMore(SaysLess):
    """Claims that its bytes vary, and sends more than the most that it declares."""

    @property
    def traits(self):
        return replace(super().traits, varies=True)


class Biased(Honest):
    """Nearest rounding that calls itself unbiased."""

    def __init__(self):
        super().__init__(block=256, rounding="nearest")

    @property
    def traits(self):
        return Traits(rounds=1, summable=False, unbiased=True)


class Halves(Honest):
    """Decodes wrongly: everything comes back half as large."""

    def reduce(self, x, context):
        reduced = yield from super().reduce(x, context)
        return Reduced(reduced.total / 2, reduced.contribution)


class Adds(Honest):
    """Claims that block integers can be added in flight."""

    @property
    def traits(self):
        return replace(super().traits, summable=True)


class Chatty(Honest):
    def reduce(self, x, context):
        yield Sum(Payload.dense(x[:1]))
        return (yield from super().reduce(x, context))


class Writes(Honest):
    def reduce(self, x, context):
        x.mul_(1.0000001)
        return (yield from super().reduce(x, context))


class Dices(Honest):
    def reduce(self, x, context):
        return (yield from super().reduce(x + 0.01 * torch.rand(x.shape), context))


class Swallows(Honest):
    """Turns NaN into a number."""

    def reduce(self, x, context):
        return (yield from super().reduce(x.nan_to_num(0, 0, 0), context))


class Squares(Honest):
    """Scales by a norm that it squares in float32."""

    def reduce(self, x, context):
        norm = x.square().sum().sqrt()
        reduced = yield from super().reduce(x / norm if norm > 0 else 0 * x, context)
        return Reduced(reduced.total * norm, lambda: reduced.contribution() * norm)


class Forgets(ErrorFeedback):
    def reduce(self, x, context):
        reduced = yield from super().reduce(x, context)
        context.memory.vector("residual").mul_(0.5)
        return reduced


class Grows(Honest):
    """Claims to contract and doubles."""

    traits = Traits(rounds=1, summable=True, contracting=True)

    def nbytes(self, numel):
        return 4 * numel

    def reduce(self, x, context):
        total = yield Sum(Payload.dense(3 * x))
        return Reduced(total.value, contribution=lambda: 3 * x)


class Overfills(Honest):
    traits = Traits(rounds=1, summable=True, lanes=Lanes(bits=8, largest=3))

    def reduce(self, x, context):
        index = torch.zeros((x.numel() + 1) // 2, dtype=torch.uint8)
        total = yield TableSum(index, tuple(range(0, 48, 3)), x.numel(), Lanes(bits=32, largest=45))
        return Reduced(total.value.float())


class Stateful(Honest):
    """Keeps state in itself instead of the memory: a resumed run goes another way."""

    def __init__(self):
        super().__init__()
        calls[0] = 0

    def reduce(self, x, context):
        calls[0] += 1
        return (yield from super().reduce(x * (1 + 0.001 * (calls[0] % 5)), context))


calls = [0]


class Flat(RankOne):
    """Declares the bytes of a vector for every layout."""

    __str__ = Honest.__str__

    def nbytes_of(self, layout):
        return 4 * layout.numel


class Remakes(RankOne):
    """Changes its factor by a number that no checkpoint holds."""

    __str__ = Honest.__str__

    def reduce(self, x, context):
        calls[0] += 1
        for span in context.layout.spans:
            if span.name == "matrix":
                context.memory.tensor("q", "matrix", span.shape[1:], rule="first").add_(calls[0])
        return (yield from super().reduce(x, context))


class StartsApart(RankOne):
    """Keeps a number that starts from the seed of its rank."""

    __str__ = Honest.__str__

    def reduce(self, x, context):
        def init():
            return torch.tensor([float(context.own_seed % 7)])

        shift = context.memory.tensor("shift", context.layout.names[0], (1,), rule="reset", init=init)
        reduced = yield from super().reduce(x, context)
        return Reduced(reduced.total + shift, reduced.contribution)


class Mixes(RankOne):
    """Uses one name for a vector and for tensors."""

    __str__ = Honest.__str__

    def reduce(self, x, context):
        context.memory.vector("q")
        return (yield from super().reduce(x, context))


@pytest.mark.parametrize(
    ("liar", "rule", "why"),
    [
        (SaysLess(), "bytes", "260 bytes for 256 elements, but 256 declared"),
        (SendsMore(), "bytes", "260 bytes for 256 elements, but 256 declared"),
        (Biased(), "unbiased", "claims to be unbiased, and is not"),
        (Halves(), "shares", "do not add up"),
        (Adds(), "bytes", "payloads add in flight, and their form does not"),
        (Chatty(), "requests", "more than the 1 requests"),
        (Writes(), "agreement", "changed its input"),
        (Dices(), "agreement", "randomness does not come from the context"),
        (Swallows(), "nonfinite", "quietly turned into"),
        (Squares(), "magnitude", "NMSE at 1e-30 is"),
        (Forgets(Int4()), "memory", "was not remembered"),
        (Grows(), "contracting", "claims to contract, and does not"),
        (Overfills(), "bytes", "values up to 45, and claims lanes"),
        (Stateful(), "resume", "went another way"),
        (Flat(), "bytes", "500 bytes for 713 elements, but 2852 declared"),
        (Remakes(), "resume", "went another way"),
        (StartsApart(), "agreement", "ranks receive different sums"),
        (StartsApart(), "world", "after a change from 4 ranks their sums differ"),
        (Mixes(), "resume", "asked for as a vector and as tensors"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_codec_that_lies_fails_for_the_right_reason(liar, rule, why):
    broken = [f for f in check(liar, only=[rule]) if not f.passed]
    assert broken and any(why in f.why for f in broken), broken
    with pytest.raises(ConformanceError):
        require(liar)


def test_a_crash_inside_a_codec_is_a_finding():
    @dataclass(frozen=True)
    class Crashes:
        traits = Traits(rounds=1, summable=True)

        def nbytes(self, numel):
            return 0

        def reduce(self, x, context):
            raise ZeroDivisionError("oops")
            yield

    findings = check(Crashes(), only=["error"])
    assert [f.why for f in findings] == ["it raised ZeroDivisionError: oops"]


def test_vectors_are_the_same_everywhere_and_errors_are_relative():
    assert vectors("lognormal", 2, 3, seed=5)[1].tolist() == pytest.approx(
        vectors("lognormal", 2, 3, seed=5)[1].tolist()
    )
    same = vectors("identical", 3, 10)
    assert torch.equal(same[0], same[2]) and same[0] is not same[2]
    windows = vectors("windows", 4, 8000)
    loud = [[x[2000 * k : 2000 * (k + 1)].square().mean().sqrt() > 5 for k in range(4)] for x in windows]
    assert loud == [[rank == k for k in range(4)] for rank in range(4)]
    assert [bool(x.square().mean().sqrt() > 5) for x in vectors("loud", 3, 8000)] == [True, False, False]
    assert nmse(torch.zeros(10), same) == pytest.approx(1.0)
    assert nmse(sum(same), same) == pytest.approx(0.0, abs=1e-12)
