"""The tables of one model in shards on its ranks: look-ups, a step, checkpoints, and plain tables again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import ConfigError, did_you_mean
from tacit.rows import checkpoint
from tacit.rows.exchanges import Pulled, pull, push, push_pulled
from tacit.rows.gathering import all_rows
from tacit.rows.held import HeldRows
from tacit.rows.hot import Hot
from tacit.rows.hot_checkpoint import pick_hot
from tacit.rows.modules import LookUp, Sharded, flat_ids
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners
from tacit.rows.table import Table
from tacit.rows.traffic import RowTraffic


class Tables:
    """What `shard` returns. Every method that exchanges something is called by all ranks, in one order.

    Args:
        tables: the tables, alike on all ranks.
        owners: the ranks.
        optimizer: of their rows.
        adding: "rank order" or "exact".
        modules: by table, those that look rows up, by their names in the model; one module may have several.
        hot: what to do about hot rows; None has none, and one rank needs none.

    Example:
        >>> tables = tacit.rows.shard(model, optimizer=RowAdagrad(lr=0.05))
    """

    def __init__(
        self,
        tables: Sequence[Table],
        owners: Owners,
        optimizer: RowOptimizer,
        adding: str,
        modules: Mapping[str, Mapping[str, Sharded]],
        hot: Hot | None = None,
    ) -> None:
        self.optimizer = optimizer
        in_the_network = hot is not None and hot.in_the_network
        self._held = HeldRows(tables, owners, optimizer, adding, hot, in_the_network)
        self._tables, self._shards, self._adders = self._held.tables, self._held.shards, self._held.adders
        self._owners, self._hot, self._modules = owners, self._held.hot, modules
        self._pending: list[tuple[Pulled, dict[str, LookUp]]] = []
        self._current: dict[str, LookUp] = {}  # of the last pull(), until the next or step()

    @property
    def names(self) -> list[str]:
        """The names of all tables."""
        return list(self._tables)

    @property
    def stats(self) -> RowTraffic:
        """What was looked up and sent by this rank."""
        return self._owners.traffic

    def owned(self, name: str) -> int:
        """Rows of one table that this rank keeps.

        Args:
            name: the table.

        Returns:
            How many rows there are: those of the weights that `shard` found, and those that were trained since.

        Raises:
            ConfigError: there is no such table.
        """
        return len(self._shards[self._known(name)])

    def hot_keys(self, name: str) -> Tensor:
        """The keys of one table whose rows are hot now, the same on all ranks.

        Args:
            name: the table.

        Returns:
            They increase; none without `hot=`, and where hot rows do not pay.

        Raises:
            ConfigError: there is no such table.
        """
        known = self._known(name)
        return self._hot.keys(known) if self._hot else torch.empty(0, dtype=torch.int64)

    # ---- rows for a forward pass

    def pull(self, ids: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        """Looks up all rows of a batch in one exchange; the modules then use them, until the next `pull` or `step`.

        Args:
            ids: by table all ids that this rank's forward looks up, in any shape; a list of them where several modules share a table.

        Raises:
            ConfigError: a key out of range, no such table, or ranks that do different things.

        Example:
            >>> tables.pull({"user": batch.user, "item": batch.items})
        """
        self._owners.check_open()
        with self._owners.refusing():
            for name in ids:
                self._known(name)
        training = torch.is_grad_enabled() and any(
            each.training for some in self._modules.values() for each in some.values()
        )
        devices = {name: _device(each) for name, each in ids.items()}
        found = self._pulled({name: flat_ids(each) for name, each in ids.items()}, devices, training)
        self._current = {name: each for name, (each, _) in found.items()}

    def look_up(self, name: str, ids: Tensor, training: bool) -> tuple[LookUp, Tensor]:
        """The rows of `ids` and the place of each among them; what a module's forward calls.

        Args:
            name: the table.
            ids: any shape.
            training: whether gradients of the rows are wanted; never under no_grad.

        Returns:
            The rows, and for every id which of them is its own.

        Raises:
            ConfigError: a key out of range, or one that `pull` was not given.
        """
        self._owners.check_open()
        on_cpu = ids.detach().cpu()
        training = training and torch.is_grad_enabled()
        found = self._current.get(name)
        if found is not None and (found.leaf.requires_grad or not training):
            places = found.places(on_cpu.long(), name)
            if not training:
                found = LookUp(found.keys, found.leaf.detach())  # a module in eval() leaves nothing behind
        else:  # also where pull() was under no_grad, and this is training
            found, places = self._pulled({name: flat_ids(on_cpu)}, {name: ids.device}, training)[name]
        return found, places.view(ids.shape).to(ids.device)

    def _pulled(
        self, ids: Mapping[str, Tensor], devices: Mapping[str, torch.device], training: bool
    ) -> dict[str, tuple[LookUp, Tensor]]:
        """By table its rows, and the place of each of `ids` among them."""
        with self._owners.refusing():
            for name, each in ids.items():
                self._tables[name].check_keys(each)
        different = {name: each.long().unique(return_inverse=True) for name, each in ids.items()}
        keys = {name: each for name, (each, _) in different.items()}
        kind = Kind.PULL_TO_TRAIN if training else Kind.PULL
        cold = self._hot.cold(different) if self._hot else keys
        pulled = pull(self._owners, self._shards, cold, kind, self._hot)
        if self._hot:
            self._hot.settle()
        self.stats.looked_up += sum(len(each) for each in ids.values())
        found = {}
        for name, some in pulled.rows.items():
            rows = self._hot.joined(name, keys[name], some) if self._hot else some
            found[name] = LookUp(keys[name], rows.float().to(devices[name]).requires_grad_(training))
        if training:
            self._pending.append((pulled, found))
        return {name: (each, different[name][1]) for name, each in found.items()}

    # ---- gradients

    def step(self, lr: float | None = None) -> None:
        """Sends the gradients of all look-ups since the last step to the owners, who take one step with their mean over ranks.

        As in DDP the mean is over ranks, whatever their batches' sizes: a loss that is a mean over the own batch is right. Gradients of
        several backward passes are added first.

        Args:
            lr: in place of the optimizer's, for this step.

        Raises:
            ConfigError: ranks that do different things, or a learning rate that is no positive number.

        Example:
            >>> loss.backward(); optimizer.step(); tables.step()
        """
        self._owners.check_open()
        with self._owners.refusing():
            rate = self.optimizer.lr if lr is None else type(self.optimizer)(lr).lr
        pending, self._pending, self._current = self._pending, [], {}
        if len(pending) == 1:
            pulled, found = pending[0]
            keys, gradients = {name: each.keys for name, each in found.items()}, _gradients(found)
        else:
            keys, gradients = _united([found for _, found in pending])
        if self._hot:
            keys, gradients = self._hot.divide(keys, gradients)
        if len(pending) == 1:
            push_pulled(self._owners, self._shards, self._adders, pulled, gradients, rate, self._hot)
        else:
            push(self._owners, self._shards, self._adders, keys, gradients, rate, self._hot)
        if self._hot:
            self._hot.end_step()

    def zero_grad(self) -> None:
        """Forgets the look-ups and gradients since the last step, as where a step is left out; all ranks alike."""
        self._pending, self._current = [], {}

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's rows, in the order of their keys, with their optimizer state: copies; no other rank is asked.

        Returns:
            Tensors, numbers and text: it loads with weights_only=True.

        Raises:
            ConfigError: the rows are on row servers; `save` has these write them.

        Example:
            >>> torch.save(tables.state_dict(), f"{path}/rows-{rank}.pt")
        """
        self._owners.check_open()
        self._refuse_with_servers("state_dict", "save")
        return self._held.state()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a checkpoint: this rank keeps the rows that it owns; a collective. All of it is checked before any is used.

        Args:
            state: this rank's state in a world of the same size, or a list of all ranks' states in any world.

        Raises:
            CheckpointError: it is of other tables, of another optimizer, incomplete or damaged; the tables are then as they were.
            ConfigError: the rows are on row servers; `load` has these read them. Or another rank refused its state, or has one of another step.

        Example:
            >>> tables.load_state_dict([torch.load(f"{path}/rows-{r}.pt", weights_only=True) for r in range(4)])
        """
        self._owners.check_open()
        self._refuse_with_servers("load_state_dict", "load")
        with self._owners.refusing():
            found = checkpoint.pick(state, self._tables, self._held.rules)
            hot = pick_hot(state, found, self._held.rules) if self._hot else None
        self._owners.announce(Kind.LOAD, checkpoint.moment(found), [[]] * self._owners.members)
        self.zero_grad()
        self._held.restore(found, hot)

    def save(self, folder: str | Path) -> None:
        """Every owner of rows, rank or row server, writes its part into a folder, whole or not at all; a collective.

        Args:
            folder: rank 0's is taken; owners on several machines write on theirs. A folder a checkpoint.

        Raises:
            CheckpointError: an owner cannot write; the others may have.

        Example:
            >>> tables.save(f"{path}/step-{step}")
        """
        self._owners.check_open()
        self._held.save(str(folder))

    def load(self, folder: str | Path) -> None:
        """Goes on from what `save` wrote, with any number of ranks and row servers; a collective. All is checked before any is used.

        Args:
            folder: rank 0's is taken. Owners read their own part where there are as many as have written, else all parts.

        Raises:
            CheckpointError: it is of other tables, of another optimizer, incomplete or damaged; the tables are then as they were.

        Example:
            >>> tables.load(f"{path}/step-{step}")
        """
        self._owners.check_open()
        self._held.load(str(folder))
        self.zero_grad()

    # ---- all rows in one place

    def gather(self, to: int | None = None) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
        """Plain tables with all rows, for evaluation and export; a collective, and every receiver needs the memory.

        Args:
            to: the rank that receives them; None for all.

        Returns:
            For each module of a table, by its name in the model, an nn.Embedding or nn.EmbeddingBag; those of one table share its weight.
            Nothing on ranks other than `to`.

        Raises:
            ConfigError: a table of unbounded keys, or no such rank.

        Example:
            >>> for name, plain in tables.gather().items():
            ...     model.set_submodule(name, plain)
        """
        self._owners.check_open()
        for name, table in self._tables.items():
            if table.keys is None:
                raise ConfigError(
                    f"table {name!r} has unbounded keys, which no nn.Embedding can hold; use gather_rows({name!r})"
                )
        here = to is None or to == self._owners.rank
        found: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
        for name, table in self._tables.items():
            keys, weights = self.gather_rows(name, to)
            if here:
                found.update(_plain(self._modules[name], all_rows(table, keys, weights)))
        return found

    def gather_rows(self, name: str, to: int | None = None) -> tuple[Tensor, Tensor]:
        """The keys of one table that have a row, in order, and their rows; a collective.

        Args:
            name: the table.
            to: the rank that receives them; None for all.

        Returns:
            Keys and rows; none on ranks other than `to`.

        Raises:
            ConfigError: no such table, or no such rank.
        """
        self._owners.check_open()
        with self._owners.refusing():
            if to is not None and not 0 <= to < self._owners.world:
                raise ConfigError(f"to={to}: ranks are 0 to {self._owners.world - 1}")
            self._known(name)
        return self._held.gather_rows(name, to)

    def close(self) -> None:
        """Frees the process group of the tables, and ends their row servers; nothing but figures can be had after that. All ranks call it."""
        self._held.close()

    # ---- for shard()

    def put(self, name: str, weights: Tensor) -> None:
        """The owners take over the rows of a plain table.

        Args:
            name: the table, which has no row yet.
            weights: of all its keys.
        """
        self._held.begin(name, weights.detach().cpu())

    def _refuse_with_servers(self, method: str, instead: str) -> None:
        if self._owners.servers:
            raise ConfigError(
                f"{method}() is for rows on the ranks, and these are on {self._owners.servers} row servers; use tables.{instead}(folder)"
            )

    def _known(self, name: str) -> str:
        if name not in self._tables:
            hint = did_you_mean(name, self._tables)
            raise ConfigError(
                f"there is no table {name!r}; {hint}the tables are {', '.join(map(repr, self._tables))}"
            )
        return name


def _plain(modules: Mapping[str, Sharded], weight: Tensor) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The modules of one table with all of its rows, which they share."""
    made = {id(module): module.plain(weight) for module in modules.values()}
    shared = nn.Parameter(weight)
    for plain in made.values():
        plain.weight = shared
    return {name: made[id(module)] for name, module in modules.items()}


