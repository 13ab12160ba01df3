"""Sizes, rates and times as text, parsed once at the edge: inside tacit a number is bytes, bits a second or seconds.

Whatever is printed can be read again: `1.23 MB`, `40Gbit`, `40 Gbit/s`, `5 GB/s`, `25 us`. No number may be infinite.
"""

import re
from math import inf

from tacit.errors import ConfigError

_PREFIXES = (("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18))
_SIZES = {
    **{f"{prefix}B": 10**power for prefix, power in _PREFIXES},
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BITS = {f"{prefix}bit": 10**power for prefix, power in _PREFIXES}
_RATES = {
    **_BITS,
    **{f"{name}/s": factor for name, factor in _BITS.items()},
    **{f"{name}/s": 8 * factor for name, factor in _SIZES.items()},
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_LONGEST = 40  # characters of a size, a rate or a time


def parse_size(text: str | int) -> int:
    """Bytes: `parse_size("4MiB") == 4194304`. A bare int is bytes already."""
    return text if isinstance(text, int) else round(_parse(text, _SIZES, "size", "4MiB"))


def parse_rate(text: str) -> float:
    """Bits a second: `"10Gbit"` and `"10Gbit/s"` are 1e10, `"40GB/s"` is 3.2e11; a rate without a unit is refused."""
    return _parse(text, _RATES, "rate", "10Gbit or 1.25GB/s")


def parse_time(text: str) -> float:
    """Seconds: `parse_time("25us") == 2.5e-5`."""
    return _parse(text, _TIMES, "time", "25us")


def size_text(nbytes: float) -> str:
    """`nbytes` for people, in decimal units: 1234567 -> '1.23 MB'."""
    return _text(nbytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def time_text(seconds: float) -> str:
    """`seconds` for people: 0.00123 -> '1.23 ms'."""
    return _text(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def rate_text(rate_bps: float) -> str:
    """`rate_bps` as parse_rate reads it: 1e10 -> '10Gbit'."""
    steps = ((1e12, "Tbit"), (1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit"), (1.0, "bit"))
    factor, unit = next((step for step in steps if rate_bps >= step[0]), steps[-1])
    return f"{rate_bps / factor:.12g}{unit}"


def _text(value: float, units: tuple[tuple[str, float], ...]) -> str:
    name, factor = next((u for u in units if abs(value) >= u[1]), units[-1])
    return f"{value / factor:.3g} {name}" if abs(value / factor) < 1000 else f"{value / factor:.0f} {name}"


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    shown = repr(text) if len(str(text)) <= _LONGEST else f"{str(text)[:_LONGEST]!r}..."
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", str(text))
    if match is None or len(str(text)) > _LONGEST:
        raise ConfigError(f"{what} {shown} is not a number with a unit; write for example {example}")
    number, unit = match.groups()
    if unit not in units:
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ConfigError(
            f"{what} {shown} {problem}; write for example {example} (units: {', '.join(units)})"
        )
    value = float(number) * units[unit]
    if value == inf:
        raise ConfigError(f"{what} {shown} is infinite; write for example {example}")
    return value
