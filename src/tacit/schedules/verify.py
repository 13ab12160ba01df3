"""The proof that a schedule does what it says: every contribution, at every rank, exactly once.

What a node holds of a chunk is a set of contributors, one bit a rank. Adding two sets that share a bit counts somebody
twice: the result is tainted, and a taint that reaches the end is a fault. Chunks never mix, so they are proven in blocks,
which bounds the memory: O(nodes x world / 8) bytes a chunk.
"""

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ScheduleError
from tacit.schedules.schedule import Ints, Schedule, Stage

_BLOCK_NBYTES = 256 * 2**20
Bits = NDArray[np.uint64]


def verify(schedule: Schedule) -> None:
    """Raises ScheduleError naming the fault unless `schedule` reaches its goal exactly. O(transfers x world / 64)."""
    for number, phase in enumerate(schedule.phases):
        _check_form(schedule, phase.stage, f"phase {number}")
        if phase.times > 1:
            _check_form(schedule, phase.at(phase.times - 1), f"phase {number}")
    if schedule.goal == "meet":
        return _check_pairs(schedule)
    words = -(-schedule.world // 64)
    block = max(1, _BLOCK_NBYTES // max(1, schedule.nodes * words * 8))
    for low in range(0, schedule.chunks, block):
        _check_chunks(schedule, low, min(schedule.chunks, low + block), words)
    return None


def _check_form(schedule: Schedule, stage: Stage, where: str) -> None:
    nodes, chunks = schedule.nodes, schedule.chunks
    faults = [
        (
            (stage.src < 0) | (stage.src >= nodes) | (stage.dst < 0) | (stage.dst >= nodes),
            f"names a node outside 0..{nodes - 1}",
        ),
        (stage.src == stage.dst, "sends to itself"),
        (
            (stage.chunk < 0) | (stage.count < 1) | (stage.chunk + stage.count > chunks),
            f"names chunks outside 0..{chunks - 1}",
        ),
    ]
    for wrong, fault in faults:
        if wrong.any():
            i = int(wrong.argmax())
            raise ScheduleError(f"{schedule.name}: {where}: the transfer {_text(stage, i)} {fault}")


def _check_chunks(schedule: Schedule, low: int, high: int, words: int) -> None:
    held, tainted = _start(schedule, low, high, words), np.zeros((schedule.nodes, high - low), bool)
    for number, stage in enumerate(schedule.stages()):
        src, dst, chunk, add = _expand(stage, low, high)
        if len(src):
            _apply(schedule, held, tainted, (src, dst, chunk, add), f"stage {number}", low)
    _check_end(schedule, held, tainted, low)


def _expand(stage: Stage, low: int, high: int) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """The stage's transfers inside chunks low..high, one entry a chunk, by destination, chunk and source."""
    first, last = np.maximum(stage.chunk, low), np.minimum(stage.chunk + stage.count, high)
    count = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(stage)), count)
    chunk = first[which] - low + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    order = np.lexsort((stage.src[which], chunk, stage.dst[which]))
    which = which[order]
    return stage.src[which], stage.dst[which], chunk[order], stage.add[which]


def _apply(
    schedule: Schedule,
    held: Bits,
    tainted: NDArray[np.bool_],
    sent: tuple[Ints, Ints, Ints, NDArray[np.bool_]],
    where: str,
    low: int,
) -> None:
    src, dst, chunk, add = sent
    starts = np.flatnonzero(np.r_[True, (dst[1:] != dst[:-1]) | (chunk[1:] != chunk[:-1])])
    sizes = np.diff(np.r_[starts, len(src)])
    mixed = (sizes > 1) & ~np.logical_and.reduceat(add, starts)
    if mixed.any():
        i = int(starts[mixed.argmax()])
        raise ScheduleError(
            f"{schedule.name}: {where}: rank {dst[i]} receives chunk {chunk[i] + low} more than once, and not only to add: the order would decide"
        )
    values, marks = held[src, chunk], tainted[src, chunk]
    to, at, adds = dst[starts], chunk[starts], add[starts]
    union, counted = np.bitwise_or.reduceat(values, starts), np.add.reduceat(_ones(values), starts)
    marked = np.logical_or.reduceat(marks, starts)
    union[adds] |= held[to[adds], at[adds]]
    counted[adds] += _ones(held[to[adds], at[adds]])
    marked[adds] |= tainted[to[adds], at[adds]]
    held[to, at], tainted[to, at] = union, marked | (counted != _ones(union))


