"""The kernels of tacit._core in plain torch: same signatures, same operations in the same order, same bits.

What a CUDA tensor takes, and the readable twin that the tests hold the C++ against. `kernels(x)` chooses.
Two exceptions add in torch's own order, and agree to rounding only: `hush_norms`, and the products of low_rank_*.
Shared randomness comes from a counter-based generator: 32 bits for (seed, index), the same everywhere.
"""

import sys
from collections import Counter
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit import _core

COLUMNS = 8  # hush: blocks of a segment, side by side, one SIMD lane each
ROWS = 1024  # hush: elements of a full block
_LEAST_ROWS = 64
_WHOLE_ROWS = 8192
_WINDOW = 32  # whole pieces side by side
_RUNS = 32  # of equal length in a vector: a piece takes some of its rows from each
_LEAST_SLICE = 8
_TINY = 1e-30  # a block below this counts as zero: 1 / scale must stay finite
_SCALE_NBYTES = 4
_SMALLEST_UNIT = 2.0**-120  # blocks of few bits below it count as zero
_FITTING = 4  # as in native/fewbits_kernels.cpp
_LARGEST = torch.finfo(torch.float32).max
_INFINITY_BITS = 0x7F800000
_DEPENDENT = 1e-5  # of its norm: what is left of a row in the span of others is the rounding of float32
_ROW_KEY = 0x9E3779B97F4A7C15  # between the seeds of two rows
_FACTOR_KEY = 0xD1B54A32D192ED03  # and of two factors
_ORDINARY = 2.0**-40, 2.0**60  # norms whose blocks are rotated as they are; see native/rotated.cpp


def kernels(x: Tensor) -> Any:
    """The kernels for tensors like `x`: C++ on the CPU, torch elsewhere."""
    return _core if x.device.type == "cpu" else sys.modules[__name__]


# ---- randomness and rotation ----


