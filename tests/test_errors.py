"""Every error a user can cause: one sentence that names the value and the way out, on every rank, in time."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, loss_of, train

import tacit
from tacit.errors import ConfigError, PairingError, TacitError, TransportError
from tacit.requests import Lanes
from tacit.strategy import Strategy
from tacit.units import parse_rate, parse_size, parse_time

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and "Traceback" not in text
    assert 20 < len(text) < 700
    return text


BAD_TEXTS = {
    "": "has 1 parts; write 'when / what / who'",
    "every": "names no codec",
    "every / int8 / sharded / extra": "has 4 parts",
    "every // sharded": "write 'when / what / who'",
    "every / int9 / sharded": "unknown codec 'int9'; did you mean 'int8'?",
    "every / gzip / sharded": "known are none, fp16, bf16, int8, int4, fp8",
    "sometimes / int8 / sharded": "unknown rule 'sometimes'; known are every",
    "every / int8 / shared": "unknown scheme 'shared'; did you mean 'sharded'?",
    "every / int8( / sharded": "cannot be read",
    "every / int8(blok=2) / sharded": "does not fit its options (block, rounding): it has no option 'blok'",
    "every / int8(block=3) / sharded": "block=3: a block is an even number",
    "every / int8(block=two) / sharded": "block=two",
    "every / int8(rounding=up) / sharded": "choose stochastic (unbiased) or nearest",
    "every / int8(block=__import__('os')) / sharded": "is no plain value",
    "every / ef / sharded": "does not fit its options (inner, decay)",
    "every / ef(3) / sharded": "ef(3): an inner codec is needed",
    "every / ef(ef(int8)) / sharded": "already remembers",
    "every / int8 / allreduce": "cannot be added in flight by allreduce; write 'int8(block=256) / sharded'",
}


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_a_bad_strategy_text_is_refused_with_the_way_out(text):
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text)
    assert BAD_TEXTS[text] in one_sentence(caught.value)


def test_lanes_that_overflow_are_refused_when_the_world_is_known():
    with pytest.raises(PairingError) as caught:
        Lanes(bits=8, largest=30).check(9)
    assert "8-bit lanes hold the sum of at most 8 ranks" in one_sentence(caught.value)
    Lanes(bits=8, largest=30).check(8)
    from own_codec import Uniform4

    with pytest.raises(PairingError, match="at most 17 ranks"):
        Strategy(Strategy.parse("none").when, Uniform4(), Strategy.parse("int8").who).check(world=18)


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_size, "4", "has no unit"),
        (parse_rate, "10GB", "unknown unit 'GB'"),
        (parse_time, "soon", "is not a number"),
    ],
)
def test_a_number_without_its_unit_is_refused(parse, text, hint):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert hint in one_sentence(caught.value)


def test_models_and_options_that_cannot_be_attached_are_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for arguments, hint in (
        ((frozen, None), "no trainable parameter"),
        ((nn.Linear(2, 2, dtype=torch.complex64), None), "only real floating point"),
    ):
        with pytest.raises(ConfigError) as caught:
            tacit.attach(*arguments)
        assert hint in one_sentence(caught.value)
    with pytest.raises(ConfigError, match="at least one byte"):
        tacit.attach(nn.Linear(2, 2), None, bucket=0)


def _attach_own(rank, world, texts, seeds=(0, 0, 0)):
    try:
        tacit.attach(DDP(deep()), None, texts[rank], seed=seeds[rank])
    except TacitError as error:
        return type(error).__name__, str(error)


def test_different_strategies_are_found_out_on_all_ranks(ranks):
    for kind, text in ranks.run(3, _attach_own, ["int8", "int8", "int4"]):
        assert kind == "PairingError"
        assert "rank 0 attached 'every / int8(block=256) / sharded' and rank 2 attached 'every / int4" in text
    for kind, text in ranks.run(3, _attach_own, ["int8"] * 3, (0, 5, 0)):
        assert kind == "PairingError" and "rank 0 and rank 1" in text


def _lose(rank, world, wrap, how, static=False, wide=0):
    """Rank 1 goes away in the middle of a backward pass; the others tell what they see, and when."""
    model = deep()
    if wide:
        model = nn.Sequential(
            nn.Linear(64, wide), nn.Linear(wide, 64), model
        )  # long messages, in paced rounds
    model = DDP(model, bucket_cap_mb=0.02, static_graph=static) if wrap == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tacit.attach(model, optimizer, "int8", bucket="20kB")
    train(model, optimizer, rank, range(0 if static else 3))
    if rank == 1:
        middle = list(model.parameters())[8]
        middle.register_hook(lambda grad: os.kill(os.getpid(), how))
    start = time.monotonic()
    try:
        loss_of(model, rank, 3).backward()
    except Exception as error:
        first = (type(error).__name__, str(error), time.monotonic() - start)
    try:
        model.zero_grad()
        loss_of(model, rank, 4).backward()
    except Exception as error:
        return *first, str(error)


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_a_rank_that_dies_ends_the_others_with_one_sentence(ranks, wrap):
    ranks.start(3, _lose, wrap, signal.SIGKILL, timeout_s=20)
    found = ranks.results(3)
    assert found[1] == ("died", -signal.SIGKILL)
    for rank in (0, 2):
        kind, (name, text, after_s, again) = found[rank]
        assert kind == "ok" and name == "TransportError" and after_s < 25
        one_sentence(TransportError(text))
        assert (
            f"rank {rank} of 3 lost the exchange" in text
            and "restart all ranks from the last checkpoint" in text
        )
        assert (
            again if wrap == "ddp" else "lost the exchange" in again
        )  # DDP's own reducer refuses a second pass


@pytest.mark.parametrize(("static", "wide"), [(True, 0), (False, 8000)])
def test_a_rank_that_dies_in_the_first_static_pass_or_in_a_long_message_ends_the_others(ranks, static, wide):
    ranks.start(3, _lose, "ddp", signal.SIGKILL, static, wide, timeout_s=20)
    found = ranks.results(3)
    for rank in (0, 2):
        kind, (_, text, after_s, _) = found[rank]
        assert kind == "ok" and after_s < 25
        assert f"rank {rank} of 3 lost the exchange" in text


def test_a_rank_that_stalls_ends_the_others_within_the_time_out(ranks):
    ranks.start(3, _lose, "ddp", signal.SIGSTOP, timeout_s=6)
    stalled = ranks.process_id(1)
    found = {rank: ranks.result(rank) for rank in (0, 2)}
    os.kill(stalled, signal.SIGKILL)
    assert ranks.result(1) == ("died", -signal.SIGKILL)
    for rank, (kind, (name, text, after_s, _)) in found.items():
        assert kind == "ok" and name == "TransportError" and after_s < 20
        assert f"rank {rank} of 3" in text


def _nonfinite(rank, world, wrap, text):
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tacit").addHandler(handler)
    model = DDP(deep()) if wrap == "ddp" else deep()
    handle = tacit.attach(model, None, text, bucket="20kB")
    if rank == 1:
        next(model.parameters()).register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), torch.inf))
    for step in range(2):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    logging.getLogger("tacit").removeHandler(handler)
    first = next(model.parameters()).grad
    memory = handle.memory.state().get("residual", {})
    clean = all(bool(t.isfinite().all()) for t in memory.values())
    return bool(first.isfinite().all()), dict(handle.stats.nonfinite), messages, clean, len(memory)


@pytest.mark.parametrize("text", ["none", "bf16", "int8", "ef(int4)"])
@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_a_gradient_that_is_not_finite_is_seen_and_reported_by_all_ranks_and_not_remembered(
    ranks, wrap, text
):
    found = ranks.run(2, _nonfinite, wrap, text)
    for rank, (finite, counts, messages, clean, remembered) in enumerate(found):
        assert not finite and clean
        assert counts["0.0.weight"] == 2
        assert len(messages) == 1 and "step 0" in messages[0] and "0.0.weight" in messages[0]
        assert ("this rank's own" in messages[0]) == (rank == 1)
        assert (remembered > 0) == text.startswith("ef")


def test_an_error_is_one_short_printable_line_whatever_value_it_quotes():
    for value in ("x" * 100_000, "a\nb\x1b[31m\u202ec\x00", "\n" * 5000):
        text = str(ConfigError(f"value {value}: too odd; leave it out"))
        assert text.isprintable() and len(text) <= 600
        assert text.startswith("value ") and text.endswith("leave it out")
    assert str(ConfigError("a\nb\x1b[31m")) == "a b\\x1b[31m"
