"""What can be written by name, one Registry a kind: the built-in names, those registered by code, and those of installed packages.

    [project.entry-points."tacit.codecs"]        # in another package's pyproject.toml
    sign = "my_package:Sign"

Entry points are read on the first look-up of a name that is not built in, or when names are listed; never at import. Only the
plug-in that is looked up is imported, so a broken one affects no other name.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tacit.errors import ConfigError, did_you_mean

T = TypeVar("T")


def unknown_name(kind: str, name: str, known: Iterable[str], cutoff: float = 0.6) -> ConfigError:
    """The error for a name that nothing of this kind has."""
    known = tuple(known)
    hint = did_you_mean(name.lower() if cutoff < 0.6 else name, known, cutoff)
    return ConfigError(f"unknown {kind} {name!r}; {hint}known are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """A name that an installed package adds; `load` imports it."""

    package: str
    load: Callable[[], T]


class Registry(MutableMapping[str, T]):
    """Names and what makes the thing. Iterating lists built-in names first, then plug-ins by name, without importing them.

    `also` adds plug-ins of another kind, such as schedules that are schemes too; `accepts` checks what a plug-in loads.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, T],
        *,
        also: Callable[[], Mapping[str, Plugin[T]]] = dict,
        accepts: Callable[[Any], bool] = callable,
    ) -> None:
        self.kind = kind
        self.group = group
        self.built_in = dict(built_in)
        self._also = also
        self._accepts = accepts
        self._plugins: dict[str, Plugin[T]] | None = None
        self._loaded: dict[str, T] = {}

    def register(self, name: str, maker: T) -> None:
        """Adds `maker` as `name`; raises ConfigError if the name is taken or cannot be written."""
        if not name.isidentifier() or name in self.built_in:
            problem = "is taken" if name in self.built_in else "is no plain word"
            raise ConfigError(f"{self.kind} name {name!r} {problem}; choose another")
        self.built_in[name] = maker

    def find(self, name: str) -> T:
        """What `name` stands for; raises ConfigError if nothing has this name, or if its plug-in cannot be loaded."""
        if name not in self:
            raise unknown_name(self.kind, name, self)
        return self[name]

    def plugins(self) -> dict[str, Plugin[T]]:
        """What installed packages add, by name; read once, and nothing of it imported."""
        if self._plugins is None:
            self._plugins = self._discover()
        return {name: plugin for name, plugin in self._plugins.items() if name not in self.built_in}

    def _discover(self) -> dict[str, Plugin[T]]:
        from importlib.metadata import (
            entry_points,  # takes as long as the rest of this file's imports together
        )

        found = dict(self._also())
        for entry in sorted(entry_points(group=self.group), key=lambda entry: entry.name):
            package = entry.dist.name if entry.dist is not None else entry.value
            problem = "is no plain word" if not entry.name.isidentifier() else ""
            problem = "is built in" if entry.name in self.built_in else problem
            if entry.name in found and found[entry.name].package != package:
                problem = f"the package {found[entry.name].package} adds too"
            if problem:
                warnings.warn(
                    f"the {self.kind} {entry.name!r} of the package {package} is ignored: that name {problem}",
                    stacklevel=2,
                )
            else:
                found[entry.name] = Plugin(package, entry.load)
        return found

    def _load(self, name: str, plugin: Plugin[T]) -> T:
        try:
            made = plugin.load()
            if not self._accepts(made):
                raise TypeError(f"it is a {type(made).__name__}")
        except Exception as cause:  # the package's own code runs here
            raise ConfigError(
                f"{self.kind} {name!r} of the package {plugin.package} cannot be loaded "
                f"({type(cause).__name__}: {cause}); correct or uninstall that package"
            ) from cause
        return made

    def __getitem__(self, name: str) -> T:
        if name in self.built_in:
            return self.built_in[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, self.plugins()[name])
        return self._loaded[name]

    def __setitem__(self, name: str, maker: T) -> None:
        self.built_in[name] = maker

    def __delitem__(self, name: str) -> None:
        del self.built_in[name]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.plugins()

    def __iter__(self) -> Iterator[str]:
        return iter((*self.built_in, *self.plugins()))

    def __len__(self) -> int:
        return len(self.built_in) + len(self.plugins())
