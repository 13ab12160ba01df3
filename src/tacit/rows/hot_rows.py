"""Hot rows in a training: read here, and trained by every rank alike with sums that anybody may add.

    look-up   hot rows are read here, cold ones are pulled
    push      header: exponents are agreed          gradients of cold rows -> owners
              touch: which hot rows has some rank used           the union, alike on all ranks
              lanes: round(g 2^e) of the union, row behind row   exact sums, hot_lanes.py
              train: every rank its copies, owners the rows of their shards, cold and hot together
    every so many steps: the owners' counts decide anew which rows are hot, hot_set.py

The bits are those of shards with adding="exact", whatever is hot: a row's gradients are the same integers, whoever adds them.
"""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tacit.rows.adding import Adder
from tacit.rows.hot import AUTO_MOST, Hot
from tacit.rows.hot_agreement import Moves, agree, hand_out
from tacit.rows.hot_checkpoint import SavedHot, SavedTable
from tacit.rows.hot_copies import HotCopies
from tacit.rows.hot_counts import DecayedCounts, Ints, mix
from tacit.rows.hot_lanes import FixedRows, pack_touches, sum_rows, touch_bits, unpack_touches
from tacit.rows.hot_set import HotChange, HotCost, HotRule, HotSet
from tacit.rows.hot_slots import Slots
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners
from tacit.rows.shard import Shard
from tacit.rows.table import Table
from tacit.transports.aggregator_link import AggregatorLink
from tacit.transports.lanes import sum_lanes

log = logging.getLogger("tacit")


