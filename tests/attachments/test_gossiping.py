"""Gossip between real processes: models part, meet and agree; ranks die and come back, and nobody waits for them."""

import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import Forked
from toys import deep, flat, loss_of, own_state, train

import tacit
from tacit import records
from tacit.errors import ConfigError
from tacit.gossip.store import StoreServer

STEPS = 60


def _gossip(rank, world, text, folder, steps=STEPS):
    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = tacit.attach(model, optimizer, text, records=f"{folder}/{rank}.jsonl")
    start = flat(model)
    train(model, optimizer, rank, range(steps))
    handle.merge()
    sent = handle.stats.sent_nbytes
    with torch.no_grad():
        held_out = sum(loss_of(model, 99, step).item() for step in range(20)) / 20
    state = own_state(handle)
    handle.close()
    return start, flat(model), held_out, sent, state


@pytest.mark.parametrize(
    "text",
    [
        "every / none / gossip",
        "adaptive(0.02) / hush / gossip(peers=exponential)",
        "local(3) / bf16 / gossip(mode=push)",
    ],
)
def test_ranks_start_alike_part_meet_and_end_with_the_same_bits(ranks, tmp_path, text):
    found = ranks.run(4, _gossip, text, str(tmp_path))
    assert all(torch.equal(start, found[0][0]) for start, *_ in found)
    assert all(torch.equal(merged, found[0][1]) for _, merged, *_ in found)
    assert found[0][2] < 0.9  # of 1.386 at first
    told = [
        r for rank in range(4) for r in records.read(tmp_path / f"{rank}.jsonl") if r["kind"] == "exchange"
    ]
    met = [r for r in told if r["outcome"] == "met"]
    assert len(met) >= 4 and all(r["peer"] != r["rank"] and r["why"] for r in met)
    if "exponential" in text:  # 1 and 2 places further on, in turn (3 where those could not be reached)
        assert {(r["peer"] - r["rank"]) % 4 for r in met} >= {1, 2}
    numels = [
        sum(p.numel() for p in layer.parameters()) for layer in deep(seed=0) if list(layer.parameters())
    ]
    an_element = {"none": 4.0, "hush": 0.5, "bf16": 2.0}[text.split(" / ")[1]]
    for r in met:
        layers = range(len(numels)) if r["layers"] is None else r["layers"]
        assert r["sent_nbytes"] >= an_element * sum(numels[layer] for layer in layers)
    assert ("adaptive" in text) == any(r["layers"] for r in met)  # a period is of the whole model


def test_a_trigger_says_less_than_every_step(ranks, tmp_path):
    every = ranks.run(4, _gossip, "every / none / gossip", str(tmp_path))
    rarely = ranks.run(4, _gossip, "adaptive(0.2) / none / gossip", str(tmp_path))
    assert sum(f[3] for f in rarely) < 0.7 * sum(f[3] for f in every)


def _resumed(rank, world, state):
    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "every / none / gossip")
    handle.load_state_dict(state)
    loaded, differs = flat(model), handle._attachment._replica.differs
    handle.close()
    return loaded, differs


def test_a_checkpoint_holds_the_ranks_own_model(ranks, tmp_path):
    found = ranks.run(2, _gossip, "every / none / gossip", str(tmp_path), 4)
    model = torch.cat([t.reshape(-1) for t in found[0][4]["memory"]["model"].values()])
    assert torch.equal(model, found[0][1])
    assert found[0][4]["round"]["step"] == 4
    assert 0 <= found[0][4]["round"]["differs"] <= 2
    states = [state for *_, state in found]
    for state in states:
        state["round"]["differs"] = 1.25
    for loaded, differs in ranks.run(2, _resumed, states):
        assert torch.equal(loaded, model) and differs == 1.25


def _resumes_late(rank, world, state, folder):
    """Rank 0 has loaded its checkpoint and trains; rank 1 is still reading its own."""
    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "every / none / gossip", records=f"{folder}/late-{rank}.jsonl")
    if rank == 0:
        handle.load_state_dict(state)
        train(model, optimizer, rank, range(5))
    dist.barrier()
    alone = flat(model)
    if rank == 1:
        handle.load_state_dict(state)
    dist.barrier()
    train(model, optimizer, rank, range(20, 40))
    handle.merge()
    handle.close()
    return alone, flat(model)


