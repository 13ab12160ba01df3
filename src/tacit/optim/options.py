"""Options that several optimizers have, checked in one place."""

from collections.abc import Mapping
from typing import Any

from tacit.errors import ConfigError

_LIMITS = {  # name -> (below, what it is)
    "lr": (float("inf"), "a learning rate of 0 or more, for example 1e-3"),
    "weight_decay": (float("inf"), "0 or more; 0.01 is usual"),
    "eps": (float("inf"), "0 or more; 1e-8 is usual"),
    "trust": (float("inf"), "0 or more; 0.001 is the paper's"),
    "momentum": (1.0, "0 to below 1; 0.9 is usual"),
    "betas": (1.0, "two numbers from 0 to below 1; (0.9, 0.999) is usual"),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option outside of its limits, which are those of its name."""
    for name, value in options.items():
        below, what = _LIMITS.get(name, (None, ""))
        if below is None:
            continue
        pair = name == "betas"
        values = value if pair and isinstance(value, tuple | list) else (value,)
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if not numbers or len(values) != 1 + pair or not all(0 <= v < below for v in values):
            raise ConfigError(f"{name}={value!r}: {what}")
