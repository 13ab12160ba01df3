"""The gate: before each run the network is timed against theory, and one that is not what it claims is refused.

Timed are messages of 30 kB, 100 kB and 1 MB from every host to the next, alone, from the first byte handed over to the last
one received; then 10 MB around the ring of all hosts, as an all-reduce moves them, everybody at once.

A message may be early by what a shaper lets pass after a pause (its burst and one packet), and late by 5 % and the half
millisecond that waking a process takes. The ring has no pauses: 5 % either way, and that half millisecond a stage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tacit import launch
from tacit.lab.errors import GateError
from tacit.lab.network import theory
from tacit.lab.network.lab import Lab
from tacit.lab.network.plan import crossed
from tacit.units import size_text, time_text

REPEATS = {30_000: 7, 100_000: 7, 1_000_000: 3}
RING_NBYTES = 10_000_000
RING_REPEATS = 2
SHARE = 0.05  # of theory
WAKING_S = 0.5e-3
ATTEMPTS = 3  # on a busy machine the first may be disturbed
SLACK_S = 60.0  # for starting the ranks, on a busy machine; beyond it, a measurement may take three times as long as it should


@dataclass(frozen=True, slots=True)
class CalibrationCheck:
    """One thing timed: the median of `n` times, the time theory gives, and the least and the most that pass."""

    what: str
    src: str
    dst: str
    nbytes: int
    n: int
    measured_s: float
    theory_s: float
    least_s: float
    most_s: float | None  # None: packets are lost on the way, so it may take any time

    @property
    def passed(self) -> bool:
        return self.least_s <= self.measured_s and (self.most_s is None or self.measured_s <= self.most_s)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the last attempt found; `attempts` were made."""

    rate_bps: float
    rows: tuple[CalibrationCheck, ...]
    attempts: int

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The fields of a record of kind `calibration`."""
        rows = [row.as_dict() for row in self.rows]
        return {"rate_bps": self.rate_bps, "passed": self.passed, "attempts": self.attempts, "rows": rows}

    def check(self) -> None:
        """Raises `GateError` about what is furthest off, if something is."""
        wrong = [row for row in self.rows if not row.passed]
        if wrong:
            worst = max(wrong, key=lambda row: abs(row.measured_s / row.theory_s - 1))
            raise GateError(
                f"this network is not what it claims: {size_text(worst.nbytes)} {worst.what} took "
                f"{time_text(worst.measured_s)} instead of {time_text(worst.theory_s)}, {self.attempts} times tried; "
                f"nothing is reported: end other programs, or lower the rate"
            )


def calibrate(lab: Lab, log_dir: Path, attempts: int = ATTEMPTS, *, realtime: bool = True) -> Calibration:
    """Times the network as built, again if it does not pass; about 4 s for 4 hosts at 100 Mbit.

    `realtime` as the ranks will have it: a machine that disturbs them should disturb this.
    """
    found = Calibration(lab.rate_bps, (), 0)
    while found.attempts < attempts and (not found.attempts or not found.passed):
        found = Calibration(lab.rate_bps, tuple(_rows(lab, log_dir, realtime)), found.attempts + 1)
    return found


def one_way_row(lab: Lab, src: str, dst: str, nbytes: int, times_s: Sequence[float]) -> CalibrationCheck:
    """The judgement on a message sent alone."""
    theory_s = theory.one_way_s(lab.plan, src, dst, nbytes)
    cables = crossed(lab.plan, src, dst)
    wire = theory.wire_nbytes(nbytes, theory.path_mtu(cables))
    early_s = theory_s * min(1.0, theory.free_nbytes(lab.plan, src, dst) / wire)
    least_s = max(0.0, theory_s * (1 - SHARE) - early_s)
    most_s = None if any(c.loss for c in cables) else theory_s * (1 + SHARE) + WAKING_S
    return CalibrationCheck(
        f"from {src} to {dst}", src, dst, nbytes, len(times_s), median(times_s), theory_s, least_s, most_s
    )


def ring_row(lab: Lab, nbytes: int, times_s: Sequence[float]) -> CalibrationCheck:
    """The judgement on all hosts sending at once."""
    theory_s, names = theory.ring_s(lab.plan, nbytes), [host.name for host in lab.hosts]
    slack_s = SHARE * theory_s + 2 * (len(names) - 1) * WAKING_S
    most_s = None if any(c.loss for c in lab.plan.cables) else theory_s + slack_s
    return CalibrationCheck(
        "around the ring of all hosts", names[0], names[-1], nbytes, len(times_s), median(times_s), theory_s,
        theory_s * (1 - SHARE), most_s,
    )  # fmt: skip


def _rows(lab: Lab, log_dir: Path, realtime: bool) -> list[CalibrationCheck]:
    names = [host.name for host in lab.hosts]
    if len(names) < 2:
        return []
    spec = {
        "addresses": [host.address for host in lab.hosts],
        "sizes": [[nbytes, n] for nbytes, n in REPEATS.items()],
        "ring": [RING_NBYTES, RING_REPEATS],
    }
    one_way: dict[tuple[int, int], list[float]] = {}
    starts: list[list[int]] = []
    ends: list[list[int]] = []

    def on_message(rank: int, message: launch.Message) -> None:
        for nbytes, times_s in message["one_way"]:
            one_way[rank, nbytes] = times_s
        starts.append(message["ring_start_ns"])
        ends.append(message["ring_end_ns"])

    launch.run(
        "tacit.lab.network.calibrator",
        [json.dumps(spec)],
        ranks=len(names),
        on_message=on_message,
        log_dir=log_dir,
        timeout_s=_limit_s(lab),
        limit_s=_limit_s(lab),
        rank_specs=lab.rank_specs(realtime=realtime),
    )
    ring_s = [
        (max(last) - min(first)) * 1e-9
        for first, last in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)
    ]
    rows = [
        one_way_row(lab, names[src], names[(src + 1) % len(names)], nbytes, times_s)
        for (src, nbytes), times_s in sorted(one_way.items())
    ]
    return [*rows, ring_row(lab, RING_NBYTES, ring_s)]


def _limit_s(lab: Lab) -> float:
    """When a calibration is given up: far beyond what theory needs for all of it."""
    names = [host.name for host in lab.hosts]
    alone_s = sum(
        (n + 1) * theory.one_way_s(lab.plan, src, dst, nbytes)
        for nbytes, n in REPEATS.items()
        for src, dst in zip(names, [*names[1:], names[0]], strict=True)
    )
    return SLACK_S + 3 * (alone_s + (RING_REPEATS + 1) * theory.ring_s(lab.plan, RING_NBYTES))
