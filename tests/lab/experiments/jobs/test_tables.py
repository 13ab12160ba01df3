"""The lab's job of sparse tables: what it refuses, what it looks up, and what it records."""

import contextlib
import io
import json

import pytest
import torch

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs.common import WorkerNetwork
from tacit.lab.experiments.jobs.tables import Lookups, SparseTables, run
from tacit.record_types import check

SMALL = {"rows": 5000, "width": 4, "lookups": 2000, "steps": 2}


def timed(rank, world):
    spec = SparseTables.read(
        {**SMALL, "zipf": 1.0, "strategies": ["none / sharded", "int4 / sharded"], "shards": True}
    )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(spec, WorkerNetwork())
    unique = [len(rows.unique()) for rows in Lookups(spec, rank, 5).rows[3:]]
    return unique, [json.loads(line) for line in out.getvalue().splitlines()]


def test_every_configuration_is_timed_on_the_rows_that_were_looked_up(ranks):
    found = ranks.run(2, timed)
    records = [line for line in found[0][1] if line["kind"] == "timing"]
    assert [r["configuration"] for r in records] == [
        "plain DDP", "every / none / sharded", "every / int4(block=64) / sharded", "tacit.rows, shards on ranks"
    ]  # fmt: skip
    for record in records:
        check(record)
    plain = records[0]
    assert plain["step_n"] == 2 and plain["speedup"] == 1.0 and plain["baseline"]
    rows = sum(found[0][0] + found[1][0]) / 4
    plain, none, int4, shards = (record["sent_nbytes_a_step"] for record in records)
    assert plain == pytest.approx(rows * (8 + 4 * 4), rel=0.05)
    assert none < 1.3 * plain  # the union's rows, in two halves, and short keys
    assert int4 < 0.35 * none
    assert shards < plain  # half of the rows, there and back, but each once
    assert found[1][1] == []


def test_popular_rows_are_drawn_as_often_as_the_law_says_and_lie_anywhere():
    spec = SparseTables.read({"rows": 1000, "width": 1, "lookups": 200_000, "zipf": 1.0, "strategies": []})
    rows = Lookups(spec, 0, 1).rows[0]
    counts = rows.bincount(minlength=1000).sort(descending=True)
    harmonic = float((1 / torch.arange(1, 1001, dtype=torch.float64)).sum())
    assert counts.values[0].item() == pytest.approx(200_000 / harmonic, rel=0.03)
    assert counts.values[9].item() == pytest.approx(20_000 / harmonic, rel=0.08)
    assert set(counts.indices[:10].tolist()) != set(range(10))
    other = Lookups(spec, 1, 1).rows[0]
    assert other.bincount(minlength=1000).argmax() == counts.indices[0] and not torch.equal(rows, other)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rows": 0}, "rows = 0"),
        ({"lookups": -1}, "lookups = -1"),
        ({"zipf": float("nan")}, "zipf = nan"),
        ({"zipf": 10}, "zipf = 10"),
        ({"peers": ["fp32", "bf16"]}, "take no sparse gradient"),
        ({"row": 5}, "did you mean 'rows'"),
    ],
)
def test_a_wrong_table_is_one_sentence(given, why):
    with pytest.raises(ConfigError) as raised:
        SparseTables.read(given, "job 'x'")
    assert why in str(raised.value) and "\n" not in str(raised.value)


def test_a_table_that_does_not_fit_is_refused_with_one_that_does():
    spec = SparseTables.read({"rows": 100_000_000})
    with pytest.raises(ConfigError, match=r"4 ranks of a table of 100000000 x 16 .* set rows = \d+ or less"):
        spec.check_memory(4, 8 << 30)
    spec.check_memory(1, 64 << 30)
