"""An aggregator's figures for Prometheus (text format 0.0.4) at /metrics, and at /health whether it is well."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator

from tacit.aggregator.control.status import EVENTS, TAKEN, AggregatorStatus, JobStatus
from tacit.errors import one_line
from tacit.keyed_server import NewestTasks

MOST_READERS = (
    128  # at a time; one more, and the oldest is cut off. More than asyncio accepts at a time (101)
)
MOST_REQUEST = 1 << 13  # bytes
REQUEST_S = 5.0  # from the connection to the last byte of the answer

HELP = {  # every metric; those that end in _total are counters, the others gauges
    "info": "Version and plane, always 1.",
    "uptime_seconds": "Time since the start.",
    "jobs": "Jobs that run, and that wait for their ranks.",
    "slots": "Memory, used by jobs and free.",
    "share_slots": "Memory that a job gets at most.",
    "packets_total": "Packets that did what they came for, by verdict.",
    "dropped_packets_total": "Packets that were dropped, by reason.",
    "completed_chunks_total": "Chunks whose sum went to all ranks.",
    "saturated_packets_total": "Packets with a lane that met its limit.",
    "abandoned_chunks_total": "Unfinished sums that made way for later chunks.",
    "socket_losses_total": "What sockets could not do; overrun: packets that found the receive buffer full.",
    "socket_buffer_bytes": "Buffers that the kernel granted.",
    "admitted_jobs_total": "Jobs that began to run.",
    "refused_admissions_total": "Admissions that were refused, by reason.",
    "lost_ranks_total": "Ranks that vanished from running jobs.",
    "lost_notices_total": "Sentences that the log did not take.",
    "job_ranks": "Ranks of a job.",
    "job_shards": "Members of a job behind its ranks, which are in no sum.",
    "job_absent_ranks": "Ranks and shards that have not joined yet, or were lost.",
    "job_slots": "Memory of a job.",
    "job_packets_total": "A job's packets that did what they came for, by verdict.",
    "job_dropped_packets_total": "A job's packets that were dropped, by reason.",
    "job_completed_chunks_total": "A job's chunks whose sum went to all ranks.",
    "partial_chunks_total": "Chunks of lossy jobs that were closed without some rank.",
    "job_partial_chunks_total": "A lossy job's chunks that were closed without some rank.",
    "job_unfinished_chunks": "Chunks that wait for somebody.",
    "job_received_bytes_total": "Headers and payloads from a job's ranks.",
    "job_sent_bytes_total": "Headers and payloads to a job's ranks.",
    "rank_packets_total": "Packets from a rank, or from a shard; shards follow the ranks.",
    "rank_last_packet_age_seconds": "Time since a rank's last packet; absent before its first.",
    "rank_missing_chunks": "Unfinished chunks that wait for a rank.",
    "rank_left_out_chunks_total": "Chunks that a lossy job closed without a rank.",
}

EVENT_NAMES = {
    "completed": "completed_chunks_total",
    "saturated": "saturated_packets_total",
    "abandoned": "abandoned_chunks_total",
    "partial": "partial_chunks_total",
}

Labels = dict[str, object]
Sample = tuple[str, Labels, float]


async def serve_metrics(listening: socket.socket, read: Callable[[], AggregatorStatus]) -> asyncio.Server:
    """Answers GET, one question a connection, until closed. Who is slow is cut off; so is the oldest where there are many."""
    readers = NewestTasks(MOST_READERS)

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        readers.add(task)
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(respond(head, read))
                writer.write_eof()
                await writer.drain()
                await reader.read(1)  # until it has read all and hangs up
        except (
            OSError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            pass
        finally:
            readers.discard(task)
            writer.transport.abort()

    return await asyncio.start_server(attend, sock=listening, limit=MOST_REQUEST)


def respond(head: bytes, read: Callable[[], AggregatorStatus]) -> bytes:
    """The whole answer to a request."""
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method != "GET":
        return _response("405 Method Not Allowed", "only GET is answered\n", more="Allow: GET\r\n")
    if path == "/metrics":
        return _response("200 OK", render(read()), kind="text/plain; version=0.0.4; charset=utf-8")
    if path == "/health":
        now = read()
        running = sum(job.id is not None for job in now.jobs)
        health = {"status": "ok", "version": now.version, "plane": now.plane, "jobs": running}
        return _response("200 OK", json.dumps(health) + "\n", kind="application/json")
    return _response("404 Not Found", "there are /metrics and /health\n")


def _response(status: str, text: str, kind: str = "text/plain; charset=utf-8", more: str = "") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    return head.encode() + body


def render(now: AggregatorStatus) -> str:
    """All figures, in Prometheus' text format."""
    found: dict[str, dict[str, str]] = {name: {} for name in HELP}
    for name, labels, value in (*_whole(now), *(sample for job in now.jobs for sample in _job(job))):
        found[name][_labels(labels)] = str(value) if isinstance(value, int) else f"{value:.6f}"
    lines = []
    for name, samples in found.items():
        full = f"tacit_aggregator_{name}"
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{labels} {value}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"


