"""Sharded: a software parameter server with one shard on every rank.

    all-to-all: rank r receives shard r of every payload;  it adds them in float32 and packs the sum;
    all-gather: every rank receives every packed shard.

Bytes that leave a rank: (n - 1) / n x payload, twice. Any payload can take this road, since whoever adds may decode.
All ranks, the shard's owner too, use the packed sum: they stay bit-identical.
"""

from dataclasses import dataclass
from itertools import pairwise

from tacit import recycled
from tacit.requests import Codec, Sum, TableSum, Total, add_shard, even_cuts, seed_of
from tacit.schemes.scheme import Scheme
from tacit.transports import Wire


@dataclass(frozen=True, slots=True)
class Sharded(Scheme):
    """One shard of every payload a rank."""

    def __str__(self) -> str:
        return "sharded"

    def check(self, codec: Codec, world: int | None) -> None:
        """Every codec can be used here."""

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload, format = request.payload, request.payload.format
        cuts = format.cuts(payload.numel, wire.world)
        parts = [format.cut(payload.data, a, b) for a, b in pairwise(cuts)]
        start, stop = cuts[wire.rank], cuts[wire.rank + 1]
        received = wire.all_to_all(parts, [parts[wire.rank].numel()] * wire.world)
        packed, lost = add_shard(format, received, stop - start, seed_of(seed, "shard"))
        shards = wire.all_gather([part.numel() for part in parts], packed)
        value = format.unpack(format.join(shards), payload.numel)
        return Total(value, wire.world, None if lost is None else (start, stop, lost))

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        per_byte = 8 // request.bits
        cuts = even_cuts(request.numel, wire.world, unit=per_byte)
        spans = list(pairwise(cuts))
        parts = [request.index[a // per_byte : -(-b // per_byte)] for a, b in spans]
        start, stop = spans[wire.rank]
        lanes = recycled.zeros(stop - start, request.lanes.dtype, request.index.device)
        for index in wire.all_to_all(parts, [parts[wire.rank].numel()] * wire.world):
            request.add(index, lanes)
        shards = wire.all_gather([b - a for a, b in spans], lanes)
        return Total(recycled.join(shards), wire.world)
