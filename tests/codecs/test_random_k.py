"""Random-k: the same places on all ranks and none on the wire, so numbers add in any scheme and in any format."""

import pytest
import torch

from tacit.codecs import RandomK
from tacit.codecs.random_k import picked
from tacit.errors import ConfigError
from tacit.layout import Layout, Span
from tacit.requests import loop_back
from tacit.strategy import Strategy, default_scheme, parse_codec
from tacit.testing import check, vectors


def test_all_ranks_send_one_place_of_each_run_and_others_in_each_step():
    inputs = vectors("gauss", 3, 10_000)
    found = [loop_back(RandomK(0.01), inputs, step=step) for step in (0, 0, 1)]
    places = [step[0].total.nonzero().view(-1) for step in found]
    assert torch.equal(places[0], places[1]) and not torch.equal(places[0], places[2])
    assert torch.equal(places[0] // 100, torch.arange(100))  # a run has 100 elements
    for reduced, x in zip(found[0], inputs, strict=True):
        sent = reduced.contribution()
        assert torch.equal(sent.nonzero().view(-1), places[0]) and torch.equal(sent[places[0]], x[places[0]])


def test_every_element_is_as_likely_as_the_share():
    counts = torch.zeros(1000)
    for seed in range(4000):
        counts[picked(Layout.flat(1000), 0.05, seed, torch.device("cpu"))[0]] += 1
    assert (counts / 4000 - 0.05).abs().max() < 0.05 * 0.35  # 4 standard deviations of 200 +- 14
    assert counts.sum() == 4000 * 50


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_paper_s_constant_and_the_unbiased_form_s_variance(share):
    x = vectors("gauss", 1, 1000)[0]
    energy = x.square().sum()
    left, off = [], []
    for step in range(400):
        left.append((x - loop_back(RandomK(share), [x], step=step)[0].total).square().sum() / energy)
        off.append(
            (x - loop_back(RandomK(share, unbiased=True), [x], step=step)[0].total).square().sum() / energy
        )
    assert torch.stack(left).mean().item() == pytest.approx(1 - share, rel=0.02)
    assert torch.stack(off).mean().item() == pytest.approx(1 / share - 1, rel=0.05)


def test_padding_is_never_picked_and_costs_nothing():
    layout = Layout((Span("a", (10,), 5, 15, (10,)), Span("b", (10,), 90, 100, (10,))), 100)
    for seed in range(50):
        index, _ = picked(layout, 0.2, seed, torch.device("cpu"))
        assert index.numel() == 4 and all(5 <= i < 15 or 90 <= i < 100 for i in index.tolist())
    assert RandomK(0.2).nbytes_of(layout) == 16


def test_bytes_are_those_of_the_numbers_alone():
    assert RandomK(0.01).nbytes(10**6) == 40_000
    assert parse_codec("randomk(0.05) > hush").nbytes(10**6) == parse_codec("hush").nbytes(50_000)


def test_it_goes_where_its_numbers_go():
    plain, hush = parse_codec("randomk"), parse_codec("randomk(0.05) > hush")
    assert plain.traits.summable and str(default_scheme(plain)) == "allreduce"
    assert hush.traits.lanes == parse_codec("hush").traits.lanes and hush.traits.rounds == 2
    for who in ("ring", "tree", "star(at='127.0.0.1:1')", "server", "allreduce"):
        assert Strategy.parse(f"every / ef(randomk(0.05) > hush) / {who}")
    assert not parse_codec("randomk > int8").traits.summable


@pytest.mark.slow
def test_all_rules():
    for text in ("randomk(0.5, unbiased=True) > int8", "ef(randomk(0.2) > int4)"):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    assert str(parse_codec("randomk(0.1, True) > bf16")) == "randomk(share=0.1, unbiased=True) > bf16"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("randomk(0)", "share=0: the part that is sent"),
        ("randomk(2)", "share=2"),
        ("randomk(unbiased=maybe)", "unbiased=maybe: True scales what is sent"),
        ("randomk > ef(int4)", "write ef(randomk > ...)"),
        ("randomk > lowrank", "those sent are others in each step"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        parse_codec(text)
    assert sentence in str(refused.value)
