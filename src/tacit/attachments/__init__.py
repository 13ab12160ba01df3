"""The public two lines: puts a Strategy on a model that is already distributed, and hands back a Handle.

(The room is not called `attach`: importing a submodule of that name would hide the function `tacit.attach`.)
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from tacit import environment
from tacit.attachments.agreement import refusals_published
from tacit.attachments.auto import TRIAL, Auto, check_folder, check_kind, plan_with
from tacit.attachments.guard import CHECK_EVERY
from tacit.attachments.handle import Attachment, Handle, leave_dropped
from tacit.attachments.kinds import (
    kind_of,
    refuse_lone_rank,
    refuse_second_momentum,
    uncompiled,
    warn_of_early_steps,
    warn_of_lone_group,
)
from tacit.attachments.momenta import check_momenta, offer_of
from tacit.attachments.sizing import DEFAULT_NBYTES
from tacit.attachments.target import Target
from tacit.buckets import group_names, parameter_names, sparse_names
from tacit.codecs import Int8
from tacit.errors import ConfigError
from tacit.rounds import GradientRule, MergeRule
from tacit.schemes import AllReduce, Gossip
from tacit.strategy import Strategy
from tacit.units import parse_size

__all__ = ["Attachment", "Handle", "attach"]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Strategy = "every / int8(block=256) / sharded",
    *,
    bucket: str | int | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    records: str | Path | None = None,
    check_every: int = CHECK_EVERY,
    overlap: Literal["backward", "forward"] = "backward",
    weights: str | None = None,
) -> Handle:
    """Puts `strategy` on `model`: from now on its ranks exchange as the strategy describes. Call it on all ranks alike.

    Args:
        model: a DDP module, an FSDP2 module (`fully_shard`, `replicate`) or a plain module. With `every` a plain module behaves like a DDP one: after
            `backward()` its gradients are means over ranks. Rules that let models part (`local`, `diloco`, `adaptive`, ...) take a plain module.
        optimizer: names the parameter groups; rules that let models part count its steps, and need it.
        strategy: `when / what / who` as text, or a Strategy; "auto" chooses one while the model trains, for DDP and plain modules, and
            "auto(lossy=False)" only among those that lose no more than a cast to bf16.
        bucket: the size of what travels together; None: 4 MiB, or for `none` and `bf16` that DDP's ranks all-reduce DDP's own buckets, in
            which they are reduced where they lie. "auto": measured on attaching, in DDP and plain modules under `every`. FSDP2 has
            units of its own: `bucket` has no effect there.
        seed: makes stochastic rounding repeatable.
        group: for a plain module the ranks that share it; for FSDP2 the replicas on other hosts, whose all-reduce then takes the strategy;
            for DDP under a rule that merges models the same place of all hosts.
        timeout: bounds every wait (default: the process group's); in gossip, which waits for nobody, the start.
        records: a JSONL file that gets one record a step.
        check_every: steps between two comparisons of a checksum of what all ranks should hold alike; 0 turns them off.
        overlap: what an exchange goes on beside: "backward", or also the next "forward", each of whose modules then waits for its own
            gradients alone and takes its part of the optimizer's step there, with the same bits. For DDP and plain modules; call `handle.flush()` before you
            read parameters outside of a forward pass, and on all ranks, or `handle.close()`, before the first one leaves.
        weights: how FSDP2's all-gathers send parameters: "int8(block=256)" or "int4(block=32)"; the owner keeps them as they are. Left out,
            FSDP2 gathers by itself.

    Returns:
        The handle: `stats`, `state_dict()`, `no_sync()`, `merge()`, `close()`.

    Raises:
        ConfigError: an option, a model or a launch that cannot work, with the way out; the same on all ranks.
        PairingError: the parts of the strategy do not fit each other or the number of ranks, or the ranks attach different strategies.

    Example:
        >>> handle = tacit.attach(DistributedDataParallel(model), optimizer, "every / int8(block=256) / sharded")

    docs/attach.md has what is compared and what is refused.
    """
    module = uncompiled(model)
    ranks = _ranks_of(module, group)
    if ranks:
        leave_dropped()
    with refusals_published(ranks):
        auto = Auto.parse(strategy)
        parsed = Strategy.parse(TRIAL if auto is not None else strategy)
        file = _plan_file()
        parameters = parameter_names(model)
        target = Target(
            module,
            kind_of(module),
            optimizer,
            parameters,
            group_names(parameters, optimizer),
            _bucket_nbytes(
                DEFAULT_NBYTES if auto is not None and bucket in ("auto", None) else bucket,
                parsed,
                module,
                overlap,
            ),
            group,
            timeout,
            _whole_steps(check_every),
            _overlap(overlap, parsed, module),
            _weights(weights, parsed, module),
            asked=auto or "",
        )
        leads = not ranks or dist.get_rank() == ranks[0]  # it alone reads and writes the files of plans
        if auto is not None:
            check_kind(target, str(strategy), bool(sparse_names(module, parameters)))
            if leads and auto.folder is not None:
                check_folder(auto.folder)
        if leads and file is not None:
            _check_plan_file(file)
        _refuse_attached(module)
        refuse_second_momentum(parsed, optimizer)
        check_momenta(parsed, target)
        numels = {name: parameter.numel() for name, parameter in parameters.items()}
        handle = Handle(parsed, numels, seed=seed, records=records)
        handle.asked_nbytes = target.bucket_nbytes
        handle.offer = offer_of(handle, target)
        if _attach_by_strategy(handle, target):
            _ATTACHED[module] = ref(handle)
        try:
            if auto is not None:
                plan_with(handle, target, auto)
            if file is not None and handle.rank == 0:
                _record_steps(module, optimizer, file)
        except BaseException:  # nobody else has the handle
            handle.close()
            raise
        return handle


def _record_steps(module: nn.Module, optimizer: torch.optim.Optimizer | None, file: Path) -> None:
    """For `tacit plan`; the hooks keep the recorder, and go with the model."""
    from tacit.plan.step_recorder import StepRecorder

    StepRecorder(module, optimizer, file)


def _check_plan_file(file: Path) -> None:
    from tacit.plan.files import check_writable

    check_writable(file)


def _plan_file() -> Path | None:
    """Where TACIT_PLAN=record writes the steps; None where it is not set."""
    if not environment.plan():
        return None
    from tacit.plan.step_recorder import file_asked

    return file_asked(environment.plan())


def _attach_by_strategy(handle: Handle, target: Target) -> bool:
    """Hands over to gossip, to a rule that merges models, or to the kind of module; False in a process without others."""
    strategy = handle.strategy
    if isinstance(strategy.who, Gossip):
        from tacit.attachments.gossiping import attach_gossip

        attach_gossip(handle, target)
        return True
    if not dist.is_available() or not dist.is_initialized():
        refuse_lone_rank()
        return False
    if target.kind != "fsdp2":
        strategy.who.prepare()
    warn_of_lone_group(target.inside if target.group is None else target.group)
    gradients = isinstance(strategy.when, GradientRule) or _starts_with_gradients(strategy)
    if gradients and target.kind != "fsdp2":  # which calls such hooks when the mean is there
        warn_of_early_steps(target.parameters)
    if isinstance(strategy.when, MergeRule):
        from tacit.attachments.merging import attach_merging

        attach_merging(handle, strategy.when, target)
    elif target.kind == "ddp":
        from tacit.attachments.ddp import attach_ddp

        attach_ddp(handle, target)
    elif target.kind == "fsdp2":
        from tacit.attachments.fsdp import attach_fsdp

        attach_fsdp(handle, target)
    else:
        from tacit.attachments.plain import attach_plain

        attach_plain(handle, target)
    return True


# Weak on both sides: the hooks of the model, or of the optimizer, keep a handle alive that its owner has dropped.
_ATTACHED: "WeakKeyDictionary[nn.Module, ref[Handle]]" = WeakKeyDictionary()


def _refuse_attached(module: nn.Module) -> None:
    if module in _ATTACHED and (earlier := _ATTACHED[module]()) is not None and not earlier.closed:
        raise ConfigError(
            f"this model already has the strategy {str(earlier.strategy)!r}; close that handle first"
        )


def _starts_with_gradients(strategy: Strategy) -> bool:
    return isinstance(strategy.when, MergeRule) and strategy.when.after > 0


def _bucket_nbytes(
    bucket: str | int | None, strategy: Strategy, module: nn.Module, overlap: str
) -> int | None:
    """None where it is to be measured."""
    if bucket is None:
        # without a codec to work beside the wire nothing is gained by smaller ones
        as_ddp = isinstance(strategy.who, AllReduce) and getattr(strategy.what, "spends", False)
        if as_ddp and kind_of(module) == "ddp" and overlap == "backward":
            cap: Any = module.bucket_bytes_cap
            return max(1, int(cap))
        return DEFAULT_NBYTES
    if bucket == "auto":
        if not isinstance(strategy.when, GradientRule) or kind_of(module) == "fsdp2":
            raise ConfigError(
                "bucket='auto' is for DDP and plain modules that exchange gradients in every step; name a size, 4MiB for example"
            )
        return None
    nbytes = parse_size(bucket)
    if nbytes < 1:
        raise ConfigError(f"bucket={bucket}: a bucket has at least one byte; the default is 4MiB")
    return nbytes


def _whole_steps(check_every: int) -> int:
    if not isinstance(check_every, int) or check_every < 0:
        raise ConfigError(
            f"check_every={check_every!r}: steps between two checks of equal bits, or 0 for none"
        )
    return check_every


def _overlap(overlap: str, strategy: Strategy, module: nn.Module) -> str:
    if overlap not in ("backward", "forward"):
        raise ConfigError(f'overlap={overlap!r}: write "backward", the default, or "forward"')
    if overlap == "forward" and not (isinstance(strategy.when, GradientRule) and kind_of(module) != "fsdp2"):
        raise ConfigError(
            "overlap='forward' is for DDP and plain modules, and strategies that exchange gradients in every step; leave it out here"
        )
    return overlap


def _weights(weights: str | None, strategy: Strategy, module: nn.Module) -> Int8 | None:
    if weights is None:
        return None
    if not isinstance(strategy.when, GradientRule) or kind_of(module) != "fsdp2":
        raise ConfigError(
            f"weights={weights!r} is for FSDP2, whose ranks gather parameters, and strategies that exchange gradients in every step; leave it out "
            f"here"
        )
    from tacit.attachments.fsdp_weights import weights_codec

    return weights_codec(weights)


def _ranks_of(model: nn.Module, group: dist.ProcessGroup | None) -> list[int]:
    """The ranks that attach together, as far as is known before anything was checked; none without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, TypeError, AttributeError):  # no group of torch's: refused below
        return []
