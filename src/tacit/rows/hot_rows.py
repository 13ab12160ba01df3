"""Hot rows in a training: read here, and trained by every rank alike with sums that anybody may add.

    look-up   hot rows are read here, cold ones are pulled
    push      header: exponents are agreed          gradients of cold rows -> owners
              touch: which hot rows has some rank used           the union, alike on all ranks
              lanes: round(g 2^e) of the union, row behind row   exact sums, hot_lanes.py
              train: every rank its copies, owners the rows of their shards, cold and hot together
    every so many steps: the owners' counts decide anew which rows are hot, hot_list.py

The bits are those of shards with adding="exact", whatever is hot: a row's gradients are the same integers, whoever adds them.
"""

from collections.abc import Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from tacit.rows.adding import Adder
from tacit.rows.hot import Hot
from tacit.rows.hot_agreement import bring_back
from tacit.rows.hot_checkpoint import SavedHot
from tacit.rows.hot_copies import HotCopies
from tacit.rows.hot_lanes import FixedRows, pack_touches, sum_rows, touch_bits, unpack_touches
from tacit.rows.hot_list import HotList
from tacit.rows.line import Line
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners
from tacit.rows.shard import Shard
from tacit.transports.aggregator_link import AggregatorLink
from tacit.transports.lanes import sum_lanes


class HotRows:
    """The hot rows of all tables on one rank, ordered by (table, key). Used by one thread."""

    def __init__(
        self,
        options: Hot,
        owners: Owners,
        shards: Mapping[str, Shard],
        adders: Mapping[str, Adder],
        optimizer: RowOptimizer,
        link: AggregatorLink | None,
        in_the_network: bool,
    ) -> None:
        self._owners, self._shards, self._adders, self._link = owners, shards, adders, link
        self._optimizer = optimizer
        self._copies = {
            name: HotCopies(shard, optimizer, owners.part, len(owners.holders))
            for name, shard in shards.items()
        }
        self._list = HotList(options, owners, self._copies, optimizer, in_the_network=in_the_network)
        self._mine: dict[str, tuple[Tensor, Tensor]] = {}  # places and gradients of this step
        self._cold: Mapping[str, Tensor] = {}  # keys of this step that came to this owner
        self._touches: dict[str, Tensor] = {}  # ranks that have touched each hot row, by place
        self._unsettled = False  # the last step has not ended
        self._late: Future[dict[str, tuple[Tensor, Tensor]]] | None = None  # its sums, beside row servers
        self._line: Line[dict[str, tuple[Tensor, Tensor]]] = Line("tacit-hot-rows")

    def keys(self, name: str) -> Tensor:
        """The hot keys of a table, ascending."""
        return self._copies[name].keys

    def saved(self) -> SavedHot:
        """What of it is in a checkpoint."""
        return self._list.saved()

    def restore(self, saved: SavedHot | None) -> None:
        """After the shards were loaded; None: no row is hot, and counting begins anew."""
        self._list.restore(saved)

    def catch_up(self) -> None:
        """After a checkpoint was loaded: every owner hands out its hot rows."""
        self._list.catch_up()

    def bring_back(self) -> None:
        """Row servers receive hot rows as the ranks have trained them; these stay hot."""
        if self._owners.servers:
            keys = {
                name: [copies.keys[places] for places in copies.by_owner()]
                for name, copies in self._copies.items()
            }
            bring_back(self._owners, self._copies, self._optimizer, keys)

    def close(self) -> None:
        """Leaves the aggregator."""
        self._line.end()
        if self._link is not None:
            self._link.close()

    # ---- look-ups

    def cold(self, looked_up: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """By table the keys that must be pulled; `looked_up` has the different keys, and for every id which is its own."""
        self._list.catch_up()
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
        self.call_and_settle()
        self._list.catch_up()
        cold_keys, cold_gradients, self._mine = {}, {}, {}
        for name, given in gradients.items():
            places = self._copies[name].find(keys[name])
            hot = places >= 0
            cold_keys[name], cold_gradients[name] = keys[name][~hot], given[~hot]
            self._mine[name] = places[hot], given[hot]
        return cold_keys, cold_gradients

    def train(self, cold: Mapping[str, Tensor], lr: float) -> dict[str, tuple[Tensor, Tensor]]:
        """The optimizer's step on copies; by table the keys and means that are for this rank's shard. `cold` are the keys, each as often
        as a rank has it, that this rank trains beside. A row server trains no hot row."""
        self._cold = cold
        if self._owners.serves:
            return {}
        steps = {name: shard.steps for name, shard in self._shards.items()}
        if not self._owners.servers:
            return self._train(lr, steps)
        self._late = self._line.run(lambda: self._train(lr, steps))  # of which nothing is for a shard
        return {}

    def _train(self, lr: float, steps: Mapping[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
        self._touches = self._touched()
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
                own[name] = self._copies[name].train(places, means, lr, steps[name])
        return own

    def end_step(self) -> None:
        """Counts what was touched, and agrees anew when it is time. Beside row servers the sums may take until `settle`: a step that agrees
        on nothing leaves them to a thread, so that the next pull of cold rows, which needs none of them, goes on meanwhile."""
        self._unsettled = True
        if not self._owners.servers or self._list.is_due:
            self.settle()

    def settle(self) -> None:
        """The end of the last step, on ranks and row servers after the same exchange: after the next pull, or when ranks call for it."""
        if not self._unsettled:
            return
        self._unsettled = False
        self.wait()
        if self._owners.servers:
            self._report_touches()
        touched = {name: self._touched_here(name) for name in self._shards}
        self._mine, self._cold, self._touches = {}, {}, {}
        self._list.count(touched)

    def call_and_settle(self) -> None:
        """A rank's, before an exchange that is no pull."""
        if self._unsettled:
            self._owners.call(Kind.SETTLE)
            self.settle()

    def wait(self) -> None:
        """Until the copies are trained; raises what kept them from it."""
        if self._late is not None:
            late, self._late = self._late, None
            late.result()

    def _report_touches(self) -> None:
        """Row servers, which are in no sum, receive from a rank each how many ranks have touched each of their hot rows."""
        owners, none = self._owners, torch.empty(0, dtype=torch.int32)
        parts, numels = [none] * owners.members, [0] * owners.members
        held = [len(copies) for copies in self._copies.values()]
        per_lane = 32 // touch_bits(owners.world)
        if owners.serves:
            assert owners.part is not None
            numels[owners.part % owners.world] = -(-sum(held) // per_lane)
        else:
            for place in range(owners.rank, owners.servers, owners.world):
                parts[owners.holders[place]] = pack_touches(self._touches_of(place), owners.world)
        received = owners.send_touches(parts, numels)
        if owners.part is not None:
            lanes = received[owners.part % owners.world]
            counts = unpack_touches(lanes, sum(held), owners.world).split(held)
            self._touches = dict(zip(self._copies, counts, strict=True))

    def _touches_of(self, owner: int) -> Tensor:
        """How many ranks have touched each hot row of one owner, by table and key."""
        return torch.cat(
            [self._touches[name][copies.by_owner()[owner]] for name, copies in self._copies.items()]
        )

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
        assert self._owners.between is not None
        with self._owners.between.purpose("sum of hot rows"):
            return sum_lanes(self._owners.between, self._link, own)

    @property
    def _sent_nbytes(self) -> int:
        assert self._owners.between is not None
        return self._owners.between.sent_nbytes
