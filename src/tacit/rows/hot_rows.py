"""Hot rows in a training: read here, and trained by every rank alike with sums that anybody may add.

    look-up   hot rows are read here, cold ones are pulled
    push      header: exponents are agreed          gradients of cold rows -> owners
              touch: which hot rows has some rank used           the union, alike on all ranks
              lanes: round(g 2^e) of the union, row behind row   exact sums, hot_lanes.py
              train: every rank its copies, owners the rows of their shards, cold and hot together
    every so many steps: the owners' counts decide anew which rows are hot, hot_list.py

With row servers touch, lanes and train go on beside the gradients and the next look-up's pull.

The bits are those of shards with adding="exact", whatever is hot: a row's gradients are the same integers, whoever adds them.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from tacit.rows.adding import Adder
from tacit.rows.exchanges import TouchReport
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
        self._reported = False  # row servers know of its touches
        self._touching: Future[Any] | None = None  # its sum of touches, beside row servers
        self._late: Future[Any] | None = None  # and the rest of its sums, behind
        self._line: Line[Any] = Line("tacit-hot-rows")

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
            self._touch()
            return self._train(lr, steps)
        self._touching = self._line.run(self._touch)
        self._late = self._line.run(lambda: self._train(lr, steps))  # of which nothing is for a shard
        return {}

    def _touch(self) -> None:
        self._touches = self._touched()

    def _train(self, lr: float, steps: Mapping[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
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
        self._unsettled, self._reported = True, False
        if not self._owners.servers or self._list.is_due:
            self.settle()

    def settle(self) -> None:
        """The end of the last step, on ranks and row servers after the same exchange: after the next pull, or when ranks call for it."""
        if not self._unsettled:
            return
        self.wait()
        if (report := self.report()) is not None:
            self.take_report(self._owners.send_touches(report.parts, report.nbytes))
        self._unsettled = False
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
        touching, late, self._touching, self._late = self._touching, self._late, None, None
        for each in (touching, late):
            if each is not None:
                each.result()

    # ---- what row servers, which are in no sum, learn of touches: a part of their hot rows from each rank

    def report(self) -> TouchReport | None:
        """How many ranks have touched each hot row in the step that has not ended, once."""
        owners = self._owners
        if not owners.servers or not self._unsettled or self._reported:
            return None
        parts, nbytes = [torch.empty(0, dtype=torch.uint8)] * owners.members, [0] * owners.members
        if owners.serves:
            nbytes[: owners.world] = [4 * self._lanes_of(count) for count in self._reported_by_rank()]
            return TouchReport(parts, nbytes)
        if self._touching is not None:
            self._touching.result()
        for place, holder in enumerate(owners.holders):
            own = self._touches_of(place).tensor_split(owners.world)[owners.rank]
            parts[holder] = pack_touches(own, owners.world).view(torch.uint8)
        return TouchReport(parts, nbytes)

    def take_report(self, received: Sequence[Tensor]) -> None:
        """On a row server the numbers come, on ranks nothing."""
        self._reported = True
        owners = self._owners
        if owners.serves:
            parts = zip(received, self._reported_by_rank(), strict=False)  # row servers send none
            counts = [unpack_touches(part.view(torch.int32), count, owners.world) for part, count in parts]
            held = [len(copies) for copies in self._copies.values()]
            self._touches = dict(zip(self._copies, torch.cat(counts).split(held), strict=True))

    def _reported_by_rank(self) -> list[int]:
        """How many of this row server's hot rows each rank reports."""
        held, world = sum(map(len, self._copies.values())), self._owners.world
        return [held // world + (rank < held % world) for rank in range(world)]  # as tensor_split has it

    def _lanes_of(self, count: int) -> int:
        return -(-count // (32 // touch_bits(self._owners.world)))

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
