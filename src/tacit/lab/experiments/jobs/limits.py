"""How near gloo comes to the link: all-reduces of some sizes, their times against 2(n-1)/n S/R, their bytes against a count.

[[job]]
kind = "limits"
rates = ["100Mbit", "200Mbit"]
sizes = ["1MB", "10MB"]
repeats = 5

Short ones are timed several in a row, each begun when the one before has ended, as a training begins them: the start of all ranks at
one instant, which only a measurement needs, costs a millisecond and is not the link's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from tacit.errors import ConfigError
from tacit.lab.experiments.tables import read_fields
from tacit.lab.network.counters import Traffic, traffic
from tacit.lab.network.plan import HEADER_NBYTES

if TYPE_CHECKING:
    from tacit.lab.experiments.jobs.common import WorkerNetwork

TIME_SHARE = 0.10  # off the limit
BYTE_SHARE = 0.02  # off the count
WARM_UPS = 2
LEAST_S, MOST_REPEATS = 2.0, 40  # short ones are repeated until they have taken so long in all
ROW_S = 0.1  # what is timed as one takes so long, if the link is as fast as its rate
LEAD_S = 0.01  # between the agreement on a start and the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All-reduces of `sizes_nbytes` of floats, each `repeats` times or more."""

    job: str = "limits"
    sizes_nbytes: tuple[int, ...] = (1_000_000, 10_000_000, 50_000_000)
    repeats: int = 5
    timed = True

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str = "job") -> Self:
        """The spec in a table of an experiment file."""
        spec = read_fields(cls, table, where)
        sizes = spec.sizes_nbytes
        if not sizes or min(sizes) < 4 or any(size % 4 for size in sizes):
            given = table.get("sizes")
            raise ConfigError(
                f"{where}: sizes = {given!r}; name one or more, for example ['1MB'], each a multiple of 4 bytes"
            )
        if spec.repeats < 1:
            raise ConfigError(f"{where}: repeats = {spec.repeats}; time each size once or more")
        return spec

    def as_table(self) -> dict[str, Any]:
        return {"job": self.job, "sizes": list(self.sizes_nbytes), "repeats": self.repeats}


def limit_s(nbytes: int, ranks: int, rate_bps: float) -> float:
    """The least time in which `ranks` can sum `nbytes`, each sending and receiving at `rate_bps`: 2(n-1)/n S/R.

    Bytes on the wire have headers: TCP leaves 95.64 % of the rate to them at an MTU of 1500, 99.27 % at 9000, which is not
    taken off here.
    """
    return 2 * (ranks - 1) / ranks * 8 * nbytes / rate_bps


def repeats_of(nbytes: int, repeats: int, rate_bps: float | None) -> int:
    """How often a size is timed: `repeats` times, a short one more often, since anything may disturb it."""
    once_s = limit_s(nbytes, 2, rate_bps) if rate_bps else LEAST_S
    return max(repeats, min(MOST_REPEATS, ceil(LEAST_S / once_s)))


def in_row_of(nbytes: int, ranks: int, rate_bps: float | None) -> int:
    """How many all-reduces are timed as one."""
    return max(1, ceil(ROW_S / limit_s(nbytes, ranks, rate_bps))) if rate_bps and ranks > 1 else 1


