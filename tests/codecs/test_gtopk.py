"""gTop-k: the top-k of partial sums up a tree, k numbers on every link, and nothing lost on the way."""

import pytest
import torch

from tacit.codecs import GTopK
from tacit.errors import ConfigError, PairingError
from tacit.requests import LocalMemory, loop_back, merge_stages
from tacit.schedules import tree
from tacit.sim.payloads import of_codec
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check, vectors


def top(x, kept):
    out = torch.zeros_like(x)
    index = x.abs().topk(kept).indices
    out[index] = x[index]
    return out


def _paper(inputs, kept):
    """Algorithm 2 of the paper: at every level of the tree pairs add their k largest, and keep k."""
    held, step = {r: top(x.double(), kept) for r, x in enumerate(inputs)}, 1
    while step < len(inputs):
        for r in range(0, len(inputs) - step, 2 * step):
            held[r] = top(held[r] + held[r + step], kept)
        step *= 2
    return held[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("family", ["gauss", "lognormal", "windows"])
def test_the_sum_is_the_paper_s_and_all_that_is_left_out_is_somebody_s(world, family):
    inputs = vectors(family, world, 5000)
    reduced = loop_back(GTopK(0.01), inputs)
    torch.testing.assert_close(reduced[0].total.double(), _paper(inputs, 50), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(reduced[0].total, r.total) for r in reduced)
    assert reduced[0].total.count_nonzero() == 50
    shares = torch.stack([r.contribution().double() for r in reduced]).sum(0)
    torch.testing.assert_close(shares, reduced[0].total.double(), rtol=1e-5, atol=1e-5)


def test_of_ranks_that_agree_it_is_the_top_k_of_the_sum():
    inputs = vectors("identical", 8, 5000)
    total = loop_back(GTopK(0.02), inputs)[0].total
    torch.testing.assert_close(total, 8 * top(inputs[0], 100))


def test_in_error_feedback_everything_arrives_in_the_end():
    codec, world = parse_codec("ef(gtopk(0.05))"), 4
    x = [torch.randn(200, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    memories = [LocalMemory(each) for each in x]
    arrived, zero = torch.zeros(200), torch.zeros(200)
    for step in range(120):
        arrived += loop_back(codec, x if step == 0 else [zero] * world, memories=memories, step=step)[0].total
    torch.testing.assert_close(arrived, torch.stack(x).sum(0), rtol=1e-4, atol=1e-4)


def test_the_tree_is_the_schedule_s():
    for world in range(1, 40):
        adding = [p.stage for p in tree(world).phases if p.stage.add.all()]
        stages = [sorted(zip(s.src.tolist(), s.dst.tolist(), strict=True)) for s in adding]
        assert [sorted(stage) for stage in merge_stages(world)] == stages


def test_simulation_carries_it_over_the_tree_and_over_nothing_else():
    (size,) = of_codec("gtopk", 10**6, tree(8))
    assert (size.kind, size.up_nbytes) == ("Merge", GTopK().nbytes(10**6)) and 5400 < size.up_nbytes < 5600
    from tacit.schedules import ring

    with pytest.raises(PairingError, match="take tree"):
        of_codec("gtopk", 10**6, ring(8))


@pytest.mark.slow
def test_all_rules():
    for text in ("gtopk(0.05) > int8",):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    assert str(Strategy.parse("gtopk > bf16")) == "every / gtopk(share=0.001) > bf16 / sharded"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gtopk(0)", "share=0: the part that is sent"),
        ("gtopk > hush", "write gtopk > int8, int4, bf16 or none"),
        ("gtopk / allreduce", "write 'gtopk(share=0.001) / sharded'"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(text)
    assert sentence in str(refused.value)


def _merges(rank, world):
    from tacit.attachments.handle import own_group
    from tacit.exchange import converse
    from tacit.requests import context_for
    from tacit.schemes import Channel, Sharded
    from tacit.stats import Stats
    from tacit.transports import Wire

    wire, x = Wire(own_group(None, None)), vectors("gauss", world, 20_000)[rank]
    context = context_for(LocalMemory(x), seed=0, step=0, bucket="loop", rank=rank, world=world)
    talk = parse_codec("gtopk(0.01) > int8").reduce(x, context)
    reduced = converse(Channel(wire, Sharded()), talk, context.own_seed, Stats(), "0")
    return reduced.total, reduced.contribution(), wire.sent_nbytes


@pytest.mark.parametrize("world", [3, 4])
def test_real_ranks_have_the_bits_of_one_process_and_send_the_tree_s_bytes(ranks, world):
    codec = parse_codec("gtopk(0.01) > int8")
    expected, found = loop_back(codec, vectors("gauss", world, 20_000)), ranks.run(world, _merges)
    chunks = tree(world).sent_chunks()
    for rank, (total, own, sent) in enumerate(found):
        assert torch.equal(total, expected[rank].total) and torch.equal(own, expected[rank].contribution())
        assert sent == chunks[rank] * codec.nbytes(20_000)