def _ones(bits: Bits) -> Ints:
    return np.asarray(_popcount(bits).sum(axis=-1, dtype=np.int64))


def _popcount(bits: Bits) -> NDArray[np.uint8]:
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(bits), np.uint8)
    single = np.unpackbits(bits.view(np.uint8), axis=-1).reshape(*bits.shape, 64)  # numpy 1.26
    return np.asarray(single.sum(-1, dtype=np.uint8))


def _start(schedule: Schedule, low: int, high: int, words: int) -> Bits:
    held = np.zeros((schedule.nodes, high - low, words), np.uint64)
    rank = np.arange(schedule.world)
    bit = np.uint64(1) << (rank % 64).astype(np.uint64)
    if schedule.goal == "sum":
        held[rank, :, rank // 64] = bit[:, None]
        return held
    chunk = np.arange(low, high)
    owner = chunk // schedule.world if schedule.goal == "exchange" else chunk
    held[owner, chunk - low, owner // 64] = bit[owner]
    return held


def _check_end(schedule: Schedule, held: Bits, tainted: NDArray[np.bool_], low: int) -> None:
    """Compares what every rank holds with the goal, and names the first difference."""
    world, width = schedule.world, held.shape[1]
    chunk = np.arange(low, low + width)
    if schedule.goal == "sum":
        wanted = np.zeros((1, 1, held.shape[2]), np.uint64)
        for rank in range(world):
            wanted[0, 0, rank // 64] |= np.uint64(1) << np.uint64(rank % 64)
        where = np.ones((world, width), bool)
    else:
        owner = chunk // world if schedule.goal == "exchange" else chunk
        wanted = np.zeros((1, width, held.shape[2]), np.uint64)
        wanted[0, np.arange(width), owner // 64] = np.uint64(1) << (owner % 64).astype(np.uint64)
        where = np.ones((world, width), bool)
        if schedule.goal == "exchange":
            where = chunk[None, :] % world == np.arange(world)[:, None]
    wrong = where & (tainted[:world] | (held[:world] != wanted).any(axis=-1))
    if not wrong.any():
        return
    rank, at = (int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    names = np.broadcast_to(wanted, (1, width, held.shape[2]))[0, at] & ~held[rank, at]
    missing = [r for r in range(world) if names[r // 64] >> np.uint64(r % 64) & np.uint64(1)]
    fault = f"lacks the contribution of rank {missing[0]}" if missing else "has a contribution twice"
    more = f" ({int(wrong.sum())} such faults)" if wrong.sum() > 1 else ""
    raise ScheduleError(f"{schedule.name}: rank {rank} ends with chunk {at + low} that {fault}{more}")


def _check_pairs(schedule: Schedule) -> None:
    for number, stage in enumerate(schedule.stages()):
        partner = np.full(schedule.nodes, -1)
        partner[stage.src] = stage.dst
        once = len(np.unique(stage.src)) == len(stage) == len(np.unique(stage.dst))
        if (
            not once
            or not (partner[stage.dst] == stage.src).all()
            or not stage.add.all()
            or (stage.count != schedule.chunks).any()
        ):
            raise ScheduleError(
                f"{schedule.name}: stage {number} is not a matching: every pair must send each other everything, once"
            )


def _text(stage: Stage, i: int) -> str:
    verb = "add" if stage.add[i] else "copy"
    return f"{stage.src[i]} -> {stage.dst[i]} (chunks {stage.chunk[i]}..{stage.chunk[i] + stage.count[i] - 1}, {verb})"
