"""THC as published: tables, figures and bits."""

import pytest
import torch

from tacit import _core
from tacit.codecs import Thc, in_torch
from tacit.codecs.tables import clamp_at, stochastic_table
from tacit.errors import ConfigError
from tacit.requests import TableSum, loop_back
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check, nmse, vectors
from tacit.testing.published import THC_TABLES


@pytest.mark.parametrize(("levels", "granularity", "fraction"), THC_TABLES)
def test_the_solver_gives_the_published_tables(levels, granularity, fraction):
    assert (
        stochastic_table(levels, granularity, clamp_at(1 / fraction))
        == THC_TABLES[levels, granularity, fraction]
    )


def test_the_published_clamps():
    assert clamp_at(1 / 32) == pytest.approx(2.15387469, abs=1e-8)
    assert clamp_at(1 / 1024) == pytest.approx(3.29719335, abs=1e-8)


def test_the_published_errors():
    for world in (4, 10):
        inputs = vectors("gauss", world, 1 << 18)
        assert 0.0200 < world * nmse(loop_back(Thc(), inputs)[0].total, inputs) < 0.0207
    blocky = vectors("blocky", 4, 1 << 17)
    assert nmse(loop_back(Thc(block=1024), blocky)[0].total, blocky) > 5 * nmse(
        loop_back(Thc(), blocky)[0].total, blocky
    )


@pytest.mark.parametrize(
    "text",
    [
        "thc",
        "thc(bits=3, granularity=16)",
        "thc(bits=2, granularity=34)",
        "thc(block=1024)",
        "thc(slice=4096)",
    ],
)
def test_native_and_torch_give_the_same_bits(text, monkeypatch):
    for numel in (0, 1, 9, 1000, 8192, 20_001):
        inputs = vectors("lognormal", 3, numel)
        native = loop_back(parse_codec(text), inputs)[0].total
        with monkeypatch.context() as patch:
            patch.setattr("tacit.codecs.thc.kernels", lambda x: in_torch)
            assert torch.equal(native, loop_back(parse_codec(text), inputs)[0].total)


@pytest.mark.parametrize("scale", [1e-30, 1e37])
def test_native_and_torch_give_the_same_bits_for_any_scale(scale, monkeypatch):
    inputs = [(x.double() * scale).float() for x in vectors("gauss", 3, 20_001)]
    native = loop_back(Thc(slice=4096), inputs)[0].total
    with monkeypatch.context() as patch:
        patch.setattr("tacit.codecs.thc.kernels", lambda x: in_torch)
        assert torch.equal(native, loop_back(Thc(slice=4096), inputs)[0].total)
    assert native.isfinite().all() and native.any()


def test_the_norm_of_a_slice_of_the_largest_floats_can_be_sent():
    largest = torch.finfo(torch.float32).max
    inputs, sent = [torch.full((1 << 20,), largest), torch.zeros(1 << 20)], []
    reduced = loop_back(Thc(), inputs, observe=sent.append)
    assert sent[0].value.dtype == torch.float32 and sent[0].value.isfinite().all()
    assert reduced[0].total.isfinite().float().mean() > 0.4  # the rest is rounded beyond the largest float


@pytest.mark.parametrize("world", [1, 8, 9, 33, 64])
def test_the_server_adds_exactly_the_table_values_for_every_world(world):
    inputs, asked = vectors("gauss", world, 5000), []
    loop_back(Thc(), inputs, observe=lambda r: asked.append(r) if isinstance(r, TableSum) else None)
    request = asked[0]
    assert request.lanes.bits == (8 if world <= 8 else 16)
    nibbles = torch.stack([request.index & 15, request.index >> 4], 1).reshape(-1)[: request.numel].long()
    expected = torch.zeros(request.numel, dtype=torch.int64)
    lanes = torch.zeros(request.numel, dtype=request.lanes.dtype)
    for _ in range(world):
        request.add(request.index, lanes)
        expected += torch.tensor(request.table)[nibbles]
    assert torch.equal(lanes.long(), expected)


def test_a_lane_that_would_overflow_is_counted_not_wrapped():
    index, table = torch.full((8,), 0xFF, dtype=torch.uint8), torch.full((16,), 200, dtype=torch.uint8)
    lanes = torch.zeros(16, dtype=torch.uint8)
    assert _core.add_table(index, 16, table, lanes, 1) == 0
    assert _core.add_table(index, 16, table, lanes, 1) == 16
    assert lanes.tolist() == [255] * 16


@pytest.mark.slow
def test_options_are_checked_and_rules_kept():
    for text, hint in (
        ("thc(bits=5)", "2, 3 or 4 bits"),
        ("thc(granularity=14)", "16 levels need 15 to 255"),
        ("thc(clamped=2.0)", "between 0 and 1"),
        ("thc(slice=1000)", "a power of two"),
        ("thc(block=3)", "a power of two"),
    ):
        with pytest.raises(ConfigError, match=hint):
            Strategy.parse(text)
    for text in ("thc", "thc(bits=2, granularity=34)", "ef(thc(bits=3, granularity=16))"):
        assert not [f for f in check(parse_codec(text)) if not f.passed]
