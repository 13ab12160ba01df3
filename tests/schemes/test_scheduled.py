"""Schedules run for real: on every rank the bits that the contract says, and not a byte more than the schedule's."""

import hashlib
import os
import signal
import time
from functools import partial, reduce

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, loss_of, train

import tacit
from tacit.errors import ConfigError, PairingError
from tacit.requests import even_cuts
from tacit.schedules import SCHEDULES, Phase, Schedule, Stage, ring
from tacit.schemes import SCHEMES, AllReduce, Channel, Scheduled, Server, Sharded
from tacit.schemes.scheduled import plan_for, plan_of
from tacit.strategy import Strategy

NUMELS = (0, 1, 7, 100_003)
CODED = ("bf16", "thc", "thc(granularity=255)", "hush")  # 255 x 4 ranks need 16-bit lanes


def inputs(world, numel):
    return [torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank)) for rank in range(world)]


# ---- schedules made to be difficult: not good ones ----


def everybody(world):
    """One stage: everybody sends everything to everybody, and all add the same numbers in the same order."""
    src, dst = np.nonzero(~np.eye(world, dtype=bool))
    return Schedule("everybody", world, 1, (Phase(Stage.of(src, dst, add=True)),) if world > 1 else ())


def uneven(world):
    """Rank 1 adds runs of chunks that overlap in part; what they lack comes by two aggregators, on ranks 0 and 1."""
    low, high = world, world + 1
    up = [(0, 1, 0, 4), (0, high, 4, 2), (2, low, 0, 2), (2, 1, 2, 4)] + [
        (r, 1, 0, 6) for r in range(3, world)
    ]
    up = Stage.of(*np.array([t for t in up if t[0] < world]).T, add=True)
    over = Stage.of(
        [low, high] if world > 2 else high, 1, chunk=[0, 4] if world > 2 else 4, count=2, add=True
    )
    down = [Stage.of(1, 0, chunk=np.arange(6))] + (
        [Stage.of(0, np.arange(2, world), count=6)] if world > 2 else []
    )
    return Schedule(
        "uneven", world, 6, tuple(map(Phase, [up, over, *down])) if world > 1 else (), aggregators=2
    )


def swapped(world):
    """When all have the sum, everybody copies it from a neighbour: copies that arrive where a send reads."""
    rank = np.arange(world)
    swap = (Phase(Stage.of(rank, (rank + 1) % world)),) if world > 1 else ()
    return Schedule("swapped", world, 1, everybody(world).phases + swap)


DIFFICULT = {"everybody": everybody, "uneven": uneven, "swapped": swapped}
PLAIN = [Scheduled(name) for name in SCHEDULES]
OTHERS = [
    Scheduled("double_tree", pieces=3),
    Scheduled("hierarchical", group=2),
    Scheduled("tree_of_stars", fan=2),
    Scheduled("sharded", direct=True),
    Scheduled("wrht", wavelengths=1),
    Scheduled("wrht", wavelengths=2, group=2, all_to_all=True),
]


def transfers(stage):
    """(source, destination, first chunk, chunks, adds) each."""
    columns = (stage.src, stage.dst, stage.chunk, stage.count, stage.add)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def reference(schedule, vectors):
    """The contract, word for word, in one process: what every rank ends with."""
    cuts = even_cuts(len(vectors[0]), schedule.chunks)
    held = np.stack([v.numpy() for v in vectors] + [np.zeros_like(vectors[0])] * schedule.aggregators)
    for stage in schedule.stages():
        before, sources = held.copy(), {}
        for src, dst, first, count, add in transfers(stage):
            for chunk in range(first, first + count):
                sources.setdefault((dst, chunk), [dst] if add else []).append(src)
        for (dst, chunk), nodes in sources.items():
            run = slice(cuts[chunk], cuts[chunk + 1])
            held[dst, run] = reduce(np.add, [before[node, run] for node in sorted(nodes)])
    return list(torch.from_numpy(held[: schedule.world]))


def counted_nbytes(schedule, numel, itemsize):
    """Bytes that leave each rank: every transfer but those between an aggregator and the rank that hosts it."""
    cuts, sent = even_cuts(numel, schedule.chunks), [0] * schedule.world
    for stage in schedule.stages():
        for src, dst, first, count, _ in transfers(stage):
            if src % schedule.world != dst % schedule.world:
                sent[src % schedule.world] += itemsize * (cuts[first + count] - cuts[first])
    return sent


