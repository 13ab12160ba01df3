"""A key-value store of rows on the ranks, for people who bring their own loop: push, pull and push_pull, as ps-lite has them.

The same parts as `shard`: keys have owners, owners have a row optimizer. Exchanges run in threads of the store, in the order in which they
were asked for; what a call returns is waited for with `wait()`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Condition
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import _core
from tacit.errors import ConfigError, TransportError
from tacit.requests import threads_for
from tacit.rows import checkpoint
from tacit.rows.adding import RULES, Adder
from tacit.rows.exchanges import pull, push
from tacit.rows.gathering import gathered_rows
from tacit.rows.line import Line
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners, owners_of
from tacit.rows.shard import Shard
from tacit.rows.table import Table
from tacit.rows.traffic import RowTraffic
from tacit.rows.values import NORMAL, Normal, Uniform


class PendingRows:
    """What a call of the store returns at once: its result when it is there.

    Args:
        future: of the result.
        missed: called with an error of it that nobody waits for, once this is no more; None for nothing.

    Example:
        >>> rows = store.pull(keys).wait()
    """

    def __init__(
        self, future: "Future[Tensor]", missed: Callable[[BaseException], None] | None = None
    ) -> None:
        self._future, self._missed = future, missed

    def __del__(self) -> None:
        if (missed := self._missed) is not None:
            self._future.add_done_callback(lambda ended: (e := ended.exception()) and missed(e))

    def done(self) -> bool:
        """Whether `wait` would return at once.

        Returns:
            True when the exchange has ended, with an error too.
        """
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Blocks until the exchange has ended.

        Args:
            timeout_s: at most so many seconds; None for as long as it takes.

        Returns:
            The rows that were pulled; after a push without a pull no row.

        Raises:
            ConfigError: keys or gradients that the store refused, or ranks that do different things.
            TransportError: another rank is gone, or the time is over.
        """
        try:
            found = self._future.exception(timeout_s)
            self._missed = None
            if found is not None:
                raise found
            return self._future.result()
        except FutureTimeoutError as cause:
            raise TransportError(
                f"the store did not answer within {timeout_s} s; all ranks must call it in the same order"
            ) from cause


