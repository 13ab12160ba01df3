"""Plans that were made, in a folder: a file a model and number of ranks, with the machines it holds for.

Rank 0 alone reads and writes. A plan of other machines is refused in one sentence, and another is made in its place.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit.attachments.auto.choice import Choice
from tacit.errors import ConfigError

log = logging.getLogger("tacit")
_FORMAT = 1
_LONGEST = 1 << 20
Facts = Mapping[str, Any]


def read_plan(folder: Path, facts: Facts) -> Choice | None:
    """The plan for the same model, ranks and machines; None, with a warning of what differs, where there is another or none."""
    path = _path(folder, facts)
    try:
        if path.stat().st_size > _LONGEST:
            raise ValueError("it is too long")
        found = json.loads(path.read_text())
        choice = Choice.read(found["choice"])
        there = dict(found["facts"])
        if found["format"] != _FORMAT or choice is None:
            raise ValueError("it is not whole")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        log.warning("the plan in %s cannot be read (%s); auto plans anew", path, cause)
        return None
    if differs := [name for name in {**facts, **there} if facts.get(name) != there.get(name)]:
        name = differs[0]
        log.warning(
            "the plan in %s is of another machine or training (%s: %s there, %s here); auto plans anew",
            path, name, there.get(name), facts.get(name),
        )  # fmt: skip
        return None
    return choice


def write_plan(folder: Path, facts: Facts, choice: Choice) -> None:
    """Keeps `choice`: whole or not at all. A folder that cannot be written costs the plan, not the training."""
    path = _path(folder, facts)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "facts": dict(facts), "choice": choice.as_plain()}, indent=1)
        part.write_text(text + "\n")
        part.replace(path)
    except (OSError, ValueError) as cause:
        log.warning("the plan cannot be kept in %s: %s", folder, cause)


def check_folder(folder: Path) -> None:
    """Raises ConfigError for what is no folder; one that cannot be looked at is warned of when it is read."""
    try:
        refused = folder.exists() and not folder.is_dir()
    except (OSError, ValueError):
        return
    if refused:
        raise ConfigError(f"auto: cache={str(folder)!r} is a file; name a folder for plans")


def _path(folder: Path, facts: Facts) -> Path:
    return folder / f"plan-{facts['model']}-{facts['world']}.json"
