"""Which rows are hot: what counting takes."""

import torch

from tacit import rows
from tacit.rows.hot_copies import HotCopies
from tacit.rows.hot_list import HotList
from tacit.rows.owners import Owners
from tacit.rows.shard import Shard
from tacit.rows.table import Table


def test_counts_take_at_most_eight_bytes_a_row_and_32_kb_a_table() -> None:
    optimizer = rows.SGD(lr=0.1)
    shards = {name: Shard(Table(name, width=2), optimizer) for name in ("user", "item", "tag")}
    copies = {name: HotCopies(shard, optimizer, 0, 1) for name, shard in shards.items()}
    counted = HotList(rows.Hot(every=1000), Owners(None), copies, optimizer, in_the_network=False)
    none = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    for step in range(20):
        name = ("user", "item")[step % 2]
        keys = torch.arange(7000 * step, 7000 * (step + 1)) * 12_345_678_901  # without bound
        shards[name].train(keys, torch.ones(len(keys), 2), lr=0.1)
        counted.count(dict.fromkeys(shards, none) | {name: (keys, torch.ones_like(keys))})
        held = sum(map(len, shards.values()))
        assert held == 7000 * (step + 1)
        assert 4 * held <= counted.counts_nbytes <= 8 * held + (32 << 10) * len(shards)
