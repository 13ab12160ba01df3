"""The arithmetic that all schemes share."""

import pytest
import torch

from tacit.requests import loop_back, threads_for
from tacit.strategy import parse_codec


@pytest.mark.parametrize("text", ["hush", "thc"])
def test_a_codec_uses_as_many_threads_as_torch_does_and_says_the_same_with_any(text):
    numel = 2**20 + 5
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    before, totals = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert threads_for(numel) == threads
            totals.append(loop_back(parse_codec(text), vectors)[0].total)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*totals)
    assert threads_for(1000) == 1
