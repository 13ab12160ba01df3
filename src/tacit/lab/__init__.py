"""The lab: a network from Linux namespaces with shaped links, on one machine, as root or as anybody.

    with lab.up(star(4, rate_bps=100e6)) as hosts:
        hosts.command("h0", ["ping", "-c1", hosts["h1"].address])

`plan.py` says what is built (pure values), `keeper.py` holds it, `wiring.py` builds it over netlink, `calibration.py` holds it to
what it claims; `experiment.py` reads a file, `session.py` runs it, and `jobs/` is what can be run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.lab.calibration import calibrate
    from tacit.lab.errors import GateError, LabError, NoNamespacesError
    from tacit.lab.lab import Host, Lab, kernel_features, up

_WHERE = {
    "GateError": "errors",
    "Host": "lab",
    "Lab": "lab",
    "LabError": "errors",
    "NoNamespacesError": "errors",
    "calibrate": "calibration",
    "kernel_features": "lab",
    "up": "lab",
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
