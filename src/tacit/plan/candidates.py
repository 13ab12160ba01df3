"""Which choices are compared: DDP and its hooks, and every pairing of the registry in which all ranks exchange gradients in each step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from tacit.codecs import CODECS
from tacit.errors import TacitError
from tacit.plan.values import BASELINES
from tacit.requests import Codec
from tacit.strategy import Strategy, default_scheme

_SCHEMES = ("allreduce", "sharded")


def every_choice(world: int) -> tuple[str, ...]:
    """DDP, DDP's hooks, and each codec that needs no options under the scheme that suits it, and under the other where it is summable."""
    found = list(BASELINES)
    for codec in _codecs():
        first = str(default_scheme(codec))
        others = [scheme for scheme in _SCHEMES if scheme != first] if _plain(codec) else []
        found += [
            text for scheme in (first, *others) if (text := _valid(f"every / {codec} / {scheme}", world))
        ]
    return tuple(dict.fromkeys(found))


def parsed_choices(texts: Iterable[str], world: int) -> tuple[str, ...]:
    """The choices that a user names: a baseline by its name, all else as a strategy. Raises ConfigError or PairingError."""
    found = []
    for text in texts:
        baseline = next((each for each in BASELINES if each.lower() == text.strip().lower()), None)
        if baseline is None:
            strategy = Strategy.parse(text)
            strategy.check(world)
        found.append(baseline or str(strategy))
    return tuple(dict.fromkeys(found))


def with_baselines(texts: Iterable[str], world: int) -> tuple[str, ...]:
    """What a user names, and what it is compared with."""
    return tuple(dict.fromkeys((*BASELINES, *parsed_choices(texts, world))))


def _codecs() -> list[Codec]:
    """Codecs of the registry, with their own defaults; one that cannot be made without options, or whose package is broken, is left out,
    and so is one that sends as much as the numbers are large: a probe's are made up."""
    found: list[Codec] = []
    for name in CODECS:
        try:
            maker = CODECS.find(name)
            needed = [
                p
                for p in inspect.signature(maker).parameters.values()
                if p.default is inspect.Parameter.empty
            ]
            strategy = None if needed else Strategy.parse(name)
        except TacitError:
            continue
        if strategy is None or strategy.what.traits.absolute:
            continue
        if strategy.what not in found:
            found.append(strategy.what)
    return found


def _plain(codec: Codec) -> bool:
    """Whether it sends plain numbers that nobody has to remember: both schemes suit it."""
    traits = codec.traits
    return traits.summable and traits.lanes is None and not traits.remembers


def is_valid(choice: str, world: int) -> bool:
    """Whether a strategy can work among so many ranks."""
    return bool(_valid(choice, world))


def _valid(text: str, world: int) -> str:
    """The strategy's own text, or "" where it cannot work."""
    try:
        strategy = Strategy.parse(text)
        strategy.check(world)
    except TacitError:
        return ""
    return str(strategy)