class Store:
    """Rows by key, kept by the ranks of one process group. Every rank makes the same calls in the same order, if with no key.

    Gradients are averaged over ranks, as in DDP; those of equal keys in one push are added first. A step is one push. With `stale=0` a pull sees
    exactly the pushes before it, and a run can be repeated to the bit. With `stale=k` pulls and pushes run side by side, and a pull after t pushes
    sees at least the first t - k of them.

    Args:
        width: elements of a row.
        optimizer: what a push does to its rows.
        keys: keys are 0 to keys - 1; None for any 64-bit integer.
        stale: how many pushes a pull may overtake.
        init: the values of rows that nobody has pushed to.
        dtype: torch.float32 or torch.bfloat16, in which rows are stored and sent.
        adding: how owners add gradients: "rank order", or "exact", the same bits in any order.
        seed: of first values.
        name: of the table, in checkpoints; owners and first values follow from it.
        group: the ranks; None for all.

    Raises:
        ConfigError: an option that cannot be, ranks that differ, or a launch without a process group.

    Example:
        >>> store = tacit.rows.Store(width=16, optimizer=tacit.rows.Adagrad(lr=0.1))
        >>> rows = store.pull(keys).wait()
        >>> store.push(keys, gradients_of(rows))
    """

    def __init__(
        self,
        width: int,
        *,
        optimizer: RowOptimizer,
        keys: int | None = None,
        stale: int = 0,
        init: Normal | Uniform = NORMAL,
        dtype: torch.dtype = torch.float32,
        adding: str = "rank order",
        seed: int = 0,
        name: str = "store",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(stale, int) or stale < 0:
            raise ConfigError(f"stale={stale!r}: a whole number of pushes, 0 or more")
        if adding not in RULES or not isinstance(optimizer, RowOptimizer):
            raise ConfigError(
                f"adding={adding!r}, optimizer={optimizer!r}: one of {', '.join(map(repr, RULES))}, and a row optimizer of tacit.rows"
            )
        self._table, self._stale, self._optimizer, self._adding = (
            Table(name, width, keys, dtype, None, init, seed),
            stale,
            optimizer,
            adding,
        )
        self._shards = {name: Shard(self._table, optimizer)}
        self._adders = {name: Adder(adding == "exact")}
        self._pushers = _agreed(owners_of(group), (str(self._table), str(optimizer), adding, stale))
        self._pullers = _agreed(owners_of(group), "pulls") if stale else self._pushers
        self._push_line: Line[Tensor] = Line(f"tacit-{name}-push")
        self._pull_line = Line(f"tacit-{name}-pull") if stale else self._push_line
        self._changed = Condition()
        self._asked = 0  # pushes that were asked for
        self._ended = 0  # pushes that have ended
        self._missed: BaseException | None = None  # the first error of a call that nobody has waited for

    @property
    def stats(self) -> RowTraffic:
        """What was pulled, pushed and sent by this rank."""
        found = self._pushers.traffic
        return found if self._pullers is self._pushers else found + self._pullers.traffic

    def pull(self, keys: Tensor) -> PendingRows:
        """The rows of `keys`.

        Args:
            keys: int64 or int32, in any shape; equal ones travel once.

        Returns:
            Its `wait()` returns float32 rows in the shape of `keys` and one dimension more.
        """
        self._pushers.check_open()
        wanted = keys.detach().cpu().clone()
        version = self._asked - self._stale

        def run() -> Tensor:
            with self._changed:
                self._changed.wait_for(lambda: self._ended >= version)
            return self._pull(wanted)

        return PendingRows(self._pull_line.run(run), self._keep_missed)

    def push(self, keys: Tensor, gradients: Tensor) -> PendingRows:
        """One step with gradients of the rows of `keys`.

        Args:
            keys: int64 or int32, in any shape.
            gradients: a row a key.

        Returns:
            Its `wait()` returns when this rank's owner has taken the step. An error of a push that is not waited for comes with the next
            call of the store that waits for all.
        """
        self._pushers.check_open()
        given, rows = keys.detach().cpu().clone(), gradients.detach().cpu().float().clone()
        self._asked += 1

        def run() -> Tensor:
            try:
                self._push(given, rows)
            finally:
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()
            return torch.empty(0, self._table.width)

        return PendingRows(self._push_line.run(run), self._keep_missed)

    def push_pull(self, keys: Tensor, gradients: Tensor) -> PendingRows:
        """A push, and then a pull of the same keys.

        Args:
            keys: int64 or int32, in any shape.
            gradients: a row a key.

        Returns:
            Its `wait()` returns the rows as `pull` does: with `stale=0` after the step.
        """
        pushed, pulled = self.push(keys, gradients), self.pull(keys)
        pushed._missed = pulled._missed = None  # the pair has their errors
        return PendingRows(_both(pushed, pulled), self._keep_missed)

    def wait(self) -> None:
        """Blocks until everything that was asked for has ended. Errors stay with what `push` and `pull` returned, where that is kept.

        Raises:
            ConfigError: the first error of a call whose result was dropped; so do `state_dict`, `gather_rows` and `close`. All ranks raise it
                in the same call.
            TransportError: another rank is gone.
        """
        self._pushers.check_open()
        for line in (self._push_line, self._pull_line):
            line.run(lambda: torch.empty(0)).result()
        self._raise_missed()

    def state_dict(self) -> dict[str, Any]:
        """This rank's rows, after everything that was asked for; as `Tables.state_dict`.

        Returns:
            Tensors, numbers and text: it loads with weights_only=True.
        """
        self.wait()
        return checkpoint.saved(self._shards, self._adders, self._rules)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a checkpoint, in any world; a collective, as `Tables.load_state_dict`.

        Args:
            state: this rank's state in a world of the same size, or a list of all ranks' states.

        Raises:
            CheckpointError: it is of another store, incomplete or damaged; the store is then as it was.
        """
        self.wait()
        with self._pushers.refusing():
            found = checkpoint.pick(state, {self._table.name: self._table}, self._rules)
        self._pushers.announce(Kind.LOAD, checkpoint.moment(found), [[]] * self._pushers.world)
        checkpoint.restore(found, self._shards, self._adders)

    def gather_rows(self, to: int | None = None) -> tuple[Tensor, Tensor]:
        """All keys that have a row, in order, and their rows; a collective.

        Args:
            to: the rank that receives them; None for all.

        Returns:
            Keys and rows; none on ranks other than `to`.
        """
        self.wait()
        return gathered_rows(self._pushers, self._shards[self._table.name], to)

    def close(self) -> None:
        """Ends the threads and frees the process groups, after everything that was asked for; safe to call twice."""
        if self._pushers.closed:
            return
        for line, owners in {id(o): (n, o) for n, o in self._lines()}.values():
            line.end()
            owners.close()
        self._raise_missed()

    def _keep_missed(self, error: BaseException) -> None:
        self._missed = self._missed or error

    def _raise_missed(self) -> None:
        error, self._missed = self._missed, None
        if error is not None:
            raise error

    def _lines(self) -> "list[tuple[Line[Tensor], Owners]]":
        return [(self._push_line, self._pushers), (self._pull_line, self._pullers)]

    @property
    def _rules(self) -> checkpoint.Rules:
        return checkpoint.Rules(self._optimizer, self._adding, self._pushers.rank, self._pushers.world)

    def _pull(self, keys: Tensor) -> Tensor:
        with self._pullers.refusing():
            self._table.check_keys(keys)
        different, places = keys.long().unique(return_inverse=True)
        name = self._table.name
        found = pull(self._pullers, self._shards, {name: different}, Kind.PULL)
        self._pullers.traffic.looked_up += keys.numel()
        return found.rows[name].float()[places]

    def _push(self, keys: Tensor, gradients: Tensor) -> None:
        name, width = self._table.name, self._table.width
        with self._pushers.refusing():
            self._table.check_keys(keys)
            if gradients.shape != (*keys.shape, width):
                raise ConfigError(
                    f"gradients have the shape {tuple(gradients.shape)}; keys of {tuple(keys.shape)} need {(*keys.shape, width)}"
                )
        different, places = keys.long().reshape(-1).unique(return_inverse=True)
        sums = torch.empty(len(different), width)
        rows = gradients.reshape(-1, width).contiguous()
        _core.row_sums(rows, places, 1.0, sums, threads_for(rows.numel()))
        push(self._pushers, self._shards, self._adders, {name: different}, {name: sums}, self._optimizer.lr)


def _agreed(owners: Owners, about: object) -> Owners:
    owners.announce(Kind.AGREE, about, [[]] * owners.world)
    owners.numbers = 3
    return owners


def _both(first: PendingRows, second: PendingRows) -> "Future[Tensor]":
    """The second one's result, unless the first has failed."""
    joined: Future[Tensor] = Future()

    def settle(ended: "Future[Tensor]") -> None:
        error = first._future.exception() or ended.exception()
        if error is not None:
            joined.set_exception(error)
        else:
            joined.set_result(ended.result())

    second._future.add_done_callback(lambda ended: first._future.add_done_callback(lambda _: settle(ended)))
    return joined
