"""A replay: layers in their order and for their time, gradients and bytes that are real. What it takes is not tested."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs.replay import Clock, Replayed, ReplayLayer, ReplaySetup, gradients, parts
from tacit.lab.experiments.jobs.specs import Replay, replay_check
from tacit.sim.workloads import Layer, Workload, workload

SMALL = Workload(
    "small",
    (
        Layer("a", 3_000, 0.001, 0.002),
        Layer("between", 0, 0.001, 0.0),
        Layer("b", 40_000, 0.002, 0.004),
        Layer("c", 5_000, 0.0005, 0.001),
    ),
    "made up",
)
PEERS = {"plain DDP": 1.0, "DDP fp16 hook": 0.5, "DDP bf16 hook": 0.5}
FIELDS = {
    "job", "workload", "replayed", "scale", "configuration", "baseline", "rate_bps", "network", "shaped", "ranks",
    "step_n", "step_p10_s", "step_p50_s", "step_p90_s", "speedup", "speedup_p10", "speedup_p90", "compute_s", "split",
    "sent_nbytes_a_step", "interface_nbytes_a_step", "goodput_bps", "link_share", "cpu_s_a_step", "bucket_nbytes", "note",
}  # fmt: skip


class FakeTime:
    """A clock that only sleeping moves, and what disturbs it."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


def test_layers_play_first_to_last_then_hand_out_gradients_last_to_first() -> None:
    fake = FakeTime()
    layers = parts(SMALL, 1.0)
    stage = ReplaySetup(layers, 0, 0, Clock(fake.now, fake.sleep))
    model = Replayed(layers, stage.gradients, stage.clock, stage.storage)
    came: list[tuple[int, float]] = []
    for index, weight in enumerate(model.weights):
        weight.register_post_accumulate_grad_hook(lambda w, index=index: came.append((index, fake.at - 100)))
    model().backward()
    assert fake.slept == pytest.approx([0.001, 0.001, 0.002, 0.0005, 0.001, 0.004, 0.002])
    assert [index for index, _ in came] == [2, 1, 0]
    assert [at for _, at in came] == pytest.approx([0.0055, 0.0095, 0.0115])
    assert (
        fake.at - 100 == pytest.approx(SMALL.forward_s + SMALL.backward_s) == pytest.approx(stage.compute_s)
    )
    handed = [g for g, layer in zip(stage.gradients, layers, strict=True) if layer.shape]
    assert all(torch.equal(weight.grad, g) for weight, g in zip(model.weights, handed, strict=True))


def test_what_the_cpu_did_meanwhile_is_no_compute_and_what_it_missed_is_told() -> None:
    fake = FakeTime()
    clock = Clock(fake.now, fake.sleep)
    clock.start()
    clock.spend(0.010)
    fake.at += 0.004  # a gradient is copied
    clock.spend(0.010)
    assert fake.slept == pytest.approx([0.010, 0.006]) and clock.late_s == pytest.approx(0)
    fake.at += 0.030  # and now for longer than the layer takes
    clock.spend(0.010)
    assert len(fake.slept) == 2 and clock.late_s == pytest.approx(0.020)


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "bert_base", "gpt2"])
@pytest.mark.parametrize("scale", [1.0, 0.04])
def test_a_scaled_model_has_its_share_of_the_parameters_and_all_of_the_time(name: str, scale: float) -> None:
    whole = workload(name)
    played = parts(whole, scale)
    numels = [torch.Size(part.shape).numel() if part.shape else 0 for part in played]
    assert sum(numels) == pytest.approx(whole.parameters * scale, rel=2e-3)
    for part, numel, layer in zip(played, numels, whole.layers, strict=True):
        assert (numel == 0) == (layer.parameters == 0)
        assert (part.forward_s, part.backward_s) == (layer.forward_s, layer.backward_s)
        assert not part.shape or part.shape[0] <= part.shape[1] <= part.shape[0] + 2


def test_gradients_come_from_the_seed_and_differ_between_ranks_that_share_half_of_them() -> None:
    layers = [ReplayLayer("a", (200, 200), 0, 0), ReplayLayer("b", (300, 300), 0, 0)]
    mine, again, other = (gradients(layers, seed=7, rank=rank) for rank in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
    for a, b in zip(mine, other, strict=True):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] == pytest.approx(0.5, abs=0.02)
        assert 1e-4 < a.std() / 2**0.5 < 1e-2
    assert mine[0].std() != pytest.approx(float(mine[1].std()), rel=0.01)


