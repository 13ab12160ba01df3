"""The demo's tasks: real data, the same everywhere, judged on what was held out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tacit.demo.facts import TASKS, ring_allreduce_nbytes
from tacit.demo.tasks import BUCKET_MB, BUILDERS, CONTEXT, ByteModel, stdlib_text


@pytest.fixture(params=sorted(BUILDERS))
def name(request: pytest.FixtureRequest) -> str:
    if (need := TASKS[request.param].needs) is not None:
        pytest.importorskip(need)
    return str(request.param)


def test_a_task_gives_the_same_data_and_the_same_batches_each_time(name: str) -> None:
    one, other = BUILDERS[name](), BUILDERS[name]()
    assert one.data_sha256 == other.data_sha256
    batches = [task.batch(torch.Generator().manual_seed(3)) for task in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


def test_an_untrained_model_is_near_chance_on_what_was_held_out(name: str) -> None:
    task = BUILDERS[name]()
    torch.manual_seed(0)
    with torch.no_grad():
        judged = task.evaluate(task.model())
    assert judged < 0.3 if TASKS[name].higher_is_better else 5.0 < judged < 6.5  # ln 256 = 5.55


def test_the_byte_model_has_about_a_million_parameters_in_several_buckets() -> None:
    nbytes = 4 * nn.utils.parameters_to_vector(ByteModel().parameters()).numel()
    assert 0.5e6 < nbytes / 4 < 1e6 and nbytes > 3 * 2**20 * BUCKET_MB


def test_the_byte_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model, text = ByteModel(), torch.randint(256, (1, CONTEXT))
    changed = text.clone()
    changed[0, 50] = (changed[0, 50] + 1) % 256
    with torch.no_grad():
        difference = (model(text) - model(changed)).abs().amax(1)[0]
    assert difference[:50].max() < 1e-5 < difference[50]


def test_the_corpus_is_python_source_of_a_few_megabytes() -> None:
    assert b"\ndef " in stdlib_text() and 1e6 < len(stdlib_text()) <= 4e6


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 100), (4, 150)])
def test_a_ring_sends_two_n_minus_one_nths(ranks: int, sent: float) -> None:
    assert ring_allreduce_nbytes(100, ranks) == sent
