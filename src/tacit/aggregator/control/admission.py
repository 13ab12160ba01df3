"""A job under control: first it gathers its ranks, then it runs, then it is over."""

import asyncio
from dataclasses import dataclass, field, fields

from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.protocol import ControlConnection, Refusal
from tacit.aggregator.control.status import JobStatus
from tacit.aggregator.naming import members_text
from tacit.aggregator.planes.stats import JobStats
from tacit.aggregator.spec import Address


@dataclass(eq=False, slots=True)
class Member:
    """A rank or a shard that has joined. Its clock is the deadline for its next message, or for all others to join."""

    rank: int
    address: Address
    connection: ControlConnection
    clock: asyncio.Timeout
    ranks: int = 1  # that it stands for: more if it is an aggregator

    def wind(self, until_s: float) -> None:
        if not self.clock.expired():
            self.clock.reschedule(until_s)


@dataclass(eq=False, slots=True)
class Admission:
    """`since_s`: when its first rank came, or when it began to run."""

    key: int
    terms: Terms
    slots: range
    since_s: float
    id: int | None = None  # while it runs
    over: bool = False
    members: dict[int, Member] = field(default_factory=dict)
    addresses: dict[int, Address] = field(default_factory=dict)  # also of ranks that are gone
    lost: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    above: Membership | None = None  # our place in the job of the aggregator above, while it runs
    rises: int = 0  # how often we have asked for it
    parent: str = ""  # whom we asked

    @property
    def name(self) -> str:
        return self.terms.name

    @property
    def noun(self) -> str:
        return "rack" if self.terms.relayed else "rank"

    @property
    def below(self) -> int:
        """Ranks, of our own and of racks that have joined."""
        return sum(member.ranks for member in self.members.values() if member.rank < self.terms.world)

    @property
    def ranks(self) -> int:
        """In its sums, once it runs."""
        return self.above.job_ranks if self.above else self.below

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.terms.members) if rank not in self.members]

    @property
    def present(self) -> int:
        """Ranks that are here. Shards do not count: a job is its ranks'."""
        return sum(rank < self.terms.world for rank in self.members)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost without whom no sum is complete, or a shard, without which nobody finds its rows. A lossy job goes
        on without a rank that is late, not without one that is gone: its part of the data would be missing for good."""
        if any(rank >= self.terms.world for rank in self.lost):
            return True
        return bool(self.lost) and self.present < (self.terms.quorum or self.terms.world)

    def text_of(self, *members: int) -> str:
        """`rank 2`, `rank 2, shard 0`."""
        return members_text(members, self.terms.world, self.noun)

    def check(self, terms: Terms, rank: int, address: Address, now_s: float) -> None:
        """Refusal if this rank cannot join."""
        if self.id is not None:
            why = f"job {self.name!r} runs already, since {now_s - self.since_s:.0f} s; name this one otherwise, or wait until that one's ranks have left"
            raise Refusal("running", why, again=True)
        if differing := [
            f.name for f in fields(Terms) if getattr(terms, f.name) != getattr(self.terms, f.name)
        ]:
            name = differing[0]
            wants, has = f"{name}={getattr(terms, name)}", getattr(self.terms, name)
            why = f"{members_text([rank], terms.world)} wants job {self.name!r} with {wants}, {self.text_of(min(self.members))} with {has}; give all ranks the same"
            raise Refusal("terms", why, config=True)
        if rank in self.members:
            why = f"{self.text_of(rank)} of job {self.name!r} has joined from {self.members[rank].address[0]} already; give each process its own rank, and each run its own name"
            raise Refusal("taken", why, again=True)
        for other in self.members.values():
            if other.address == address:
                why = f"{self.text_of(rank)} of job {self.name!r} claims to be at {address[0]}:{address[1]}, but there is {self.text_of(other.rank)}; give each its own socket"
                raise Refusal("taken", why, again=True)

    def status(self, stats: JobStats | None, now_s: float) -> JobStatus:
        return JobStatus(
            name=self.name,
            id=self.id,
            world=self.terms.world,
            lanes=self.terms.lanes.name.lower(),
            elements=self.terms.elements,
            quorum=self.terms.quorum,
            slots=(self.slots.start, len(self.slots)),
            age_s=now_s - self.since_s,
            members=tuple(self.addresses.get(rank) for rank in range(self.terms.members)),
            lost=tuple(self.lost),
            left=tuple(self.left),
            stats=stats,
            relayed=self.terms.relayed,
            parent=self.parent,
            shards=self.terms.shards,
            deadline_ms=self.terms.deadline_ms,
        )
