"""
The C++ core: loops at the speed of memory. Arrays are contiguous, on the CPU, and 1-D but for factors.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing
import torch


def packed_nbytes(numel: int, bits: int, block: int) -> int:
    """Bytes that `numel` elements take once packed."""

def pack_blocks(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], bits: int, block: int, seed: int, stochastic: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> int:
    """
    How many blocks were not finite, after packing `x` into `out` (of packed_nbytes() bytes).

    A block with a NaN or an infinity decodes to NaN. `x` is only read; the GIL is released.
    """

def unpack_blocks(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], numel: int, bits: int, block: int, gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """
    out[i] = (out[i] if add else 0) + gain * decoded[i]; `data` is only read, the GIL is released.
    """

def random_bits(seed: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint32]) -> None:
    """
    Fills `out` with the bits that stochastic rounding uses for elements 0, 1, 2, ... under `seed`.
    """

def recycled(nbytes: int) -> object:
    """
    A DLPack capsule of `nbytes` bytes with anything in them, which return to a list of free memory.
    """

def release_recycled() -> None:
    """Gives the free memory of recycled() back to the system."""

def recycled_nbytes() -> int:
    """Bytes of memory of recycled() that nobody uses now."""

def keep(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], reference: torch.Tensor | numpy.typing.NDArray[numpy.float32], out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> float:
    """
    out = x, and |x - reference|^2 in the same pass; they do not overlap, the GIL is released.
    """

def mean(total: torch.Tensor | numpy.typing.NDArray[numpy.float32], count: int, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> bool:
    """
    out = total / count, and whether all of it is finite in the same pass; `out` may be `total`. The GIL is released.
    """

def mean_bf16(total: torch.Tensor | numpy.typing.NDArray[numpy.uint16], count: int, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> bool:
    """The same of the bits of bfloat16."""

def hush_padded(numel: int) -> int:
    """Lanes of `numel` elements; their indices take half as many bytes."""

def hush_blocks(numel: int) -> int:
    """Norms of `numel` elements: 8 a piece."""

def hush_norms(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], out: torch.Tensor | numpy.typing.NDArray[numpy.float64], threads: int = 1) -> None:
    """
    The norm of each block into `out`, of hush_blocks(); not finite if the block is not.
    """

def hush_encode(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], norms: torch.Tensor | numpy.typing.NDArray[numpy.float64], sign_seed: int, dither_seed: int, place: int, alpha: float, range: float, granularity: int, cell: torch.Tensor | numpy.typing.NDArray[numpy.uint8], out: torch.Tensor | numpy.typing.NDArray[numpy.uint8], threads: int = 1) -> None:
    """
    Rotated, dithered and rounded to the 4-bit index cell[floor(2 v)], two a byte into `out`.

    `out` has hush_padded() / 2 bytes; `x` is only read; the GIL is released. See native/rotated.h.
    """

def hush_decode(lanes: torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32], norms: torch.Tensor | numpy.typing.NDArray[numpy.float64], sign_seed: int, dither_seed: int, offsets: torch.Tensor | numpy.typing.NDArray[numpy.float32], range: float, granularity: int, out: torch.Tensor | numpy.typing.NDArray[numpy.float32], gain: float, threads: int = 1) -> None:
    """
    out = gain * the rotation undone of (lane + offsets[dither nibble]) steps.

    A block whose norm is not finite decodes to NaN. `lanes`, of hush_padded(), are only read.
    """

def add_table(index: torch.Tensor | numpy.typing.NDArray[numpy.uint8], numel: int, table: torch.Tensor | numpy.typing.NDArray[numpy.uint8], lanes: torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32], threads: int = 1) -> int:
    """
    How many lanes would have passed the limit of their type, after lanes += table[index], saturating.
    """

def lookup_table(index: torch.Tensor | numpy.typing.NDArray[numpy.uint8], numel: int, table: torch.Tensor | numpy.typing.NDArray[numpy.uint8], lanes: torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32], threads: int = 1) -> None:
    """
    lanes = table[index]: 4-bit indices, the even element in the low nibble.
    """

def thc_padded(numel: int, slice_log2: int) -> int:
    """Lanes of `numel` elements."""

def thc_encode(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], norms: torch.Tensor | numpy.typing.NDArray[numpy.float64], slice_log2: int, block_log2: int, sign_seed: int, round_seed: int, t_p: float, table: torch.Tensor | numpy.typing.NDArray[numpy.uint8], bits: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8], threads: int = 1) -> None:
    """
    Rotated, clamped and rounded stochastically to indices into `table`, packed into `out`.

    4 and 3 bits take a nibble, 2 bits a quarter of a byte; one norm a slice. `x` is only read.
    """

def thc_decode(lanes: torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32], numel: int, slice_log2: int, block_log2: int, sign_seed: int, norms: torch.Tensor | numpy.typing.NDArray[numpy.float64], t_p: float, granularity: int, count: int, out: torch.Tensor | numpy.typing.NDArray[numpy.float32], gain: float, threads: int = 1) -> None:
    """
    gain * the mean over the `count` ranks whose table values add up to `lanes`, of thc_padded().

    A slice whose norm is not finite decodes to NaN. `lanes` are only read; the GIL is released.
    """

def topk_pack(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], length: int, kept: int, bits: int, low: int, high: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """
    The `kept` largest of every `length` elements into rows of `out`; see native/topk.h.
    """

def topk_add(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], length: int, kept: int, bits: int, low: int, high: int, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """
    out += what the rows of `data` say; `data` is only read, the GIL is released.
    """

def low_rank_left(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], e: torch.Tensor | numpy.typing.NDArray[numpy.float32], q: torch.Tensor | numpy.typing.NDArray[numpy.float32], p: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """
    p[k, i] = the sum over j of (x + e)[i, j] * q[k, j], for a matrix in rows; see native/low_rank.h.
    """

def low_rank_right(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], e: torch.Tensor | numpy.typing.NDArray[numpy.float32], p: torch.Tensor | numpy.typing.NDArray[numpy.float32], q: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """q[k, j] = the sum over i of (x + e)[i, j] * p[k, i]."""

def low_rank_finish(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], e: torch.Tensor | numpy.typing.NDArray[numpy.float32], p: torch.Tensor | numpy.typing.NDArray[numpy.float32], own: torch.Tensor | numpy.typing.NDArray[numpy.float32], total: torch.Tensor | numpy.typing.NDArray[numpy.float32], out: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """
    out = p^T total, and e = (x + e) - p^T own where that is finite; they do not overlap, the GIL is released.
    """

def low_rank_orthonormalize(p: torch.Tensor | numpy.typing.NDArray[numpy.float32], seed: int) -> int:
    """
    How many rows of `p` were dependent and replaced by random ones, after all were made orthonormal.
    """

def low_rank_lefts(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], e: torch.Tensor | numpy.typing.NDArray[numpy.float32], matrices: torch.Tensor | numpy.typing.NDArray[numpy.int64], q: torch.Tensor | numpy.typing.NDArray[numpy.float32], p: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """
    low_rank_left of every matrix: start, rows, columns and rank of each are a row of `matrices`.
    """

def low_rank_rights(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], e: torch.Tensor | numpy.typing.NDArray[numpy.float32], matrices: torch.Tensor | numpy.typing.NDArray[numpy.int64], p: torch.Tensor | numpy.typing.NDArray[numpy.float32], q: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """low_rank_right of every matrix."""

def low_rank_finishes(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], e: torch.Tensor | numpy.typing.NDArray[numpy.float32], matrices: torch.Tensor | numpy.typing.NDArray[numpy.int64], p: torch.Tensor | numpy.typing.NDArray[numpy.float32], own: torch.Tensor | numpy.typing.NDArray[numpy.float32], total: torch.Tensor | numpy.typing.NDArray[numpy.float32], out: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """low_rank_finish of every matrix."""

def low_rank_orthonormalize_all(p: torch.Tensor | numpy.typing.NDArray[numpy.float32], shapes: torch.Tensor | numpy.typing.NDArray[numpy.int64], seed: int) -> int:
    """
    low_rank_orthonormalize of every factor: rank and length of each are a row of `shapes`.
    """

class RowIndex:
    """
    Keys of a shard and their rows, numbered in the order in which they were added; any 64-bit key.
    """

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    def find(self, keys: torch.Tensor | numpy.typing.NDArray[numpy.int64], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64], threads: int = 1) -> None:
        """The row of each key into `rows`; -1 where there is none."""

    def add(self, keys: torch.Tensor | numpy.typing.NDArray[numpy.int64], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64]) -> int:
        """How many rows there are, after every key has one, which `rows` names."""

    def keys(self, out: torch.Tensor | numpy.typing.NDArray[numpy.int64]) -> None:
        """The keys by row into `out`, of len() elements."""

def row_route(keys: torch.Tensor | numpy.typing.NDArray[numpy.int64], table: int, order: torch.Tensor | numpy.typing.NDArray[numpy.int64], counts: torch.Tensor | numpy.typing.NDArray[numpy.int64]) -> None:
    """
    Positions of `keys` by owner, mix(table, key) mod len(counts), into `order`; how many into `counts`.
    """

def row_values(keys: torch.Tensor | numpy.typing.NDArray[numpy.int64], table: int, seed: int, normal: bool, scale: float, out: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """
    The first values of rows, by seed, table and key alone: uniform in [-scale, scale), or normal.
    """

def row_sums(gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], targets: torch.Tensor | numpy.typing.NDArray[numpy.int64], count: float, out: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """
    out[t] = the sum of the gradients with target t, in the order given, over `count`.
    """

def row_exact_sums(gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], targets: torch.Tensor | numpy.typing.NDArray[numpy.int64], exponent: int, count: float, out: torch.Tensor | numpy.typing.NDArray[numpy.float32], threads: int = 1) -> None:
    """
    The same as integers, round(gradient * 2^exponent): the same bits in any order; see native/rows.h.
    """

def row_sgd(weights: torch.Tensor | numpy.typing.NDArray[numpy.float32], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64], gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], rate: float, threads: int = 1) -> None:
    """
    w -= rate g, for the rows named, which increase; weights are float32 or bfloat16.
    """

def row_adagrad(weights: torch.Tensor | numpy.typing.NDArray[numpy.float32], squares: torch.Tensor | numpy.typing.NDArray[numpy.float32], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64], gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], rate: float, eps: float, threads: int = 1) -> None:
    """s += g^2;  w -= rate g / (sqrt(s) + eps)."""

def row_row_adagrad(weights: torch.Tensor | numpy.typing.NDArray[numpy.float32], squares: torch.Tensor | numpy.typing.NDArray[numpy.float32], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64], gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], rate: float, eps: float, threads: int = 1) -> None:
    """row_adagrad with one s a row: s += the mean of g^2."""

def row_ftrl(weights: torch.Tensor | numpy.typing.NDArray[numpy.float32], z: torch.Tensor | numpy.typing.NDArray[numpy.float32], squares: torch.Tensor | numpy.typing.NDArray[numpy.float32], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64], gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], rate: float, beta: float, l1: float, l2: float, threads: int = 1) -> None:
    """FTRL-proximal (McMahan et al. 2013); see native/rows.h."""

def row_lazy_adam(weights: torch.Tensor | numpy.typing.NDArray[numpy.float32], m: torch.Tensor | numpy.typing.NDArray[numpy.float32], v: torch.Tensor | numpy.typing.NDArray[numpy.float32], rows: torch.Tensor | numpy.typing.NDArray[numpy.int64], gradients: torch.Tensor | numpy.typing.NDArray[numpy.float32], rate: float, beta1: float, beta2: float, eps: float, threads: int = 1) -> None:
    """
    Adam over the rows named alone; `rate` has the bias corrections of the step in it.
    """

def simd() -> str:
    """The instruction set in use."""

def simd_variants() -> list[str]:
    """
    The instruction sets this CPU can run, slowest first; all give the same bits.
    """

def use_simd(name: str) -> None:
    """Runs on the named instruction set from now on, in all threads."""

WIRE_FORMAT: str = '<BBIQBBBBHH'

def wire_fields() -> list[tuple[str, int, int]]:
    """Name, offset and bytes of every field of the header."""

WIRE_ROWS_FORMAT: str = '<IIII'

def wire_rows_fields() -> list[tuple[str, int, int]]:
    """
    Name, offset and bytes of every field behind the header of a packet of rows.
    """

def wire_kinds() -> list[tuple[str, int]]:
    """Kinds of packets."""

def wire_lanes() -> list[tuple[str, int]]:
    """Lane types."""

def wire_verdicts() -> list[str]:
    """What is counted, one for each packet."""

def wire_events() -> list[str]:
    """What is counted beside it."""

WIRE_MAGIC: int = 161

WIRE_VERSION: int = 32768

WIRE_SATURATED: int = 128

WIRE_MORE: int = 64

WIRE_LOWER_NBYTES: int = 42

WIRE_MOST_JOBS: int = 256

WIRE_MOST_RANKS: int = 64

WIRE_MOST_SLOTS: int = 32768

WIRE_MOST_PAYLOAD: int = 8944

WIRE_MOST_ROWS: int = 8928

WIRE_ROWS_ACK: int = 1

def wire_bits(lanes: int) -> tuple[int, int]:
    """
    Bits of an element on the way up and on the way down; 0, 0 for no lane type.
    """

def wire_elements(lanes: int, mtu: int) -> int:
    """Elements that fit into one packet both ways."""

def wire_rows_room(mtu: int) -> int:
    """Bytes of a message that fit into one packet of rows."""

class Plane:
    """The aggregator's user-space plane, without sockets."""

    def __init__(self, slots: int) -> None: ...

    def receive(self, packet: bytes, source: tuple[str, int], now_ns: int = 0) -> list[tuple[bytes, tuple[str, int]]]:
        """The answers to one packet, and where they go."""

    def expire(self, now_ns: int) -> list[tuple[bytes, tuple[str, int]]]:
        """What goes out because deadlines of lossy jobs are over."""

    def receive_rows(self, packets: numpy.typing.NDArray[numpy.uint8], sources: list[tuple[str, int]]) -> tuple[int, int]:
        """
        How many answers there were to a packet a row, and the nanoseconds they took; for benchmarks.
        """

    def add_job(self, id: int, cookie: int, members: Sequence[tuple[str, int]], lanes: int, elements: int, first_slot: int, slots: int, quorum: int, table: bytes, below: int = 0, upstream: tuple[tuple[str, int], int, int, int, int, int, int, int, bool] | None = None, shards: int = 0, deadline_ns: int = 0) -> None:
        """
        Packets of the job are summed from now on; ValueError if it contradicts itself or another job.
        """

    def remove_job(self, id: int) -> None:
        """Forgets the job and its sums; its packets are answered with 'unknown'."""

    def jobs(self) -> list[int]:
        """Ids of the jobs."""

    def counts(self) -> dict[str, int]:
        """Packets by verdict, and events, of all jobs and of none."""

    def stats(self, id: int) -> dict[str, Any]:
        """
        One job: counts, bytes, unfinished chunks, and (packets, last_ns, missing, left_out) by member.
        """