def figures(
    nbytes: int,
    ranks: int,
    rate_bps: float | None,
    times_s: Sequence[float],
    sent: Sequence[Traffic],
    payload_share: float,
    in_row: int = 1,
) -> dict[str, Any]:
    """A record of kind `limits` from the slowest rank's times, and what left each rank's interface in all of them.

    Bytes are means over ranks, for one all-reduce. `headers_nbytes` are 66 for each packet that the interface counted,
    acknowledgements among them: it counts packets before they are cut to the MTU, so they are few.
    """
    ordered, n = sorted(times_s), len(times_s)
    measured_s = median(times_s)
    theory_s = limit_s(nbytes, ranks, rate_bps) if rate_bps else None
    counted = 2 * (ranks - 1) / ranks * nbytes
    found: dict[str, Any] = {
        "nbytes": nbytes,
        "ranks": ranks,
        "rate_bps": rate_bps,
        "n": n,
        "in_row": in_row,
        "measured_s": measured_s,
        "least_s": ordered[0],
        "most_s": ordered[-1],
        "theory_s": theory_s,
        "ratio": measured_s / theory_s if theory_s else None,
        "payload_share": payload_share,
        "ratio_with_headers": measured_s / theory_s * payload_share if theory_s else None,
        "counted_nbytes": round(counted),
        "interface_nbytes": None,
        "headers_nbytes": None,
        "bytes_ratio": None,
    }
    if sent:
        seen = sum(each.tx_nbytes for each in sent) / len(sent) / (n * in_row)
        headers = HEADER_NBYTES * sum(each.tx_packets for each in sent) / len(sent) / (n * in_row)
        found |= {
            "interface_nbytes": round(seen),
            "headers_nbytes": round(headers),
            "bytes_ratio": seen / (counted + headers),
        }
    return found | {"passed": passed(found)}


def passed(found: Mapping[str, Any]) -> bool | None:
    """Whether time and bytes are as near as they should be; None where nothing limits the link.

    Time is held to the bare limit, although headers take their part of the rate: 4.4 % at an MTU of 1500.
    """
    if found["ratio"] is None:
        return None
    bytes_right = found["bytes_ratio"] is None or abs(found["bytes_ratio"] - 1) <= BYTE_SHARE
    return abs(found["ratio"] - 1) <= TIME_SHARE and bytes_right


# ---- what each rank runs ----


def run(spec: Limits, network: WorkerNetwork) -> None:
    """One process group, every size in turn; rank 0 records a `limits` for each."""
    from tacit.lab.experiments.jobs.common import Progress, say

    plan = {nbytes: repeats_of(nbytes, spec.repeats, network.rate_bps) for nbytes in spec.sizes_nbytes}
    progress = Progress(spec.job, "all-reduce", sum(WARM_UPS + repeats for repeats in plan.values()))
    for nbytes, repeats in plan.items():
        found = _measure(nbytes, repeats, network, progress)
        say("limits", job=spec.job, network=network.text, shaped=network.shaped, **found)


def _measure(nbytes: int, repeats: int, network: WorkerNetwork, progress: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from tacit.lab.experiments.jobs.common import slowest

    world, rate_bps = dist.get_world_size(), network.rate_bps
    x, times_s, in_row = torch.ones(nbytes // 4), [], in_row_of(nbytes, world, rate_bps)
    for _ in range(WARM_UPS):
        dist.all_reduce(x)
        progress.advance()
    dist.barrier()
    before = traffic(network.interface) if network.interface else None
    for _ in range(repeats):
        start = _agreed_start()
        for _ in range(in_row):
            dist.all_reduce(x)
        times_s.append((time.monotonic() - start) / in_row)
        progress.advance()
    dist.barrier()
    sent: list[Traffic] = []
    if before is not None and network.interface:
        sent = [before] * dist.get_world_size()
        dist.all_gather_object(sent, traffic(network.interface).since(before))
    return figures(nbytes, world, rate_bps, slowest(times_s), sent, network.payload_share, in_row)


def _agreed_start() -> float:
    """Returns on all ranks at the same instant, and which it is: they share a clock. A barrier lets them go one by one."""
    import torch
    import torch.distributed as dist

    latest = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    start = latest.item() + LEAD_S
    time.sleep(max(0.0, start - time.monotonic()))
    return start


def main() -> None:
    """Joins the group that the environment describes, and measures what the arguments specify."""
    from tacit.lab.experiments.jobs.common import arguments, joined

    table, network = arguments(__doc__ or "")
    with joined():
        run(Limits.read(table), network)


if __name__ == "__main__":
    main()
