from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.codecs import CODECS, ErrorFeedback, Int4, Int8, register
from tacit.errors import ConfigError
from tacit.rounds import EveryStep
from tacit.schemes import AllReduce, Sharded
from tacit.strategy import Strategy

TEXTS = {
    "none": "every / none / allreduce",
    "int8": "every / int8(block=256) / sharded",
    "bf16 / sharded": "every / bf16 / sharded",
    "every / fp16": "every / fp16 / allreduce",
    " every/int4( block = 32 )/sharded ": "every / int4(block=32) / sharded",
    "int8(512)": "every / int8(block=512) / sharded",
    "ef(int4(block=64, rounding=nearest))": "every / ef(int4(block=64, rounding=nearest)) / sharded",
    "ef(bf16)": "every / ef(bf16) / sharded",
    "hush": "every / hush / sharded",
    "thc / allreduce": "every / thc(bits=4, granularity=30) / allreduce",
    "thc(block=1024) / server(rank=2)": "every / thc(bits=4, granularity=30, block=1024) / server(rank=2)",
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_form_is_filled_in_and_reads_back(text):
    strategy = Strategy.parse(text)
    assert str(strategy) == TEXTS[text]
    assert Strategy.parse(str(strategy)) == strategy
    assert Strategy.parse(strategy) is strategy


def test_objects_and_text_are_the_same():
    assert Strategy(EveryStep(), ErrorFeedback(Int4(block=64)), Sharded()) == Strategy.parse("ef(int4)")
    assert Strategy(EveryStep(), CODECS["bf16"](), AllReduce()) == Strategy.parse("bf16")
    assert Int8() != Int4() and hash(Int8()) == hash(Int8(block=256))


@given(
    st.integers(1, 2**19).map(lambda k: 2 * k),
    st.sampled_from(["stochastic", "nearest"]),
    st.sampled_from([4, 8]),
)
def test_every_option_reads_back(block, rounding, bits):
    codec = (Int8 if bits == 8 else Int4)(block=block, rounding=rounding)
    assert Strategy.parse(str(codec)).what == codec


@given(st.text(max_size=40))
def test_no_text_causes_anything_but_a_config_error(text):
    with suppress(ConfigError):
        Strategy.parse(text)


def test_a_registered_codec_can_be_written_by_name():
    class Own(Int8):
        def __str__(self):
            return "own"

    register("own_for_this_test", Own)
    assert isinstance(Strategy.parse("own_for_this_test").what, Own)
    with pytest.raises(ConfigError, match="is taken"):
        register("int8", Own)
    with pytest.raises(ConfigError, match="no plain word"):
        register("two words", Own)
    del CODECS["own_for_this_test"]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("adaptive", "adaptive(0.06) / hush / gossip"),
        ("adaptive / topk(share=0.0625)", "adaptive(0.005) / topk(share=0.0625, bits=2, chunk=4096) / gossip"),
        ("adaptive(by=model) / none", "adaptive(0.06, by=model) / none / gossip"),
        ("adaptive(0.3) / hush", "adaptive(0.3) / hush / gossip"),
        ("sparseloco(20)", "sparseloco(20, rate=1) / ef(topk(share=0.015625, bits=2, chunk=4096), decay=0.95) / sharded"),
    ],
)  # fmt: skip
def test_a_rule_has_a_codec_and_the_codec_a_threshold(text: str, whole: str) -> None:
    strategy = Strategy.parse(text)
    assert str(strategy) == whole
    assert Strategy.parse(whole) == strategy
