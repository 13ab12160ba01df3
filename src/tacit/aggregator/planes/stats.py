"""Figures of one job at a plane, the same for every plane: who sent what, and whom the others wait for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankStats:
    """Of a rank, or of a shard. `missing`: unfinished chunks that wait for it; `left_out`: chunks that a lossy job closed without it."""

    packets: int
    idle_s: float | None  # since its last packet; None: there was none
    missing: int
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class JobStats:
    """Everything since the job was added. Bytes are headers and payloads of members' packets, without IP and UDP."""

    time_s: float  # of a clock that does not go back
    counts: dict[str, int]  # by verdict and event
    received_nbytes: int
    answered_nbytes: int
    unfinished: int  # chunks that wait for somebody
    ranks: tuple[RankStats, ...]  # and the shards, behind them
    above: int = 0  # of the unfinished, those that have all ranks and wait for the parent

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that unfinished chunks wait for, the most awaited first."""
        late = [rank for rank, stats in enumerate(self.ranks) if stats.missing]
        return tuple(sorted(late, key=lambda rank: -self.ranks[rank].missing))

    def rates(self, earlier: "JobStats") -> "Rates":
        """What happened a second since `earlier`."""
        elapsed_s = max(self.time_s - earlier.time_s, 1e-9)
        return Rates(
            received_bps=8 * (self.received_nbytes - earlier.received_nbytes) / elapsed_s,
            answered_bps=8 * (self.answered_nbytes - earlier.answered_nbytes) / elapsed_s,
            chunks_per_s=(self.counts["completed"] - earlier.counts["completed"]) / elapsed_s,
            rows_per_s=(self.counts.get("forwarded", 0) - earlier.counts.get("forwarded", 0)) / elapsed_s,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    received_bps: float
    answered_bps: float
    chunks_per_s: float
    rows_per_s: float  # packets of rows

    @property
    def moves(self) -> bool:
        return self.chunks_per_s > 0 or self.rows_per_s > 0
