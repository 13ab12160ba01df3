"""Plain modules under tacit: the same promise as DDP's."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from toys import batch, deep, flat, gradients, loss_of, train

import tacit


def _grads(rank, world, wrap, steps):
    model = deep(seed=1 if wrap == "ddp" else rank)  # a plain module starts equal through attach
    if wrap == "ddp":
        model = DDP(model)
        handle = None
    else:
        if rank == 0:
            model = deep(seed=1)
        handle = tacit.attach(model, None, "none / sharded", bucket="20kB")
    for step in range(steps):
        loss_of(model, rank, step).backward()  # gradients add up over steps, as without tacit
    return gradients(model), handle and handle.stats.as_dict()


def test_gradients_are_means_when_backward_returns(ranks):
    for steps in (1, 3):
        plain, got = ranks.run(3, _grads, "ddp", steps), ranks.run(3, _grads, "plain", steps)
        for name, expected in plain[0][0].items():
            assert all(torch.equal(got[0][0][name], other[0][name]) for other in got)
            torch.testing.assert_close(got[0][0][name], expected, rtol=1e-4, atol=1e-6)
        assert got[0][1]["steps"] == steps
        assert got[0][1]["sent_by_group"]["control"] > 0


def _accumulated(rank, world):
    model = deep()
    handle = tacit.attach(model, None, "none")
    with handle.no_sync():
        loss_of(model, rank, 0).backward()
    silent = handle.stats.sent_nbytes
    loss_of(model, rank, 1).backward()
    reference = deep()
    for r in range(world):
        for step in (0, 1):
            (loss_of(reference, r, step) / world).backward()
    return silent, gradients(model), gradients(reference)


def test_no_sync_accumulates_in_silence(ranks):
    for silent, got, expected in ranks.run(2, _accumulated):
        assert silent == 0
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


class Nested(nn.Module):
    """Layers that are computed again in backward, two of them inside of another that is, and one that is not used."""

    def __init__(self, again):
        super().__init__()
        self.layers, self.again = deep(layers=4), again
        self.unused = nn.Linear(2, 2)

    def _call(self, function, x):
        return checkpoint(function, x, use_reentrant=True) if self.again else function(x)

    def forward(self, x):
        first, second, *others = self.layers
        x = self._call(lambda x: self._call(second, self._call(first, x)), x.requires_grad_())
        for layer in others:
            x = self._call(layer, x)
        return x


def _nested(rank, world, text):
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        model = Nested(again)
        optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        handle = tacit.attach(model, optimizer, text, bucket="20kB")
        for step in range(2):
            train(model, optimizer, rank, range(step, step + 1))
        found.append((gradients(model), flat(model), handle.step, handle.stats.as_dict()["sent_nbytes"]))
        handle.close()
    return found


def test_passes_within_a_pass_are_one_exchange(ranks):
    for found in (ranks.run(2, _nested, "int4"), ranks.run(2, _nested, "none / sharded")):
        for once, again in found:
            assert again[2:] == once[2:] and once[2] == 2
            assert again[0]["unused.weight"] is None
            torch.testing.assert_close(again[:2], once[:2], rtol=0, atol=0)


def _channels_last(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, 8, 8))
    model = model.to(memory_format=torch.channels_last)
    reference = [p.detach().clone() for p in model.parameters()]
    tacit.attach(model, None, "none / sharded")
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 3, 8, 8, generator=rng).to(memory_format=torch.channels_last)
    model(x).square().sum().backward()
    own = [p.grad.clone() for p in model.parameters()]
    assert all(
        torch.equal(a, b) for a, b in zip(reference, (p.detach() for p in model.parameters()), strict=True)
    )
    return own, x


def test_memory_layouts_other_than_contiguous_are_kept(ranks):
    found = ranks.run(2, _channels_last)
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, 8, 8))
    sum(model(x).square().sum() / 2 for _, x in found).backward()
    for got, parameter in zip(found[0][0], model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-4)


def _trained(rank, world, compiled):
    model = deep()
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "name": "matrices"},
            {
                "params": [p for p in model.parameters() if p.ndim == 1],
                "name": "vectors",
                "weight_decay": 0.0,
            },
        ],
        lr=0.003,
    )
    handle = tacit.attach(model, optimizer, "ef(int4)", bucket="20kB")
    first = loss_of(model, rank, 0).item()
    last = train(model, optimizer, rank, range(40))
    return flat(model), first, last, handle.stats.as_dict()


def test_training_with_parameter_groups_lowers_the_loss_and_counts_bytes_by_group(ranks):
    for compiled in (False, True):
        found = ranks.run(2, _trained, compiled)
        assert torch.equal(found[0][0], found[1][0])
        assert all(last < 0.5 * first for _, first, last, _ in found)
        sent = found[0][3]["sent_by_group"]
        assert set(sent) == {"matrices", "vectors", "control"}
        assert sum(sent.values()) == found[0][3]["sent_nbytes"]
        assert sent["matrices"] > 10 * sent["vectors"]


def test_without_a_process_group_attach_is_silent():
    model = deep()
    handle = tacit.attach(model, None, "int4")
    loss_of(model, 0, 0).backward()
    assert handle.world == 1 and handle.stats.sent_nbytes == 0
    handle.load_state_dict(handle.state_dict())
    handle.close()


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.always, self.other = nn.Linear(64, 4), nn.Linear(64, 4)
        self.register_buffer("count", torch.tensor([7], dtype=torch.int16))

    def forward(self, x, both):
        return self.always(x) + (self.other(x) if both else 0)


def _owed(rank, world):
    model = Sometimes()
    model.count += rank
    handle = tacit.attach(model, None, "ef(int4(rounding=nearest))")
    debts = []
    for step, both in enumerate((True, True, False)):
        model.zero_grad()
        x, label = batch(rank, step)
        nn.functional.cross_entropy(model(x, both), label).backward()
        debts.append(handle.memory.state()["residual"]["other.weight"])
    return debts, model.other.weight.grad, model.count.item()


def test_what_is_owed_to_a_parameter_that_nobody_used_stays_owed(ranks):
    found = ranks.run(2, _owed)
    before, after = (sum(debts[k] for debts, _, _ in found) for k in (1, 2))
    assert before.abs().max() > 0
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-7)
    assert all(grad is None and count == 7 for _, grad, count in found)