class UdpPlane:
    """The user-space plane on UDP sockets, in threads of its own."""

    def __init__(self, listen: tuple[str, int], slots: int, threads: int, buffer_nbytes: int) -> None: ...

    def address(self) -> tuple[str, int]:
        """Where it listens."""

    def start(self) -> None:
        """Serves until stop()."""

    def stop(self) -> None:
        """
        Returns when the threads have ended and the port is free. A second call does nothing.
        """

    def sockets(self) -> dict[str, int]:
        """
        Packets that found the receive buffer full, answers that could not be sent, failed calls.
        """

    @staticmethod
    def now_ns() -> int:
        """The clock of `last_ns`."""

    def add_job(self, id: int, cookie: int, members: Sequence[tuple[str, int]], lanes: int, elements: int, first_slot: int, slots: int, quorum: int, table: bytes, below: int = 0, upstream: tuple[tuple[str, int], int, int, int, int, int, int, int, bool] | None = None, shards: int = 0, deadline_ns: int = 0) -> None:
        """
        Packets of the job are summed from now on; ValueError if it contradicts itself or another job.
        """

    def remove_job(self, id: int) -> None:
        """Forgets the job and its sums; its packets are answered with 'unknown'."""

    def jobs(self) -> list[int]:
        """Ids of the jobs."""

    def counts(self) -> dict[str, int]:
        """Packets by verdict, and events, of all jobs and of none."""

    def stats(self, id: int) -> dict[str, Any]:
        """
        One job: counts, bytes, unfinished chunks, and (packets, last_ns, missing, left_out) by member.
        """

