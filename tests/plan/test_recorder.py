"""A user's model as a workload: sizes, order and times that add up."""

from itertools import count

import pytest
import torch
from torch import nn

from tacit.errors import ConfigError
from tacit.plan import record_workload
from tacit.sim.workloads import from_model


class Net(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.first(x))


def test_a_recorded_model_has_its_layers_in_the_order_in_which_they_run():
    model = Net()
    found = record_workload(model, [torch.ones(5, 4)], repeats=2)
    assert [(layer.name, layer.parameters) for layer in found.layers] == [
        ("first.0", 40),
        ("first.2", 16),
        ("last", 18),
        ("unused", 12),
    ]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in found.layers[:3])
    assert found.layers[3].backward_s == 0 and "recorded: median of 2 steps on cpu" in found.source
    assert all(p.grad is None for p in model.parameters())


def test_what_is_recorded_adds_up_to_the_step():
    ticks = count()
    found = record_workload(Net(), [torch.ones(5, 4)], repeats=1, clock=lambda: float(next(ticks)))
    assert found.forward_s == 4  # three layers and what follows them
    assert found.backward_s == 6  # six parameters


def test_sizes_alone_come_without_inputs():
    assert from_model(Net()).parameters == sum(p.numel() for p in Net().parameters())


def test_a_loss_of_ones_own_and_outputs_of_any_kind():
    class Several(Net):
        def forward(self, x):
            return {"logits": super().forward(x)}

    assert record_workload(Several(), [torch.ones(2, 4)], repeats=1).parameters == 86
    record_workload(Several(), [torch.ones(2, 4)], repeats=1, loss=lambda out: out["logits"].sum())


def test_a_model_that_cannot_be_recorded_gets_one_sentence():
    with pytest.raises(ConfigError, match="ReLU has no trainable parameter"):
        record_workload(nn.ReLU(), [torch.ones(1)])
    with pytest.raises(ConfigError, match="repeats=0"):
        record_workload(Net(), [torch.ones(1, 4)], repeats=0)

    class Odd(Net):
        def forward(self, x):
            return "text"

    with pytest.raises(ConfigError, match="returns str; give loss="):
        record_workload(Odd(), [torch.ones(1, 4)])
