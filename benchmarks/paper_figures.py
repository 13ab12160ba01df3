"""One figure of each paper, as far as our two models can show it: does what the paper promises hold here?

    python benchmarks/paper_figures.py                              # all, three quarters of an hour on a free core, estimated
    python benchmarks/paper_figures.py --figures dgc qsgd --json    # some, as JSON: a record a training, then one a figure
    python benchmarks/paper_figures.py --quick                      # all on an MLP and digits

Ranks take turns in one process: what a method does to a training does not depend on who carries its bytes. `bytes` is what a
rank hands over in the whole training, warm-up included, against float32 gradients. Figures that do not hold are printed as such.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tacit.codecs import Exact
from tacit.demo.facts import TASKS
from tacit.demo.tasks import BUILDERS, Task, learning_rates
from tacit.lab.experiments.jobs.accuracy import Turns
from tacit.optim import MomentumOptimizer, OneBitAdam, SignSgd
from tacit.records import host_facts
from tacit.strategy import parse_codec

_BUCKET_NBYTES = 1 << 20
_QUICK_STEPS = 300

Results = Mapping[str, "Result"]
OptimizerMaker = Callable[[Task, nn.Module], torch.optim.Optimizer]


def as_the_task(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    return task.optimizer(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As the byte-level task has it."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))


def without_momentum(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    return optimizer


def unit_steps(lr: float, task: Task, model: nn.Module) -> torch.optim.Optimizer:
    return SignSgd(model.parameters(), lr=lr)


def one_bit_adam(task: Task, model: nn.Module, scaled: bool = True) -> torch.optim.Optimizer:
    """With the options of the task's AdamW."""
    options = task.optimizer(model).defaults
    kept = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay")}
    return OneBitAdam(model.parameters(), **kept, scaled=scaled)


