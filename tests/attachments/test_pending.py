"""A gradient that is on its way is the mean to whoever takes it out of torch."""

import copy
import io

import numpy as np
import pytest
import torch

from tacit.attachments.pending import PendingGradient

MEAN = torch.arange(4.0).view(2, 2)


def _unpickled(gradient):
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda grad: grad.numpy(),
        lambda grad: np.asarray(grad),
        lambda grad: grad.cpu().numpy(),
        lambda grad: grad.float().contiguous().numpy(),
        lambda grad: grad.to("cpu").numpy(),
        lambda grad: grad.detach().numpy(),
        lambda grad: grad.data.numpy(),
        lambda grad: grad.tolist(),
        torch.from_dlpack,
        np.from_dlpack,
        copy.deepcopy,
        _unpickled,
    ],
)
def test_every_way_out_has_the_mean(read):
    read_mean = read(PendingGradient(torch.zeros(2, 2), lambda: MEAN))
    assert not isinstance(read_mean, PendingGradient)
    np.testing.assert_array_equal(np.asarray(read_mean), MEAN.numpy())


def test_its_memory_is_that_of_the_mean():
    pending = PendingGradient(torch.zeros(2, 2), lambda: mean)
    mean = MEAN.clone()
    assert pending.data_ptr() == mean.data_ptr() == pending.untyped_storage().data_ptr()
    pending.mul_(2)
    pending.data = pending.data + 1
    assert mean.tolist() == pending.tolist() == [[1, 3], [5, 7]]
