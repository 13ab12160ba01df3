"""Chunked top-k: what is said are the largest, what is sent is as long as declared, and nothing else is lost but what was not said."""

import math

import pytest
import torch

from tacit.codecs import ErrorFeedback, Int8, TopK
from tacit.codecs.topk import Rows, fitted, nearest, of_bits, of_bytes, to_bits, to_bytes
from tacit.errors import ConfigError
from tacit.requests import LocalMemory, loop_back
from tacit.shapes import requests_of
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check, vectors


def said(codec, x):
    return codec.unpack_add(codec.pack(x), torch.zeros_like(x))


def noise(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def best(x, kept, levels):
    """The k largest of one chunk, in the best levels of all: every split of the sorted magnitudes is tried (2 levels at most)."""
    index = x.abs().topk(kept).indices
    size = x[index].double().abs().sort().values
    cuts = range(1, kept) if levels == 2 else [kept]
    errors = [((size[:c] - size[:c].mean()) ** 2).sum() + _spread(size[c:]) for c in cuts]
    return index, min(errors).item()


def _spread(size):
    return ((size - size.mean()) ** 2).sum() if size.numel() else 0.0


@pytest.mark.parametrize("numel", [1, 2, 7, 100, 4095, 4096, 4097, 10_000])
def test_the_largest_of_every_chunk_are_said_with_their_signs_and_the_rest_is_zero(numel):
    codec, x = TopK(), noise(numel)
    reduced = said(codec, x)
    for part, answer in zip(x.split(4096), reduced.split(4096), strict=True):
        kept = max(1, round(part.numel() / 64))
        chosen = part.abs().topk(kept).indices
        assert set(answer.nonzero().flatten().tolist()) == set(chosen.tolist())
        assert torch.equal(answer[chosen].sign(), part[chosen].sign())
        assert len(answer[chosen].abs().unique()) <= 2


@pytest.mark.parametrize("bits", [1, 2])
def test_the_levels_are_nearly_the_best_there_are(bits):
    for seed, scale in ((0, 1.0), (1, 1e-12), (2, 1e20)):
        x = scale * noise(4096, seed)
        index, least = best(x, 64, 2 ** (bits - 1))
        found = ((said(TopK(bits=bits), x)[index] - x[index]).double() ** 2).sum().item()
        assert least <= found < 1.1 * least + 1e-4 * float((x[index].double() ** 2).sum())


def test_more_bits_tell_more():
    x = noise(40_960)
    errors = [float((said(TopK(share=0.05, bits=bits), x) - x).square().sum()) for bits in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == 4


def test_bytes_are_eight_bits_an_index_two_a_value_and_two_levels_a_chunk():
    assert TopK().nbytes(4096) == (64 * 8 + 64 * 2) // 8 + 4 == 84
    assert TopK().nbytes(1 << 20) == 256 * 84
    assert TopK().nbytes(0) == 0 and TopK().nbytes(1) == 5
    for length, kept in ((4096, 64), (4096, 128), (4096, 41), (100, 3), (65_536, 700), (7, 7), (1, 1)):
        rows = Rows(1, length, kept, 1)
        index_nbits = kept * rows.low + rows.high
        assert index_nbits <= kept * math.ceil(math.log2(length) if length > 1 else 1)
        if 2 * kept <= length:  # Elias and Fano: within a bit an index of what any code needs
            assert index_nbits <= math.log2(math.comb(length, kept)) + kept + 1
        assert TopK(share=kept / length, bits=1, chunk=max(2, length)).nbytes(length) == rows.nbytes


@pytest.mark.parametrize("text", ["topk", "topk(share=0.03, bits=1)", "topk(share=0.5, bits=4, chunk=100)"])
@pytest.mark.parametrize("numel", [0, 1, 99, 100, 4097, 9000])
def test_what_is_declared_is_what_is_packed_and_asked_for(text, numel):
    codec = parse_codec(text)
    assert codec.pack(noise(numel)).numel() == codec.nbytes(numel)
    asked = requests_of(codec, numel, 5)
    assert [(a.kind, a.up_nbytes, a.down_nbytes, a.on) for a in asked] == [
        ("Gather", codec.nbytes(numel), 5 * codec.nbytes(numel), "meta")
    ]


def test_the_total_is_the_sum_of_what_each_rank_said_to_the_bit():
    codec, inputs = TopK(share=0.1), vectors("lognormal", 3, 10_001)
    reduced = loop_back(codec, inputs)
    total = torch.zeros(10_001)
    for own, x in zip(reduced, inputs, strict=True):
        assert torch.equal(own.contribution(), said(codec, x))
        total += own.contribution()
    assert all(torch.equal(own.total, total) for own in reduced)


def test_zeros_few_numbers_and_equal_ones_are_said_as_they_are():
    codec = TopK()
    assert torch.equal(said(codec, torch.zeros(5000)), torch.zeros(5000))
    few = torch.zeros(8192)
    few[[3, 4095, 4096]] = torch.tensor([2.0, -2.0, 0.5])
    assert torch.equal(said(codec, few), few)
    assert torch.equal(said(TopK(share=1, bits=1), torch.full((300,), -0.25)), torch.full((300,), -0.25))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_chunk_that_is_not_finite_is_nan_for_all_and_leaves_the_others_alone(bad):
    codec, inputs = ErrorFeedback(TopK(), decay=0.5), vectors("gauss", 2, 9000)
    inputs[1][5000:5200] = bad  # more than are said of a chunk
    memories = [LocalMemory(x) for x in inputs]
    reduced = loop_back(codec, inputs, memories=memories)
    assert all(h.total[4096:8192].isnan().all() for h in reduced)
    assert reduced[0].total[:4096].isfinite().all() and reduced[0].total[8192:].isfinite().all()
    assert all(memory.vector("residual").isfinite().all() for memory in memories)


def test_bits_and_bytes_come_back():
    values = torch.randint(0, 2**11, (5, 13), generator=torch.Generator().manual_seed(0))
    bits = to_bits(values, 11)
    assert torch.equal(of_bits(bits, 13), values)
    data = to_bytes(bits)
    assert data.shape == (5, 18) and data.dtype == torch.uint8
    assert torch.equal(of_bytes(data)[:, : bits.shape[1]], bits)
    assert data[0, 0] == values[0, 0] % 256


def test_levels_rise_and_each_is_the_mean_of_its_own():
    size = noise(640, 3).abs().view(10, 64)
    levels = fitted(size, 4)
    assert (levels.diff(dim=1) > 0).all()
    code = nearest(size, levels)
    for row, own, of in zip(levels, code, size, strict=True):
        for number in range(4):
            assert (of[own == number] - row[number]).abs().min() <= (of - row[number]).abs().min() + 1e-6


# ---- error feedback that forgets


def test_a_decay_keeps_that_part_of_what_was_not_said():
    codec, inner = ErrorFeedback(TopK(share=0.1, chunk=50), decay=0.9), TopK(share=0.1, chunk=50)
    memory, kept = LocalMemory(torch.empty(200)), torch.zeros(200, dtype=torch.float64)
    for step in range(6):
        x = noise(200, step)
        total = loop_back(codec, [x], memories=[memory], step=step)[0].total
        wanted = 0.9 * kept + x.double()
        torch.testing.assert_close(total, said(inner, wanted.float()), rtol=1e-5, atol=1e-6)
        kept = wanted - total.double()
        torch.testing.assert_close(memory.vector("residual").double(), kept, rtol=1e-5, atol=1e-6)


def test_a_decay_of_one_is_plain_error_feedback_and_of_zero_is_none():
    x, seen = noise(5000), {}
    for decay in (1, 1.0, 0.0):
        memory = LocalMemory(x)
        for step in range(3):
            seen[decay] = loop_back(ErrorFeedback(TopK(), decay), [x], memories=[memory], step=step)[0].total
    assert torch.equal(seen[0.0], said(TopK(), x))
    assert str(ErrorFeedback(TopK(), 1.0)) == str(ErrorFeedback(TopK())) == f"ef({TopK()})"


@pytest.mark.slow
def test_every_rule_of_the_kit_is_kept():
    for text in ("topk", "topk(share=0.05, bits=3, chunk=500)", "ef(topk)"):
        assert not [f for f in check(parse_codec(text)) if not f.passed]


@pytest.mark.parametrize(
    "text",
    [
        "every / topk(share=0.015625, bits=2, chunk=4096) / sharded",
        "every / ef(topk(share=0.03, bits=2, chunk=4096), decay=0.95) / sharded",
    ],
)
def test_the_text_reads_back(text):
    assert str(Strategy.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("topk(share=0)", "share=0: the part that is sent"),
        ("topk(share=1.5)", "share=1.5"),
        ("topk(bits=5)", "bits=5: a sign and up to 3 bits"),
        ("topk(chunk=1)", "chunk=1: 2 to 1048576"),
        ("ef(topk, decay=1.5)", "decay=1.5: the part of the memory that a step keeps"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_codec(text)


def test_sparse_payloads_are_not_added_in_flight():
    from tacit.errors import PairingError

    with pytest.raises(PairingError, match="cannot be added in flight"):
        Strategy.parse("topk / allreduce")


@pytest.mark.parametrize("share", [1 / 64, 1 / 16, 0.5, 1.0])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("numel", [1, 2, 4095, 4096, 4097, 20_000])
def test_the_core_and_torch_write_one_wire(share: float, bits: int, numel: int) -> None:
    codec, x = (
        TopK(share=share, bits=bits),
        torch.randn(numel, generator=torch.Generator().manual_seed(numel)),
    )
    for rows, part in codec.cut(x):
        core, torchs = rows.pack(part), rows.pack_in_torch(part)
        head = 2 * rows.levels
        indices = slice(head, head + (rows.kept * rows.low + rows.high) // 8)
        assert torch.equal(core[:, indices], torchs[:, indices])  # which of them
        levels = [bytes(row[:, :head].flatten().tolist()) for row in (core, torchs)]
        levels = [torch.frombuffer(bytearray(level), dtype=torch.bfloat16).float() for level in levels]
        torch.testing.assert_close(*levels, rtol=0.01, atol=0)
        for payload in (core, torchs):  # whoever reads reads the same
            reduced, twin = torch.ones_like(part), torch.ones_like(part)
            rows.unpack_add(payload, reduced)
            rows.unpack_add_in_torch(payload, twin)
            assert torch.equal(reduced, twin)


def test_bytes_that_nobody_packed_are_refused() -> None:
    codec, out = TopK(share=0.25, chunk=64), torch.zeros(64)
    payload = codec.pack(torch.randn(64))
    with pytest.raises(ValueError, match="names element"):
        codec.unpack_add(torch.zeros_like(payload), out)
    with pytest.raises(ValueError, match="are not rows of 64 elements"):
        codec.unpack_add(payload[:-1].clone(), out)


# ---- topk > another codec's numbers ----

CHAINS = {
    "topk(0.01) > int8": "topk(share=0.01, chunk=4096) > int8(block=256)",
    "topk(chunk=256)>int4( rounding=nearest )": "topk(share=0.015625, chunk=256) > int4(block=64, rounding=nearest)",
    "topk(0.25) > bf16": "topk(share=0.25, chunk=4096) > bf16",
    "topk > none": "topk(share=0.015625, chunk=4096) > none",
    "ef(topk(0.01) > int8)": "ef(topk(share=0.01, chunk=4096) > int8(block=256))",
    "ef(topk > int8(64), decay=0.95)": "ef(topk(share=0.015625, chunk=4096) > int8(block=64), decay=0.95)",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", CHAINS)
def test_a_chain_is_written_in_one_form_and_keeps_all_rules(text):
    codec = parse_codec(text)
    assert str(codec) == CHAINS[text] and parse_codec(str(codec)) == codec
    assert Strategy.parse(f"every / {text}").what == codec
    assert [f for f in check(codec) if not f.passed] == []
    assert sum(asked.up_nbytes for asked in requests_of(codec, 5000, 2)) == codec.nbytes(5000)


def test_a_chain_sends_indices_and_the_other_codecs_numbers():
    indices = -(-(82 * 5 + 82 + (4095 >> 5)) // 8)  # Elias and Fano: 2 % of 4096 with 5 low bits each
    assert parse_codec("topk(0.02) > int8").nbytes(4096) == indices + Int8().nbytes(82)
    assert parse_codec("topk(0.02) > none").nbytes(8192) == 2 * indices + 4 * 164


def test_a_chain_without_rounding_sends_the_largest_as_they_are():
    codec, x = parse_codec("topk(share=0.25, chunk=64) > none"), noise(200)
    total = loop_back(codec, [x])[0].total
    for chunk, got in zip(x.split(64), total.split(64), strict=True):
        kept = chunk.abs().topk(round(0.25 * len(chunk))).indices
        expected = torch.zeros_like(chunk)
        expected[kept] = chunk[kept]
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("topk > hush", "hush has no format for single numbers; write topk > int8, int4, bf16 or none"),
        ("topk > topk > int8", "has no format for single numbers"),
        ("int8 > topk", "int8(block=256) has no numbers for another codec; topk has"),
        ("topk(bits=3) > int8", "bits=3: int8(block=256) writes the numbers; leave bits out"),
        ("topk >", "codec 'topk >' cannot be read"),
        ("topk > int9", "unknown codec 'int9'; did you mean 'int8'?"),
    ],
)
def test_a_chain_that_cannot_be_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        parse_codec(text)
    assert sentence in str(refused.value)


def _trained(rank, world, text):
    import toys

    import tacit

    model = toys.deep(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tacit.attach(model, optimizer, text) as handle:
        toys.train(model, optimizer, rank, range(6))
        return toys.flat(model), handle.stats.sent_nbytes


def test_a_chain_trains_on_real_ranks_with_the_bytes_it_declares(ranks):
    text = "every / ef(topk(0.05) > int8) / sharded"
    (a, sent), (b, _) = ranks.run(2, _trained, text)
    declared = parse_codec("topk(0.05) > int8").nbytes(a.numel())
    assert torch.equal(a, b) and 6 * declared <= sent <= 6 * (declared + 64)
