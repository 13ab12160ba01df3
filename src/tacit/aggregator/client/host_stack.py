"""A rank's way to the aggregator. The C++ core sends a vector in chunks, collects their sums and repairs what was lost.

    client = Client()                                  # its port is known before the job is
    client.start(job, rank, plane)                     # segment=membership.segment, where control granted the job
    outcome = client.reduce(data, out, numel, patience_s=1.0)
    while outcome is SumOutcome.STALLED: ...              # report who is missing, then
        outcome = client.resume(patience_s=1.0)

How it clocks itself and what it does about loss: native/client.h.
"""

from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tacit import _core
from tacit.aggregator.addresses import opening
from tacit.aggregator.spec import Address, PlaneJob
from tacit.errors import ConfigError

Bytes = NDArray[np.uint8]  # `tensor.view(torch.uint8).numpy()` shares a tensor's memory

_BUFFER_NBYTES = 8 << 20


class SumOutcome(StrEnum):
    """How a wait for a sum ended. After all but DONE the caller may `resume()` or `abandon()`."""

    DONE = "done"
    SILENT = "silent"  # nothing at all came from the plane, although it was probed
    STALLED = "stalled"  # the plane answers, but the sum does not come: another rank is missing
    UNKNOWN = "unknown"  # the plane does not know the job: it was restarted, or control ended the job
    BEHIND = "behind"  # the others settled without this rank, and have gone on: its sum is no longer there


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Figures since the client was built. `sent` counts packets with data, copies too; times are in seconds."""

    reduces: int
    chunks: int
    data_nbytes: int  # payloads of finished vectors, up
    result_nbytes: int  # and down
    busy_s: float  # from their first packets to their last results
    sent: int
    repaired: int  # sent again because results of later chunks were here
    timeouts: int  # sent again because nothing came
    settles: int
    probes: int
    echoes: int
    received: int
    late: int  # results that were here already
    foreign: int  # packets of another job, or of none
    refused: int  # times that the plane's host answered: port unreachable
    unsent: int  # packets that the kernel would not take
    round_trips: int  # measured
    round_trip_s: float  # smoothed
    timeout_s: float  # as it follows from them

    @property
    def goodput_bps(self) -> float:
        """Payload bits up, each counted once, a second of reducing."""
        return 8 * self.data_nbytes / self.busy_s if self.busy_s else 0.0


class Client:
    """One UDP socket, one vector at a time; the GIL is free meanwhile, and Ctrl-C comes through."""

    def __init__(self, bind: Address = ("0.0.0.0", 0), *, buffer_nbytes: int = _BUFFER_NBYTES) -> None:
        with opening(bind):
            self._core = _core.AggregatorClient(bind, buffer_nbytes)
        self.port = self._core.address()[1]
        self._held: tuple[Bytes, Bytes] | None = (
            None  # the core reads and writes them until the vector is done
        )
        self._world = 0

    def start(
        self,
        job: PlaneJob,
        rank: int,
        plane: Address,
        chunk: int = 0,
        *,
        segment: bool = False,
        window: int = 64,
    ) -> None:
        """Is `rank` of `job` from now on. The next vector starts at `chunk`: the same number on all ranks.

        `segment`: hand over runs of packets that the kernel cuts (UDP_SEGMENT), which saves CPU time. Only to a plane that
        takes them (`Membership.segment`): a kernel plane behind a virtual link gets them uncut, and drops them. `window`: of a
        lossy job, whose slots keep what late ranks need, so many chunks are on their way at a time.
        """
        terms = (job.lanes, job.elements, job.slots.start, len(job.slots), job.needed, bytes(job.table))
        try:
            self._core.start(
                job.id,
                job.cookie,
                job.members[: job.world],
                *terms,
                rank,
                plane,
                chunk,
                segment,
                window if job.deadline_ms else 0,
            )
        except OSError as cause:
            raise ConfigError(f"plane={plane}: there is no way to it ({cause.strerror})") from cause
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause
        self._held, self._world = None, job.world

    def reduce(
        self, data: Bytes, out: Bytes, numel: int, *, patience_s: float, settle_s: float = 0.0
    ) -> SumOutcome:
        """Sums `numel` elements: `data` holds them in the format of the job's lanes, `out` gets the lanes of the sum.

        Returns once it is done, or after `patience_s` without progress. Where the job has a quorum, whoever came is summed
        up after `settle_s` without progress (0: never); `count` and `counts` then hold how many that were.
        """
        try:
            self._core.begin(data, out, numel)
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause
        self._held = data, out
        return self.resume(patience_s=patience_s, settle_s=settle_s)

    def resume(self, *, patience_s: float, settle_s: float = 0.0) -> SumOutcome:
        """Goes on with the vector whose sum has not come yet."""
        try:
            outcome = SumOutcome(self._core.wait(patience_s, settle_s))
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause
        if outcome is SumOutcome.DONE:
            self._held = None
        return outcome

    def abandon(self) -> None:
        """Gives the vector up. Where all ranks do, they may go on with the next; otherwise `start` agrees on a chunk."""
        self._core.abandon()
        self._held = None

    @property
    def next_chunk(self) -> int:
        return self._core.next_chunk

    @property
    def ahead(self) -> int:
        """Between two vectors of a lossy job: so many chunks, from the next one on, have been closed without this rank."""
        return self._core.ahead()

    @property
    def saturated(self) -> bool:
        """Whether a lane of the last sum met its limit."""
        return self._core.saturated

    @property
    def counts(self) -> Bytes:
        """Ranks in the last sum, one number a chunk of `job.elements`."""
        return np.frombuffer(self._core.counts(), np.uint8)

    @property
    def count(self) -> int:
        """Ranks in the last sum; the fewest of any chunk."""
        return int(self.counts.min(initial=self._world))

    @property
    def stats(self) -> ClientStats:
        return ClientStats(**self._core.stats())

    def close(self) -> None:
        """Frees the port. A second call does nothing."""
        self._core.close()
        self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
