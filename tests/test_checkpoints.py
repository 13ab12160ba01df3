"""A state is loaded as a whole, or refused in one sentence with nothing changed."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile.states import damaged, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, loss_of, own_state, train

import tacit
from tacit.checkpoints import Place, key_of, pick, processes_in
from tacit.errors import CheckpointError

NUMELS = {"a": 1}


def _state(rank, world=2, **changed):
    kept = {"residual": {"a": torch.full((1,), float(rank))}}
    return {
        "format": 1, "strategy": "s", "world": world, "rank": rank, "lane": 0, "step": 5, "seed": 0, "memory": kept,
    } | changed  # fmt: skip


def test_a_rank_picks_its_own_state_or_asks_for_all():
    states = [_state(rank) for rank in range(2)]
    named = {key_of(rank): (state,) for rank, state in enumerate(states)}
    for given in (states, {"ranks": states}, named, [{key_of(r): (s,)} for r, s in enumerate(states)]):
        assert pick(given, Place(1, 2), "s", NUMELS) is states[1]
        assert pick(given, Place(2, 3), "s", NUMELS)["memory"]["residual"]["a"].tolist() == [0.5]
    for place in (Place(0, 3), Place(1, 2)):
        with pytest.raises(CheckpointError, match=r"states of all 2 ranks.* handle\.resharded\(checkpoint\)"):
            pick({key_of(0): (states[0],)}, place, "s", NUMELS)


def test_a_state_without_a_lane_is_one_of_an_older_tacit_and_loads():
    older = _state(0)
    del older["lane"]
    assert pick(older, Place(0, 2, lane=1), "s", NUMELS) is older


def test_in_another_world_a_rank_takes_the_mean_of_those_it_exchanges_with():
    """Two hosts of two with a strategy between the hosts: the first ranks of both, and the second ones, exchange with each other."""
    states = [_state(host, lane=place) for host in range(2) for place in range(2)]
    for index, state in enumerate(states):
        state["memory"] = {"residual": {"a": torch.full((1,), float(index))}}
    for lane, mean in ((0, 1.0), (1, 2.0)):
        found = pick(states, Place(0, 3, lane), "s", NUMELS)
        assert found["memory"]["residual"]["a"].tolist() == [mean]
    with pytest.raises(CheckpointError, match="beginning with process 5"):
        pick(states, Place(0, 3, 5), "s", NUMELS)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([_state(0), _state(0)], "2 states claim to be rank 0 of 2"),
        ([_state(0, world=2), _state(1, world=3)], r"worlds of \[2, 3\] ranks"),
        ([_state(0, world=10**15)], "of 1000000000000000: pass a list"),
        ([_state(0, world=10**30)], "'world' is 1000"),
        ([_state(2)], "'rank' is 2 in the checkpoint, and must be below world=2"),
        ([], "no state of tacit"),
        ([[_state(0)]], "no state of tacit"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(states, said):
    with pytest.raises(CheckpointError, match=said):
        pick(states, Place(0, 2), "s", NUMELS)


def test_the_names_of_states_are_found_below_any_prefix():
    assert processes_in(["tacit.tacit_rank10", "a.b.tacit_rank2", "tacit_rank0", "tacit_rankx", "rank3"]) == [
        0,
        2,
        10,
    ]


# ---- damaged states, in three kinds of training

STRATEGIES = [
    "every / ef(int4) / sharded",
    "diloco(2) / ef(int4) / sharded",
    "adaptive(0.02) / none / gossip",
]


def _attacked(rank, world, text, attack):
    model = deep(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, text, bucket="8kB")
    train(model, optimizer, rank, range(5))
    handle.load_state_dict(handle.state_dict())  # who gossips meets nobody from here on until it steps
    torch.distributed.barrier()
    counts = {"tried": 0, "refused": 0, "changed": 0, "long": 0}
    if attack:
        good = own_state(handle)
        for state in damaged(good):
            counts["tried"] += 1
            before = own_state(handle), flat(model)
            try:
                handle.load_state_dict(state)
            except CheckpointError as error:
                counts["refused"] += 1
                counts["long"] += "\n" in str(error) or len(str(error)) > 500
                counts["changed"] += not (
                    same(own_state(handle), before[0]) and torch.equal(flat(model), before[1])
                )
            else:
                handle.load_state_dict(good)
    torch.distributed.barrier()
    if "gossip" not in text:  # whose ranks meet when they like
        train(model, optimizer, rank, range(5, 8))
    handle.close()
    return counts, flat(model)


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_damaged_state_is_loaded_as_a_whole_or_refused_with_nothing_changed(ranks, text):
    found = ranks.run(2, _attacked, text, True)
    for counts, _ in found:
        assert counts["tried"] >= 240 and counts["refused"] > 0.7 * counts["tried"]
        assert counts["changed"] == counts["long"] == 0
    if "gossip" not in text:
        for (_, model), (_, expected) in zip(found, ranks.run(2, _attacked, text, False), strict=True):
            assert torch.equal(model, expected)


# ---- through torch.distributed.checkpoint, where several processes are the same rank


def _two_shards(rank, world, path, load):
    """FSDP2 in hosts of two, the strategy between the hosts."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replica", "shard"))
    model = deep(layers=2)
    fully_shard(model, mesh=mesh["shard"])
    handle = tacit.attach(model, None, "ef(int4)", group=mesh.get_group("replica"))
    if load:
        dcp.load({"tacit": handle.resharded(path)}, checkpoint_id=path)
    else:
        for step in range(2):
            loss_of(model, rank, step).backward()
        dcp.save({"tacit": handle}, checkpoint_id=path)
    return handle.memory.state()["residual"]