# ---- the same on all ranks, and what the contract says ----


def _heard(wire, who, codec, x):
    from tacit.exchange import converse
    from tacit.requests import LocalMemory, context_for
    from tacit.stats import Stats

    context = context_for(LocalMemory(x), seed=0, step=0, bucket="b", rank=wire.rank, world=wire.world)
    kept = x.clone()
    total = converse(Channel(wire, who), codec.reduce(x, context), context.own_seed, Stats(), "0").total
    assert torch.equal(x, kept)
    return total


def _bits(x):
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def _all_schedules(rank, world, plain, others):
    from tacit.attachments.handle import own_group
    from tacit.requests import Payload, Sum
    from tacit.strategy import parse_codec
    from tacit.transports import Wire

    SCHEDULES.update(DIFFICULT)
    wire, found = Wire(own_group(None, None)), {}
    for who in [*plain, *others, *map(Scheduled, DIFFICULT)]:
        for numel in NUMELS:
            wire.sent_nbytes = 0
            total = who.sum(wire, Sum(Payload.dense(inputs(world, numel)[rank])), 0)
            assert total.count == world
            found[str(who), "none", numel] = total.value, wire.sent_nbytes
    for who in [AllReduce(), *plain]:
        for text in CODED:
            total = _heard(wire, who, parse_codec(text), inputs(world, NUMELS[-1])[rank])
            found[str(who), text, NUMELS[-1]] = total, None
    digests = {where: (_bits(total), sent) for where, (total, sent) in found.items()}
    return digests, found if rank == 0 else None


@pytest.mark.parametrize("world", [4, 5, 8])
def test_every_schedule_gives_all_ranks_the_same_bits_and_the_sum(ranks, world):
    schedules = {str(who): who.schedule(world) for who in [*PLAIN, *OTHERS]}
    schedules |= {name: make(world) for name, make in DIFFICULT.items()}
    answers = ranks.run(world, _all_schedules, PLAIN, OTHERS)
    found, digests = answers[0][1], [digest for digest, _ in answers]
    assert len(found) == len(NUMELS) * len(schedules) + len(CODED) * (1 + len(PLAIN))
    for where, (total, _) in found.items():
        name, text, numel = where
        other = found.get(("allreduce", text, numel), [None])[0]
        assert total.shape == (numel,), where
        assert len({digest[where][0] for digest in digests}) == 1, where
        if text == "none":
            schedule, vectors = schedules[name], inputs(world, numel)
            assert torch.equal(total, reference(schedule, vectors)[0]), where
            torch.testing.assert_close(total, torch.stack(vectors).sum(0), rtol=1e-5, atol=1e-5)
            assert [digest[where][1] for digest in digests] == counted_nbytes(schedule, numel, 4), where
        elif text.startswith("thc"):
            assert torch.equal(total, other), where
        else:
            rounding = 0.02 if text == "bf16" else 1e-5  # of hush, only the norms are floats
            assert (total - other).norm() <= rounding * other.norm(), where


def test_counted_bytes_are_what_the_schedule_says_of_itself():
    for name, make in SCHEDULES.items():
        schedule = make(8)
        said = schedule.sent_chunks() * 4 * 10
        if not schedule.aggregators:
            assert counted_nbytes(schedule, 10 * schedule.chunks, 4) == said.tolist(), name


@pytest.mark.parametrize("make", DIFFICULT.values())
def test_the_difficult_schedules_sum(make):
    for world in (1, 2, 4, 5, 8):
        total = reference(make(world), inputs(world, 7))
        assert all(torch.equal(total[0], other) for other in total)
        torch.testing.assert_close(total[0], sum(inputs(world, 7)), rtol=1e-5, atol=1e-5)


# ---- plans ----


def test_a_plan_holds_one_rank_s_transfers_only():
    start = time.monotonic()
    plan = plan_for(ring(4096), 77)
    assert len(plan.steps) == 2 * 4095 and plan.spare == 1 and plan.guests == ()
    assert all(len(step.sends) == len(step.arrivals) == 1 for step in plan.steps)
    assert not any(arrival.at_once for step in plan.steps[:4095] for arrival in step.arrivals)
    assert all(arrival.at_once for step in plan.steps[4095:] for arrival in step.arrivals)
    assert time.monotonic() - start < 20
    assert plan_of(Scheduled("ring"), 5, 3) is plan_of(Scheduled("ring"), 5, 3)