def test_a_replay_is_right_when_its_steps_last_as_long_as_the_recorded_times() -> None:
    good, slow = replay_check([0.103, 0.1, 0.13], 0.1), replay_check([0.106] * 3, 0.1)
    assert good == {
        "step_n": 3,
        "step_p50_s": 0.103,
        "compute_s": 0.1,
        "ratio": pytest.approx(1.03),
        "passed": True,
    }
    assert slow["passed"] is False and replay_check([0.1], 0.0)["passed"] is False


# ---- with real ranks ----


def mean_gradients(rank: int, world: int, strategy: str) -> list[float]:
    """How far each weight's gradient is from the mean of what the ranks handed out, against its size."""
    from tacit.lab.experiments.baselines import connect, named

    layers = parts(SMALL, 1.0)
    stages = [ReplaySetup(layers, 3, r) for r in range(world)]
    own = stages[rank]
    model = Replayed(layers, own.gradients, own.clock, own.storage)
    link = connect(model, None, named(strategy), bucket_nbytes=100_000)
    for _ in range(2):  # DDP regroups its buckets after the first
        for weight in model.weights:
            weight.grad = None
        link.model().backward()
    handed = zip(*(stage.gradients for stage in stages), strict=True)
    means = [torch.stack(same).mean(0) for same, part in zip(handed, layers, strict=True) if part.shape]
    link.close()
    return [float((w.grad - mean).norm() / mean.norm()) for w, mean in zip(model.weights, means, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "most"), [("fp32", 1e-6), ("bf16", 1e-2), ("none / sharded", 1e-6), ("int8", 2e-2)]
)
def test_the_exchange_is_real_and_ends_in_the_mean(ranks: Any, strategy: str, most: float) -> None:
    for errors in ranks.run(2, mean_gradients, strategy):
        assert len(errors) == 3 and max(errors) < most