def _gradients(found: Mapping[str, LookUp]) -> dict[str, Tensor]:
    """By table the gradients of its rows, where the loss has used it."""
    return {
        name: each.leaf.grad.float().cpu().contiguous()
        for name, each in found.items()
        if each.leaf.grad is not None
    }


def _united(pending: Sequence[Mapping[str, LookUp]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of several look-ups the different keys of each table and the sums of their gradients, in the order of the look-ups."""
    names = dict.fromkeys(name for found in pending for name in found)
    keys, gradients = {}, {}
    for name in names:
        used = [found[name] for found in pending if name in found and found[name].leaf.grad is not None]
        parts = [_gradients({name: each})[name] for each in used]
        width = next(found[name].leaf.shape[1] for found in pending if name in found)
        all_keys = torch.cat([each.keys for each in used]) if used else torch.empty(0, dtype=torch.int64)
        keys[name], places = all_keys.unique(return_inverse=True)
        gradients[name] = torch.zeros(len(keys[name]), width)
        start = 0
        for part in parts:
            gradients[name][places[start : start + len(part)]] += part
            start += len(part)
    return keys, gradients


def _device(ids: Tensor | Sequence[Tensor]) -> torch.device:
    first = ids if isinstance(ids, Tensor) else next(iter(ids), torch.empty(0))
    return first.device
