"""Figures as people read them: one place, so that page, verdict and command show a number alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tacit.units import time_text

LEVEL = 1.02  # ratios measured side by side in one run are good to 1 or 2 %: nearer than this is level
NOTHING = "–"


def rate_text(rate_bps: float) -> str:
    """`rate_bps` for people: 1e8 -> '100 Mbit'."""
    scales = (("Tbit", 1e12), ("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3))
    name, factor = next((s for s in scales if rate_bps >= s[1]), ("bit", 1.0))
    return f"{rate_bps / factor:.4g} {name}"


def duration_text(seconds: float) -> str:
    """`seconds` for people, in minutes or hours where they are many: 1263 -> '21.1 min'."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 600:
        return f"{seconds / 60:.3g} min"
    return time_text(seconds)


def times_text(ratio: float) -> str:
    """A ratio for people, to three figures: 2.90×, 26.8×, 133×."""
    places = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:.{places}f}×"


def metric_text(value: float | None, higher_is_better: bool) -> str:
    """A metric for people: an accuracy as 96.7 %, a loss as 2.418; 'diverged' where it is not a number."""
    if value is None:
        return "diverged"
    return f"{100 * value:.1f} %" if higher_is_better and 0 <= value <= 1 else f"{value:.3f}"


def percent_text(share: float) -> str:
    return f"{100 * share:.0f} %"


def share_text(share: float) -> str:
    """A share of which a tenth of a percent matters: 2.1 %."""
    return f"{100 * share:.1f} %"


def less_text(share: float) -> str:
    """A share of the baseline's as what it saves: 0.021 -> '97.9 % less'."""
    return f"{share_text(1 - share)} less" if share <= 1 else f"{share_text(share - 1)} more"


def apart_text(difference: float, higher_is_better: bool) -> str:
    """How far a metric is from the baseline's: of an accuracy '+0.07 points', of a loss '-0.40 %'."""
    return f"{100 * difference:+.2f} {'points' if higher_is_better else '%'}"


def more_text(share: float) -> str:
    """By how much something is more, or less: +1.2 %."""
    return f"{100 * share:+.1f} %"


def plain_text(value: float) -> str:
    return f"{value:.6g}"


def listed(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def counted(number: int, noun: str) -> str:
    """'1 seed', '3 seeds'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(name: str, longest: int = 44) -> str:
    """`name` as a figure has room for it."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def slug(*words: str) -> str:
    """`words` as an id: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") or "x"
