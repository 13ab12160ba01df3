"""Places and numbers on the wire, and which are picked: exact, in as few bits as declared, the same from C++ and torch."""

import math

import pytest
import torch

from tacit import _core
from tacit.codecs.in_torch import accumulate
from tacit.codecs.sparse_form import Places, SparseForm, above, largest
from tacit.codecs.topk import of_bytes, to_bytes
from tacit.requests import Dense
from tacit.strategy import parse_codec


def noise(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=_core.simd_variants())
def simd(request):
    before = _core.simd()
    _core.use_simd(request.param)
    yield request.param
    _core.use_simd(before)


@pytest.mark.parametrize("numel", [1, 2, 17, 4096, 9000, 100_003])
@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.01, 0.3, 0.9, 1.0])
def test_the_largest_are_the_largest_whatever_the_sample(numel, share, simd):
    kept = max(1, round(share * numel))
    periodic = torch.zeros(numel)
    periodic[:: max(1, numel // 1024)] = noise(
        len(periodic[:: max(1, numel // 1024)])
    )  # what a stride would hit
    tied = noise(numel).round()
    few = torch.zeros(numel)
    few[numel // 2] = -3.0
    for x in (noise(numel), noise(numel).exp(), periodic, tied, few, torch.zeros(numel)):
        index = largest(x, kept)
        assert index.numel() == kept and (index.diff() > 0).all()
        assert torch.equal(x[index].abs().sort().values, x.abs().topk(kept).values.sort().values)
        # of equal ones the first
        least = x[index].abs().min()
        equal = (x.abs() == least).nonzero().view(-1)
        assert torch.equal(index[x[index].abs() == least], equal[: int((x[index].abs() == least).sum())])


def test_what_is_not_finite_is_picked_first(simd):
    x = noise(20_000)
    x[[7, 12_345]] = torch.tensor([torch.nan, -torch.inf])
    assert largest(x, 2).tolist() == [7, 12_345]
    assert above(x, 1e30).tolist() == [7, 12_345]


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 5000, 70_001])
def test_all_that_are_large_enough_are_found(numel, simd):
    x = noise(numel)
    for least in (1e-38, 0.5, 2.0, 1e9):
        assert torch.equal(above(x, least), (x.abs() >= least).nonzero().view(-1))


@pytest.mark.parametrize(
    ("numel", "kept"),
    [(1, 1), (5, 5), (1000, 0), (1000, 1), (4096, 64), (10**6, 1000), (10**6, 10**5), (2**31, 3)],
)
def test_places_take_what_elias_and_fano_take_and_come_back(numel, kept):
    index = torch.randperm(min(numel, 10**6), generator=torch.Generator().manual_seed(0))[:kept].sort().values
    index = index * (numel // min(numel, 10**6))
    places = Places(numel, kept)
    packed = places.pack(index)
    assert packed.numel() == places.nbytes
    if 0 < 2 * kept <= numel:
        least = (math.lgamma(numel + 1) - math.lgamma(kept + 1) - math.lgamma(numel - kept + 1)) / math.log(2)
        assert 8 * places.nbytes <= least + kept + 9
    assert torch.equal(places.unpack(packed), index)
    if numel <= 10**6 and kept:
        assert torch.equal(packed, to_bytes(places._row.index_bits(index[None])).view(-1))  # torch's twin
        assert torch.equal(places._row.index_of(of_bytes(packed[None])).view(-1), index)


def test_one_of_a_thousand_takes_44_bits_with_its_number():
    form = SparseForm(10**6, 1000, Dense(torch.float32))
    assert 8 * form.nbytes / 1000 == pytest.approx(44.0, abs=0.1)


def test_bytes_that_nobody_packed_are_refused():
    places = Places(1000, 10)
    good = places.pack(torch.arange(0, 1000, 100))
    for bad in (torch.zeros_like(good), torch.full_like(good, 255), good.flip(0)):
        with pytest.raises(ValueError, match="is not there, or out of order"):
            places.unpack(bad)
    with pytest.raises(ValueError, match="are not those of 10 places"):
        places.unpack(good[:-1])
    with pytest.raises(ValueError, match="place 5 of 1000 is out of order"):
        places.pack(torch.tensor([7, 5] + [8] * 8))
    with pytest.raises(ValueError, match="do not go together"):
        _core.select_largest(torch.ones(10), 3, 1, torch.empty(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="there is room for 2"):
        _core.select_above(torch.ones(10), 0.5, torch.empty(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="all have the same number"):
        _core.accumulate(torch.ones(3), 0.9, torch.ones(3), torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="are not 2 blocks of 4"):
        _core.used_blocks(torch.ones(9), 4, torch.empty(2, dtype=torch.uint8))


def test_momentum_is_kept_where_it_is_finite_and_as_torch_has_it(simd):
    x, u, v = noise(1003, 1), noise(1003, 2), noise(1003, 3)
    x[[0, 1002]] = torch.tensor([torch.nan, torch.inf])
    twins = [u.clone(), v.clone(), torch.empty(1003)]
    own = [u.clone(), v.clone(), torch.empty(1003)]
    _core.accumulate(x, 0.9, *own)
    accumulate(x, 0.9, *twins)
    for a, b in zip(own, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert own[0][0] == u[0] and own[1][1002] == v[1002] and not own[2][[0, 1002]].isfinite().any()


def test_of_a_whole_bucket_the_largest_travel_not_of_each_chunk():
    x = torch.cat([noise(5000), 100 * noise(5000, 1)])
    codec = parse_codec("topk(0.01, chunk=bucket) > none")
    sent = codec.unpack_add(codec.pack(x, 0), torch.zeros_like(x))
    assert str(codec) == "topk(share=0.01, chunk=bucket) > none" and parse_codec(str(codec)) == codec
    assert torch.equal(sent.nonzero().view(-1), x.abs().topk(100).indices.sort().values)
    assert not sent[:5000].any()
