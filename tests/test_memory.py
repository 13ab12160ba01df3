import pytest
import torch

from tacit.attachments.fsdp import ShardRows
from tacit.errors import CheckpointError, ConformanceError
from tacit.layout import Layout
from tacit.memory import MemoryStore, merged_of

CPU = torch.device("cpu")


def test_memory_is_keyed_by_parameter_and_survives_other_buckets():
    memory = MemoryStore()
    memory.of(Layout.of({"a": (2,), "b": (3,)}), CPU).vector("residual").copy_(torch.arange(5.0))
    state = memory.state()
    assert {n: t.tolist() for n, t in state["residual"].items()} == {"a": [0, 1], "b": [2, 3, 4]}
    other = MemoryStore()
    other.load(state)
    assert other.of(Layout.of({"b": (3,), "c": (1,)}), CPU).vector("residual").tolist() == [2, 3, 4, 0]
    assert other.of(Layout.of({"a": (2,)}), CPU).vector("residual").tolist() == [0, 1]
    assert set(other.state()["residual"]) == {"a", "b", "c"}


def test_what_was_loaded_but_not_yet_used_is_saved_again():
    memory = MemoryStore()
    memory.load({"residual": {"a": torch.ones(2)}})
    assert memory.state()["residual"]["a"].tolist() == [1, 1]


def test_fsdp_rows_hold_whole_parameters_for_any_world():
    numels, shapes = (15, 4), ((5, 3), (4,))
    whole = {"w": torch.arange(15.0), "b": torch.arange(4.0)}
    for world in (2, 3, 7):
        chunks = tuple(
            -(-shape[0] // world) * (numel // shape[0]) for shape, numel in zip(shapes, numels, strict=True)
        )
        rows = ShardRows(("w", "b"), numels, chunks, world)
        flat = rows.join(whole, like=torch.zeros(0))
        assert flat.numel() == rows.numel
        assert all(torch.equal(part, whole[name]) for name, part in rows.split(flat).items())


def test_in_another_world_every_rank_takes_the_mean_and_the_debt_stays_the_same():
    old = [{"residual": {"a": torch.full((2,), float(r))}} for r in range(4)]
    old[3]["residual"]["late"] = torch.ones(1)
    merged = merged_of(old)
    assert merged["residual"]["a"].tolist() == [1.5, 1.5]
    assert merged["residual"]["late"].tolist() == [0.25]
    debt_before = sum(o["residual"]["a"] for o in old) / 4
    debt_after = sum(merged["residual"]["a"] for _ in range(3)) / 3
    assert torch.equal(debt_before, debt_after)


LAYOUT = Layout.of({"w": (4, 3), "b": (2,)})


def test_tensors_of_any_shape_and_dtype_are_kept_by_parameter():
    memory = MemoryStore()
    bucket = memory.of(LAYOUT, CPU)
    bucket.tensor("residual8", "w", (4, 3), rule="reset", dtype=torch.int8).fill_(-7)
    bucket.tensor("count", "b", (), rule="first", dtype=torch.int64).add_(5)
    assert bucket.tensor("q", "w", (3,), rule="mean", init=lambda: torch.ones(3)).tolist() == [1, 1, 1]
    other = MemoryStore()
    other.load(memory.state())
    alone = other.of(Layout.of({"w": (4, 3)}), CPU)  # another bucket
    assert alone.tensor("residual8", "w", (4, 3), rule="reset", dtype=torch.int8).unique().tolist() == [-7]
    assert other.state()["count"]["b"]["parts"][""].item() == 5  # not used yet, and saved again
    with pytest.raises(KeyError):
        bucket.tensor("q", "x", (3,), rule="mean")


def test_a_tensor_may_have_a_length_that_changes_and_states_are_copies_of_it():
    memory = MemoryStore()
    bucket = memory.of(LAYOUT, CPU)
    kept = bucket.tensor("q", "w", (None, 3), rule="first", init=lambda: torch.ones(2, 3))
    assert kept.shape == (2, 3)
    state = memory.state()
    kept.resize_(5, 3).fill_(7.0)
    assert bucket.tensor("q", "w", (None, 3), rule="first").tolist() == [[7.0] * 3] * 5
    assert state["q"]["w"]["parts"][""].tolist() == [[1.0] * 3] * 2
    other = MemoryStore()
    other.load(memory.state())
    again = other.of(LAYOUT, CPU).tensor("q", "w", (None, 3), rule="first", init=lambda: torch.ones(2, 3))
    assert again.shape == (5, 3) and again.data_ptr() != kept.data_ptr()
    with pytest.raises(CheckpointError, match=r"the codec asks for torch.float32 of \(None, 4\)"):
        bucket.tensor("q", "w", (None, 4), rule="first")
    with pytest.raises(ConformanceError, match="needs init="):
        bucket.tensor("p", "w", (None, 3), rule="first")


@pytest.mark.parametrize(("rule", "value"), [("mean", 1.5), ("first", 0.0), ("reset", 9.0)])
def test_in_another_world_tensors_follow_their_rule(rule, value):
    stores = [MemoryStore() for _ in range(4)]
    for rank, store in enumerate(stores):
        store.of(LAYOUT, CPU).tensor("q", "w", (1,), rule=rule).fill_(float(rank))
    new = MemoryStore()
    new.load(merged_of([store.state() for store in stores]))
    found = new.of(LAYOUT, CPU).tensor("q", "w", (1,), rule=rule, init=lambda: torch.full((1,), 9.0))
    assert found.item() == value


def test_what_cannot_be_kept_is_refused():
    bucket = MemoryStore().of(LAYOUT, CPU)
    for rule, dtype in (("median", torch.float32), ("mean", torch.int8)):
        with pytest.raises(ConformanceError, match="write 'mean'"):
            bucket.tensor("q", "w", (3,), rule=rule, dtype=dtype)
    bucket.tensor("q", "w", (3,), rule="first")
    bucket.vector("residual")
    for ask in (lambda: bucket.vector("q"), lambda: bucket.tensor("residual", "w", (3,), rule="first")):
        with pytest.raises(ConformanceError, match="use two names"):
            ask()
    with pytest.raises(CheckpointError, match=r"is torch.float32 of \(3,\) and the codec asks for"):
        bucket.tensor("q", "w", (4,), rule="first")
