"""What `auto` may choose from, and where it keeps what it has chosen: `auto`, `auto(lossy=False)`, `auto(cache="plans")`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit import environment
from tacit.errors import ConfigError
from tacit.grammar import check_names, read, unfit, value

TRIAL = "every / none / allreduce"
HALF = "every / bf16 / allreduce"
LOSSY = ("every / int8(block=256) / sharded", "every / int4(block=64) / sharded", "every / hush / sharded")
"""Codecs whose trainings are on file, docs/lab.md; those that need tuning or more memory (lowrank, topk, ef) are for the user to name."""
_OPTIONS = ("lossy", "steps", "cache")
_LEAST_STEPS, _MOST_STEPS = 6, 1000


@dataclass(frozen=True, slots=True)
class Auto:
    """A strategy that is chosen while the model trains.

    `lossy`: whether codecs that lose more than a cast to bf16 may win. `steps`: how many the model trains without one first.
    `cache`: a folder of plans that were made, "" for none.
    """

    lossy: bool = True
    steps: int = 10
    cache: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lossy, bool):
            raise ConfigError(f"auto: lossy={self.lossy!r} is neither True nor False")
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not whole or not _LEAST_STEPS <= self.steps <= _MOST_STEPS:
            raise ConfigError(
                f"auto: steps={self.steps!r}; it records {_LEAST_STEPS} to {_MOST_STEPS} steps before it chooses"
            )
        if not isinstance(self.cache, str):
            raise ConfigError(f"auto: cache={self.cache!r} is no folder; write cache='plans'")

    @classmethod
    def parse(cls, text: Any) -> Auto | None:
        """The options of `auto` in a text; None for any other strategy."""
        if not isinstance(text, str) or text.partition("(")[0].strip() != "auto":
            return None  # also for `auto / int8`, which Strategy refuses
        call = read(text, "strategy", "write auto or auto(lossy=False)")
        if call.args:
            raise unfit("strategy", text, _OPTIONS, "its options have names")
        check_names("strategy", text, _OPTIONS, call.options)
        return cls(**{name: value(written, f"strategy {text!r}") for name, written in call.options.items()})

    def __str__(self) -> str:
        return f"auto(lossy={self.lossy}, steps={self.steps})"

    @property
    def choices(self) -> tuple[str, ...]:
        return (TRIAL, HALF, *(LOSSY if self.lossy else ()))

    @property
    def folder(self) -> Path | None:
        """Where plans are kept; None where nobody named a folder."""
        found = self.cache or environment.plan_cache()
        return Path(found) if found else None
