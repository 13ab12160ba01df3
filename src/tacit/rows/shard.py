"""The rows of one table that one rank owns: keys, weights and optimizer state, found by a native index.

A row is made when it is first trained. Reading changes nothing: a row that nobody has trained is computed from its key.
"""

from collections.abc import Mapping
from threading import Lock

import torch
from torch import Tensor

from tacit import _core
from tacit.requests import threads_for
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.table import Table


class Shard:
    """The trained rows of `table` that this rank owns. Its methods may be called by several threads."""

    def __init__(self, table: Table, optimizer: RowOptimizer) -> None:
        self.table, self._optimizer, self._lock = table, optimizer, Lock()
        self.steps = 0  # those in which some rank has trained the table
        self.clear()

    def clear(self) -> None:
        """Forgets all rows."""
        self._index = _core.RowIndex()
        self._weights = torch.empty(0, self.table.width, dtype=self.table.dtype)
        self._state = self._optimizer.begin(self._weights.float())

    def __len__(self) -> int:
        return len(self._index)

    def read(self, keys: Tensor) -> Tensor:
        """The rows of `keys`, in a new tensor."""
        with self._lock:
            at = self._find(keys)
            absent = at < 0
            if not len(self):
                return self.table.first_values(keys)
            found = self._weights[at.clamp_min(0)]
        if bool(absent.any()):
            found[absent] = self.table.first_values(keys[absent])
        return found

    def train(self, keys: Tensor, gradients: Tensor, lr: float) -> None:
        """One step of the optimizer on the rows of `keys`, which are all different; the padding row stays."""
        with self._lock:
            self.steps += 1
            if self.table.padding is not None:
                others = keys != self.table.padding
                keys, gradients = keys[others], gradients[others]
            at, order = self._add(keys).sort()
            n, threads = len(self), threads_for(gradients.numel())
            state = {name: kept[:n] for name, kept in self._state.items()}
            self._optimizer.update(
                self._weights[:n], state, at, gradients[order].contiguous(), lr, self.steps, threads
            )

    def put(self, keys: Tensor, weights: Tensor, state: Mapping[str, Tensor] | None = None) -> None:
        """Makes the rows of `keys`, none of which is there yet; without `state` it begins anew."""
        with self._lock:
            self._append(keys, weights, state or self._optimizer.begin(weights.float()))

    def replace(self, keys: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Writes over the rows of `keys`, all of which are there."""
        with self._lock:
            at = self._find(keys)
            self._weights[at] = weights
            for name, values in state.items():
                self._state[name][at] = values

    def places(self, keys: Tensor) -> Tensor:
        """The place of each of `keys`, which stays until `clear`; -1 where there is no row."""
        with self._lock:
            return self._find(keys)

    def keys(self) -> Tensor:
        """The keys of all rows by their places: a copy."""
        with self._lock:
            keys = torch.empty(len(self), dtype=torch.int64)
            self._index.keys(keys)
            return keys

    def take(self, keys: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and state of the rows of `keys`, all of which are there: copies."""
        with self._lock:
            at = self._find(keys)
            return self._weights[at], {name: kept[at] for name, kept in self._state.items()}

    def export(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Keys in increasing order, their weights and their state: copies."""
        with self._lock:
            keys = torch.empty(len(self), dtype=torch.int64)
            self._index.keys(keys)
            keys, order = keys.sort()
            return keys, self._weights[order], {name: kept[order] for name, kept in self._state.items()}

    def _find(self, keys: Tensor) -> Tensor:
        at = torch.empty_like(keys)
        self._index.find(keys, at, threads_for(16 * len(keys)))
        return at

    def _add(self, keys: Tensor) -> Tensor:
        """The numbers of the rows of `keys`, all of which are there then."""
        at = self._find(keys)
        absent = at < 0
        if bool(absent.any()):
            new = keys[absent]
            weights = self.table.first_values(new)
            at[absent] = self._append(new, weights, self._optimizer.begin(weights.float()))
        return at

    def _append(self, keys: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        at, before = torch.empty_like(keys), len(self)
        n = self._index.add(keys, at)
        self._weights = _room(self._weights, before, n)
        self._weights[at] = weights
        for name, values in state.items():
            self._state[name] = _room(self._state[name], before, n)
            self._state[name][at] = values
        return at


def _room(rows: Tensor, used: int, needed: int) -> Tensor:
    """`rows` with room for `needed`, of which the first `used` are kept; it doubles, so that a row is copied twice on average."""
    if needed <= len(rows):
        return rows
    grown = rows.new_zeros((max(needed, 2 * len(rows)), *rows.shape[1:]))
    grown[:used] = rows[:used]
    return grown
