"""What a member holds of the tables, whether it looks rows up or serves them, and what all members do together with it: begin, gather,
save, load.

On a rank, `call` has the row servers do their part of what follows; on a row server it is nothing, and serving.py comes here.
"""

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit.errors import CheckpointError, ConfigError, TransportError
from tacit.rows import checkpoint, folders
from tacit.rows.adding import NOTHING, Adder
from tacit.rows.gathering import gathered_rows
from tacit.rows.hot import Hot
from tacit.rows.hot_checkpoint import SavedHot, pick_hot
from tacit.rows.hot_rows import HotRows
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners, timeout_of
from tacit.rows.shard import Shard
from tacit.rows.table import Table

log = logging.getLogger("tacit")

_AT_ONCE = 1 << 18  # rows of a table that begin in one exchange


class HeldRows:
    """This member's shards, adders and hot rows, by table in the order of all members."""

    def __init__(
        self,
        tables: Sequence[Table],
        owners: Owners,
        optimizer: RowOptimizer,
        adding: str,
        hot: Hot | None,
        in_the_network: bool = False,
    ) -> None:
        self.tables = {table.name: table for table in tables}
        self.owners, self.optimizer, self.adding = owners, optimizer, adding
        self.shards = {table.name: Shard(table, optimizer) for table in tables}
        self.adders = {table.name: Adder(adding == "exact") for table in tables}
        self.hot = self._opened(hot, in_the_network)

    def _opened(self, hot: Hot | None, in_the_network: bool) -> HotRows | None:
        owners = self.owners
        if hot is None or owners.wire is None or owners.world == 1:
            return None
        if owners.servers:  # at once, each with a part of a server's link: the sums have the rest of a rank's
            owners.wire.paced = False
        between = owners.between
        link = None
        if between and not owners.serves:
            link = hot.open(between, timeout_of(between.group), owners.meeting)
            owners.met = link is not None
        return HotRows(hot, owners, self.shards, self.adders, self.optimizer, link, in_the_network)

    @property
    def rules(self) -> checkpoint.Rules:
        """What a checkpoint must have been written under."""
        part, count = self.owners.part or 0, len(self.owners.holders)
        return checkpoint.Rules(self.optimizer, self.adding, part, count)

    # ---- the rows of plain tables

    def begin(self, name: str, weights: Tensor | None) -> None:
        """All rows of a table, which has none yet, begin as in `weights`; a row server has no weights, and receives its rows from the ranks, a
        part from each."""
        table, owners = self.tables[name], self.owners
        assert table.keys is not None
        for first in range(0, table.keys, _AT_ONCE if owners.servers else table.keys):
            keys = torch.arange(first, min(table.keys, first + _AT_ONCE) if owners.servers else table.keys)
            order, counts = table.by_owner(keys, len(owners.holders))
            by_owner = [keys[places] for places in order.split(counts)]
            if owners.servers:
                self._begin_on_servers(name, by_owner, weights)
            elif owners.part is not None and weights is not None:
                own = by_owner[owners.part]
                self.shards[name].put(own, weights[own])

    def _begin_on_servers(self, name: str, by_owner: Sequence[Tensor], weights: Tensor | None) -> None:
        owners, table = self.owners, self.tables[name]
        parts, nbytes = [torch.empty(0, dtype=torch.uint8)] * owners.members, [0] * owners.members
        if weights is not None:
            for holder, keys in zip(owners.holders, by_owner, strict=True):
                own = weights[keys.tensor_split(owners.world)[owners.rank]]
                parts[holder] = own.view(torch.uint8).view(-1)
        elif owners.part is not None:
            split = by_owner[owners.part].tensor_split(owners.world)
            nbytes[: owners.world] = [len(each) * table.row_nbytes for each in split]
        received = owners.send_rows(parts, nbytes)
        if owners.part is not None:
            rows = torch.cat(received).view(table.dtype).view(-1, table.width)
            self.shards[name].put(by_owner[owners.part], rows)

    # ---- all rows of a table

    def gather_rows(self, name: str, to: int | None) -> tuple[Tensor, Tensor]:
        """Keys in order and their rows on rank `to` (None: on all); elsewhere none."""
        self._call(Kind.GATHER, list(self.tables).index(name), -1 if to is None else to)
        self.bring_back()
        return gathered_rows(self.owners, self.shards[name], to)

    def _call(self, kind: Kind, *numbers: int) -> None:
        """Has row servers do their part, after the end of the last step."""
        if self.hot and not self.owners.serves:
            self.hot.call_and_settle()
        self.owners.call(kind, *numbers)

    def bring_back(self) -> None:
        """Row servers have hot rows as the ranks have trained them."""
        if self.hot:
            self.hot.bring_back()

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """This member's rows with their optimizer state."""
        state = checkpoint.saved(self.shards, self.adders, self.rules)
        if self.hot:
            state["hot"] = self.hot.saved().as_state()
        return state

    def save(self, folder: str) -> None:
        """Each owner writes its part into rank 0's `folder`; raises CheckpointError on all ranks where one cannot."""
        owners = self.owners
        self._call(Kind.SAVE)
        self.bring_back()
        first = {"folder": folder, "checkpoint": secrets.token_hex(8)}
        facts = [json.loads(each) for each in owners.texts(json.dumps({**first, "owns": self._owns()}))]
        where, name = Path(facts[0]["folder"]), facts[0]["checkpoint"]
        problem = ""
        if owners.part is not None:
            state = self.state()
            for at, part in enumerate(
                state["tables"].values()
            ):  # what a sum of hot rows has shown to ranks alone
                part["exponent"] = max(each["owns"][at] for each in facts)
            problem = folders.write(where, state | {"checkpoint": name})
        self._raise_first(owners.texts(problem))

    def load(self, folder: str) -> None:
        """Goes on from what `save` wrote, with any owners. CheckpointError on all ranks where one cannot; the tables are then as they were."""
        owners = self.owners
        self._call(Kind.LOAD)
        where = Path(owners.texts(folder)[0])
        found, hot, report = None, None, {}
        if owners.part is not None:
            try:
                states = folders.read(where, owners.part, len(owners.holders))
                found = checkpoint.pick(states, self.tables, self.rules)
                hot = pick_hot(states, found, self.rules) if self.hot else None
                report = _facts(states[0]["checkpoint"], found, hot)
            except CheckpointError as cause:
                report = {"problem": str(cause)}
        reports = [json.loads(each) for each in owners.texts(json.dumps(report))]
        given = [reports[holder] for holder in owners.holders]
        self._raise_first([each.get("problem", "") for each in reports])
        if len({each["checkpoint"] for each in given}) > 1:
            raise CheckpointError(
                f"owners found parts of different checkpoints in {where}; load a folder that one save() wrote"
            )
        if found is not None:
            self.restore(found, hot)
        else:
            self._follow(given[0])
        if self.hot:
            self.hot.catch_up()

    def restore(self, found: Mapping[str, checkpoint.SavedRows], hot: SavedHot | None) -> None:
        """Puts the rows of a checkpoint in the place of all rows."""
        checkpoint.restore(found, self.shards, self.adders)
        if self.hot:
            self.hot.restore(hot)

    def _follow(self, facts: Mapping[str, Any]) -> None:
        """A rank beside row servers has no row, and goes on with their exponents and steps."""
        for name, (steps, exponents) in facts["tables"].items():
            self.shards[name].steps = steps
            self.adders[name].own, self.adders[name].history = NOTHING, exponents
        if self.hot:
            steps = facts["hot_steps"]
            self.hot.restore(None if steps is None else SavedHot(steps, [], {}))

    def _owns(self) -> list[int]:
        return [adder.own for adder in self.adders.values()]

    def _raise_first(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem:
                raise CheckpointError(problem)

    def close(self) -> None:
        """Ends the row servers, leaves the aggregator, frees the process groups; safe to call twice, and after an error."""
        if self.owners.closed:
            return
        with ExitStack() as last:
            last.callback(self.owners.close)
            if self.hot:
                last.callback(self.hot.close)
            if self.owners.wire is not None:
                self._call_close()

    def _call_close(self) -> None:
        """An exchange that fails here has nothing to add to the error before it, or others have closed already."""
        try:
            self._call(Kind.CLOSE)
        except (TransportError, ConfigError) as cause:
            log.info("the tables are closed without the others: %s", cause)


def _facts(name: str, found: Mapping[str, checkpoint.SavedRows], hot: SavedHot | None) -> dict[str, Any]:
    """What a rank beside row servers needs of a checkpoint."""
    return {
        "checkpoint": name,
        "tables": {name: [rows.steps, rows.exponents] for name, rows in found.items()},
        "hot_steps": hot.steps if hot else None,
    }