def test_aggregators_live_on_ranks_in_turn():
    assert [plan_for(uneven(4), rank).guests for rank in range(4)] == [(4,), (5,), (), ()]


def test_a_copy_that_meets_a_send_is_put_aside():
    plan = plan_for(swapped(4), 2)
    assert plan.steps[-1].arrivals[0].at_once is False
    assert plan.steps[-1].folds[0].adds is False and plan.spare == 3


# ---- text, options, pairings ----


@pytest.mark.parametrize("who", [*PLAIN, *OTHERS], ids=str)
def test_every_schedule_is_a_scheme_whose_text_reads_back(who):
    strategy = Strategy.parse(f"bf16 / {who}")
    assert strategy.who == who and str(strategy) == f"every / bf16 / {who}"
    assert Strategy.parse(str(strategy)) == strategy and hash(strategy) == hash(Strategy.parse(str(strategy)))
    strategy.check(8)


def test_the_schemes_that_decode_keep_their_names():
    assert isinstance(Strategy.parse("none / sharded").who, Sharded)
    assert isinstance(Strategy.parse("none / server").who, Server)
    assert str(Scheduled("sharded")) == "sharded_schedule" and str(Scheduled("server")) == "server_schedule"


def _with_options(world: int, group: int = 2, order: tuple[int, ...] = (), way: str = "left") -> Schedule:
    if group < 2:
        raise ConfigError(f"group={group}: a group has 2 ranks or more")
    if world % group:
        raise ConfigError(f"{world} ranks are no groups of {group}")
    return ring(world)


@pytest.fixture
def optional(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "optional", _with_options)
    monkeypatch.setitem(SCHEMES, "optional", partial(Scheduled, "optional"))


@pytest.mark.usefixtures("optional")
@pytest.mark.parametrize(
    ("text", "written"),
    {
        "optional": "optional",
        "optional(2)": "optional",
        "optional(5)": "optional(group=5)",
        "optional(group=70, order=[1, 2])": "optional(group=70, order=(1, 2))",
        "optional(way=right, group=3)": "optional(group=3, way=right)",
        "optional(way='2 left')": "optional(way='2 left')",
        "optional(group=3, way='5/2 */7')": "optional(group=3, way='5/2 */7')",
    }.items(),
)
def test_options_are_written_in_one_way(text, written):
    strategy = Strategy.parse(f"none / {text}")
    assert str(strategy) == f"every / none / {written}"
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.usefixtures("optional")
@pytest.mark.parametrize(
    ("text", "message"),
    {
        "none / ring(speed=2)": "schedule 'ring' does not fit its options (none): it has no option 'speed'",
        "none / ring(world=2)": "schedule 'ring' does not fit its options (none): it has no option 'world'",
        "none / optional(groop=2)": "schedule 'optional' does not fit its options (group, order, way): it has no option 'groop'",
        "none / optional(group=1)": "group=1: a group has 2 ranks or more",
        "none / optional(ring)": "group=ring is no plain value",
        "none / wrht(wavelengths=0)": "wavelengths=0",
        "none / wrht(wavelengths=two)": "wavelengths=",
        "none / wrht(wavelengths=2, group=6)": "2 wavelengths serve groups of 5 at most",
        "none / torus(rows=0)": "rows=0",
        "none / double_tree(pieces=-1)": "pieces=-1",
        "none / hierarchical(group=(2, 3))": "group=(2, 3)",
        "none / tree_of_stars(16)": "schedule 'tree_of_stars' does not fit its options (fan): too many positional arguments",
        "none / rnig": "unknown scheme 'rnig'; did you mean 'ring'?",
        "int8 / ring": "int8(block=256) payloads cannot be added in flight by ring; write 'int8(block=256) / sharded'",
    }.items(),
)
def test_what_cannot_work_is_refused_when_it_is_built(text, message):
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("optional")
def test_what_this_world_cannot_serve_is_refused_when_the_world_is_known(monkeypatch):
    strategy = Strategy.parse("none / optional(group=3)")
    strategy.check(6)
    with pytest.raises(ConfigError, match="4 ranks are no groups of 3"):
        strategy.check(4)
    with pytest.raises(PairingError, match="lanes hold the sum of at most"):
        Strategy.parse("thc / ring").check(2000)
    with pytest.raises(ConfigError, match="unknown schedule 'rung'; did you mean 'ring'"):
        Scheduled("rung")
    gossip = Schedule("gossip", 2, 1, (Phase(Stage.of([0, 1], [1, 0], add=True)),), goal="meet")
    monkeypatch.setitem(SCHEDULES, "gossip", lambda world: gossip)
    with pytest.raises(ConfigError, match="ends in a meet, not in a sum"):
        Scheduled("gossip")


