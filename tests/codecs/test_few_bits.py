"""All codecs of few bits: the torch twin of every kernel, options, and trainings of real ranks."""

import copy
from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import deep, train

import tacit
from tacit import _core
from tacit.codecs import in_torch
from tacit.errors import TacitError
from tacit.requests import Lanes, TableSum
from tacit.strategy import parse_codec

FORMATS = (
    "sign", "sign(block=8)", "onebit", "onebit(block=4096)", "twobit", "twobit(block=8)", "qsgd", "qsgd(levels=1)", "qsgd(levels=127, norm=max)",
    "natural", "fp8", "fp8(e5m2)", "fp8(rounding=stochastic)", "fp8(e5m2, block=64, rounding=stochastic)",
)  # fmt: skip
SIZES = (0, 1, 7, 9, 511, 513, 1025, 5000)


@pytest.fixture(params=_core.simd_variants())
def simd(request):
    before = _core.simd()
    _core.use_simd(request.param)
    yield request.param
    _core.use_simd(before)


def numbers(numel, scale=1.0):
    """Normal numbers with zeros, a subnormal one, and what is not finite in the last blocks."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    if numel > 600:
        x[2], x[3], x[100] = -0.0, 0.0, 1e-42
    if numel > 4999:
        x[4097], x[4999] = torch.nan, -torch.inf
    return x


def same(a, b):
    return (
        torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def in_plain_torch(monkeypatch):
    from tacit.codecs import fp8, natural, qsgd, signs, two_bits

    for module in (fp8, natural, qsgd, signs, two_bits):
        monkeypatch.setattr(module, "kernels", lambda x: in_torch)


@pytest.mark.parametrize("text", FORMATS)
def test_the_torch_path_gives_the_bits_of_every_instruction_set(simd, text, monkeypatch):
    format, seed = parse_codec(text).format, 2**63 + 11
    for numel in SIZES:
        for scale in (1.0, 1e-30, 1e37, 1e-38):
            x = numbers(numel, scale)
            data, out = format.pack(x, seed), torch.ones(numel)
            format.unpack_add(data, out, gain=-0.3)
            with monkeypatch.context() as patched:
                in_plain_torch(patched)
                twin, back = format.pack(x, seed), torch.ones(numel)
                format.unpack_add(twin, back, gain=-0.3)
                assert same(format.unpack(data, numel), format.unpack(twin, numel))
            assert same(data, twin) and same(out, back), (numel, scale)


def test_sums_and_votes_too(simd):
    for numel in SIZES:
        for block in (8, 1024):
            x, blocks = numbers(numel), -(-numel // block)
            for kind in range(4):
                a, b = torch.empty(2, blocks, dtype=torch.float64)
                _core.block_sums(x, block, kind, a)
                in_torch.block_sums(x, block, kind, b)
                assert same(a, b)
            limits = torch.linspace(0.5, 2, blocks)
            scales = 1.5 * limits
            scales[1:3] = torch.tensor([torch.inf, 0.0])[: max(0, blocks - 1)]
            a, b = torch.empty(2, -(-numel // 4), dtype=torch.uint8)
            _core.pack_ternary(x, block, limits, scales, 99, a)
            in_torch.pack_ternary(x, block, limits, scales, 99, b)
            assert same(a, b)
            for dtype in (torch.uint8, torch.uint16, torch.int32):
                lanes = torch.arange(numel).remainder(9).to(dtype)
                for vote in (True, False):
                    a, b = torch.empty(2, numel)
                    _core.decode_votes(lanes, 2, 7, vote, block, scales, a)
                    in_torch.decode_votes(lanes, 2, 7, vote, block, scales, b)
                    assert same(a, b)


@pytest.mark.parametrize("table", [(0, 1), (3, 200), (0, 1, 2, 1), (9, 0, 50, 4), (1, 2, 3)])
@pytest.mark.parametrize(
    "lanes", [Lanes(8, 200), Lanes(16, 200), Lanes(32, 200)], ids=lambda each: str(each.bits)
)
def test_codes_of_one_and_two_bits_are_added_as_torch_adds_them(simd, table, lanes):
    for numel in SIZES:
        bits = max(1, (len(table) - 1).bit_length())
        index = torch.randint(
            0, 256, (-(-numel * bits // 8),), generator=torch.Generator().manual_seed(numel)
        )
        index = (index & (0b10101010 if len(table) == 3 else 255)).to(torch.uint8)
        request = TableSum(index, table, numel, lanes)
        expected = torch.zeros(numel, dtype=lanes.dtype)
        request.add_in_torch(index, expected)
        found = request.look_up()
        assert torch.equal(found, expected)
        if sum(table) < 100:
            request.add(index, found)
            request.add_in_torch(index, expected)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("text", FORMATS)
def test_a_payload_can_be_cut_between_records_and_joined_again(text):
    format, x = parse_codec(text).format, numbers(10_007)
    data = format.pack(x, 1)
    whole = format.unpack(data, x.numel())
    for shards in (1, 3, 200):
        cuts = format.cuts(x.numel(), shards)
        parts = [format.cut(data, a, b) for a, b in pairwise(cuts)]
        assert torch.equal(format.join(parts), data)
        assert same(
            torch.cat([format.unpack(p, b - a) for p, (a, b) in zip(parts, pairwise(cuts), strict=True)]),
            whole,
        )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sign(block=12)", "block=12: a multiple of 8 elements"),
        ("onebit(block=0)", "block=0: a multiple of 8"),
        ("onebit(block=2097152)", "to 1048576"),
        ("signsgd(scale=max)", "scale=max: choose mean or unit"),
        ("signsgd(block=half)", "block=half: a multiple of 8"),
        ("qsgd(levels=0)", "levels=0: 1 to 127"),
        ("qsgd(levels=2.5)", "levels=2.5: 1 to 127"),
        ("qsgd(bucket=100)", "bucket=100: a multiple of 8"),
        ("qsgd(norm=l1)", "norm=l1: choose l2 or max"),
        ("terngrad(clip=-1)", "clip=-1: standard deviations"),
        ("terngrad(clip=True)", "clip=True: standard deviations"),
        ("natural(bits=8)", "does not fit its options (none)"),
        ("fp8(e3m4)", "kind=e3m4: choose e4m3 or e5m2"),
        ("fp8(kind=8)", "kind=8: choose e4m3 or e5m2"),
        ("fp8(rounding=up)", "rounding=up: choose nearest or stochastic"),
        ("ef21", "codec 'ef21' does not fit its options"),
        ("ef21(8)", "ef21(8): an inner codec is needed"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence(text, why):
    with pytest.raises(TacitError) as found:
        parse_codec(text)
    assert why in str(found.value) and "\n" not in str(found.value)


def test_kernels_refuse_wrong_sizes():
    x, out = torch.ones(10), torch.empty(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out has 3 bytes: 10 elements take exactly 6"):
        _core.pack_signs(x, 64, 1, out)
    with pytest.raises(ValueError, match="block=12: a multiple of 8"):
        _core.pack_signs(x, 12, 1, out)
    with pytest.raises(ValueError, match="levels=8: 1 to 7 in 4 bits"):
        _core.pack_levels(x, 64, 4, 8, True, 0, out)
    with pytest.raises(ValueError, match="table has 2 elements: codes of 2 bits have 4"):
        _core.add_codes(out, 2, torch.zeros(2, dtype=torch.uint8), True, torch.zeros(12, dtype=torch.uint8))
    with pytest.raises(ValueError, match="data has 3 bytes: 10 elements take exactly 12"):
        _core.unpack_natural(out, 1.0, False, x)
    with pytest.raises(ValueError, match="mantissa=4"):
        _core.unpack_fp8(out, 64, 4, 1.0, False, x)


# ---- trainings

STEPS = 2
TEXTS = ("signsgd", "ef21(sign)")


def _start(text):
    model = deep()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, tacit.attach(model, optimizer, text, bucket="20kB", seed=7)


def _bits(model):
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def _broken_off(rank, world):
    """By codec: the model's bits after a training in one go, and resumed half-way."""
    found = {}
    for text in TEXTS:
        model, optimizer, handle = _start(text)
        train(model, optimizer, rank, range(STEPS))
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        train(model, optimizer, rank, range(STEPS, 2 * STEPS))
        unbroken = _bits(model)
        handle.close()
        model, optimizer, handle = _start(text)
        for part, state in zip((model, optimizer, handle), kept, strict=True):
            part.load_state_dict(state)
        train(model, optimizer, rank, range(STEPS, 2 * STEPS))
        found[text] = unbroken, _bits(model)
        handle.close()
    return found


def test_ranks_under_fsdp2_train_to_the_same_bits_and_resume_to_them(ranks):
    results = ranks.run(2, _broken_off)
    for text in TEXTS:
        unbroken, resumed = results[0][text]
        assert torch.equal(unbroken, resumed) and unbroken.isfinite().all()
        assert all(torch.equal(unbroken, other[text][0]) for other in results)
