"""HOW bytes move: the process group's transfers, and the schemes that answer a codec's requests with them."""

from tacit.transports.allreduce import AllReduce
from tacit.transports.process_group import Scheme, Wire
from tacit.transports.server import Server
from tacit.transports.sharded import Sharded

SCHEMES: dict[str, type[Scheme]] = {"allreduce": AllReduce, "sharded": Sharded, "server": Server}

__all__ = ["SCHEMES", "AllReduce", "Scheme", "Server", "Sharded", "Wire"]
