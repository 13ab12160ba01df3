"""The C++ blocks against a plain numpy twin, bit for bit, on every instruction set this CPU can run."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tacit import _core

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SIZES = [0, 1, 2, 255, 256, 257, 10007]
BLOCKS = [2, 64, 256, 1000, 1 << 14]  # 1000: not a power of two; 2**14: longer than most of the vectors
QMAX = {8: 127, 4: 7}


def gradient(numel: int, seed: int = 0) -> Floats:
    """Values over nine decades, so that some blocks are all but zero and some codes meet the clamp."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(numel) * 10.0 ** rng.uniform(-8, 1, numel)).astype(np.float32)


def pack(x: Floats, bits: int, block: int, seed: int = 1, stochastic: bool = True) -> Bytes:
    out = np.full(_core.packed_nbytes(len(x), bits, block), 0xEE, dtype=np.uint8)
    _core.pack_blocks(x, bits, block, seed, stochastic, out)
    return out


def unpack(data: Bytes, numel: int, bits: int, block: int) -> Floats:
    out = np.full(numel, 9e9, dtype=np.float32)
    _core.unpack_blocks(data, numel, bits, block, 1.0, False, out)
    return out


def twin_bits(seed: int, numel: int) -> npt.NDArray[np.uint32]:
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    x = (np.arange(numel, dtype=np.uint32) * np.uint32(0x9E3779B9) + low) ^ high
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def twin_pack(x: Floats, bits: int, block: int, seed: int, stochastic: bool) -> bytes:
    qmax, random, out = QMAX[bits], twin_bits(seed, len(x)), b""
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale, q = np.float32(0), np.zeros(len(part), dtype=np.int64)
        absmax = np.abs(part).max()
        if not np.isfinite(absmax):
            scale = np.float32(np.nan)
        elif absmax >= np.float32(1e-30):
            scale = absmax / np.float32(qmax)
            u = (random[start : start + block] >> 8).astype(np.float32) * np.float32(2**-24)
            v = part * (np.float32(1) / scale) + (u if stochastic else np.float32(0.5))
            q = np.clip(np.floor(v), -qmax, qmax).astype(np.int64)
        out += scale.tobytes()
        if bits == 8:
            out += q.astype(np.int8).tobytes()
        else:
            codes = np.append(q + 8, [0] * (len(q) % 2)).astype(np.uint8)
            out += (codes[0::2] | codes[1::2] << 4).tobytes()
    return out


def twin_unpack(data: Bytes, numel: int, bits: int, block: int) -> Floats:
    parts, at = [np.empty(0, np.float32)], 0
    for start in range(0, numel, block):
        n = min(block, numel - start)
        scale = data[at : at + 4].view("<f4")[0]
        codes = data[at + 4 : at + 4 + (n * bits + 7) // 8]
        q = (
            codes.view(np.int8)
            if bits == 8
            else np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:n] - 8.0
        )
        parts.append(q.astype(np.float32) * scale)
        at += 4 + len(codes)
    return np.concatenate(parts)


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", SIZES)
def test_every_simd_variant_packs_and_unpacks_as_the_numpy_twin(
    simd: str, numel: int, bits: int, block: int, stochastic: bool
) -> None:
    x, seed = gradient(numel, seed=numel), 0xDEADBEEF_12345678
    data = pack(x, bits, block, seed, stochastic)
    assert data.tobytes() == twin_pack(x, bits, block, seed, stochastic)
    decoded = twin_unpack(data, numel, bits, block)
    assert unpack(data, numel, bits, block).tobytes() == (decoded + np.float32(0)).tobytes()

    gain, out = np.float32(1 / 3), gradient(numel, seed=99)
    expected = out + gain * decoded
    _core.unpack_blocks(data, numel, bits, block, 1 / 3, True, out)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1])
def test_random_bits_match_the_twin(simd: str, seed: int) -> None:
    out = np.empty(10007, dtype=np.uint32)
    _core.random_bits(seed, out)
    assert np.array_equal(out, twin_bits(seed, len(out)))


