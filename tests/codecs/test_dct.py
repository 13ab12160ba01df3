"""The cosine transform in tiles: its formula, what is kept of it, and any shape."""

import math

import pytest
import torch

from tacit.codecs import Dct, Plain
from tacit.codecs.dct import cosines, tiles_of
from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.requests import loop_back
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check

CPU = torch.device("cpu")


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_transform_is_the_orthonormal_one():
    for size in (1, 2, 7, 64):
        d = cosines(size, CPU).double()
        torch.testing.assert_close(d @ d.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-6)
    x, s = noise(5).double(), 5
    by_hand = [
        math.sqrt((1 if k == 0 else 2) / s)
        * sum(x[j].item() * math.cos(math.pi * (2 * j + 1) * k / (2 * s)) for j in range(s))
        for k in range(s)
    ]
    torch.testing.assert_close((cosines(5, CPU).double() @ x).tolist(), by_hand, rtol=1e-6, atol=1e-6)


SHAPES = {"matrix": (100, 70), "conv": (8, 3, 3, 3), "vector": (130,), "scalar": (), "prime": (67, 2)}


def test_with_every_part_kept_any_shape_comes_back():
    layout = Layout.of(SHAPES)
    x = noise(layout.numel)
    total = loop_back(Dct(share=1.0, values=Plain()), [x], layout=layout)[0].total
    torch.testing.assert_close(total, x, rtol=1e-4, atol=1e-5)


def test_sides_are_cut_into_equal_parts_without_rows_of_their_own():
    found = {tile.span.name: tile for tile in tiles_of(Layout.of({**SHAPES, "empty": (0, 3)}), 64)}
    sizes = {name: (t.down, t.across, t.height, t.width) for name, t in found.items()}
    assert sizes == {
        "matrix": (2, 2, 50, 35),
        "conv": (1, 1, 8, 27),
        "vector": (1, 3, 1, 44),
        "scalar": (1, 1, 1, 1),
        "prime": (2, 1, 34, 2),
    }


def test_it_sends_the_largest_parts_of_each_tile_and_nothing_else():
    d, x = cosines(64, CPU).double(), noise(64, 128)
    codec, layout = Dct(share=1 / 64, values=Plain()), Layout.of({"w": (64, 128)})
    total = loop_back(codec, [x.flatten()], layout=layout)[0].total.view(64, 128).double()
    for columns in (slice(0, 64), slice(64, 128)):
        c = d @ x[:, columns].double() @ d.T
        kept = torch.where(c.abs() >= c.abs().flatten().topk(64).values[-1], c, 0.0)
        torch.testing.assert_close(total[:, columns], d.T @ kept @ d, rtol=1e-4, atol=1e-4)


def test_a_smooth_gradient_takes_few_parts_where_noise_takes_many():
    t = torch.arange(64) / 64
    smooth = (torch.sin(2 * t)[:, None] + torch.cos(3 * t)[None]).flatten()
    layout = Layout.of({"w": (64, 64)})
    left = {}
    for name, x in (("smooth", smooth), ("noise", noise(4096))):
        total = loop_back(Dct(share=1 / 64, values=Plain()), [x], layout=layout)[0].total
        left[name] = ((total - x).square().sum() / x.square().sum()).item()
    assert left["smooth"] < 1e-4 and 0.8 < left["noise"] < 0.95


def test_all_rules():
    for text in ("dct(0.1, bits=3, chunk=8)", "ef(dct(0.05) > int8, decay=0.9)"):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    text = "every / ef(dct(share=0.0078125, chunk=64) > bf16, decay=0.999) / sharded"
    assert str(Strategy.parse("ef(dct(0.0078125) > bf16, decay=0.999)")) == text == str(Strategy.parse(text))
    whole = Layout.of({"w": (640, 640)})
    assert Dct().nbytes_of(whole) * 8 / whole.numel == pytest.approx(0.164, abs=0.001)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dct(share=0)", "share=0: the part that is sent"),
        ("dct(chunk=1)", "chunk=1: the longest side of a tile"),
        ("dct(chunk=big)", "chunk=big: the longest side of a tile"),
        ("dct(bits=9)", "bits=9: a sign and up to 3 bits"),
        ("dct(bits=3) > bf16", "leave bits out"),
        ("dct > thc", "write dct > int8, int4, bf16 or none"),
        ("dct / ring", "cannot be added in flight"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(text)
    assert sentence in str(refused.value)
