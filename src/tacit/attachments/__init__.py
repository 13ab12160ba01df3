"""The public two lines: puts a Strategy on a model that is already distributed, and hands back a Handle.

(The room is not called `attach`: importing a submodule of that name would hide the function `tacit.attach`.)
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from tacit.attachments.agreement import Agreement, agree, refusals_published
from tacit.attachments.guard import CHECK_EVERY, watch_steps
from tacit.attachments.handle import Attachment, Handle, leave_dropped
from tacit.attachments.kinds import kind_of, refuse_lone_rank, warn_of_early_steps, warn_of_lone_group
from tacit.buckets import group_names, parameter_names
from tacit.errors import ConfigError
from tacit.gossip.partners import Gossip
from tacit.strategy import Strategy
from tacit.transports import Opens
from tacit.units import parse_size

if TYPE_CHECKING:
    from tacit.rounds import Merging, Trigger

__all__ = ["Attachment", "Handle", "attach"]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Strategy = "every / int8(block=256) / sharded",
    *,
    bucket: str | int = "4MiB",
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    records: str | Path | None = None,
    check_every: int = CHECK_EVERY,
) -> Handle:
    """A handle on `model`, whose ranks from now on talk as `strategy` says. Call it on all ranks alike.

    `model` is a DDP module, an FSDP2 module (`fully_shard`) or a plain module. With `every` a plain module behaves like a DDP one:
    after `backward()` the gradients are means over ranks, and `optimizer` only tells the parameter groups. Rules that let models
    part (`local`, `diloco`, `adaptive`, ...) take a plain module and its `optimizer`, whose steps they count.

    `bucket` is the size of what travels together; `seed` makes rounding repeatable; `timeout` (default: the process
    group's) bounds every wait, and in gossip, which waits for nobody, the start; `records` names a JSONL file that gets one record a step. For a plain module `group` is
    the ranks that share it; for FSDP2 it is the replicas on other hosts, whose all-reduce then takes the strategy.
    (FSDP2 cuts its own units and uses its own groups: `bucket` and `timeout` say nothing there.)

    Every `check_every` steps ranks compare a checksum of what all of them should hold alike; 0 turns that off. See docs/attach.md.
    """
    core: Any = getattr(model, "_orig_mod", model)
    ranks = _ranks_of(core, group)
    if ranks:
        leave_dropped()
    with refusals_published(ranks):
        parsed = Strategy.parse(strategy)
        bucket_nbytes = parse_size(bucket)
        if bucket_nbytes < 1:
            raise ConfigError(f"bucket={bucket}: a bucket has at least one byte; the default is 4MiB")
        if not isinstance(check_every, int) or check_every < 0:
            raise ConfigError(
                f"check_every={check_every!r}: steps between two checks of equal bits, or 0 for none"
            )
        parameters = parameter_names(model)
        groups = group_names(parameters, optimizer)
        if core in _ATTACHED and (earlier := _ATTACHED[core]()) is not None and not earlier.closed:
            raise ConfigError(f"this model already speaks {str(earlier.strategy)!r}; close that handle first")
        kind = kind_of(core)
        numels = {name: parameter.numel() for name, parameter in parameters.items()}
        handle = Handle(parsed, numels, seed=seed, records=records)
        if isinstance(parsed.who, Gossip):
            from tacit.attachments.gossiping import attach_gossip
            from tacit.gossip.rest import Rest

            if kind == "fsdp2":
                raise ConfigError(
                    f"{parsed} moves whole models, and FSDP2 has cut this one; attach the plain module, or use DDP inside a host"
                )
            if group is not None:
                raise ConfigError(
                    f"{parsed} finds its ranks in torch's store, not in a group; leave group= out, or give it to DDP inside a host"
                )
            inside = core.process_group if kind == "ddp" else None
            trigger = cast("Trigger", parsed.when)
            agreed = _agreement_of_gossip(parsed, inside, timeout)
            attach_gossip(
                handle, trigger, parsed.who, optimizer, parameters, Rest.of(core), timeout, inside, agreed
            )
            if optimizer is not None and handle.world > 1:
                watch_steps(handle, optimizer, core, inside)
            _ATTACHED[core] = ref(handle)
            return handle
        if not dist.is_available() or not dist.is_initialized():
            refuse_lone_rank()
            return handle  # one process: there is nobody to talk to
        if isinstance(parsed.who, Opens) and kind != "fsdp2":
            parsed.who.prepare()
        warn_of_lone_group(core.process_group if kind == "ddp" and group is None else group)
        gradients = parsed.when.speaks == "gradients" or getattr(parsed.when, "after", 0) > 0
        if gradients and kind != "fsdp2":  # which calls such hooks when the mean is there
            warn_of_early_steps(parameters)
        if parsed.when.speaks == "models":
            from tacit.attachments.merging import attach_merging

            if kind == "fsdp2":
                raise ConfigError(
                    f"{parsed.when} merges whole models, and FSDP2 has cut this one; use DDP inside a host"
                )
            if kind == "ddp" and group is None:
                raise ConfigError(
                    f"DDP keeps all its ranks equal, so {parsed.when} has nothing to merge; attach the plain module, or give "
                    f"DDP the ranks of one host as process_group and attach() the same place of all hosts as group"
                )
            rule = cast("Merging", parsed.when)
            if kind == "ddp" and rule.after:
                raise ConfigError(
                    f"{rule} begins with gradients of all ranks, and DDP keeps them to a host; train those steps first, and attach "
                    f"a rule without after, such as local({rule.period(0, None)})"
                )
            if kind == "ddp":
                agree(core.process_group, parsed, ["ddp"], timeout)
            attach_merging(
                handle, rule, core, optimizer, parameters, groups, bucket_nbytes, group, timeout, check_every
            )
        elif kind == "ddp":
            from tacit.attachments.ddp import attach_ddp

            if group is not None:
                raise ConfigError(
                    "group= is the process group of DDP(..., process_group=...); leave it out here"
                )
            attach_ddp(handle, core, groups, bucket_nbytes, timeout, check_every)
        elif kind == "fsdp2":
            from tacit.attachments.fsdp import attach_fsdp

            attach_fsdp(handle, core, groups, group, check_every)
        else:
            from tacit.attachments.plain import attach_plain

            attach_plain(handle, core, parameters, groups, bucket_nbytes, group, timeout, check_every)
        _ATTACHED[core] = ref(handle)
        return handle


# Weak on both sides: the hooks of the model, or of the optimizer, keep a handle alive that its owner has dropped.
_ATTACHED: "WeakKeyDictionary[nn.Module, ref[Handle]]" = WeakKeyDictionary()


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


def _agreement_of_gossip(
    strategy: Strategy, inside: dist.ProcessGroup | None, timeout: timedelta | None
) -> Callable[[], None]:
    """Raises, when it is called, if ranks are known to have attached something else. Ranks that gossip wait for nobody, but for those of
    their own host; without a process group they have only the store of their leases, and others have nothing."""
    if not dist.is_initialized():
        return lambda: None
    if inside is not None:
        agree(inside, strategy, ["ddp"], timeout)
        return lambda: None
    return Agreement.about(dist.get_process_group_ranks(None), strategy, ["models"]).look
