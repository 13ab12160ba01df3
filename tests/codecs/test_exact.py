"""Exact steps: at first, ever more rarely, and what the inner codec remembers meanwhile."""

import pytest
import torch

from tacit.codecs import ErrorFeedback, Exact, Sign
from tacit.errors import ConfigError
from tacit.requests import STEADY_STEP, LocalMemory, loop_back
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check


def _steps(codec, count):
    return [step for step in range(count) if codec.exact_at(step)]


def test_they_come_at_first_or_ever_more_rarely():
    inner = ErrorFeedback(Sign())
    assert _steps(Exact(inner, until=3), 50) == [0, 1, 2]
    assert _steps(Exact(inner, doubling=3), 50) == [0, 1, 2, 3, 5, 7, 9, 13, 17, 21, 29, 37, 45]
    assert _steps(Exact(inner, until=5, doubling=1), 50) == [0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 36]
    found, place = [], 0  # the paper's rule, k_{j+1} = k_j + 2^floor(j / 16)
    for j in range(80):
        found.append(place)
        place += 2 ** (j // 16)
    assert _steps(Exact(inner, doubling=16), place) == found
    assert not Exact(inner, doubling=1).exact_at(STEADY_STEP)


def test_exact_steps_send_float32_and_the_memory_waits():
    codec, x, seen = Exact(ErrorFeedback(Sign()), until=1), torch.randn(1024), []
    memory = LocalMemory(x)
    memory.vector("residual").fill_(7.0)
    first = loop_back(codec, [x], memories=[memory], step=0, observe=lambda r: seen.append(r.nbytes))
    assert torch.equal(first[0].total, x) and bool((memory.vector("residual") == 7).all())
    second = loop_back(codec, [x], memories=[memory], step=1, observe=lambda r: seen.append(r.nbytes))
    torch.testing.assert_close(second[0].total + memory.vector("residual"), x + 7)
    assert seen == [4096, 4 + 128] and codec.nbytes(1024) == 132


def test_all_rules():
    for text in ("exact(ef(sign), until=2)", "exact(lowrank(2), doubling=4)"):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    text = "every / exact(ef(sign(block=1024)), until=10, doubling=16) / sharded"
    assert str(Strategy.parse("exact(ef(sign), 10, 16)")) == text == str(Strategy.parse(text))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("exact(ef(sign))", "has no exact step; say which, with until=1000 or doubling=16"),
        ("exact(3, until=1)", "an inner codec is needed"),
        ("exact(int8, until=-1)", "until=-1: a number of steps"),
        ("exact(int8, doubling=0.5)", "doubling=0.5: a number of steps"),
        ("exact(dgc, until=10)", "has a beginning of its own"),
        ("exact(exact(int8, until=1), until=2)", "has a beginning of its own"),
        ("exact(ef(sign), until=1) / ring", "cannot be added in flight"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(text)
    assert sentence in str(refused.value)
