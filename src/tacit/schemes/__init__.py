"""WHO exchanges with whom: everything that the third part of a strategy can name, one file each; scheme.py is what they share."""

from collections.abc import Callable
from typing import Any

from tacit.registry import Registry
from tacit.schemes.allreduce import AllReduce
from tacit.schemes.dedicated import Dedicated, serve
from tacit.schemes.gossip import Gossip
from tacit.schemes.scheduled import Scheduled, added_schemes, schemes
from tacit.schemes.scheme import Channel, RowRequests, Scheme
from tacit.schemes.server import Server
from tacit.schemes.sharded import Sharded
from tacit.schemes.star import Star

_BUILT_IN: dict[str, Callable[..., Any]] = {
    "allreduce": AllReduce,
    "sharded": Sharded,
    "server": Server,
    "dedicated": Dedicated,
    "star": Star,
    **schemes(),
    "gossip": Gossip,
}
SCHEMES: Registry[Callable[..., Any]] = Registry(
    "scheme",
    "tacit.schemes",
    _BUILT_IN,
    also=added_schemes,
    accepts=lambda found: issubclass(found, Scheme) if isinstance(found, type) else callable(found),
)

__all__ = [
    "SCHEMES",
    "AllReduce",
    "Channel",
    "Dedicated",
    "Gossip",
    "RowRequests",
    "Scheduled",
    "Scheme",
    "Server",
    "Sharded",
    "Star",
    "serve",
]
