"""`auto` in real processes over gloo: what it chooses, that all ranks choose it in the same step, caches, checkpoints, mistakes."""

from __future__ import annotations

import copy
import json
import logging
import platform
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, loss_of, own_state, train

import tacit
from tacit import records
from tacit.attachments.auto import Auto
from tacit.attachments.auto.live_check import IN_A_ROW, SKIPPED, WINDOW
from tacit.attachments.auto.options import HALF, LOSSY, TRIAL
from tacit.attachments.auto.planner import _BLOCK
from tacit.cli import main
from tacit.errors import CheckpointError, ConfigError, PairingError

PLAIN = (TRIAL, HALF)
STEPS = 6
QUICK = f"auto(lossy=False, steps={STEPS})"
COURSE = STEPS + 6 * _BLOCK  # steps until it has settled, at most
DDPS = {
    "ddp": {},
    "ddp unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.03},
    "ddp static": {"static_graph": True, "bucket_cap_mb": 0.03},
}


def _made(kind, seed=1):
    model = deep(layers=3, seed=seed)
    return DDP(model, **DDPS[kind]) if kind in DDPS else model


def _attached(kind, text=QUICK, **options):
    model = _made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, tacit.attach(model, optimizer, text, bucket="20kB", **options)


def _trained(rank, world, kind, folder):
    model, optimizer, handle = _attached(kind, records=f"{folder}/{rank}.jsonl")
    before = []
    for step in range(COURSE + 2):
        before.append(str(handle.strategy))
        train(model, optimizer, rank, range(step, step + 1))
    found = own_state(handle)
    figures = handle.stats.as_dict()
    handle.close()
    return before, found["auto"], found["strategy"], handle.stats.chosen, figures, flat(model)


def _train_plainly(rank, world):
    model = DDP(deep(layers=3))
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, range(COURSE + 2))
    return flat(model)


@pytest.fixture(scope="module")
def plainly(ranks):
    return ranks.run(2, _train_plainly)[0]


@pytest.mark.parametrize("kind", ["plain", "ddp unused", "ddp static"])
def test_all_ranks_choose_in_the_same_step_and_train_as_plain_ddp_does(ranks, tmp_path, plainly, kind):
    world, expected = 2, plainly
    found = ranks.run(world, _trained, kind, str(tmp_path))
    strategies, auto, last, chosen, figures, model = found[0]
    for other in found[1:]:
        assert (
            other[0] == strategies and other[1] == auto and other[2] == last and torch.equal(other[5], model)
        )
    assert strategies[:STEPS] == [TRIAL] * STEPS and set(strategies) <= set(PLAIN)
    assert auto["settled"] and last == strategies[-1]
    assert chosen.startswith(f"auto chose {last!r} in buckets of ") and figures["steps"] == COURSE + 2
    torch.testing.assert_close(model, expected, rtol=0.02, atol=0.002)  # bf16 in some steps
    for rank in range(world):
        kinds = [record["kind"] for record in records.read(tmp_path / f"{rank}.jsonl")]
        assert kinds.count("chosen") == 1 and kinds[0] == "attached"
        before = kinds.index("chosen") - kinds.index("attached") - 1
        assert before in (STEPS + 4 * _BLOCK, COURSE)


def _with_codecs(rank, world):
    logging.getLogger("tacit").setLevel(logging.INFO)
    model, optimizer, handle = _attached("plain", f"auto(steps={STEPS})")
    train(model, optimizer, rank, range(COURSE + 2))
    return str(handle.strategy), handle.stats.chosen, flat(model)


def test_four_ranks_agree_with_codecs_allowed(ranks):
    found = ranks.run(4, _with_codecs)
    strategy, chosen, model = found[0]
    assert strategy in (*PLAIN, *LOSSY) and strategy in chosen
    assert all(other[:2] == (strategy, chosen) and torch.equal(other[2], model) for other in found)


def _accumulates(rank, world):
    """Passes that only accumulate are no steps; a parameter that no rank uses stays out."""
    model = deep(layers=2)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, QUICK)
    for step in range(COURSE + 1):
        optimizer.zero_grad()
        with handle.no_sync():
            loss_of(model, rank, 2 * step).backward()
        loss_of(model, rank, 2 * step + 1).backward()
        optimizer.step()
    return own_state(handle)["auto"]["settled"], handle.step, model.unused.grad, flat(model)


def test_accumulation_and_unused_parameters_are_left_as_they_are(ranks):
    found = ranks.run(2, _accumulates)
    assert all(each[:3] == (True, COURSE + 1, None) for each in found)
    assert torch.equal(found[0][3], found[1][3])


# ---- the cache


