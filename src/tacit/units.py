"""Sizes, rates and times as text, parsed once at the edge: inside tacit a number is bytes, bits a second or seconds."""

import re

from tacit.errors import ConfigError

_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_RATES = {
    **{f"{prefix}bit": 10**power for prefix, power in (("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12))},
    **{f"{name}/s": 8 * factor for name, factor in _SIZES.items()},
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_size(text: str | int) -> int:
    """Bytes: `parse_size("4MiB") == 4194304`. A bare int is bytes already."""
    return text if isinstance(text, int) else round(_parse(text, _SIZES, "size", "4MiB"))


def parse_rate(text: str) -> float:
    """Bits a second: `"10Gbit"` is 1e10, `"40GB/s"` is 3.2e11; a rate without a unit is refused."""
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


def _text(value: float, units: tuple[tuple[str, float], ...]) -> str:
    name, factor = next((u for u in units if abs(value) >= u[1]), units[-1])
    return f"{value / factor:.3g} {name}" if abs(value / factor) < 1000 else f"{value / factor:.0f} {name}"


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", str(text))
    if match is None:
        raise ConfigError(f"{what} {text!r} is not a number with a unit; write for example {example}")
    number, unit = match.groups()
    if unit not in units:
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ConfigError(
            f"{what} {text!r} {problem}; write for example {example} (units: {', '.join(units)})"
        )
    return float(number) * units[unit]
