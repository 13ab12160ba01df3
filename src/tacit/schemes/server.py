"""Server: one rank adds for all. The classic parameter server, and the shape that an aggregator in the network replaces.

    every rank sends its payload to the server;  it adds in rank order and packs the sum;  every rank receives it.

Bytes that leave a rank: its payload once; the server sends the packed sum n - 1 times, so its link is the limit.
"""

from dataclasses import dataclass

from torch import Tensor

from tacit.errors import ConfigError, PairingError
from tacit.requests import Codec, Sum, TableSum, Total, add_shard, seed_of
from tacit.schemes.scheme import Scheme
from tacit.transports import Wire


@dataclass(frozen=True, slots=True)
class Server(Scheme):
    """`rank` is the one that adds."""

    rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ConfigError(f"rank={self.rank}: the server is a rank of the process group, 0 or more")

    def __str__(self) -> str:
        return f"server(rank={self.rank})"

    def check(self, codec: Codec, world: int | None) -> None:
        if world is not None and self.rank >= world > 1:
            raise PairingError(
                f"server(rank={self.rank}) is not among {world} ranks; choose 0 to {world - 1}"
            )

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload, format = request.payload, request.payload.format
        parts = self._to_server(wire, payload.data)
        packed, lost = payload.data, None
        if wire.rank == self.rank:
            packed, lost = add_shard(format, parts, payload.numel, seed_of(seed, "shard"))
        value = format.unpack(self._to_all(wire, packed), payload.numel)
        return Total(value, wire.world, None if lost is None else (0, payload.numel, lost))

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        lanes = request.index.new_zeros(request.numel, dtype=request.lanes.dtype)
        for index in self._to_server(wire, request.index):
            if index.numel():
                request.add(index, lanes)
        return Total(self._to_all(wire, lanes), wire.world)

    def _to_server(self, wire: Wire, data: Tensor) -> list[Tensor]:
        """Every rank's data at the server; empty elsewhere."""
        parts = [data if rank == self.rank else data[:0] for rank in range(wire.world)]
        return wire.all_to_all(parts, [data.numel() if wire.rank == self.rank else 0] * wire.world)

    def _to_all(self, wire: Wire, data: Tensor) -> Tensor:
        """The server's data everywhere; it is as long as `data` here."""
        parts = [data if wire.rank == self.rank else data[:0]] * wire.world
        numels = [data.numel() if rank == self.rank else 0 for rank in range(wire.world)]
        return wire.all_to_all(parts, numels)[self.rank].clone()