class AggregatorClient:
    """A rank's UDP socket to an aggregator."""

    def __init__(self, bind: tuple[str, int], buffer_nbytes: int) -> None: ...

    def address(self) -> tuple[str, int]:
        """Where it is bound."""

    def start(self, id: int, cookie: int, members: Sequence[tuple[str, int]], lanes: int, elements: int, first_slot: int, slots: int, quorum: int, table: bytes, rank: int, plane: tuple[str, int], chunk: int, segment: bool, window: int = 0) -> None:
        """Is `rank` of this job from now on."""

    def begin(self, data: numpy.typing.NDArray[numpy.uint8], out: numpy.typing.NDArray[numpy.uint8], numel: int) -> None:
        """
        A vector to be summed; the caller keeps both arrays until it is done or abandoned.
        """

    def wait(self, patience_s: float, settle_s: float) -> str:
        """Works on the vector until an outcome is known, and names it."""

    def abandon(self) -> None:
        """Gives the vector up; chunk numbers go on behind it."""

    def close(self) -> None:
        """Frees the port, for good."""

    @property
    def next_chunk(self) -> int: ...

    def ahead(self) -> int:
        """
        Between two vectors: chunks from the next one on that others have closed already.
        """

    @property
    def saturated(self) -> bool:
        """Whether a lane of the last sum met its limit."""

    def counts(self) -> bytes:
        """Ranks in the sum of each chunk of the last vector."""

    def stats(self) -> dict[str, Any]:
        """Figures since it was built."""

