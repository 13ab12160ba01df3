"""The C++ rotating codecs against plain numpy twins, bit for bit, on every instruction set this CPU can run."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tacit import _core
from tacit.codecs import in_torch

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
f32 = np.float32

SIZES = [0, 1, 7, 8, 511, 512, 513, 4097, 8192, 8193, 100_003]
HUSH_SIZES = [
    0,
    1,
    511,
    4097,
    8191,
    8192,
    8193,
    16384,
    3 * 8192 - 300,
    3 * 8192 + 5,
    5 * 8192 + 4097,
    300_007,
]
HUSH_SIZES += [9 * 8192 - 1, 80 * 8192 - 511]  # padding in the last rows of every group, and of some
HUSH_SIZES += [(1 << 20) + 70_000]  # four windows, and a part of one
LANES = [np.uint8, np.uint16, np.int32]
SIGN_SEED, DITHER_SEED, ROUND_SEED = 0xDEADBEEF_12345678, 0x0123456789ABCDEF, (1 << 64) - 7

# hush: the nearest value of the best integer table with 16 values in 0..21, for each half step of 0..21.
RANGE, GRANULARITY, ALPHA = 2.84, 21, 0.9
TABLE = np.array([0, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 21], dtype=np.uint8)
CELL = np.array([np.abs(TABLE - (w / 2 + 0.25)).argmin() for w in range(64)], dtype=np.uint8)

# thc: the paper's tables, by bits.
T_P = 2.15387469
THC_TABLES = {
    4: np.array([0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30], dtype=np.uint8),
    3: np.array([0, 3, 5, 7, 9, 11, 13, 16], dtype=np.uint8),
    2: np.array([0, 13, 21, 34], dtype=np.uint8),
}


def gradient(numel: int, seed: int = 0) -> Floats:
    """Values over five decades, so that rotated elements are far from all alike."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(numel) * 10.0 ** rng.uniform(-4, 1, numel)).astype(f32)


def random_bits(seed: int, numel: int) -> Words:
    out = np.empty(numel, dtype=np.uint32)
    _core.random_bits(seed, out)  # test_blocks.py holds it to its own twin
    return out


