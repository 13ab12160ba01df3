"""Which configurations of a comparison nobody beats at both: fewer bytes, and a better end."""

from __future__ import annotations

from statistics import median

from tacit.report.model.comparisons import Comparison, Standing


def placed(comparison: Comparison) -> list[Standing]:
    """The standings with known bytes and a trained end, fewest bytes first."""
    known = [s for s in comparison.standings if s.final is not None and s.timing.sent_nbytes_a_step]
    return sorted(known, key=sent_nbytes)


def sent_nbytes(standing: Standing) -> float:
    """Bytes a rank sends in a step."""
    return float(standing.timing.sent_nbytes_a_step or 0.0)


def end(standing: Standing) -> float:
    """The metric at the end of training, the median of the seeds."""
    assert standing.final is not None
    return standing.final.p50


def frontier(comparison: Comparison) -> list[Standing]:
    """Those that end better than all that send as few bytes or fewer, fewest bytes first."""
    assert comparison.trained is not None
    sign = 1 if comparison.trained.higher_is_better else -1
    kept: list[Standing] = []
    for standing in sorted(placed(comparison), key=lambda s: (sent_nbytes(s), -sign * end(s))):
        if not kept or sign * end(standing) > sign * end(kept[-1]):
            kept.append(standing)
    return kept


def shown_from(values: list[float], higher_is_better: bool) -> float:
    """The worst end that a figure has room for: six times as far from the best as the median is; beyond lie trainings that failed."""
    best = max(values) if higher_is_better else min(values)
    edge = best - 6 * (best - median(values))
    return max(edge, min(values)) if higher_is_better else min(edge, max(values))