def test_random_bits_are_pinned(simd: str) -> None:
    out = np.empty(4, dtype=np.uint32)
    _core.random_bits(0x0123456789ABCDEF, out)
    assert [hex(r) for r in out] == ["0x3aa40f54", "0xa471cfdc", "0x41984c08", "0xf90d4ebb"]


@pytest.mark.parametrize(
    ("bits", "golden"),
    [
        (8, "0402013c 7f812000  0402813c 7f"),  # scales 1/127 and 2/127
        (4, "2549123e 1f8a  2549923e 0f"),  # scales 1/7 and 2/7; the unused nibble is 0
    ],
)
def test_the_byte_layout_is_pinned(simd: str, bits: int, golden: str) -> None:
    x = np.array([1, -1, 0.25, 0, 2], dtype=np.float32)
    assert pack(x, bits, 4, stochastic=False).tobytes() == bytes.fromhex(golden)


@pytest.mark.parametrize("bits", [8, 4])
def test_nearest_rounding_errs_by_half_a_step_at_most(bits: int) -> None:
    x = gradient(4096)
    error = np.abs(unpack(pack(x, bits, 64, stochastic=False), len(x), bits, 64) - x).reshape(-1, 64)
    step = np.abs(x).reshape(-1, 64).max(axis=1, keepdims=True) / QMAX[bits]
    assert (error <= step * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    numel, seeds, failure_probability = 512, 4000, 1e-9
    x = np.random.default_rng(3).uniform(-1, 1, numel).astype(np.float32)
    total = np.zeros(numel)
    for seed in range(seeds):
        total += unpack(pack(x, bits, numel, seed), numel, bits, numel)
    step = np.abs(x).max() / QMAX[bits]
    # Hoeffding: one rounding lies in an interval of one step. And v + u is itself rounded to float32, |v| < 128.
    bound = step * (math.sqrt(math.log(2 * numel / failure_probability) / (2 * seeds)) + 2.0**-16)
    assert np.abs(total / seeds - x).max() <= bound
    # Over all elements the bound is tighter by sqrt(numel): the errors of different elements are independent.
    bound_of_mean = step * (math.sqrt(math.log(2 / failure_probability) / (2 * seeds * numel)) + 2.0**-16)
    assert abs(np.mean(total / seeds - x)) <= bound_of_mean


@pytest.mark.parametrize("bits", [8, 4])
def test_what_int_codes_hold_exactly_comes_back_exactly(bits: int) -> None:
    qmax = QMAX[bits]
    x = np.arange(-qmax, qmax + 1, dtype=np.float32)
    assert np.array_equal(unpack(pack(x, bits, 1024), len(x), bits, 1024), x)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_that_is_not_finite_is_counted_and_decodes_to_nan_alone(
    simd: str, bits: int, bad: float
) -> None:
    x = gradient(257)
    x[[70, 71, 256]] = bad
    data = np.empty(_core.packed_nbytes(257, bits, 64), dtype=np.uint8)
    assert _core.pack_blocks(x, bits, 64, 1, True, data) == 2
    record = 4 + 64 * bits // 8
    zero = 0 if bits == 8 else 0x88
    assert data[record : 2 * record].tobytes() == bytes.fromhex("0000c07f") + bytes([zero] * (record - 4))
    decoded = unpack(data, 257, bits, 64)
    assert np.array_equal(np.isnan(decoded), np.isin(np.arange(257) // 64, [1, 4]))


@pytest.mark.parametrize("bits", [8, 4])
def test_tiny_blocks_become_zero_and_huge_ones_survive(simd: str, bits: int) -> None:
    x = np.array([0.0, -0.0, 9e-31, 1e-45, 1e-30, -1e-30, 3.4e38, -3.4e38], dtype=np.float32)
    data = pack(x, bits, 2, stochastic=False)
    decoded = unpack(data, 8, bits, 2)
    assert decoded[:4].tobytes() == bytes(16)
    assert decoded[4:] == pytest.approx(x[4:], rel=1e-6)


def test_unpacking_sets_or_adds_with_a_gain() -> None:
    x = np.array([7, -3, 0, 1], dtype=np.float32)
    data, out = pack(x, 4, 4), np.full(4, 10, dtype=np.float32)
    _core.unpack_blocks(data, 4, 4, 4, 0.5, True, out)
    assert out.tolist() == [13.5, 8.5, 10, 10.5]
    _core.unpack_blocks(data, 4, 4, 4, 2.0, False, out)
    assert out.tolist() == [14, -6, 0, 2]


@pytest.mark.parametrize("numel", SIZES)
def test_torch_tensors_give_the_bytes_that_numpy_arrays_give(numel: int) -> None:
    x = torch.from_numpy(gradient(numel))
    data = torch.empty(_core.packed_nbytes(numel, 8, 256), dtype=torch.uint8)
    assert _core.pack_blocks(x, 8, 256, 1, True, data) == 0
    assert data.numpy().tobytes() == pack(x.numpy(), 8, 256).tobytes()
    out = torch.empty(numel)
    _core.unpack_blocks(data, numel, 8, 256, 1.0, False, out)
    assert out.numpy().tobytes() == unpack(data.numpy(), numel, 8, 256).tobytes()


def test_a_read_only_array_can_be_packed_and_unpacked() -> None:
    x = gradient(10)
    x.flags.writeable = False
    data = pack(x, 8, 4)
    data.flags.writeable = False
    assert len(unpack(data, 10, 8, 4)) == 10


@pytest.mark.parametrize(
    ("numel", "bits", "block", "nbytes"),
    [(0, 8, 2, 0), (1, 8, 2, 5), (1, 4, 2, 5), (256, 8, 256, 260), (257, 4, 256, 132 + 5), (7, 4, 4, 6 + 6)],
)
def test_packed_nbytes_counts_scales_and_codes(numel: int, bits: int, block: int, nbytes: int) -> None:
    assert _core.packed_nbytes(numel, bits, block) == nbytes
    assert len(twin_pack(np.ones(numel, np.float32), bits, block, 0, False)) == nbytes


@pytest.mark.parametrize(
    ("numel", "bits", "block", "words"),
    [
        (8, 5, 256, "bits=5: .* 8 or 4"),
        (8, 8, 3, "block=3: .* even"),
        (8, 8, 0, "block=0: .* 2 or more"),
        (1 << 61, 8, 2, f"numel={1 << 61}: at most {1 << 60}"),
    ],
)
def test_a_layout_we_do_not_write_is_refused(numel: int, bits: int, block: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _core.packed_nbytes(numel, bits, block)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    x, data = gradient(8), np.zeros(12, dtype=np.uint8)
    with pytest.raises(ValueError, match="out has 11 bytes: 8 elements .* take exactly 12"):
        _core.pack_blocks(x, 8, 8, 1, True, data[:11])
    with pytest.raises(ValueError, match="data has 11 bytes: 8 elements .* take exactly 12"):
        _core.unpack_blocks(data[:11], 8, 8, 8, 1.0, False, x)
    with pytest.raises(ValueError, match="out has 8 elements; numel=9"):
        _core.unpack_blocks(data, 9, 8, 8, 1.0, False, x)


def test_an_array_that_would_need_a_copy_is_refused() -> None:
    data = np.zeros(12, dtype=np.uint8)
    for x in (np.zeros(8), np.zeros(16, np.float32)[::2], np.zeros((2, 4), np.float32)):
        with pytest.raises(TypeError):
            _core.pack_blocks(x, 8, 8, 1, True, data)
    frozen = gradient(8)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        _core.unpack_blocks(data, 8, 8, 8, 1.0, False, frozen)


def test_an_unknown_simd_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'mmx' .* choose from baseline"):
        _core.use_simd("mmx")
    assert _core.simd() in _core.simd_variants()
