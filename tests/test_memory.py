import torch

from tacit.attachments.fsdp import Rows
from tacit.memory import Memory, Run, mean_of

CPU = torch.device("cpu")


def test_memory_is_keyed_by_parameter_and_survives_other_buckets():
    memory = Memory()
    memory.of(Run(("a", "b"), (2, 3)), CPU).vector("residual").copy_(torch.arange(5.0))
    state = memory.state()
    assert {n: t.tolist() for n, t in state["residual"].items()} == {"a": [0, 1], "b": [2, 3, 4]}
    other = Memory()
    other.load(state)
    assert other.of(Run(("b", "c"), (3, 1)), CPU).vector("residual").tolist() == [2, 3, 4, 0]
    assert other.of(Run(("a",), (2,)), CPU).vector("residual").tolist() == [0, 1]
    assert set(other.state()["residual"]) == {"a", "b", "c"}


def test_what_was_loaded_but_not_yet_used_is_saved_again():
    memory = Memory()
    memory.load({"residual": {"a": torch.ones(2)}})
    assert memory.state()["residual"]["a"].tolist() == [1, 1]


def test_fsdp_rows_hold_whole_parameters_for_any_world():
    numels, shapes = (15, 4), ((5, 3), (4,))
    whole = {"w": torch.arange(15.0), "b": torch.arange(4.0)}
    for world in (2, 3, 7):
        chunks = tuple(
            -(-shape[0] // world) * (numel // shape[0]) for shape, numel in zip(shapes, numels, strict=True)
        )
        rows = Rows(("w", "b"), numels, chunks, world)
        flat = rows.join(whole, like=torch.zeros(0))
        assert flat.numel() == rows.numel
        assert all(torch.equal(part, whole[name]) for name, part in rows.split(flat).items())


def test_in_another_world_every_rank_takes_the_mean_and_the_debt_stays_the_same():
    old = [{"residual": {"a": torch.full((2,), float(r))}} for r in range(4)]
    old[3]["residual"]["late"] = torch.ones(1)
    merged = mean_of(old)
    assert merged["residual"]["a"].tolist() == [1.5, 1.5]
    assert merged["residual"]["late"].tolist() == [0.25]
    debt_before = sum(o["residual"]["a"] for o in old) / 4
    debt_after = sum(merged["residual"]["a"] for _ in range(3)) / 3
    assert torch.equal(debt_before, debt_after)
