"""Values that nobody means, in every place where the command takes a number: a result, or one sentence; no traceback, no hang."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tacit.cli import main
from tacit.schedules import SCHEDULES, SHAPES
from tacit.sim.fabric import OPTICAL_OPTIONS
from tacit.topology_files import _LINK_OPTIONS

HUGE = "1" + 20 * "0"
VALUES = ("nan", "inf", "-inf", "-1", "0", "1e400", "-1e400", "1e-400", HUGE, "", " ", "0x10", "1;2",
          5000 * "9", 200 * "(")  # fmt: skip
UNITS = ("", "MB", "Gbit", "GB/s", "Gbit/s", "us", "dB")
LITERALS = ("nan", "1e400", "-1", "0", "-0.5", HUGE, "''", "[]", "{}", "None", "True", "'x'", "[[[[]]]]", "b''", "...", "2**9", "(1,)",
            "'*/0'", "'*/901'", f"'{HUGE}/1 */1'", f"'{90 * '9999999/1 '}*/1'", "'*/1 */1'", "'²/1 */1'")  # fmt: skip

COST = ("sim", "cost", "ring", "--size", "1kB", "--world", "8", "--on")
STEP = ("sim", "step", "--model", "alexnet", "--on", "star", "--world", "4")
SWEEP = ("sim", "sweep", "--schedules", "ring", "--on", "star", "--out", os.devnull)
NETWORKS = {
    "star": ("nodes", "rate", "latency", *_LINK_OPTIONS),
    "one_slow_host": ("slow_rate",),
    "two_racks": ("uplink_rate",),
    "leaf_spine": ("leaves", "hosts", "spines", "oversubscription"),
    "fat_tree": ("k",),
    "torus": ("dims",),
    "ring": ("nodes",),
    "optical": OPTICAL_OPTIONS,
}
ROWS = ("sim", "rows")
OPTIONS = [
    (*COST[:5], "--on", "star", "--world"),
    ("sim", "cost", "ring", "--on", "star", "--world", "4", "--size"),
    COST,
    ("sim", "verify", "ring", "--world"),
    ("sim", "search", "--on", "optical(wavelengths=4)", "--world", "8", "--size", "1MB", "--finalists"),
    ("sim", "search", "--on", "optical(wavelengths=4)", "--world", "8", "--size"),
    ("sim", "search", "--on", "optical(wavelengths=4)", "--size", "1MB", "--world"),
    (*STEP, "--bucket"),
    (*STEP, "--encode"),
    (*STEP, "--decode"),
    (*STEP, "--slowest"),
    (*STEP, "--batch"),
    (*STEP, "--flops"),
    (*STEP, "--efficiency"),
    *(
        (*ROWS, f"--{name}")
        for name in ("world", "servers", "batch", "features", "width", "mtu", "hot", "hot-steps", "arrays")
    ),
    (*ROWS, "--rate"),
    (*ROWS, "--server-rate"),
    (*ROWS, "--popularity"),
    (*ROWS, "--codec"),
    ("sim", "models", "--batch"),
    ("sim", "models", "--flops"),
    ("sim", "models", "--efficiency"),
    (*SWEEP, "--sizes", "1kB", "--worlds"),
    (*SWEEP, "--worlds", "4", "--sizes"),
    ("demo", "--loopback", "--ranks"),
    ("demo", "--loopback", "--steps"),
    ("demo", "--rate"),
    ("lab", "clean"),
    ("lab", "shell", "h0", "--lab"),
    ("lab", "shell", "h0", "--network"),
    ("aggregate", "--slots"),
    ("aggregate", "--threads"),
]


@contextmanager
def at_most(seconds):
    """An error in whatever takes longer."""

    def stop(signum, frame):
        raise AssertionError(f"this takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def outcome(capsys, monkeypatch, tmp_path):
    """A function that runs the command: 0 and no word of trouble, or 2 and one sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TACIT_DEBUG", "1")  # what nobody foresaw is raised, and fails the test

    def run(*words):
        with at_most(60):
            try:
                code, by_argparse = main(words), False
            except SystemExit as refused:
                code, by_argparse = refused.code, True
        told = capsys.readouterr()
        if by_argparse:  # usage, and a sentence
            assert code == 2 and "error: " in told.err
            return code
        assert code in (0, 2), (words, told.err)
        if code == 2:
            assert told.out == "" and told.err.startswith("tacit: "), (words, told)
            assert len(told.err.splitlines()) == 1, (words, told.err)
        return code

    return run


