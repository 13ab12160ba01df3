"""Hosts that gossip, with DDP inside: one rank of a host meets the others' for all, and sends the rest what became of the model.

DDP keeps the ranks of a host equal and in step, so what the first of them does after an optimizer step the others can do too:

    first rank of a host     trains, gossips, and after every step sends: nothing has changed, or the model as it is now
    the others               train, and take what they receive
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.attachments.handle import Handle, spread
from tacit.errors import ConfigError
from tacit.gossip.replica import Replica
from tacit.gossip.untrained import Untrained
from tacit.transports import Wire


class HostGroup:
    """The ranks of DDP's process group, as one place among equals: every host has as many, one after another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks, world = dist.get_process_group_ranks(group), dist.get_world_size()
        self.place, self.number = ranks[0] // len(ranks), world // len(ranks)
        if ranks != list(range(self.place * len(ranks), (self.place + 1) * len(ranks))) or world % len(ranks):
            raise ConfigError(
                f"DDP's process group is ranks {ranks} of {world}; a host that gossips is a run of ranks, and all hosts have as many"
            )
        if self.number == 1:
            raise ConfigError(
                "DDP keeps all its ranks equal, so they have nothing to gossip about; attach the plain module, or give DDP the ranks "
                "of one host as process_group"
            )
        self._group, self._first = group, ranks[0]
        self.leads = dist.get_rank() == self._first

    def send(self, model: Tensor | None, like: Tensor) -> None:
        """From the first rank to the others: the model, or that it has not changed."""
        self._broadcast(torch.tensor([model is not None], dtype=torch.uint8, device=like.device))
        if model is not None:
            self._broadcast(model)

    def receive(self, like: Tensor) -> Tensor | None:
        changed = self._broadcast(torch.zeros(1, dtype=torch.uint8, device=like.device))
        return self._broadcast(torch.empty_like(like)) if changed.item() else None

    def share(self, tensors: Sequence[Tensor]) -> None:
        """They become the first rank's, on all."""
        spread(tensors, self._group)

    def agree(self, value: float, like: Tensor) -> float:
        """The first rank's value, on all."""
        return float(self._broadcast(torch.tensor([value], dtype=torch.float32, device=like.device)))

    def _broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, self._first, self._group)
        return x


class Follower:
    """The attachment of all but the first rank of a host."""

    wire: Wire | None = None

    def __init__(
        self,
        handle: Handle,
        host: HostGroup,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Any],
        untrained: Untrained,
    ) -> None:
        self._handle, self._host, self._replica = handle, host, Replica(parameters, untrained)
        self._take()
        host.share([*untrained.buffers, *untrained.frozen])
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        self._take()
        self._handle.stepped(0)

    def _take(self) -> None:
        if (model := self._host.receive(self._replica.snapshot)) is not None:
            self._replica.write(model)

    @property
    def numels(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self._replica.parameters.items()}

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def merge(self) -> None:
        self._take()
        self._host.share(self._replica.untrained.buffers)

    def divergence(self) -> float:
        return self._host.agree(0.0, self._replica.snapshot)

    def settle(self) -> None:
        """The host's first rank does all the talking."""

    def save(self) -> dict[str, Any]:
        return {}

    def check(self, state: Mapping[str, Any], memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The host's first rank has all there is to load."""

    def load(self, state: Mapping[str, Any]) -> None:
        self._take()

    def close(self) -> None:
        self._hook.remove()
