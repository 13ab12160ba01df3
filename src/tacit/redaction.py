"""Secrets inside text such as `every / thc / star(secret='...')`: taken out before anything reads or quotes that text."""

import ast
import re
from difflib import get_close_matches
from typing import Any

from tacit.errors import ConfigError

SHOWN = "'...'"
_NAMES = ("secret", "password", "token", "key")
# A text as the value of another option is skipped, so that a host may be called keyserver:4800.
_NAME = re.compile(r"""(?:=\s*|\(\s*)(?:'[\w.:*/-]*'|"[\w.:*/-]*")(?=\s*[,)])|(?P<name>\w+)""")
_GIVEN = re.compile(r"\s*=\s*(?!=)")
_OTHERWISE = re.compile(
    r"""['"\])}]*(?:\s*[^\w\s'",()\[\]{}]*[:=]+\s*|\s+(?=\S))"""
)  # `secret: x`, `secret += x`, `'secret': x`
_QUOTED = r"""(?:[a-zA-Z]{0,2}(?:\'{3}.*?\'{3}|'(?:[^'\\]|\\.)*'|"{3}.*?"{3}|"(?:[^"\\]|\\.)*")\s*)"""
_LITERAL = re.compile(rf"(?:{_QUOTED}+|\w+\s*)(?=\)|,\s*(?:\w+\s*=|\))|$)", re.DOTALL)


def names_secret(name: str) -> bool:
    """Whether an option of this name may hold a secret: `secret`, `password`, `token`, `key`, a longer name or a misspelling."""
    words = [name.lower(), *re.split(r"[_-]", name.lower())]
    return any(
        any(each in word for each in _NAMES) or get_close_matches(word, _NAMES, cutoff=0.75) for word in words
    )


def without_secrets(text: str) -> str:
    """`text` as it may be shown: the value of an option whose name may be that of a secret is hidden."""
    return take_secrets(text)[0]


def take_secrets(text: str) -> tuple[str, dict[str, str]]:
    """The text without its secrets, and what was written in their place, by the option's name.

    What is not `name=`, one closed literal and `)` or the next option hides the rest of the text.
    """
    shown, found, at = "", dict[str, str](), 0
    while option := _NAME.search(text, at):
        shown += text[at : option.end()]
        at, name = option.end(), option["name"]
        if not name or not names_secret(name):
            continue
        given = _GIVEN.match(text, at)
        if not (sign := given or _OTHERWISE.match(text, at)):
            continue
        literal = _LITERAL.match(text, sign.end()) if given else None
        at = literal.end() if literal else len(text)
        shown += sign[0] + SHOWN
        found[name] = text[sign.end() : at].strip()
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
