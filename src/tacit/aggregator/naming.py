"""Members of a job in sentences: ranks (or racks) by their numbers, and behind them shards, which count from 0 again."""

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int], noun: str = "rank") -> str:
    """`rank 2`, `ranks 2 and 3`, `ranks 0, 2 and 3`."""
    *most, last = [str(rank) for rank in ranks]
    return f"{noun}s {', '.join(most)} and {last}" if most else f"{noun} {last}"


def members_text(members: Iterable[int], world: int, noun: str = "rank") -> str:
    """The same of a job with `world` ranks, the members behind which are shards: `rank 2`, `ranks 2 and 3, shard 0`."""
    found = list(members)
    parts = {noun: [m for m in found if m < world], "shard": [m - world for m in found if m >= world]}
    return ", ".join(ranks_text(numbers, kind) for kind, numbers in parts.items() if numbers)


def size_text(world: int, shards: int, noun: str = "rank") -> str:
    """`4 ranks`, `4 ranks and 1 shard`."""
    parts = [
        f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in ((noun, world), ("shard", shards))
    ]
    return " and ".join(parts if shards else parts[:1])
