"""Tables of an experiment file as frozen dataclasses: a field is a key, its annotation is its type, its default makes it optional.

A field whose name ends in a unit is written without it, as text: `limit_s` is read from `limit = "30min"`, `bucket_nbytes` from
`bucket = "4MiB"`, and each of `tune_nbytes` from `tune = ["1MiB", "25MiB"]`. msgspec converts and checks all the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec

from tacit.errors import ConfigError, did_you_mean
from tacit.units import parse_size, parse_time

_T = TypeVar("_T")
_UNITS = {"_nbytes": parse_size, "_s": parse_time}
_NOUNS: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    float | None: "number",
    tuple[str, ...]: "list of texts",
    tuple[int, ...]: "list of whole numbers",
}


def read_fields(cls: type[_T], table: Mapping[str, Any], where: str) -> _T:
    """`cls`, a dataclass, from a table whose keys are its fields; the first that is unknown, missing or mistyped is a ConfigError."""
    fields = {_key(f.name): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    given: dict[str, Any] = {}
    check_keys(table, tuple(fields), where)
    for key, value in table.items():
        name = fields[key].name
        given[name] = _value(value, name, types[name], f"{where}: {key}")
    missing = [key for key, f in fields.items() if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing; add a line {missing[0]} = ...")
    return cls(**given)


def check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raises ConfigError, with the nearest name, for the first key that is not `known`."""
    listed = (*known, "rates", "name") if "job" in known else known  # those two every job has
    for key in sorted(set(table) - set(known), key=str):
        raise ConfigError(
            f"{where}: unknown key {key!r}; {did_you_mean(str(key), listed)}known are {', '.join(listed)}"
        )


def _key(field: str) -> str:
    unit = next((unit for unit in _UNITS if field.endswith(unit)), "")
    return field.removesuffix(unit)


def _value(value: Any, name: str, as_type: Any, where: str) -> Any:
    """`value` as the field `name` has it: units parsed, lists as tuples, and of the right type."""
    parse = next((parse for unit, parse in _UNITS.items() if name.endswith(unit)), None)
    if parse is not None and as_type in (int, float):
        try:
            return parse(value)
        except ConfigError as cause:
            raise ConfigError(f"{where}: {cause}") from cause
    if parse is not None and isinstance(value, list | tuple):
        return tuple(_value(each, name, int, where) for each in value)
    try:
        return msgspec.convert(value, as_type)
    except msgspec.ValidationError:
        raise ConfigError(f"{where} = {value!r} is no {_NOUNS[as_type]}") from None
