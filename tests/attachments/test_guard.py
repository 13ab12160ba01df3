"""Ranks that would go their own ways unnoticed: trained parameters that nobody exchanges, and bits that differ."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, loss_of, own_state, train

import tacit
from tacit.attachments.guard import Watch, checksums, odd_one_out, weighted_sum
from tacit.errors import TacitError

STRATEGY = {
    "plain": "every / int8 / sharded",
    "ddp": "every / int8 / sharded",
    "fsdp2": "every / int8 / sharded",
    "local": "local(2) / none / sharded",
    "late": "stale(2, delay=1) / none / sharded",
    "opening": "local(2, after=20) / none / sharded",
    "gossip": "local(2) / none / gossip",
}


def _frozen():
    model = deep(layers=4)
    model[1].requires_grad_(False)
    return model


def _wrap(model, kind, world):
    if kind == "ddp":
        return DDP(model)
    if kind != "fsdp2":
        return model
    mesh = init_device_mesh("cpu", (world,))
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _change(model, how):
    """What people do in the middle of a training: thaw a layer, or put one in."""
    if how == "unfreeze":
        model[1].requires_grad_(True)
    elif how == "add":
        model[2].add_module("adapter", nn.Linear(64, 64))
    elif how == "replace":
        model[4] = nn.Linear(64, 4)


def _changed(rank, world, kind, how, who):
    """In which step a rank is told, and what."""
    inner = _frozen()
    model = _wrap(inner, kind, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, STRATEGY[kind])
    try:
        for step in range(6):
            if step == 3 and rank in who:
                _change(inner, how)
            train(model, optimizer, rank, range(step, step + 1))
        if kind == "gossip":
            handle.merge()
    except TacitError as error:
        return step, type(error).__name__, str(error)
    finally:
        handle.close()


NAMES = {"unfreeze": "1.0.weight", "add": "2.adapter.weight", "replace": "4.weight"}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, how) for kind in ("plain", "local", "late", "opening", "gossip") for how in NAMES),
        ("ddp", "unfreeze"),
        ("ddp", "add"),  # one that is replaced DDP refuses itself, since the old one has no gradient
    ],
)
def test_parameters_unfrozen_or_added_after_attach_are_refused_by_all_ranks_in_the_next_step(
    ranks, kind, how
):
    for step, error, text in ranks.run(2, _changed, kind, how, (0, 1)):
        assert step == (4 if kind == "late" else 3)  # what is merged late is looked at then
        assert error == "ConfigError" and f"{NAMES[how]!r} was unfrozen or added after attach(), " in text
        assert "close the handle and attach again" in text


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "local", "late", "opening"])
def test_a_parameter_unfrozen_on_one_rank_alone_is_the_same_error_on_all(ranks, kind):
    found = ranks.run(3, _changed, kind, "unfreeze", (1,))
    assert len(set(found)) == 1
    step, error, text = found[0]
    assert step == (4 if kind == "late" else 3) and error == "ConfigError"
    assert "parameter '1.0.weight' was unfrozen or added after attach() on rank 1, " in text


def test_units_unfrozen_after_attach_are_refused_by_all_ranks_of_fsdp2(ranks):
    for step, error, text in ranks.run(2, _changed, "fsdp2", "unfreeze", (0, 1)):
        assert (step, error) == (
            3,
            "ConfigError",
        ) and "'1.0.weight' was unfrozen or added after attach(), " in text


def test_in_gossip_the_rank_that_changed_its_model_is_refused_and_the_others_train_on(ranks):
    first, second, third = ranks.run(3, _changed, "gossip", "unfreeze", (1,))
    assert first is None and third is None
    assert second[:2] == (3, "ConfigError") and "'1.0.weight'" in second[2]


def _hosts(rank, world):
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    inner = _frozen()
    model = DDP(inner, process_group=inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "local(2) / none / gossip")
    try:
        for step in range(4):
            if step == 2 and rank == 1:
                _change(inner, "unfreeze")
            train(model, optimizer, rank, range(step, step + 1))
    except TacitError as error:
        return str(error)
    finally:
        handle.close()


def test_the_ranks_of_a_host_that_gossips_are_refused_together(ranks):
    first, second, third, fourth = ranks.run(4, _hosts)
    assert "on another rank of this host" in first and "'1.0.weight'" in second
    assert third is None and fourth is None


def _merged(rank, world):
    """The model is thawed after the last round; `merge()` would leave that part of it apart."""
    model = _frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "local(4) / none / sharded")
    train(model, optimizer, rank, range(4))
    _change(model, "unfreeze")
    train(model, optimizer, rank, range(4, 6))
    try:
        handle.merge()
    except TacitError as error:
        return str(error)


def test_merge_refuses_what_it_would_leave_apart(ranks):
    assert all("'1.0.weight' was unfrozen" in text for text in ranks.run(2, _merged))


def _again(rank, world):
    """The way out that the error names."""
    model = _frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "int8")
    train(model, optimizer, rank, range(2))
    _change(model, "unfreeze")
    with pytest.raises(TacitError, match="attach again"):
        train(model, optimizer, rank, range(2, 3))
    handle.close()
    optimizer.zero_grad()
    with tacit.attach(model, optimizer, "int8"):
        train(model, optimizer, rank, range(3, 6))
    return flat(model)


def test_the_way_out_works(ranks):
    found = ranks.run(2, _again)
    assert torch.equal(found[0], found[1])


def _thawed_before_attach(rank, world):
    inner = _frozen()
    model = DDP(inner)
    if rank == 1:
        _change(inner, "unfreeze")
    try:
        tacit.attach(model, None, "int8")
    except TacitError as error:
        first = str(error)
    _change(inner, "unfreeze")
    try:
        tacit.attach(model, None, "int8")
    except TacitError as error:
        return first, str(error)


def test_what_was_unfrozen_between_ddp_and_attach_is_refused(ranks):
    for one_rank, all_ranks in ranks.run(2, _thawed_before_attach):
        assert "rank 0 and rank 1 attached" in one_rank
        assert "'1.0.weight' was unfrozen or added after DDP was built" in all_ranks


def _harmless(rank, world):
    model = deep(layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tacit.attach(model, optimizer, "int8")
    train(model, optimizer, rank, range(2))
    model[0].requires_grad_(False)
    model[1].register_parameter("seen", nn.Parameter(torch.ones(1), requires_grad=False))
    model.teacher = nn.Linear(2, 2).requires_grad_(False)
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)
    train(model, optimizer, rank, range(2, 4))
    model[0].requires_grad_(True)
    train(model, optimizer, rank, range(4, 6))
    return flat(nn.Sequential(*list(model)[:5]))


def test_freezing_and_adding_what_is_not_trained_is_nobodys_business(ranks):
    found = ranks.run(2, _harmless)
    assert torch.equal(found[0], found[1])


# ---- equal bits


def _diverged(rank, world, kind, every, dtype=torch.float32, odd=1):
    """Rank `odd` turns the last bit of one weight in step 5; what all ranks are told, and when."""
    inner = deep(layers=4, dtype=dtype)
    model = _wrap(inner, kind, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, STRATEGY[kind], check_every=every)
    try:
        for step in range(12):
            train(model, optimizer, rank, range(step, step + 1))
            if step == 5 and rank == odd:
                held = inner[2][0].bias if kind != "local" else _anchor(handle)
                _turn_the_last_bit(held)
    except TacitError as error:
        return step, type(error).__name__, str(error)


def _anchor(handle):
    return handle._attachment._anchors()["2.0.bias"]


def _turn_the_last_bit(tensor):
    tensor.detach().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[7] ^= 1


@pytest.mark.parametrize("kind", ["plain", "ddp", "local", "opening"])
def test_one_bit_that_differs_ends_all_ranks_at_the_next_check_with_rank_and_parameter(ranks, kind):
    found = ranks.run(3, _diverged, kind, 4)
    assert len(set(found)) == 1
    step, error, text = found[0]
    assert 6 <= step <= 10 and error == "DivergenceError"
    assert "rank 1 holds other bits than most ranks in '2.0.bias'" in text and "check_every=0" in text


@pytest.mark.parametrize(("dtype", "odd"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_half_precision_is_checked_too_and_the_odd_one_of_three_is_named(ranks, dtype, odd):
    found = ranks.run(3, _diverged, "plain", 4, dtype, odd)
    assert all(f"rank {odd} holds other bits than most ranks in '2.0.bias'" in text for *_, text in found)


@pytest.mark.parametrize(("kind", "every"), [("plain", 0), ("ddp", 0), ("ddp", 100)])
def test_a_check_can_be_rarer_or_none(ranks, kind, every):
    assert ranks.run(2, _diverged, kind, every) == [None, None]


def _replicas(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    inner = deep(layers=2)
    for layer in list(inner)[:-1]:
        fully_shard(layer, mesh=mesh["shard"])
    model = fully_shard(inner, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tacit.attach(model, optimizer, "int8", group=mesh.get_group("replica"), check_every=2)
    try:
        for step in range(8):
            train(model, optimizer, rank, range(step, step + 1))
            if step == 3 and rank >= 2:
                _turn_the_last_bit(inner[1][0].bias.detach().to_local())
    except TacitError as error:
        return step, str(error)


def test_replicas_of_fsdp2_are_checked_shard_by_shard(ranks):
    for step, text in ranks.run(4, _replicas):
        assert 4 <= step <= 6 and "rank 1 holds other bits than rank 0 in '1.0.bias'" in text


def _steps(rank, world):
    model = DDP(deep())
    handle = tacit.attach(model, None, "int8", check_every=3)
    if rank == 1:
        handle.load_state_dict(own_state(handle) | {"step": 7})
    try:
        loss_of(model, rank, 0).backward()
    except TacitError as error:
        return type(error).__name__, str(error)


def test_ranks_at_different_steps_are_refused_and_do_not_hang(ranks):
    for kind, text in ranks.run(3, _steps):
        assert kind == "CheckpointError" and "rank 1 is at step 7 and others are at step 0" in text


def _ignored(rank, world):
    inner = deep(layers=4)
    DDP._set_params_and_buffers_to_ignore_for_model(inner, ["3.0.weight"])
    model = DDP(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "int8", check_every=1)
    train(model, optimizer, rank, range(4))
    return inner[3][0].weight.detach(), handle.stats.as_dict()["sent_by_group"]["control"]


def test_what_ddp_ignores_may_differ_and_a_note_is_48_bytes(ranks):
    (one, control), (other, _) = ranks.run(2, _ignored)
    assert not torch.equal(one, other)
    assert control == 4 * 48


@pytest.mark.parametrize("value", [-1, 1.5, "often"])
def test_check_every_is_a_number_of_steps(value):
    with pytest.raises(TacitError, match="steps between two checks of equal bits, or 0 for none"):
        tacit.attach(deep(), None, "int8", check_every=value)


# ---- the parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_checksums_see_every_bit_and_every_place(dtype):
    random = torch.Generator().manual_seed(3)
    x = (100 * torch.rand(70_001, generator=random)).to(dtype)
    y = x.clone()
    y[[5, 66_000]] = y[[66_000, 5]]
    z = x.clone()
    z.view(torch.uint8)[66_003] ^= 128
    for total in (weighted_sum, lambda t: checksums({"x": t}, torch.device("cpu"))):
        assert torch.equal(total(x), total(x.clone()))
        assert not torch.equal(total(x), total(y)) and not torch.equal(total(x), total(z))
        total(x[:0])


def test_opposite_errors_do_not_cancel_in_the_sum_of_an_accelerator():
    x = torch.zeros(1000, dtype=torch.int32)
    for a, b in ((1, -1), (3, -1), (-(2**31), -(2**31))):
        y = x.clone()
        y[0], y[1] = a, b
        assert weighted_sum(y) != weighted_sum(x)


def test_a_tensor_whose_memory_lies_otherwise_has_the_same_checksum():
    x = torch.randn(4, 3, 8, 8)
    twin = x.to(memory_format=torch.channels_last)
    assert torch.equal(weighted_sum(x), weighted_sum(twin))
    assert torch.equal(checksums({"x": x}, x.device), checksums({"x": twin}, x.device))


def test_the_odd_one_out_differs_from_most():
    assert odd_one_out([4, 4, 4]) is None
    assert odd_one_out([4, 5]) == 1 and odd_one_out([5, 4, 4]) == 0 and odd_one_out([4, 4, 5, 5]) == 2


def test_a_watch_sees_parameters_by_themselves_wherever_they_are_moved():
    model = deep(layers=2)
    watch = Watch(model)
    nn.utils.parametrize.register_parametrization(model[0][0], "weight", nn.Identity())
    assert watch.newcomer() == ""
    model[1][0].weight = nn.Parameter(model[1][0].weight.detach().clone())
    assert watch.newcomer() == "1.0.weight"


def _thawed_under_ddp(rank, world):
    """Frozen when attached, but in DDP's buckets: find_unused_parameters lets it be thawed later."""
    model = DDP(deep(), find_unused_parameters=True)
    first = next(model.module[0].parameters())
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tacit.attach(model, optimizer, "int8", check_every=1)
    train(model, optimizer, rank, range(2))
    first.requires_grad_(True)
    train(model, optimizer, rank, range(2, 5))
    return flat(model)


def test_what_ddp_reduces_may_be_thawed(ranks):
    first, second = ranks.run(2, _thawed_under_ddp)
    assert torch.equal(first, second)


def _uneven(rank, world):
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "local(4) / none", check_every=1)
    train(model, optimizer, rank, range(9 + rank))  # the second shard of data is longer
    handle.merge()
    return flat(model)


def test_ranks_that_took_different_numbers_of_steps_merge_at_the_end(ranks):
    first, second = ranks.run(2, _uneven)
    assert torch.equal(first, second)


def _filled_after_attach(rank, world):
    with torch.device("meta"):
        model = deep()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    handle = tacit.attach(model, None, "int8")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    loss_of(model, rank, 0).backward()
    return handle.step


def test_a_model_of_fsdp2_may_be_made_on_the_meta_device_and_filled_after_attach(ranks):
    assert ranks.run(2, _filled_after_attach) == [1, 1]
