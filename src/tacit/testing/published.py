"""Figures that a codec's paper reports, or that we promise, held against what it gives here."""

from collections.abc import Iterator

import torch

from tacit.codecs import Dgc, GTopK, Hush, OmniReduce, Plain, RandomK, ScaleCom, Thc, Threshold
from tacit.codecs.tables import clamp_at, stochastic_table
from tacit.requests import Codec, Lanes, TableSum, loop_back
from tacit.testing.vectors import nmse, vectors

# (levels, granularity, 1 / clamped fraction) -> table, as in THC's code and paper
THC_TABLES: dict[tuple[int, int, int], tuple[int, ...]] = {
    (16, 30, 32): (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30),
    (16, 30, 64): (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30),
    (16, 30, 128): (0, 4, 6, 8, 10, 12, 13, 14, 16, 17, 18, 20, 22, 24, 26, 30),
    (16, 30, 256): (0, 4, 6, 8, 10, 12, 13, 14, 16, 17, 18, 20, 22, 24, 26, 30),
    (16, 30, 512): (0, 4, 7, 9, 11, 12, 13, 14, 16, 17, 18, 19, 21, 23, 26, 30),
    (16, 34, 1024): (0, 5, 8, 10, 12, 14, 15, 16, 18, 19, 20, 22, 24, 26, 29, 34),
    (16, 42, 1024): (0, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 33, 36, 42),
    (8, 16, 32): (0, 3, 5, 7, 9, 11, 13, 16),
    (8, 42, 1024): (0, 10, 15, 19, 23, 27, 32, 42),
    (4, 34, 1024): (0, 13, 21, 34),
}

_NUMEL = 1 << 20
Claim = tuple[str, str, int, float, float, float]  # what, family, world, value, lowest, highest


def claims(codec: Codec) -> Iterator[Claim]:
    """What is published about `codec`, with the value found here; nothing for most codecs."""
    if codec == Thc():
        yield from _thc()
    if codec == Hush():
        yield from _hush()
    match codec:
        case Threshold(values=Plain()):
            yield from _threshold(codec)
        case RandomK(values=Plain()):
            yield from _random_k(codec)
        case GTopK(values=Plain()) | ScaleCom(values=Plain()):
            yield from _no_build_up(codec)
        case OmniReduce(values=Plain()):
            yield from _nothing_lost(codec)
        case Dgc(share=0.001):
            yield from _dgc(codec)
        case _:
            pass


def _error(codec: Codec, family: str, world: int, seed: int = 0) -> float:
    inputs = vectors(family, world, _NUMEL, seed)
    return nmse(loop_back(codec, inputs)[0].total, inputs)


def _thc() -> Iterator[Claim]:
    for world in (4, 10):
        yield "n x NMSE", "gauss", world, world * _error(Thc(), "gauss", world), 0.0200, 0.0207
    errors = [_error(Thc(), "lognormal", 4, seed) for seed in range(8)]
    yield "NMSE, mean of 8 draws", "lognormal", 4, sum(errors) / len(errors), 0.0055, 0.0057
    right = sum(stochastic_table(k, g, clamp_at(1 / p)) == table for (k, g, p), table in THC_TABLES.items())
    yield "published tables, bit for bit", "", 0, right, len(THC_TABLES), len(THC_TABLES)
    yield "worlds to 64 whose server sum is the sum of table values", "", 64, _exact_worlds(), 64, 64


def _exact_worlds() -> int:
    """Worlds from 1 to 64 in which adding packed indices gives exactly the sum of the values they stand for."""
    table, rng, right = Thc().table, torch.Generator().manual_seed(0), 0
    values = torch.tensor(table)
    for world in range(1, 65):
        lanes_of = Lanes(8 if 30 * world <= 255 else 16, 30)
        index = torch.randint(0, 256, (world, 500), generator=rng).to(torch.uint8)
        lanes = torch.zeros(1000, dtype=lanes_of.dtype)
        for own in index:
            TableSum(own, table, 1000, lanes_of).add(own, lanes)
        nibbles = torch.stack([index & 15, index >> 4], dim=2).view(world, -1).long()
        right += int(torch.equal(lanes.long(), values[nibbles].sum(0)))
    return right


def _hush() -> Iterator[Claim]:
    for world in (4, 10):
        yield "n x NMSE", "gauss", world, world * _error(Hush(), "gauss", world), 0.0, 0.0105
        limit = _error(Thc(), "identical", world)
        yield "NMSE, at most thc's", "identical", world, _error(Hush(), "identical", world), 0.0, limit
        for family, most in (("windows", 0.6), ("loud", 0.6)):
            limit = most * _error(Thc(), family, world)
            yield "NMSE, at most .6 of thc's", family, world, _error(Hush(), family, world), 0.0, limit


# ---- the sparse family, each by the property that its paper rests on

_FEW = 1 << 14


def _threshold(codec: Threshold) -> Iterator[Claim]:
    (x,) = vectors("lognormal", 1, _FEW)
    left = (x - loop_back(codec, [x])[0].total).abs().max().item()
    yield "largest |x - sent| / value", "lognormal", 1, left / codec.value, 0.0, 1.0


def _random_k(codec: RandomK) -> Iterator[Claim]:
    """E |x - sent|^2 = (1 - k/d) |x|^2; scaled to be unbiased (d/k - 1) |x|^2."""
    (x,) = vectors("gauss", 1, _FEW)
    errors = [nmse(loop_back(codec, [x], step=step)[0].total, [x]) for step in range(64)]
    expected = 1 / codec.share - 1 if codec.unbiased else 1 - codec.share
    value = sum(errors) / len(errors)
    yield "mean |x - sent|^2 / |x|^2", "gauss", 1, value, 0.95 * expected, 1.05 * expected


def _no_build_up(codec: GTopK | ScaleCom) -> Iterator[Claim]:
    """Of eight ranks' sum as many numbers arrive as one rank sends."""
    kept = max(1, round(codec.share * _FEW))
    total = loop_back(codec, vectors("gauss", 8, _FEW))[0].total
    yield "numbers in the sum / k", "gauss", 8, int(total.count_nonzero()) / kept, 1.0, 1.0


def _nothing_lost(codec: OmniReduce) -> Iterator[Claim]:
    inputs = vectors("windows", 3, _FEW)
    same = torch.equal(loop_back(codec, inputs)[0].total, loop_back(Plain(), inputs)[0].total)
    yield "the bits of a plain sum", "windows", 3, float(same), 1.0, 1.0


def _dgc(codec: Dgc) -> Iterator[Claim]:
    """Table of the warm-up: 75, 93.75, 98.4375, 99.6 and 99.9 %."""
    stages = [0.75, 0.9375, 0.984375, 0.99609375] if codec.warmup >= 4 else []
    found = [1 - codec.share_at(-(-k * codec.warmup // 4)) for k in range(len(stages))]
    right = [abs(a - b) < 1e-9 for a, b in zip(found, stages, strict=True)]
    yield "stages of the warm-up as published", "", 0, sum(right), len(stages), len(stages)
    yield "sparsity after it", "", 0, 1 - codec.share_at(codec.warmup), 0.999, 0.999
