"""overlap="forward": exchanges and steps go on beside the next forward pass, and nobody can tell from the bits."""

import gc
import os
import threading
import time
import warnings
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from toys import WIDTH, deep, flat, loss_of, own_state

import tacit
from tacit.attachments.order import by_need
from tacit.schemes import Sharded

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.005)),
    "adamw groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "name": "same"},
            {
                "params": [p for p in model.parameters() if p.ndim == 1],
                "weight_decay": 0.0,
                "lr": 0.001,
                "name": "same",
            },
        ],
        lr=0.005,
    ),
    "foreach": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.001, foreach=True, momentum=0.5),
}


class Attending(nn.Module):
    """Uses the output projection of torch's attention, whose own module is never called, and ties two weights."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.block(self.tokens(x)))


def _slots(optimizer):
    """Its state by parameter: the order of the entries is that of first steps."""
    found = sorted(optimizer.state_dict()["state"].items())
    return [
        torch.as_tensor(value).clone() for _, slots in found for value in slots.values() if value is not None
    ]


def _train(rank, world, kind, text, overlap, how, steps=12):
    """Losses, the model, the optimizer's state and the handle's after some steps, with all that may come between them."""
    torch.manual_seed(1)
    inner = Attending() if kind == "attention" else deep(layers=4)
    model = inner if "plain" in how else DDP(inner, gradient_as_bucket_view="view" in how)
    optimizer = OPTIMIZERS[how.split("/")[0]](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    handle = tacit.attach(model, optimizer, text, bucket="20kB", overlap=overlap)
    found = []
    for step in range(steps):
        rng = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, 11, (3, 5), generator=rng)

        def loss(step=step, ids=ids):
            if kind == "attention":
                return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            return loss_of(model, rank, step)

        if step % 4 == 3:
            with handle.no_sync():
                loss().backward()
        value = loss()
        value.backward()
        found.append(value.detach())
        if "clip" in how:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        if step == 5:  # an evaluation, of the inner module
            with torch.no_grad():
                found.append(
                    (inner.eval()(ids) if kind == "attention" else inner(torch.ones(1, WIDTH))).sum()
                )
                inner.train()
        if step == 6:
            found += [value.clone() for value in model.state_dict().values()]
        if step == 7:
            found += _slots(optimizer)
        if step == 8:
            found += [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad(set_to_none="zeros" not in how)
        schedule.step()
    state = own_state(handle)
    found += [
        value
        for slots in state["memory"].values()
        for value in slots.values()
        if isinstance(value, torch.Tensor)
    ]
    handle.close()
    found += [flat(model), *_slots(optimizer)]
    return [value.detach() for value in found], state["step"]


def test_the_bits_are_those_of_steps_that_waited(ranks):
    for kind, text, how in (
        ("deep", "none / sharded", "sgd"),
        ("deep", "ef(int4(block=32))", "adam/view"),
        ("deep", "int8", "adamw groups/zeros"),
        ("deep", "bf16 / allreduce", "foreach/view/clip"),
        ("attention", "int8", "adam"),
        ("attention", "ef(int8)", "adamw groups/plain"),
    ):
        with warnings.catch_warnings():
            ahead = ranks.run(2, _train, kind, text, "forward", how)
        waited = ranks.run(2, _train, kind, text, "backward", how)
        for (own, step), (expected, steps) in zip(ahead, waited, strict=True):
            assert step == steps == 12 and len(own) == len(expected)
            assert [
                n for n, (a, b) in enumerate(zip(own, expected, strict=True)) if not torch.equal(a, b)
            ] == [], (kind, text, how)


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their elements."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 8).t())

    def forward(self, x):
        return torch.tanh(self.seen(x)).mean((2, 3)) @ self.turned


def _strided(rank, world, plain, fused):
    found = []
    for overlap in ("backward", "forward"):
        torch.manual_seed(1)
        model = Strided() if plain else DDP(Strided())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        handle = tacit.attach(model, optimizer, "none / sharded", overlap=overlap)
        for step in range(3):
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        handle.close()
        found += [flat(model), torch.cat([p.grad.reshape(-1) for p in model.parameters()])]
    return found


def test_gradients_of_parameters_in_another_memory_order(ranks):
    for plain, fused in ((False, False), (True, True)):
        for model, gradient, ahead, its_gradient in ranks.run(2, _strided, plain, fused):
            assert torch.equal(model, ahead) and torch.equal(gradient, its_gradient)


def _made_by_hooks(rank, world):
    """Models whose weights are made from parameters just before forward, all steps owed until then."""
    found = []
    for overlap in ("backward", "forward"):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for layer in model:
            prune.random_unstructured(layer, "weight", amount=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tacit.attach(model, optimizer, "none / sharded", bucket="20kB", overlap=overlap)
        handle._attachment.channel.scheme = _Late()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        handle.close()
        found.append(flat(model))
    return found


def test_weights_that_hooks_make_are_made_of_updated_parameters(ranks):
    for model, ahead in ranks.run(2, _made_by_hooks):
        assert torch.equal(model, ahead)


def _dropped(rank, world):
    """Leaves the optimizer behind with a step owed."""
    found = []
    for overlap in ("backward", "forward"):
        torch.manual_seed(1)
        model = DDP(deep(layers=3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tacit.attach(model, optimizer, "none / sharded", bucket="20kB", overlap=overlap)
        handle._attachment.channel.scheme = _Late()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        handle.flush()
        found.append(flat(model))
        gc.collect()
        kept = gone() is not None
        handle.close()
    return *found, kept


def test_a_step_that_is_owed_outlives_its_optimizer(ranks):
    for model, ahead, kept in ranks.run(2, _dropped):
        assert torch.equal(model, ahead) and not kept


def _left(rank, world):
    """Rank 1 is gone before its last exchange, rank 0 saves."""
    model = DDP(deep(layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tacit.attach(model, optimizer, "none / sharded", overlap="forward")
    if rank == 1:
        _Held.most = 0
        handle._attachment.channel.scheme = _Held()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    if rank == 1:
        os._exit(0)
    try:
        model.state_dict()
    except tacit.TacitError as error:
        return str(error)


def test_a_rank_that_saves_when_others_have_left_is_told_the_way_out(ranks):
    ranks.start(2, _left)
    (_, text), other = ranks.results(2)
    assert other == ("died", 0)
    assert text.endswith("all ranks call handle.flush() or handle.close() before the first one leaves")


class _Late(Sharded):
    """Sums that take longer than the step after them."""

    def sum(self, wire, request, seed):
        time.sleep(0.02)
        return super().sum(wire, request, seed)


class _Held(Sharded):
    """Answers `most` sums, and more when it is let go."""

    go = threading.Event()
    most, answered = 1 << 30, 0

    def sum(self, wire, request, seed):
        if _Held.answered >= _Held.most:
            assert _Held.go.wait(30), "a module waited for another one's gradients"
        _Held.answered += 1
        return super().sum(wire, request, seed)


def _beside(rank, world):
    """One bucket a layer, the first layer's first: it runs while none of the others has come."""
    torch.manual_seed(1)
    model = DDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tacit.attach(model, optimizer, "none / sharded", bucket=16640, overlap="forward")
    handle._attachment.channel.scheme = _Held()
    x = torch.ones(2, 64)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum()
    handle._attachment._overlap.order = [3, 2, 1, 0]
    _Held.most = _Held.answered + 1
    before = [layer.weight.detach().clone() for layer in model.module]
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = []

    def look(module, args, out):
        seen.append([not torch.equal(a, layer.weight) for a, layer in zip(before, model.module, strict=True)])
        _Held.go.set()

    for layer in model.module:
        layer.register_forward_hook(look)
    model(x).sum()
    return seen[0], seen[-1], handle.step


