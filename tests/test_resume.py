"""Kill, resume: the same bits in the same world, the stated rule in another."""

import io
import os
import signal

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, train

import tacit
from tacit.errors import CheckpointError

TEXT = "every / ef(int4(block=32)) / sharded"
STEPS = 6


def _start(wrap):
    model = deep()
    model = DDP(model, bucket_cap_mb=0.03) if wrap == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, tacit.attach(model, optimizer, TEXT, bucket="20kB", seed=7)


def _save(path, model, optimizer, handle, rank):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tacit": handle.state_dict()}
    torch.save(state, f"{path}/rank-{rank}.pt")


def _unbroken(rank, world, wrap):
    model, optimizer, handle = _start(wrap)
    train(model, optimizer, rank, range(2 * STEPS))
    return flat(model), handle.state_dict()["memory"]["residual"]


def _killed(rank, world, wrap, path):
    model, optimizer, handle = _start(wrap)
    train(model, optimizer, rank, range(STEPS))
    _save(path, model, optimizer, handle, rank)
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank, world, wrap, path, old_world):
    model, optimizer, handle = _start(wrap)
    own = torch.load(f"{path}/rank-{rank}.pt", weights_only=True)
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    if old_world == world:
        handle.load_state_dict(own["tacit"])
    else:
        handle.load_state_dict(
            [torch.load(f"{path}/rank-{r}.pt", weights_only=True)["tacit"] for r in range(old_world)]
        )
    loaded = handle.state_dict()["memory"]["residual"]
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return flat(model), handle.state_dict()["memory"]["residual"], loaded, handle.step


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_a_killed_run_resumes_to_the_bits_of_an_unbroken_one(ranks, tmp_path, wrap):
    whole = ranks.run(4, _unbroken, wrap)
    ranks.start(4, _killed, wrap, str(tmp_path))
    assert ranks.results(4) == [("died", -signal.SIGKILL)] * 4
    resumed = ranks.run(4, _resumed, wrap, str(tmp_path), 4)
    for (bits, memory), (got, kept, _, step) in zip(whole, resumed, strict=True):
        assert torch.equal(got, bits)
        assert step == 2 * STEPS
        assert all(torch.equal(kept[name], memory[name]) for name in memory)


def test_three_ranks_go_on_from_four_with_the_mean_of_the_memories(ranks, tmp_path):
    ranks.start(4, _killed, "ddp", str(tmp_path))
    ranks.results(4)
    resumed = ranks.run(3, _resumed, "ddp", str(tmp_path), 4)
    old = [
        torch.load(f"{tmp_path}/rank-{r}.pt", weights_only=True)["tacit"]["memory"]["residual"]
        for r in range(4)
    ]
    for _, _, loaded, _ in resumed:
        for name in old[0]:
            torch.testing.assert_close(
                loaded[name], torch.stack([o[name] for o in old]).mean(0), rtol=1e-6, atol=1e-9
            )
    assert all(torch.equal(resumed[0][0], other[0]) for other in resumed)


def _full(rank, world):
    model, optimizer, handle = _start("ddp")
    train(model, optimizer, rank, range(2))
    file = io.BytesIO()
    torch.save(handle.full_state_dict(), file)
    file.seek(0)
    full = torch.load(file, weights_only=True)
    before = handle.state_dict()
    handle.load_state_dict(full)
    after = handle.state_dict()
    same = all(
        torch.equal(before["memory"]["residual"][n], t) for n, t in after["memory"]["residual"].items()
    )
    errors = []
    wrong_shape = handle.state_dict()
    wrong_shape["memory"]["residual"]["0.0.weight"] = torch.zeros(3)
    others = {**handle.state_dict(), "strategy": "every / ef(int8(block=256)) / sharded"}
    smaller = {**handle.state_dict(), "world": 7, "rank": 6}
    for state in (wrong_shape, others, smaller, {"format": 1}, 5, {**handle.state_dict(), "format": 0}):
        try:
            handle.load_state_dict(state)
        except CheckpointError as error:
            errors.append(str(error))
    return same, len(full["ranks"]), errors


def test_a_full_state_serves_every_rank_and_a_foreign_one_is_refused_in_one_sentence(ranks):
    for same, count, errors in ranks.run(2, _full):
        assert same and count == 2
        shape, strategy, world, empty, number, old = errors
        assert "'0.0.weight' has 3 elements in the checkpoint" in shape
        assert "ef(int8(block=256))" in strategy and "attach the same strategy" in strategy
        assert "all 7 ranks" in world and "full_state_dict" in world
        assert "no state of tacit" in empty and "no state of tacit" in number
        assert "format 0" in old
