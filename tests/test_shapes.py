"""Shapes only: the bytes that a codec declares, and those that the loop-back sees."""

import pytest
import torch

from tacit.codecs import CODECS
from tacit.errors import ConfigError, PairingError
from tacit.requests import STEADY_STEP, Max, Payload, Reduced, Sum, Traits, loop_back
from tacit.shapes import requests_of
from tacit.strategy import parse_codec

_WITHIN = {"ef": "(int4)", "ef21": "(sign)", "by_shape": "(topk, int8)", "exact": "(int4, until=3)"}
TEXTS = [name + _WITHIN.get(name, "") for name in CODECS] + [
    "thc(bits=2)",
    "int8(block=512)",
    "ef(hush)",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("numel", [0, 1, 1000, 70_001])
@pytest.mark.parametrize("world", [1, 4, 20])
def test_bytes_are_those_declared_and_those_the_loop_back_sees(text, numel, world):
    codec = parse_codec(text)
    seen = []
    loop_back(
        codec,
        [torch.ones(numel)] * world,
        step=STEADY_STEP,
        observe=lambda r: seen.append((type(r).__name__, r.nbytes)),
    )
    asked = requests_of(codec, numel, world)
    assert [(a.kind, a.up_nbytes) for a in asked] == seen
    assert sum(a.up_nbytes for a in asked) == codec.nbytes(numel)


@pytest.mark.parametrize("text", ["none", "bf16", "int8", "hush", "ef(int4)"])
def test_a_hundred_million_elements_take_no_memory(text):
    asked = requests_of(parse_codec(text), 10**8, 4)
    assert sum(a.up_nbytes for a in asked) == parse_codec(text).nbytes(10**8)
    assert {a.on for a in asked} == {"meta"}


def test_lanes_come_back_wider_when_there_are_more_ranks():
    few, many = requests_of(parse_codec("hush"), 4096, 4)[-1], requests_of(parse_codec("hush"), 4096, 20)[-1]
    assert (few.up_nbytes, few.down_nbytes) == (2048, 4096)
    assert (many.up_nbytes, many.down_nbytes) == (2048, 8192)


class Peeking:
    """A codec that looks at a value: shapes alone do not do."""

    traits = Traits(rounds=2, summable=True)

    def reduce(self, x, context):
        largest = yield Max(x.abs().max().reshape(1))
        payload = Payload.dense(x / (largest.item() or 1.0))
        total = yield Sum(payload)
        return Reduced(total.value)

    def nbytes(self, numel):
        return 4 + 4 * numel


def test_a_codec_that_looks_at_values_is_driven_with_zeros_and_says_so():
    asked = requests_of(Peeking(), 100, 3)
    assert [(a.kind, a.up_nbytes, a.down_nbytes, a.on) for a in asked] == [
        ("Max", 4, 4, "cpu"),
        ("Sum", 400, 400, "cpu"),
    ]


def test_what_cannot_be_asked_gets_one_sentence():
    with pytest.raises(ConfigError, match="-1 elements among 4 ranks"):
        requests_of(parse_codec("none"), -1, 4)
    with pytest.raises(PairingError, match="16-bit lanes hold the sum of at most"):
        requests_of(parse_codec("hush"), 100, 100_000)
