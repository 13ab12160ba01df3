"""Readings made by hand, for what sentences and metrics say about them."""

from tacit.aggregator.control.status import AggregatorStatus, EndedJob, JobStatus
from tacit.aggregator.planes.stats import JobStats, RankStats
from tacit.aggregator.wire import EVENTS, VERDICTS

NONE = dict.fromkeys(VERDICTS + EVENTS, 0)


def some_stats(
    time_s: float = 100.0, unfinished: int = 0, ranks: tuple[RankStats, ...] = (), **counts: int
) -> JobStats:
    packets = sum(rank.packets for rank in ranks)
    return JobStats(time_s, NONE | counts, 182 * packets, 182 * counts.get("completed", 0), unfinished, ranks)


def some_job_status(stats: JobStats | None, name: str = "x", world: int = 3, **more) -> JobStatus:
    members = tuple((f"10.0.0.{rank + 1}", 4000) for rank in range(world))
    id = None if stats is None else 5
    values = {"members": members, "lost": (), "left": (), "quorum": 0} | more
    return JobStatus(
        name=name,
        id=id,
        world=world,
        lanes="i32",
        elements=40,
        slots=(0, 8),
        age_s=7.0,
        stats=stats,
        **values,
    )


def some_status(*jobs: JobStatus, ended: tuple[EndedJob, ...] = (), **more) -> AggregatorStatus:
    values = {
        "counts": dict(NONE),
        "sockets": {"overrun": 0, "receive_buffer_nbytes": 1 << 23},
        "refused": {"secret": 0},
        "time_s": 100.0,
    } | more
    return AggregatorStatus(
        version="0.1.0", plane="user", address=("0.0.0.0", 4800), up_s=60.0, lease_s=10.0, slots=32,
        free_slots=32 - 8 * len(jobs), share=8, admitted=1, lost_ranks=0, jobs=jobs, ended=ended, **values,
    )  # fmt: skip
