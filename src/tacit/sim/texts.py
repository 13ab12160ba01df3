"""Schedules, models and lists as a command line writes them: `wrht(wavelengths=64)`, `my.json`, `VGG16`, `ring,tree`."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.grammar import read, split, unfit, value
from tacit.schedules import Schedule, build, load, options_of
from tacit.schedules.schedule import MOST_RANKS
from tacit.sim.workloads import MODELS, Workload, from_model, read_workload, workload
from tacit.topology import OpticalRing

_FILES = (".json", ".toml")
_OTHER_NAMES = {"bert": "bert_base", "beit": "beit_l", "beitl": "beit_l", "bertbase": "bert_base"}


def parse_schedule(text: str, world: int | None, ring: OpticalRing | None = None) -> Schedule:
    """The schedule that `text` names: a known one with its options, or a file of one's own, which is verified.

    On an optical `ring`, a schedule that has an option `wavelengths` takes the ring's unless it is given.
    """
    text = text.strip()
    if is_file(text):
        return _own(text, world)
    call = read(text, "schedule", "write a name, name(option=value), or a .json or .toml file")
    if call.args:
        raise unfit(
            "schedule", text, options_of(call.name), f"{call.args[0]!r} is without its option's name and ="
        )
    options = {name: _plain(written, text) for name, written in call.options.items()}
    if world is None:
        raise ConfigError(f"schedule {text!r} fits any number of ranks; give --world")
    if ring is not None and "wavelengths" in options_of(call.name):
        options = {"wavelengths": ring.wavelengths} | options
    return build(call.name, world, **options)


def is_file(text: str) -> bool:
    """Whether `text` names a file with a schedule, and no schedule by name."""
    return text.strip().endswith(_FILES)


def split_list(text: str) -> list[str]:
    """`"ring,wrht(wavelengths=4, group=9)"` -> two texts: commas inside brackets do not count."""
    try:
        parts = split(text, ",")
    except ValueError as cause:
        raise ConfigError(f"{text!r} cannot be read ({cause}); write for example ring,wrht") from cause
    if not all(parts):
        raise ConfigError(f"{text!r} has an empty item; write for example ring,wrht")
    return list(dict.fromkeys(parts))


def parse_world(text: str | None, option: str = "--world") -> int | None:
    """A number of ranks."""
    if text is None:
        return None
    digits = re.fullmatch(r"\s*[0-9]+(_[0-9]+)*\s*", text) and len(text) <= 40
    if not digits or not 1 <= int(text) <= MOST_RANKS:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ConfigError(f"{option} {shown}: give a whole number of ranks, from 1 to {MOST_RANKS:,}")
    return int(text)


def parse_model(text: str, *, record: Callable[..., Workload] | None = None, **options: Any) -> Workload:
    """The workload that `text` names: a known model in any spelling, a recorded .json file, or `module:name`.

    `module:name` is a torch model, or a function that returns one, or the model and the inputs of a forward pass. A model
    with inputs is measured by `record(model, inputs, name=...)` (`plan.record_workload`); without `record` it has sizes only.
    `options` are those of `workload`; they do nothing for what was recorded.
    """
    if text.endswith(".json"):
        return read_workload(Path(text))
    if ":" in text:
        return _from_module(text, record)
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    names = {name.replace("_", ""): name for name in MODELS} | _OTHER_NAMES
    return workload(names.get(plain, text), **options)


def _own(text: str, world: int | None) -> Schedule:
    schedule = load(text)
    if world is not None and world != schedule.world:
        raise ConfigError(
            f"{text} is for {schedule.world} ranks, not {world}; leave --world out or change the file"
        )
    schedule.verify()
    return schedule


def _plain(written: str, text: str) -> Any:
    words = {"true": True, "false": False}
    return words[written] if written in words else value(written, f"schedule {text!r}")


def _from_module(text: str, record: Callable[..., Workload] | None) -> Workload:
    """A user's torch model; the working folder is searched too."""
    import sys

    module, _, member = text.partition(":")
    sys.path.insert(0, "")  # as python -m does
    try:
        found = getattr(import_module(module), member)
        made = found() if not hasattr(found, "named_modules") or isinstance(found, type) else found
        model, inputs = made if isinstance(made, Sequence) else (made, None)
        if not hasattr(model, "named_modules"):
            raise TypeError(f"it is a {type(model).__name__}, no torch module")
    except (ImportError, AttributeError, TypeError, ValueError) as cause:
        raise ConfigError(
            f"model {text!r} cannot be made ({cause}); write module:name of a model or of a function that makes one"
        ) from cause
    finally:
        sys.path.remove("")
    if record is not None and inputs is not None:
        return record(model, inputs, name=member)
    return from_model(model, name=member)
