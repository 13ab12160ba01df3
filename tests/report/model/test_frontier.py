"""The frontier of a comparison: who ends best for the bytes; and both figures drawn of it."""

import re

import pytest

from tacit.record_types import AccuracyRecord, TimingRecord
from tacit.report.figures import frontier as figures
from tacit.report.figures.drawing import colours
from tacit.report.model.comparisons import Comparison, Standing
from tacit.report.model.frontier import frontier, placed, shown_from


def comparison(ends, higher=True, target=None):
    """A standing for each name: (bytes a step, ends of its seeds, steps to the target)."""
    standings = []
    for name, (nbytes, finals, steps) in ends.items():
        timing = TimingRecord(configuration=name, workload="w", step_p50_s=0.1, sent_nbytes_a_step=nbytes)
        seeds = tuple(
            AccuracyRecord(
                configuration=name, workload="w", seed=i, final=final, higher_is_better=higher, target=target,
                steps_to_target=steps, metric="accuracy" if higher else "loss",
            )
            for i, final in enumerate(finals)
        )  # fmt: skip
        standings.append(Standing(timing, seeds, None))
    return Comparison("run", tuple(standings), True)


ENDS = {
    "every / none / allreduce": (1000, (0.9,), 50),
    "every / int8 / sharded": (250, (0.9,), 60),  # as good as all of it, for less
    "every / int4 / sharded": (125, (0.89, 0.87, 0.88), 70),
    "every / sign / sharded": (125, (0.7,), None),
    "every / topk / sharded": (10, (0.8,), 90),
    "every / lost / sharded": (5, (0.1,), None),
}


@pytest.mark.parametrize("higher", [True, False])
def test_the_frontier_are_those_that_nobody_beats_at_bytes_and_end(higher):
    ends = ENDS if higher else {n: (b, tuple(-f for f in fs), s) for n, (b, fs, s) in ENDS.items()}
    found = [s.name.split(" / ")[1] for s in frontier(comparison(ends, higher))]
    assert found == ["lost", "topk", "int4", "int8"]


def test_what_was_not_trained_or_not_counted_has_no_place():
    ends = ENDS | {
        "every / fp16 / allreduce": (500, (), None),
        "every / bf16 / allreduce": (None, (0.9,), 10),
    }
    assert {s.name for s in placed(comparison(ends))} == set(ENDS)


def test_a_training_that_failed_does_not_press_the_others_into_a_line():
    assert shown_from([0.88, 0.879, 0.875, 0.87, 0.1], True) == pytest.approx(0.88 - 6 * 0.005)
    assert shown_from([1.5, 1.6, 1.7], False) == 1.7
    assert shown_from([0.5], True) == 0.5


def test_the_figures_name_everybody_with_bytes_and_time():
    drawn = figures.accuracy_against_bytes(comparison(ENDS, target=0.85), "f")
    assert all(f"{number}  {name}" in drawn for number, name in enumerate(["lost", "topk"], 1))
    assert "int8: 250 B, 90" in drawn and re.search(r"<svg role", drawn)
    both = comparison(ENDS, target=0.85)
    bars = figures.time_to_target(both, colours(list(ENDS)), "t")
    places = [bars.index(f">{name}<") for name in ("none", "int8", "int4", "topk", "sign", "lost")]
    assert places == sorted(places)  # the fastest first, then those that never arrived
    assert bars.count("not reached") == 2 and ">5 s<" in bars


def test_a_page_has_both_figures_where_many_are_compared_and_neither_where_few_are():
    from tacit.report.pages.figure_set import FigureSet
    from tacit.report.pages.lab import MANY, _against_bytes

    more = ENDS | {f"every / topk(0.0{i}) / sharded": (10 + i, (0.8,), 90) for i in range(1, 4)}
    assert len(ENDS) < MANY <= len(more)
    for ends, names in ((ENDS, []), (more, ["w-frontier-loopback-unshaped", "w-target-loopback-unshaped"])):
        shown = FigureSet()
        drawn = list(_against_bytes(comparison(ends, target=0.85), colours(list(ends)), shown))
        assert list(shown.files()) == names and len(drawn) == len(names)
