"""A handle ends with what it sits on: refused, dropped or closed, it leaves no thread and no file behind, and plain exchange."""

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, loss_of, train

import tacit
from tacit.errors import ConfigError

KINDS = {
    "plain": "every / ef(int4) / sharded",
    "ddp": "every / ef(int4) / sharded",
    "fsdp2": "every / ef(int4) / sharded",
    "diloco": "diloco(2) / ef(int4) / sharded",
    "diloco among gradients": "diloco(2, after=9) / ef(int4) / sharded",
    "diloco after gradients": "diloco(2, after=2) / ef(int4) / sharded",
    "gossip": "every / ef(int4) / gossip",
}
ENDS = [
    (kind, end) for kind in KINDS for end in ("refused", "dropped") if (kind, end) != ("gossip", "dropped")
]


def _made(kind):
    model = deep(layers=2)
    if kind == "ddp":
        model = DDP(model)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def _attached(kind, text, **options):
    model, optimizer = _made(kind)
    return model, optimizer, tacit.attach(model, optimizer, text, **options)


def _whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def _open():
    """Files, threads of the process, and threads of tacit's, once those that are told to end have ended."""
    gc.collect()
    deadline = time.monotonic() + 10
    while (
        own := [t for t in threading.enumerate() if t.name.startswith("tacit")]
    ) and time.monotonic() < deadline:
        own[0].join(0.1)
        gc.collect()  # again: a thread that was just finishing a job may have held what was dropped
    files, threads = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))
    return files, threads, len(own)


def _refuse(kind, rank, folder):
    with pytest.raises(ConfigError):
        _attached(
            kind,
            KINDS[kind] if rank else KINDS[kind].replace("int4", "int8"),
            records=f"{folder}/{rank}.jsonl",
        )


def _drop(kind, rank, folder):
    model, optimizer, _ = _attached(kind, KINDS[kind], records=f"{folder}/{rank}.jsonl")
    train(model, optimizer, rank, range(3))


def _again_and_again(rank, world, kind, end, folder):
    once = _refuse if end == "refused" else _drop
    once(kind, rank, folder)
    before = _open()
    torch.distributed.barrier()  # a rank that goes on closes this one's connections to it
    for _ in range(5):
        once(kind, rank, folder)
    torch.distributed.barrier()
    deadline, after = time.monotonic() + 10, _open()
    while time.monotonic() < deadline and any(a > b for a, b in zip(after, before, strict=True)):
        time.sleep(0.1)  # threads of torch's end in their own time; what has leaked stays
        after = _open()
    return before, after


@pytest.mark.parametrize(("kind", "end"), ENDS)
def test_a_handle_that_was_refused_or_dropped_leaves_no_file_and_no_thread(ranks, tmp_path, kind, end):
    for before, after in ranks.run(2, _again_and_again, kind, end, str(tmp_path)):
        assert before[2] == after[2] == 0
        assert after[0] <= before[0] and after[1] <= before[1]


def _handle_dropped(rank, world, kind):
    """Whether ranks still exchange, and how many handles there are: the model keeps it."""
    model, optimizer, _ = _attached(kind, KINDS[kind])
    gc.collect()
    train(model, optimizer, rank, range(6))
    gc.collect()
    return flat(model), sum(isinstance(found, tacit.Handle) for found in gc.get_objects())


@pytest.mark.parametrize("kind", ["plain", "ddp", "diloco", "diloco among gradients"])
def test_ranks_exchange_on_when_only_the_handle_is_dropped(ranks, kind):
    (first, handles), (second, _) = ranks.run(2, _handle_dropped, kind)
    assert handles == 1 and torch.equal(first, second)


def _collected_by_one_rank(rank, world):
    """Rank 0 finds that a handle was dropped, the others do not; then all attach again, in a group that torch names by counting groups."""
    group = torch.distributed.new_group([0, 1])
    gc.disable()
    model, optimizer = _made("plain")
    tacit.attach(model, optimizer, KINDS["plain"], group=group)
    train(model, optimizer, rank, range(2))
    del model, optimizer
    if rank == 0:
        gc.collect()
    model, optimizer = _made("plain")
    with tacit.attach(model, optimizer, KINDS["plain"], group=group):
        train(model, optimizer, rank, range(2))
    gc.enable()
    return flat(model)


def test_a_rank_that_collects_a_dropped_handle_first_attaches_again_with_the_others(ranks):
    first, second = ranks.run(2, _collected_by_one_rank, timeout_s=20)
    assert torch.equal(first, second)


# ---- close()


def _closed(rank, world, kind, text):
    """Gradients of one step after close(), and what is left on parameters and optimizer."""
    model, optimizer, handle = (*_made(kind), None)
    if text is not None:
        handle = tacit.attach(model, optimizer, text)
        train(model, optimizer, rank, range(3))
        handle.close()
        handle.close()
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), _made(kind)[0].parameters(), strict=True):
                parameter.copy_(start)
    before = _open()[2]
    model.zero_grad()
    loss_of(model, rank, 7).backward()
    grads = [_whole(p.grad) for p in model.parameters()]
    left = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return grads, sum(left) + len(optimizer._optimizer_step_post_hooks) + before


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "diloco", "diloco among gradients"])
def test_close_gives_the_model_back_as_it_was(ranks, kind):
    """DDP and FSDP2 average in float32, with the bits of one that tacit never saw; a plain module's gradients are the rank's own."""
    closed, never = (ranks.run(2, _closed, kind, text) for text in (KINDS[kind], None))
    for (grads, left), (expected, _) in zip(closed, never, strict=True):
        assert left == 0
        assert all(torch.equal(got, grad) for got, grad in zip(grads, expected, strict=True))
    alike = all(torch.equal(a, b) for a, b in zip(closed[0][0], closed[1][0], strict=True))
    assert alike == (kind in ("ddp", "fsdp2"))


def _stepped(handle, steps):
    for _ in range(steps):
        handle.stepped(7)


def test_figures_are_logged_in_every_nth_step():
    logged = []
    with tacit.attach(deep()) as handle:
        handle.log_to(lambda scalars, step: logged.append((step, scalars["tacit/steps"])), every=3)
        _stepped(handle, 7)
    assert logged == [(3, 3), (6, 6)]


def test_a_dashboard_that_fails_costs_a_warning_and_not_the_training():
    def log(scalars, step):
        raise ConnectionError("the service\nis away")

    with tacit.attach(deep()) as handle:
        handle.log_to(log, every=1)
        with pytest.warns(
            UserWarning, match=r"step 1: figures could not be logged \(the service is away\)"
        ) as heard:
            _stepped(handle, 3)
    assert len(heard) == 1 and handle.step == 3


@pytest.mark.parametrize("every", [0, -1, 2.5, "often"])
def test_steps_between_two_logs_are_a_positive_whole_number(every):
    with (
        tacit.attach(deep()) as handle,
        pytest.raises(ConfigError, match="steps between two logs, 1 or more"),
    ):
        handle.log_to(print, every=every)