def _cached(rank, world, folder):
    caught = []
    logging.getLogger("tacit").addHandler(_Catch(caught))
    model, optimizer, handle = _attached("ddp", f"auto(lossy=False, steps={STEPS}, cache={folder!r})")
    at_once = own_state(handle)["auto"]["settled"]
    train(model, optimizer, rank, range(COURSE))
    return at_once, str(handle.strategy), handle.stats.chosen, caught


class _Catch(logging.Handler):
    def __init__(self, into):
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record):
        self._into.append(record.getMessage())


def test_a_plan_is_kept_and_taken_without_a_trial_and_refused_on_another_machine(ranks, tmp_path):
    folder = tmp_path / "plans"
    first = ranks.run(2, _cached, str(folder))
    assert [each[0] for each in first] == [False, False]
    (path,) = folder.iterdir()
    second = ranks.run(2, _cached, str(folder))
    assert [each[:2] for each in second] == [(True, first[0][1])] * 2 and "(cached" in second[0][2]
    kept = json.loads(path.read_text())
    assert all(machine.startswith(f"{platform.node()}: ") for machine in kept["facts"]["machines"])
    kept["facts"]["machines"][1] = "a machine of somebody else's"
    path.write_text(json.dumps(kept))
    third = ranks.run(2, _cached, str(folder))
    assert [each[0] for each in third] == [False, False]
    refusals = [text for text in third[0][3] if "of another machine" in text]
    assert len(refusals) == 1 and "a machine of somebody else's" in refusals[0] and third[1][3] == []
    path.write_text('{"format": 1, "fa')
    fourth = ranks.run(2, _cached, str(folder))
    assert fourth[0][0] is False and any("cannot be read" in text for text in fourth[0][3])


# ---- checkpoints, and planning again


