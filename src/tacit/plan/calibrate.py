"""Exchanges of the model, a choice at a time and in turn: alone, and beside the model's computation.

What the pieces leave out (threads that hand over, cores that are shared) is in them. The rounds of all choices are interleaved, so that other
programs slow all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from tacit.plan.exchanges import Gradients, ModelExchange, ModelExchanges
from tacit.plan.operations import Bench
from tacit.plan.pipeline import Work
from tacit.plan.predicting import Pace, exchange_beside
from tacit.plan.values import BucketSizes, CalibratedExchange, GradientError, Probe, RecordedStep

ROUNDS = 4
_LEAST_ROUNDS = 2
_SLOW_S = 0.2  # an exchange that long is the link's, and has less noise: a round less
_LEAST_SPREAD = 0.02
_MOST_HELD = 0.98
_HALVINGS = 8


@dataclass(slots=True)
class _Trial:
    """One choice, and what its exchanges took."""

    exchange: ModelExchange
    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)


def calibrated(
    bench: Bench,
    probe: Probe,
    step: RecordedStep,
    choices: Sequence[str],
    *,
    buckets: BucketSizes,
    gradients: Gradients | None = None,
    compute: Callable[[], object] | None = None,
    rounds: int = ROUNDS,
) -> tuple[tuple[CalibratedExchange, ...], tuple[GradientError, ...]]:
    """Runs the exchange of every choice `rounds` times, and as often beside `compute`; fewer where the budget is used up."""
    made = ModelExchanges(bench, probe, step.workload, buckets, gradients)
    trials, errors = list[_Trial](), list[GradientError]()
    with ExitStack() as opened:
        for choice in choices:
            if trials and bench.late():
                break
            exchange = made.of(choice)
            opened.callback(exchange.close)
            bench.together()
            first_s = bench.worst([exchange.seconds()])[0]  # connects, makes memory
            rounds = rounds if first_s < _SLOW_S else min(rounds, ROUNDS - 1)
            if (nmse := exchange.nmse()) is not None:
                errors.append(GradientError(choice, bench.worst([nmse])[0]))
            trials.append(_Trial(exchange))
        for number in range(rounds):
            if number >= _LEAST_ROUNDS and bench.late():
                break
            for trial in trials:
                bench.together()
                trial.alone_s.append(bench.worst([trial.exchange.seconds()])[0])
                if compute is not None:
                    bench.together()
                    trial.beside_s.append(bench.worst([trial.exchange.seconds(compute)])[0])
    return tuple(_found(probe, step, trial) for trial in trials), tuple(errors)


def _found(probe: Probe, step: RecordedStep, trial: _Trial) -> CalibratedExchange:
    exchange = trial.exchange
    ratios = [s / exchange.predicted_s for s in trial.alone_s]
    middle = typical(ratios)
    low, high = min(*ratios, middle * (1 - _LEAST_SPREAD)), max(*ratios, middle * (1 + _LEAST_SPREAD))
    found = CalibratedExchange(exchange.choice, middle, low, high, sum(exchange.numels))
    if not trial.beside_s:
        return found
    return replace(found, held=_held(probe, step, exchange, middle, typical(trial.beside_s)))


def _held(
    probe: Probe, step: RecordedStep, exchange: ModelExchange, factor: float, measured_s: float
) -> float:
    """The share of its speed that the exchange loses beside the computation: with it the pipeline takes as long as both did together."""
    cost = probe.cost(exchange.choice)
    work = Work(step.workload.forward_s + step.workload.backward_s, step.cpu)
    low, high = 0.0, _MOST_HELD
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if exchange_beside(probe, cost, exchange.numels, work, Pace(factor=factor, held=middle)) < measured_s:
            low = middle
        else:
            high = middle
    return low


def typical(values: Sequence[float]) -> float:
    """The lower median: what disturbs a measurement makes it longer, never shorter."""
    return sorted(values)[(len(values) - 1) // 2]
