"""What a searched braid has to beat on an optical ring: every other schedule, with the options that suit it best there.

WRHT as its paper has it (groups as large as the wavelengths allow, idle light dark) stands beside WRHT with stripes, for which
small groups are better: a group of m needs floor(m / 2) wavelengths, and what it does not need becomes stripes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isqrt

from tacit.errors import ConfigError
from tacit.schedules.wrht import wrht_levels
from tacit.sim.costs import Cost
from tacit.sim.optical import cost, rescaled
from tacit.sim.texts import parse_schedule
from tacit.topology import OpticalRing

_COSTED = 6  # WRHTs that are built, of all that the formula below ranks


@dataclass(frozen=True, slots=True)
class Rival:
    """A schedule, with what it takes; or the sentence that refused it."""

    schedule: str  # as it is typed, options included
    stripe: bool
    cost: Cost | None
    refused: str = ""

    @property
    def time_s(self) -> float:
        return inf if self.cost is None else self.cost.time_s

    @property
    def name(self) -> str:
        return f"{self.schedule}, striped" if self.stripe else self.schedule


def tuned(family: str, nbytes: float, ring: OpticalRing) -> Rival:
    """The fastest of a family's schedules for `nbytes` on `ring`."""
    stripe, candidates = FAMILIES[family]
    found = [_costed(text, stripe, nbytes, ring) for text in candidates(nbytes, ring)]
    return min(found, key=lambda rival: rival.time_s)


def _costed(text: str, stripe: bool, nbytes: float, ring: OpticalRing) -> Rival:
    unit = unit_ring(ring)
    try:
        found = _unit_cost(text, stripe, unit)
    except ConfigError as refusal:
        return Rival(text, stripe, None, str(refusal))
    return Rival(text, stripe, rescaled(found, nbytes, unit, ring))


def unit_ring(ring: OpticalRing) -> OpticalRing:
    """The ring where a set-up, and a byte on one wavelength, take a second: light is assigned once for all rates and vectors."""
    return OpticalRing(
        ring.nodes, ring.wavelengths, 8.0, 1.0, most_hops=ring.most_hops, transceivers=ring.transceivers
    )


@lru_cache(maxsize=512)
def _unit_cost(text: str, stripe: bool, unit: OpticalRing) -> Cost:
    return cost(parse_schedule(text, unit.nodes, unit), 1.0, unit, stripe=stripe)


def _wrhts(nbytes: float, ring: OpticalRing) -> list[str]:
    """WRHT with every group size, with and without the all-to-all stage: those that the formula ranks first."""
    x_s = 8 * nbytes / ring.rate_bps

    def time_s(choice: tuple[int, bool]) -> float:
        total_s, apart = 0.0, 1
        for members, needed, times in wrht_levels(ring.nodes, ring.wavelengths, *choice):
            parts = -(-(members - 1) // ring.senders)
            stripes = min(ring.wavelengths // needed, ring.senders // min(members - 1, ring.senders))
            total_s += times * parts * (ring.setup_s + x_s / stripes + members // 2 * apart * ring.hop_s)
            apart *= members
        return total_s

    groups = range(2, min(2 * ring.wavelengths + 1, max(2, ring.nodes)) + 1)
    ranked = sorted(((group, direct) for group in groups for direct in (False, True)), key=time_s)
    return [f"wrht(group={group}, all_to_all={direct})" for group, direct in ranked[:_COSTED]]


def _tori(nbytes: float, ring: OpticalRing) -> list[str]:
    n = ring.nodes
    rows = [rows for rows in range(1, isqrt(n) + 1) if n % rows == 0]
    return [f"torus(rows={a})" for a in sorted({*rows, *(n // a for a in rows)})]


def _hierarchies(nbytes: float, ring: OpticalRing) -> list[str]:
    """Stages are fewest where groups have sqrt(n / 2) members; transfers shrink a little with larger ones."""
    best = max(1, isqrt(ring.nodes // 2))
    return [f"hierarchical(group={g})" for g in sorted({max(1, best * k // 4) for k in (2, 3, 4, 5, 6, 8)})]


def _alone(text: str) -> Callable[[float, OpticalRing], list[str]]:
    return lambda nbytes, ring: [text]


FAMILIES: dict[str, tuple[bool, Callable[[float, OpticalRing], list[str]]]] = {
    "wrht_striped": (True, _wrhts),
    "halving_doubling": (True, _alone("halving_doubling")),
    "torus": (True, _tori),
    "hierarchical": (True, _hierarchies),
    "two_way_ring": (True, _alone("two_way_ring")),
    "ring": (True, _alone("ring")),
    "wrht_all_to_all": (False, _alone("wrht(all_to_all=True)")),
    "wrht": (False, _alone("wrht")),
}