def flip(x: Floats) -> Floats:
    """The elements of `x`, negated where their sign bit is set."""
    bits = random_bits(SIGN_SEED, len(x) // 32 + 1)
    e = np.arange(len(x))
    return np.where(bits[e >> 5] >> (e & 31).astype(np.uint32) & 1, -x, x).astype(f32)


def nibbles(numel: int) -> npt.NDArray[np.int64]:
    """The dither nibble of each element."""
    e = np.arange(numel)
    words = random_bits(DITHER_SEED, numel // 8)
    return (words[e >> 3] >> (4 * (e & 7)).astype(np.uint32) & 15).astype(np.int64)


def rotate(x: Floats) -> Floats:
    """Unnormalised Walsh-Hadamard along the first of two axes, low strides first."""
    h, shape = 1, x.shape
    while h < shape[0]:
        pairs = x.reshape(-1, 2, h, shape[1])
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(shape)
        h *= 2
    return x


def pack4(index: npt.NDArray[np.int64]) -> Bytes:
    return (index[0::2] | index[1::2] << 4).astype(np.uint8)


def unpack4(data: Bytes) -> Bytes:
    return np.stack([data & 15, data >> 4], axis=1).reshape(-1)


# ---- hush


def pieces(numel: int) -> list[slice]:
    """Each piece's elements."""
    rows, starts, at = -(-numel // 8), [], 0
    step = 1024 if rows > 8192 else 64
    rows = -(-rows // step) * step
    while at < rows:
        size = 1024 if rows - at >= 1024 else 1 << ((rows - at).bit_length() - 1)
        starts.append(slice(8 * at, 8 * (at + size)))
        at += size
    return starts


def padded(x: Floats, numel: int) -> Floats:
    return np.concatenate([x, np.zeros(numel - len(x), f32)])


def source(numel: int) -> npt.NDArray[np.int64]:
    """Where each element of the pieces, in their order, lies in the padded vector: a 32nd of each piece's rows in each
    32nd of the vector, those of up to 32 whole pieces side by side."""
    total, found = _core.hush_padded(numel) // 8, []
    whole = total // 1024
    full = whole // 32
    for number, piece in enumerate(pieces(numel)):
        rows, first = (piece.stop - piece.start) // 8, piece.start // 8
        window, s = divmod(number, 32) if number < whole else (number, 0)
        side_by_side = 32 if window < full else whole % 32 if number < whole else 1
        t, j = np.divmod(np.arange(rows), rows // 32)
        share = (first - s * rows) // 32
        if window < full:
            share = (window + t * (full // 32 | 1)) % full * 1024
        row = t * (total // 32) + share + j * side_by_side + s
        found.append((8 * row[:, None] + np.arange(8)).reshape(-1))
    return np.concatenate([np.empty(0, np.int64), *found])


def block_of(numel: int) -> npt.NDArray[np.int64]:
    """Which block each element is in."""
    found = np.empty(_core.hush_padded(numel), np.int64)
    for number, piece in enumerate(pieces(numel)):
        found[source(numel)[piece]] = np.tile(8 * number + np.arange(8), (piece.stop - piece.start) // 8)
    return found[:numel]


def unit_of(norms: Doubles) -> Floats:
    """The powers of two that blocks beyond 2^-40 to 2^60 are divided by before they are rotated."""
    odd = np.isfinite(norms) & (norms > 0) & ((norms < 2.0**-40) | (norms > 2.0**60))
    exponent = np.floor(np.log2(norms, out=np.zeros_like(norms), where=odd))
    return (2.0 ** np.clip(exponent, -100, 100)).astype(f32)


def in_pieces(x: Floats) -> Floats:
    return padded(x, _core.hush_padded(len(x)))[source(len(x))]


def twin_norms(x: Floats) -> Doubles:
    y = in_pieces(x).astype(np.float64)
    return np.concatenate(
        [np.empty(0), *(np.linalg.norm(y[piece].reshape(-1, 8), axis=0) for piece in pieces(len(x)))]
    )


def twin_encode(x: Floats, norms: Doubles, place: int) -> Bytes:
    x = in_pieces(x)
    signed, nibble, index = flip(x), nibbles(len(x)), np.zeros(len(x), np.int64)
    step, offset = f32(ALPHA / 16), f32(GRANULARITY / 2 - ALPHA * 7.5 / 16)
    for number, piece in enumerate(pieces(len(x))):
        unit = unit_of(norms[8 * number : 8 * number + 8])
        norm = (norms[8 * number : 8 * number + 8] / unit).astype(f32)
        usable = (norm > 0) & np.isfinite(norm)
        k = np.divide(f32(GRANULARITY / (2 * RANGE)), norm, out=np.zeros(8, f32), where=usable)
        t = rotate(signed[piece].reshape(-1, 8) / unit) * k
        v = t + (step * ((nibble[piece] + place) & 15).astype(f32) + offset).reshape(-1, 8)
        w = np.clip(np.nan_to_num(np.floor(2 * v), nan=0), 0, 2 * GRANULARITY).astype(np.int64)
        index[piece] = CELL[w].reshape(-1)
    return pack4(index)


def twin_decode(
    lanes: npt.NDArray[np.integer], numel: int, norms: Doubles, offsets: Floats, gain: float
) -> Floats:
    nibble, out = nibbles(len(lanes)), np.empty(len(lanes), f32)
    for number, piece in enumerate(pieces(numel)):
        unit = unit_of(norms[8 * number : 8 * number + 8])
        norm = (norms[8 * number : 8 * number + 8] / unit).astype(f32)
        rows = (piece.stop - piece.start) // 8
        q = f32(2 * RANGE / GRANULARITY) * norm * f32(1 / rows) * f32(gain)
        s = lanes[piece].astype(f32) + offsets[nibble[piece]]
        turned = rotate(s.reshape(-1, 8) * np.where(np.isfinite(norm), q, f32(np.nan)))
        with np.errstate(over="ignore"):
            out[piece] = (turned * unit).reshape(-1)
    back = np.empty_like(out)
    back[source(numel)] = flip(out)
    return back[:numel]


def norms_of(x: Floats, threads: int = 1) -> Doubles:
    out = np.full(_core.hush_blocks(len(x)), 9e9)
    _core.hush_norms(x, out, threads)
    return out


def encode(x: Floats, norms: Doubles, place: int = 0, threads: int = 1, alpha: float = ALPHA) -> Bytes:
    out = np.full(_core.hush_padded(len(x)) // 2, 0xEE, np.uint8)
    _core.hush_encode(x, norms, SIGN_SEED, DITHER_SEED, place, alpha, RANGE, GRANULARITY, CELL, out, threads)
    return out


def decode(
    lanes: npt.NDArray[np.integer],
    numel: int,
    norms: Doubles,
    offsets: Floats,
    gain: float = 1.0,
    threads: int = 1,
) -> Floats:
    out = np.full(numel, 9e9, f32)
    _core.hush_decode(lanes, norms, SIGN_SEED, DITHER_SEED, offsets, RANGE, GRANULARITY, out, gain, threads)
    return out


def offsets_for(places: list[int], alpha: float = ALPHA) -> Floats:
    """What to add to the sum of the table values of the ranks with these places: their dithers, and the centre."""
    dither = [sum(alpha * (((nibble + place) & 15) - 7.5) / 16 for place in places) for nibble in range(16)]
    return -(np.array(dither) + len(places) * GRANULARITY / 2).astype(f32)


@pytest.mark.parametrize(
    ("numel", "padded", "blocks"),
    [
        (0, 0, 0),
        (1, 512, 8),
        (513, 1024, 8),
        (8192, 8192, 8),
        (8193, 8704, 8 * 2),
        (16384 - 512, 16384 - 512, 8 * 5),  # 1024, 512, 256, 128, 64 rows
        (65_536, 65_536, 8 * 8),
        (65_537, 73_728, 8 * 9),  # beyond, to whole pieces
        (100_003, 106_496, 8 * 13),
    ],
)
def test_hush_pads_to_64_rows_and_cuts_them_into_pieces(numel: int, padded: int, blocks: int) -> None:
    assert (_core.hush_padded(numel), _core.hush_blocks(numel)) == (padded, blocks)
    assert 8 * len(pieces(numel)) == blocks


def test_a_piece_has_a_32nd_of_its_rows_from_each_32nd_of_the_vector(simd: str) -> None:
    """3 whole pieces, and one of 128 rows: a run has 32 rows of 3 pieces side by side, and 4 rows more."""
    x, run = np.zeros(3 * 8192 + 600, f32), 8 * (3 * 32 + 4)
    for t, k, piece, column, value in ((0, 0, 0, 0, 1), (31, 9, 2, 7, 2), (15, 20, 1, 3, 3)):
        x[t * run + k * 24 + 8 * piece + column] = value
    x[7 * run + 3 * 32 * 8 + 8 * 3 + 4] = 4
    norms = norms_of(x)
    assert {int(i): norms[i] for i in np.flatnonzero(norms)} == {0: 1, 23: 2, 11: 3, 28: 4}


@pytest.mark.parametrize("numel", [1 << 19, (1 << 20) + 70_000, 13 << 18])
def test_every_block_has_the_same_share_of_every_part_of_the_vector(numel: int) -> None:
    """Wherever a run of a 32nd lies in the vector, each block of 1024 has at most two shares of 32 in it."""
    part = _core.hush_padded(numel) // 32
    for start in (0, 5 * part, part // 2 + 3, numel - part):
        x = np.zeros(numel, f32)
        x[start : start + part] = 1
        assert norms_of(x).max() ** 2 <= 2 * 32


def test_a_window_meets_equal_layers_at_different_places(simd: str) -> None:
    """32 layers of 8 experts each: all blocks have some of every expert, for a run is a layer."""
    layer, expert = 8 * 32 * 256, 32 * 256
    x = np.zeros((32, layer), f32)
    x[:, :expert] = 1
    norms = norms_of(x.reshape(-1))
    assert len(norms) == 8 * 256 and norms.tolist() == pytest.approx([128**0.5] * len(norms))


@pytest.mark.parametrize("numel", HUSH_SIZES)
def test_hush_norms_are_those_of_the_blocks_and_the_same_bits_everywhere(numel: int) -> None:
    x, before, found = gradient(numel, seed=numel), _core.simd(), set()
    for variant in _core.simd_variants():
        _core.use_simd(variant)
        found |= {norms_of(x, threads).tobytes() for threads in (1, 2, 5)}
    _core.use_simd(before)
    assert len(found) == 1
    np.testing.assert_allclose(norms_of(x), twin_norms(x), rtol=1e-6)


@pytest.mark.parametrize("numel", HUSH_SIZES)
def test_hush_indices_match_the_twin_on_every_simd_and_thread_count(simd: str, numel: int) -> None:
    x = gradient(numel, seed=numel)
    norms = norms_of(x)
    for place, threads in ((0, 1), (5, 2), (15, 5)):
        assert encode(x, norms, place, threads).tobytes() == twin_encode(x, norms, place).tobytes()


@pytest.mark.parametrize(("lane", "threads"), [(np.uint8, 1), (np.uint16, 3), (np.int32, 2)])
@pytest.mark.parametrize("numel", HUSH_SIZES)
def test_hush_decodes_to_the_bits_of_the_twin(simd: str, numel: int, threads: int, lane: type) -> None:
    rng = np.random.default_rng(numel)
    top = min(np.iinfo(lane).max, 1 << 20)
    lanes = rng.integers(0, top, _core.hush_padded(numel), endpoint=True).astype(lane)
    norms = rng.uniform(0.1, 3, _core.hush_blocks(numel))
    offsets = rng.standard_normal(16).astype(f32)
    expected = twin_decode(lanes, numel, norms, offsets, 1 / 3)
    assert decode(lanes, numel, norms, offsets, 1 / 3, threads).tobytes() == expected.tobytes()


@pytest.mark.parametrize("numel", [0, 1, 511, 16384, 3 * 8192 - 300, 3 * 8192 + 5, 5 * 8192 + 4097, 300_007])
def test_hush_in_torch_gives_the_bits_of_the_core_for_the_same_norms(numel: int) -> None:
    x = torch.from_numpy(gradient(numel))
    cell, offsets = torch.from_numpy(CELL), torch.from_numpy(offsets_for([3]))
    lanes = torch.from_numpy(np.random.default_rng(1).integers(0, 256, _core.hush_padded(numel), np.uint8))
    norms, found = torch.from_numpy(norms_of(x.numpy())), {}
    for kernels in (_core, in_torch):
        summed, data, out = (
            torch.empty_like(norms),
            torch.empty(len(lanes) // 2, dtype=torch.uint8),
            x.clone(),
        )
        kernels.hush_norms(x, summed, 1)
        kernels.hush_encode(x, norms, SIGN_SEED, DITHER_SEED, 3, ALPHA, RANGE, GRANULARITY, cell, data, 1)
        kernels.hush_decode(lanes, norms, SIGN_SEED, DITHER_SEED, offsets, RANGE, 63, out, 0.5, 1)
        torch.testing.assert_close(summed, norms, rtol=1e-6, atol=0)
        found[kernels.__name__] = (data.numpy().tobytes(), out.numpy().tobytes())
    assert found["tacit._core"] == found["tacit.codecs.in_torch"]


@pytest.mark.parametrize("numel", [1 << k for k in range(9, 17)])
def test_every_size_of_piece_matches_the_twin(simd: str, numel: int) -> None:
    x = gradient(numel - 512)  # 2^k - 1 times 64 rows: every smaller piece once
    norms = norms_of(x)
    data = encode(x, norms, 3)
    assert data.tobytes() == twin_encode(x, norms, 3).tobytes()
    lanes, offsets = TABLE[unpack4(data)], offsets_for([3])
    assert (
        decode(lanes, len(x), norms, offsets).tobytes()
        == twin_decode(lanes, len(x), norms, offsets, 1.0).tobytes()
    )


@pytest.mark.parametrize("granularity", [1, 15, 31])
def test_every_cell_can_be_reached_and_the_ends_clamp(simd: str, granularity: int) -> None:
    x, cell = gradient(8192), np.arange(64, dtype=np.uint8) % 16
    out = np.empty(4096, np.uint8)
    norms = norms_of(x) / f32(3)  # too small a norm: many elements lie outside the range
    _core.hush_encode(x, norms, SIGN_SEED, DITHER_SEED, 0, 1.0, RANGE, granularity, cell, out)
    t = rotate(flip(x).reshape(-1, 8)) * (f32(granularity / (2 * RANGE)) / norms.astype(f32))
    d = f32(1 / 16) * nibbles(8192).astype(f32) + f32(granularity / 2 - 7.5 / 16)
    w = np.clip(np.floor(2 * (t + d.reshape(-1, 8))), 0, 2 * granularity).astype(np.int64)
    assert set(np.unique(w)) == set(range(2 * granularity + 1))
    assert out.tobytes() == pack4((w % 16).reshape(-1)).tobytes()


@pytest.mark.parametrize("numel", [512, 8192, 100_003])
def test_hush_errs_little_on_gaussian_data(numel: int) -> None:
    x = np.random.default_rng(1).standard_normal(numel).astype(f32)
    norms = norms_of(x)
    lanes = TABLE[unpack4(encode(x, norms, alpha=0.0))]  # no dither: the nearest table value
    error = decode(lanes, numel, norms, offsets_for([0], alpha=0.0)) - x
    assert (error**2).sum() / (x**2).sum() < 0.012  # .01017 in theory, and cells are half a step wide


def test_hush_sums_over_ranks_decode_to_the_sum(simd: str) -> None:
    numel, ranks = 20_000, 4
    vectors = [gradient(numel, seed=rank) for rank in range(ranks)]
    norms = np.max([norms_of(x) for x in vectors], axis=0)
    lanes = np.zeros(_core.hush_padded(numel), np.uint8)
    for rank, x in enumerate(vectors):
        assert _core.add_table(encode(x, norms, 4 * rank), len(lanes), TABLE, lanes) == 0
    decoded = decode(lanes, numel, norms, offsets_for([0, 4, 8, 12]))
    total = np.sum(vectors, axis=0)
    assert ((decoded - total) ** 2).sum() / sum((x**2).sum() for x in vectors) < 0.03


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_hush_block_that_is_not_finite_has_such_a_norm_and_decodes_to_nan_alone(
    simd: str, bad: float
) -> None:
    x = gradient(9000)  # a piece of 1024 rows, and one of 128
    broken, block = [3, 8 + 6], block_of(9000)
    x[[np.flatnonzero(block == 3)[700], np.flatnonzero(block == 14)[5]]] = bad
    norms = norms_of(x)
    assert np.flatnonzero(~np.isfinite(norms)).tolist() == broken
    with np.errstate(invalid="ignore"):
        assert encode(x, norms).tobytes() == twin_encode(x, norms, 0).tobytes()
    decoded = decode(TABLE[unpack4(encode(x, norms))], 9000, norms, offsets_for([0]))
    assert np.array_equal(np.isnan(decoded), np.isin(block, broken))


def test_a_hush_block_of_zeros_decodes_to_zeros(simd: str) -> None:
    x = gradient(8192).reshape(-1, 8)
    x[:, 2] = 0
    x = x.reshape(-1)
    norms = norms_of(x)
    assert np.flatnonzero(norms == 0).tolist() == [2]
    data = encode(x, norms)
    assert data.tobytes() == twin_encode(x, norms, 0).tobytes()
    decoded = decode(TABLE[unpack4(data)], 8192, norms, offsets_for([0])).reshape(-1, 8)
    assert np.flatnonzero((decoded == 0).all(axis=0)).tolist() == [2]


@pytest.mark.parametrize("scale", [3e38, 1e37, 1e20, 1e-20, 1e-30, 1e-40])
@pytest.mark.parametrize("numel", [513, 8192, 3 * 8192 + 5, 9 * 8192 - 1])
def test_hush_takes_floats_of_any_magnitude(simd: str, numel: int, scale: float) -> None:
    x = np.clip(gradient(numel), -1, 1) * f32(scale)
    norms, offsets = norms_of(x), offsets_for([3])
    np.testing.assert_allclose(norms, twin_norms(x), rtol=1e-6)
    data = encode(x, norms, 3, threads=2)
    assert data.tobytes() == twin_encode(x, norms, 3).tobytes()
    lanes = TABLE[unpack4(data)]
    decoded = decode(lanes, numel, norms, offsets, threads=2)
    assert decoded.tobytes() == twin_decode(lanes, numel, norms, offsets, 1.0).tobytes()


def test_blocks_of_different_magnitudes_lie_side_by_side(simd: str) -> None:
    powers = np.array([1, 2.0**90, 2.0**-90, 1, 0, 2.0**-60, 2.0**100, 1])
    x = np.random.default_rng(0).standard_normal((1024, 8)) * powers
    norms = norms_of(x.astype(f32).reshape(-1))
    lanes = TABLE[unpack4(encode(x.astype(f32).reshape(-1), norms, alpha=0.0))]
    decoded = decode(lanes, 8192, norms, offsets_for([0], alpha=0.0)).reshape(-1, 8).astype(np.float64)
    assert not decoded[:, 4].any()
    error, energy = ((decoded - x) ** 2).sum(axis=0), (x**2).sum(axis=0)
    assert (np.delete(error, 4) < 0.014 * np.delete(energy, 4)).all()


# ---- the adder


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("numel", [*SIZES, 63, 65])
def test_the_adder_adds_table_values_and_counts_what_saturates(
    simd: str, numel: int, threads: int, lane: type
) -> None:
    rng, most = np.random.default_rng(numel), int(np.iinfo(lane).max)
    index = rng.integers(0, 256, (numel + 1) // 2, dtype=np.uint8)
    table = rng.integers(0, 256, 16, dtype=np.uint8)
    values = table[unpack4(index)[:numel]].astype(np.int64)

    lanes = np.full(numel, 77, lane)
    _core.lookup_table(index, numel, table, lanes, threads)
    assert np.array_equal(lanes, values)

    # Half of the lanes far from the limit, half so near that some pass it and some just do not.
    before = np.where(rng.random(numel) < 0.5, 0, most - rng.integers(0, 256, numel))
    lanes = before.astype(lane)
    assert _core.add_table(index, numel, table, lanes, threads) == (before + values > most).sum()
    assert np.array_equal(lanes, np.minimum(before + values, most))
    if numel > 4096:
        assert (before + values == most).any() and (before + values > most).any()


def test_torch_tensors_can_be_lanes() -> None:
    index = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    table = torch.arange(16, dtype=torch.uint8)
    for dtype in (torch.uint8, torch.uint16, torch.int32):
        lanes = torch.zeros(4, dtype=dtype)
        _core.lookup_table(index, 4, table, lanes)
        assert _core.add_table(index, 4, table, lanes) == 0
        assert lanes.tolist() == [2, 4, 6, 8]
    with pytest.raises(TypeError, match="uint8, uint16 or int32"):
        _core.add_table(index, 4, table, torch.zeros(4, dtype=torch.int64))


# ---- thc


def slices(numel: int, slice_log2: int) -> list[slice]:
    """Each slice's elements, once padded."""
    found = []
    for start in range(0, numel, 1 << slice_log2):
        rest = min(1 << slice_log2, numel - start)
        found.append(slice(start, start + max(8, 1 << (rest - 1).bit_length())))
    return found


def slice_norms(x: Floats, slice_log2: int) -> Doubles:
    wide = x.astype(np.float64)
    return np.array([np.linalg.norm(wide[part]) for part in slices(len(x), slice_log2)], np.float64)


def twin_thc_encode(x: Floats, norms: Doubles, slice_log2: int, block_log2: int, bits: int) -> Bytes:
    table, t_p = THC_TABLES[bits].astype(f32), f32(T_P)
    g, numel = int(THC_TABLES[bits][-1]), len(x)
    x = flip(padded(x, _core.thc_padded(numel, slice_log2)))
    uniform = (random_bits(ROUND_SEED, len(x)) >> 8).astype(f32) * f32(2**-24)
    index = np.zeros(len(x), np.int64)
    units = unit_of(norms)
    for part, norm, unit in zip(slices(numel, slice_log2), norms / units, units, strict=True):
        length = part.stop - part.start
        block = min(1 << block_log2, length)
        usable = norm > 0 and np.isfinite(norm)
        factor = f32(math.sqrt(length) / (math.sqrt(block) * norm)) if usable else f32(0)
        z = rotate((x[part] / unit).reshape(-1, block).T).T.reshape(-1) * factor
        z = np.clip(np.nan_to_num(z, nan=-T_P), -t_p, t_p)
        v = (z + t_p) * f32(g / (2 * T_P))
        lower = np.searchsorted(table, np.minimum(np.floor(v), g - 1), side="right") - 1
        up = v - table[lower] > uniform[part] * (table[lower + 1] - table[lower])
        index[part] = lower + up
    if bits == 2:
        return (index[0::4] | index[1::4] << 2 | index[2::4] << 4 | index[3::4] << 6).astype(np.uint8)
    return pack4(index)


def twin_thc_decode(
    lanes: npt.NDArray[np.integer],
    numel: int,
    norms: Doubles,
    slice_log2: int,
    block_log2: int,
    g: int,
    count: int,
) -> Floats:
    out, units = np.empty(len(lanes), f32), unit_of(norms)
    for part, norm, unit in zip(slices(numel, slice_log2), norms / units, units, strict=True):
        length = part.stop - part.start
        block = min(1 << block_log2, length)
        factor = f32(norm / math.sqrt(length * block)) if np.isfinite(norm) else f32(np.nan)
        s = (lanes[part].astype(f32) * f32(2 * T_P / (g * count)) - f32(T_P)) * factor
        out[part] = rotate(s.reshape(-1, block).T).T.reshape(-1) * f32(1 / 3) * unit
    return flip(out)[:numel]


def thc_encode(
    x: Floats, norms: Doubles, slice_log2: int, block_log2: int, bits: int = 4, threads: int = 1
) -> Bytes:
    out = np.full(_core.thc_padded(len(x), slice_log2) // (4 if bits == 2 else 2), 0xEE, np.uint8)
    _core.thc_encode(
        x, norms, slice_log2, block_log2, SIGN_SEED, ROUND_SEED, T_P, THC_TABLES[bits], bits, out, threads
    )
    return out


def thc_decode(
    lanes: npt.NDArray[np.integer],
    numel: int,
    norms: Doubles,
    slice_log2: int,
    block_log2: int,
    g: int = 30,
    count: int = 1,
    gain: float = 1.0,
    threads: int = 1,
) -> Floats:
    out = np.full(numel, 9e9, f32)
    _core.thc_decode(
        lanes, numel, slice_log2, block_log2, SIGN_SEED, norms, T_P, g, count, out, gain, threads
    )
    return out


SHAPES = [(5, 3), (10, 4), (12, 20), (13, 10), (20, 20), (20, 14)]  # slice_log2, block_log2


@pytest.mark.parametrize(("slice_log2", "block_log2"), SHAPES)
@pytest.mark.parametrize("numel", SIZES)
def test_thc_matches_the_twin_on_every_simd_and_thread_count(
    simd: str, numel: int, slice_log2: int, block_log2: int
) -> None:
    x = gradient(numel, seed=numel)
    norms = slice_norms(x, slice_log2)
    lanes = np.random.default_rng(0).integers(0, 121, _core.thc_padded(numel, slice_log2))
    sums = twin_thc_decode(lanes, numel, norms, slice_log2, block_log2, 30, 4)
    for bits, threads in ((4, 1), (4, 3), (3, 2), (2, 1)):
        expected = twin_thc_encode(x, norms, slice_log2, block_log2, bits)
        assert thc_encode(x, norms, slice_log2, block_log2, bits, threads).tobytes() == expected.tobytes()
    for lane, threads in ((np.uint8, 1), (np.uint16, 2), (np.int32, 3)):
        decoded = thc_decode(lanes.astype(lane), numel, norms, slice_log2, block_log2, 30, 4, 1 / 3, threads)
        assert decoded.tobytes() == sums.tobytes()


def test_a_thc_block_of_a_million_elements_matches_the_twin(simd: str) -> None:
    x = gradient((1 << 20) - 5)
    norms = slice_norms(x, 20)
    data = thc_encode(x, norms, 20, 20)
    assert data.tobytes() == twin_thc_encode(x, norms, 20, 20, 4).tobytes()


@pytest.mark.parametrize(
    ("numel", "slice_log2", "length"), [(0, 20, 0), (1, 20, 8), (9, 20, 16), (17, 3, 24)]
)
def test_thc_pads_the_last_slice_to_a_power_of_two(numel: int, slice_log2: int, length: int) -> None:
    assert _core.thc_padded(numel, slice_log2) == length


@pytest.mark.parametrize(("slice_log2", "block_log2"), [(20, 20), (14, 10)])
def test_thc_errs_little_on_gaussian_data(slice_log2: int, block_log2: int) -> None:
    x = np.random.default_rng(1).standard_normal(1 << 16).astype(f32)
    norms = slice_norms(x, slice_log2)
    lanes = THC_TABLES[4][unpack4(thc_encode(x, norms, slice_log2, block_log2))]
    error = thc_decode(lanes, len(x), norms, slice_log2, block_log2) - x
    assert (error**2).sum() / (x**2).sum() == pytest.approx(0.0203, rel=0.1)  # the law in the paper's notes


def test_a_thc_slice_that_is_not_finite_is_nan_alone_and_one_of_zeros_is_zero(simd: str) -> None:
    x = gradient(3 * 1024 - 5)
    x[1024:2048] = 0
    x[5] = math.inf
    norms = slice_norms(x, 10)
    data = thc_encode(x, norms, 10, 8)
    with np.errstate(invalid="ignore"):
        assert data.tobytes() == twin_thc_encode(x, norms, 10, 8, 4).tobytes()
    decoded = thc_decode(THC_TABLES[4][unpack4(data)], len(x), norms, 10, 8)
    assert np.isnan(decoded[:1024]).all() and (decoded[1024:2048] == 0).all()
    assert np.isfinite(decoded[2048:]).all() and decoded[2048:].any()


@pytest.mark.parametrize("scale", [3e38, 1e37, 1e20, 1e-20, 1e-30, 1e-40])
def test_thc_takes_floats_of_any_magnitude(simd: str, scale: float) -> None:
    x = np.clip(gradient(20_001), -1, 1) * f32(scale)
    norms = slice_norms(x, 13)
    data = thc_encode(x, norms, 13, 10, threads=2)
    assert data.tobytes() == twin_thc_encode(x, norms, 13, 10, 4).tobytes()
    lanes = THC_TABLES[4][unpack4(data)]
    decoded = thc_decode(lanes, len(x), norms, 13, 10, 30, 1, 1 / 3, 2)
    assert decoded.tobytes() == twin_thc_decode(lanes, len(x), norms, 13, 10, 30, 1).tobytes()


# ---- what is refused


def test_a_buffer_of_the_wrong_size_names_the_size_it_needs() -> None:
    x, norms, data, lanes = gradient(600), np.ones(8), np.zeros(512, np.uint8), np.zeros(1024, np.uint8)
    offsets = np.zeros(16, f32)
    with pytest.raises(ValueError, match="out has 7 entries: 600 elements take exactly 8"):
        _core.hush_norms(x, norms[:7])
    with pytest.raises(ValueError, match="norms has 7 entries: 600 elements take exactly 8"):
        encode(x, norms[:7])
    with pytest.raises(ValueError, match="out has 511 entries: 600 elements take exactly 512"):
        _core.hush_encode(x, norms, 1, 1, 0, 1.0, RANGE, GRANULARITY, CELL, data[:511])
    with pytest.raises(ValueError, match="cell has 63 entries: exactly 64"):
        _core.hush_encode(x, norms, 1, 1, 0, 1.0, RANGE, GRANULARITY, CELL[:63], data)
    with pytest.raises(ValueError, match="lanes has 1023 entries: 600 elements take exactly 1024"):
        decode(lanes[:1023], 600, norms, offsets)
    with pytest.raises(ValueError, match="offsets has 15 entries: exactly 16"):
        decode(lanes, 600, norms, offsets[:15])
    with pytest.raises(ValueError, match="lanes has 4 elements; numel=5"):
        _core.add_table(data[:3], 5, TABLE, lanes[:4])
    with pytest.raises(ValueError, match="index has 4 entries: 5 elements take exactly 3"):
        _core.add_table(data[:4], 5, TABLE, lanes[:5])
    with pytest.raises(ValueError, match="table has 15 entries: exactly 16"):
        _core.lookup_table(data[:3], 5, TABLE[:15], lanes[:5])
    with pytest.raises(ValueError, match="norms has 8 entries: 600 elements take exactly 1"):
        thc_encode(x, norms, 10, 10)
    with pytest.raises(ValueError, match="lanes has 1023 entries: 600 elements take exactly 1024"):
        thc_decode(lanes[:1023], 600, norms[:1], 10, 10)
    with pytest.raises(ValueError, match="table has 16 entries: exactly 8"):
        _core.thc_encode(x, norms[:1], 10, 10, 1, 1, T_P, TABLE, 3, data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"place": 16}, "place=16: from 0 to 15"),
        ({"granularity": 32}, "granularity=32: from 1 to 31"),
        ({"range": 0.0}, "range=0.*: above 0"),
        ({"range": math.nan}, "range=nan: above 0"),
        ({"alpha": math.inf}, "alpha=inf: must be finite"),
        ({"cell": np.full(64, 16, np.uint8)}, "cell=16: from 0 to 15"),
        ({"threads": 0}, "threads=0: from 1 to 1024"),
    ],
)
def test_a_hush_option_out_of_its_limits_is_refused(change: dict[str, object], words: str) -> None:
    good = {"place": 0, "alpha": 1.0, "range": 2.0, "granularity": 21, "cell": CELL, "threads": 1}
    with pytest.raises(ValueError, match=words):
        _core.hush_encode(gradient(8), np.ones(8), 1, 1, out=np.zeros(256, np.uint8), **{**good, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slice_log2": 31}, "slice_log2=31: from 3 to 30"),
        ({"block_log2": 21}, "block_log2=21: from 3 to 20"),
        ({"bits": 5}, "bits=5: from 2 to 4"),
        ({"t_p": -1.0}, "t_p=-1.*: above 0"),
        ({"table": TABLE[::-1].copy()}, r"table\[0\]=21: values rise from 0"),
        ({"table": np.zeros(16, np.uint8)}, r"table\[1\]=0: values rise from 0"),
    ],
)
def test_a_thc_option_out_of_its_limits_is_refused(change: dict[str, object], words: str) -> None:
    good = {"slice_log2": 10, "block_log2": 10, "t_p": T_P, "table": TABLE, "bits": 4}
    with pytest.raises(ValueError, match=words):
        _core.thc_encode(
            gradient(8),
            np.ones(1),
            sign_seed=1,
            round_seed=1,
            out=np.zeros(4, np.uint8),
            **{**good, **change},
        )


def test_hush_decodes_up_to_63_steps_and_refuses_more() -> None:
    lanes, norms, out = np.zeros(512, np.uint8), np.ones(8), np.empty(512, f32)
    _core.hush_decode(lanes, norms, 1, 1, np.zeros(16, f32), 2.0, 63, out, 1.0)
    with pytest.raises(ValueError, match="granularity=64: from 1 to 63"):
        _core.hush_decode(lanes, norms, 1, 1, np.zeros(16, f32), 2.0, 64, out, 1.0)


def test_sizes_beyond_the_limit_are_refused() -> None:
    for padded_size in (_core.hush_padded, _core.hush_blocks, lambda numel: _core.thc_padded(numel, 20)):
        with pytest.raises(ValueError, match=f"numel={1 << 61}: at most {1 << 60}"):
            padded_size(1 << 61)
