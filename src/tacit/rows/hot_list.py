"""Which rows are hot: counted by their owners, agreed by all ranks, handed out, and kept in checkpoints."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tacit.rows.hot import AUTO_MOST, Hot
from tacit.rows.hot_agreement import Moves, agree, hand_out
from tacit.rows.hot_checkpoint import SavedHot, SavedTable
from tacit.rows.hot_copies import HotCopies
from tacit.rows.hot_counts import DecayedCounts, Ints, mix
from tacit.rows.hot_lanes import touch_bits
from tacit.rows.hot_set import HotChange, HotCost, HotRule, HotSet
from tacit.rows.hot_slots import Slots
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners
from tacit.rows.table import Table

log = logging.getLogger("tacit")


class HotList:
    """This owner's counts and its part of the hot rows; `copies` change as agreed."""

    def __init__(
        self,
        options: Hot,
        owners: Owners,
        copies: Mapping[str, HotCopies],
        optimizer: RowOptimizer,
        *,
        in_the_network: bool,
    ) -> None:
        self._options, self._owners, self._copies, self._optimizer = options, owners, copies, optimizer
        self._shards = {name: each.shard for name, each in copies.items()}
        tables = [shard.table for shard in self._shards.values()]
        self._cost, self._rule = cost_and_rule(options, tables, owners.world, owners.servers, in_the_network)
        self._pays: bool | None = None  # as it was reported last
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._stale = False  # other ranks' hot rows are still to be copied
        self._slots = Slots(len(self._shards))
        busier = self._owners.world / len(self._owners.holders)  # than an owner where every rank is one
        self._counts = DecayedCounts(half_life_touches=self._options.half_life_touches * busier)
        part = self._owners.part
        self._set = HotSet(
            self._counts, self._cost, self._rule, part or 0, self._hashes, owns=part is not None
        )

    def count(self, touched: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """A step: by table the rows of this owner that were trained, and by how many ranks. Agrees anew when it is time."""
        slots, touches = [], []
        for table, (name, shard) in enumerate(self._shards.items()):
            keys, counts = touched[name]
            slots.append(self._slots.of(table, shard.places(keys).numpy()))
            touches.append(counts.numpy())
        self._counts.add(np.concatenate(slots), np.concatenate(touches), rank_steps=self._owners.world)
        self._steps += 1
        if self._steps % self._options.every == 0:
            self._agree()

    @property
    def counts_nbytes(self) -> int:
        """Memory of this owner's counts: at most 8 bytes a row that it keeps, and 32 KiB a table (a page of slots, doubled)."""
        return self._counts.nbytes

    @property
    def is_due(self) -> bool:
        """Whether the next `count` agrees anew."""
        return (self._steps + 1) % self._options.every == 0

    def _agree(self) -> None:
        self._announce("agree")
        before = self._set.slots
        change = agree(self._owners, self._set)
        enter = self._keys_of(np.setdiff1d(self._set.slots, before))
        leave = self._keys_of(np.setdiff1d(before, self._set.slots))
        self._move({name: Moves(enter[name], leave[name]) for name in self._shards})
        self._report(change)

    def _announce(self, what: str) -> None:
        """Ends all ranks with one sentence unless they do the same after the same number of steps."""
        self._owners.announce(Kind.HOT, (what, self._steps), [[]] * self._owners.members)

    def _move(self, moves: Mapping[str, Moves]) -> None:
        hand_out(self._owners, self._copies, self._optimizer, moves)
        held = sum(len(copies) for copies in self._copies.values())
        if not self._owners.serves:  # which knows its own hot rows alone; the size of all is agreed on
            self._set.size = held
        self._owners.traffic.hot_rows = held

    def _keys_of(self, slots: Ints) -> dict[str, Tensor]:
        """By table the keys of these slots of this owner."""
        by_table = self._slots.by_table(slots)
        return {
            name: shard.keys()[torch.from_numpy(places)]
            for (name, shard), (_, _, places) in zip(self._shards.items(), by_table, strict=True)
        }

    def _hashes(self, slots: Ints) -> Ints:
        """What decides among rows of equal counts: it depends on table and key alone."""
        found = np.zeros(len(slots), np.uint64)
        for shard, (_, which, places) in zip(self._shards.values(), self._slots.by_table(slots), strict=True):
            keys = shard.keys().numpy()[places].view(np.uint64)
            found[which] = mix(keys ^ np.uint64(shard.table.number))
        return found.view(np.int64)

    def _report(self, change: HotChange) -> None:
        """One sentence of rank 0 whenever hot rows begin or cease to pay."""
        pays, gain = change.decision.hot > 0, change.decision.gain
        if self._options.rows != "auto" or pays == self._pays or self._owners.rank:
            return
        self._pays = pays
        if pays:
            log.info(
                "%s rows are hot: a step sends %.2f times less by the cost rule", f"{self._set.size:,}", gain
            )
        else:
            log.warning(
                "hot rows do not pay here (H = 0): the best number gains %.2fx, and less than %gx is not worth them; leave hot= out, or "
                "give Hot(rows=...) a number to have that many anyway",
                gain,
                self._rule.pays_from,
            )

    # ---- checkpoints

    def saved(self) -> SavedHot:
        """This rank's own hot rows, and the counts of all its rows in the order of their keys."""
        hot = self._keys_of(self._set.slots)
        tables: dict[str, SavedTable] = {}
        time: list[float] = []
        for table, (name, shard) in enumerate(self._shards.items()):
            places = shard.places(shard.keys().sort().values).numpy()
            counts, time = self._counts.export(self._slots.of(table, places))
            tables[name] = SavedTable(hot[name].sort().values, torch.from_numpy(counts))
        return SavedHot(self._steps, time, tables)

    def restore(self, saved: SavedHot | None) -> None:
        """After the shards were loaded; None: no row is hot, and counting begins anew. Copies come with `catch_up`."""
        self._begin()
        for copies in self._copies.values():
            copies.clear()
        self._stale = True
        if saved is None:
            return
        self._steps = saved.steps
        if self._owners.part is None:
            return
        hot, slots, counts = [], [], []
        for table, (name, shard) in enumerate(self._shards.items()):
            part = saved.tables[name]
            hot.append(self._slots.of(table, shard.places(part.hot).numpy()))
            slots.append(self._slots.of(table, shard.places(shard.keys().sort().values).numpy()))
            counts.append(part.counts.numpy())
        self._counts.restore(np.concatenate(slots), np.concatenate(counts), saved.time)
        self._set.slots = np.sort(np.concatenate(hot))

    def catch_up(self) -> None:
        """After a checkpoint was loaded: every owner hands out its hot rows."""
        if not self._stale:
            return
        self._stale = False
        self._announce("loaded")
        none = torch.empty(0, dtype=torch.int64)
        self._move({name: Moves(keys, none) for name, keys in self._keys_of(self._set.slots).items()})
        if self._owners.servers:
            sizes = self._owners.texts(str(len(self._set.slots)))
            self._set.size = sum(int(sizes[holder]) for holder in self._owners.holders)


def cost_and_rule(
    options: Hot, tables: Sequence[Table], world: int, servers: int, in_the_network: bool
) -> tuple[HotCost, HotRule]:
    """Payload bytes of an average row; a number of rows that was asked for costs nothing. Links of ranks and row servers are taken as equal."""
    if isinstance(options.rows, int):
        return HotCost(world, 1.0, 0.0, 1.0, 0.0), HotRule(options.rows, pays_from=0.0)
    gradient = sum(4 * table.width for table in tables) / len(tables)
    row = sum(table.row_nbytes for table in tables) / len(tables)
    cold = (8 + row + gradient) / 2 * (1 if servers else (world - 1) / world)
    ratio = max(1.0, world / servers) if servers else 1.0
    twice = 1.0 if in_the_network else 2 * (world - 1) / world  # the process group sends parts, then sums
    return HotCost(world, ratio, twice * gradient, cold, twice * touch_bits(world) / 8), HotRule(AUTO_MOST)