class RowFlows:
    """A member's UDP socket to all others, through an aggregator."""

    def __init__(self, bind: tuple[str, int], buffer_nbytes: int) -> None: ...

    def address(self) -> tuple[str, int]:
        """Where it is bound."""

    def start(self, id: int, cookie: int, world: int, lanes: int, members: int, own: int, plane: tuple[str, int], room_nbytes: int, window_nbytes: int, first: int, segment: bool) -> None:
        """Is member `own` of this job from now on."""

    def begin(self, parts: list[numpy.typing.NDArray[numpy.uint8]], rooms: list[numpy.typing.NDArray[numpy.uint8]]) -> None:
        """
        The next exchange; the caller keeps all arrays until it is done or abandoned.
        """

    def wait(self, slice_s: float) -> str:
        """The outcome of the exchange; 'running' if there is none in time."""

    def abandon(self) -> None:
        """
        Gives the exchange up, and all later ones; the arrays are the caller's again.
        """

    def close(self) -> None:
        """Ends the thread and frees the port. A second call does nothing."""

    def here(self) -> list[bool]:
        """By member, whether its message of this exchange has come."""

    def acknowledged(self) -> list[bool]:
        """By member, whether it has acknowledged ours."""

    def mismatch(self) -> tuple[int, int, int]:
        """
        Whose message has another length than expected here, its length, and the expected one.
        """

    def stats(self) -> dict[str, Any]:
        """Figures since it was built."""

