"""A probe of real ranks: the same on all of them, predicted from as it is; wrong ones are refused."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from tacit import lab, launch
from tacit.errors import ConfigError
from tacit.plan.operations import Reference, rates_of
from tacit.plan.probing import check_steady, probe
from tacit.topology import star

CHOICES = (
    "DDP",
    "DDP bf16",
    "bf16",
    "int8",
    "hush",
    "lowrank(4)",
    "local(4) / none",
    "local(4) / none / gossip",
)


def model(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 8))


def _planned(rank, world):
    from tacit.plan import advise, predict, record_step
    from tacit.plan.recorder import gradients_of

    made, x = model(), torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    step = record_step(made, [x], optimizer=torch.optim.SGD(made.parameters(), lr=0.1), repeats=2)
    made(x).square().mean().backward()
    found = probe(
        step, CHOICES, gradients=gradients_of(made), compute=lambda: made(x).mean().backward(), finalists=2
    )
    predictions = predict(found, step)
    return found, step, predictions, advise(found, predictions).verdict


def test_all_ranks_return_one_probe_and_one_advice(ranks):
    results = ranks.run(2, _planned)
    (found, step, predictions, verdict), other = results
    assert (found, step, predictions, verdict) == other
    assert (found.world, found.backend, found.device) == (2, "gloo", "cpu") and found.took_s < 30
    assert [each.choice for each in found.costs[:3]] == ["DDP", "DDP bf16", "every / bf16 / allreduce"]
    assert len(predictions) == len(CHOICES) and verdict.startswith("use ")
    assert all(0 < each.low_s <= each.step_s <= each.high_s for each in predictions)
    assert all(each.step_s > each.compute_s > 0 for each in predictions)
    assert found.pairs.typical_bps >= found.pairs.slowest_bps > 1e6
    assert {found.pairs.sender, found.pairs.receiver} == {0, 1}
    by_choice = {each.choice: each for each in predictions}
    numel = step.workload.parameters
    assert by_choice["DDP"].sent_nbytes == pytest.approx(4 * numel, rel=0.01)  # 2 (n - 1) / n of two ranks
    assert by_choice["DDP bf16"].sent_nbytes == pytest.approx(2 * numel, rel=0.01)
    calibrated = {each.choice for each in found.calibrations}
    assert {"DDP", "DDP bf16", "every / bf16 / allreduce"} <= calibrated
    errors = {each.choice: each.nmse for each in found.errors}
    assert errors["every / bf16 / allreduce"] < 1e-4  # of the model's own gradients


def _different(rank, world):
    from tacit.errors import PairingError
    from tacit.plan import record_step

    step = record_step(model(32 if rank == 1 else 64), [torch.ones(2, 32 if rank == 1 else 64)], repeats=1)
    with pytest.raises(
        PairingError, match="rank 0 and rank 1 probe with different models; build the same model"
    ):
        probe(step, ["DDP"])
    for budget_s in (0.0, 61.0):
        with pytest.raises(ConfigError, match="a probe takes 1 to 60 seconds"):
            probe(step, ["DDP"], budget_s=budget_s)
    with pytest.raises(ConfigError, match="knows allreduce, sharded and gossip"):
        probe(None, ["none / server"])
    return True


def test_ranks_with_different_models_are_refused(ranks):
    assert ranks.run(2, _different) == [True, True]


def test_links_that_changed_during_the_probe_are_refused():
    def seen(*reduced_s, computed_s=0.001):
        return Reference(reduced_s, (computed_s,))

    check_steady(seen(0.010, 0.011, 0.012), seen(0.013, 0.012, 0.011))
    check_steady(seen(0.010, 0.050), seen(0.030, 0.040))  # noise: the two overlap
    check_steady(seen(0.0004), seen(0.004))  # of a busy machine, not of a link
    check_steady(seen(0.010), seen(0.040, computed_s=0.003))  # as is this
    sentence = "links changed during the probe: an all-reduce of 1.05 MB took 10 ms at the start and 40 ms"
    with pytest.raises(ConfigError, match=sentence):
        check_steady(seen(0.010, 0.010, 0.011), seen(0.040, 0.041, 0.039))


def test_a_link_that_becomes_slower_during_the_probe_is_refused_by_all_ranks(tmp_path):
    said, changed = [], tmp_path / "changed"
    with ExitStack() as stack:
        try:
            network = stack.enter_context(lab.up(star(2, rate_bps=1e9), folder=tmp_path / "labs"))
        except lab.NoNamespacesError as cause:
            pytest.skip(str(cause))

        def heard(rank, message):
            said.append((rank, message))
            if message["kind"] == "looked":
                network.reshape(star(2, rate_bps=50e6))
                changed.touch()

        path = {"PYTHONPATH": str(Path(__file__).parents[1])}
        specs = [launch.RankSpec(s.prefix, {**s.env, **path}) for s in network.rank_specs()]
        launch.run(
            "probing_rank", [str(changed)], ranks=2, on_message=heard, log_dir=tmp_path, rank_specs=specs
        )
    ends = {rank: message for rank, message in said if message["kind"] != "looked"}
    assert {message["kind"] for message in ends.values()} == {"refused"} and len(ends) == 2
    assert "links changed during the probe: an all-reduce of 1.05 MB took" in ends[0]["sentence"]


def test_the_slow_link_among_all_pairs_is_found():
    """Rank 1 sends slowly to rank 2: both are late in that round, and each is on time in another."""
    took_s = {
        1: [0.010, 0.080, 0.081, 0.010],
        2: [0.011, 0.012, 0.010, 0.011],
        3: [0.012, 0.010, 0.011, 0.010],
    }
    found = rates_of(took_s, 1000)
    assert (found.sender, found.receiver) == (1, 2)
    assert found.slowest_bps == pytest.approx(8000 / 0.080) and found.typical_bps == pytest.approx(
        8000 / 0.010
    )


def test_a_probe_without_ranks_is_refused():
    with pytest.raises(ConfigError, match="there is none; start the ranks with torchrun"):
        probe(None, ["DDP"])
