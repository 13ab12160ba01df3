"""Modules and scripts under which ranks would not exchange what their owner thinks: refused, or said aloud, in one sentence."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, loss_of

import tacit
from tacit.errors import ConfigError


def test_under_torchrun_without_a_process_group_attach_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE=4.*every rank would train alone.*init_process_group\(\)"
    ):
        tacit.attach(deep(), None, "int8")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert tacit.attach(deep(), None, "int8").world == 1


def _refused(rank, world, make):
    model = globals()[make](world)
    try:
        tacit.attach(model, None, "int8")
    except ConfigError as error:
        return str(error)


class _TorchftDDP(DDP):
    """As torchft.ddp.DistributedDataParallel: a dummy process group of one member, and a hook that asks the Manager."""

    def __init__(self, module):
        rank = dist.get_rank()
        alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
        super().__init__(module, process_group=alone)


_TorchftDDP.__module__ = "torchft.ddp"


def _torchft(world):
    return _TorchftDDP(deep())


def _python_reducer(world):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    return DDP(deep())


def _tensor_parallel(world):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    return parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel()})


def _replicated(world):
    from torch.distributed._composable.replicate import replicate

    return replicate(deep())


def _replicated_inside(world):
    return nn.Sequential(_replicated(world), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            "_torchft",
            "dummy process group of one member, so tacit would exchange nothing; attach torch's own DDP",
        ),
        ("_python_reducer", "set torch._dynamo.config.optimize_ddp = True before DDP(model)"),
        ("_tensor_parallel", "'0.weight' is a DTensor on"),
        ("_tensor_parallel", "apply fully_shard over the data-parallel dimension"),
        ("_replicated", "use the one of torch.distributed._composable.replicate_with_fsdp, or DDP"),
        ("_replicated_inside", "use the one of torch.distributed._composable.replicate_with_fsdp, or DDP"),
    ],
)
def test_modules_that_exchange_in_their_own_way_are_refused_with_the_way_out(ranks, make, sentence):
    for text in ranks.run(2, _refused, make):
        assert sentence in text and "\n" not in text


def _warned(attach):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach().close()
    return [str(w.message) for w in caught if "tacit" in w.filename or "test_kinds" in w.filename]


def _group_of_one(rank, world):
    alone = [dist.new_group([r]) for r in range(world)][rank]
    pair = dist.new_group([0, 1])
    model = DDP(deep(), process_group=alone)
    return (
        _warned(lambda: tacit.attach(model, None, "int8")),
        _warned(lambda: tacit.attach(deep(), None, "int8", group=alone)),
        _warned(lambda: tacit.attach(deep(), None, "int8", group=pair)),
    )


def test_a_process_group_of_one_among_many_ranks_is_a_warning(ranks):
    for ddp, plain, pair in ranks.run(2, _group_of_one):
        for said in (ddp, plain):
            assert (
                len(said) == 1
                and "has one member, and the job has 2 ranks: nothing will be exchanged" in said[0]
            )
        assert pair == []


def _steps_in_hooks(model):
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, own=own: own.step())
    return model


def _early(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    sharded = _steps_in_hooks(fully_shard(deep(layers=2), mesh=mesh))
    parted = _steps_in_hooks(deep())
    optimizer = torch.optim.SGD(parted.parameters(), lr=0.1)
    found = [
        _warned(lambda: tacit.attach(_steps_in_hooks(deep()), None, "int8")),
        _warned(lambda: tacit.attach(DDP(_steps_in_hooks(deep())), None, "int8")),
        _warned(lambda: tacit.attach(deep(), None, "int8")),
        _warned(lambda: tacit.attach(DDP(deep()), None, "int8")),
        _warned(lambda: tacit.attach(sharded, None, "int8")),  # FSDP2 calls such hooks with the mean
        _warned(lambda: tacit.attach(parted, optimizer, "local(2) / none")),  # models, not gradients
    ]
    model = _steps_in_hooks(deep())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tacit.attach(model, None, "none / sharded")
    try:
        for step in range(2):
            loss_of(model, rank, step).backward()
    except tacit.TacitError as error:
        found.append(str(error))
    return found


def test_an_optimizer_that_steps_in_a_gradient_hook_is_a_warning_and_found_out_after_one_step(ranks):
    for plain, ddp, *silent, later in ranks.run(2, _early):
        for said in (plain, ddp):
            assert len(said) == 1
            assert (
                "'0.0.weight' has a post-accumulate-grad hook" in said[0]
                and "step after backward()" in said[0]
            )
        assert silent == [[], [], [], []]
        assert "rank 1 holds other bits than rank 0" in later
