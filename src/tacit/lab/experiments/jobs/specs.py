"""The specs of a replay and a training, as values read from an experiment file; no torch here, so a file is checked at once.

[[job]]
kind = "replay"
workload = "vgg16"        # a known model, or a JSON file that was recorded
scale = 0.04              # of its parameters: 100 Mbit then shows the ratios of 2.5 Gbit
peers = ["fp32", "fp16", "bf16", "powersgd(rank=4)"]
strategies = ["int8 / sharded", "hush / sharded"]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from tacit.demo.facts import TASKS
from tacit.errors import ConfigError
from tacit.lab.experiments.tables import read_fields
from tacit.redaction import without_secrets
from tacit.units import size_text

if TYPE_CHECKING:
    from tacit.sim.workloads import Workload

PEERS = ("fp32", "fp16", "bf16", "powersgd(rank=4)")
MOST_MEMORY = 0.8  # of what is free
_TUNE_NBYTES = (1 << 20, 5 << 20, 25 << 20)  # 25 MiB is DDP's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """What both kinds of jobs have: who is compared, for how many steps, in buckets of which size.

    `tune` are the bucket sizes that plain DDP is tried with first; the best is plain DDP's from then on, and the hooks'.
    """

    job: str = ""
    peers: tuple[str, ...] = PEERS
    strategies: tuple[str, ...] = ()
    steps: int = 12
    bucket_nbytes: int = 4 << 20
    tune_nbytes: tuple[int, ...] = _TUNE_NBYTES
    seed: int = 0

    @property
    def timed(self) -> bool:
        """A training of 0 timed steps is judged by its accuracy, which no link changes."""
        return self.steps > 0

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str = "job") -> Self:
        """The spec in a table of an experiment file; raises `ConfigError`, one sentence, with the way out."""
        spec = read_fields(cls, table, where)
        spec.check(where)
        return spec

    def check(self, where: str) -> None:
        if "fp32" not in self.peers:
            raise ConfigError(
                f"{where}: peers lack 'fp32', plain DDP, which the others are measured against; add it"
            )
        if not self.tune_nbytes or min(*self.tune_nbytes, self.bucket_nbytes) < 1:
            raise ConfigError(
                f"{where}: tune needs one bucket size or more, none empty, for example ['1MiB', '25MiB']"
            )
        names = [*self.peers, *self.strategies]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{where}: {without_secrets(repr(twice))} is named twice; keep one")

    def check_names(self) -> None:
        """Parses every peer and strategy, which takes torch a second or two to load."""
        from tacit.lab.experiments.baselines import named

        for text in (*self.peers, *self.strategies):
            named(text)

    def as_table(self) -> dict[str, Any]:
        """What `read` reads, as JSON."""
        return {key.removesuffix("_nbytes"): value for key, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(ComparisonSpec):
    """A workload played as sleeps: its parameters times `scale`, its times as `batch` samples take them."""

    workload: str
    scale: float = 1.0
    batch: int = 32

    def check(self, where: str) -> None:
        super(Replay, self).check(where)  # slots make the class anew, which the short form does not survive
        if self.steps < 1:
            raise ConfigError(f"{where}: steps = {self.steps}; time at least one")
        if not 0 < self.scale <= 1:
            raise ConfigError(
                f"{where}: scale = {self.scale:g}; write a share of the parameters above 0, at most 1"
            )
        self.read_workload()

    def read_workload(self) -> Workload:
        from tacit.sim.workloads import read_workload, workload

        if self.workload.endswith(".json"):
            return read_workload(Path(self.workload))
        return workload(self.workload, batch=self.batch)

    def memory_nbytes(self) -> int:
        """What one rank holds: weights, gradients and one being copied, and buckets, for PowerSGD also what it owes."""
        parameters_nbytes = 4 * self.read_workload().parameters * self.scale
        buckets = len(self.strategies) + len(self.peers) + len(self.tune_nbytes)
        owed = 2 * sum(name.startswith("powersgd") for name in self.peers)
        return round(parameters_nbytes * (3 + buckets + owed))

    def check_memory(self, ranks: int, available_nbytes: int | None = None) -> None:
        """Raises `ConfigError` if `ranks` on this machine would not fit in what is free now."""
        free = free_nbytes() if available_nbytes is None else available_nbytes
        needed = ranks * self.memory_nbytes()
        if needed > MOST_MEMORY * free:
            fitting = self.scale * MOST_MEMORY * free / needed
            raise ConfigError(
                f"{self.job or 'replay'}: {ranks} ranks of {self.workload} at scale = {self.scale:g} need "
                f"{size_text(needed)} and {size_text(free)} are free; set scale = {fitting:.1g} or name fewer strategies"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(ComparisonSpec):
    """A task of the demo, trained: for its step times on the link (`steps` each), for its accuracy, or for both.

    Accuracy takes `train_steps` for each of `seeds`, judged every `judge_every`; 0 takes none. The target is the task's metric.
    """

    task: str
    target: float | None = None
    seeds: tuple[int, ...] = (0,)
    train_steps: int = 0
    judge_every: int = 50

    def check(self, where: str) -> None:
        super(Train, self).check(where)
        _check_task(self.task, where)
        if min(self.steps, self.train_steps) < 0 or self.steps + self.train_steps < 1 or self.judge_every < 1:
            raise ConfigError(
                f"{where}: steps = {self.steps}, train_steps = {self.train_steps}, judge_every = {self.judge_every}; "
                f"give steps to time or train_steps to train, and judge every 1 or more of them"
            )
        if self.train_steps and not self.seeds:
            raise ConfigError(f"{where}: seeds is empty; name one or more, for example [0, 1, 2]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A task of the demo, trained to the end under each of `strategies`, one after the other; the first is the baseline.

    Its curve has a point at so many `evaluations`, evenly spread over the steps. With `step_ms` a step takes so long at least, before the
    optimizer's part: what is missing is slept, as if every rank had a processor of its own (which the records note). Where ranks average
    models and not gradients, the task's learning rate is multiplied by `learning_rate_times`, from the step on where they part.
    """

    job: str = ""
    task: str
    strategies: tuple[str, ...]
    train_steps: int = 1000
    seeds: tuple[int, ...] = (0,)
    evaluations: int = 20
    step_ms: int = 0
    learning_rate_times: float = 1.0
    timed = True

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str = "job") -> Self:
        """The spec in a table of an experiment file; raises `ConfigError`, one sentence, with the way out."""
        spec = read_fields(cls, table, where)
        _check_task(spec.task, where)
        if spec.step_ms < 0:
            raise ConfigError(f"{where}: step_ms = {spec.step_ms}; a step takes 0 ms or more")
        if not spec.strategies or spec.train_steps < 1 or not spec.seeds:
            raise ConfigError(f"{where}: name one strategy and one seed or more, and 1 or more train_steps")
        if not (isfinite(spec.learning_rate_times) and spec.learning_rate_times > 0):
            raise ConfigError(
                f"{where}: learning_rate_times = {spec.learning_rate_times}; above 0, and finite"
            )
        if spec.evaluations < 1:
            raise ConfigError(f"{where}: evaluations = {spec.evaluations}; the curve has 1 point or more")
        _check_once(spec.strategies, "strategy", where)
        _check_once(spec.seeds, "seed", where)
        return spec

    def check_names(self) -> None:
        """Parses every strategy, which takes torch a second or two to load."""
        from tacit.strategy import Strategy

        for text in self.strategies:
            Strategy.parse(text)

    def as_table(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A task of the demo, trained under each of `strategies` with its ranks taking turns in one process: no link, no times.

    Rules other than `every` need ranks of their own: a `train` or a `rounds` job has them.
    """

    job: str = ""
    task: str
    strategies: tuple[str, ...]
    train_steps: int = 600
    judge_every: int = 50
    seeds: tuple[int, ...] = (0,)
    target: float | None = None
    bucket_nbytes: int = 1 << 20
    timed = False

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str = "job") -> Self:
        """The spec in a table of an experiment file; raises `ConfigError`, one sentence, with the way out."""
        spec = read_fields(cls, table, where)
        _check_task(spec.task, where)
        if not spec.strategies or not spec.seeds:
            raise ConfigError(f"{where}: name one strategy and one seed or more")
        if min(spec.train_steps, spec.judge_every, spec.bucket_nbytes) < 1:
            raise ConfigError(
                f"{where}: train_steps = {spec.train_steps}, judge_every = {spec.judge_every}, "
                f"bucket = {spec.bucket_nbytes}; each is 1 or more"
            )
        _check_once(spec.strategies, "strategy", where)
        _check_once(spec.seeds, "seed", where)
        return spec

    def check_names(self) -> None:
        """Parses every strategy, which takes torch a second or two to load."""
        from tacit.strategy import Strategy

        for text in self.strategies:
            strategy = Strategy.parse(text)
            if str(strategy.when) != "every":
                raise ConfigError(
                    f"{self.job or 'accuracy'}: {strategy.when} lets models part, and ranks that take turns share one; "
                    f"use a job of kind rounds"
                )

    def as_table(self) -> dict[str, Any]:
        """What `read` reads, as JSON."""
        return {key.removesuffix("_nbytes"): value for key, value in dataclasses.asdict(self).items()}


REPLAY_TOLERANCE = 0.05


def replay_check(step_s: Sequence[float], compute_s: float) -> dict[str, Any]:
    """Whether a replay is right: where nobody talks, the median step over the sum of the recorded times is 1, within 5 %."""
    ratio = median(step_s) / compute_s if compute_s else None
    return {
        "step_n": len(step_s),
        "step_p50_s": median(step_s),
        "compute_s": compute_s,
        "ratio": ratio,
        "passed": ratio is not None and abs(ratio - 1) <= REPLAY_TOLERANCE,
    }


def steps_to(
    curve: Sequence[tuple[int, float]], target: float | None, higher_is_better: bool
) -> float | None:
    """The step at which the metric first was as good as `target`; None if it never was, or there is none.

    It is judged now and then only: between the last point before the target and the first one there, it is read off the
    straight line. A first point that is already there counts as it stands, and so does one after a metric not finite.
    """
    if target is None:
        return None
    before: tuple[int, float] | None = None
    for step, value in curve:
        if value >= target if higher_is_better else value <= target:
            if before is None or not isfinite(before[1]) or not isfinite(value):
                return step
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = step, value
    return None


def _check_task(task: str, where: str) -> None:
    if task not in TASKS:
        raise ConfigError(f"{where}: there is no task {task!r}; choose from {', '.join(TASKS)}")


def _check_once(names: Sequence[str | int], what: str, where: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {what} {without_secrets(repr(twice))} is named twice; keep one")


def free_nbytes() -> int:
    """Memory of this machine that nobody uses."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
