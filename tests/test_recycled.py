"""Memory that tensors leave to those after them."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from tacit import _core, recycled

CPU = torch.device("cpu")
NUMEL = 100_000


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    gc.collect()
    recycled.release()
    yield
    recycled.release()


def test_the_next_tensor_of_a_size_lies_where_the_last_one_lay():
    first = recycled.empty(NUMEL, torch.float32, CPU)
    place = first.data_ptr()
    del first
    assert recycled.empty(2 * NUMEL, torch.bfloat16, CPU).data_ptr() == place


def test_a_view_keeps_the_memory():
    first = recycled.zeros(NUMEL, torch.float32, CPU)
    view = first[-3:]
    del first
    other = recycled.empty(NUMEL, torch.float32, CPU).fill_(7)
    assert view.tolist() == [0, 0, 0]
    assert other.data_ptr() != view.untyped_storage().data_ptr()


def test_sizes_that_differ_by_little_share_memory():
    first = recycled.empty(NUMEL, torch.uint8, CPU)
    place = first.data_ptr()
    del first
    assert recycled.empty(NUMEL + 1, torch.uint8, CPU).data_ptr() == place


def test_no_more_is_kept_than_was_in_use_at_a_time():
    kept = []
    for numel in range(NUMEL, 10 * NUMEL, NUMEL):
        recycled.empty(numel, torch.float32, CPU)
        kept.append(_core.recycled_nbytes())
    assert kept[0] >= 4 * NUMEL
    assert max(kept) <= 1.125 * 4 * 9 * NUMEL


def test_release_gives_it_back():
    recycled.empty(NUMEL, torch.float32, CPU)
    used = recycled.empty(NUMEL, torch.float64, CPU)
    assert _core.recycled_nbytes() > 0
    recycled.release()
    assert _core.recycled_nbytes() == 0
    used.fill_(1)


def test_any_thread_may_free_it():
    made = [recycled.empty(NUMEL, torch.float32, CPU) for _ in range(8)]
    places = {each.data_ptr() for each in made}
    threads = [threading.Thread(target=made.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = [recycled.empty(NUMEL, torch.float32, CPU) for _ in range(8)]
    assert {each.data_ptr() for each in again} == places


def test_a_capsule_that_nobody_took_frees_its_memory():
    capsule = _core.recycled(NUMEL)
    assert _core.recycled_nbytes() == 0
    del capsule
    assert _core.recycled_nbytes() >= NUMEL


def test_copies_are_like_torchs():
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(recycled.clone(x), x)
    assert recycled.clone(x).is_contiguous()
    assert torch.equal(recycled.cast(x, torch.bfloat16), x.bfloat16())
    assert recycled.cast(x, torch.float32) is x
    flat = x.reshape(-1)
    assert torch.equal(recycled.join([flat[:5], flat[:0], flat[5:]]), flat)
    assert recycled.join([flat[:0]]).shape == (0,)
    assert recycled.zeros(NUMEL, torch.int16, CPU).any().item() is False


def test_memory_is_aligned_for_vectors():
    assert all(recycled.empty(n, torch.uint8, CPU).data_ptr() % 64 == 0 for n in range(65_536, 66_000))


def test_too_much_memory_is_an_error_that_says_so():
    with pytest.raises(MemoryError):
        _core.recycled(2**62)
