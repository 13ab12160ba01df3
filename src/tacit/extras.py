"""Packages that only part of tacit needs: what to install when one is missing, in one sentence.

with extra("report"):
    import matplotlib
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from tacit.errors import TacitError

PACKAGES = {"report": ("jinja2", "matplotlib"), "lab": ("pyroute2",)}  # as in pyproject.toml
_USES = {"report": "figures and reports need", "lab": "networks from namespaces need"}


class MissingExtraError(TacitError):
    """An optional package is not installed: install the extra that the message names."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of an extra's packages: a missing one raises `MissingExtraError`, with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as cause:
        package = (cause.name or "").partition(".")[0]
        if package not in PACKAGES[name]:
            raise
        raise MissingExtraError(
            f"{_USES[name]} {package}, which is not installed; install it with: pip install 'tacit[{name}]'"
        ) from cause


def require(name: str) -> None:
    """Raises `MissingExtraError` unless the extra's packages are there; imports none of them."""
    with extra(name):
        for package in PACKAGES[name]:
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
