"""EF21: differences to what all know, which vanish where gradients settle."""

import pytest
import torch

from tacit.codecs import Ef21, ErrorFeedback, Sign, TopK
from tacit.errors import PairingError
from tacit.memory import MemoryStore, merged_of
from tacit.requests import LocalMemory, loop_back
from tacit.strategy import parse_codec
from tacit.testing import nmse, vectors


def steps_of(codec, inputs, count, memories):
    return [loop_back(codec, inputs, memories=memories, step=step)[0].total for step in range(count)]


@pytest.mark.parametrize("inner", [Sign(), TopK(share=0.1)], ids=str)
def test_constant_gradients_are_known_exactly_in_time_however_ranks_differ(inner):
    """|x - h|^2 shrinks by 1 - alpha in every step; `ef` stays as far off as one step leaves it."""
    inputs = vectors("windows", 3, 4096)
    found = {}
    for codec in (Ef21(inner), ErrorFeedback(inner)):
        totals = steps_of(codec, inputs, 100, [LocalMemory(x) for x in inputs])
        found[type(codec)] = [nmse(totals[step], inputs) for step in (0, 20, 99)]
    first, middle, last = found[Ef21]
    assert last < 0.01 * first and last < middle < first
    assert found[ErrorFeedback][-1] > 10 * last


def test_the_update_is_the_papers():
    """h_i += C(x_i - h_i), total = sum of h_i, written out for one rank and an exact adder."""
    codec, x = Ef21(Sign(64)), vectors("gauss", 1, 64)[0]
    memory, h = LocalMemory(x), torch.zeros(64)
    for step in range(5):
        reduced = loop_back(codec, [x], memories=[memory], step=step, scheme="ideal")[0]
        moved = x - h
        h = h + moved.abs().mean() * torch.where(moved < 0, -1.0, 1.0)
        torch.testing.assert_close(reduced.total, h, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(memory.vector("h"), h, rtol=1e-5, atol=1e-6)


def test_the_mean_that_all_hold_stays_the_mean_of_what_each_sent_in_another_world_too():
    codec, inputs = Ef21(Sign(64)), vectors("gauss", 4, 500)
    from tacit.layout import Layout

    layout = Layout.flat(500)
    stores = [MemoryStore() for _ in inputs]
    memories = [store.of(layout, torch.device("cpu")) for store in stores]
    steps_of(codec, inputs, 6, memories)
    own = torch.stack([m.vector("h") for m in memories]).mean(0)
    torch.testing.assert_close(own, memories[2].vector("mean of h"), rtol=0, atol=1e-5)
    merged = merged_of([store.state() for store in stores])
    fewer = [MemoryStore() for _ in range(2)]
    for store in fewer:
        store.load(merged)
    memories = [store.of(layout, torch.device("cpu")) for store in fewer]
    steps_of(codec, inputs[:2], 80, memories)
    own = torch.stack([m.vector("h") for m in memories])
    torch.testing.assert_close(own.mean(0), memories[0].vector("mean of h"), rtol=0, atol=1e-5)
    assert nmse(own.sum(0), inputs[:2]) < 0.01


def test_a_nan_reaches_all_ranks_once():
    codec, inputs = Ef21(Sign(64)), vectors("gauss", 2, 256)
    memories = [LocalMemory(x) for x in inputs]
    steps_of(codec, inputs, 3, memories)
    broken = [inputs[0].clone(), inputs[1]]
    broken[0][70] = torch.inf
    for own in loop_back(codec, broken, memories=memories, step=3):
        assert not own.total[64:128].isfinite().any() and own.total[:64].isfinite().all()
    assert all(m.vector(slot).isfinite().all() for m in memories for slot in ("h", "mean of h"))
    totals = steps_of(codec, inputs, 60, memories)
    assert nmse(totals[-1], inputs) < 0.05


@pytest.mark.parametrize("text", ["ef21(qsgd)", "ef21(signsgd)", "ef21(ef(sign))", "ef21(lowrank(2))"])
def test_what_does_not_contract_or_remembers_is_refused_in_one_sentence(text):
    with pytest.raises(PairingError, match=r"^ef21\(.*\): [^\n]*$"):
        parse_codec(text)
