"""Kill, resume: the same bits in the same world, the stated rule in another."""

import io
import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, own_state, train

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
    return flat(model), handle.memory.state()["residual"]


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
    loaded = handle.memory.state()["residual"]
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return flat(model), handle.memory.state()["residual"], loaded, handle.step


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_a_killed_run_resumes_to_the_bits_of_an_unbroken_one(ranks, tmp_path, wrap):
    whole = ranks.known(4, _unbroken, wrap)
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
        torch.load(f"{tmp_path}/rank-{r}.pt", weights_only=True)["tacit"][f"tacit_rank{r}"][0]["memory"][
            "residual"
        ]
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
    before = own_state(handle)
    handle.load_state_dict(full)
    after = own_state(handle)
    same = all(
        torch.equal(before["memory"]["residual"][n], t) for n, t in after["memory"]["residual"].items()
    )
    errors = []
    wrong_shape = own_state(handle)
    wrong_shape["memory"]["residual"]["0.0.weight"] = torch.zeros(3)
    others = {**own_state(handle), "strategy": "every / ef(int8(block=256)) / sharded"}
    smaller = {**own_state(handle), "world": 7, "rank": 6}
    for state in (wrong_shape, others, smaller, {"format": 1}, 5, {**own_state(handle), "format": 0}):
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


# ---- through torch.distributed.checkpoint


def _parts(model, optimizer, handle):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tacit": handle}


def _load(path, model, optimizer, tacit_part):
    optimizer.load_state_dict(_with_momentum(optimizer))
    parts = _parts(model, optimizer, tacit_part)
    dcp.load(parts, checkpoint_id=path)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])


def _with_momentum(optimizer):
    """dcp.load fills what is there: SGD has no momentum before its first step."""
    state = optimizer.state_dict()
    state["state"] = {
        i: {"momentum_buffer": torch.zeros_like(p)} for i, p in enumerate(optimizer.param_groups[0]["params"])
    }
    return state


def _saved(rank, world, path, how):
    model, optimizer, handle = _start("ddp")
    train(model, optimizer, rank, range(STEPS))
    kept = handle.memory.state()["residual"]
    if how == "save":
        dcp.save(_parts(model, optimizer, handle), checkpoint_id=path)
    else:  # training goes on while it is written
        writer = dcp.FileSystemWriter(path) if how == "async, staged by the writer" else None
        where = {"storage_writer": writer} if writer else {"checkpoint_id": path}
        written = dcp.async_save(_parts(model, optimizer, handle), **where)
        train(model, optimizer, rank, range(50, 53))
        written.result()
    return kept


def _loaded(rank, world, path, reshard, trained):
    """Memory and step after dcp.load, and the model after STEPS more steps."""
    model, optimizer, handle = _start("ddp")
    train(model, optimizer, rank, range(90, 90 + trained))  # memory of its own, which must go
    _load(path, model, optimizer, handle.resharded(path) if reshard else handle)
    kept, step = handle.memory.state()["residual"], handle.step
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return kept, step, flat(model)


@pytest.mark.parametrize("how", ["save", "async", "async, staged by the writer"])
def test_dcp_keeps_every_ranks_memory_and_resumes_to_the_same_bits(ranks, tmp_path, how):
    whole = ranks.known(4, _unbroken, "ddp")
    saved = ranks.run(4, _saved, str(tmp_path), how)
    for reshard, trained in ((False, 0), (False, 2), (True, 0)):
        for (bits, _), kept, (loaded, step, got) in zip(
            whole, saved, ranks.run(4, _loaded, str(tmp_path), reshard, trained), strict=True
        ):
            assert step == STEPS
            assert len(loaded) == len(kept) and all(torch.equal(loaded[name], kept[name]) for name in kept)
            assert torch.equal(got, bits)


@pytest.fixture(scope="module")
def of_four(ranks, tmp_path_factory):
    """A checkpoint of four ranks, and what each of them remembered."""
    path = str(tmp_path_factory.mktemp("four"))
    return path, ranks.run(4, _saved, path, "save")


@pytest.mark.parametrize("world", [2, 3, 5])
def test_dcp_loads_in_another_world_with_the_mean_of_the_memories(ranks, of_four, world):
    path, saved = of_four
    found = ranks.run(world, _loaded, path, True, 0)
    for kept, step, model in found:
        assert step == STEPS and torch.equal(model, found[0][2])
        for name in saved[0]:
            assert torch.equal(
                kept[name], (saved[0][name] + saved[1][name] + saved[2][name] + saved[3][name]) / 4
            )


def _loaded_as_it_is(rank, world, path):
    model, optimizer, handle = _start("ddp")
    before = own_state(handle)
    with pytest.raises((CheckpointError, dcp.CheckpointException)) as refused:
        _load(path, model, optimizer, handle)
    return str(refused.value), own_state(handle) == before


def test_a_handle_that_dcp_loads_as_it_is_refuses_another_world(ranks, of_four):
    path, _ = of_four
    for rank, (said, unchanged) in enumerate(ranks.run(3, _loaded_as_it_is, path)):
        assert unchanged and f"rank {rank} of 3 cannot resume from ranks [{rank}] of 4" in said
        assert "handle.resharded(checkpoint)" in said
    for said, unchanged in ranks.run(5, _loaded_as_it_is, path):  # by DCP itself
        assert unchanged and "Missing key in checkpoint state_dict: tacit.tacit_rank4" in said
