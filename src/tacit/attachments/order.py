"""In which order buckets leave where the next forward pass waits for each of them alone: what it needs first goes first.

The order is computed once, from times that all ranks have agreed on: an order that each rank found for itself, from what happens to be
ready there, would differ between ranks, and their collectives would not meet.
"""

from collections.abc import Sequence


def by_need(ready_s: Sequence[float], took_s: Sequence[float], need: Sequence[float]) -> list[int]:
    """Buckets in the order in which they should leave: whenever the wire is free, of those that are ready the one needed first.

    `ready_s[b]`: when backward has computed bucket b; `took_s[b]`: how long it occupies the wire; `need[b]`: its place in the next
    forward pass. Where none is ready, the next one to be.
    """
    left, order, now_s = set(range(len(ready_s))), list[int](), 0.0
    while left:
        now_s = max(now_s, min(ready_s[b] for b in left))
        first = min((b for b in left if ready_s[b] <= now_s), key=lambda b: (need[b], b))
        left.remove(first)
        order.append(first)
        now_s += took_s[first]
    return order
