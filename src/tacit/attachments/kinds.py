"""What kind of module a model is, and which kinds and optimizers cannot take a strategy: each with the reason and the way out."""

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from tacit import environment
from tacit.codecs import ByShape, Dgc
from tacit.errors import ConfigError
from tacit.rounds import GradientRule
from tacit.strategy import Strategy


def uncompiled(model: nn.Module) -> nn.Module:
    """The module behind torch.compile's wrapper."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def kind_of(model: nn.Module) -> str:
    """ddp, fsdp2 (which replicate() builds on) or plain. Raises ConfigError where the model already exchanges in a way that tacit cannot take over."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        _check_ddp(model)
        return "ddp"
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise ConfigError("the model contains a DDP module; attach that one, not its parent")
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__name__ for cls in classes}
    if "FullyShardedDataParallel" in names:
        raise ConfigError(
            "FSDP1 has no place for a codec in its reduce-scatter; move to FSDP2 (fully_shard) or DDP"
        )
    if any(_is_old_replicate(cls) for cls in classes):
        raise ConfigError(
            "the older replicate(), of torch.distributed._composable.replicate, hides a DDP that takes no strategy; use the one of "
            "torch.distributed._composable.replicate_with_fsdp, or DDP"
        )
    if "FSDPModule" in names:
        return "fsdp2"
    _refuse_dtensors(model)
    return "plain"


def _is_old_replicate(cls: type) -> bool:
    return cls.__name__ == "DDP" and cls.__module__.startswith("torch.distributed._composable")


def _check_ddp(model: nn.parallel.DistributedDataParallel) -> None:
    if any(cls.__module__.partition(".")[0] == "torchft" for cls in type(model).__mro__):
        raise ConfigError(
            "torchft's DDP averages gradients through its Manager and has a dummy process group of one member, so tacit would exchange nothing; "
            "attach torch's own DDP or the plain module"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            "this DDP module was built for torch._dynamo's python_reducer, which has no buckets to exchange; set "
            "torch._dynamo.config.optimize_ddp = True before DDP(model)"
        )


def _refuse_dtensors(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            raise ConfigError(
                f"parameter {name!r} is a DTensor on {mesh}: with tensor parallelism alone its parts differ by rank and have no mean; "
                f"apply fully_shard over the data-parallel dimension of the mesh and attach that"
            )


def ranks_started() -> int:
    """How many ranks torchrun, or what started this process in its way, has started."""
    text = environment.world_size_text()
    return int(text) if text.isdigit() else 1


def refuse_lone_rank() -> None:
    """Raises where several ranks were started, and this one knows of no other."""
    if (world := ranks_started()) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}, but this process has no process group, so every rank would train alone; call "
            f"torch.distributed.init_process_group() before attach(), or unset WORLD_SIZE"
        )


def warn_of_lone_group(group: dist.ProcessGroup | None) -> None:
    """Warns where the model's process group has one member and the job has more."""
    world = max(dist.get_world_size(), ranks_started())
    if dist.get_world_size(group) == 1 < world:
        warnings.warn(
            f"the process group of this model has one member, and the job has {world} ranks: nothing will be exchanged; attach it with the group "
            f"of the ranks that share the model",
            stacklevel=3,
        )


def warn_of_early_steps(parameters: Mapping[str, nn.Parameter]) -> None:
    """Warns of hooks that take a gradient before it is a mean, as an optimizer does that steps in them."""
    for name, parameter in parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(
            parameter, "_in_backward_optimizers"
        ):
            warnings.warn(
                f"parameter {name!r} has a post-accumulate-grad hook, which sees this rank's gradient before it is averaged: an optimizer that "
                f"steps there leaves the ranks different; step after backward()",
                stacklevel=3,
            )
            return


def refuse_second_momentum(strategy: Strategy, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ConfigError where the codec has the momentum, and the optimizer would take it again."""
    what = strategy.what
    parts = (what.matrix, what.rest) if isinstance(what, ByShape) else (what,)
    own = next((part for part in parts if isinstance(part, Dgc) and part.momentum), None)
    if own is None or optimizer is None or not isinstance(strategy.when, GradientRule):
        return
    for group in optimizer.param_groups:
        if group.get("momentum") or group.get("betas", (0,))[0]:
            raise ConfigError(
                f"{own} has momentum={own.momentum}, and {type(optimizer).__name__} would apply its own to it again; take "
                f"torch.optim.SGD without momentum, or dgc(momentum=0)"
            )