def block_sums(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, kind: int, out: torch.Tensor | numpy.typing.NDArray[numpy.float64]) -> None:
    """
    The sum of x (kind 0), |x| (1) or x^2 (2) over every block, in one order everywhere, or the largest |x| (3).
    """

def pack_signs(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, means: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """A bit an element, after 0, 1 or 2 means a block; see native/fewbits.h."""

def unpack_signs(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], block: int, means: int, gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """out[i] = (out[i] if add else 0) + gain * decoded[i]."""

def pack_two_bits(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """
    Sign and size in 2 bits, after the two mean sizes of a block; see native/fewbits.h.
    """

def unpack_two_bits(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], block: int, gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """out[i] = (out[i] if add else 0) + gain * decoded[i]."""

def pack_levels(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, bits: int, levels: int, euclidean: bool, seed: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """
    QSGD's levels of the norm of a block, rounded without bias; see native/fewbits.h.
    """

def unpack_levels(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], block: int, bits: int, gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """out[i] = (out[i] if add else 0) + gain * decoded[i]."""

def pack_ternary(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, limits: torch.Tensor | numpy.typing.NDArray[numpy.float32], scales: torch.Tensor | numpy.typing.NDArray[numpy.float32], seed: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """TernGrad's codes, 2 bits an element: 1 + the sign, or 1."""

def add_codes(index: torch.Tensor | numpy.typing.NDArray[numpy.uint8], bits: int, table: torch.Tensor | numpy.typing.NDArray[numpy.uint8], add: bool, lanes: torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32]) -> None:
    """
    lanes[i] = (lanes[i] if add else 0) + table[code i], for codes of 1 or 2 bits.
    """

def decode_votes(lanes: torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32], times: int, count: int, vote: bool, block: int, scales: torch.Tensor | numpy.typing.NDArray[numpy.float32], out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """
    out = scale * (times * lane - count), or, where `vote`, scale * count * the sign of that.
    """

def pack_natural(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], seed: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """Stochastic powers of two, 9 bytes for 8 elements."""

def unpack_natural(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """out[i] = (out[i] if add else 0) + gain * decoded[i]."""

def pack_fp8(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, mantissa: int, stochastic: bool, seed: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """8-bit floats with a scale a block: `mantissa` 3 is e4m3, 2 is e5m2."""

def unpack_fp8(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], block: int, mantissa: int, gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """out[i] = (out[i] if add else 0) + gain * decoded[i]."""

def select_largest(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], length: int, kept: int, out: torch.Tensor | numpy.typing.NDArray[numpy.int64]) -> None:
    """
    The places of the `kept` largest magnitudes of every `length` elements, rising; of equal ones the first.
    """

def count_above(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], least: float) -> int:
    """How many elements are `least` or more in magnitude, or NaN."""

def select_above(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], least: float, out: torch.Tensor | numpy.typing.NDArray[numpy.int64]) -> None:
    """Which they are, rising; `out` has count_above() of them."""

def used_blocks(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], block: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """1 for each block of x that holds anything but zeros."""

def accumulate(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], momentum: float, u: torch.Tensor | numpy.typing.NDArray[numpy.float32], v: torch.Tensor | numpy.typing.NDArray[numpy.float32], wanted: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """
    u = momentum u + x; v = v + u; wanted = v. Where that is not finite, u and v stay as they are.
    """

def pack_places(places: torch.Tensor | numpy.typing.NDArray[numpy.int64], length: int, low: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> None:
    """Rising places below `length` in few bits; see native/sparse_select.h."""

def unpack_places(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], length: int, low: int, out: torch.Tensor | numpy.typing.NDArray[numpy.int64]) -> None:
    """
    What pack_places() wrote; ValueError where the bytes name places that are not there.
    """
