"""The paper: every reported number beside ours, and the closed forms of its models beside the simulator."""

import json
from math import ceil, log2

import pytest

from tacit.sim.studies import papers
from tacit.sim.studies.papers import GBIT, NODES, PaperReading, reductions, times_s
from tacit.sim.workloads import PAPER_PARAMETERS


@pytest.fixture(scope="module")
def data():
    return papers.wrht()


def _closed_forms_s(model: str, world: int, reading: PaperReading) -> dict[str, float]:
    """The cost models as the paper writes them: x = d / B."""
    x, a, m = reading.x_s(model), reading.setup_s, reading.h_ring_group
    g = ceil(world / m)
    stages = 4 if not reading.all_to_all or world > 2048 else 3
    return {
        "ring": 2 * (world - 1) * (x / world + a),
        "h_ring": 4 * (m - 1) * (x / m + a) + 2 * (g - 1) * (x / g + a),
        "bt": 2 * ceil(log2(world)) * (x + a),
        "wrht": stages * (x + a),
    }


@pytest.mark.parametrize(
    "reading",
    [
        PaperReading(),
        PaperReading(all_to_all=True),
        PaperReading(rate_bps=GBIT),
        PaperReading(factor=1.0091, h_ring_group=4),
    ],
)
def test_the_simulator_agrees_with_the_papers_models(reading):
    for (model, world), row in times_s(reading).items():
        assert row == pytest.approx(_closed_forms_s(model, world, reading), rel=1e-9)


@pytest.mark.parametrize(
    ("reading", "ring", "h_ring", "bt"),
    [
        (PaperReading(factor=1.0091), 80.81, 64.34, 82.12),
        (PaperReading(), 80.95, 64.47, 82.12),
        (PaperReading(factor=1.0091, all_to_all=True), 84.11, 69.61, 84.51),
        (PaperReading(rate_bps=GBIT), 25.45, 37.94, 82.12),
    ],
    ids=["later set", "without the factor", "with the all-to-all", "a true 40 Gbit/s"],
)
def test_reductions_of_every_reading(reading, ring, h_ring, bt):
    ours = reductions(times_s(reading), reading.mean)
    assert ours == pytest.approx({"ring": ring, "h_ring": h_ring, "bt": bt}, abs=0.006)


@pytest.mark.slow
def test_the_later_set_is_met_within_a_tenth_of_a_point(data):
    ours, reported = data["later"]["readings"][0]["ours"], data["reported_percent"]["later (2023-02)"]
    for name in ("ring", "h_ring", "bt"):
        assert abs(ours[name] - reported[name]) < 0.1
    assert data["later"]["readings"][0]["fitted"] == ["factor 1.0091"]
    assert data["later"]["readings"][1]["fitted"] == []


def test_the_electrical_pair_is_met_and_labelled_fitted(data):
    pair = data["later"]["electrical"]
    assert pair["ours"] == pytest.approx({"e_ring": 92.42, "rd": 91.31}, abs=0.03)
    assert pair["fitted"] == ["rate 9.75 GB/s a host", "55 us a stage"]


def test_the_poster_reports_the_means_of_the_later_set(data):
    assert data["poster"]["ours"] == pytest.approx({"optical": 75.76, "electrical": 91.86}, abs=0.02)


def test_no_natural_reading_gives_the_first_set_and_the_nearest_is_told(data):
    first = data["first"]
    best = first["nearest"][0]
    assert first["readings_tried"] == 4480
    assert best["distance_points"] == pytest.approx(2.96, abs=0.01)
    assert best["ours"] == pytest.approx({"ring": 71.32, "h_ring": 48.16, "bt": 72.73}, abs=0.01)
    assert (best["settings"]["wavelengths"], best["settings"]["h_ring_group"], best["settings"]["nodes"]) == (
        8,
        4,
        (2048,),
    )
    assert all(best["distance_points"] <= other["distance_points"] for other in first["nearest"])


def test_the_ratio_of_summed_times_over_larger_models():
    models = ("beit_l", "vgg16", "alexnet", "resnet50")
    reading = PaperReading(models=models, factor=1.0091, mean="reduction of summed times")
    ours = reductions(times_s(reading), reading.mean)
    assert ours == pytest.approx({"ring": 65.23, "h_ring": 43.79, "bt": 82.22}, abs=0.01)


def test_stage_counts_wavelengths_and_hops_are_in_the_data(data):
    rows = {row["world"]: row for row in data["stages"]}
    assert [rows[n]["wrht_all_to_all"]["stages"] for n in NODES] == [3, 3, 4, 4]
    assert [rows[n]["wrht"]["hops"] for n in NODES] == [516, 1032, 1548, 2064]
    assert rows[1024]["wrht_all_to_all"]["wavelengths"] == [64, 8, 64]
    assert [rows[1024][name]["stages"] for name in ("ring", "h_ring", "bt")] == [2046, 424, 20]


def test_times_of_every_case_are_in_the_data(data):
    row = next(
        r for r in data["times"] if (r["model"], r["world"], r["rate"]) == ("ResNet50", 1024, "40 GB/s")
    )
    ms = [round(1e3 * row[f"{name}_s"], 1) for name in ("ring", "h_ring", "bt", "wrht", "wrht_all_to_all")]
    assert ms == [56.1, 23.6, 50.5, 10.1, 7.6]
    assert len(data["times"]) == 32
    assert json.loads(json.dumps(data))["paper"] == "WRHT, arXiv 2207.10982"


@pytest.mark.slow
def test_figures_are_written_twice_the_same(data, tmp_path):
    once, again = (papers.write_figures(data, tmp_path / name) for name in ("once", "again"))
    assert [path.name for path in once] == ["wrht-40GBps.svg", "wrht-40Gbps.svg"]
    for one, two in zip(once, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert b"GoogLeNet" in one.read_bytes() or b"<svg" in one.read_bytes()


def test_the_models_are_those_of_the_paper():
    assert [PAPER_PARAMETERS[model] for model in papers.MODELS] == [62.3e6, 138e6, 25e6, 6.8e6]
