"""A flat model by layers: what is picked can be put back, and what a peer names is checked."""

import pytest
import torch
from torch import nn

from tacit.gossip.layers import Layers

FLAT = torch.arange(10.0)
LAYERS = Layers((3, 5, 2))


def test_the_parameters_of_a_module_are_a_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    model.scale = nn.Parameter(torch.ones(7))
    found = Layers.of(dict(model.named_parameters()))
    assert found == Layers((7, 15, 8, 4), owners=(0, 1, 1, 2, 2, 3, 3))
    assert found.summed([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == [1.0, 5.0, 9.0, 13.0]


@pytest.mark.parametrize("chosen", [None, (0,), (1,), (0, 2), (0, 1, 2)])
def test_what_is_picked_can_be_put_back_and_added(chosen):
    picked, flat = LAYERS.pick(FLAT, chosen).clone(), FLAT.clone()
    LAYERS.add(flat, chosen, torch.ones_like(picked))
    assert torch.equal(LAYERS.pick(flat, chosen), picked + 1) and (flat - FLAT).sum() == picked.numel()
    LAYERS.put(flat, chosen, picked)
    assert torch.equal(flat, FLAT)
    assert [len(part) for part in LAYERS.parts(picked, chosen)] == [
        LAYERS.sizes[k] for k in LAYERS.numbers(chosen)
    ]


def test_squares_are_of_each_layer():
    assert LAYERS.squares(FLAT) == [5.0, 135.0, 145.0]
    assert torch.equal(LAYERS.pick(FLAT, (0, 2)), torch.tensor([0.0, 1.0, 2.0, 8.0, 9.0]))


def test_layers_are_told_in_a_few_letters_and_must_be_some_of_ours():
    for chosen in (None, (0,), (0, 2), (0, 1, 2)):
        assert LAYERS.decode(LAYERS.encode(chosen)) == chosen
    assert len(Layers((1,) * 12_000).encode(tuple(range(12_000)))) == 3_000
    for text in ("", "0", "8", "-1", "x", [0], [], 7, True, {}, 0.5):
        with pytest.raises((ValueError, TypeError)):
            LAYERS.decode(text)


def test_models_that_are_cut_otherwise_have_another_checksum():
    assert LAYERS.crc == Layers((3, 5, 2)).crc != Layers((5, 3, 2)).crc