def played(rank: int, world: int, table: dict[str, Any]) -> list[dict[str, Any]]:
    from tacit.lab.experiments.jobs.common import WorkerNetwork
    from tacit.lab.experiments.jobs.replay import run

    out = io.StringIO()
    with redirect_stdout(out):
        run(Replay.read(table), WorkerNetwork("a test's loopback", 1e9, shaped=False))
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module")
def said(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    recorded = tmp_path_factory.mktemp("workloads") / "small.json"
    recorded.write_text(json.dumps(SMALL.as_record()))
    table = {
        "job": "test", "workload": str(recorded), "steps": 3, "tune": ["50kB", "25MiB"], "bucket": "100kB",
        "peers": ["fp32", "fp16", "bf16", "powersgd(rank=2)"], "strategies": ["int8", "hush / sharded"],
    }  # fmt: skip
    first, *others = ranks.run(2, played, table)
    assert others == [[]]  # rank 0 speaks for all
    return list(first)


def of_kind(said: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [message for message in said if message["kind"] == kind]


def test_every_configuration_is_timed_and_told_in_full(said: list[dict[str, Any]]) -> None:
    timings = of_kind(said, "timing")
    assert [t["configuration"] for t in timings] == [
        *PEERS, "DDP PowerSGD rank 2", "every / int8(block=256) / sharded", "every / hush / sharded"
    ]  # fmt: skip
    for t in timings:
        assert t.keys() >= FIELDS
        assert (t["job"], t["workload"], t["replayed"], t["scale"]) == ("test", "small", True, 1.0)
        assert (t["ranks"], t["step_n"], t["rate_bps"], t["shaped"]) == (2, 3, 1e9, False)
        assert t["compute_s"] == pytest.approx(SMALL.forward_s + SMALL.backward_s)
        assert t["step_p10_s"] <= t["step_p50_s"] <= t["step_p90_s"]
        assert t["interface_nbytes_a_step"] is None  # the loopback is everybody's
        assert set(t["split"]) == {"encode_s", "wait_s", "decode_s", "wire_s"}
        assert t["link_share"] == pytest.approx(t["goodput_bps"] / 956.4e6, rel=1e-3)
    assert [t["configuration"] for t in timings if t["baseline"]] == ["plain DDP"]
    assert timings[0]["speedup"] == 1


def test_bytes_are_those_of_a_ring_for_ddp_and_the_codecs_own_for_tacit(said: list[dict[str, Any]]) -> None:
    sent = {t["configuration"]: t["sent_nbytes_a_step"] for t in of_kind(said, "timing")}
    numel = of_kind(said, "timing")[0]["parameters"]
    assert numel == pytest.approx(SMALL.parameters, rel=0.01)
    for name, share in PEERS.items():  # 2 (n - 1) / n is 1 for two ranks
        assert sent[name] == pytest.approx(4 * numel * share, rel=1e-3)
    squares = [part.shape for part in parts(SMALL, 1.0) if part.shape]
    assert sent["DDP PowerSGD rank 2"] == pytest.approx(4 * 2 * sum(a + b for a, b in squares), rel=1e-3)
    assert 3.5 < 4 * numel / sent["every / int8(block=256) / sharded"] < 4.0
    assert 4.5 < 4 * numel / sent["every / hush / sharded"] < 6.0


def test_the_baselines_bucket_is_the_best_of_those_tried(said: list[dict[str, Any]]) -> None:
    (tuning,) = of_kind(said, "tuning")
    numel = of_kind(said, "timing")[0]["parameters"]
    assert [row["bucket_nbytes"] for row in tuning["rows"]] == [50_000, 4 * numel + 1]
    best = min(tuning["rows"], key=lambda row: row["step_p50_s"])["bucket_nbytes"]
    sizes = {t["configuration"]: t["bucket_nbytes"] for t in of_kind(said, "timing")}
    assert tuning["best_nbytes"] == best and all(sizes[name] == best for name in PEERS)
    assert sizes["every / hush / sharded"] == 100_000
    assert sizes["DDP PowerSGD rank 2"] > 4 * numel  # all in one


def test_every_replay_checks_itself_without_communication(said: list[dict[str, Any]]) -> None:
    (check,) = of_kind(said, "replay_check")
    assert check["compute_s"] == pytest.approx(SMALL.forward_s + SMALL.backward_s)
    assert check["ratio"] > 0.99  # sleeping never ends early; how late it ends is the machine's


# ---- what is refused ----


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "workload is missing"),
        ({"workload": "vgg61"}, "did you mean 'vgg16'"),
        ({"workload": "vgg16", "scael": 1}, "did you mean 'scale'"),
        ({"workload": "vgg16", "scale": 0}, "above 0"),
        ({"workload": "vgg16", "steps": "many"}, "no whole number"),
        ({"workload": "vgg16", "steps": 0}, "at least one"),
        ({"workload": "vgg16", "peers": ["bf16"]}, "add it"),
        ({"workload": "vgg16", "peers": "fp32"}, "no list of texts"),
        ({"workload": "vgg16", "bucket": "4"}, "no unit"),
        ({"workload": "vgg16", "tune": []}, "one bucket size or more"),
        ({"workload": "vgg16", "strategies": ["int8", "int8"]}, "named twice"),
        ({"workload": "missing.json"}, "cannot be opened"),
    ],
    ids=str,
)
def test_a_bad_order_is_refused_in_one_sentence(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Replay.read(table, "job 1")
    assert "\n" not in str(refused.value)


def test_a_strategy_nobody_knows_is_refused_before_anything_starts() -> None:
    spec = Replay.read({"workload": "vgg16", "strategies": ["hsuh / sharded"]})
    with pytest.raises(ConfigError, match="did you mean 'hush'"):
        spec.check_names()


def test_a_replay_that_does_not_fit_in_memory_names_the_scale_that_would() -> None:
    spec = Replay.read({"workload": "vgg16", "job": "whole", "strategies": ["int8"]})
    spec.check_memory(4, available_nbytes=10**12)
    with pytest.raises(ConfigError, match=r"whole: 4 ranks .* set scale = 0\.\d"):
        spec.check_memory(4, available_nbytes=8 * 10**9)


def test_an_order_survives_the_way_to_its_ranks() -> None:
    spec = Replay.read({"workload": "vgg16", "scale": 0.04, "tune": ["1MiB"], "strategies": ["int8"]})
    assert Replay.read(json.loads(json.dumps(spec.as_table()))) == spec


def test_the_interface_counts_what_leaves() -> None:
    import socket

    from tacit.lab.experiments.jobs.common import WorkerNetwork

    network = WorkerNetwork(interface="lo")
    before = network.transmitted()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(1000), ("127.0.0.1", 9))
    assert network.transmitted() - before >= 1000
    assert WorkerNetwork().transmitted() == 0