class HotRows:
    """The hot rows of all tables on one rank. Of the same list on all ranks, ordered by (table, key)."""

    def __init__(
        self,
        options: Hot,
        owners: Owners,
        shards: Mapping[str, Shard],
        adders: Mapping[str, Adder],
        optimizer: RowOptimizer,
        link: AggregatorLink | None,
    ) -> None:
        self._options, self._owners, self._shards, self._adders = options, owners, shards, adders
        self._optimizer, self._link = optimizer, link
        self._copies = {
            name: HotCopies(shard, optimizer, owners.rank, owners.world) for name, shard in shards.items()
        }
        self._cost, self._rule = _cost_and_rule(
            options, [shard.table for shard in shards.values()], owners.world, link is not None
        )
        self._steps = 0
        self._reported = ""
        self._mine: dict[str, tuple[Tensor, Tensor]] = {}  # places and gradients of this step
        self._cold: Mapping[str, Tensor] = {}  # keys of this step that came to this owner
        self._touches: dict[
            str, Tensor
        ] = {}  # by table and place: how many ranks have touched it in this step
        self._begin_counting()

    def _begin_counting(self) -> None:
        self._slots = Slots(len(self._shards))
        self._counts = DecayedCounts(half_life_touches=self._options.half_life_touches)
        self._set = HotSet(self._counts, self._cost, self._rule, self._owners.rank, self._hashes)
        self._stale = False  # other ranks' hot rows are still to be copied

    def keys(self, name: str) -> Tensor:
        """The hot keys of a table, ascending."""
        return self._copies[name].keys

    def close(self) -> None:
        """Leaves the aggregator."""
        if self._link is not None:
            self._link.close()

    # ---- look-ups

    def cold(self, looked_up: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """By table the keys that must be pulled; `looked_up` has the different keys, and for every id which is its own."""
        self._catch_up()
        cold = {}
        for name, (keys, ids) in looked_up.items():
            hot = self._copies[name].find(keys) >= 0
            cold[name] = keys[~hot]
            self._owners.traffic.hot_read += int(hot.sum())
            self._owners.traffic.hot_looked_up += int(hot[ids].sum())
        return cold

    def joined(self, name: str, keys: Tensor, cold: Tensor) -> Tensor:
        """The rows of `keys`: those that were pulled, and the hot ones."""
        places = self._copies[name].find(keys)
        hot = places >= 0
        rows = torch.empty(len(keys), cold.shape[1], dtype=cold.dtype)
        rows[~hot], rows[hot] = cold, self._copies[name].read(places[hot])
        return rows

    # ---- a step

    def divide(
        self, keys: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Keys and gradients of cold rows, for their owners; those of hot rows are kept for `train`."""
        self._catch_up()
        cold_keys, cold_gradients, self._mine = {}, {}, {}
        for name, given in gradients.items():
            places = self._copies[name].find(keys[name])
            hot = places >= 0
            cold_keys[name], cold_gradients[name] = keys[name][~hot], given[~hot]
            self._mine[name] = places[hot], given[hot]
        return cold_keys, cold_gradients

    def train(self, cold: Mapping[str, Tensor], lr: float) -> dict[str, tuple[Tensor, Tensor]]:
        """The optimizer's step on copies; by table the keys and means that are for this rank's shard. `cold` are the keys, each as often
        as a rank has it, that this rank trains beside."""
        self._cold, self._touches = cold, self._touched()
        union = {name: touches.nonzero().view(-1) for name, touches in self._touches.items()}
        fixed = [self._fixed(name, places) for name, places in union.items()]
        before = self._sent_nbytes
        sums, repaired = sum_rows(fixed, self._owners.world, self._add)
        traffic = self._owners.traffic
        traffic.lane_nbytes += self._sent_nbytes - before
        traffic.hot_trained += sum(len(places) for places in union.values())
        traffic.hot_repaired += repaired
        own = {}
        for (name, places), rows in zip(union.items(), sums, strict=True):
            if len(places):
                means = self._adders[name].means_of(rows.values, rows.broken, self._owners.world)
                own[name] = self._copies[name].train(places, means, lr)
        return own

    def end_step(self) -> None:
        """Counts what was touched, and agrees anew when it is time."""
        slots, touches = [], []
        for table, (name, shard) in enumerate(self._shards.items()):
            keys, counts = self._touched_here(name)
            slots.append(self._slots.of(table, shard.places(keys).numpy()))
            touches.append(counts.numpy())
        self._counts.add(np.concatenate(slots), np.concatenate(touches), rank_steps=self._owners.world)
        self._steps += 1
        if self._steps % self._options.every == 0:
            self._agree()

    def _touched(self) -> dict[str, Tensor]:
        """By table how many ranks have touched each hot row."""
        lengths = {name: len(copies) for name, copies in self._copies.items()}
        count, world = sum(lengths.values()), self._owners.world
        if not count:
            return {name: torch.empty(0, dtype=torch.int64) for name in lengths}
        own = {name: torch.zeros(length, dtype=torch.bool) for name, length in lengths.items()}
        for name, (places, _) in self._mine.items():
            own[name][places] = True
        before = self._sent_nbytes
        lanes = self._add(pack_touches(torch.cat(list(own.values())), world))
        self._owners.traffic.touch_nbytes += self._sent_nbytes - before
        parts = unpack_touches(lanes, count, world).split(list(lengths.values()))
        return dict(zip(lengths, parts, strict=True))

    def _fixed(self, name: str, union: Tensor) -> FixedRows:
        """This rank's gradients of the rows of the union, as integers; zeros where it has none."""
        width = self._shards[name].table.width
        rows = FixedRows(
            torch.zeros(len(union), width, dtype=torch.int64), torch.zeros(len(union), dtype=torch.bool)
        )
        if name in self._mine:
            places, gradients = self._mine[name]
            at = torch.searchsorted(union, places)
            rows.values[at] = self._adders[name].fixed(gradients)
            rows.broken[at] = ~gradients.isfinite().all(1)
        return rows

    def _touched_here(self, name: str) -> tuple[Tensor, Tensor]:
        """The rows of this rank that were trained in this step, and by how many ranks; the padding row never is."""
        cold = self._cold.get(name, torch.empty(0, dtype=torch.int64))
        keys, counts = cold.unique(return_counts=True)
        copies, touches = self._copies[name], self._touches[name]
        own = copies.own & (touches > 0)
        keys, counts = torch.cat([keys, copies.keys[own]]), torch.cat([counts, touches[own]])
        if (padding := self._shards[name].table.padding) is None:
            return keys, counts
        return keys[keys != padding], counts[keys != padding]

    def _add(self, own: Tensor) -> Tensor:
        assert self._owners.wire is not None
        with self._owners.wire.purpose("sum of hot rows"):
            return sum_lanes(self._owners.wire, self._link, own)

    @property
    def _sent_nbytes(self) -> int:
        assert self._owners.wire is not None
        return self._owners.wire.sent_nbytes

    # ---- which rows are hot

    def _agree(self) -> None:
        before = self._set.slots
        change = agree(self._owners, self._set)
        if len(change.enter) or len(change.leave):
            after = self._set.slots
            enter = self._keys_of(np.setdiff1d(after, before))
            leave = self._keys_of(np.setdiff1d(before, after))
            self._move({name: Moves(enter[name], leave[name]) for name in self._shards})
        self._report(change)

    def _move(self, moves: Mapping[str, Moves]) -> None:
        hand_out(self._owners, self._copies, self._optimizer, moves)
        self._owners.traffic.hot_rows = self._set.size = sum(len(copies) for copies in self._copies.values())

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
        """One sentence whenever it is another: that hot rows do not pay, or how many there are."""
        decision = change.decision
        if decision.hot:
            verdict = f"{decision.hot:,} rows should be hot"
            text = f"{change.size:,} rows are hot, and {decision.hot:,} should be: a step sends {decision.gain:.2f} times less by the cost rule"
            text = text if self._options.rows == "auto" else ""
        else:
            verdict = "none"
            text = (
                f"hot rows do not pay here (H = 0): the best number gains {decision.gain:.2f}x, and less than {self._rule.pays_from:g}x is "
                f"not worth them; leave hot= out, or give Hot(rows=...) a number to have that many anyway"
            )
        if (
            text
            and verdict != self._reported
            and self._owners.rank == 0
            and (decision.hot or not self._reported)
        ):
            log.log(logging.INFO if decision.hot else logging.WARNING, text)
        self._reported = verdict

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
        """After the shards were loaded; None: no row is hot, and counting begins anew. Copies come with the next look-up or step."""
        self._begin_counting()
        for copies in self._copies.values():
            copies.clear()
        self._steps, self._stale = 0, True
        if saved is None:
            return
        self._steps = saved.steps
        hot, slots, counts = [], [], []
        for table, (name, shard) in enumerate(self._shards.items()):
            part = saved.tables[name]
            hot.append(self._slots.of(table, shard.places(part.hot).numpy()))
            slots.append(self._slots.of(table, shard.places(shard.keys().sort().values).numpy()))
            counts.append(part.counts.numpy())
        self._counts.restore(np.concatenate(slots), np.concatenate(counts), saved.time)
        self._set.slots = np.sort(np.concatenate(hot))

    def _catch_up(self) -> None:
        """After a checkpoint was loaded: every owner hands out its hot rows."""
        if not self._stale:
            return
        self._stale = False
        self._owners.announce(Kind.HOT, "loaded", [[]] * self._owners.world)
        none = torch.empty(0, dtype=torch.int64)
        self._move({name: Moves(keys, none) for name, keys in self._keys_of(self._set.slots).items()})


def _cost_and_rule(
    options: Hot, tables: list[Table], world: int, in_the_network: bool
) -> tuple[HotCost, HotRule]:
    """With a shard on every rank. Payload bytes of an average row; a number of rows that was asked for costs nothing."""
    if isinstance(options.rows, int):
        return HotCost(world, 1.0, 0.0, 1.0, 0.0), HotRule(options.rows, pays_from=0.0)
    gradient = sum(4 * table.width for table in tables) / len(tables)
    row = sum(table.row_nbytes for table in tables) / len(tables)
    cold = (8 + row + gradient) / 2 * (world - 1) / world
    twice = 1.0 if in_the_network else 2 * (world - 1) / world  # the process group sends parts, then sums
    return HotCost(world, 1.0, twice * gradient, cold, twice * touch_bits(world) / 8), HotRule(AUTO_MOST)
