"""Sparse tables in shards: every rank owns some rows of every table, and looks up the others' where they are.

tables = tacit.rows.shard(model, optimizer=tacit.rows.RowAdagrad(lr=0.05))     # before DDP wraps the dense rest
...
loss.backward()
tables.step()                                                                  # beside optimizer.step()

Read table.py (a table as a value), shard.py (the rows a rank owns), then tables.py (what a training does with them).
"""

from tacit.rows.finding import shard
from tacit.rows.hot import Hot
from tacit.rows.modules import ShardedEmbedding, ShardedEmbeddingBag
from tacit.rows.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowAdagrad, RowOptimizer
from tacit.rows.serving import serve
from tacit.rows.store import PendingRows, Store
from tacit.rows.table import Table
from tacit.rows.tables import Tables
from tacit.rows.through import Through
from tacit.rows.traffic import RowTraffic
from tacit.rows.values import Normal, Uniform

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Hot",
    "LazyAdam",
    "Normal",
    "PendingRows",
    "RowAdagrad",
    "RowOptimizer",
    "RowTraffic",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Store",
    "Table",
    "Tables",
    "Through",
    "Uniform",
    "serve",
    "shard",
]