def _resumed(rank, world, text, folder):
    model = _made("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "every / ef(int4(block=64)) / sharded", bucket="12kB", seed=3)
    train(model, optimizer, rank, range(4))
    state, weights = handle.state_dict(), copy.deepcopy(model.state_dict())
    train(model, optimizer, rank, range(4, 8))
    unbroken = flat(model)
    handle.close()
    model, optimizer, handle = _attached("plain", text)
    train(model, optimizer, rank, range(2))  # in the middle of its course
    model.load_state_dict(weights)
    handle.load_state_dict(state)
    strategy, step = str(handle.strategy), handle.step
    train(model, optimizer, rank, range(4, 8))
    saved = own_state(handle)
    return strategy, step, saved["auto"], torch.equal(unbroken, flat(model)), handle.stats.chosen


def test_the_strategy_of_a_checkpoint_wins_and_goes_on_to_the_same_bits(ranks, tmp_path):
    for strategy, step, auto, same, chosen in ranks.run(2, _resumed, QUICK, str(tmp_path)):
        assert (strategy, step) == ("every / ef(int4(block=64)) / sharded", 4)
        assert auto == {"settled": True, "bucket_nbytes": 12_000} and same and "(checkpoint" in chosen


def _again(rank, world):
    model, optimizer, handle = _attached("ddp")
    train(model, optimizer, rank, range(COURSE))
    settled = own_state(handle)
    handle.replan()
    on_trial = own_state(handle)
    handle.load_state_dict(handle.state_dict())  # of a trial: planned anew
    train(model, optimizer, rank, range(COURSE, 2 * COURSE))
    return [found["auto"]["settled"] for found in (settled, on_trial, own_state(handle))], flat(model)


def test_it_plans_again_when_it_is_told_to(ranks):
    found = ranks.run(2, _again)
    assert [each[0] for each in found] == [[True, False, True]] * 2
    assert torch.equal(found[0][1], found[1][1])


def _loads(rank, world):
    model, optimizer, handle = _attached("plain")
    train(model, optimizer, rank, range(1))
    ((state,),) = handle.state_dict().values()
    texts = []
    for change in (
        {"strategy": "local(4) / none / allreduce"},
        {"strategy": "every / nothing"},
        {"auto": 3},
        {"auto": {"settled": 1}},
        {"auto": {"settled": True, "bucket_nbytes": 0}},
    ):
        with pytest.raises(CheckpointError) as caught:
            handle.load_state_dict({**state, **change})
        texts.append(str(caught.value))
    with pytest.raises(PairingError) as caught:  # another one on each rank
        handle.load_state_dict({**state, "strategy": LOSSY[rank], "auto": {}})
    texts.append(str(caught.value))
    train(model, optimizer, rank, range(1, 3))
    step = handle.step
    train(model, optimizer, rank, range(3, COURSE + 1))
    return texts, step, own_state(handle)["auto"]["settled"]


def test_a_checkpoint_that_cannot_be_taken_up_changes_nothing(ranks):
    texts, step, settled = ranks.run(2, _loads)[0]
    assert step == 3 and settled
    assert f"rank 0 attached {LOSSY[0]!r} and rank 1 attached {LOSSY[1]!r}" in texts[5]
    assert "which auto cannot take up in a training; attach 'local(4) / none / allreduce'" in texts[0]
    assert all(len(text) < 400 for text in texts) and "'auto' is 3" in texts[2]


def _one_slows_down(rank, world, folder):
    model, optimizer, handle = _attached("plain", records=f"{folder}/rank{rank}.jsonl")
    train(model, optimizer, rank, range(COURSE + SKIPPED + WINDOW))
    quiet = handle.stats.drift
    for step in range((IN_A_ROW + 1) * WINDOW):
        if rank == 1:
            time.sleep(0.2)
        train(model, optimizer, rank, range(step, step + 1))
    return quiet, handle.stats.drift, handle.stats.as_dict()["measured_step_s"]


def test_a_rank_that_slows_down_is_reported_once_on_all_ranks_and_shown_by_watch(ranks, tmp_path, capsys):
    found = ranks.run(2, _one_slows_down, str(tmp_path))
    for _, drift, measured_s in found:
        assert drift == found[0][1] and "rank 1 computes longer than it did" in drift and measured_s > 0.2
    written = [r for r in records.read(tmp_path / "rank0.jsonl") if r["kind"] == "drift"]
    assert [record["part"] for record in written if "rank 1" in record["sentence"]] == ["compute"]
    (tmp_path / "rank1.jsonl").unlink()  # one rank's records know of all
    assert main(["watch", str(tmp_path), "--json", "--once"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["lagging"] == [1] and found[0][1] in view["drifts"] and view["chosen"]


# ---- mistakes


def _mixed(rank, world):
    with pytest.raises(PairingError) as caught:
        _attached("plain", QUICK if rank else TRIAL)
    return str(caught.value)


def test_ranks_that_do_not_all_attach_auto_are_refused(ranks):
    found = ranks.run(2, _mixed)
    assert found[0] == found[1] and f"rank 0 attached {TRIAL!r} and rank 1 attached 'auto(" in found[0]


def _of_other_kinds(rank, world, folder):
    sharded = deep(layers=2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    Path(folder, "file0").write_text("")
    texts, model = [], deep(layers=2)
    for refused, text in (
        (sharded, "auto"),
        (sparse, "auto"),
        (model, f"auto(cache='{folder}/file0')"),
    ):
        with pytest.raises((ConfigError, PairingError)) as caught:
            tacit.attach(refused, None, text)
        texts.append(str(caught.value))
    tacit.attach(model, None, "none").close()
    with pytest.raises(ConfigError, match="leave overlap='forward' out"):
        tacit.attach(deep(layers=2), None, "auto", overlap="forward")
    with tacit.attach(deep(layers=2), None, "none") as handle, pytest.raises(ConfigError) as caught:
        handle.replan()
    return [*texts, str(caught.value)]


def test_what_has_no_prediction_is_refused_in_a_sentence(ranks, tmp_path):
    for fsdp, sparse, file, named in ranks.run(2, _of_other_kinds, str(tmp_path)):
        assert "auto chooses for DDP and plain modules; for FSDP2 name a strategy" in fsdp
        assert "sparse gradients" in sparse and "is a file; name a folder" in file
        assert "which was named; attach with 'auto'" in named


def test_one_process_alone_chooses_nothing():
    model = deep(layers=1)
    with tacit.attach(model, None, "auto") as handle:
        loss_of(model, 0, 0).backward()
        assert str(handle.strategy) == TRIAL and handle.stats.chosen == ""
        handle.replan()
        handle.load_state_dict(handle.state_dict())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("auto(lossy=2)", "lossy=2 is neither True nor False"),
        ("auto(steps=5)", "it records 6 to 1000 steps"),
        ("auto(steps=True)", "it records 6 to 1000 steps"),
        ("auto(cache=3)", "cache=3 is no folder"),
        ("auto(False)", "its options have names"),
        ("auto(loss=False)", "it has no option 'loss'"),
        ("auto(", "cannot be read; write auto or auto(lossy=False)"),
        ("auto / int8", "auto stands alone"),
    ],
)
def test_options_that_cannot_be_get_a_sentence(text, sentence):
    with pytest.raises(ConfigError, match=".") as caught:
        tacit.attach(deep(layers=1), None, text)
    assert sentence in str(caught.value)


def test_the_options_are_read(monkeypatch):
    assert Auto.parse("int8") is None and Auto.parse(3) is None
    assert Auto.parse(" auto ") == Auto() and Auto().lossy and Auto().folder is None
    assert Auto.parse("auto(lossy=False, cache='a/b')") == Auto(lossy=False, cache="a/b")
    assert Auto(lossy=False).choices == PLAIN
    monkeypatch.setenv("TACIT_PLAN_CACHE", "plans")
    assert Auto().folder == Path("plans") and Auto(cache="mine").folder == Path("mine")


def test_elsewhere_auto_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"auto .* tacit.attach"):
        tacit.Strategy.parse("auto")