@dataclass(frozen=True, slots=True)
class Training:
    """One line of a figure. `{quarter}` and `{sixth}` in the codec's text are parts of the training, in steps."""

    codec: str
    optimizer: OptimizerMaker = as_the_task
    world: int = 4
    inverted: int = 0  # ranks that send the opposite of their gradient
    name: str = ""
    rate: float | None = None  # instead of the optimizer's own

    @property
    def label(self) -> str:
        return (self.name or self.codec) + (f", lr {self.rate:g}" if self.rate is not None else "")

    def at(self, *rates: float) -> "tuple[Training, ...]":
        """The same at each of these learning rates."""
        return tuple(replace(self, rate=rate) for rate in rates)

    def text(self, steps: int) -> str:
        return self.codec.format(quarter=steps // 4, sixth=max(1, steps // 6))


@dataclass(frozen=True, slots=True)
class Result:
    """How a training ended: accuracy in percent, or loss; and its bytes."""

    final: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Figure:
    """What a paper promises, the trainings that show it, and whether they do."""

    paper: str
    promise: str
    task: str
    steps: int
    trainings: tuple[Training, ...]
    holds: Callable[[Results], bool]
    found: Callable[[Results], str]
    adam: bool = False  # where the task has another optimizer, and the figure is of Adam

    def quick(self) -> "Figure":
        """The same on a small model: seconds instead of minutes."""
        return replace(self, task="digits", steps=_QUICK_STEPS, adam=self.task == "bytes")


def _gap(results: Results, name: str, base: str = "none") -> float:
    """Points of accuracy, or percent of the loss, by which a training is better than `base`."""
    own, other = results[name].final, results[base].final
    return own - other if other > 20 else 100 * (other - own) / other


def _gaps(unit: str, *names: str) -> Callable[[Results], str]:
    return lambda results: ", ".join(f"{name} {_gap(results, name):+.2f} {unit}" for name in names)


_DGC, _DGC_NAME = "dgc(0.001, warmup={quarter})", "dgc 99.9 %"
_VOTE = partial(Training, "signsgd(scale=unit)", optimizer=partial(unit_steps, 1e-3), world=7)
# as many rates for each method; a step of one length for every element wants a lower one
_ADAM_RATES, _SIGN_RATES = (1e-3, 3e-3, 1e-2, 3e-2), (3e-4, 1e-3, 3e-3, 1e-2)
_ADAMW = Training("none", name="AdamW")
_ADAM = _ADAMW.at(*_ADAM_RATES)
_ONE_BIT = Training("exact(ef(sign), until={sixth})", one_bit_adam, name="1-bit Adam")
_PUBLISHED = replace(_ONE_BIT, optimizer=partial(one_bit_adam, scaled=False), name="1-bit Adam, not scaled")
_ZERO_ONE = Training(
    "exact(ef(sign), until={sixth}, doubling=16)", one_bit_adam, name="with the variance of 0/1 Adam"
)
_NAIVE = Training("ef(sign)", name="AdamW on ef(sign)")
_DEMO = Training("ef(dct, decay=0.999)", partial(unit_steps, 1e-3), name="DeMo")


def _best(results: Results, method: Training) -> str:
    """The rate at which a method ended best, as the training's label."""
    tried = {label: r.final for label, r in results.items() if label.startswith(f"{method.label}, lr ")}
    found = {label: final for label, final in tried.items() if math.isfinite(final)} or tried
    return (max if max(found.values()) > 20 else min)(found, key=lambda label: found[label])


def _gap_of_best(results: Results, method: Training, base: Training) -> float:
    return _gap(results, _best(results, method), _best(results, base))


def _all_best(*methods: Training) -> Callable[[Results], str]:
    def found(results: Results) -> str:
        best = [_best(results, method) for method in methods]
        return "; ".join(f"{label}: {results[label].final:.4g}" for label in best)

    return found


FIGURES = {
    "dgc": Figure(
        "DGC (Lin 2018)",
        "99.9 % sparsity with warm-up ends within 0.5 points of dense SGD with momentum",
        "fashion",
        3200,
        (Training("none"), Training(_DGC, without_momentum, name=_DGC_NAME)),
        lambda r: _gap(r, _DGC_NAME) >= -0.5,
        _gaps("points", _DGC_NAME),
    ),
    "signsgd": Figure(
        "signSGD with majority vote (Bernstein 2019)",
        "7 ranks learn with 1, 2 and 3 of them inverting their gradients, a little less each time, and not with 4",
        "fashion",
        800,
        tuple(_VOTE(inverted=k, name=f"{k} of 7 inverted") for k in range(5)),
        lambda r: (
            all(r[f"{k} of 7 inverted"].final > 75 for k in range(4)) and r["4 of 7 inverted"].final < 20
        ),
        lambda r: ", ".join(f"{r[f'{k} of 7 inverted'].final:.2f} %" for k in range(5)),
    ),
    "qsgd": Figure(
        "QSGD (Alistarh 2017)",
        "8 and 4 bits reach float32's accuracy, 2 bits nearly",
        "fashion",
        600,
        (Training("none"), *(Training(f"qsgd({levels}, norm=max)") for levels in (127, 7, 1))),
        lambda r: (
            all(_gap(r, f"qsgd({levels}, norm=max)") >= -0.5 for levels in (127, 7))
            and _gap(r, "qsgd(1, norm=max)") >= -2
        ),
        _gaps("points", *(f"qsgd({levels}, norm=max)" for levels in (127, 7, 1))),
    ),
    "terngrad": Figure(
        "TernGrad (Wen 2017)",
        "ternary gradients with clipping end within 2 points of float32, and better than without clipping",
        "fashion",
        600,
        (Training("none"), Training("terngrad"), Training("terngrad(clip=0)")),
        lambda r: _gap(r, "terngrad") >= -2 and _gap(r, "terngrad", "terngrad(clip=0)") > 0,
        _gaps("points", "terngrad", "terngrad(clip=0)"),
    ),
    "one-bit-adam": Figure(
        "1-bit Adam (Tang 2021)",
        "after a warm-up of a sixth of the training it ends as Adam does (1 %, or a point) at a fifth of the bytes, each at its best rate of four; "
        "one-bit gradients under Adam end worse",
        "bytes",
        300,
        (*_ADAM, *(t for m in (_ONE_BIT, _PUBLISHED, _ZERO_ONE, _NAIVE) for t in m.at(*_ADAM_RATES))),
        lambda r: (
            _gap_of_best(r, _ONE_BIT, _ADAMW) >= -1
            and r[_best(r, _ONE_BIT)].bytes <= 0.2
            and _gap_of_best(r, _ONE_BIT, _NAIVE) > 0
        ),
        _all_best(_ADAMW, _ONE_BIT, _PUBLISHED, _ZERO_ONE, _NAIVE),
    ),
    "demo": Figure(
        "DeMo (Peng 2024)",
        "it ends as AdamW does (1 %, or a point) or better at a hundredth of the bytes, each at its best rate of four",
        "bytes",
        300,
        (*_ADAM, *_DEMO.at(*_SIGN_RATES)),
        lambda r: _gap_of_best(r, _DEMO, _ADAMW) >= -1 and r[_best(r, _DEMO)].bytes <= 0.01,
        _all_best(_ADAMW, _DEMO),
    ),
}


def train(task: Task, training: Training, steps: int, seed: int) -> Result:
    torch.manual_seed(seed)
    model = task.model()
    optimizer = training.optimizer(task, model)
    if training.rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = training.rate
    schedule = learning_rates(optimizer, steps)
    codec = parse_codec(training.text(steps))
    parameters: list[Any] = list(model.parameters())
    step = 0

    def changed(rank: int) -> None:
        if rank < training.inverted:
            for parameter in parameters:
                parameter.grad.neg_()
        if isinstance(optimizer, MomentumOptimizer) and isinstance(codec, Exact) and not codec.exact_at(step):
            for parameter in parameters:  # they take turns on one optimizer, which is told by the last one
                if rank == training.world - 1:
                    optimizer.offer(parameter, parameter.grad)
                else:
                    optimizer.momentum(parameter, parameter.grad, optimizer.param_groups[0])

    ranks = Turns(model, codec, training.world, _BUCKET_NBYTES, seed, changed)
    rngs = [torch.Generator().manual_seed(seed + 1000 * rank) for rank in range(training.world)]
    for step in range(steps):
        ranks.backward([task.batch(rng) for rng in rngs], step)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{training.label}: step {step} of {steps}   ", end="\r", file=sys.stderr)
    with torch.no_grad():
        final = task.evaluate(model)
    whole = 4 * steps * sum(p.numel() for p in model.parameters())
    return Result(final, ranks.sent_nbytes / whole)


def measured(
    name: str, figure: Figure, seed: int, show: Callable[[dict[str, object]], None]
) -> Iterator[tuple[str, Result]]:
    """The trainings of a figure, each shown as it ends."""
    task = BUILDERS[figure.task]()
    if figure.adam:
        task = replace(task, optimizer=adamw)
    for training in figure.trainings:
        began = time.monotonic()
        result = train(task, training, figure.steps, seed)
        if TASKS[figure.task].higher_is_better:
            result = replace(result, final=100 * result.final)
        show(
            {
                "benchmark": "paper figures",
                "figure": name,
                "training": training.label,
                "codec": training.text(figure.steps),
                "task": figure.task,
                "metric": TASKS[figure.task].metric,
                "world": training.world,
                "steps": figure.steps,
                "seed": seed,
                **asdict(result),
                "seconds": round(time.monotonic() - began, 1),
                "host": host_facts()["cpu"],
            }
        )
        yield training.label, result


def verdict(name: str, figure: Figure, results: Results) -> dict[str, object]:
    return {
        "benchmark": "paper figures summary",
        "figure": name,
        "paper": figure.paper,
        "promise": figure.promise,
        "holds": figure.holds(results),
        "found": figure.found(results),
    }


def as_line(row: Mapping[str, object]) -> str:
    if "promise" in row:
        return f"{'holds' if row['holds'] else 'DOES NOT HOLD'}: {row['paper']}: {row['promise']}. Here: {row['found']}\n"
    return f"{row['figure']:14} {row['training']:40} {row['metric']} {row['final']:.4g}, {row['bytes']:.2%} of the bytes, {row['seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of each figure's own")
    parser.add_argument(
        "--quick", action="store_true", help=f"an MLP on digits, {_QUICK_STEPS} steps, two or three minutes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of text")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: a training has at least one step")
    torch.set_num_threads(1)

    def show(row: Mapping[str, object]) -> None:
        print(json.dumps(row) if options.json else as_line(row), flush=True)

    for name in options.figures:
        figure = FIGURES[name].quick() if options.quick else FIGURES[name]
        if options.steps:
            figure = replace(figure, steps=options.steps)
        show(verdict(name, figure, dict(measured(name, figure, options.seed, show))))


if __name__ == "__main__":
    main()
