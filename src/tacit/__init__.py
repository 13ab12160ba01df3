"""tacit: training on the network you have, as if it were faster, by sending less.

import tacit
handle = tacit.attach(model, optimizer, "every / int8(block=256) / sharded")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit import optim as optim
    from tacit import rows as rows
    from tacit.attachments import Handle, attach
    from tacit.attachments.mesh import mesh_backend, mesh_handle
    from tacit.codecs import register as register_codec
    from tacit.errors import TacitError
    from tacit.requests import (
        Codec,
        Context,
        Conversation,
        Gather,
        Lanes,
        Max,
        Merge,
        Payload,
        Reduced,
        Sum,
        TableSum,
        Total,
        Traits,
        loop_back,
    )
    from tacit.schemes import serve
    from tacit.strategy import Strategy

_WHERE = {
    "Codec": "requests",
    "Conversation": "requests",
    "Gather": "requests",
    "Handle": "attachments",
    "Reduced": "requests",
    "Lanes": "requests",
    "Max": "requests",
    "Merge": "requests",
    "Payload": "requests",
    "Strategy": "strategy",
    "Sum": "requests",
    "TableSum": "requests",
    "TacitError": "errors",
    "Total": "requests",
    "Traits": "requests",
    "Context": "requests",
    "attach": "attachments",
    "loop_back": "requests",
    "mesh_backend": "attachments.mesh",
    "mesh_handle": "attachments.mesh",
    "register_codec": "codecs",
    "serve": "schemes",
}

__all__ = [
    "Codec",
    "Context",
    "Conversation",
    "Gather",
    "Handle",
    "Lanes",
    "Max",
    "Merge",
    "Payload",
    "Reduced",
    "Strategy",
    "Sum",
    "TableSum",
    "TacitError",
    "Total",
    "Traits",
    "attach",
    "loop_back",
    "mesh_backend",
    "mesh_handle",
    "register_codec",
    "serve",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `tacit.sim` and the command line start without torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("tacit")
    if name in ("rows", "optim"):  # rooms of their own: tacit.rows.shard, tacit.optim.Lamb
        return import_module(f"tacit.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    value = getattr(import_module(f"tacit.{_WHERE[name]}"), {"register_codec": "register"}.get(name, name))
    globals()[name] = value
    return value
