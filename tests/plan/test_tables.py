"""Sparse tables: counted on all ranks, left out of the dense exchange, and costed by the rows model."""

from dataclasses import replace

import pytest
import torch
from plan_probes import PLAIN, probe
from torch import nn

from tacit.errors import ConfigError
from tacit.plan import advise, predict, record_workload
from tacit.plan.files import load, save
from tacit.plan.recorder import gradients_of
from tacit.plan.tables import touched_tables
from tacit.plan.values import RecordedStep, TouchedTable
from tacit.sim.rows import RowsJob, rows_cost, times_of_touched
from tacit.sim.workloads import Layer, Workload

ROWS, WIDTH = 1000, 4


def model():
    table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    return nn.Sequential(table, nn.Linear(WIDTH, 2))


def _touched(rank, world):
    made = model()
    ids = torch.tensor([[0, 1, 1], [10 + rank, 20 + rank, 0]])  # 4 rows of each rank, 0 and 1 of both
    made(ids).sum().backward()
    untouched = model()
    untouched[0](torch.zeros(0, 3, dtype=torch.long)).sum().backward()
    on_one = model()
    if rank:  # the other rank's table has no gradient at all
        on_one[0](torch.tensor([[7, 8, 7]])).sum().backward()
    return touched_tables(made), touched_tables(untouched), touched_tables(on_one)


def test_rows_that_several_ranks_touch_are_counted_once(ranks):
    (found, untouched, on_one), other = ranks.run(2, _touched)
    assert (found, untouched, on_one) == other
    assert on_one == (TouchedTable("0", ROWS, WIDTH, 1.0, 2),)
    assert found == (TouchedTable("0", ROWS, WIDTH, 4.0, 6),)
    assert all((table.unique, table.union) == (0.0, 0) for table in untouched)


def test_a_sparse_table_is_no_part_of_the_dense_exchange():
    made = model()
    work = record_workload(made, [torch.tensor([[0, 1]])], repeats=1)
    assert {layer.name: layer.parameters for layer in work.layers} == {"0": 0, "1": 2 * WIDTH + 2}
    made(torch.tensor([[0, 1]])).sum().backward()
    assert set(gradients_of(made)) == {"1"}


def test_a_model_of_sparse_tables_alone_is_refused_in_one_sentence(tmp_path):
    table = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
    with pytest.raises(ConfigError, match="EmbeddingBag has sparse tables alone"):
        record_workload(table, [torch.tensor([[0, 1]])], repeats=1)
    step = RecordedStep(Workload("wide", (Layer("0", 0, 0.1, 0.1),), "recorded"))
    save(tmp_path / "step.jsonl", step)
    with pytest.raises(ConfigError, match="step.jsonl: wide has sparse tables alone"):
        load(tmp_path / "step.jsonl")


def test_the_advice_has_what_a_table_costs_in_shards():
    seen = replace(probe(PLAIN), tables=(TouchedTable("embed", 10**6, 16, 3000.0, 9000),))
    (note,) = advise(
        seen, predict(seen, RecordedStep(record_workload(nn.Linear(4, 4), [torch.ones(1, 4)])))
    ).notes
    assert "table embed (1,000,000 rows of 16) is in no step above: a rank touches 3,000 rows a step" in note
    job = RowsJob(seen.world, 1, width=16, rate_bps=seen.at_once_bps)
    ddp, shards = times_of_touched(job, 3000.0, 9000)
    assert shards.time_s < ddp.time_s and "rows in shards" in note
    wide = replace(seen, tables=(TouchedTable("wide", 10, 10**5, 1.0, 2),))
    (note,) = advise(
        wide, predict(wide, RecordedStep(record_workload(nn.Linear(4, 4), [torch.ones(1, 4)])))
    ).notes
    assert "the rows model has no time for it" in note


def test_counted_rows_cost_what_the_popularity_says_that_was_counted():
    estimate = rows_cost("zipf(s=1.05, rows=100000)", world=4, batch=100, features=10)
    touched = estimate.touched
    ddp, shards = times_of_touched(estimate.job, float(touched.unique[-1]), float(touched.union[-1]))
    assert ddp.time_s == pytest.approx(estimate.ddp.time_s)
    assert shards.time_s == pytest.approx(estimate.on_ranks.plain.time_s)
