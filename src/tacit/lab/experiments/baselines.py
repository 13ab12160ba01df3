"""Who is compared: plain DDP as people run it, torch's own communication hooks, and tacit's strategies.

    link = connect(model, optimizer, named("fp16"), bucket_nbytes=4 << 20)    # the same on every rank
    link.model(x).sum().backward()

A peer has one name: `fp32` (plain DDP), `fp16`, `bf16`, `powersgd(rank=4)`. Anything else is a strategy, or `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.demo.description import Description, described
from tacit.errors import ConfigError
from tacit.grammar import Call, read, unfit
from tacit.strategy import Strategy
from tacit.transports.process_group import ring_nbytes

POWERSGD_START = 2  # the least torch allows: DDP cuts its buckets anew after the first step
_HALVES = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_BF16 = "torch refuses its bf16 hook by name without NCCL; gloo sums bf16 all the same, so the hook runs under another name"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to exchange gradients; `name` is what records and pages call it."""

    name: str
    peer: str = ""  # "fp32", "fp16", "bf16" or "powersgd", through DDP; "" where tacit runs `strategy`
    rank: int = 0
    strategy: Strategy | None = None
    note: str = ""
    auto: str = ""  # "auto", with options, where tacit chooses

    @property
    def plain(self) -> bool:
        return self.peer == "fp32"

    def description(self) -> Description:
        """What a record holds of it beside its name."""
        if self.strategy is not None or self.plain:
            return described(self.strategy)
        if self.auto:
            return {"family": "tacit", "lossy": True, "precision": None}
        return {"family": "ddp", "lossy": True, "precision": self.peer if self.peer in _HALVES else None}


def named(text: str) -> Configuration:
    """The configuration that a name in an experiment file stands for; raises `ConfigError` with the way out."""
    word = text.strip().lower()
    if word == "fp32":
        return Configuration("plain DDP", "fp32")
    if word in _HALVES:
        return Configuration(f"DDP {word} hook", word, note=_BF16 if word == "bf16" else "")
    if word.startswith("powersgd"):
        return _powersgd(text, read(word, "peer"))
    if word.partition("(")[0].strip() == "auto":
        return Configuration(text.strip(), auto=text.strip())
    strategy = Strategy.parse(text)
    return Configuration(str(strategy), strategy=strategy)


def _powersgd(text: str, call: Call) -> Configuration:
    if call.name != "powersgd" or call.args or set(call.options) - {"rank"}:
        raise unfit("peer", text, ["rank"], "write powersgd(rank=4)")
    rank = call.options.get("rank", "4")
    if not rank.isdecimal() or int(rank) < 1:
        raise ConfigError(f"peer {text!r}: the rank of PowerSGD is a whole number, 1 or more")
    return Configuration(f"DDP PowerSGD rank {int(rank)}", "powersgd", int(rank))


def runnable(configuration: Configuration) -> Configuration | None:
    """What of this works on this process group: itself, tacit's own cast where torch's hook fails, or None.

    Tried on a model of 64 parameters, by all ranks alike: a hook that gloo refuses is refused on every rank.
    """
    if not configuration.peer or configuration.plain:
        return configuration
    try:
        link = connect(nn.Linear(8, 8, bias=False), None, configuration, bucket_nbytes=1 << 20)
        for _ in range(POWERSGD_START + 1):
            link.model(torch.ones(1, 8)).sum().backward()
    except (RuntimeError, TypeError) as failure:
        why = f"torch's {configuration.peer} hook does not run on this process group ({failure})"
        if configuration.peer not in _HALVES:
            return None
        return replace(
            named(f"{configuration.peer} / allreduce"), note=f"{why}: tacit's own cast in its place"
        )
    return configuration


@dataclass(frozen=True, slots=True)
class ConnectedModel:
    """A model joined to the other ranks. `counted` returns the bytes this rank has sent so far; where nobody counts it is
    None, and `computed_nbytes` is what a ring sends in a step."""

    model: nn.Module
    bucket_nbytes: int
    computed_nbytes: float
    handle: tacit.Handle | None = None
    counted: Callable[[], float] | None = None
    note: str = ""
    configuration: Configuration | None = None

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


def connect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    configuration: Configuration,
    *,
    bucket_nbytes: int,
    seed: int = 0,
) -> ConnectedModel:
    """`model` under DDP, its gradients exchanged as `configuration` has it. All ranks built it alike: nothing is broadcast."""
    numel = sum(p.numel() for p in model.parameters())
    ring = ring_nbytes(numel, 4, dist.get_world_size(), dist.get_rank())
    note = configuration.note
    if configuration.peer == "powersgd":
        bucket_nbytes = 4 * numel + 1
        note = "one bucket: its second collective of a bucket could overtake the next bucket's first"
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=bucket_nbytes / 2**20, gradient_as_bucket_view=True, init_sync=False
    )
    if strategy := configuration.auto or configuration.strategy:
        handle = tacit.attach(ddp, optimizer, strategy, bucket=bucket_nbytes, seed=seed)
        return ConnectedModel(
            ddp, bucket_nbytes, 0.0, handle, lambda: float(handle.stats.sent_nbytes), note, configuration
        )
    if configuration.peer == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, configuration.rank, start_powerSGD_iter=POWERSGD_START)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ConnectedModel(
            ddp,
            bucket_nbytes,
            0.0,
            None,
            lambda: state.compression_stats()[2] * ring / max(1, numel),
            note,
            configuration,
        )
    if configuration.peer in _HALVES:
        hook = _HALVES[configuration.peer]
        ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        ring //= 2
    return ConnectedModel(ddp, bucket_nbytes, ring, note=note, configuration=configuration)
