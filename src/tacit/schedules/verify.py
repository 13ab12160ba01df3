"""The proof that a schedule reaches its goal: every contribution, at every rank, exactly once.

What a node holds of a chunk is a set of contributors, one bit a rank (all-gather and all-to-all have one contributor a chunk:
one byte). Adding two sets that share a bit counts somebody twice: the result is tainted, for good unless a copy overwrites
it, and a taint that reaches the end is a fault. Chunks never mix and contributors never mix, so both are proven in blocks,
which bounds the memory. Only when a fault is found is its chunk replayed, transfer by transfer, to name its origin.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ScheduleError
from tacit.schedules.schedule import Goal, Ints, Schedule, Stage

_BLOCK_NBYTES = 128 * 2**20
Bits = NDArray[np.unsignedinteger[Any]]
Bools = NDArray[np.bool_]
_Event = tuple[int, str, int]  # stage, transfer, and a number


def verify(schedule: Schedule) -> None:
    """Raises ScheduleError naming the fault unless `schedule` reaches its goal exactly. O(transfers x world / 64)."""
    check_form(schedule)
    if schedule.goal == "meet":
        return _check_pairs(schedule)
    for block in _blocks(schedule):
        _check_block(schedule, block)
    return None


def check_form(schedule: Schedule) -> None:
    """Raises ScheduleError unless every transfer names nodes and chunks that exist, and the goal fits the chunks."""
    world, needed = schedule.world, {"gather": schedule.world, "exchange": schedule.world**2}
    if schedule.goal not in get_args(Goal):
        raise ScheduleError(
            f"{schedule.name}: no goal is called {schedule.goal!r}; {', '.join(get_args(Goal))} are"
        )
    if schedule.chunks != needed.get(schedule.goal, schedule.chunks) or schedule.chunks < 1 or world < 1:
        wanted = needed.get(schedule.goal, "1 or more")
        raise ScheduleError(
            f"{schedule.name}: {schedule.chunks} chunks; {schedule.goal} among {world} ranks needs {wanted}"
        )
    number = 0
    for phase in schedule.phases:
        _check_nodes(schedule, phase.stage, number)
        for k in range(phase.times):
            _check_range(schedule, phase.at(k), number + k)
        number += phase.times


def _check_nodes(schedule: Schedule, stage: Stage, number: int) -> None:
    src, dst, nodes = stage.src, stage.dst, schedule.nodes
    outside = (src < 0) | (src >= nodes) | (dst < 0) | (dst >= nodes)
    for wrong, fault in ((outside, f"names a node outside 0..{nodes - 1}"), (src == dst, "sends to itself")):
        if wrong.any():
            text = _text(stage, int(wrong.argmax()))
            raise ScheduleError(f"{schedule.name}: stage {number}: the transfer {text} {fault}")


def _check_range(schedule: Schedule, stage: Stage, number: int) -> None:
    last = stage.chunk + stage.count
    if len(stage) == 0 or (
        stage.chunk.min() >= 0 and stage.count.min() >= 1 and last.max() <= schedule.chunks
    ):
        return
    wrong = (stage.chunk < 0) | (stage.count < 1) | (last > schedule.chunks)
    text, limit = _text(stage, int(wrong.argmax())), schedule.chunks - 1
    raise ScheduleError(
        f"{schedule.name}: stage {number}: the transfer {text} names chunks outside 0..{limit}"
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Chunks low..high; of the sum, the contributors in uint64 columns first..last."""

    low: int
    high: int
    first: int = 0
    last: int = 1