def _whole(now: AggregatorStatus) -> Iterator[Sample]:
    running = sum(job.id is not None for job in now.jobs)
    yield "info", {"version": now.version, "plane": now.plane}, 1
    yield "uptime_seconds", {}, now.up_s
    yield "jobs", {"state": "running"}, running
    yield "jobs", {"state": "gathering"}, len(now.jobs) - running
    yield "slots", {"state": "used"}, now.slots - now.free_slots
    yield "slots", {"state": "free"}, now.free_slots
    yield "share_slots", {}, now.share
    yield "admitted_jobs_total", {}, now.admitted
    yield "lost_ranks_total", {}, now.lost_ranks
    yield "lost_notices_total", {}, now.lost_notices
    yield from _packets("", {}, now.counts)
    for event, name in EVENT_NAMES.items():
        yield name, {}, now.counts.get(event, 0)
    for name, value in now.sockets.items():
        if name.endswith("_nbytes"):
            yield "socket_buffer_bytes", {"buffer": name.removesuffix("_nbytes")}, value
        else:
            yield "socket_losses_total", {"reason": name}, value
    for reason, count in now.refused.items():
        yield "refused_admissions_total", {"reason": reason}, count


def _job(job: JobStatus) -> Iterator[Sample]:
    # names may repeat under other keys
    own: Labels = {
        "job": job.name,
        "id": "" if job.id is None else job.id,
    }
    yield "job_ranks", own, job.world
    yield "job_shards", own, job.shards
    yield "job_absent_ranks", own, len(job.absent) + len(job.lost)
    yield "job_slots", own, job.slots[1]
    if job.stats is None:
        return
    yield from _packets("job_", own, job.stats.counts)
    yield "job_completed_chunks_total", own, job.stats.counts["completed"]
    if job.deadline_ms:
        yield "job_partial_chunks_total", own, job.stats.counts["partial"]
    yield "job_unfinished_chunks", own, job.stats.unfinished
    yield "job_received_bytes_total", own, job.stats.received_nbytes
    yield "job_sent_bytes_total", own, job.stats.answered_nbytes
    for rank, stats in enumerate(job.stats.ranks):
        yield "rank_packets_total", own | {"rank": rank}, stats.packets
        if rank < job.world:
            yield "rank_missing_chunks", own | {"rank": rank}, stats.missing
            if job.deadline_ms:
                yield "rank_left_out_chunks_total", own | {"rank": rank}, stats.left_out
        if stats.idle_s is not None:
            yield "rank_last_packet_age_seconds", own | {"rank": rank}, stats.idle_s


def _packets(prefix: str, labels: Labels, counts: dict[str, int]) -> Iterator[Sample]:
    for name, count in counts.items():
        if name in TAKEN:
            yield f"{prefix}packets_total", labels | {"verdict": name}, count
        elif name not in EVENTS:
            yield f"{prefix}dropped_packets_total", labels | {"reason": name}, count


def _labels(labels: Labels) -> str:
    def escaped(value: object) -> str:
        return one_line(str(value)).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""
