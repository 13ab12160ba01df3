"""A rank's place in one of the aggregator's jobs: sums through it, and how it is found out that none will come any more.

A place is tried before it is used: all ranks sum one full packet of zeros. A path that loses large packets only (a smaller MTU
on the way, ICMP filtered) answers every probe, which is 22 bytes long, and would keep ranks waiting for nobody. The test goes all
the way that sums take: up, to the aggregator above if there is one, and back as a result of full size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tacit.aggregator.client.host_stack import Bytes, Client, SumOutcome
from tacit.aggregator.client.membership import Membership
from tacit.aggregator.wire import HEADER
from tacit.errors import TransportError

_SLICE_S = 0.25  # between two looks at everything else, while a sum does not come
_SILENT_S = 1.0  # without any answer: gone. Training must go on within 2 s
_REASON_S = 1.0  # control reports within this why a job ended
_TEST_S = 2.0  # for the test: all ranks were granted the job in the same moment, so nobody is late
_LOOK_S, _LONGEST_LOOK_S = 1.0, 16.0  # between two questions who is missing, while a sum stalls
_IP_UDP_NBYTES = 28


class GoneError(Exception):
    """The aggregator does not add for us any more; the text has the reason."""


@dataclass(slots=True)
class Seat:
    """A client that has joined. `reduce` is for one thread at a time."""

    client: Client
    membership: Membership
    mtu: int
    ranks: Sequence[int]  # by their places in the job
    _counted: int = 0  # packets

    def reduce(
        self,
        data: Bytes,
        out: Bytes,
        numel: int,
        *,
        check: Callable[[], None],
        late: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Fills `out` with the sum. GoneError when it is known that it will not come.

        While it does not come, `check` is called four times a second, and `late` (with the seconds waited so far) as long as the
        aggregator answers, but other ranks seem to be missing. Both may raise.
        """
        began, silent_s = time.monotonic(), 0.0
        sizes = _Sizes(self)
        outcome = self.client.reduce(data, out, numel, patience_s=_SLICE_S)
        while outcome is not SumOutcome.DONE:
            check()
            if outcome is SumOutcome.UNKNOWN:
                self._wait_for_reason()
            if not self.membership.alive:
                raise GoneError(self.membership.why)
            if outcome in (SumOutcome.UNKNOWN, SumOutcome.BEHIND):
                raise GoneError("its plane does not know the job any more")
            silent_s = silent_s + _SLICE_S if outcome is SumOutcome.SILENT else 0.0
            if silent_s >= _SILENT_S:
                raise GoneError(f"nothing has come from its plane for {silent_s:g} s")
            if outcome is SumOutcome.STALLED:
                sizes.check()
                late(time.monotonic() - began)
            outcome = self.client.resume(patience_s=_SLICE_S)

    def test(self, check: Callable[[], None]) -> None:
        """Returns if a full packet of every rank and its result come through; GoneError if not, after 2 s at most."""
        job = self.membership.job

        def late(waited_s: float) -> None:
            if waited_s >= _TEST_S:
                raise GoneError(self.lost_size(self._missing() or {}))

        data, out = np.zeros(job.data_nbytes, np.uint8), np.empty(job.result_nbytes, np.uint8)
        self.reduce(data, out, job.elements, check=check, late=late)

    def count_nbytes(self) -> int:
        """Payload bytes that have left since the last call."""
        before, self._counted = self._counted, self.client.stats.sent
        return (self._counted - before) * self.membership.job.data_nbytes

    def lost_size(self, missing: dict[int, int]) -> str:
        """What to report of a sum that lacks the packets of `missing`, while small packets come and go."""
        job = self.membership.job
        up, down = (_IP_UDP_NBYTES + HEADER.size + n for n in (job.data_nbytes, job.result_nbytes))
        if self.membership.rank in missing:
            what = f"packets of {up} bytes do not reach it"
        elif missing:
            silent = ranks_text([self.ranks[place] for place in sorted(missing)])
            return (
                f"{silent} did not send within {_TEST_S:g} s; if this repeats, that path may lose packets of {up} bytes: "
                f"set star(mtu=...) to what it takes, less than {self.mtu}"
            )
        elif self.membership.missing_racks:
            what = f"packets of {down} bytes do not pass between it and the aggregator above"
        else:
            what = f"packets of {max(up, down)} bytes do not reach it or do not come back"
        return f"{what}, small ones do; set star(mtu=...) to what the path takes, less than {self.mtu}"

    def loses_size(self) -> str:
        """The sentence, if all other ranks are in and what is missing is ours, sent again and again, or the result; else nothing."""
        missing = self._missing()
        if missing is None or self.membership.missing_racks:
            return ""
        return self.lost_size(missing) if self.membership.rank in missing or not missing else ""

    def close(self) -> None:
        self.membership.leave()
        self.client.close()

    def _missing(self) -> dict[int, int] | None:
        try:
            return self.membership.missing()
        except TransportError:
            return None

    def _wait_for_reason(self) -> None:
        """Whoever ended the job, control reports why: a moment after the plane forgot it."""
        deadline = time.monotonic() + _REASON_S
        while self.membership.alive and time.monotonic() < deadline:
            time.sleep(0.01)


class _Sizes:
    """Notices, in a sum that stalls, that large packets are lost: a path may change long after it was tested."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._pause_s, self._next_s = _LOOK_S, time.monotonic() + _LOOK_S
        self._suspected = -1  # results that had come when it last seemed so

    def check(self) -> None:
        """GoneError if it seems so twice in a row, a second apart and without a result between."""
        if time.monotonic() < self._next_s:
            return
        stats = self._seat.client.stats
        results = stats.received - stats.echoes
        why = self._seat.loses_size()
        if why and results == self._suspected:
            raise GoneError(why)
        self._suspected = results if why else -1
        self._pause_s = _LOOK_S if why else min(2 * self._pause_s, _LONGEST_LOOK_S)
        self._next_s = time.monotonic() + self._pause_s


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 3`."""
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