@pytest.mark.parametrize("hosts", [2, 3])
def test_each_shard_takes_the_memories_of_its_own_kind(ranks, tmp_path, hosts):
    saved = ranks.run(4, _two_shards, str(tmp_path), False)
    for process, found in enumerate(ranks.run(2 * hosts, _two_shards, str(tmp_path), True)):
        for name, kept in found.items():
            mean = (saved[process % 2][name] + saved[process % 2 + 2][name]) / 2
            assert torch.equal(kept, saved[process][name] if hosts == 2 else mean)


def _without(rank, world, path):
    model = deep(layers=1)
    handle = tacit.attach(model, None, "ef(int4)")
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    found = []
    for place in (path, f"{path}/nowhere"):
        with pytest.raises(CheckpointError) as refused:
            handle.resharded(place)
        found.append(str(refused.value))
    return found


def test_a_checkpoint_without_tacits_state_is_refused(ranks, tmp_path):
    for none, nowhere in ranks.run(2, _without, str(tmp_path)):
        assert "holds no state of tacit" in none and "nowhere is no checkpoint" in nowhere


# ---- the page about it

PAGE = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def _as_the_page_says(rank, world, code, path, steps):
    model = DDP(deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = tacit.attach(model, optimizer, "every / ef(int4) / sharded", bucket="20kB")
    names = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "handle": handle,
        "rank": rank,
        "path": path,
    }
    if steps.start == 0:
        train(model, optimizer, rank, steps)
        exec(code, names)
    else:
        exec(code, names)
        train(model, optimizer, rank, steps)
    return flat(model), handle.memory.state()["residual"]


@pytest.mark.parametrize("way", range(3))
def test_the_snippets_of_the_page_resume_to_the_same_bits(ranks, tmp_path, way):
    save, load = SNIPPETS[2 * way : 2 * way + 2]
    whole = ranks.run(2, _as_the_page_says, "", str(tmp_path), range(6))
    saved = ranks.run(2, _as_the_page_says, save, str(tmp_path), range(4))
    resumed = ranks.run(2, _as_the_page_says, load, str(tmp_path), range(4, 6))
    for (bits, _), (got, _) in zip(whole, resumed, strict=True):
        assert torch.equal(got, bits)
    if way:  # all ranks' states are there: any world can go on
        for _, kept in ranks.run(3, _as_the_page_says, load, str(tmp_path), range(4, 4)):
            for name in kept:
                assert torch.equal(kept[name], (saved[0][1][name] + saved[1][1][name]) / 2)
    assert len(SNIPPETS) == 6


# ---- tensors in a state


def _with_tensors(rank, parts, rule="first", world=2):
    return _state(rank, world) | {"memory": {"q": {"a": {"rule": rule, "parts": parts}}}}


@pytest.mark.parametrize(
    ("parts", "rule", "said"),
    [
        ({"": [1.0]}, "first", "not a dense tensor"),
        ({0: torch.zeros(2)}, "first", "not a dense tensor"),
        ({"": torch.zeros(1).expand(2**40)}, "first", "not a dense tensor"),
        ({"": torch.eye(2).to_sparse()}, "first", "not a dense tensor"),
        ({"": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "first", "not a dense tensor"),
        ({"": torch.tensor([torch.nan])}, "first", "not finite"),
        ({"": torch.zeros(2, device="meta")}, "first", "not finite"),
        ({"": torch.ones(2, dtype=torch.int8)}, "mean", "has no mean"),
        ({"": torch.ones(2)}, "median", "not a rule and tensors by part"),
        ([torch.ones(2)], "first", "not a rule and tensors by part"),
    ],
)
def test_damaged_tensors_are_refused_in_one_sentence(parts, rule, said):
    for place in (Place(0, 2), Place(0, 3)):
        with pytest.raises(CheckpointError, match=said):
            pick([_with_tensors(rank, parts, rule) for rank in range(2)], place, "s", NUMELS)


@pytest.mark.parametrize(
    "other",
    [
        _with_tensors(1, {"": torch.ones(3)}, "mean"),
        _with_tensors(1, {"": torch.ones(2).double()}, "mean"),
        _with_tensors(1, {"": torch.ones(2)}, "first"),
        _with_tensors(1, {}, "reset"),
        _state(1) | {"memory": {"q": {"a": torch.ones(1)}}},
    ],
)
def test_tensors_that_differ_in_kind_between_ranks_cannot_be_merged(other):
    states = [_with_tensors(0, {"": torch.ones(2)}, "mean"), other]
    with pytest.raises(CheckpointError, match="differs in kind or shape between ranks"):
        pick(states, Place(0, 3), "s", NUMELS)


def test_tensors_of_a_parameter_that_the_model_lacks_are_refused():
    with pytest.raises(CheckpointError, match="does not exist in this model"):
        pick(_with_tensors(0, {"": torch.ones(2)}), Place(0, 2), "s", {"b": 1})