def random_words(seed: int, numel: int, device: torch.device) -> Tensor:
    """32 random bits for each index below 2^32, as int64."""
    low, high, mask = seed & 0xFFFFFFFF, seed >> 32, 0xFFFFFFFF
    x = torch.arange(numel, dtype=torch.int64, device=device)
    x = ((x * 0x9E3779B9 + low) & mask) ^ high
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def _bits(seed: int, numel: int, width: int, device: torch.device) -> Tensor:
    """`width` random bits an element, 32 / width elements a word, the first in the low bits."""
    words = random_words(seed, -(-numel * width // 32), device)
    shifts = torch.arange(0, 32, width, device=device)
    bits: Tensor = (words[:, None] >> shifts) & (2**width - 1)
    return bits.reshape(-1)[:numel]


def _uniform(seed: int, numel: int, device: torch.device) -> Tensor:
    return (random_words(seed, numel, device) >> 8).float() * 2.0**-24


def _flip(x: Tensor, seed: int) -> Tensor:
    return torch.where(_bits(seed, x.numel(), 1, x.device).bool(), -x, x)


def hadamard(x: Tensor) -> Tensor:
    """The unnormalised transform along dimension 1 of (batch, 2^k, columns): butterflies for h = 1, 2, 4, ..."""
    batch, rows, columns = x.shape
    h = 1
    while h < rows:
        pairs = x.view(batch, rows // (2 * h), 2, h, columns)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([a + b, a - b], dim=2).view(batch, rows, columns)
        h *= 2
    return x


def _f32(value: float) -> float:
    """`value` as float32 has it."""
    return float(torch.tensor(value, dtype=torch.float32))


def _pack4(index: Tensor) -> Tensor:
    index = index.to(torch.uint8)
    return index[0::2] | (index[1::2] << 4)


def _units(norms: Tensor) -> Tensor:
    """The power of two that brings each norm near 1; 1 where it is ordinary, 0 or not finite."""
    low, high = _ORDINARY
    odd = norms.isfinite() & (norms > 0) & ~((norms >= low) & (norms <= high))
    exponent = torch.where(odd, torch.frexp(norms).exponent - 1, 0).clamp(-100, 100)
    return ((exponent.long() + 1023) << 52).view(torch.float64)


# ---- block integers ----


def pack_blocks(x: Tensor, bits: int, block: int, seed: int, stochastic: bool, out: Tensor) -> int:
    qmax, numel = float(2 ** (bits - 1) - 1), x.numel()
    rows = pad(x, (0, -numel % block)).view(-1, block)
    absmax = rows.abs().amax(1)
    finite = absmax.isfinite()
    usable = finite & (absmax >= _TINY)
    scale = torch.where(usable, absmax / qmax, torch.where(finite, 0.0, torch.nan))
    noise = _uniform(seed, numel, x.device) if stochastic else torch.full_like(x, 0.5)
    noise = pad(noise, (0, -numel % block)).view(-1, block)
    level = (
        torch.where(usable[:, None], rows, 0.0) * torch.where(usable, 1.0 / scale, 0.0)[:, None] + noise
    ).floor()
    code = torch.where(usable[:, None], level.clamp(-qmax, qmax), 0.0).to(torch.int16)
    if bits == 4:
        code = (code + 8).to(torch.uint8)
        code.view(-1)[numel:] = 0
        body = code[:, 0::2] | (code[:, 1::2] << 4)
    else:
        body = code.to(torch.int8).view(torch.uint8)
    records = torch.cat([scale.float()[:, None].contiguous().view(torch.uint8), body], dim=1)
    out.copy_(records.reshape(-1)[: out.numel()])
    return int((~finite).sum()) if x.device.type == "cpu" else 0  # counting would stop an accelerator


def unpack_blocks(
    data: Tensor, numel: int, bits: int, block: int, gain: float, add: bool, out: Tensor
) -> None:
    record, blocks = _SCALE_NBYTES + block * bits // 8, -(-numel // block)
    rows = pad(data, (0, blocks * record - data.numel())).view(blocks, record)
    scale = rows[:, :_SCALE_NBYTES].reshape(-1).view(torch.float32)[:, None]
    body = rows[:, _SCALE_NBYTES:].contiguous()
    if bits == 8:
        code = body.view(torch.int8).float()
    else:
        code = (torch.stack([body & 15, body >> 4], dim=2).reshape(blocks, block).to(torch.int16) - 8).float()
    value = (code * scale).reshape(-1)[:numel] * gain
    out.copy_(out + value if add else value)


# ---- dgc ----


def accumulate(x: Tensor, momentum: float, u: Tensor, v: Tensor, wanted: Tensor) -> None:
    velocity = torch.add(x, u, alpha=momentum)
    torch.add(v, velocity, out=wanted)
    finite = wanted.isfinite()
    u.copy_(torch.where(finite, velocity, u))
    v.copy_(torch.where(finite, wanted, v))


# ---- hush ----


def hush_pieces(numel: int) -> list[int]:
    """Rows of each piece: full ones, then the rest as a sum of powers of two, at most 511 elements of padding; a vector
    of more than 65,536 elements is padded to full pieces."""
    rows = -(-numel // COLUMNS)
    step = ROWS if rows > _WHOLE_ROWS else _LEAST_ROWS
    rows = -(-rows // step) * step
    full, rest = divmod(rows, ROWS)
    return [ROWS] * full + [size for size in (512, 256, 128, 64) if rest & size]


def _segments(flat: Tensor, rows: list[int]) -> list[Tensor]:
    """`flat`, in the order of pieces, as (batch, rows, columns) for each run of equal pieces."""
    counts = Counter(rows)
    parts = flat.split([size * count * COLUMNS for size, count in counts.items()])
    return [part.view(-1, size, COLUMNS) for part, size in zip(parts, counts, strict=True)]


def _into_pieces(x: Tensor, rows: list[int]) -> Tensor:
    """`x`, padded, in the order of pieces, each of which has a 32nd of its rows from each run of the vector."""
    full, rest = _shares(pad(x, (0, sum(rows) * COLUMNS - x.numel())).view(_RUNS, -1), rows)
    windows = _turn(full, 1).transpose(0, 1).reshape(-1, ROWS, _WINDOW, COLUMNS)
    parts = [windows, *(share.reshape(-1, *share.shape[2:]) for share in rest)]
    return torch.cat([part.transpose(-3, -2).reshape(-1) for part in parts])


def _out_of_pieces(flat: Tensor, rows: list[int]) -> Tensor:
    """The inverse of `_into_pieces`, padding included."""
    full, rest = _shares(torch.empty_like(flat).view(_RUNS, -1), rows)
    first, *others = flat.split([full.numel(), *(share.numel() for share in rest)])
    windows = first.view(-1, _WINDOW, ROWS, COLUMNS).transpose(1, 2)
    parts = [_turn(windows.reshape(full.shape[1], _RUNS, full.shape[2]).transpose(0, 1), -1)]
    for share, part in zip(rest, others, strict=True):
        parts.append(part.view(share.shape[2], -1, COLUMNS).transpose(0, 1))
    return torch.cat([part.reshape(_RUNS, -1) for part in parts], dim=1).reshape(-1)


def _shares(runs: Tensor, rows: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Views of each run: the shares of full windows, as (run, window, element), and that of the last window and of each
    smaller piece, as (run, row, piece, column)."""
    whole = rows.count(ROWS)
    full, last = divmod(whole, _WINDOW)
    shapes = [(ROWS // _RUNS, last)] * (last > 0) + [(size // _RUNS, 1) for size in rows[whole:]]
    share = _WINDOW * ROWS * COLUMNS // _RUNS
    first, *rest = runs.split([full * share, *(k * pieces * COLUMNS for k, pieces in shapes)], dim=1)
    shaped = [part.view(_RUNS, *shape, COLUMNS) for part, shape in zip(rest, shapes, strict=True)]
    return first.view(_RUNS, full, share), shaped


def _turn(full: Tensor, sign: int) -> Tensor:
    """(run, window, element) with the windows of each run turned, so that a window meets no layer at the same place."""
    windows = full.shape[1]
    t, w = torch.arange(_RUNS, device=full.device), torch.arange(windows, device=full.device)
    places = (w + sign * t[:, None] * (windows // _RUNS | 1)) % max(1, windows)
    return full.gather(1, places[:, :, None].expand_as(full))


def _by_block(factors: Tensor, segments: list[Tensor]) -> list[Tensor]:
    """One factor a block, shaped to multiply its segment."""
    parts = factors.split([s.shape[0] * COLUMNS for s in segments])
    return [part.view(-1, 1, COLUMNS) for part in parts]


def hush_norms(x: Tensor, out: Tensor, threads: int) -> None:
    """Sums in an order of its own: not the bits of the C++, but within 1e-6 of them."""
    rows = hush_pieces(x.numel())
    segments = _segments(_into_pieces(x, rows), rows) if rows else []
    out.copy_(torch.cat([*(s.double().square().sum(1).sqrt().view(-1) for s in segments), out[:0]]))


def hush_encode(
    x: Tensor, norms: Tensor, sign_seed: int, dither_seed: int, place: int, alpha: float, reach: float,
    granularity: int, cell: Tensor, out: Tensor, threads: int,
) -> None:  # fmt: skip
    if not x.numel():
        return
    g, padded = granularity, 2 * out.numel()
    units = _units(norms)
    norms = (norms / units).float()
    scale = torch.where(norms.isfinite() & (norms > 0), torch.full_like(norms, g / (2 * reach)) / norms, 0.0)
    rows = hush_pieces(x.numel())
    segments = _segments(_flip(_into_pieces(x, rows), sign_seed), rows)
    near_one = [s / u for s, u in zip(segments, _by_block(units.float(), segments), strict=True)]
    scaled = [hadamard(s) * k for s, k in zip(near_one, _by_block(scale, segments), strict=True)]
    u = _bits(dither_seed, padded, 4, x.device)
    shift = _f32(alpha / 16) * ((u + place) & 15).float() + _f32(g / 2 - alpha * 7.5 / 16)
    level = (2 * (torch.cat([s.reshape(-1) for s in scaled]) + shift)).floor().nan_to_num().clamp(0, 2 * g)
    out.copy_(_pack4(cell.to(x.device)[level.long()]))


def hush_decode(
    lanes: Tensor, norms: Tensor, sign_seed: int, dither_seed: int, offsets: Tensor, reach: float,
    granularity: int, out: Tensor, gain: float, threads: int,
) -> None:  # fmt: skip
    if not out.numel():
        return
    u = _bits(dither_seed, lanes.numel(), 4, lanes.device)
    levels = lanes.float() + offsets.to(lanes.device)[u]
    units = _units(norms)
    norms = (norms / units).float()
    step = _f32(2 * reach / granularity) * torch.where(norms.isfinite(), norms, torch.nan)
    rows = hush_pieces(out.numel())
    segments = _segments(levels, rows)
    factors = _by_block(step, segments)
    back = [hadamard(s * (k * (1 / s.shape[1]) * gain)) for s, k in zip(segments, factors, strict=True)]
    back = [s * u for s, u in zip(back, _by_block(units.float(), segments), strict=True)]
    flat = _flip(torch.cat([s.reshape(-1) for s in back]), sign_seed)
    out.copy_(_out_of_pieces(flat, rows)[: out.numel()])


# ---- thc ----


def thc_lengths(numel: int, size: int) -> list[int]:
    """Padded length of each slice."""
    full, rest = divmod(numel, size)
    return [size] * full + ([max(_LEAST_SLICE, 1 << (rest - 1).bit_length())] if rest else [])


def thc_encode(
    x: Tensor, norms: Tensor, slice_log2: int, block_log2: int, sign_seed: int, round_seed: int, t_p: float,
    table: Tensor, bits: int, out: Tensor, threads: int,
) -> None:  # fmt: skip
    if not x.numel():
        return
    lengths, t, levels = thc_lengths(x.numel(), 2**slice_log2), _f32(t_p), table.to(x.device).long()
    g = int(table[-1])
    flat = _flip(pad(x, (0, sum(lengths) - x.numel())), sign_seed)  # only the last slice is padded
    z = []
    units = _units(norms)
    for part, length, norm, unit in zip(flat.split(lengths), lengths, norms / units, units, strict=True):
        block = min(2**block_log2, length)
        usable = norm.isfinite() & (norm > 0)
        factor = torch.where(usable, sqrt(length) / (sqrt(block) * norm), 0.0).float()
        z.append(hadamard((part / unit.float()).view(-1, block, 1)).reshape(-1) * factor)
    v = (torch.cat(z).nan_to_num().clamp(-t, t) + t) * _f32(g / (2 * t_p))
    low = torch.searchsorted(levels, v.floor().clamp(0, g - 1).long(), right=True) - 1
    below, above = levels[low].float(), levels[low + 1].float()
    index = (low + ((v - below) > _uniform(round_seed, v.numel(), x.device) * (above - below))).to(
        torch.uint8
    )
    if bits == 2:
        a, b, c, d = index.view(-1, 4).unbind(1)
        out.copy_(a | b << 2 | c << 4 | d << 6)
    else:
        out.copy_(_pack4(index))


def thc_decode(
    lanes: Tensor, numel: int, slice_log2: int, block_log2: int, sign_seed: int, norms: Tensor, t_p: float,
    granularity: int, count: int, out: Tensor, gain: float, threads: int,
) -> None:  # fmt: skip
    if not numel:
        return
    lengths = thc_lengths(numel, 2**slice_log2)
    z = lanes.float() * _f32(2 * t_p / (granularity * count)) - _f32(t_p)
    parts, units = [], _units(norms)
    for part, length, norm, unit in zip(z.split(lengths), lengths, norms / units, units, strict=True):
        block = min(2**block_log2, length)
        back = torch.where(norm.isfinite(), norm, torch.nan) / (sqrt(length) * sqrt(block))
        turned = hadamard((part * back.float()).view(-1, block, 1)).reshape(-1)
        parts.append(turned * gain * unit.float())
    out.copy_(_flip(torch.cat(parts), sign_seed)[:numel])


# ---- few bits: records of a head and codes, see native/fewbits.h ----


def block_sums(x: Tensor, block: int, kind: int, out: Tensor) -> None:
    rows = _rows(x, block)
    if kind == 3:
        most = rows.abs().amax(1)
        out.copy_(torch.where(most.isfinite(), most, torch.nan))
    else:
        out.copy_(_sums(rows if kind == 0 else rows.abs() if kind == 1 else rows.double().square()))


def pack_signs(x: Tensor, block: int, means: int, out: Tensor) -> None:
    rows = _rows(x, block)
    heads = x.new_empty(len(rows), 0)
    if means:
        low, high = _sums(rows.clamp(max=0)), _sums(rows.clamp(min=0))
        lengths = _lengths(x.numel(), block, x.device)
        under = (rows < 0).sum(1)
        parts = [(high - low) / lengths] if means == 1 else [low / under, high / (lengths - under)]
        heads = torch.stack([part.nan_to_num(nan=0.0) for part in parts], dim=1).float()
        heads = torch.where(rows.isfinite().all(1, keepdim=True), heads, torch.nan)
    _write(heads, (rows >= 0) & _present(rows, x.numel()), 1, out)


def unpack_signs(data: Tensor, block: int, means: int, gain: float, add: bool, out: Tensor) -> None:
    heads, codes = _read(data, 4 * means, 1, block, out.numel())
    heads = _floats(heads) if means else torch.ones(len(codes), 1, device=data.device)
    low = heads[:, :1] if means == 2 else -heads[:, :1]
    _put(torch.where(codes.bool(), heads[:, -1:], low), gain, add, out)


def pack_two_bits(x: Tensor, block: int, out: Tensor) -> None:
    rows, lengths = _rows(x, block), _lengths(x.numel(), block, x.device)
    sizes = rows.abs()
    bits, finite = sizes.view(torch.int32), rows.isfinite().all(1)
    whole = _sums(sizes)
    limit = (1.3 * whole / lengths).float()
    for _ in range(_FITTING):
        over = bits > torch.where(finite, limit, torch.inf).view(torch.int32)[:, None]
        above, count = _sums(torch.where(over, sizes, 0.0)), over.sum(1)
        low = ((whole - above) / (lengths - count)).nan_to_num()
        high = (above / count).nan_to_num()
        limit = ((low + high) / 2).float()
    heads = torch.where(finite[:, None], torch.stack([low, high], dim=1).float(), torch.nan)
    codes = rows.signbit().to(torch.uint8) | over.to(torch.uint8) << 1
    _write(heads, torch.where(_present(rows, x.numel()), codes, 0), 2, out)


def unpack_two_bits(data: Tensor, block: int, gain: float, add: bool, out: Tensor) -> None:
    heads, codes = _read(data, 8, 2, block, out.numel())
    low, high = _floats(heads).view(len(codes), 2).split(1, dim=1)
    size = torch.where(codes > 1, high, low)
    _put(torch.where((codes & 1).bool(), -size, size), gain, add, out)


def pack_levels(
    x: Tensor, block: int, bits: int, levels: int, euclidean: bool, seed: int, out: Tensor
) -> None:
    rows, offset = _rows(x, block), 2 ** (bits - 1)
    most = rows.abs().amax(1)
    norm = _sums(rows.double().square()).sqrt() if euclidean else most.double()
    unit = (norm / levels).clamp(max=_LARGEST).float()
    unit = torch.where(most.isfinite(), torch.where(unit < _SMALLEST_UNIT, 0.0, unit), torch.nan)
    usable = (unit > 0)[:, None]
    noise = _rows(_uniform(seed, x.numel(), x.device), block)
    level = (torch.where(usable, rows, 0.0) * (1 / unit)[:, None].nan_to_num(posinf=0.0) + noise).floor()
    codes = torch.where(usable, level.clamp(-levels, levels), 0.0).to(torch.int16) + offset
    _write(unit[:, None], torch.where(_present(rows, x.numel()), codes, 0), bits, out)


def unpack_levels(data: Tensor, block: int, bits: int, gain: float, add: bool, out: Tensor) -> None:
    heads, codes = _read(data, 4, bits, block, out.numel())
    _put((codes.int() - 2 ** (bits - 1)).float() * _floats(heads), gain, add, out)


def pack_ternary(x: Tensor, block: int, limits: Tensor, scales: Tensor, seed: int, out: Tensor) -> None:
    rows = _rows(x, block)
    inverse = torch.where((scales >= _SMALLEST_UNIT) & (scales <= _LARGEST), 1 / scales, 0.0)
    size = torch.where(rows.abs() > limits[:, None], limits[:, None], rows.abs()) * inverse[:, None]
    chosen = _rows(_uniform(seed, x.numel(), x.device), block) < size
    codes = 1 + torch.where(rows < 0, -1, 1) * chosen
    _write(x.new_empty(1, 0), codes.view(1, -1)[:, : x.numel()], 2, out)


def decode_votes(
    lanes: Tensor, times: int, count: int, vote: bool, block: int, scales: Tensor, out: Tensor
) -> None:
    d = times * lanes.int() - count
    each = scales.repeat_interleave(block)[: out.numel()]
    out.copy_(each * (count * d.sign() if vote else d).float())


def pack_natural(x: Tensor, seed: int, out: Tensor) -> None:
    size = x.view(torch.int32) & 0x7FFFFFFF
    random = (random_words(seed, x.numel(), x.device) >> 9).int()
    exponent = ((size + random) >> 23).clamp(max=254)
    exponent = torch.where(size >= _INFINITY_BITS, 255, exponent)
    signs = _squeezed(_rows(x.view(torch.int32) < 0, 8), 1)
    rows = _rows(exponent.to(torch.uint8), 8)
    out.copy_(torch.cat([signs, rows], dim=1).reshape(-1)[: out.numel()])


def unpack_natural(data: Tensor, gain: float, add: bool, out: Tensor) -> None:
    heads, codes = _read(data, 1, 8, 8, out.numel())
    exponent = codes.int()
    size = (exponent << 23 | (exponent == 255).int() << 22).view(torch.float32)
    _put(torch.where(_spread(heads, 1).bool(), -size, size), gain, add, out)


def pack_fp8(x: Tensor, block: int, mantissa: int, stochastic: bool, seed: int, out: Tensor) -> None:
    shift, bias, most, reach = _fp8(mantissa)
    rows = _rows(x, block)
    absmax = rows.abs().amax(1)
    scale = torch.where(absmax.isfinite(), absmax / reach, torch.nan)
    scale = torch.where(scale < _SMALLEST_UNIT, 0.0, scale)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)[:, None]
    v = torch.where(rows.isfinite(), rows.abs(), 0.0) * inverse
    fine, grains = v < 2.0 ** (1 - bias), v * 2.0 ** (bias - 1 + mantissa)
    bits = v.view(torch.int32)
    if stochastic:
        words = _rows(random_words(seed, x.numel(), x.device), block)
        noise = (words >> (32 - shift)).int()
        small = (grains + (words >> 8).float() * 2.0**-24).floor()
    else:
        noise, small = (2 ** (shift - 1) - 1) + (bits >> shift & 1), grains.round()
    normal = ((bits + noise) >> shift) - (127 - bias << mantissa)
    code = torch.where(fine, small.clamp(max=255).int(), normal).clamp(max=most)
    code = code | (rows.view(torch.int32) < 0).int() << 7
    _write(scale[:, None], torch.where((scale > 0)[:, None], code, 0), 8, out)


def unpack_fp8(data: Tensor, block: int, mantissa: int, gain: float, add: bool, out: Tensor) -> None:
    shift, bias, _, _ = _fp8(mantissa)
    heads, codes = _read(data, 4, 8, block, out.numel())
    code = codes.int() & 0x7F
    normal = (code + (127 - bias << mantissa) << shift).view(torch.float32)
    size = torch.where(code >> mantissa > 0, normal, code.float() * 2.0 ** (1 - bias - mantissa))
    _put(torch.where(codes > 127, -size, size) * _floats(heads), gain, add, out)


def _fp8(mantissa: int) -> tuple[int, int, int, float]:
    """Bits that a float32's mantissa loses, the bias, the largest code and what it stands for."""
    return (20, 7, 0x7E, 448.0) if mantissa == 3 else (21, 15, 0x7B, 57344.0)


def _rows(x: Tensor, block: int) -> Tensor:
    """A row a block, the last filled up with zeros."""
    return pad(x, (0, -x.numel() % block)).view(-1, block)


def _present(rows: Tensor, numel: int) -> Tensor:
    return (torch.arange(rows.numel(), device=rows.device) < numel).view(rows.shape)


def _lengths(numel: int, block: int, device: torch.device) -> Tensor:
    """Elements of each block."""
    starts = torch.arange(0, numel, block, device=device)
    return (numel - starts).clamp(max=block)


def _sums(rows: Tensor) -> Tensor:
    """The sum of each row in the kernels' order: 16 sums side by side, added up for every 512 elements."""
    filled = pad(rows, (0, -rows.shape[1] % 512))
    lanes = filled.view(len(rows), filled.shape[1] // 512, 32, 16).double()
    for axis in (2, 2, 1):
        total = torch.zeros_like(lanes.select(axis, 0))
        for part in lanes.unbind(axis):
            total = total + part
        lanes = total
    return lanes


def _squeezed(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as rows of bytes, the first in the lowest bits."""
    rows = pad(codes.to(torch.uint8), (0, -codes.shape[1] % (8 // bits))).unflatten(1, (-1, 8 // bits))
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    packed: Tensor = (rows << shifts).sum(2, dtype=torch.uint8)
    return packed


def _spread(data: Tensor, bits: int) -> Tensor:
    """The inverse of `_squeezed`."""
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    codes: Tensor = data[:, :, None] >> shifts & (2**bits - 1)
    return codes.flatten(1)


def _write(heads: Tensor, codes: Tensor, bits: int, out: Tensor) -> None:
    """Records: a row of float32 heads, then that row's codes."""
    records = _squeezed(codes, bits)
    if heads.numel():
        records = torch.cat([heads.contiguous().view(torch.uint8), records], dim=1)
    out.copy_(records.reshape(-1)[: out.numel()])


def _read(data: Tensor, head_nbytes: int, bits: int, block: int, numel: int) -> tuple[Tensor, Tensor]:
    """Heads as bytes, and codes, a row a record."""
    record, blocks = head_nbytes + block * bits // 8, -(-numel // block)
    rows = pad(data, (0, blocks * record - data.numel())).view(blocks, record)
    return rows[:, :head_nbytes], _spread(rows[:, head_nbytes:], bits)


def _floats(heads: Tensor) -> Tensor:
    return heads.reshape(-1).view(torch.float32).view(len(heads), -1 if len(heads) else 1)


def _put(values: Tensor, gain: float, add: bool, out: Tensor) -> None:
    value = values.reshape(-1)[: out.numel()] * gain
    out.copy_(out + value if add else value)


# ---- low rank: the matrix x + e, of rows x columns, is about p^T q; `p` is (rank, rows), `q` is (rank, columns) ----


def low_rank_left(x: Tensor, e: Tensor, q: Tensor, p: Tensor, threads: int) -> None:
    if x.numel():
        p.copy_(_product(q, (x + e).view(p.shape[1], q.shape[1]).T))


def low_rank_right(x: Tensor, e: Tensor, p: Tensor, q: Tensor, threads: int) -> None:
    if x.numel():
        q.copy_(_product(p, (x + e).view(p.shape[1], q.shape[1])))


def low_rank_finish(
    x: Tensor, e: Tensor, p: Tensor, own: Tensor, total: Tensor, out: Tensor, threads: int
) -> None:
    if x.numel():
        left = (x + e).sub_(_product(p.T, own).view(-1))
        e.copy_(torch.where(left.isfinite(), left, e))
        out.copy_(_product(p.T, total).view(-1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, also where a training runs under autocast: what is sent and what is remembered are to add up."""
    if a.device.type == "meta":
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def low_rank_orthonormalize(p: Tensor, seed: int) -> int:
    """Zero on an accelerator, where counting would stop it; dependent rows are replaced there all the same."""
    rank, length = p.shape
    if not length:
        return 0
    on_cpu = p.device.type == "cpu"
    finite = p.isfinite().all()
    rows, done = torch.where(finite, p, 0.0).double(), torch.zeros_like(p, dtype=torch.float64)
    replaced = max(0, rank - length)
    for k in range(min(rank, length)):
        row = _without(rows[k], done[:k])
        dependent = row.norm() <= _DEPENDENT * rows[k].norm()
        if not on_cpu or dependent:
            row = torch.where(dependent, _without(_random_row(seed, k, length, p.device), done[:k]), row)
        done[k] = (row / row.norm()).float()
        replaced += on_cpu and bool(dependent)
    p.copy_(torch.where(finite, done, torch.nan))
    return replaced if on_cpu and bool(finite) else 0


def low_rank_lefts(x: Tensor, e: Tensor, matrices: Tensor, q: Tensor, p: Tensor, threads: int) -> None:
    """Of many matrices: start, rows, columns and rank of each are a row of `matrices`; their factors lie one behind the other."""
    for span, left, right in zip(
        _places(matrices), _factors(p, matrices, 1), _factors(q, matrices, 2), strict=True
    ):
        low_rank_left(x[span], e[span], right, left, threads)


def low_rank_rights(x: Tensor, e: Tensor, matrices: Tensor, p: Tensor, q: Tensor, threads: int) -> None:
    for span, left, right in zip(
        _places(matrices), _factors(p, matrices, 1), _factors(q, matrices, 2), strict=True
    ):
        low_rank_right(x[span], e[span], left, right, threads)


def low_rank_finishes(
    x: Tensor, e: Tensor, matrices: Tensor, p: Tensor, own: Tensor, total: Tensor, out: Tensor, threads: int
) -> None:
    lefts, owns, totals = _factors(p, matrices, 1), _factors(own, matrices, 2), _factors(total, matrices, 2)
    for span, left, mine, right in zip(_places(matrices), lefts, owns, totals, strict=True):
        low_rank_finish(x[span], e[span], left, mine, right, out[span], threads)


def low_rank_orthonormalize_all(p: Tensor, shapes: Tensor, seed: int) -> int:
    """Rank and length of each factor are a row of `shapes`."""
    sizes = [(rank, length) for rank, length in shapes.tolist()]
    parts = p.split([rank * length for rank, length in sizes])
    factors = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
    return sum(
        low_rank_orthonormalize(each, (seed + i * _FACTOR_KEY) % 2**64) for i, each in enumerate(factors)
    )


def _places(matrices: Tensor) -> list[slice]:
    return [slice(start, start + rows * columns) for start, rows, columns, _ in matrices.tolist()]


def _factors(flat: Tensor, matrices: Tensor, side: int) -> list[Tensor]:
    """By matrix, the factor of its rows (side 1) or columns (side 2)."""
    shapes = [(row[3], row[side]) for row in matrices.tolist()]
    return [
        part.view(shape)
        for part, shape in zip(flat.split([rank * length for rank, length in shapes]), shapes, strict=True)
    ]


def _without(row: Tensor, others: Tensor) -> Tensor:
    """`row` less its part in the span of `others`, which are orthonormal to float32: taken off twice."""
    for _ in range(2):
        row = row - (others @ row) @ others
    return row


def _random_row(seed: int, row: int, length: int, device: torch.device) -> Tensor:
    """From [-1/2, 1/2), and never 0: a row of one element is to have a direction too."""
    words = random_words((seed + row * _ROW_KEY) % 2**64, length, device) >> 8
    return (words.double() + 0.5) * 2.0**-24 - 0.5