def test_nobody_meets_a_model_that_is_not_loaded_yet(ranks, tmp_path):
    states = [state for *_, state in ranks.run(2, _gossip, "every / none / gossip", str(tmp_path), 4)]
    (alone, merged), (_, same) = ranks.run(2, _resumes_late, states, str(tmp_path))
    model = deep()
    torch.nn.utils.vector_to_parameters(
        torch.cat([t.reshape(-1) for t in states[0]["memory"]["model"].values()]), model.parameters()
    )
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), 0, range(5))
    # not a step towards an untrained one
    torch.testing.assert_close(alone, flat(model), rtol=1e-5, atol=1e-6)
    assert torch.equal(merged, same)
    assert sum(_met(tmp_path / f"late-{rank}.jsonl") for rank in range(2)) > 0  # and after that they do meet


def _normed(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )


def _rest_of(model):
    return [
        t.detach().clone() for t in (model[0].weight, model[1].running_mean, model[1].num_batches_tracked)
    ]


def _with_rest(rank, world):
    """A frozen first layer, and statistics that every rank gathers for itself."""
    model = _normed(seed=rank)
    model[0].requires_grad_(False)
    model[1].running_mean.fill_(rank + 1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    handle = tacit.attach(model, optimizer, "local(1000) / none / gossip")
    begun = _rest_of(model)
    train(model, optimizer, rank, range(3 + rank))
    own = _rest_of(model)
    handle.merge()
    merged = _rest_of(model)
    handle.close()
    return begun, own, merged


def test_what_is_not_trained_begins_alike_and_is_merged_too(ranks):
    found = ranks.run(3, _with_rest)
    for begun, _, merged in found:
        assert torch.equal(begun[0], _normed(0)[0].weight) and torch.equal(merged[0], begun[0])
        assert torch.equal(begun[1], torch.ones(16))
        by_steps = zip((3, 4, 5), found, strict=True)
        torch.testing.assert_close(merged[1], sum(steps * own[1] for steps, (_, own, _) in by_steps) / 12)
        assert torch.equal(merged[1], found[0][2][1]) and int(merged[2]) == 3  # counts are the lowest rank's
    assert not torch.equal(found[0][1][1], found[1][1][1])


def _hosts(rank, world, text):
    """Two hosts of two ranks: DDP inside, gossip between."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = torch.nn.parallel.DistributedDataParallel(deep(seed=rank), process_group=inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = tacit.attach(model, optimizer, text)
    models = [flat(model)]
    for step in range(40):
        train(model, optimizer, rank, range(step, step + 1))
        models.append(flat(model))
    apart = handle.divergence()
    dist.barrier()
    handle.merge()
    sent = handle.stats.sent_nbytes
    handle.close()
    return models, apart, flat(model), sent


@pytest.mark.parametrize("text", ["adaptive(0.01) / hush / gossip", "local(3) / none / gossip"])
def test_ddp_inside_a_host_and_gossip_between_hosts(ranks, text):
    found = ranks.run(4, _hosts, text)
    models = [models for models, *_ in found]
    for first, second, third, fourth in zip(*models, strict=True):
        assert torch.equal(first, second) and torch.equal(third, fourth)  # DDP's hosts stay equal
    assert torch.equal(models[0][0], models[2][0])  # all begin alike, and then part
    assert sum(not torch.equal(a, b) for a, b in zip(models[0], models[2], strict=True)) > 20
    assert all(torch.equal(merged, found[0][2]) for *_, merged, _ in found)
    assert [apart > 0 for _, apart, *_ in found] == [True] * 4 and found[0][1] == found[1][1]
    assert found[0][3] > 0 and found[1][3] == 0  # one of a host speaks for it


def _refusals(rank, world):
    model, said = deep(), []
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for candidate, given, text in (
        (model, None, "adaptive / none"),
        (wrapped, optimizer, "adaptive / none"),
        (model, optimizer, "adaptive / none / sharded"),
        (model, optimizer, "diloco(4) / none / gossip"),
        (model, optimizer, "adaptive / hush / gossip"),
    ):
        try:
            tacit.attach(candidate, given, text, group=dist.group.WORLD if "hush" in text else None)
        except ConfigError as error:
            said.append(str(error))
        except tacit.PairingError as error:
            said.append(str(error))
    return said


def test_what_cannot_work_is_refused_with_the_way_out(ranks):
    said = ranks.run(2, _refusals)[0]
    assert "give attach() the optimizer" in said[0] and "attach the plain module" in said[1]
    assert "adaptive(0.06) / none / gossip" in said[2] and "gossip has none" in said[3]
    assert "leave group= out" in said[4]


def _late(rank, world):
    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if rank == 0 else 0.001)
    if rank == 1:
        torch.distributed.barrier()  # rank 0 has begun without it, and taken five steps
    patience = timedelta(seconds=0.1) if rank == 0 else None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle = tacit.attach(model, optimizer, "local(1000) / none / gossip", timeout=patience)
        begun, top = handle.step, handle._attachment._replica.top_lr
        if rank == 0:
            train(model, optimizer, rank, range(5))
            torch.distributed.barrier()
        else:  # as a script does that is started again, and has a checkpoint of step 3
            older = own_state(handle) | {"step": 3}
            older["round"]["step"] = 3
            older["memory"]["model"] = {name: 0 * t for name, t in older["memory"]["model"].items()}
            handle.load_state_dict(older)
    said = [str(w.message) for w in warned]
    torch.distributed.barrier()  # rank 1 has its model
    found, step = flat(model), handle.step
    handle.merge()
    merged = flat(model)
    handle.close()
    return said, (begun, step, top), found, merged


def test_who_comes_late_takes_the_model_of_one_that_trains_and_its_step(ranks):
    (said, first, model, merged), (told, late, taken, same) = ranks.run(2, _late)
    assert any("begins without ranks [1]" in sentence for sentence in said)
    assert first == (0, 5, 0.0) and late == (5, 5, 0.05)
    assert torch.equal(taken, model) and torch.equal(merged, same)
    assert any("model of step 5, not from the checkpoint of step 3" in sentence for sentence in told)


def _finds_a_silent_peer_first(rank, world):
    """Rank 1 comes late. What it asks of rank 0 fails at first, and takes longer than a lease."""
    from tacit.attachments import gossiping
    from tacit.gossip.frames import PeerError
    from tacit.gossip.members import LEASE_S

    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fetch, asked = gossiping.Peers.fetch, []

    def fails_at_first(peers, address, what, deadline):
        asked.append(what)
        if len(asked) == 1:
            time.sleep(LEASE_S + 0.5)
            raise PeerError("a peer has said nothing")
        return fetch(peers, address, what, deadline)

    if rank == 1:
        gossiping.Peers.fetch, gossiping._ALONE_S = fails_at_first, 1.0
        dist.barrier()
    handle = tacit.attach(
        model, optimizer, "local(1000) / none / gossip", timeout=timedelta(seconds=0.1 if rank == 0 else 30)
    )
    if rank == 0:
        train(model, optimizer, rank, range(3))
        dist.barrier()
    dist.barrier()  # rank 1 has its model
    found = flat(model), handle.step, handle._attachment._members.run
    handle.close()
    return found


def test_a_peer_that_keeps_a_late_one_waiting_does_not_make_it_begin_a_run_of_its_own(ranks):
    (model, step, run), (taken, at, also) = ranks.run(2, _finds_a_silent_peer_first)
    assert torch.equal(model, taken) and (step, run) == (at, also) == (3, 0)


def _again(rank, world, store):
    """One run in a store that may have seen others."""
    from tacit.attachments import gossiping

    os.environ["TACIT_STORE"], gossiping._ALONE_S = store, 0.1
    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "every / none / gossip")
    start = flat(model)
    train(model, optimizer, rank, range(5))
    handle.merge()
    attached = handle._attachment
    dist.barrier()
    if rank == 1:  # is killed: its lease stays
        attached._members._closed.set()
        attached._members._store_client.close()
    else:
        handle.close()
    return start, flat(model), attached._members.run


def test_a_store_serves_one_run_after_another_whether_they_left_or_died(ranks):
    store = StoreServer(("127.0.0.1", 0), "")
    runs = [ranks.run(2, _again, f"127.0.0.1:{store.address[1]}") for _ in range(2)]
    store.close()
    for number, ((start, merged, run), (alike, same, also)) in enumerate(runs):
        assert torch.equal(start, flat(deep(seed=0))) and torch.equal(start, alike)
        assert torch.equal(merged, same) and run == also == number


def _cannot_listen(rank, world):
    from tacit.attachments import gossiping

    def refuse(*_, **__):
        raise ConfigError("this rank cannot listen")

    real, gossiping.Peers = gossiping.Peers, refuse
    model = deep(seed=rank)
    try:
        with pytest.raises(ConfigError, match="cannot listen"):
            tacit.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), "every / none / gossip")
    finally:
        gossiping.Peers = real
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tacit")]


def test_an_attach_that_is_refused_half_way_leaves_no_thread(ranks):
    assert ranks.run(2, _cannot_listen) == [[], []]


def _three_steps_alone(rank, **options):
    """A rank that has met nobody yet, and its model."""
    model = deep(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "local(1000) / none / gossip", **options)
    train(model, optimizer, rank, range(3))
    return model, handle, flat(model)


def _dies_in_the_merge(rank, world):
    from tacit.gossip import merge

    merge.RETURN_S = 0.0  # nobody starts it again
    model, handle, own = _three_steps_alone(rank)
    torch.distributed.barrier()
    if rank == 2:  # says that it is ready, and is never heard of again
        attached = handle._attachment
        attached._members.set("merge/1/1/2", "3 1.0")
        attached._members._closed.set()
        attached._peers.close()
    torch.distributed.barrier()
    apart = handle.divergence()  # its lease is still there
    if rank != 2:
        handle.merge()
    merged = flat(model)
    torch.distributed.barrier()
    handle.close()
    return own, merged, apart


def test_one_that_dies_in_a_merge_is_left_out_of_it_by_all(ranks):
    (zero, merged, apart), (one, same, also), _ = ranks.run(3, _dies_in_the_merge)
    assert torch.equal(merged, same)
    torch.testing.assert_close(merged, (zero + one) / 2)
    mean = (zero + one) / 2
    assert apart == pytest.approx(float((zero - mean).norm() / mean.norm()), rel=1e-4) == also


def _slow_and_fast(rank, world, folder):
    """Rank 0 takes 10 steps and waits in merge(); rank 1 takes 40 more, and meets it."""
    model = deep(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = f"{folder}/{rank}.jsonl"
    handle = tacit.attach(model, optimizer, "every / none / gossip", records=path)
    train(model, optimizer, rank, range(10))
    handle._attachment._peers.wait()
    dist.barrier()  # both have met, and call nobody any more
    if rank == 1:
        _await(lambda: handle._attachment._members.get("merge/1/1/0"))  # rank 0 waits
        train(model, optimizer, rank, range(10, 50))
        handle._attachment._peers.wait()
    handle._attachment._replica.gather_in()
    own, step = flat(model), handle.step
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle.merge()
    handle.close()
    told = list(records.read(Path(path)))
    met = [r["step"] for r in told if r["kind"] == "exchange" and r["outcome"] == "met"]
    shares = [r["shares"] for r in told if r["kind"] == "merge"]
    return own, flat(model), step, met, shares, [str(w.message) for w in warned]


def test_who_waits_in_a_merge_answers_and_holds_its_model_and_models_count_by_their_steps(ranks, tmp_path):
    zero, one = ranks.run(2, _slow_and_fast, str(tmp_path))
    assert (zero[2], one[2]) == (10, 50)
    assert sum(step > 10 for step in one[3]) >= 20  # met rank 0, which waited
    assert torch.equal(zero[1], one[1])
    torch.testing.assert_close(zero[1], (10 * zero[0] + 50 * one[0]) / 60)  # rank 0's is as it was
    for *_, shares, said in (zero, one):
        assert shares == [{"0": pytest.approx(1 / 6), "1": pytest.approx(5 / 6)}]
        assert [s for s in said if "weighs models by their steps, of 50: rank 0 with 10" in s]


def _not_finite(rank, world):
    model, handle, own = _three_steps_alone(rank)
    if rank == 1:
        with torch.no_grad():
            model[0][0].weight[0, 0] = float("nan")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle.merge()
    handle.close()
    return own, flat(model), [str(w.message) for w in warned]


def test_a_model_that_is_not_finite_is_left_out_of_a_merge_by_all(ranks):
    found = ranks.run(3, _not_finite)
    for _, merged, said in found:
        torch.testing.assert_close(merged, (found[0][0] + found[2][0]) / 2)
        assert torch.equal(merged, found[0][1])
        assert any("model of rank 1 is not finite" in sentence for sentence in said)


def _too_long(rank, world, folder):
    from tacit.gossip import merge

    path = f"{folder}/{rank}.jsonl"
    model, handle, own = _three_steps_alone(rank, records=path)
    peers = handle._attachment._peers
    settle, merge.WARNS_S, merge.MERGE_S = peers.settle, 0.02, 0.0

    def agreed():  # from here on models travel, and only that has a deadline
        merge.MERGE_S = 60.0
        settle()

    peers.settle = agreed
    if rank == 1:
        with torch.no_grad():
            model[0][0].weight[0, 0] = 1e30
        _await(lambda: handle._attachment._members.get("merge/1/1/0"))
        time.sleep(0.2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle.merge()
    handle.close()
    shares = [r["shares"] for r in records.read(Path(path)) if r["kind"] == "merge"]
    return own, flat(model), [str(w.message) for w in warned], shares


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_that_is_finite_and_far_too_long_is_left_out_of_a_merge_by_all(ranks, tmp_path, world):
    found = ranks.run(world, _too_long, str(tmp_path))
    good = [own for rank, (own, *_) in enumerate(found) if rank != 1]
    for _, merged, said, shares in found:
        torch.testing.assert_close(merged, sum(good) / len(good))
        assert torch.equal(merged, found[0][1])
        assert len([s for s in said if "model of rank 1 is too long" in s]) == 1
        assert shares == [{str(r): 0.0 if r == 1 else 1 / (world - 1) for r in range(world)}]
    assert any("s for ranks [1] to merge; all that live must call merge()" in s for s in found[0][2])


# ---- without a process group: ranks that die and come back

_WORKER = """
import json, sys, time
import torch
sys.path.insert(0, sys.argv[1])
from toys import deep, flat, loss_of, train
import tacit

import os
stop = sys.argv[2]
rank = int(os.environ["RANK"])
model = deep(seed=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
handle = tacit.attach(model, optimizer, "every / none / gossip", records=sys.argv[3])
print("attached", float(flat(model).norm()), flush=True)
slowest = 0.0
for step in range(20000):
    if os.path.exists(stop):
        break
    began = time.monotonic()
    train(model, optimizer, rank, range(step, step + 1))
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.005)
handle.merge()
print(json.dumps({"slowest": slowest, "sum": float(flat(model).double().sum()), "loss": float(loss_of(model, 99, 0))}), flush=True)
handle.close()
"""


_SLOW_WORKER = """
import os, sys, time
import torch
sys.path.insert(0, sys.argv[1])
from toys import deep, flat, train
import tacit

rank = int(os.environ["RANK"])
model = deep(seed=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
handle = tacit.attach(model, optimizer, "adaptive / hush / gossip", records=sys.argv[3])
print("attached", handle.step, flush=True)
while handle.step < 30:
    train(model, optimizer, rank, range(handle.step, handle.step + 1))
    time.sleep(2.0 if rank == 2 else 0.0)
print("waits", flush=True)
handle.merge()
print(float(flat(model).double().sum()), flush=True)
handle.close()
"""


class Worker:
    """One rank as a process of its own."""

    def __init__(
        self, rank: int, port: int, folder: Path, life: int = 1, script: str = _WORKER, world: int = 4
    ) -> None:
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TACIT_STORE": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        here = str(Path(__file__).parents[1])
        words = ["-c", script, here, f"{folder}/stop", f"{folder}/{rank}-{life}.jsonl"]
        self.process = Forked(words, env)
        self.rank = rank

    def line(self) -> str:
        return str(self.process.stdout.readline())

    def end(self) -> str:
        out, err = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, err[-3000:]
        return out.splitlines()[-1]


def test_a_killed_rank_is_missed_by_nobody_and_comes_back_with_a_live_model(tmp_path):
    import json

    store = StoreServer(("127.0.0.1", 0), "")
    workers = [Worker(rank, store.address[1], tmp_path) for rank in range(4)]
    try:
        for worker in workers:
            assert worker.line().startswith("attached")
        _await(lambda: _met(tmp_path / "2-1.jsonl") >= 3)
        workers[2].process.send_signal(signal.SIGKILL)
        workers[2].process.communicate()
        workers[2] = Worker(2, store.address[1], tmp_path, life=2)
        assert workers[2].line().startswith("attached")
        _await(lambda: _met(tmp_path / "2-2.jsonl") >= 60)  # it meets again, and they learn
        (tmp_path / "stop").touch()
        told = [json.loads(worker.end()) for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        store.close()
    assert len({report["sum"] for report in told}) == 1  # the same bits on all four
    assert all(report["loss"] < 0.9 for report in told), told


def test_one_that_dies_while_the_others_wait_for_it_comes_back_to_their_model_and_their_merge(tmp_path):
    from tacit.gossip.members import LEASE_S

    store = StoreServer(("127.0.0.1", 0), "")
    workers = [Worker(rank, store.address[1], tmp_path, script=_SLOW_WORKER, world=3) for rank in range(3)]
    try:
        assert [worker.line() for worker in workers] == ["attached 0\n"] * 3
        assert [worker.line() for worker in workers[:2]] == ["waits\n"] * 2
        workers[2].process.send_signal(signal.SIGKILL)
        workers[2].process.communicate()
        time.sleep(LEASE_S + 2)  # the others do not leave when its lease has run out
        workers[2] = Worker(2, store.address[1], tmp_path, life=2, script=_SLOW_WORKER, world=3)
        assert workers[2].line() == "attached 30\n"
        told = [worker.end() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        store.close()
    assert len(set(told)) == 1  # the same bits on all three


def _met(path: Path) -> int:
    return (
        sum(r["kind"] == "exchange" and r["outcome"] == "met" for r in records.read(path))
        if path.exists()
        else 0
    )


def _await(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
