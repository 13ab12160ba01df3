"""Fixed threshold: no element is off by more than the value, and what is sent costs what it weighs."""

import pytest
import torch

from tacit.errors import ConfigError
from tacit.requests import LocalMemory, loop_back
from tacit.shapes import requests_of
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check, vectors


def test_no_element_is_off_by_the_value_and_those_sent_are_exact():
    inputs = vectors("lognormal", 3, 10_000)
    for value in (0.5, 2.0, 8.0):
        for x, reduced in zip(inputs, loop_back(parse_codec(f"threshold({value})"), inputs), strict=True):
            left = x - reduced.contribution()
            assert left.abs().max() < value
            assert torch.equal(reduced.contribution(), torch.where(x.abs() >= value, x, 0.0))


def test_bytes_follow_the_numbers_and_the_most_is_declared():
    codec, x, seen = parse_codec("threshold(3.0)"), vectors("gauss", 1, 100_000)[0], []
    loop_back(codec, [x], observe=seen.append)
    kept = int((x.abs() >= 3).sum())
    assert 200 < kept < 340  # 0.27 % of a normal distribution
    assert seen[0].nbytes == 16 + 4 * kept + -(-(kept * (8 + 1) + (99_999 >> 8)) // 8)
    assert codec.nbytes(100_000) == requests_of(codec, 100_000, 4)[0].up_nbytes == 16 + 4 * 10**5 + 25_000


def test_with_memory_small_gradients_arrive_once_they_have_added_up():
    codec, x, memory = parse_codec("ef(threshold(1.0))"), torch.full((50,), 0.3), None
    memory = LocalMemory(x)
    totals = [loop_back(codec, [x], memories=[memory], step=step)[0].total[0].item() for step in range(8)]
    assert totals == pytest.approx([0, 0, 0, 1.2, 0, 0, 0, 1.2])


@pytest.mark.slow
def test_other_formats_and_all_rules():
    for text in ("threshold(0.1) > int8", "ef(threshold(0.5) > bf16)"):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    assert (
        str(Strategy.parse("threshold(0.5) > int8"))
        == "every / threshold(value=0.5) > int8(block=256) / sharded"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("threshold(0)", "value=0: what is sent is at least so large"),
        ("threshold(-1.0)", "value=-1.0"),
        ("threshold(1e999)", "value=inf"),
        ("threshold(int8)", "value=int8(block=256)"),
        ("threshold > hush", "write threshold > int8, int4, bf16 or none"),
        ("threshold / allreduce", "write 'threshold"),
        ("adaptive / threshold / gossip", "what two ranks swap is of one length"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(text)
    assert sentence in str(refused.value)
