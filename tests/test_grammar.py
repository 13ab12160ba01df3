"""The grammar of `name(option=value)`: what it reads, what it refuses, and that text stays text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.errors import ConfigError
from tacit.grammar import is_call, read, split, value


@pytest.mark.parametrize(
    ("text", "name", "args", "options"),
    [
        ("ring", "ring", (), {}),
        (" ring ( ) ", "ring", (), {}),
        ("int8(512,)", "int8", ("512",), {}),
        (
            "star( nodes = 8, rate=2.5Gbit , latency=5us)",
            "star",
            (),
            {"nodes": "8", "rate": "2.5Gbit", "latency": "5us"},
        ),
        ("braid(levels='5/2, */7', strands=8)", "braid", (), {"levels": "'5/2, */7'", "strands": "8"}),
        (
            "ef(topk(0.1, chunk=64) > int8, decay=0.9)",
            "ef",
            ("topk(0.1, chunk=64) > int8",),
            {"decay": "0.9"},
        ),
        ("optical(pass=0.01dB, rate=40GB/s)", "optical", (), {"pass": "0.01dB", "rate": "40GB/s"}),
        ("f(a=[1, 2], b=(3, 4))", "f", (), {"a": "[1, 2]", "b": "(3, 4)"}),
    ],
)
def test_names_arguments_and_options_are_read_as_text(text, name, args, options):
    call = read(text, "thing")
    assert (call.name, call.args, dict(call.options)) == (name, args, options)
    assert read(str(call), "thing") == call


@pytest.mark.parametrize(
    "text",
    ["", "3", "f(", "f)", "f(a", "f(a))", "f(,)", "f(a,,b)", "f(a=)", "f(a=1, 2)", "f('a)", "f(a=[1)]", "f g",
     "f(a) b", "f" + 52 * "(" + 52 * ")"],
)  # fmt: skip
def test_what_does_not_follow_it_is_refused_with_the_way_out(text):
    with pytest.raises(ConfigError) as refused:
        read(text, "thing")
    assert str(refused.value) == f"thing {text!r} cannot be read; write name or name(option=value)"


def test_an_option_is_given_once_and_text_is_short():
    with pytest.raises(ConfigError, match="thing 'f.a=1, a=2.' gives a twice; keep one of them"):
        read("f(a=1, a=2)", "thing")
    with pytest.raises(ConfigError, match="this thing has 1,001 characters; the limit is 1,000"):
        read(1001 * "x", "thing")


def test_values_are_numbers_lists_or_words_and_nothing_runs():
    assert [value(text, "f") for text in ("3", "-0.5", "'a b'", "nearest", "None", "(1, 2)")] == [
        3, -0.5, "a b", "nearest", None, (1, 2)
    ]  # fmt: skip
    for text in ("__import__('os')", "1Gbit", "a.b", "1 +"):
        with pytest.raises(ConfigError, match="f: .* is no plain value"):
            value(text, "f")
    assert is_call("int8") and is_call("int8(2)") and not is_call("None") and not is_call("3")


@given(st.text(alphabet="ab([{)]}'\"\\,=> 1", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        call = read(text, "thing")
    except ConfigError:
        return
    assert read(str(call), "thing") == call


@given(st.text(alphabet="a(')>", max_size=20))
def test_parts_join_to_the_text(text):
    try:
        parts = split(text, ">")
    except ValueError:
        return
    assert ">".join(parts) == text
