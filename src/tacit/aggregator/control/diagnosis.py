"""What is wrong at an aggregator, in sentences: who is waited for, what is dropped and why, and what to do about it.

"It hangs and all counters are zero" has an answer here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tacit.aggregator.addresses import address_text
from tacit.aggregator.control.protocol import REASONS
from tacit.aggregator.control.status import TAKEN, AggregatorStatus, JobStatus, dropped
from tacit.aggregator.naming import ranks_text, size_text
from tacit.aggregator.planes.stats import JobStats, Rates
from tacit.units import time_text

LATE_S = 1.0  # a rank that others wait for, and that has been silent for so long, is late
_DISAGREE = "ranks and aggregator disagree about the job; install the same tacit on all"
_FOREIGN = "they are damaged on their way, or not tacit's"
REASON_HINTS = {
    "duplicate": "they came twice: ranks send again what they have no answer to",
    "early": "ranks asked for what there is before a quorum was in",
    "stale": "they came late, after their chunk was done with; or somebody replays them",
    "late": "sums from the aggregator above came twice: this one had asked again",
    "held": "a rank is so far behind that it would lose sums: the others wait for it until it has caught up",
    "unreached": "rows for a member that has not joined, or of which a kernel plane has not received anything yet: ranks send them again",
    "short": _FOREIGN,
    "magic": "something else than tacit sends to this port",
    "layout": "their sender has another version of the layout; install the same tacit on all",
    "truncated": _FOREIGN,
    "oversized": _FOREIGN,
    "kind": "a plane's answers arrive at a plane: somebody sends them back",
    "job": "their job is not here: its ranks must join again, or belong to another aggregator",
    "cookie": "they carry the key of another admission: ranks of an earlier run are still sending",
    "world": _DISAGREE,
    "rank": _DISAGREE,
    "source": "they come from another address than their rank's control connection did: look for NAT, or for hosts with several addresses",
    "lanes": _DISAGREE,
    "length": _DISAGREE,
    "slot": _DISAGREE,
    "place": _DISAGREE,
}
SOCKET_HINTS = {
    "overrun": "found the receive buffer full: raise it with `sysctl net.core.rmem_max=33554432` before the aggregator "
    "starts, or give it more --threads",
    "segmented": "came as uncut runs (UDP_SEGMENT) and were dropped, since the kernel plane takes single packets: ranks of an "
    "older tacit hand over runs of packets; install the same tacit on all, or turn it off with "
    "`ethtool -K LINK tx-udp-segmentation off` on the ranks' virtual links",
    "unsent": "could not be sent to ranks: the kernel would not have them, or nothing has come from there yet",
}
ORDINARY = ("duplicate", "early", "stale", "late", "held", "unreached")  # what loss on the way brings about


@dataclass(frozen=True, slots=True)
class Diagnosis:
    sentence: str
    well: bool


def diagnose(now: AggregatorStatus, earlier: AggregatorStatus | None = None) -> list[Diagnosis]:
    """What is to be reported, faults first. With an `earlier` status it is known which counts move."""
    before = {job.id: job.stats for job in earlier.jobs if job.stats} if earlier else {}
    found = [finding for job in now.jobs for finding in _job(job, before.get(job.id), now)]
    found += _whole(now, earlier)
    return sorted(found, key=lambda finding: finding.well)


def rates(job: JobStatus, earlier: AggregatorStatus | None) -> Rates | None:
    """What happens a second, if the job was there before."""
    before = next((old.stats for old in earlier.jobs if old.id == job.id), None) if earlier else None
    return job.stats.rates(before) if job.stats and before else None


def _job(job: JobStatus, before: JobStats | None, now: AggregatorStatus) -> Iterator[Diagnosis]:
    if job.stats is None and not job.absent:
        yield _bad(
            f"job {job.name!r} waits for the aggregator above, at {job.parent}, since {time_text(job.age_s)}: "
            "`tacit aggregate status` there says which racks have not joined"
        )
        return
    if job.stats is None:
        whole = size_text(job.world, job.shards) if job.shards else job.world
        yield _bad(
            f"job {job.name!r} waits for {job.text_of(*job.absent)} of {whole} to join, since {time_text(job.age_s)}: "
            f"start them under the same name, or check that they reach TCP port {now.address[1]}"
        )
        return
    if job.lost:
        yield _bad(
            f"job {job.name!r} goes on without {job.text_of(*job.lost)}, lost on the way; a quorum of {job.quorum} is enough for it"
        )
    yield _running(job, job.stats, before, now)
    if job.stats.counts.get("partial"):
        yield _partial(job, job.stats)
    counts = job.stats.counts
    if _served(job.stats):  # or else they are in a finding already
        yield from _drops(
            f"job {job.name!r}", {k: n for k, n in dropped(counts).items() if k not in ORDINARY}
        )
    silent = [member for member, own in enumerate(job.stats.ranks) if own.idle_s is None]
    if _served(job.stats) and silent and (unreached := counts.get("unreached", 0)):
        yield _bad(
            f"{_count(unreached, 'packet')} of rows of job {job.name!r} {'was' if unreached == 1 else 'were'} dropped, and nothing has "
            f"ever come from {job.text_of(*silent)}: check that they can send to UDP port {now.address[1]}"
        )
    if counts["saturated"]:
        yield _bad(
            f"in {_count(counts['saturated'], 'packet')} of job {job.name!r} a lane met its limit, so sums are cut off: "
            "use wider lanes, or a smaller granularity"
        )


def _running(job: JobStatus, stats: JobStats, before: JobStats | None, now: AggregatorStatus) -> Diagnosis:
    name, port = f"job {job.name!r}", now.address[1]
    if not _served(stats):
        if drops := dropped(stats.counts):
            reason = next(iter(drops))
            return _bad(
                f"packets of {name} arrive, but all are dropped, most as {reason!r}: {REASON_HINTS[reason]}"
            )
        return _bad(
            f"no packet of {name} has arrived since it began {time_text(job.age_s)} ago: if its ranks are sending, "
            f"check that UDP port {port} is open between them and the aggregator"
        )
    moves = stats.rates(before).moves if before else False
    if stats.unfinished and not moves and (late := _late(stats, sure=before is not None)):
        return _bad(f"{name} waits for {_waited_for(job, stats, late, port)}")
    if stats.above and before and not moves:
        return _bad(
            f"{name} waits for the aggregator above, at {job.parent}: {_count(stats.above, 'chunk')} with all ranks here, without "
            "a sum from there; `tacit aggregate status` there says why"
        )
    idle_s = min(rank.idle_s for rank in stats.ranks if rank.idle_s is not None)
    if not moves and idle_s > LATE_S:
        rest = f"{stats.unfinished} unfinished" if stats.unfinished else "none unfinished"
        return Diagnosis(
            f"{name} is at rest: its last packet came {time_text(idle_s)} ago, {_done(stats, 'are done')} and {rest}",
            True,
        )
    slowest = f"; most waited for is rank {stats.waiting_for[0]}" if stats.waiting_for else ""
    return Diagnosis(f"{name} runs: {_done(stats, 'done')}{slowest}", True)


def _partial(job: JobStatus, stats: JobStats) -> Diagnosis:
    partial, completed = stats.counts["partial"], stats.counts["completed"]
    most = max(range(job.world), key=lambda rank: stats.ranks[rank].left_out)
    return Diagnosis(
        f"job {job.name!r} is lossy: {_count(partial, 'chunk')} ({100 * partial / completed:.2g} %) went out without some rank, "
        f"{stats.ranks[most].left_out:,} of them without rank {most}",
        True,
    )


def _done(stats: JobStats, done: str) -> str:
    """`12 chunks done`, `12 chunks done, 3,000 packets of rows passed on`."""
    rows = stats.counts.get("forwarded", 0)
    passed_on = f", {_count(rows, 'packet')} of rows passed on" if rows else ""
    return f"{_count(stats.counts['completed'], 'chunk')} {done}{passed_on}"


def _served(stats: JobStats) -> bool:
    return any(stats.counts[verdict] for verdict in TAKEN)


def _late(stats: JobStats, sure: bool) -> list[int]:
    """Ranks that chunks wait for; unless we saw that nothing moves, only those that have been silent."""
    silent = {rank for rank, own in enumerate(stats.ranks) if own.idle_s is None or own.idle_s > LATE_S}
    return [rank for rank in stats.waiting_for if sure or rank in silent]


def _waited_for(job: JobStatus, stats: JobStats, late: list[int], port: int) -> str:
    """`rank 2: 12 chunks lack only it, its last packet came 3.4 s ago`."""
    rank, own = late[0], stats.ranks[late[0]]
    others = f"; also for {ranks_text(sorted(late[1:]))}" if late[1:] else ""
    lack = f"{_count(own.missing, 'chunk')} {'lacks' if own.missing == 1 else 'lack'} {'it' if late[1:] else 'only it'}"
    if rank in job.lost:
        last = "it was lost"
    elif rank in job.left:
        last = "it has left the job"
    elif own.idle_s is None:
        at = job.members[rank]
        where = address_text(at) if at else "there"
        last = f"no packet of it has ever come: check that {where} can send to UDP port {port}"
    else:
        last = f"its last packet came {time_text(own.idle_s)} ago"
    return f"rank {rank}: {lack}, {last}{others}"


def _whole(now: AggregatorStatus, earlier: AggregatorStatus | None) -> Iterator[Diagnosis]:
    if not now.jobs and now.ended:
        last = now.ended[0]
        yield Diagnosis(
            f"no job is here; the last one, {last.name!r}, ended {time_text(last.ago_s)} ago: {last.why}",
            last.well,
        )
    elif not now.jobs:
        yield Diagnosis("no job is here: no rank has joined yet", True)
    strange = {
        reason: now.counts.get(reason, 0)
        for reason in ("short", "magic", "layout", "truncated", "oversized", "kind", "job")
    }
    if earlier:  # what came long ago is no news
        strange = {reason: count - earlier.counts.get(reason, 0) for reason, count in strange.items()}
    yield from _drops("no job known here", {reason: count for reason, count in strange.items() if count > 0})
    for name, way_out in SOCKET_HINTS.items():
        if count := now.sockets.get(name, 0):
            yield _bad(f"{_count(count, 'packet')} {way_out}")
    if now.lost_notices:
        yield _bad(
            f"{_count(now.lost_notices, 'sentence')} of its log could not be written: its standard error is closed, full or not read"
        )
    wrong = {
        reason: n for reason, n in now.refused.items() if n and reason not in ("running", "taken", "silent")
    }
    for reason, count in wrong.items():
        yield _bad(
            f"{_count(count, 'admission')} {'was' if count == 1 else 'were'} refused: {REASONS[reason]}"
        )


def _drops(whose: str, counts: dict[str, int]) -> Iterator[Diagnosis]:
    for reason, count in counts.items():
        yield _bad(
            f"{_count(count, 'packet')} of {whose} {'was' if count == 1 else 'were'} dropped as {reason!r}: {REASON_HINTS.get(reason, 'for a reason not known here')}"
        )


def _bad(sentence: str) -> Diagnosis:
    return Diagnosis(sentence, False)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
