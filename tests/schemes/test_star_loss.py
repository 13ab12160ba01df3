"""`star(loss=...)`: nobody waits for a late rank, all ranks hold the same bits, and what is left out comes later."""

import time

import pytest
import torch
from schemes.aggregators import Aggregator, attached, link_of, strategy_of
from toys import deep, flat, loss_of

import tacit
from tacit.errors import ConfigError, PairingError
from tacit.schemes import Star, presence
from tacit.strategy import Strategy

WORLD, LATE, AT = 3, 2, 6  # ranks, which of them is late, and in which step
PAUSE_S = 0.6


@pytest.fixture(scope="module")
def shared():
    aggregator = Aggregator()
    yield aggregator
    aggregator.close()


@pytest.fixture(scope="module")
def roomy():
    """Whose jobs keep the sums of many steps."""
    aggregator = Aggregator(slots=4096)
    yield aggregator
    aggregator.close()


def _train_with_a_late_rank(rank, world, codec, at, steps, dies=None):
    """What this rank holds, what was left out, and which way its sums took."""
    import os
    import signal

    model, optimizer, handle = attached(codec, at, loss=0.01, forgets=codec == "none")
    with handle:
        for step in range(steps):
            if rank == LATE and step == AT:
                time.sleep(PAUSE_S)
            if rank == 0 and step == AT + 1 and dies is not None:
                os.kill(dies, signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return flat(model), handle.stats.as_dict(), link_of(handle).through, link_of(handle).changes


@pytest.mark.parametrize("codec", ["ef(randomk(0.3))", "none"])
def test_ranks_hold_the_same_bits_after_one_was_late(ranks, shared, codec):
    found = ranks.run(WORLD, _train_with_a_late_rank, codec, shared.at, 12)
    for own in found[1:]:
        assert torch.equal(own[0], found[0][0])
        assert own[1]["left_out_by_rank"] == found[0][1]["left_out_by_rank"]
    left_out = found[0][1]["left_out_by_rank"]
    assert left_out[str(LATE)] > 0 and found[0][1]["partial_chunks"] >= left_out[str(LATE)]
    assert all(own[2] >= 5 * 12 and own[3] == 0 for own in found)  # all sums went through


def test_a_late_rank_gets_all_that_it_lacks_when_the_aggregator_dies(ranks):
    aggregator = Aggregator()
    try:
        found = ranks.run(
            WORLD, _train_with_a_late_rank, "ef(none)", aggregator.at, 12, aggregator.process.pid
        )
    finally:
        aggregator.close()
    assert all(torch.equal(own[0], found[0][0]) and own[3] == 1 for own in found)


def test_a_sum_says_who_is_in_it_and_is_scaled_up_to_the_world():
    torch.manual_seed(0)
    world, numel, elements = 45, 100, 24  # 45 ranks take three lanes
    own = [torch.randn(numel) for _ in range(world)]
    packets = [presence.framed(x, elements, rank) for rank, x in enumerate(own)]
    present = torch.rand(5, world) < 0.9
    present[0] = True
    total = torch.zeros(5, elements)
    for rank, packet in enumerate(packets):
        total += packet * present[:, rank, None]
    found = [presence.read(total.clone(), x, world, rank) for rank, x in enumerate(own)]
    for each in found:
        assert torch.equal(each.present, present) and torch.equal(each.value, found[0].value)
    which = torch.arange(numel) // 20  # chunk of an element
    mean = sum(x * present[which, rank] for rank, x in enumerate(own)) / present.sum(1)[which]
    torch.testing.assert_close(found[0].value / world, mean)
    shares = sum(x - each.lost for x, each in zip(own, found, strict=True))
    torch.testing.assert_close(shares, found[0].value, rtol=1e-5, atol=1e-5)  # they add up to the total
    whole = presence.read(packets[0], own[0], 1, 0)
    assert whole.lost is None and torch.equal(whole.value, own[0])


def test_what_is_not_finite_stays_so_and_harms_no_other_chunk():
    x = torch.ones(40)
    x[3] = float("nan")
    found = presence.read(presence.framed(x, 24, 0), x, 1, 0)
    assert found.present.all() and found.value.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("every / bf16 / star(loss=0.01)", PairingError, r"keeps nothing.*'ef\(bf16\)'.*forgets=True"),
        ("every / ef(thc) / star(loss=0.01)", PairingError, r"integers in a common scale.*leave loss= out"),
        ("every / lowrank(2, p=none, q=none, rest=none) / star(loss=0.01)", PairingError, r"leave loss= out"),
        ("local(4) / ef(bf16) / star(loss=0.01)", PairingError, r"merges models"),
        (
            "every / exact(ef(bf16), until=9) / star(loss=0.01)",
            PairingError,
            r"exact steps go past.*'ef\(bf16\)'",
        ),
        ("every / ef(bf16) / star(loss=1)", ConfigError, r"loss=1: the share"),
        ("every / ef(bf16) / star(loss=True)", ConfigError, r"loss=True: the share"),
        ("every / ef(bf16) / star(loss=0.1, deadline_ms=0)", ConfigError, r"deadline_ms=0: 1 to 60000"),
        ("every / ef(bf16) / star(loss=0.1, deadline_ms=2.5)", ConfigError, r"deadline_ms=2.5: 1 to 60000"),
        ("every / ef(bf16) / star(loss=0.1, forgets=2)", ConfigError, r"forgets=2: True or False"),
        ("every / ef(bf16) / star(deadline_ms=5)", ConfigError, r"are for star\(loss=...\)"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(text, error, match):
    with pytest.raises(error, match=match):
        Strategy.parse(text)


def test_it_is_off_unless_loss_is_given_and_is_written_as_it_is_read():
    assert Star().loss == 0
    text = "every / ef(bf16) / star(loss=0.01, deadline_ms=5)"
    assert str(Strategy.parse(text)) == text
    Strategy.parse("every / bf16 / star(loss=0.01, forgets=True)")
    with pytest.raises(PairingError, match=r"world 65.*at most 64"):
        Strategy.parse(text).check(65)


def _train_and_catch_up(rank, world, kind, at, steps):
    """The late rank asks before each step whether it has been missed; what it holds, and how many steps it did not compute."""
    if kind == "ddp":
        model, optimizer, handle = attached("ef(none)", at, loss=0.01)
    else:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = tacit.attach(model, optimizer, strategy_of("ef(none)", at, loss=0.01), bucket="20kB")
    missed = 0
    with handle:
        for step in range(steps):
            if rank == LATE and step == AT:
                time.sleep(PAUSE_S)
            optimizer.zero_grad()
            if handle.missed():
                missed += 1
            else:
                loss_of(model, rank, step).backward()
            optimizer.step()
            time.sleep(0.01)
        return flat(model), missed, handle.stats.as_dict()


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_a_late_rank_skips_what_the_others_have_finished_without_it(ranks, roomy, kind):
    found = ranks.run(WORLD, _train_and_catch_up, kind, roomy.at, 30)
    assert all(torch.equal(own[0], found[0][0]) for own in found)
    assert found[LATE][1] >= 2 and found[LATE][2]["steps"] == 30
    for rank, (_, missed, stats) in enumerate(
        found
    ):  # on a busy machine others are late too: nobody skips who was in
        assert missed == 0 or stats["left_out_by_rank"][str(rank)] > 0


def test_buffers_that_ddp_would_send_in_every_forward_are_refused(ranks, shared):
    for error in ranks.run(2, _attach_with_buffers, shared.at):
        assert "broadcast_buffers=False" in error


def _attach_with_buffers(rank, world, at):
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    )
    with pytest.raises(ConfigError) as caught:
        tacit.attach(model, None, strategy_of("ef(none)", at, loss=0.01))
    return str(caught.value)
