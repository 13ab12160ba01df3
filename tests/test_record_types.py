"""One type a kind: writing is strict, reading leaves out what does not fit, and names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tacit.record_types import TYPES, VERSION, CostRecord, Described, TimingRecord, fit
from tacit.records import Recorder, read


@pytest.mark.parametrize("kind", TYPES)
def test_a_record_may_lack_every_field(kind: str) -> None:
    record, unfit = fit({"kind": kind, "time": 1.0, "run": "a"}, TYPES[kind])
    assert (record.run, record.version, unfit) == ("a", 1, [])


def test_a_field_of_another_type_is_left_out_and_named() -> None:
    found = {"kind": "timing", "step_p50_s": 2.0, "rate_bps": "fast", "split": 3, "ranks": True}
    record, unfit = fit(found, TimingRecord)
    assert (record.step_p50_s, record.rate_bps, record.split.wire_s, record.ranks) == (2.0, None, None, None)
    assert len(unfit) == 3 and any(
        s.startswith("timing.rate_bps is left out (Expected `int | float") for s in unfit
    )


def test_a_record_of_a_known_kind_is_checked_and_gets_its_version(tmp_path: Path) -> None:
    with Recorder(tmp_path / "records.jsonl") as recorder:
        with pytest.raises(TypeError, match=r"timing\.step_p50_s"):
            recorder.record("timing", step_p50_s="soon")
        recorder.record("timing", step_p50_s=1, own="kept")
    (entry,) = read(recorder.path)
    assert (entry["version"], entry["own"]) == (VERSION, "kept")


@pytest.mark.parametrize(
    ("name", "fp32", "bf16", "tacit"),
    [
        ("plain DDP", True, False, False),
        ("DDP bf16 hook", False, True, False),
        ("every / none / allreduce", True, False, True),
        ("every / ef(bf16) / sharded", False, False, True),
        ("every / hush / sharded", False, False, True),
    ],
)
def test_version_1_is_read_by_the_name(name: str, fp32: bool, bf16: bool, tacit: bool) -> None:
    record, _ = fit({"kind": "timing", "configuration": name}, TimingRecord)
    assert (record.fp32, record.bf16, record.tacit) == (fp32, bf16, tacit)


def test_version_2_is_asked_and_its_name_means_nothing() -> None:
    facts = {"family": "tacit", "lossy": True, "precision": None}
    record, _ = fit({"kind": "timing", "configuration": "plain DDP fp32", **facts}, TimingRecord)
    assert (record.fp32, record.bf16, record.tacit) == (False, False, True)


def test_a_description_belongs_to_configurations_alone() -> None:
    assert issubclass(TimingRecord, Described) and not issubclass(CostRecord, Described)


@pytest.mark.parametrize(
    "name",
    ["fp32", "bf16", "fp16", "powersgd(rank=4)", "none / allreduce", "bf16 / allreduce", "hush", "ef(int4)"],
)
def test_what_the_lab_records_of_a_configuration_agrees_with_its_name(name: str) -> None:
    from tacit.lab.experiments.baselines import named

    configuration = named(name)
    old = {"kind": "timing", "configuration": configuration.name, "baseline": configuration.plain}
    by_name, asked = fit(old, TimingRecord)[0], fit(old | configuration.description(), TimingRecord)[0]
    assert asked.family and (asked.fp32, asked.bf16, asked.tacit) == (
        by_name.fp32,
        by_name.bf16,
        by_name.tacit,
    )
