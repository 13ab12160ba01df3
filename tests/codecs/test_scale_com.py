"""ScaleCom: one rank's places for all, another rank's in each step, and numbers that add."""

import pytest
import torch

from tacit.codecs import ScaleCom
from tacit.errors import ConfigError
from tacit.requests import LocalMemory, Max, Sum, loop_back
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check, vectors


def test_the_leader_s_largest_are_what_all_send_and_the_leader_changes():
    inputs = vectors("gauss", 3, 10_000)
    for step in range(4):
        reduced = loop_back(ScaleCom(0.01), inputs, step=step)
        places = inputs[step % 3].abs().topk(100).indices.sort().values
        for r, x in zip(reduced, inputs, strict=True):
            assert torch.equal(r.contribution().nonzero().view(-1), places)
            assert torch.equal(r.contribution()[places], x[places])
        torch.testing.assert_close(reduced[0].total[places], torch.stack(inputs).sum(0)[places])


def test_what_arrives_does_not_build_up_with_the_world():
    for world in (2, 8):
        inputs = vectors("gauss", world, 10_000)
        built_up = loop_back(parse_codec("topk(0.01, chunk=bucket) > none"), inputs)[0].total.count_nonzero()
        assert loop_back(ScaleCom(0.01), inputs)[0].total.count_nonzero() == 100
        assert built_up > 0.9 * 100 * world


def test_of_ranks_that_agree_it_contracts_as_top_k_does():
    """The paper's lemma: where memories are alike, the leader's top-k is nearly everybody's."""
    x = vectors("gauss", 1, 10_000)[0]
    rng = torch.Generator().manual_seed(1)
    alike = [x + 0.1 * torch.randn(10_000, generator=rng) for _ in range(4)]
    mean = torch.stack(alike).mean(0)
    best = mean.clone()
    best[mean.abs().topk(500).indices] = 0
    left = mean - loop_back(ScaleCom(0.05), alike, step=3)[0].total / 4
    assert left.square().sum() < 1.02 * best.square().sum() < 0.75 * mean.square().sum()


def test_two_requests_of_a_place_and_a_number_each():
    asked = []
    loop_back(ScaleCom(0.01), vectors("gauss", 2, 10_000), observe=asked.append)
    assert [type(request) for request in asked] == [Max, Sum]
    assert asked[1].nbytes == 400
    assert asked[0].nbytes == -(-(100 * (6 + 1) + (9999 >> 6)) // 8) == 107  # 8.6 bits a place


@pytest.mark.slow
def test_it_goes_where_its_numbers_go_and_keeps_all_rules():
    for text in ("ef(scalecom(0.05) > hush)",):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    for who in ("ring", "tree", "star(at='127.0.0.1:1')"):
        assert Strategy.parse(f"every / ef(scalecom(0.05) > hush) / {who}")
    assert str(parse_codec("scalecom > bf16")) == "scalecom(share=0.01) > bf16"


def test_a_nan_that_the_leader_does_not_see_reaches_all_and_is_forgotten():
    codec, inputs = parse_codec("ef(scalecom(0.01))"), vectors("gauss", 2, 1000)
    memories = [LocalMemory(x) for x in inputs]
    inputs[1][500] = torch.nan  # rank 0 leads in step 0
    reduced = loop_back(codec, inputs, memories=memories)
    assert all(r.total.isnan()[500] for r in reduced)
    assert all(m.vector("residual").isfinite().all() for m in memories)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("scalecom(0)", "share=0: the part that is sent"),
        ("scalecom > ef(int8)", "write ef(scalecom > ...)"),
        ("scalecom(block=3)", "does not fit its options"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        parse_codec(text)
    assert sentence in str(refused.value)
