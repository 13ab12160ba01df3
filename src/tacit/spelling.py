"""How text names a thing with its options: `int8(block=256)`, `wrht(group=3, all_to_all=True)`, `star(nodes=8, rate=1Gbit)`.

One limit for its length, and one refusal of an option that is given twice, for strategies, schedules and networks.
"""

import ast
import warnings
from collections.abc import Iterable
from typing import Any

from tacit.errors import ConfigError

MOST_CHARACTERS = 1000


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


def parse_expression(text: str, kind: str, way: str) -> ast.expr:
    """The syntax tree of `name` or `name(option=value)`; `way` ends the sentence of a refusal."""
    check_length(text, kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # `100Mbit` would be a sloppy number to Python, and it would print so
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as cause:
        raise ConfigError(f"{kind} {text!r} cannot be read; {way}") from cause
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names = [keyword.arg for keyword in node.keywords]
            if None in names:  # **options
                raise ConfigError(f"{kind} {text!r} cannot be read; {way}")
            named_once(map(str, names), f"{kind} {text!r}")
    return tree


def plain_value(node: ast.expr, text: str, kind: str) -> Any:
    """A number, a string, a list or the like, as Python writes it."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as cause:
        raise ConfigError(f"{kind} {text!r}: {_unparsed(node)} is no plain value") from cause


def _unparsed(node: ast.expr) -> str:
    try:
        return repr(ast.unparse(node))
    except RecursionError:
        return "an expression"
