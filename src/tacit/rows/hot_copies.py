"""The hot rows of one table as one rank holds them: its own are in its shard, copies of the others' beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.rows.optimizers import RowOptimizer
from tacit.rows.shard import Shard


@dataclass(frozen=True, slots=True)
class RowsToCopy:
    """Rows that an owner sends to all ranks: keys, weights and optimizer state."""

    keys: Tensor
    weights: Tensor
    state: Mapping[str, Tensor]


@dataclass
class HotCopies:
    """A hot row's owner trains it in its shard, every other rank a copy with the same gradient: all hold the same bits.

    A row server knows only which of its own rows are hot: the ranks train them, and send them back when they leave.
    """

    shard: Shard
    optimizer: RowOptimizer
    part: int | None  # of the owners; None: this rank owns nothing
    owners: int
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # all, ascending
    own: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # which are this rank's

    def __post_init__(self) -> None:
        self._copies = Shard(self.shard.table, self.optimizer)
        self._places: list[Tensor] | None = None  # by owner

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Tensor) -> Tensor:
        """The place of each of `keys` among the hot ones; -1 for a cold one."""
        if not len(self):
            return torch.full_like(keys, -1)
        at = torch.searchsorted(self.keys, keys).clamp_max(len(self) - 1)
        return torch.where(self.keys[at] == keys, at, -1)

    def read(self, places: Tensor) -> Tensor:
        """The rows at these places."""
        keys, own = self.keys[places], self.own[places]
        rows = torch.empty(len(keys), self.shard.table.width, dtype=self.shard.table.dtype)
        rows[own], rows[~own] = self.shard.read(keys[own]), self._copies.read(keys[~own])
        return rows

    def train(self, places: Tensor, means: Tensor, lr: float, steps: int) -> tuple[Tensor, Tensor]:
        """The optimizer's step on the copies among these places, after so many `steps` of the shard; the rest is for the shard."""
        keys, own = self.keys[places], self.own[places]
        self._copies.steps = steps
        self._copies.train(keys[~own], means[~own], lr)
        return keys[own], means[own]

    def take(self, keys: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and state of the copies of `keys`."""
        return self._copies.take(keys)

    def by_owner(self) -> list[Tensor]:
        """The places of each owner's hot keys, which increase; a row server knows its own."""
        if self._places is None:
            order, counts = self.shard.table.by_owner(self.keys, self.owners)
            self._places = [places.sort().values for places in order.split(counts)]
        return self._places

    def change(self, enter: RowsToCopy, leave: Tensor) -> None:
        """Rows enter and leave. Their owner has them up to date then, so a copy that leaves is dropped."""
        keys, weights, state = self._copies.export()
        stays, comes = ~torch.isin(keys, leave), ~self._owns(enter.keys)
        self._copies.clear()
        self._copies.put(
            torch.cat([keys[stays], enter.keys[comes]]),
            torch.cat([weights[stays], enter.weights[comes]]),
            {name: torch.cat([kept[stays], enter.state[name][comes]]) for name, kept in state.items()},
        )
        left = self.keys[~torch.isin(self.keys, leave)]
        self.keys = torch.cat([left, enter.keys]).sort().values
        self.own, self._places = self._owns(self.keys), None

    def clear(self) -> None:
        """No row is hot."""
        self._copies.clear()
        self.keys, self.own, self._places = self.keys[:0], self.own[:0], None

    def _owns(self, keys: Tensor) -> Tensor:
        own = torch.zeros(len(keys), dtype=torch.bool)
        if self.part is not None:
            order, counts = self.shard.table.by_owner(keys, self.owners)
            own[order.split(counts)[self.part]] = True
        return own
