"""What Prometheus gets: well-formed text whose figures are the plane's own, whoever else asks and however slowly."""

import json
import re
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from aggregator.members import HERE, SECRET, aggregator, joined, some_terms, until
from aggregator.statuses import some_job_status, some_stats, some_status

from tacit.aggregator.client.membership import Membership
from tacit.aggregator.control.metrics import HELP, MOST_READERS, MOST_REQUEST, render
from tacit.aggregator.planes.stats import RankStats
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import EVENTS, VERDICTS
from tacit.errors import ConfigError

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (-?[0-9.]+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels. Every line must be in the format, every family told once, with its help and type, before its samples."""
    found: dict[tuple[str, ...], float] = {}
    told: list[str] = []
    assert text.endswith("\n")
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("#"):
            help, type = line.split(" ", 3), next(lines).split(" ")
            assert help[:2] == ["#", "HELP"] and type[:2] == ["#", "TYPE"] and help[2] == type[2]
            assert type[3] == ("counter" if help[2].endswith("_total") else "gauge")
            told.append(help[2])
            continue
        match = SAMPLE.fullmatch(line)
        assert match and match[1] == told[-1], line
        key = (
            match[1].removeprefix("tacit_aggregator_"),
            *(f"{k}={v}" for k, v in LABEL.findall(match[2] or "")),
        )
        assert key not in found, line
        found[key] = float(match[3])
    assert told == [f"tacit_aggregator_{name}" for name in HELP]
    return found


def ask(address: Address, request: str) -> tuple[str, str]:
    """Status line and body."""
    with socket.create_connection(address, 30) as connection:
        connection.sendall(request.encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert f"Content-Length: {len(body.encode())}\r\n" in head
    return head.splitlines()[0], body


def get(address: Address, path: str) -> tuple[str, str]:
    return ask(address, f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n")


def test_metrics_are_the_figures_of_the_plane() -> None:
    with aggregator(metrics=HERE) as control, joined(control.address, some_terms("run 7")) as ranks:
        for chunk in range(3):
            ranks[0].send(chunk)
            ranks[1].send(chunk)
        ranks[2].send(0)
        ranks[0].socket.sendto(b"?", ranks[0].membership.plane)
        until(
            lambda: (c := control.status().counts)["completed"] == 1 and c["short"] == 1 and c["added"] == 4
        )
        with pytest.raises(ConfigError):
            Membership(control.address, "wrong", some_terms(), 0, 4000)
        status, body = get(control.metrics_address, "/metrics")
        found = parse(body)
        stats = control.plane.stats(ranks[0].job.id)
    assert status == "HTTP/1.1 200 OK"
    own = ("job=run 7", "id=0")
    assert found["packets_total", "verdict=wrote"] == found["job_packets_total", *own, "verdict=wrote"] == 3
    assert found["packets_total", "verdict=added"] == found["job_packets_total", *own, "verdict=added"] == 4
    assert found["dropped_packets_total", "reason=short"] == 1
    assert found["job_dropped_packets_total", *own, "reason=short"] == 0
    assert found["completed_chunks_total",] == found["job_completed_chunks_total", *own] == 1
    assert found["job_received_bytes_total", *own] == stats.received_nbytes == 7 * (22 + 160)
    assert found["job_sent_bytes_total", *own] == stats.answered_nbytes == 3 * (22 + 160)
    assert found["job_unfinished_chunks", *own] == 2
    assert [found["rank_missing_chunks", *own, f"rank={rank}"] for rank in range(3)] == [0, 0, 2]
    assert [found["rank_packets_total", *own, f"rank={rank}"] for rank in range(3)] == [3, 3, 1]
    assert all(0 <= found["rank_last_packet_age_seconds", *own, f"rank={rank}"] < 60 for rank in range(3))
    assert found["slots", "state=used"] == 8 and found["slots", "state=free"] == 24
    assert found["jobs", "state=running"] == 1 and found["jobs", "state=gathering"] == 0
    assert found["refused_admissions_total", "reason=secret"] == 1
    assert found["refused_admissions_total", "reason=full"] == 0
    assert found["socket_losses_total", "reason=overrun"] == 0
    assert found["socket_buffer_bytes", "buffer=receive_buffer"] > 0
    names = {key[1].split("=")[1] for key in found if key[0] in ("packets_total", "dropped_packets_total")}
    assert names == set(VERDICTS) and len(EVENTS) == 4


def test_a_lossy_job_has_figures_of_its_own() -> None:
    ranks = (RankStats(9, 0.1, 0), RankStats(9, 0.1, 0, left_out=7))
    stats = some_stats(ranks=ranks, completed=10, partial=7)
    found = parse(render(some_status(some_job_status(stats, world=2, deadline_ms=20))))
    assert found["job_partial_chunks_total", "job=x", "id=5"] == 7
    assert found["rank_left_out_chunks_total", "job=x", "id=5", "rank=1"] == 7
    exact = parse(render(some_status(some_job_status(stats, world=2))))
    assert not [key for key in exact if key[0] == "job_partial_chunks_total"]


def test_any_name_of_a_job_stays_inside_its_label() -> None:
    stats = some_stats(ranks=(RankStats(1, None, 0),))
    nasty = some_job_status(stats, name='a"b\\c{d}, e="f"', world=1)
    found = parse(render(some_status(nasty)))
    assert found["job_slots", r"job=a\"b\\c{d}, e=\"f\"", "id=5"] == 8
    assert not [key for key in found if key[0] == "rank_last_packet_age_seconds"]  # it never sent


def test_two_jobs_of_one_name_that_gather_do_not_make_the_text_invalid() -> None:
    gathering = some_job_status(None)
    found = parse(render(some_status(gathering, replace(gathering, world=4))))
    assert found["jobs", "state=gathering"] == 2 and found["job_slots", "job=x", "id="] == 8


def test_health_tells_who_it_is() -> None:
    with aggregator(metrics=HERE) as control, joined(control.address, some_terms()):
        status, body = get(control.metrics_address, "/health")
    told = json.loads(body)
    assert status == "HTTP/1.1 200 OK"
    assert told == {"status": "ok", "version": told["version"], "plane": "user", "jobs": 1}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        ("GET /secrets HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET\r\n\r\n", "404 Not Found"),
        ("\x00\xff\r\n\r\n", "405 Method Not Allowed"),
        ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", "200 OK"),
    ],
)
def test_other_questions_get_short_answers(request_: str, expected: str) -> None:
    with aggregator(metrics=HERE) as control:
        assert ask(control.metrics_address, request_)[0] == f"HTTP/1.1 {expected}"


def test_endless_questions_and_slow_askers_are_cut_off_and_control_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tacit.aggregator.control.metrics.REQUEST_S", 1.0)
    with aggregator(metrics=HERE) as control, ExitStack() as opened:
        slow = [
            opened.enter_context(socket.create_connection(control.metrics_address))
            for _ in range(MOST_READERS)
        ]
        for connection in slow:
            connection.settimeout(30)
            connection.sendall(b"GET /met")
        with joined(control.address, some_terms()) as ranks:  # while they dawdle
            assert ranks[0].membership.alive
        for connection in slow:
            assert connection.recv(10) == b""
        endless = opened.enter_context(socket.create_connection(control.metrics_address, 30))
        with suppress(ConnectionError):
            for _ in range(1000):
                endless.sendall(b"x" * MOST_REQUEST)
            raise AssertionError("8 MB of a question were taken")
        assert get(control.metrics_address, "/health")[0] == "HTTP/1.1 200 OK"


@pytest.mark.parametrize("how", ["say nothing", "ask byte by byte", "read nothing"])
def test_many_slow_readers_keep_nobody_from_health_and_metrics(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # they are not cut off for being slow
    monkeypatch.setattr("tacit.aggregator.control.metrics.REQUEST_S", 60.0)
    with aggregator(metrics=HERE) as control, ExitStack() as opened:
        for _ in range(MOST_READERS + 32):
            slow = opened.enter_context(socket.create_connection(control.metrics_address))
            if how != "say nothing":
                slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" if how == "read nothing" else b"G")
        for _ in range(5):
            assert get(control.metrics_address, "/health")[0] == "HTTP/1.1 200 OK"
            assert get(control.metrics_address, "/metrics")[0] == "HTTP/1.1 200 OK"


def test_control_characters_stay_out_of_labels() -> None:
    job = some_job_status(None, name="a\x1b[2J\r\u202e\ud800\nb")
    text = render(some_status(job))
    assert all(line.isprintable() for line in text.split("\n"))
    assert ("job_slots", r"job=a\\x1b[2J\\r\\u202e\\ud800 b", "id=") in parse(text)


def test_metrics_hold_no_secrets() -> None:
    with aggregator(metrics=HERE) as control, joined(control.address, some_terms()) as ranks:
        body = get(control.metrics_address, "/metrics")[1]
        assert SECRET not in body and str(ranks[0].job.cookie) not in body
