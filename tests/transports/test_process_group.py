"""Long messages between all pairs: in rounds where links are slow, together where they are fast, the same either way."""

import pytest
import torch

NUMELS = ((100_000, 3, 0), (70_000, 200_000, 1), (0, 5, 66_000))  # from each rank to each


def _all_pairs(rank, world, paced):
    from tacit.attachments.handle import own_group
    from tacit.transports import Wire

    wire = Wire(own_group(None, None))
    wire.paced = paced
    parts = [torch.full((NUMELS[rank][to],), 10 * rank + to, dtype=torch.int16) for to in range(world)]
    received = wire.all_to_all(parts, [NUMELS[source][rank] for source in range(world)])
    return received, wire.sent_nbytes


@pytest.mark.parametrize("paced", [True, False], ids=["in rounds", "together"])
def test_every_rank_receives_what_was_meant_for_it(ranks, paced):
    for rank, (received, sent) in enumerate(ranks.run(3, _all_pairs, paced)):
        for source, part in enumerate(received):
            assert torch.equal(
                part, torch.full((NUMELS[source][rank],), 10 * source + rank, dtype=torch.int16)
            )
        assert sent == 2 * sum(numel for to, numel in enumerate(NUMELS[rank]) if to != rank)


UNEVEN = ((0, 70_000, 9), (20, 30, 1), (40_000, 5, 2))  # rank 1 has short messages only


def _uneven_pairs(rank, world):
    from tacit.attachments.handle import own_group
    from tacit.transports import Wire

    wire = Wire(own_group(None, None), uneven=True)
    found = []
    for wire.paced in (True, False):
        parts = [torch.full((UNEVEN[rank][to],), 10 * rank + to, dtype=torch.int16) for to in range(world)]
        received = wire.all_to_all(parts, [UNEVEN[source][rank] for source in range(world)])
        found.append(
            all(
                torch.equal(part, torch.full((UNEVEN[source][rank],), 10 * source + rank, dtype=torch.int16))
                for source, part in enumerate(received)
            )
        )
    return found


def test_a_rank_without_long_messages_does_not_wait_for_rounds_that_it_does_not_know(ranks):
    assert ranks.run(3, _uneven_pairs) == [[True, True]] * 3


def _measured(rank, world):
    import time
    from unittest import mock

    from tacit.attachments.handle import own_group
    from tacit.transports import Wire

    wire = Wire(own_group(None, None))
    wire.measure()
    counted, fast = wire.sent_nbytes, wire.paced
    now, factor = time.perf_counter, 1e6 if rank == 0 else 1e-6
    with mock.patch("time.perf_counter", side_effect=lambda: now() * factor):
        wire.measure()
    return counted, fast, wire.paced


def test_all_ranks_agree_on_the_slowest_link_and_two_need_no_rounds(ranks):
    found = ranks.run(3, _measured)
    assert len({fast for _, fast, _ in found}) == 1
    assert [slow for _, _, slow in found] == [True] * 3
    assert [counted for counted, _, _ in found] == [0] * 3
    assert ranks.run(2, _measured) == [(0, False, False)] * 2


def _started(rank, world):
    from tacit.attachments.handle import own_group
    from tacit.transports import Wire

    wire = Wire(own_group(None, None))
    ends = [wire.start_all_reduce(torch.full((50_000,), float(rank + step))) for step in range(3)]
    return [end()[:1].item() for end in reversed(ends)], wire.sent_nbytes


def test_several_all_reduces_are_under_way_at_the_same_time(ranks):
    for sums, sent in ranks.run(2, _started):
        assert sums == [5.0, 3.0, 1.0]
        assert sent == 3 * 4 * 50_000
