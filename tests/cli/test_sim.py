"""`tacit sim` as it is typed: figures, JSON, one sentence for what cannot be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tacit.cli import main

OPTICAL = "optical(wavelengths=64, rate=40GB/s, setup=25us)"
ROOT = Path(__file__).parents[2]
PAIR = """
world = 2
chunks = 1
stages = [[[1, 0, 0, 1, "add"]], [[0, 1, 0, 1, "copy"]]]
"""


def answers(capsys, *words):
    """The JSON that the command prints."""
    assert main(["sim", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys, *words):
    assert main(["sim", *words]) == 0
    return capsys.readouterr().out


def refusal(capsys, *words):
    """The one sentence on stderr, of a command that ends with exit code 2."""
    assert main(["sim", *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("tacit: ") and told.err.count("\n") == 1
    return told.err


# ---- rows ----


def test_the_schemes_of_a_step_of_rows(capsys):
    found = answers(capsys, "rows", "--world", "8", "--servers", "2", "--payload-only")
    times = [round(1e3 * row["time_s"]) for row in found["schemes"]]
    assert times == [756, 247, 145, 507, 179, 194, 169, 816, 531, 332]
    assert found["hot_on_servers"]["pays"] and not found["hot_on_ranks"]["pays"]
    assert found["switch"]["passes"] == 6


def test_a_table_of_rows_names_who_is_busiest_and_whether_hot_rows_pay(capsys):
    told = printed(capsys, "rows", "--world", "8", "--servers", "2")
    assert "a server's link" in told and "a rank's link" in told
    assert "a shard on every rank: hot rows do not pay (H = 0)" in told
    assert "fastest of all: replicated, thc / star" in told
    assert "passes 6 times (ceil(rows x 16 / 64))" in told


def test_rows_of_a_trace(capsys, tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text("\n".join(str(number * number % 97) for number in range(500)))
    found = answers(capsys, "rows", "--popularity", str(path), "--batch", "10", "--features", "2", "--wide")
    assert found["popularity"]["look_ups"] == 500 and found["job"]["key_nbytes"] == 8
    assert "keys.txt" in printed(capsys, "rows", "--popularity", str(path))


def test_the_gain_is_drawn_the_same_every_time(capsys, tmp_path):
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in files:
        assert str(path) in printed(capsys, "rows", "--world", "4", "--hot", "0", "--plot", str(path))
    first, second = (path.read_text() for path in files)
    assert first == second and "currentColor" in first and "a shard on every rank" in first


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_computed(capsys, tmp_path):
    assert "name a .svg, .html or .png file" in refusal(
        capsys, "rows", "--plot", "gain.pdf", "--popularity", "ngrams"
    )
    (tmp_path / "file").touch()
    assert "cannot be written" in refusal(capsys, "rows", "--plot", str(tmp_path / "file" / "gain.svg"))


def test_a_row_that_no_packet_takes_is_refused(capsys):
    told = refusal(capsys, "rows", "--width", "512")
    assert "width=512" in told and "from 1 to 357" in told
    assert "rows of 512" in printed(capsys, "rows", "--width", "512", "--mtu", "9000")


# ---- cost ----


def test_the_times_of_the_paper_for_its_vector(capsys):
    found = answers(capsys, "cost", "ring", "hierarchical", "tree", "wrht", "wrht(all_to_all=True)", "--on", OPTICAL, "--world", "1024", "--size", "552MB")  # fmt: skip
    times = {row["schedule"]: round(1e3 * row["time_s"], 1) for row in found}
    assert times == {
        "ring": 78.7,
        "hierarchical": 82.2,
        "tree": 276.5,
        "wrht": 55.3,
        "wrht(all_to_all=True)": 41.5,
    }
    assert list(times) == ["wrht(all_to_all=True)", "wrht", "ring", "hierarchical", "tree"]  # fastest first
    assert all(row["light_proven"] and row["time_s"] > row["lower_bound_s"] > 0 for row in found)


def test_bits_and_bytes_are_eight_apart_and_both_are_printed(capsys):
    slow, fast = (
        answers(
            capsys,
            "cost",
            "tree",
            "--on",
            f"optical(rate={rate}, setup=0us)",
            "--world",
            "8",
            "--size",
            "1MB",
        )[0]
        for rate in ("40Gbit", "40GB/s")
    )
    assert slow["time_s"] == pytest.approx(8 * fast["time_s"])
    assert "5 GB/s (40 Gbit/s) a wavelength" in slow["network"]["text"]
    assert "40 GB/s (320 Gbit/s) a wavelength" in fast["network"]["text"]
    assert "1.25 GB/s (10 Gbit/s)" in printed(
        capsys, "cost", "tree", "--on", "star(nodes=4, rate=10Gbit)", "--size", "1MB"
    )


def test_a_breakdown_adds_up_and_says_why(capsys):
    (found,) = answers(
        capsys, "cost", "ring", "--on", "star(rate=10Gbit, latency=5us)", "--world", "8", "--size", "80MB"
    )
    (request,) = found["requests"]
    assert [stage["times"] for stage in request["stages"]] == [7, 7]
    assert found["time_s"] == pytest.approx(14 * (8 * 10e6 / 10e9 + 10e-6))
    assert sum(stage["time_s"] for stage in request["stages"]) == pytest.approx(found["time_s"])
    assert found["alpha_beta_s"] == pytest.approx(found["time_s"])
    assert found["lower_bound_s"] == pytest.approx(8 * 1.75 * 80e6 / 10e9 + 5e-6)
    text = printed(
        capsys, "cost", "ring", "--on", "star(rate=10Gbit, latency=5us)", "--world", "8", "--size", "80MB"
    )
    for word in (
        "112 ms",
        "0..6",
        "7..13",
        "10 MB",
        "link switch -> h1, 10Gbit",
        "alpha-beta",
        "lower bound",
        "1.75 vectors",
    ):
        assert word in text


def test_sub_stages_are_counted_and_striping_uses_idle_light(capsys):
    (plain,) = answers(
        capsys,
        "cost",
        "recursive_doubling",
        "--on",
        "optical(wavelengths=4)",
        "--world",
        "1024",
        "--size",
        "1MB",
    )
    assert plain["stage_count"] == 257
    ring = ("cost", "ring", "--on", "optical(wavelengths=64)", "--world", "1024", "--model", "VGG16")
    (alone,), (striped,) = answers(capsys, *ring), answers(capsys, *ring, "--stripe")
    assert striped["requests"][0]["stages"][0]["stripes"] == 64
    assert striped["time_s"] - striped["latency_s"] == pytest.approx(
        (alone["time_s"] - alone["latency_s"]) / 64
    )


def test_the_world_is_the_networks_unless_it_is_given(capsys):
    assert (
        answers(capsys, "cost", "tree", "--on", "star(nodes=6, rate=1Gbit)", "--size", "1kB")[0]["world"] == 6
    )
    assert (
        answers(
            capsys, "cost", "tree", "--on", str(ROOT / "experiments/topologies/office.toml"), "--size", "1kB"
        )[0]["world"]
        == 4
    )
    assert answers(capsys, "cost", "tree", "--on", "fat_tree(rate=1Gbit)", "--world", "60", "--size", "1kB")[
        0
    ]["network"]["name"].startswith("fat_tree(k=8")
    assert (
        "dims=4x6"
        in answers(capsys, "cost", "tree", "--on", "torus(rate=1Gbit)", "--world", "24", "--size", "1kB")[0][
            "network"
        ]["name"]
    )


def test_a_file_of_ones_own_is_costed_with_its_own_world(tmp_path, capsys):
    (tmp_path / "pair.toml").write_text(PAIR)
    (found,) = answers(
        capsys, "cost", str(tmp_path / "pair.toml"), "--on", "optical(setup=0us, rate=1GB/s)", "--size", "1GB"
    )
    assert found["world"] == 2 and found["time_s"] == pytest.approx(2.0)
    assert "not 3" in refusal(
        capsys, "cost", str(tmp_path / "pair.toml"), "--world", "3", "--on", "optical", "--size", "1GB"
    )


def test_a_codec_says_less_and_its_requests_are_told_apart(capsys):
    on = ("--on", "star(rate=10Gbit, latency=0us)", "--world", "8", "--size", "4MB")
    (plain,), (half,) = (
        answers(capsys, "cost", "ring", *on),
        answers(capsys, "cost", "ring", *on, "--codec", "bf16"),
    )
    assert half["time_s"] == pytest.approx(plain["time_s"] / 2)
    (hush,) = answers(capsys, "cost", "ring", *on, "--codec", "hush")
    assert [request["kind"] for request in hush["requests"]] == ["Sum", "TableSum"]
    (shards,) = answers(capsys, "cost", "sharded", *on, "--codec", "hush")
    table = shards["requests"][1]
    assert table["down_nbytes"] == 2 * table["up_nbytes"]  # indices to the server, lanes back
    assert shards["time_s"] < hush["time_s"]


# ---- verify ----


def test_verify_counts_in_closed_form_and_proves_the_light(capsys):
    found = answers(capsys, "verify", "wrht(all_to_all=True)", "--world", "1024", "--on", "optical")
    assert (found["stages"], found["chunks"], found["vectors_in_all"]) == (3, 1, 2 * (1024 - 8) + 8 * 7)
    assert found["light"]["wavelengths"] == [64, 8, 64] and found["light"]["hops"] == 516
    assert "exactly once" in printed(capsys, "verify", "ring", "--world", "9")


def test_a_schedule_that_counts_on_more_light_runs_in_parts(capsys):
    found = answers(
        capsys, "verify", "wrht(wavelengths=64)", "--world", "129", "--on", "optical(wavelengths=4)"
    )
    assert found["light"]["parts"] == [16, 16] and found["light"]["wavelengths"] == [4, 4]


def test_a_broken_file_gets_the_fault_in_one_sentence(tmp_path, capsys):
    (tmp_path / "broken.toml").write_text(PAIR.replace("[0, 1, 0, 1", "[0, 1, 0, 2"))
    assert "names chunks outside 0..0" in refusal(capsys, "verify", str(tmp_path / "broken.toml"))
    (tmp_path / "half.toml").write_text(PAIR.replace(', [[0, 1, 0, 1, "copy"]]', ""))
    assert "rank 1 ends with chunk 0 that lacks the contribution of rank 0" in refusal(
        capsys, "verify", str(tmp_path / "half.toml")
    )
    assert "takes hours" in refusal(capsys, "verify", "ring", "--world", "100000")


# ---- step, models, schedules ----


def test_a_step_hides_what_it_can(capsys, tmp_path):
    base = ("step", "--model", "VGG16", "--world", "16", "--on")
    fast = answers(capsys, *base, "star(rate=400Gbit, latency=1us)")
    slow = answers(capsys, *base, "star(rate=1Gbit, latency=1us)")
    assert fast["exposed_s"] < 0.001 < 5 < slow["exposed_s"]
    assert slow["step_s"] == pytest.approx(slow["forward_s"] + slow["backward_s"] + slow["exposed_s"])
    hush = answers(
        capsys,
        *base,
        "star(rate=1Gbit, latency=1us)",
        "--codec",
        "hush",
        "--encode",
        "0.2ns",
        "--decode",
        "0.1ns",
    )
    assert hush["exposed_s"] < slow["exposed_s"] / 3 and hush["codec_s"] == pytest.approx(
        0.3e-9 * 138_357_544
    )
    out = tmp_path / "step.svg"
    assert "exposed" in printed(
        capsys, *base, "star(rate=10Gbit)", "--draw", str(out)
    ) and out.read_text().startswith("<svg")


def test_models_and_schedules_are_listed(capsys):
    found = {row["model"]: row for row in answers(capsys, "models")}
    assert found["vgg16"]["parameters"] == 138_357_544 and len(found) == 7
    assert found["vgg16"]["backward_s"] == pytest.approx(2 * found["vgg16"]["forward_s"])
    assert "138,357,544" in printed(capsys, "models", "--batch", "64")
    listed = answers(capsys, "schedules")
    assert {"ring", "wrht"} <= {row["name"] for row in listed["schedules"]} and listed["networks"][-1][
        "name"
    ] == "optical"
    assert "wavelengths=64" in printed(capsys, "schedules")


def test_a_model_has_many_spellings(capsys, tmp_path, monkeypatch):
    for name, parameters in (("ResNet-50", 25_557_032), ("BEiT-L", 304_430_568), ("BERT", 109_482_240)):
        (found,) = answers(capsys, "cost", "tree", "--on", "star", "--world", "2", "--model", name)
        assert found["requests"][0]["nbytes"] == 4 * parameters
    (tmp_path / "mine.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(3, 2)\n")
    monkeypatch.chdir(tmp_path)
    (found,) = answers(capsys, "cost", "tree", "--on", "star", "--world", "2", "--model", "mine:model")
    assert found["requests"][0]["nbytes"] == 4 * 8


# ---- search, paper ----


def test_the_search_finds_a_proven_schedule_faster_than_its_rivals(capsys):
    found = answers(
        capsys, "search", "--world", "64", "--on", "optical(wavelengths=16)", "--model", "ResNet50"
    )
    assert found["ratio_to_bound"] >= 1 and "exactly once" in found["proven"]
    times = {row["schedule"]: row["time_s"] for row in found["rivals"]}
    assert all(seconds is None or seconds > found["cost"]["time_s"] for seconds in times.values())
    assert times["ring"] and times["wrht"]


@pytest.mark.parametrize(
    ("world", "size", "on"),
    [
        ("4096", "27.2MB", "optical(hop=500ns)"),
        ("64", "27.2MB", "optical(wavelengths=16, hop=1us)"),
        ("64", "1MB", "optical(wavelengths=8, transceivers=1)"),
        ("100", "500MB", "optical(wavelengths=8, transceivers=4, hop=5ns, rate=40Gbit/s)"),
    ],
)
def test_the_time_of_the_winner_is_its_cost(world, size, on, capsys):
    where = ("--world", world, "--size", size, "--on", on)
    found = answers(capsys, "search", *where)
    for row in (found["cost"] | found, found["rivals"][0]):
        (again,) = answers(capsys, "cost", row["schedule"], *where, *(["--stripe"] if row["stripe"] else []))
        assert row["time_s"] == pytest.approx(again["time_s"])
    assert found["cost"]["time_s"] <= min(row["time_s"] for row in found["rivals"])
    if world == "4096":
        braid = next(row for row in found["rivals"] if row["schedule"].startswith("braid"))
        assert braid["time_s"] == pytest.approx(2.395e-3, rel=1e-3)  # not 333 us: light takes 2 ms


def test_what_the_search_says_of_the_bound(capsys):
    text = printed(capsys, "search", "--world", "16", "--on", "optical(wavelengths=4)", "--size", "1MB")
    assert "light is set up before every stage; a standing ring, set up once, can undercut it" in text
    assert "set up before every stage" in printed(
        capsys, "cost", "ring", "--world", "16", "--on", "optical", "--size", "1MB"
    )


def test_every_command_has_the_network_as_values(capsys, tmp_path):
    where = ("--world", "8", "--on", "optical(wavelengths=4, hop=5ns, transceivers=2)")
    found = [
        answers(capsys, "cost", "ring", *where, "--size", "1kB")[0],
        answers(capsys, "search", *where, "--size", "1kB"),
        answers(capsys, "verify", "ring", *where),
        answers(capsys, "step", "--model", "alexnet", *where),
        answers(capsys, "sweep", "--schedules", "ring", "--worlds", "8", *where[2:], "--sizes", "1kB", "--out", str(tmp_path / "s.jsonl"))["rows"][0],
    ]  # fmt: skip
    for row in found:
        network = row["network"]
        assert (network["kind"], network["nodes"], network["wavelengths"]) == ("optical", 8, 4)
        assert (network["rate_bps"], network["setup_s"]) == (320e9, pytest.approx(25e-6))
        assert (network["hop_s"], network["transceivers"]) == (pytest.approx(5e-9), 2)


def test_the_paper_both_unit_readings_and_the_figures(capsys, tmp_path):
    data = answers(capsys, "paper", "wrht", "--figures", str(tmp_path / "figures"))
    ours = [reading["ours"] for reading in data["later"]["readings"]]
    assert [round(ours[0][name], 1) for name in ("ring", "h_ring", "bt")] == [80.8, 64.3, 82.1]
    assert [round(ours[3][name], 2) for name in ("ring", "h_ring", "bt")] == [25.45, 37.94, 82.12]
    assert (
        all(Path(path).read_text().count("<svg") == 1 for path in data["figures"])
        and len(data["figures"]) == 2
    )
    text = printed(capsys, "paper", "wrht")
    assert "5 GB/s (40 Gbit/s), as written" in text and "75.59" in text and "fitted" in text
    assert "40 GB/s (320 Gbit/s), assumed" in text and "Read in the paper: " in text
    assert "as the paper states it" not in text and "as reported" not in text
    assert {"read", "assumed", "fitted"} <= data.keys() and "40 Gbytes/s" in data["assumed"]


# ---- sweep, draw ----


def test_a_sweep_writes_a_record_a_point_and_goes_on_where_it_stopped(capsys, tmp_path):
    out = tmp_path / "sweep.jsonl"
    words = ("sweep", "--schedules", "ring,wrht(all_to_all=True)", "--worlds", "64,16", "--models", "VGG16", "--sizes", "1MB", "--on", "optical", "--out", str(out))  # fmt: skip
    first = answers(capsys, *words)
    assert (first["points"], first["skipped"], len(first["rows"])) == (8, 0, 8)
    assert [row["world"] for row in first["rows"]] == [16] * 4 + [64] * 4
    lines = out.read_text().splitlines()
    again = answers(capsys, *words)
    assert again["skipped"] == 8 and out.read_text().splitlines() == lines and again["rows"] == first["rows"]
    assert "8 points, 8 of them known before" in printed(capsys, *words)


def test_a_refused_point_is_told_and_the_others_go_on(capsys, tmp_path):
    words = (
        "sweep",
        "--schedules",
        "ring,direct_all_gather",
        "--worlds",
        "4,5000",
        "--sizes",
        "1MB",
        "--on",
        "star(rate=1Gbit)",
    )
    text = printed(capsys, *words, "--out", str(tmp_path / "s.jsonl"))
    assert "refused: direct_all_gather: 5000 ranks are too many" in text and "peak memory" in text


def test_a_drawing_is_written_whole_or_not_at_all(capsys, tmp_path):
    out = tmp_path / "new" / "wrht.svg"
    assert str(out) in printed(
        capsys, "draw", "wrht", "--world", "27", "--on", "optical(wavelengths=4)", "--out", str(out)
    )
    assert "24 transfers, added" in out.read_text() and list(out.parent.iterdir()) == [out]
    refusal(
        capsys,
        "draw",
        "wrht",
        "--world",
        "2700",
        "--on",
        "optical(wavelengths=4)",
        "--out",
        str(tmp_path / "b.svg"),
    )
    assert not (tmp_path / "b.svg").exists()
    timeline = (
        "draw",
        "tree",
        "--on",
        "two_racks(nodes=6, rate=1Gbit)",
        "--timeline",
        "--size",
        "1MB",
        "--out",
    )
    printed(capsys, *timeline, str(tmp_path / "t.html"))
    assert "rack0 -&gt; rack1" in (tmp_path / "t.html").read_text()


# ---- what cannot be ----

COST = ("cost", "ring", "--size", "1MB")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*COST, "--on", "optical", "--world", "0"), "--world 0: give a whole number"),
        ((*COST, "--on", "optical", "--world", "many"), "--world many: give a whole number"),
        ((*COST, "--on", "optical", "--world", "99999999999"), "from 1 to 10,000,000"),
        ((*COST, "--on", "optical"), "does not say how many nodes"),
        (("cost", "wrht(group=10, wavelengths=4)", "--size", "1MB", "--on", "optical", "--world", "27"), "serve groups of 9 at most"),
        (("cost", "ring", "--size", "552", "--on", "optical", "--world", "8"), "size '552' has no unit"),
        ((*COST, "--on", "star(rate=10)", "--world", "8"), "rate '10' has no unit"),
        ((*COST, "--on", "optical(rate=40)", "--world", "8"), "rate '40' has no unit"),
        ((*COST, "--on", "optical(budget=30)", "--world", "8"), "loss '30' has no unit"),
        ((*COST, "--on", "optical(colours=4)", "--world", "8"), "no option 'colours'"),
        ((*COST, "--on", "optcal", "--world", "8"), "did you mean 'optical'"),
        ((*COST, "--on", "star(nodes=4)", "--world", "8"), "4 hosts"),
        ((*COST, "--on", "star", "--world", "8", "--stripe"), "striping is over wavelengths"),
        (("cost", "wrht", "--size", "1MB", "--on", "optical(most_hops=9)", "--world", "99"), "take a schedule with shorter paths"),
        (("cost", "rings", "--size", "1MB", "--on", "star", "--world", "8"), "unknown schedule 'rings'; did you mean 'ring'?"),
        (("cost", "ring(x=1)", "--size", "1MB", "--on", "star", "--world", "8"), "schedule 'ring' does not fit its options (none): it has no option 'x'"),
        (("cost", "ring(", "--size", "1MB", "--on", "star", "--world", "8"), "cannot be read"),
        (("cost", "nowhere.json", "--size", "1MB", "--on", "star", "--world", "8"), "cannot be read (No such file"),
        (("cost", "ring", "--model", "VGG17", "--on", "star", "--world", "8"), "did you mean 'vgg16'"),
        (("cost", "ring", "--model", "no:model", "--on", "star", "--world", "8"), "cannot be made"),
        ((*COST, "--on", "star", "--world", "8", "--codec", "int8"), "cannot be added in flight by ring"),
        (("step", "--model", "VGG16", "--on", "star", "--world", "8", "--bucket", "25"), "size '25' has no unit"),
        (("step", "--model", "VGG16", "--on", "star", "--world", "8", "--draw", "a.gif"), "not as '.gif'"),
        (("search", "--model", "VGG16", "--on", "star", "--world", "8"), "the search is for optical rings"),
        (("paper", "attention"), "unknown paper 'attention'; known are wrht"),
        (("sweep", "--schedules", "ring", "--worlds", "4", "--on", "star"), "there is no vector"),
        (("sweep", "--schedules", "rng", "--worlds", "4", "--on", "star", "--sizes", "1MB"), "unknown schedule 'rng'; did you mean 'ring'?"),
        (("draw", "ring", "--world", "1", "--out", "a.svg"), "sends nothing"),
        (("cost", "ring", "--size", "1e400MB", "--on", "star", "--world", "8"), "size '1e400MB' is infinite"),
        (("step", "--model", "VGG16", "--on", "star", "--world", "8", "--bucket", "1e400MB"), "size '1e400MB' is infinite"),
        (("step", "--model", "VGG16", "--on", "star", "--world", "8", "--slowest", "nan"), "slowest=nan: all must be above 0, and finite"),
        ((*COST, "--on", "star(nodes=100000000000000000000)"), "give 1 or more, a whole number up to 1,000,000"),
        ((*COST, "--on", "fat_tree(k=1500)"), "fat_tree has 843,750,000 hosts"),
        (("cost", "braid(levels=[])", "--size", "1MB", "--on", "optical", "--world", "8"), "braid: levels=[]: give text, such as '5/2 */7'"),
        (("cost", "ring" + 2000 * " ", "--size", "1MB", "--on", "star" + 2000 * "x", "--world", "8"), "2,004 characters; the limit is 1,000"),
        ((*COST, "--on", "optical(transceivers=0)", "--world", "8"), "transceivers=0; give 1 or more"),
        (("search", "--size", "1MB", "--world", "1000000"), "search among 1,000,000 ranks takes hours"),
        (("draw", "ring", "--world", "8", "--timeline", "--out", "a.svg"), "--timeline needs a network and a vector"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told in refusal(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_disconnected_graph_gets_one_sentence(capsys, tmp_path):
    (tmp_path / "apart.toml").write_text(
        'host = [{name = "a"}, {name = "b"}, {name = "c"}]\nlink = [{a = "a", b = "b", rate = "1Gbit"}]\n'
    )
    assert "is in two parts: a, b and c" in refusal(capsys, *COST, "--on", str(tmp_path / "apart.toml"))


# ---- start-up ----


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["cost", "wrht", "ring", "--on", "optical", "--world", "4096", "--model", "VGG16"],
        [
            "sweep",
            "--schedules",
            "ring",
            "--worlds",
            "100000",
            "--sizes",
            "1MB",
            "--on",
            "optical",
            "--out",
            "/dev/null",
        ],
    ],
    ids=["help", "cost", "sweep"],
)
def test_it_starts_without_torch(words):
    code = (
        "import sys\nfrom tacit.cli import main\ntry:\n    main(['sim', *sys.argv[1:]])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_of_every_action_has_an_example(capsys):
    from tacit.cli.sim import ACTIONS

    for action in ACTIONS:
        with pytest.raises(SystemExit):
            main(["sim", action, "--help"])
        assert f"tacit sim {action}" in capsys.readouterr().out
