"""What an aggregator says about itself, at one moment: the same value for `status`, metrics and JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tacit.aggregator.spec import Address
from tacit.aggregator.stats import JobStats, RankStats

TAKEN = (
    "wrote",
    "added",
    "repeated",
    "echoed",
    "settled",
    "answered",
)  # the verdicts of packets that did what they came for
EVENTS = ("completed", "saturated", "abandoned")


@dataclass(frozen=True, slots=True)
class JobReading:
    """A job that gathers its ranks (no `id` yet) or runs."""

    name: str
    id: int | None
    world: int
    lanes: str
    elements: int
    quorum: int
    slots: tuple[int, int]  # the first, and how many
    age_s: float  # since its first rank came, or since all were there
    members: tuple[Address | None, ...]  # by rank; None: has not joined
    lost: tuple[int, ...]
    left: tuple[int, ...]
    stats: JobStats | None
    relayed: bool = False  # its ranks are racks: aggregators
    parent: str = ""  # the aggregator above, if its sums go up

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(rank for rank, member in enumerate(self.members) if member is None)


@dataclass(frozen=True, slots=True)
class EndedJob:
    name: str
    why: str
    well: bool  # all of its ranks had left
    ago_s: float
    lasted_s: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts are since the start; `counts` are packets by verdict and events, `refused` admissions by reason."""

    version: str
    plane: str
    address: Address
    time_s: float  # of a clock that does not go back
    up_s: float
    lease_s: float
    slots: int
    free_slots: int
    share: int  # slots a job gets at most
    counts: dict[str, int]
    sockets: dict[str, int]
    refused: dict[str, int]
    admitted: int
    lost_ranks: int
    jobs: tuple[JobReading, ...]
    ended: tuple[EndedJob, ...]  # the last ones, the newest first
    lost_notices: int = 0  # sentences that its log did not take

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, Any]) -> "Reading":
        """The reading that `as_dict` made, also after a journey as JSON."""
        jobs = tuple(_job(job) for job in told["jobs"])
        ended = tuple(EndedJob(**job) for job in told["ended"])
        return Reading(**{**told, "address": tuple(told["address"]), "jobs": jobs, "ended": ended})


def dropped(counts: Mapping[str, int]) -> dict[str, int]:
    """Packets that were dropped, by reason, the most frequent first; reasons that never occurred are left out."""
    found = {name: count for name, count in counts.items() if count and name not in TAKEN + EVENTS}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _job(told: Mapping[str, Any]) -> JobReading:
    members = tuple(member and (member[0], member[1]) for member in told["members"])
    return JobReading(
        **{
            **told,
            "slots": tuple(told["slots"]),
            "members": members,
            "lost": tuple(told["lost"]),
            "left": tuple(told["left"]),
            "stats": told["stats"] and _stats(told["stats"]),
        }
    )


def _stats(told: Mapping[str, Any]) -> JobStats:
    return JobStats(**{**told, "ranks": tuple(RankStats(**rank) for rank in told["ranks"])})
