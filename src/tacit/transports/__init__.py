"""HOW bytes move: the process group's transfers, and the schemes that answer a codec's requests with them."""

from collections.abc import Callable

from tacit.transports.allreduce import AllReduce
from tacit.transports.dedicated import Dedicated, serve
from tacit.transports.process_group import Opens, Scheme, Wire
from tacit.transports.scheduled import Scheduled, schemes
from tacit.transports.server import Server
from tacit.transports.sharded import Sharded
from tacit.transports.star import Star

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "allreduce": AllReduce,
    "sharded": Sharded,
    "server": Server,
    "dedicated": Dedicated,
    "star": Star,
    **schemes(),
}

__all__ = [
    "SCHEMES",
    "AllReduce",
    "Dedicated",
    "Opens",
    "Scheduled",
    "Scheme",
    "Server",
    "Sharded",
    "Star",
    "Wire",
    "serve",
]
