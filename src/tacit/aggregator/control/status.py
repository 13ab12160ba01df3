"""The status that an aggregator reports, the same value for `tacit aggregate status`, metrics and JSON; and the client that asks for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.control_client import ControlClient, RefusedError
from tacit.aggregator.naming import members_text
from tacit.aggregator.planes.stats import JobStats, RankStats
from tacit.aggregator.spec import Address
from tacit.errors import TransportError

TAKEN = (
    "wrote",
    "added",
    "repeated",
    "echoed",
    "settled",
    "answered",
    "forwarded",
    "passed",
)  # the verdicts of packets that did what they came for
EVENTS = ("completed", "saturated", "abandoned", "partial")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job that gathers its ranks (no `id` yet) or runs."""

    name: str
    id: int | None
    world: int
    lanes: str
    elements: int
    quorum: int
    slots: tuple[int, int]  # the first, and how many
    age_s: float  # since its first rank came, or since all were there
    members: tuple[Address | None, ...]  # the ranks, then the shards; None: has not joined
    lost: tuple[int, ...]
    left: tuple[int, ...]
    stats: JobStats | None
    relayed: bool = False  # its ranks are racks: aggregators
    parent: str = ""  # the aggregator above, if its sums go up
    shards: int = 0  # members behind its ranks, which are in no sum
    deadline_ms: int = 0  # of a lossy job

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(rank for rank, member in enumerate(self.members) if member is None)

    def text_of(self, *members: int) -> str:
        """`rank 2`, `rank 2, shard 0`."""
        return members_text(members, self.world, "rack" if self.relayed else "rank")


@dataclass(frozen=True, slots=True)
class EndedJob:
    name: str
    why: str
    well: bool  # all of its ranks had left
    ago_s: float
    lasted_s: float
    chunks: int


@dataclass(frozen=True, slots=True)
class AggregatorStatus:
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
    jobs: tuple[JobStatus, ...]
    ended: tuple[EndedJob, ...]  # the last ones, the newest first
    lost_notices: int = 0  # sentences that its log did not take

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "AggregatorStatus":
        """The status from which `as_dict` was made, also after a round trip through JSON."""
        jobs = tuple(_job(job) for job in fields["jobs"])
        ended = tuple(EndedJob(**job) for job in fields["ended"])
        return AggregatorStatus(
            **{**fields, "address": tuple(fields["address"]), "jobs": jobs, "ended": ended}
        )


class StatusClient:
    """A connection to control that is asked again and again. TransportError or ConfigError if it does not answer."""

    def __init__(self, control: Address, secret: str, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        try:
            self._client = ControlClient(control, secret, {"say": "status"}, timeout_s)
        except RefusedError as refusal:
            raise refusal.error from None
        try:
            self._answer()  # to the greeting: whether we are refused, or figures that are old when somebody wants them
        except BaseException:
            self._client.close()
            raise

    def read(self) -> AggregatorStatus:
        """All figures, now."""
        try:
            self._client.send({"say": "status"})
        except OSError as cause:
            self._client.lost(cause)
        return self._answer()

    def _answer(self) -> AggregatorStatus:
        try:
            fields = self._client.receive(self._timeout_s)
        except RefusedError as refusal:
            raise refusal.error from None
        except OSError as cause:
            self._client.lost(cause)
        if fields is None:
            where = address_text(self._client.control)
            raise TransportError(
                f"the aggregator at {where} has not answered within {self._timeout_s:.3g} s; is it alive?"
            )
        return AggregatorStatus.of(fields)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dropped(counts: Mapping[str, int]) -> dict[str, int]:
    """Packets that were dropped, by reason, the most frequent first; reasons that never occurred are left out."""
    found = {name: count for name, count in counts.items() if count and name not in TAKEN + EVENTS}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _job(fields: Mapping[str, Any]) -> JobStatus:
    members = tuple(member and (member[0], member[1]) for member in fields["members"])
    return JobStatus(
        **{
            **fields,
            "slots": tuple(fields["slots"]),
            "members": members,
            "lost": tuple(fields["lost"]),
            "left": tuple(fields["left"]),
            "stats": fields["stats"] and _stats(fields["stats"]),
        }
    )


def _stats(fields: Mapping[str, Any]) -> JobStats:
    return JobStats(**{**fields, "ranks": tuple(RankStats(**rank) for rank in fields["ranks"])})
