"""Schedules, models and lists as a command line writes them: `wrht(wavelengths=64)`, `my.json`, `VGG16`, `ring,tree`."""

import ast
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.schedules import SCHEDULES, SHAPES, Schedule, build, load
from tacit.schedules.schedule import MOST_RANKS
from tacit.sim.workloads import MODELS, Workload, from_model, read_workload, workload
from tacit.spelling import parse_expression, plain_value
from tacit.topology import OpticalRing

_FILES = (".json", ".toml")
_OTHER_NAMES = {"bert": "bert_base", "beit": "beit_l", "beitl": "beit_l", "bertbase": "bert_base"}


def parse_schedule(text: str, world: int | None, ring: OpticalRing | None = None) -> Schedule:
    """The schedule that `text` names: a known one with its options, or a file of one's own, which is verified.

    On an optical `ring`, a schedule that has an option `wavelengths` takes the ring's unless told otherwise.
    """
    text = text.strip()
    if text.endswith(_FILES):
        return _own(text, world)
    name, options = _call(text)
    if world is None:
        raise ConfigError(f"schedule {text!r} fits any number of ranks; give --world")
    every = SCHEDULES | SHAPES
    if ring is not None and "wavelengths" in (getattr(every.get(name), "__kwdefaults__", None) or {}):
        options = {"wavelengths": ring.wavelengths} | options
    return build(name, world, **options)


def split_list(text: str) -> list[str]:
    """`"ring,wrht(wavelengths=4, group=9)"` -> two texts: commas inside brackets do not count."""
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
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


def parse_model(text: str, **options: Any) -> Workload:
    """The workload that `text` names: a known model in any spelling, a recorded .json file, or `module:name`.

    `module:name` is a torch model, or a function that returns one (or the model and the inputs of a forward pass, which is
    then recorded here and now). `options` are those of `workload`; they do nothing for what was recorded.
    """
    if text.endswith(".json"):
        return read_workload(Path(text))
    if ":" in text:
        return _from_module(text)
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


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options, of text such as `braid(levels='5/2 */7', strands=8)`."""
    way = "write a name, name(option=value), or a .json or .toml file"
    tree = parse_expression(text, "schedule", way)
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        raise ConfigError(f"schedule {text!r} cannot be read; {way}")
    return tree.func.id, {str(k.arg): _plain(k.value, text) for k in tree.keywords}


def _plain(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False}.get(node.id, node.id)  # a bare word
    return plain_value(node, text, "schedule")


def _from_module(text: str) -> Workload:
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
    return from_model(model, inputs, name=member)
