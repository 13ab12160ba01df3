"""Secrets inside text such as `every / thc / star(secret='...')`: taken out before anything reads or quotes that text."""

import ast
import re
from difflib import get_close_matches
from typing import Any

from tacit.errors import ConfigError

SHOWN = "'...'"
_NAME = re.compile(r"\b(\w+)\s*=\s*(?!=)")
_QUOTED = (
    r"(?:[a-zA-Z]{0,2}(?:'''.*?(?:'''|$)|'(?:[^'\\]|\\.)*(?:'|$)|"
    r'""".*?(?:"""|$)|"(?:[^"\\]|\\.)*(?:"|$))\s*)'
)
_VALUE = re.compile(rf"{_QUOTED}+[^,)]*|[^,()'\"]*(?:[('\"].*)?", re.DOTALL)


def without_secrets(text: str) -> str:
    """`text` as it may be shown: the value of an option whose name is `secret`, or a misspelling of it, is hidden."""
    return take_secrets(text)[0]


def take_secrets(text: str) -> tuple[str, dict[str, str]]:
    """The text without its secrets, and what was written in their place, by the option's name.

    A quote that is not closed, or a value that is no plain one, hides the rest of the text.
    """
    shown, found, at = "", dict[str, str](), 0
    while option := _NAME.search(text, at):
        shown += text[at : option.end()]
        at = option.end()
        if get_close_matches(option[1].lower(), ["secret"], cutoff=0.75):
            value = _VALUE.match(text, at)
            assert value is not None, "it also matches nothing"
            shown, at = shown + SHOWN, value.end()
            found[option[1]] = value[0].strip()
    return shown + text[at:], found


def plain_secret(name: str, written: str) -> Any:
    """The value of a secret as it was written; ConfigError, which does not show it, if it is no plain value."""
    try:
        node = ast.parse(written, mode="eval").body
        return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ConfigError(
            f"{name}= is no plain value; write {name}={SHOWN}, the secret between quotes"
        ) from None
