"""A short run of benchmarks/chaos.py: four processes in namespaces, one killed and back, another cut off; and what a broken promise looks like."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tacit.lab import LabError, kernel_features

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_one_is_killed_and_back_another_is_cut_off_and_nobody_loses_anything() -> None:
    try:
        kernel_features()
    except LabError as cause:
        pytest.skip(str(cause))
    words = [
        "--seeds",
        "0",
        "--steps",
        "600",
        "--pace",
        "5",
        "--cut",
        "2",
        "--deadline",
        "10",
        "--no-baseline",
        "--json",
    ]
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "chaos.py"), *words], capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert found["broken"] == [] and found["lost"] < 1e-5
    assert found["accuracy"] > 0.75
    # it took a model that had come further, and trained on
    assert found["killed_at"] <= found["back_at"] < 800
    assert found["steps_while_cut"][found["cut"]] > 0  # alone
    assert found["meetings"] > 20


# ---- the promises themselves


@pytest.fixture(scope="module")
def promises() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chaos_promises", BENCHMARKS / "chaos_promises.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos_promises"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def steps(first: int, last: int, **more: Any) -> dict[str, Any]:
    digests = list(range(first, last + 1))
    line = {"kind": "steps", "time": 1.0, "first": first, "last": last, "digests": digests, "torn": 0}
    line["times"] = [0.1 * step for step in digests]
    return line | {"longest_s": 0.01, "kept_s": 0.0} | more


def met(meeting: str, peer: int, middle: int = 7, gained: float = 0.5) -> dict[str, Any]:
    line = {"kind": "met", "time": 1.0, "meeting": meeting, "peer": peer, "middle": middle}
    return line | {"gained": gained, "after": 1000 + middle}


def began(step: int, digest: int, incarnation: str) -> dict[str, Any]:
    return {"kind": "began", "time": 0.0, "step": step, "digest": digest, "incarnation": incarnation}


def end(**more: Any) -> dict[str, Any]:
    line = {"kind": "end", "time": 2.0, "step": 20, "lost": 1e-7, "accuracy": 0.88, "digest": 5}
    return line | more


def kept(promises: ModuleType) -> Any:
    """Two ranks, of which the second dies and comes back at step 10 of the first."""
    first = [began(0, 1, "a"), steps(1, 10), met("0-a-1", 1), met("0-a-2", 1, 8), steps(11, 20), end()]
    # it did not live to conclude the other
    dead = [
        began(0, 1, "b"),
        steps(1, 4),
        met("0-a-1", 0, gained=-0.5),
    ]
    back = [began(10, 10, "c"), steps(11, 20), end()]
    lives = [promises.Life(0, 1, first), promises.Life(1, 1, dead, True), promises.Life(1, 2, back)]
    return promises.Run(lives, steps=20, world=2)


def test_a_run_that_keeps_all_promises_is_not_blamed(promises: ModuleType) -> None:
    assert promises.broken(kept(promises), deadline_s=1.0, undisturbed=0.884) == []


BREAKS = {
    "paused for 1.50 s": (0, 1, {"longest_s": 1.5}),
    "counts step 12 after step 10": (0, 4, {"first": 12, "last": 20}),
    "having written down 19 of 20": (0, 4, {"last": 19, "digests": list(range(9))}),
    "lost local steps": (0, 5, {"lost": 1e-3}),
    "torn model after 1 of its steps": (0, 4, {"torn": 1}),
    "a model that nobody had": (2, 0, {"digest": 4242}),
    "began with different models": (1, 0, {"digest": 2}),
    "different middles": (1, 2, {"middle": 9}),
    "gained 0.5 in meeting 0-a-1": (1, 2, {"gained": 0.5}),
    "merged models differ": (2, 2, {"digest": 6}),
    "more than 0.5 points below": (2, 2, {"accuracy": 0.87}),
}


@pytest.mark.parametrize("said", BREAKS)
def test_each_broken_promise_is_told_in_a_sentence(promises: ModuleType, said: str) -> None:
    run = kept(promises)
    life, line, change = BREAKS[said]
    lines = copy.deepcopy(run.lives[life].lines)
    lines[line] |= change
    run.lives[life].lines = lines
    assert any(said in sentence for sentence in promises.broken(run, deadline_s=1.0, undisturbed=0.884))


def test_the_longest_pause_is_told_with_what_of_it_was_for_want_of_a_core(promises: ModuleType) -> None:
    run = kept(promises)
    run.lives[0].lines[4] |= {"longest_s": 0.9, "kept_s": 0.8}
    pause = run.longest_pause
    assert [pause[key] for key in ("longest_s", "kept_s", "rank", "first")] == [0.9, 0.8, 0, 11]
    assert promises.broken(run, deadline_s=1.0) == []
    assert any("0.80 s of it for want of a core" in said for said in promises.broken(run, deadline_s=0.5))


def test_a_meeting_of_two_that_live_is_on_both_sides(promises: ModuleType) -> None:
    run = kept(promises)
    run.lives[1].killed = False
    sentences = promises.broken(run, deadline_s=1.0)
    assert any("only rank 0 concluded meeting 0-a-2" in sentence for sentence in sentences)


def test_who_does_not_come_to_the_end_or_stands_still_while_cut_off_is_named(promises: ModuleType) -> None:
    run = kept(promises)
    run.lives.pop()
    run.cut, run.cut_s = 0, (5.0, 6.0)
    said = promises.broken(run, deadline_s=1.0)
    assert "ranks [1] did not come to the end" in said
    assert "rank 0 took no step while the link of rank 0 was cut" in said
