"""The proof is exact: it agrees with a plain run on multisets, catches every broken schedule, and names the fault."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedules.cases import ALL

from tacit.errors import ScheduleError
from tacit.schedules import (
    Phase,
    Schedule,
    Stage,
    recursive_doubling,
    ring,
    ring_all_gather,
    sharded,
    star,
    tree,
)

Rows = list[list[list[int]]]  # stages of transfers: source, destination, first chunk, how many, add
quick = settings(max_examples=200, deadline=None, derandomize=True)
worlds = st.integers(2, 9)
names = st.sampled_from(sorted(ALL))
sums = st.sampled_from(sorted(name for name in ALL if ALL[name](4).goal == "sum"))


def rows_of(schedule: Schedule) -> Rows:
    parts = ("src", "dst", "chunk", "count", "add")
    return [
        [list(row) for row in zip(*(getattr(stage, part).tolist() for part in parts), strict=True)]
        for stage in schedule.stages()
    ]


def with_rows(schedule: Schedule, rows: Rows) -> Schedule:
    stages = [Stage.of(*zip(*stage, strict=True)) if stage else Stage.of([], []) for stage in rows]
    return replace(schedule, phases=tuple(Phase(stage) for stage in stages))


def run_plainly(schedule: Schedule) -> list[list[Counter[int]]] | None:
    """What every node ends with of every chunk, as a multiset of contributors; None where the order would decide."""
    world = schedule.world
    starts = {
        "sum": lambda r, c: True,
        "gather": lambda r, c: r == c,
        "exchange": lambda r, c: r == c // world,
    }
    mine = starts[schedule.goal]
    held = [
        [Counter([r] if r < world and mine(r, c) else []) for c in range(schedule.chunks)]
        for r in range(schedule.nodes)
    ]
    for stage in rows_of(schedule):
        heard: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for src, dst, chunk, count, add in stage:
            for c in range(chunk, chunk + count):
                heard.setdefault((dst, c), []).append((src, add))
        after = [list(row) for row in held]
        for (dst, c), told in heard.items():
            if len(told) > 1 and not all(add for _, add in told):
                return None
            after[dst][c] = sum(
                (held[src][c] for src, _ in told), Counter(held[dst][c]) if told[0][1] else Counter()
            )
        held = after
    return held


def reaches_its_goal(schedule: Schedule) -> bool:
    held, world = run_plainly(schedule), schedule.world
    if held is None:
        return False
    everybody = Counter(range(world))
    for r in range(world):
        for c in range(schedule.chunks):
            owner = {"sum": None, "gather": c, "exchange": c // world}[schedule.goal]
            asked = schedule.goal != "exchange" or c % world == r
            if asked and held[r][c] != (everybody if owner is None else Counter([owner])):
                return False
    return True


def fault_of(schedule: Schedule) -> str | None:
    try:
        schedule.verify()
    except ScheduleError as fault:
        return str(fault)
    return None


def assert_the_message_is_true(schedule: Schedule, message: str) -> None:
    """A named rank, chunk and contributor must be what the plain run shows."""
    if "so the order would decide" in message:
        assert run_plainly(schedule) is None
        return
    rank, chunk = (int(g) for g in re.search(r"rank (\d+) ends with chunk (\d+) that ", message).groups())
    held = run_plainly(schedule)[rank][chunk]
    lacks, twice = (
        re.search(r"lacks the contribution of rank (\d+)", message),
        re.search(r"counts rank (\d+) twice", message),
    )
    assert lacks or twice
    if lacks:
        assert held[int(lacks[1])] == 0
    if twice:
        assert held[int(twice[1])] > 1
    assert bool(twice) == any(times > 1 for times in held.values())


def pick(data: st.DataObject, name: str, world: int) -> tuple[Schedule, Rows, int, int]:
    """A schedule, its transfers, and one of them, by stage and place."""
    schedule = ALL[name](world)
    rows = rows_of(schedule)
    places = [(k, i) for k, stage in enumerate(rows) for i in range(len(stage))]
    assume(places)
    return schedule, rows, *data.draw(st.sampled_from(places))


def text(row: list[int]) -> str:
    src, dst, chunk, count, add = row
    return f"{src} -> {dst} (chunks {chunk}..{chunk + count - 1}, {'add' if add else 'copy'})"


@pytest.mark.parametrize("world", [1, 2, 5, 8])
@pytest.mark.parametrize("name", [name for name in ALL if "gossip" not in name])
def test_a_plain_run_on_multisets_reaches_the_goal_too(name, world):
    assert reaches_its_goal(ALL[name](world))


@given(name=names, world=worlds, data=st.data())
@quick
def test_a_dropped_transfer_is_caught_and_the_rank_that_lacks_it_named(name, world, data):
    # Nothing is sent in vain: in all schedules here every rank gets every contribution on one way only.
    schedule, rows, k, i = pick(data, name, world)
    dropped = rows[k].pop(i)
    message = fault_of(with_rows(schedule, rows))
    if schedule.goal == "meet":
        turned = text([dropped[1], dropped[0], *dropped[2:]])
        assert f"stage {k} is not a matching: the transfer {turned} has no answer" in message
    else:
        assert "lacks the contribution of rank" in message and "twice" not in message
        assert_the_message_is_true(with_rows(schedule, rows), message)


@given(name=names, world=worlds, data=st.data())
@quick
def test_a_doubled_transfer_is_caught_and_named(name, world, data):
    # In the same stage. Later on, a second copy of what a rank has already is harmless.
    schedule, rows, k, i = pick(data, name, world)
    doubled = rows[k][i]
    rows[k].insert(data.draw(st.integers(0, len(rows[k]))), doubled)
    message = fault_of(with_rows(schedule, rows))
    if schedule.goal == "meet":
        assert f"stage {k} is not a matching: the transfer {text(doubled)} " in message
    elif doubled[4]:
        assert (
            f"twice, first in stage {k} by the transfer {text(doubled)}" in message and "lacks" not in message
        )
        assert_the_message_is_true(with_rows(schedule, rows), message)
    else:
        assert f"stage {k}: node {doubled[1]} receives chunk {doubled[2]} more than once" in message
        assert f"{text(doubled)}, {text(doubled)}" in message


@given(name=names, world=worlds, data=st.data())
@quick
def test_a_misdirected_transfer_is_caught_unless_the_plain_run_shows_that_it_does_no_harm(name, world, data):
    schedule, rows, k, i = pick(data, name, world)
    others = [node for node in range(schedule.nodes) if node not in rows[k][i][:2]]
    assume(others)
    rows[k][i][1] = data.draw(st.sampled_from(others))
    broken = with_rows(schedule, rows)
    message = fault_of(broken)
    if schedule.goal == "meet":
        assert f"stage {k} is not a matching" in message
        return
    assert (message is None) == reaches_its_goal(broken)
    if message:
        assert_the_message_is_true(broken, message)
    else:
        assert k < len(rows) - 1  # nobody mends the last stage


@given(name=sums, world=worlds, data=st.data())
@quick
def test_a_copy_for_an_add_and_an_add_for_a_copy_are_caught(name, world, data):
    schedule, rows, k, i = pick(data, name, world)
    row = rows[k][i]
    alone = sum(other[1:3] == row[1:3] for other in rows[k]) == 1
    row[4] = not row[4]
    broken = with_rows(schedule, rows)
    if (
        not row[4] and alone and row[1] >= world
    ):  # an aggregator that holds nothing yet, told by one: no difference
        broken.verify()
        return
    message = fault_of(broken)
    assert_the_message_is_true(broken, message)
    if row[4]:
        assert f"twice, first in stage {k} by the transfer {text(row)}" in message
    elif alone:
        assert "lacks the contribution of rank" in message
    else:
        assert f"stage {k}: node {row[1]} receives chunk {row[2]} more than once" in message


@pytest.mark.parametrize(
    "name", ["ring_all_gather", "neighbour_exchange", "direct_all_gather", "shift_all_to_all"]
)
def test_adding_to_nothing_is_the_same_as_copying(name):
    schedule = ALL[name](6)
    rows = [[[*row[:4], True] for row in stage] for stage in rows_of(schedule)]
    with_rows(schedule, rows).verify()


@pytest.mark.slow
@given(name=names, world=st.integers(2, 6), edits=st.integers(1, 4), data=st.data())
@settings(quick, max_examples=400)
def test_whatever_is_changed_the_proof_agrees_with_the_plain_run(name, world, edits, data):
    schedule = ALL[name](world)
    assume(schedule.goal != "meet" and schedule.phases)
    rows = rows_of(schedule)
    for _ in range(edits):
        stage = data.draw(st.sampled_from(rows))
        src = data.draw(st.integers(0, schedule.nodes - 1))
        dst = data.draw(st.integers(0, schedule.nodes - 1).filter(lambda node, src=src: node != src))
        chunk = data.draw(st.integers(0, schedule.chunks - 1))
        new = [src, dst, chunk, data.draw(st.integers(1, schedule.chunks - chunk)), data.draw(st.booleans())]
        place = data.draw(st.integers(0, len(stage)))
        stage[place : place + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from([[], [new]]))
    changed = with_rows(schedule, rows)
    message = fault_of(changed)
    assert (message is None) == reaches_its_goal(changed)
    if message:
        assert_the_message_is_true(changed, message)


@given(name=names, world=st.integers(2, 12), data=st.data())
@settings(quick, max_examples=60)
def test_small_blocks_of_memory_give_the_same_verdict(name, world, data):
    schedule, rows, k, i = pick(data, name, world)
    rows[k].pop(i)
    whole = fault_of(with_rows(schedule, rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tacit.schedules.verify._BLOCK_NBYTES", 200)
        schedule.verify()
        blockwise = fault_of(with_rows(schedule, rows))
    assert whole is not None and blockwise is not None


def test_contributors_are_proven_in_blocks_too(monkeypatch):
    monkeypatch.setattr("tacit.schedules.verify._BLOCK_NBYTES", 2000 * 8)
    tree(200).verify()
    rows = rows_of(tree(200))
    rows[0].pop()
    with pytest.raises(
        ScheduleError, match="rank 0 ends with chunk 0 that lacks the contribution of rank 199: "
    ):
        with_rows(tree(200), rows).verify()


def test_who_is_overwritten_is_told_by_whom():
    rows = rows_of(tree(4))
    rows[0][0][4] = False
    with pytest.raises(ScheduleError) as fault:
        with_rows(tree(4), rows).verify()
    assert str(fault.value) == (
        "tree: rank 0 ends with chunk 0 that lacks the contribution of rank 0: "
        "it was overwritten in stage 0 by the transfer 1 -> 0 (chunks 0..0, copy)"
    )


def test_who_is_never_told_is_named():
    with pytest.raises(ScheduleError) as fault:
        with_rows(star(3), rows_of(star(3))[:1]).verify()
    assert str(fault.value) == (
        "star: rank 0 ends with chunk 0 that lacks the contribution of rank 1 and 1 more: no transfer brings it the chunk"
    )


def test_a_double_count_that_is_overwritten_in_time_is_no_fault():
    add, copy = (lambda src, dst: [src, dst, 0, 1, True]), (lambda src, dst: [src, dst, 0, 1, False])
    # after two of them 1 counts itself twice
    stages = [
        [add(1, 2)],
        [add(2, 1)],
        [add(2, 0)],
        [copy(0, 1), copy(0, 2)],
    ]
    with_rows(tree(3), stages).verify()
    with pytest.raises(ScheduleError) as fault:
        with_rows(tree(3), [*stages[:3], [copy(0, 2)]]).verify()
    assert str(fault.value) == (
        "tree: rank 1 ends with chunk 0 that lacks the contribution of rank 0: the last transfer of the chunk to it, "
        "2 -> 1 (chunks 0..0, add) in stage 1, comes without; "
        "it also counts rank 1 twice, first in stage 1 by the transfer 2 -> 1 (chunks 0..0, add)"
    )


def test_a_misdirected_transfer_can_make_another_all_reduce():
    rows = rows_of(recursive_doubling(4))
    assert rows[0][0] == [0, 1, 0, 1, True]
    rows[0][0][1] = 3
    with_rows(recursive_doubling(4), rows).verify()


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([0, 9, 0, 1, 1], "stage 2: the transfer 0 -> 9 (chunks 0..0, add) names a node outside 0..3"),
        ([-1, 0, 0, 1, 1], "stage 2: the transfer -1 -> 0 (chunks 0..0, add) names a node outside 0..3"),
        ([1, 1, 0, 1, 0], "stage 2: the transfer 1 -> 1 (chunks 0..0, copy) sends to itself"),
        ([0, 1, 3, 2, 0], "stage 2: the transfer 0 -> 1 (chunks 3..4, copy) names chunks outside 0..3"),
        ([0, 1, -1, 1, 0], "stage 2: the transfer 0 -> 1 (chunks -1..-1, copy) names chunks outside 0..3"),
        ([0, 1, 0, 0, 0], "stage 2: the transfer 0 -> 1 (chunks 0..-1, copy) names chunks outside 0..3"),
    ],
)
def test_a_transfer_that_makes_no_sense_is_named(row, fault):
    rows = rows_of(ring(4))
    rows[2].append(row)
    with pytest.raises(ScheduleError) as refused:
        with_rows(ring(4), rows).verify()
    assert str(refused.value) == f"ring: {fault}"


def test_a_phase_that_leaves_the_vector_half_way_is_caught():
    # in the last stage chunks 3..4
    phase = Phase(Stage.of(0, 1, chunk=0, count=2), times=4, stride=1, span=4)
    with pytest.raises(
        ScheduleError, match="stage 3: the transfer 0 -> 1 \\(chunks 3..4, copy\\) names chunks outside 0..3"
    ):
        Schedule("own", 2, 4, (phase,)).verify()


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (replace(ring_all_gather(4), chunks=5), "5 chunks; gather among 4 ranks needs 4"),
        (replace(ring_all_gather(4), goal="exchange"), "4 chunks; exchange among 4 ranks needs 16"),
        (replace(ring(4), chunks=0), "0 chunks; sum among 4 ranks needs 1 or more"),
        (replace(ring(4), goal="mean"), "no goal is called 'mean'"),
    ],
)
def test_a_goal_that_does_not_fit_is_named(schedule, fault):
    with pytest.raises(ScheduleError, match=fault):
        schedule.verify()


def test_popcounts_are_the_same_without_numpy_2(monkeypatch):
    monkeypatch.delattr("numpy.bitwise_count", raising=False)
    sharded(70, direct=True).verify()
    rows = rows_of(star(70))
    rows[0].append(rows[0][5])
    with pytest.raises(ScheduleError, match="counts rank 5 twice, first in stage 0 by the transfer 5 -> 70"):
        with_rows(star(70), rows).verify()
