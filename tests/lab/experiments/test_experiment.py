"""Experiment files: what they say, and one sentence about what they say wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tacit.errors import ConfigError, TacitError
from tacit.lab.experiments import jobs
from tacit.lab.experiments.experiment import LaunchOptions, read
from tacit.lab.experiments.jobs.limits import Limits, figures, in_row_of, limit_s, repeats_of
from tacit.lab.network.counters import Traffic, parse

ROOT = Path(__file__).parents[3]


def test_the_experiment_of_limits_is_what_the_issue_asks_for() -> None:
    found = read(ROOT / "experiments" / "limits.toml")
    assert found.name == "limits" and found.ranks == 4 and found.run.realtime
    (job,) = found.jobs
    assert job.rates_bps == (100e6, 200e6, 500e6)
    assert job.spec == Limits(sizes_nbytes=(10**6, 10**7, 5 * 10**7), repeats=5)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return path


def test_a_network_may_be_tables_or_a_file_beside_the_experiment(tmp_path: Path) -> None:
    hosts = '[[network.host]]\nname = "a"\n[[network.host]]\nname = "b"\n'
    link = '[[network.link]]\na = "a"\nb = "b"\nrate = "1Gbit"\n[job]\nkind = "limits"\n'
    assert read(write(tmp_path, hosts + link)).network.hosts == ("a", "b")
    (tmp_path / "net.toml").write_text('network = "ring(nodes=3, rate=1Gbit)"')
    assert len(read(write(tmp_path, 'network = "net.toml"\n[job]\nkind = "limits"')).network.hosts) == 3


def test_jobs_of_one_kind_are_numbered_and_run_has_defaults(tmp_path: Path) -> None:
    text = 'network = "star(nodes=2, rate=1Gbit)"\n' + '[[job]]\nkind = "limits"\n' * 2
    found = read(write(tmp_path, text))
    assert [job.name for job in found.jobs] == ["limits 1", "limits 2"]
    assert found.run == LaunchOptions(1, 1800.0, False)


STAR = 'network = "star(nodes=2, rate=1Gbit)"\n'
JOB = '[[job]]\nkind = "limits"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("network = [", "is not TOML"),
        (JOB, "has no network"),
        (STAR, "has no job"),
        ('network = "star(nodes=2, rate=100)"\n' + JOB, "rate '100' has no unit"),
        ('network = "stra(nodes=2)"\n' + JOB, "did you mean 'star'"),
        ("network = 3\n" + JOB, "network = 3 is no text"),
        (STAR + "speed = 1\n" + JOB, "unknown key 'speed'"),
        (STAR + "[run]\nranks = 2\n" + JOB, "unknown key 'ranks'; known are ranks_per_host"),
        (STAR + "[run]\nranks_per_host = 0\n" + JOB, "ranks_per_host = 0"),
        (STAR + '[run]\nlimit = "5"\n' + JOB, "limit: time '5' has no unit"),
        (STAR + '[run]\nrealtime = "yes"\n' + JOB, "realtime = 'yes'"),
        (STAR + '[[job]]\nkind = "limit"\n', "did you mean 'limits'"),
        (STAR + "[[job]]\nsizes = []\n", "it has no kind"),
        (STAR + JOB + "rates = [100]\n", "rate 100 has no unit"),
        (STAR + JOB + 'rates = "100Mbit"\n', "is no list"),
        (STAR + JOB + 'rates = ["0Mbit"]\n', "rate is 0"),
        (STAR + "[aggregator]\nslots = 4\n" + JOB, "does not say where it is"),
        (STAR + '[aggregator]\nat = "nowhere"\n' + JOB, "at = 'nowhere' is no node"),
        (STAR + '[aggregator]\nat = "h0"\n' + JOB, "where rank 0 runs"),
        (STAR + '[aggregator]\nat = "switch"\nplane = "tofino"\n' + JOB, "plane = 'tofino'"),
        (STAR + '[aggregator]\nat = "switch"\nslots = 1\n' + JOB, "slots = 1"),
        (STAR + "job = 5\n", "has no job"),
        (STAR + '[[job]]\nkind = ["limits"]\n', "kind = ['limits'] is no text"),
        (STAR + JOB + 'sizes = ["1"]\n', "size '1' has no unit"),
        (STAR + JOB + "sizes = []\n", "sizes = []; name one or more"),
        (STAR + JOB + 'sizes = ["3B"]\n', "multiple of 4 bytes"),
        (STAR + JOB + "repeats = 0\n", "repeats = 0"),
        (STAR + JOB + "size = 1\n", "unknown key 'size'"),
        (STAR + JOB + "rate = ['1Gbit']\n", "unknown key 'rate'; did you mean 'rates'?"),
        (STAR + (JOB + 'name = "x"\n') * 2, "two jobs are called 'x'"),
        ('[network]\n[[network.link]]\na = "a"\nb = "c"\nrate = "1Gbit"\n[[network.host]]\nname = "a"\n' + JOB, "names 'c'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    message = str(caught.value)
    assert said in message and str(path) in message
    assert "\n" not in message or "is not TOML" in message


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened: No such file"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_every_kind_reads_its_order_without_torch_and_again_from_its_table(kind: str) -> None:
    table: dict[str, Any] = {
        "replay": {"workload": "vgg16"},
        "train": {"task": "digits"},
        "rounds": {"task": "digits", "strategies": ["local(4) / none"]},
        "accuracy": {"task": "digits", "strategies": ["int8"]},
    }.get(kind, {})
    spec = jobs.KINDS[kind].read(table | {"job": "j"}, "here")
    assert jobs.KINDS[kind].read(spec.as_table(), "here") == spec


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(TacitError, match="known are limits"):
        jobs.kind_named("nothing", "here")


def test_limits_compares_time_with_the_rate_and_bytes_with_the_count() -> None:
    assert limit_s(10**6, 4, 1e8) == pytest.approx(0.12)
    sent = [Traffic(0, 0, 5 * 1_500_000 + 5 * 200 * 66, 5 * 200)] * 4
    found = figures(10**6, 4, 1e8, [0.125, 0.126, 0.127, 0.126, 0.3], sent, 1448 / 1514)
    assert found["measured_s"] == 0.126 and found["ratio"] == pytest.approx(1.05)
    assert found["ratio_with_headers"] == pytest.approx(1.05 * 1448 / 1514)
    assert found["counted_nbytes"] == 1_500_000 and found["headers_nbytes"] == 13_200
    assert found["bytes_ratio"] == pytest.approx(1.0) and found["passed"] is True
    assert figures(10**6, 4, 1e8, [0.133], sent, 1448 / 1514)["passed"] is False
    more = [Traffic(0, 0, 1_600_000, 200)] * 4
    assert figures(10**6, 4, 1e8, [0.126], more, 1448 / 1514)["passed"] is False


def test_short_all_reduces_are_timed_more_often() -> None:
    assert repeats_of(50_000_000, 5, 1e8) == 5
    assert repeats_of(1_000_000, 5, 1e8) == 25
    assert repeats_of(1_000_000, 5, 1e10) == 40
    assert repeats_of(1_000_000, 5, None) == 5
    assert in_row_of(1_000_000, 4, 5e8) == 5  # 24 ms each
    assert in_row_of(1_000_000, 4, 1e8) == in_row_of(1_000_000, 4, None) == in_row_of(1_000_000, 1, 1e8) == 1


def test_limits_on_loopback_claims_nothing() -> None:
    found = figures(10**6, 4, None, [0.002], [], 1.0)
    assert found["theory_s"] is None and found["ratio"] is None and found["passed"] is None


def test_an_interface_is_read_from_the_kernels_table() -> None:
    text = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed\n"
        "    lo:       1       2    0    0    0     0          0         0        1       2    0    0    0     0       0          0\n"
        "  eth0: 9000000      30    0    0    0     0          0         0 12345678      40    0    0    0     0       0          0\n"
    )
    assert parse(text, "eth0") == Traffic(9_000_000, 30, 12_345_678, 40)
    assert parse(text, "eth0").since(Traffic(0, 10, 45_678, 1)) == Traffic(9_000_000, 20, 12_300_000, 39)