def _blocks(schedule: Schedule) -> Iterator[_Block]:
    words, nbytes = (-(-schedule.world // 64), 8) if schedule.goal == "sum" else (1, 1)
    some = min(words, max(1, _BLOCK_NBYTES // (schedule.nodes * nbytes)))
    width = max(1, _BLOCK_NBYTES // (schedule.nodes * nbytes * some))
    for low in range(0, schedule.chunks, width):
        for first in range(0, words, some):
            yield _Block(low, min(schedule.chunks, low + width), first, min(words, first + some))


def _check_block(schedule: Schedule, block: _Block) -> None:
    """Runs the schedule on sets: row node x width + chunk of `held` is what the node holds of the chunk."""
    width = block.high - block.low
    held, tainted = _start(schedule, block), np.zeros(schedule.nodes * width, bool)
    for number, stage in enumerate(schedule.stages()):
        which, chunk = _expand(stage, block)
        if len(which) == 0:
            continue
        src, dst, add = stage.src[which] * width + chunk, stage.dst[which] * width + chunk, stage.add[which]
        if np.diff(np.sort(dst)).all():
            _apply_single(held, tainted, src, dst, add)
        else:
            order = np.argsort(dst, kind="stable")
            starts = np.flatnonzero(np.diff(dst[order], prepend=-1))
            _check_mixed(schedule, stage, number, which[order], starts, chunk[order] + block.low)
            _apply_many(held, tainted, src[order], dst[order][starts], add[order][starts], starts)
    _check_end(schedule, held, tainted, block)


def _start(schedule: Schedule, block: _Block) -> Bits:
    width, world = block.high - block.low, schedule.world
    if schedule.goal == "sum":
        held = np.zeros((schedule.nodes * width, block.last - block.first), np.uint64)
        rank = np.arange(64 * block.first, min(world, 64 * block.last))
        rows = held[: world * width].reshape(world, width, -1)
        rows[rank, :, rank // 64 - block.first] = (np.uint64(1) << (rank % 64).astype(np.uint64))[:, None]
        return held
    alone = np.zeros((schedule.nodes * width, 1), np.uint8)
    chunk = np.arange(block.low, block.high)
    owner = chunk // world if schedule.goal == "exchange" else chunk
    alone[owner * width + chunk - block.low] = 1
    return alone


def _expand(stage: Stage, block: _Block) -> tuple[Ints, Ints]:
    """Which transfers carry chunks of the block, one entry a chunk, and the chunk, counted from the block's first."""
    first, last = np.maximum(stage.chunk, block.low), np.minimum(stage.chunk + stage.count, block.high)
    count = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(stage)), count)
    return which, first[which] - block.low + np.arange(len(which)) - np.repeat(
        np.cumsum(count) - count, count
    )


def _apply_single(held: Bits, tainted: Bools, src: Ints, dst: Ints, add: Bools) -> None:
    """A stage in which nobody receives a chunk twice."""
    values, marks = held[src], tainted[src]
    if add.any():
        own = held[dst] if add.all() else np.where(add[:, None], held[dst], 0).astype(held.dtype)
        marks |= (own & values).any(axis=1) | (tainted[dst] & add)
        values |= own
    held[dst], tainted[dst] = values, marks


def _apply_many(held: Bits, tainted: Bools, src: Ints, dst: Ints, add: Bools, starts: Ints) -> None:
    """A stage in which some receive a chunk from several: groups of `src` from `starts` on go to `dst`."""
    values = held[src]
    union, counted = np.bitwise_or.reduceat(values, starts), np.add.reduceat(_ones(values), starts)
    marked = np.logical_or.reduceat(tainted[src], starts)
    own = held[dst[add]]
    union[add] |= own
    counted[add] += _ones(own)
    marked[add] |= tainted[dst[add]]
    held[dst], tainted[dst] = union, marked | (counted != _ones(union))


def _check_mixed(
    schedule: Schedule, stage: Stage, number: int, which: Ints, starts: Ints, chunk: Ints
) -> None:
    sizes = np.diff(starts, append=len(which))
    mixed = (sizes > 1) & ~np.logical_and.reduceat(stage.add[which], starts)
    if mixed.any():
        i = int(starts[mixed.argmax()])
        raise ScheduleError(
            f"{schedule.name}: stage {number}: node {stage.dst[which[i]]} receives chunk {chunk[i]} more than once, and not only to add, so the order would decide: {_text(stage, int(which[i]))}, {_text(stage, int(which[i + 1]))}"
        )


def _ones(bits: Bits) -> Ints:
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(bits).sum(axis=1, dtype=np.int64))
    return np.asarray(np.unpackbits(bits.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64))  # numpy 1.26


def _check_end(schedule: Schedule, held: Bits, tainted: Bools, block: _Block) -> None:
    """Compares what every rank holds with the goal, and explains the first difference."""
    world, width = schedule.world, block.high - block.low
    wanted = np.ones(1, np.uint8)
    if schedule.goal == "sum":
        rank = np.arange(64 * block.first, min(world, 64 * block.last))
        wanted = np.bitwise_or.reduceat(
            np.uint64(1) << (rank % 64).astype(np.uint64), np.arange(0, len(rank), 64)
        )
    rows: slice | Ints = slice(0, world * width)
    if schedule.goal == "exchange":  # only the destination must hold it
        chunk = np.arange(block.low, block.high)
        rows = chunk % world * width + chunk - block.low
    wrong = tainted[rows] | (held[rows] != wanted).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax() if isinstance(rows, slice) else rows[wrong.argmax()])
        raise ScheduleError(f"{schedule.name}: {_explain(schedule, row // width, row % width + block.low)}")


def _explain(schedule: Schedule, rank: int, chunk: int) -> str:
    """Replays one chunk, transfer by transfer, and describes what is wrong with it at `rank` and since when."""
    owner = {"gather": chunk, "exchange": chunk // schedule.world}.get(schedule.goal)
    held = [1 << r if r < schedule.world and owner in (None, r) else 0 for r in range(schedule.nodes)]
    twice: dict[int, _Event] = {}  # by node, its first double count; with the contributor
    received: list[_Event] = []  # all that `rank` receives; with what it held before
    for number, stage in enumerate(schedule.stages()):
        carry = np.flatnonzero((stage.chunk <= chunk) & (chunk < stage.chunk + stage.count)).tolist()
        before = {node: held[node] for i in carry for node in (int(stage.src[i]), int(stage.dst[i]))}
        marks, touched = dict(twice), set()
        for i in carry:
            src, dst, text = int(stage.src[i]), int(stage.dst[i]), _text(stage, i)
            if dst not in touched and not stage.add[i]:
                held[dst] = 0
                twice.pop(dst, None)
            touched.add(dst)
            both = held[dst] & before[src]
            found = [marks[src]] if src in marks else []
            found += [(number, text, (both & -both).bit_length() - 1)] if both else []
            found += [twice[dst]] if dst in twice else []
            if found:
                twice[dst] = min(found)
            held[dst] |= before[src]
            if dst == rank:
                received.append((number, text, before[rank]))
    wanted = (1 << schedule.world) - 1 if owner is None else 1 << owner
    missing = wanted & ~held[rank]
    faults = []
    if missing:
        faults.append(
            f"lacks the contribution of rank {_named(missing)}: {_why(received, missing & -missing)}"
        )
    if rank in twice:
        number, text, whom = twice[rank]
        faults.append(f"counts rank {whom} twice, first in stage {number} by the transfer {text}")
    return f"rank {rank} ends with chunk {chunk} that {'; it also '.join(faults)}"


def _named(missing: int) -> str:
    first, others = (missing & -missing).bit_length() - 1, missing.bit_count() - 1
    return f"{first} and {others} more" if others else str(first)


def _why(received: list[_Event], bit: int) -> str:
    lost = [(number, text) for number, text, before in received if before & bit]
    if lost:
        return f"it was overwritten in stage {lost[-1][0]} by the transfer {lost[-1][1]}"
    if received:
        return f"the last transfer of the chunk to it, {received[-1][1]} in stage {received[-1][0]}, comes without"
    return "no transfer brings it the chunk"


def _check_pairs(schedule: Schedule) -> None:
    """Every transfer of a stage must have its reverse, and no rank may pair with two."""
    for number, stage in enumerate(schedule.stages()):
        partner = np.full(schedule.nodes, -1)
        partner[stage.dst] = stage.src
        faults = (
            (stage.src >= schedule.world, "comes from an aggregator, which cannot meet"),
            ((stage.count != schedule.chunks) | ~stage.add, f"must add all {schedule.chunks} chunks"),
            (partner[stage.src] != stage.dst, "has no answer, or one of the two meets somebody else as well"),
            (partner[stage.dst] != stage.src, "is one of several to the same rank"),
            (
                np.bincount(stage.src, minlength=schedule.nodes)[stage.src] > 1,
                "is one of several from the same rank",
            ),
        )
        for wrong, fault in faults:
            if wrong.any():
                text = _text(stage, int(wrong.argmax()))
                raise ScheduleError(
                    f"{schedule.name}: stage {number} is not a matching: the transfer {text} {fault}"
                )


def _text(stage: Stage, i: int) -> str:
    verb = "add" if stage.add[i] else "copy"
    return f"{stage.src[i]} -> {stage.dst[i]} (chunks {stage.chunk[i]}..{stage.chunk[i] + stage.count[i] - 1}, {verb})"
