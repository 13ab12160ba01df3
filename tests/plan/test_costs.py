"""What a strategy costs a device: the operations and bytes of its requests, without a network."""

import pytest

from tacit.errors import PairingError
from tacit.plan.candidates import every_choice, parsed_choices
from tacit.plan.costs import cost_of, measurable
from tacit.plan.dry import DryWire
from tacit.shapes import requests_of
from tacit.strategy import Strategy

NUMELS = (1 << 12, 1 << 16)


@pytest.mark.parametrize(
    "text", ["int8", "int4", "hush", "thc", "none / sharded", "bf16", "lowrank(4)", "topk"]
)
def test_a_dry_exchange_sends_what_the_codec_declares(text):
    strategy = Strategy.parse(text)
    found = cost_of(text, 4, numels=NUMELS, repeats=1)
    assert found.choice == str(strategy) and len(found.requests) == strategy.what.traits.rounds
    asked = requests_of(strategy.what, NUMELS[-1], 4)
    assert [request.kind for request in found.requests] == [each.kind for each in asked]
    assert found.lossy == (not strategy.what.traits.exact) and found.sent_nbytes[1] > found.sent_nbytes[0] > 0


def test_bytes_of_an_operation_are_those_of_the_wire():
    sharded = cost_of("int8", 4, numels=NUMELS, repeats=1)
    payload = Strategy.parse("int8").what.nbytes(NUMELS[-1])
    (sent, came) = sharded.requests[0].uses
    assert (sent.operation, came.operation) == ("all_to_all short", "all_to_all short")
    assert sent.nbytes[-1] == pytest.approx(payload / 4) and sharded.sent_nbytes[-1] == pytest.approx(
        2 * 3 / 4 * payload
    )
    reduced = cost_of("bf16", 4, numels=NUMELS, repeats=1)
    assert reduced.requests[0].uses[0].operation == "all_reduce bfloat16" and reduced.in_flight == 2
    assert reduced.requests[0].uses[0].nbytes == (2.0 * NUMELS[0], 2.0 * NUMELS[1])


def test_a_hook_of_ddp_is_a_cast_and_a_sum():
    found = cost_of("DDP fp16", 4, numels=NUMELS, repeats=1)
    assert (
        found.requests[0].uses[0].operation == "all_reduce float16"
        and found.sent_nbytes[-1] == 1.5 * 2 * NUMELS[-1]
    )
    assert found.lossy and not cost_of("DDP", 4, numels=NUMELS, repeats=1).lossy


def test_a_dry_wire_gives_back_what_another_rank_could_have_sent():
    import torch

    wire = DryWire(3)
    parts = [torch.arange(4.0), torch.arange(4.0), torch.arange(3.0)]
    assert [part.tolist() for part in wire.all_to_all(parts, [4, 4, 2])] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1],
    ]
    assert wire.used == [("all_to_all short", 16.0)] and wire.sent_nbytes == 4 * 7


def test_every_valid_choice_is_compared_once():
    found = every_choice(4)
    assert found[:3] == ("DDP", "DDP fp16", "DDP bf16") and len(set(found)) == len(found)
    assert "every / int8(block=256) / sharded" in found and "every / none / allreduce" in found
    assert not any("/ server" in each or "/ gossip" in each for each in found)


@pytest.mark.parametrize("world", [2, 4])
def test_every_choice_that_is_compared_can_be_measured(world):
    choices = every_choice(world)
    assert measurable(choices, world) == dict.fromkeys(choices, "")


def test_a_merge_is_answered_with_the_own_payload():
    once, twice = (
        sum(use.nbytes[-1] for use in cost_of("gtopk", world, numels=NUMELS, repeats=1).requests[0].uses)
        for world in (2, 4)
    )
    assert twice == 2 * once > 0


def test_a_choice_that_fails_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setattr(DryWire, "exchange", lambda *_: 1 / 0)
    found = measurable(["DDP", "every / gtopk / sharded"], 2)
    assert found["DDP"] == "" and "ZeroDivisionError" in found["every / gtopk / sharded"]


def test_choices_are_read_as_strategies_or_baselines():
    assert parsed_choices(["ddp", "int8", "DDP BF16", "int8"], 4) == (
        "DDP",
        "every / int8(block=256) / sharded",
        "DDP bf16",
    )
    with pytest.raises(PairingError):
        parsed_choices(["thc(bits=4, granularity=30) / allreduce"], 1 << 13)
