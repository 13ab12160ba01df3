"""The one grammar of things that have a name and options: `int8(block=256)`, `star(nodes=8, rate=1Gbit)`, `ef(topk(0.01) > int8)`.

    call     := name | name "(" [argument ("," argument)*] ")"
    argument := [option "="] value        those without an option's name come first

It serves strategies, schedules, networks, models, baselines and jobs. Values stay text until whoever knows the option reads them:
`1Gbit` units.py, `0.01` and `nearest` the function `value`. A separator inside brackets or quotes separates nothing.
"""

import ast
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tacit.errors import ConfigError

MOST_CHARACTERS = 1000
MOST_NESTED = 50
WAY = "write name or name(option=value)"

_CALL = re.compile(r"\s*([^\W\d]\w*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_OPTION = re.compile(r"([^\W\d]\w*)\s*=(?!=)\s*(.*)", re.DOTALL)
_CONSTANTS = ("True", "False", "None")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Call:
    """`name(argument, option=value)`, with arguments and values as text."""

    name: str
    args: tuple[str, ...]
    options: Mapping[str, str]

    def __str__(self) -> str:
        written = [*self.args, *(f"{name}={value}" for name, value in self.options.items())]
        return f"{self.name}({', '.join(written)})" if written else self.name


def read(text: str, kind: str, way: str = WAY) -> Call:
    """The name and the options in `text`; raises ConfigError, which `way` ends, if it does not follow the grammar."""
    check_length(text, kind)
    unreadable = ConfigError(f"{kind} {text!r} cannot be read; {way}")
    match = _CALL.fullmatch(text)
    if match is None:
        raise unreadable
    try:
        parts = split(match[2] or "", ",")
    except ValueError as cause:
        raise unreadable from cause
    if not parts[-1]:  # `name()`, or a comma after the last
        parts.pop()
    args: list[str] = []
    options: list[tuple[str, str]] = []
    for part in parts:
        option = _OPTION.fullmatch(part)
        if not part or (option is None and options) or (option is not None and not option[2]):
            raise unreadable
        if option is None:
            args.append(part)
        else:
            options.append((option[1], option[2]))
    named_once((name for name, _ in options), f"{kind} {text!r}")
    return Call(match[1], tuple(args), dict(options))


def is_call(text: str) -> bool:
    """Whether `text` is a name, with or without options, and no plain value."""
    return _CALL.fullmatch(text) is not None and text.strip() not in _CONSTANTS


def value(text: str, where: str) -> Any:
    """A number, a text in quotes, a list or the like, as Python writes it; a bare word is text."""
    if text.isidentifier() and text not in _CONSTANTS:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `1in` would be a sloppy number to Python, and it would print so
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as cause:
        raise ConfigError(f"{where}: {text!r} is no plain value") from cause


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand outside brackets and quotes; ValueError if one of those is not closed."""
    parts, start, closing, quote, escaped = list[str](), 0, list[str](), "", False
    for at, character in enumerate(text):
        if quote:
            closes = character == quote and not escaped
            escaped = character == "\\" and not escaped
            quote = "" if closes else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
            if len(closing) > MOST_NESTED:
                raise ValueError("nested too deeply")
        elif character in _CLOSING.values():
            if not closing or closing.pop() != character:
                raise ValueError(f"{character!r} closes nothing")
        elif character == separator and not closing:
            parts.append(text[start:at].strip())
            start = at + 1
    if quote or closing:
        raise ValueError(f"{quote or closing[-1]!r} is missing")
    return [*parts, text[start:].strip()]


def unfit(kind: str, text: str, options: Iterable[str], why: object) -> ConfigError:
    """The error for options that the named thing does not have, or that it lacks."""
    return ConfigError(f"{kind} {text!r} does not fit its options ({', '.join(options) or 'none'}): {why}")


def check_names(kind: str, text: str, options: Collection[str], given: Iterable[str]) -> None:
    """Refuses the first given option that the named thing does not have."""
    unknown = next((name for name in given if name not in options), None)
    if unknown is not None:
        raise unfit(kind, text, options, f"it has no option {unknown!r}")


def check_length(text: str, kind: str) -> None:
    """Refuses text that no name with options needs: the parser would take its memory, or its stack."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"this {kind} has {len(text):,} characters; the limit is {MOST_CHARACTERS:,}")


def named_once(names: Iterable[str], where: str) -> None:
    """Refuses an option that is given twice: which of the two values is meant cannot be known."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{where} gives {name} twice; keep one of them")
        seen.add(name)
