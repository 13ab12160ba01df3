"""The lab's page holds every figure and number of its records, escapes their text, and bears what is missing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from report import lab_sample as lab
from report.lab_sample import FP32, HUSH, MBIT, POWER, write_costs, write_run
from report.model.test_comparisons import run_of, timed, trained
from report.parsed import Page

from tacit.report.model.runs import load
from tacit.report.pages.page import Report, compose
from tacit.units import time_text

HOSTILE = '<script>alert(1)</script> & "q" $\\frac{$ </svg>'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("lab") / "records.jsonl"
    write_run(path, rates=(100 * MBIT, 1000 * MBIT))
    return compose(load([path]))


@pytest.fixture(scope="module")
def built(report: Report) -> Page:
    return Page(report.html)


def test_every_figure_is_there_once_with_a_name_and_its_own_ids(report: Report, built: Page) -> None:
    names = [
        "accuracy-100-mbit",
        "accuracy-1-gbit",
        "step-100-mbit",
        "step-1-gbit",
        "bytes",
        "speedup",
        "predicted",
    ]
    expected = (
        {f"fashion-mnist-cnn-{name}" for name in names} | {f"vgg16-{name}" for name in names[2:]} | {"limits"}
    )
    assert set(report.figures) == expected
    assert built.tags.count("figure") == built.tags.count("svg") == len(expected)
    assert built.open == [] and len(built.ids) == len(set(built.ids))
    assert built.html.count('<svg role="img" aria-label=') == len(expected)


def test_the_page_refers_to_nothing_outside_itself(built: Page) -> None:
    assert all(reference.startswith("#") for reference in built.references) and "http" not in built.html
    targets = {*(r.lstrip("#") for r in built.references), *re.findall(r"url\(#([^)]*)\)", built.html)}
    assert targets <= set(built.ids)


def test_the_verdict_stands_before_figures_and_tables(built: Page) -> None:
    verdict = built.html.index("To 88.5 % test accuracy on fashion-mnist cnn")
    assert verdict < built.html.index("</h1>") + 100 and verdict < built.html.index(
        "<svg"
    ) < built.html.index("<table")


def test_tables_hold_medians_spreads_and_counts(built: Page) -> None:
    step = lab.step_s(lab.CNN, HUSH, 100 * MBIT)
    row = built.cells.index(HUSH)
    assert built.cells[row + 1] == "100 Mbit"
    assert (
        built.cells[row + 2] == f"{time_text(step)} {time_text(0.985 * step)} – {time_text(1.02 * step)} n=40"
    )
    assert built.cells[row + 3] == "3.26× 3.19× – 3.32×" and built.cells[row + 4] == "1.86×"
    assert built.cells[row + 5] == "69.9 s 69.9 s – 77.7 s n=3"
    assert built.cells[built.cells.index(POWER) + 5] == "reached by 0 of 3 seeds"


def test_a_card_says_how_sure_a_ratio_is() -> None:
    def page(spread: float) -> str:
        of = [timed(name, step_s, step_p10_s=step_s - spread, step_p90_s=step_s + spread, fp32=name == FP32)
              for name, step_s in ((FP32, 1.0), (HUSH, 0.4))]  # fmt: skip
        return compose([run_of(*of)]).html

    near = page(0.1)
    assert '<strong>2.50×</strong><span>against fp32 DDP</span><span class="between">1.80 to 3.67×<' in near
    assert '<span class="between">0.87 to 27.0×: the spreads overlap<' in page(0.35)
    assert "between" not in re.sub(r"<style.*?</style>", "", page(0.0), flags=re.DOTALL)


def test_replayed_scaled_and_the_command_are_said(built: Page) -> None:
    assert "replayed</span>" in built.html and "scaled to 1/10</span>" in built.html
    assert "tacit lab run experiments/thc.toml" in built.html and "<dt>network</dt>" in built.html
    assert "unshaped" not in built.html and "calibration refused" not in built.html


def test_a_scaled_replay_says_what_it_keeps_and_shows_the_codec_at_full_size(
    report: Report, built: Page
) -> None:
    assert "Scaled to 1/10: compute is kept, and so is payload over rate" in built.html
    # 2 cards, badge, text
    assert built.html.count("ratios flatter codecs whose encode and decode matter") == 4
    heads = '<th scope="col">codec time</th><th scope="col">codec time at full size</th>'
    assert built.html.count(heads) == 1  # real training is not scaled
    codec = 0.25 * lab.CODEC_S_A_MB[HUSH] * lab.GRADIENT_NBYTES[lab.VGG] / 1e6
    at = [place for place, cell in enumerate(built.cells) if cell == HUSH]
    rows = [built.cells[place : place + 8] for place in at]
    assert any(row[-2:] == [time_text(codec), time_text(10 * codec)] for row in rows)
    assert any(row["codec_full_s"] == pytest.approx(10 * codec) for row in report.tables["standings"])


def test_what_the_prediction_knows_is_said_under_its_figure(report: Report, built: Page) -> None:
    assert {"fashion-mnist-cnn-predicted", "vgg16-predicted"} < set(report.figures)
    # the captions and the figures' names
    assert built.html.count("It knows no latency, no shared cores") == 4
    assert '<th scope="col">predicted step</th>' in built.html and len(report.tables["predictions"]) == 24


@pytest.mark.parametrize("outcome", ["interrupted", "failed", None])
def test_a_run_without_its_end_does_not_look_complete(outcome: str | None) -> None:
    ends = [{"kind": "end", "outcome": outcome}] if outcome else []
    report = compose([run_of({"kind": "start"}, timed("a", 1.0), *ends)])
    badge, sentence = outcome or "no end", report.verdicts["made"][-1]
    assert f"{badge}</span>{sentence}</p>" in report.html and "what it had recorded stands here" in sentence
    assert f"<dt>ended</dt><dd>{badge}</dd>" in report.html and Page(report.html).open == []
    told = report.as_dict()
    assert sentence in told["verdict"]
    assert (told["runs"][0]["outcome"], told["runs"][0]["unfinished"]) == (badge, sentence)


def test_a_run_that_lends_its_trainings_is_told_if_it_was_interrupted() -> None:
    lender = run_of({"kind": "start"}, trained("a", 10), {"kind": "end", "outcome": "interrupted"}, label="l")
    report = compose([run_of(timed("a", 1.0), label="times"), lender])
    assert report.verdicts["l"] == ["This run was interrupted; what it had recorded stands here."]
    assert report.html.count("interrupted</span>") == 1


def test_a_finished_run_has_no_badge_of_that_kind(report: Report, built: Page) -> None:
    assert "stands here" not in built.html and "<dt>ended</dt><dd>done</dd>" in built.html
    assert report.as_dict()["runs"][0]["unfinished"] == ""


def test_drops_are_said_in_the_section_of_their_job() -> None:
    rates = (1e8, 2e8)
    lost = [{"kind": "counters", "job": "j", "rate_bps": r, "nodes": lab.counters(1200)} for r in rates]
    report = compose([run_of(*(timed("a", 1.0, rate_bps=rate) for rate in rates), *lost)])
    for rate in (100, 200):
        assert f"<li>2,399 packets were dropped at {rate} Mbit (most on h0 eth0: 1,200)" in report.html
    assert len(report.tables["drops"]) == 4
    limits = run_of(
        {"kind": "limits", "job": "x", "rate_bps": 1e8, "measured_s": 1.0, "theory_s": 1.0},
        {"kind": "counters", "job": "x", "rate_bps": 1e8, "nodes": {"a": {"eth0": {"qdisc_drops": 1}}}},
    )
    assert "<p>1 packet was dropped at 100 Mbit (most on a eth0: 1)" in compose([limits]).html


def test_calibration_shows_limits_attempts_and_each_rows_verdict() -> None:
    rows = [
        {"nbytes": 1e6, "measured_s": 0.2, "theory_s": 0.2, "least_s": 0.1, "most_s": 0.3, "passed": True},
        {"nbytes": 1e6, "measured_s": 0.4, "theory_s": 0.2, "least_s": 0.1, "most_s": 0.3, "passed": False},
    ]
    record = {"kind": "calibration", "rate_bps": 1e8, "passed": False, "attempts": 3, "rows": rows}
    page = Page(compose([run_of(record)]).html)
    for start, verdict in ((0, "passed"), (9, "refused")):
        assert page.cells[start + 5 : start + 9] == ["100 ms", "300 ms", "3", verdict]
    assert all(f'<th scope="col">{head}</th>' in page.html for head in ("at least", "at most", "attempts"))


def test_how_the_baseline_was_tuned_and_whether_the_replay_was_right_are_said(built: Page) -> None:
    assert (
        "Plain DDP's buckets were tuned to 4.19 MB (a step with 4.19 MB 974 ms and 26.2 MB 1.17 s)"
        in built.html
    )
    assert "Replay: without communication, a step takes 1.00× of the recorded times</li>" in built.html


def test_unshaped_and_refused_are_said_where_they_hold(tmp_path: Path) -> None:
    write_run(
        tmp_path / "a.jsonl",
        shaped=False,
        rates=(1e9,),
        workloads=(lab.CNN,),
        configurations=(FP32, HUSH),
        limits=False,
    )
    assert "unshaped</span>" in compose(load([tmp_path / "a.jsonl"])).html
    write_run(
        tmp_path / "b.jsonl",
        refused=(1e8,),
        rates=(1e8,),
        workloads=(lab.CNN,),
        configurations=(FP32, HUSH),
        limits=False,
    )
    html = compose(load([tmp_path / "b.jsonl"])).html
    assert (
        html.count("calibration refused</span>") == 3 and "nothing is claimed here" in html and "3.26" in html
    )


def test_text_from_records_is_escaped_everywhere() -> None:
    run = run_of(
        {
            "kind": "start",
            "command": HOSTILE,
            "experiment": HOSTILE,
            "host": {HOSTILE: HOSTILE},
            "network": {"text": HOSTILE},
        },
        timed(
            FP32, 1.0, baseline=True, workload=HOSTILE, network=HOSTILE, note=HOSTILE, sent_nbytes_a_step=10
        ),
        timed(
            HOSTILE,
            0.5,
            workload=HOSTILE,
            network=HOSTILE,
            note=HOSTILE,
            sent_nbytes_a_step=5,
            predicted_step_s=0.4,
        ),
        trained(HOSTILE, 10, workload=HOSTILE, metric=HOSTILE, curve=[[1, 0.2], [10, 0.9]]),
        {
            "kind": "cost",
            "schedule": HOSTILE,
            "network": HOSTILE,
            "model": HOSTILE,
            "world": 4,
            "nbytes": 9,
            "time_s": 1.0,
        },
        label=HOSTILE,
    )
    report = compose([run])
    page = Page(report.html)
    assert page.open == [] and page.tags.count("script") == 1 and "alert(1)</script>" not in report.html
    assert page.tags.count("svg") == len(report.figures) == 5
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in report.figures)


def test_records_with_little_in_them_make_a_page() -> None:
    runs = [
        run_of({"kind": "timing", "step_p50_s": 1.0}, label="bare"),
        run_of(trained("a", None), {"kind": "accuracy"}, label="untimed"),
        run_of({"kind": "limits"}, {"kind": "calibration"}, {"kind": "cost", "time_s": 0.0}, label="empty"),
        run_of(timed("a", 1.0), trained("a", 3, curve=[[1, 2.0]], higher_is_better=False), label="short"),
    ]
    for run in runs:
        assert Page(compose([run]).html).open == []
    assert Page(compose(runs).html).open == []


def test_a_loss_is_drawn_and_told_as_a_loss() -> None:
    curve = [[step, 4 / step] for step in range(1, 20)]
    losses = [
        trained("a", 10, seed, target=0.4, final=0.21, metric="loss", higher_is_better=False, curve=curve)
        for seed in (0, 1)
    ]
    report = compose([run_of(timed("a", 1.0, baseline=True), *losses)])
    assert "To 0.400 loss on w" in report.verdicts["made"][0] and "accuracy" in " ".join(report.figures)


def test_figures_as_files_are_svg_documents_that_follow_light_and_dark(report: Report) -> None:
    for text in report.figures.values():
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in text and "currentColor" in text


def test_two_runs_stand_side_by_side_and_a_sweep_beside_them(tmp_path: Path) -> None:
    for name, slower in (("a", 1.0), ("b", 1.5)):
        few = {"rates": (1e8,), "workloads": (lab.VGG,), "configurations": (FP32, HUSH), "limits": False}
        write_run(tmp_path / f"{name}.jsonl", slower=slower, **few)
    write_costs(tmp_path / "c.jsonl")
    report = compose(load([tmp_path / f"{name}.jsonl" for name in "abc"]))
    assert list(report.verdicts) == ["thc (a)", "thc (b)", "wrht"]
    assert {"compared-vgg16", "vgg16-step-100-mbit", "vgg16-step-100-mbit-2"} < set(report.figures)
    assert "Runs side by side" in report.html and "Where the runs match (2 configurations" in report.html
    assert len(report.tables["compared"]) == 2 and len(report.tables["costs"]) == 12
    assert Page(report.html).open == [] and len(Page(report.html).ids) == len(set(Page(report.html).ids))


def test_a_sweep_of_the_simulator_is_drawn_over_its_worlds() -> None:
    points = [
        {
            "kind": "sim",
            "schedule": s,
            "world": w,
            "vector": v,
            "nbytes": n,
            "on": "star",
            "time_s": f * w * n / 1e9,
        }
        for s, f in (("ring", 1.0), ("tree", 2.0))
        for w in (8, 64)
        for v, n in (("vgg16", 552e6), ("resnet50", 102e6))
    ]
    refused = {"kind": "sim", "schedule": "wrht", "world": 8, "nbytes": 9, "on": "star", "time_s": None}
    report = compose([run_of(*points, refused)])
    assert set(report.figures) == {"simulated-star", "simulated-star-2"} and len(report.tables["costs"]) == 8
    assert "“ring” is the fastest schedule in 4 of 4 cases (median 2.00× against the next)" in report.html