@pytest.mark.parametrize("words", OPTIONS, ids=lambda words: " ".join(words[:2] + words[-1:]))
def test_a_number_that_nobody_means_gets_one_sentence(words, outcome):
    for value in VALUES:
        for unit in (
            UNITS
            if words[-1] in ("--size", "--sizes", "--bucket", "--encode", "--rate", "--server-rate")
            else ("",)
        ):
            outcome(*words, value + unit)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_with_such_a_number_gets_one_sentence(name, outcome):
    for option in NETWORKS[name]:
        units = ("", "Gbit") if "rate" in option else ("", "us", "dB") if name == "optical" else ("", "us")
        for value in VALUES:
            for unit in units:
                outcome(*COST, f"{name}({option}={value}{unit})")


@pytest.mark.parametrize("name", {**SCHEDULES, **SHAPES})
def test_a_schedule_with_such_an_option_gets_one_sentence(name, outcome):
    for option in {**SCHEDULES, **SHAPES}[name].__kwdefaults__ or {}:
        for value in LITERALS:
            for on in ("leaf_spine(hosts=4)", "optical(wavelengths=4, nodes=32)"):
                outcome(
                    "sim", "cost", f"{name}({option}={value})", "--on", on, "--world", "8", "--size", "1kB"
                )


@pytest.mark.parametrize("law", ["zipf(s={})", "zipf(rows={})", "criteo(s={})", "ngrams(rows={}, s=1)"])
def test_a_popularity_with_such_an_option_gets_one_sentence(law, outcome):
    for value in (*VALUES, *LITERALS):
        outcome(*ROWS, "--popularity", law.format(value))


TWICE = [
    (*COST, "star(rate=1Gbit, rate=2Gbit)"),
    (*COST, "optical(hop=1ns, setup=1us, hop=2ns)"),
    (*COST, "star(mtu=1500, mtu=9000)"),
    ("sim", "cost", "wrht(group=3, group=5)", *COST[3:], "optical"),
    (*COST, "star", "--codec", "ef(topk(ratio=0.1, ratio=0.2))"),
]


@pytest.mark.parametrize("words", TWICE, ids=lambda words: words[-1])
def test_an_option_that_is_given_twice_is_refused(words, capsys):
    assert main(words) == 2
    assert "twice; keep one of them" in capsys.readouterr().err


def test_so_is_an_option_of_the_command(capsys):
    for words in (("--world", "16"), ("--size=2kB",), ("--on", "optical")):
        with pytest.raises(SystemExit):
            main([*COST, "star", *words])
        assert f"{words[0].partition('=')[0]} is given twice; keep one of them" in capsys.readouterr().err
    assert main([*SWEEP, "--on", "ring", "--worlds", "4", "--sizes", "1kB"]) == 0  # that one may be repeated


@pytest.mark.parametrize(
    "text",
    [
        100_000 * "x",
        300 * "ef(" + "int8" + 300 * ")",
        90 * "ef(" + "int8" + 90 * ")",
        900 * "-" + "1",
        "int8(block=" + 900 * "-" + "1)",
        "int8(block=" + 900 * "[" + ")",
        "int8(" + ", ".join(f"o{i}=1" for i in range(100_000)) + ")",
        "every / " * 50_000 + "int8",
        "\0",
        "int8(**{})",
        "int8(block={[]: 1})",
    ],
    ids=lambda text: f"{text[:20]!r} of {len(text)}",
)
def test_a_strategy_that_no_parser_should_read_gets_one_sentence(text, outcome):
    from tacit.errors import ConfigError
    from tacit.strategy import Strategy

    with pytest.raises(ConfigError):
        Strategy.parse(text)
    assert outcome(*COST, "star", "--codec", text) == 2
    assert outcome("sim", "cost", text, *COST[3:], "star") == 2
    assert outcome(*COST, text) == 2


def test_a_fat_tree_that_does_not_fit_is_refused_before_it_is_built(capsys):
    assert main([*COST, "fat_tree(k=1500)"]) == 2
    assert "843,750,000 hosts" in capsys.readouterr().err


@pytest.mark.parametrize("slots", ["-1", "0", "65537", HUGE])
def test_slots_that_no_plane_has_are_refused(slots, capsys):
    assert main(["aggregate", "--slots", slots, "--listen", "127.0.0.1:0"]) == 2
    assert capsys.readouterr().err.startswith(f"tacit: --slots {slots}: a plane has 1 to ")


# ---- the last resort ----


def test_what_nobody_foresaw_is_one_sentence_and_exit_code_1(capsys, monkeypatch):
    def broken(args):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("tacit.cli.sim.run", broken)
    monkeypatch.delenv("TACIT_DEBUG", raising=False)
    assert main(["sim", "schedules"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("tacit: RuntimeError: two lines; this is a bug in tacit: ")
    assert "TACIT_DEBUG=1" in told and told.count("\n") == 1
    monkeypatch.setenv("TACIT_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["sim", "schedules"])


def test_a_reader_that_goes_away_ends_the_command_quietly():
    for words, codes in ((("--json",), {141}), ((), {1, 141})):  # rich ends a table with exit code 1
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "tacit", "sim", "models", *words]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert ended.returncode in codes and ended.stderr == ""