# ---- under the attachments ----


def _trained(rank, world, text):
    model = DDP(deep(layers=4), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tacit.attach(model, optimizer, text, bucket="20kB") as handle:
        train(model, optimizer, rank, range(4))
        return flat(model), handle.stats.as_dict()["sent_by_request"]


def test_ddp_trains_as_with_allreduce(ranks):
    for codec, scheme in (("none", "ring"), ("thc", "tree")):
        found = ranks.run(4, _trained, f"every / {codec} / {scheme}")
        plain = ranks.run(4, _trained, f"every / {codec} / allreduce")
        assert all(torch.equal(found[0][0], other[0]) for other in found)
        if codec == "none":
            torch.testing.assert_close(found[0][0], plain[0][0], rtol=1e-5, atol=1e-6)
            assert sum(f[1]["Sum"] for f in found) == sum(f[1]["Sum"] for f in plain)  # both are rings
        else:
            assert torch.equal(found[0][0], plain[0][0])


def _fsdp_grads(rank, world, text):
    model = fully_shard(deep(layers=2), mesh=init_device_mesh("cpu", (world,)))
    handle = tacit.attach(model, None, text) if text else None
    for step in range(2):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    grads = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    return grads, handle and handle.stats.as_dict()["sent_by_request"]


def test_under_fsdp2_sums_are_scattered_and_only_small_ones_take_the_schedule(ranks):
    plain = ranks.run(3, _fsdp_grads, None)[0][0]
    for text, limit in (("none / ring", 1e-5), ("hush / tree", 0.2)):
        found = ranks.run(3, _fsdp_grads, text)
        assert all(torch.equal(found[0][0], other[0]) for other in found)
        assert (found[0][0] - plain).norm() < limit * plain.norm(), text
        if text == "none / ring":  # as with any scheme: n - 1 rows leave, not 2 (n - 1)
            assert found[0][1] == ranks.run(3, _fsdp_grads, "none / sharded")[0][1]


def _replicas(rank, world, text):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = fully_shard(deep(layers=2), mesh=mesh["shard"])
    handle = tacit.attach(model, None, text, group=mesh.get_group("replica"))
    loss_of(model, rank, 0).backward()
    grads = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    return grads, handle.stats.as_dict()["sent_nbytes"]


def test_between_replicas_every_sum_takes_the_schedule(ranks):
    found, plain = ranks.run(4, _replicas, "none / ring"), ranks.run(4, _replicas, "none / allreduce")
    assert all(torch.equal(found[0][0], other[0]) for other in found)
    torch.testing.assert_close(found[0][0], plain[0][0], rtol=1e-5, atol=1e-7)
    assert [sent for _, sent in found] == [sent for _, sent in plain]


# ---- a rank that goes away ----


def _lose(rank, world, text, numel):
    """Rank 1 dies between two exchanges; the others tell what they see."""
    from tacit.attachments.handle import own_group
    from tacit.requests import Payload, Sum
    from tacit.transports import Wire

    wire, who = Wire(own_group(None, None)), Strategy.parse(text).who
    request = Sum(Payload.dense(torch.ones(numel)))
    who.answer(wire, request, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        who.answer(wire, request, 0)
        who.answer(wire, request, 0)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize(("text", "numel"), [("none / ring", 100), ("none / tree", 2_000_000)])
def test_a_rank_that_dies_ends_the_others_with_one_sentence(ranks, text, numel):
    ranks.start(4, _lose, text, numel, timeout_s=20)
    found = ranks.results(4)
    assert found[1] == ("died", -signal.SIGKILL)
    for rank in (0, 2, 3):
        kind, (name, message, after_s) = found[rank]
        assert kind == "ok" and name == "TransportError" and after_s < 25
        assert f"rank {rank} of 4 lost the exchange in a Sum" in message and "\n" not in message
        assert "restart all ranks from the last checkpoint" in message
