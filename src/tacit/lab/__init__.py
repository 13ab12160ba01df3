"""The lab: a network from Linux namespaces with shaped links, on one machine, as root or as anybody.

    with lab.up(star(4, rate_bps=100e6)) as hosts:
        hosts.command("h0", ["ping", "-c1", hosts["h1"].address])

`network/` builds it, holds it and checks that it is what was asked for; `experiments/` reads experiment files and runs their jobs on it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.lab.errors import GateError, LabError, NoNamespacesError
    from tacit.lab.network.calibration import calibrate
    from tacit.lab.network.lab import Host, Lab, kernel_features, up

_WHERE = {
    "GateError": "errors",
    "Host": "network.lab",
    "Lab": "network.lab",
    "LabError": "errors",
    "NoNamespacesError": "errors",
    "calibrate": "network.calibration",
    "kernel_features": "network.lab",
    "up": "network.lab",
}

__all__ = [
    "GateError",
    "Host",
    "Lab",
    "LabError",
    "NoNamespacesError",
    "calibrate",
    "kernel_features",
    "up",
]


def __getattr__(name: str) -> Any:
    """Imported when first used: the keeper must not load numpy, whose threads would keep it out of a user namespace."""
    if name not in _WHERE:
        raise AttributeError(f"module 'tacit.lab' has no attribute {name!r}")
    value = getattr(import_module(f"tacit.lab.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