def test_a_module_runs_while_the_gradients_of_those_behind_it_are_on_their_way(ranks):
    for first, last, steps in ranks.run(2, _beside):
        assert (first, last, steps) == ([True, False, False, False], [True] * 4, 2)


def _refusals(rank, world):
    found = []

    def attempt(model, optimizer, text="int8", **options):
        try:
            tacit.attach(model, optimizer, text, overlap="forward", **options)
        except tacit.TacitError as error:
            found.append(str(error))

    model = DDP(deep(layers=1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    attempt(model, None)
    attempt(model, torch.optim.LBFGS(model.parameters()))
    attempt(model, torch.optim.SGD(list(model.parameters())[1:], lr=0.1))
    attempt(DDP(model.module, find_unused_parameters=True), sgd)
    attempt(model.module, sgd, "local(2) / none")
    compiled = DDP(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    attempt(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    sparse = DDP(nn.Embedding(4, 2, sparse=True))
    attempt(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    try:
        tacit.attach(model, sgd, "int8", overlap="sideways")
    except tacit.TacitError as error:
        found.append(str(error))
    handle = tacit.attach(model, sgd, "int8", overlap="forward")
    loss_of(model, rank, 0).backward()
    try:
        sgd.step(lambda: 0.0)
    except tacit.TacitError as error:
        found.append(str(error))
    sgd.step()
    handle.close()
    loss_of(model, rank, 1).backward()  # after close(): DDP's own mean, and ordinary steps
    sgd.step()
    return found, flat(model)


def test_what_forbids_it_is_refused_in_a_sentence(ranks):
    (found, own), (_, other) = ranks.run(2, _refusals)
    assert torch.equal(own, other)
    for text, words in zip(
        found,
        (
            "pass optimizer= to attach",
            "steps parameter by parameter, and LBFGS may not allow it; torch's SGD, Adam,",
            "'0.0.weight' is not in this optimizer",
            "build DDP without find_unused_parameters= and static_graph=",
            "is for DDP and plain modules, and strategies that exchange gradients in every step",
            "a compiled model has none",
            "has sparse gradients, which overlap='forward' does not take",
            'write "backward", the default, or "forward"',
            "cannot take optimizer.step(closure)",
        ),
        strict=True,
    ):
        assert words in text


def _unused(rank, world):
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tacit.attach(model, optimizer, "int8", overlap="forward")
    x = torch.ones(1, 4)
    try:
        for step in range(3):
            found = model["used"](x)
            (found + model["other"](x) if step == 0 or rank == 0 else found).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except tacit.TacitError as error:
        return step, str(error)
    finally:
        handle.close()


def test_a_plain_module_with_unused_parameters_is_refused_by_all_ranks(ranks):
    for step, text in ranks.run(2, _unused):
        assert (
            step == 2
            and "parameter 'other." in text
            and "took no part in the last backward pass of some rank" in text
        )


def _looked_at(rank, world, how):
    """Everybody who looks sees what he would have seen, and is warned that nothing is gained."""
    found = {}
    for overlap in ("backward", "forward"):
        torch.manual_seed(1)
        model = DDP(deep(layers=3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tacit.attach(model, optimizer, "none / sharded", bucket="20kB", overlap=overlap)
        seen = found[overlap] = []
        if how == "step hook":
            optimizer.register_step_post_hook(lambda *_, seen=seen, model=model: seen.append(flat(model)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                loss_of(model, rank, step).backward()
                if how == "gradients":
                    seen.append(torch.stack([p.grad.norm() for p in model.parameters()]))
                    for p in model.parameters():
                        p.grad.clamp_(-1e-3, 1e-3)
                optimizer.step()
                handle.flush()
                seen.append(flat(model))
        texts = [str(one.message) for one in caught if "gains nothing" in str(one.message)]
        handle.close()
    return all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True)), texts


def test_who_looks_in_between_sees_whole_steps(ranks):
    for same, texts in ranks.run(2, _looked_at, "gradients"):
        assert same and len(texts) <= 1  # none where all had come by then
    for same, texts in ranks.run(2, _looked_at, "step hook"):
        assert same and len(texts) == 1 and "the optimizer has step hooks" in texts[0]


def test_buckets_leave_in_the_order_in_which_they_are_needed():
    ready, took = [1.0, 2.0, 3.0, 4.0], [2.5, 1.0, 1.0, 1.0]
    assert by_need(ready, took, need=[3, 2, 1, 0]) == [
        0,
        2,
        3,
        1,
    ]  # 1 and 2 are ready when 0 is through; then 3 is
    assert by_need(ready, [0.5] * 4, need=[3, 2, 1, 0]) == [0, 1, 2, 3]  # a fast wire: as they come
    assert by_need([0.0] * 4, took, need=[3, 0, 1, 2]) == [1, 2, 3, 0]
    assert by_need([], [], []) == []
