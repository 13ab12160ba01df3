"""Every scheme answers for vectors of any length, also none at all."""

import torch

TEXTS = (
    "none / sharded",
    "int8",
    "hush",
    "thc",
    "hush / server",
    "bf16 / server",
    "hush / allreduce",
    "ef(hush)",
)
NUMELS = (0, 1, 3)


def _short(rank, world):
    from tacit.attachments.handle import own_group
    from tacit.exchange import converse
    from tacit.requests import LocalMemory, context_for
    from tacit.schemes import Channel
    from tacit.stats import Stats
    from tacit.strategy import Strategy
    from tacit.transports import Wire

    wire, found = Wire(own_group(None, None)), {}
    for text in TEXTS:
        strategy = Strategy.parse(text)
        for numel in NUMELS:
            x = torch.full((numel,), rank + 1.0)
            context = context_for(LocalMemory(x), seed=0, step=0, bucket="b", rank=rank, world=world)
            talk = strategy.what.reduce(x, context)
            found[text, numel] = converse(
                Channel(wire, strategy.scheme), talk, context.own_seed, Stats(), "0"
            ).total
    return found


def test_vectors_of_none_one_and_three_elements_travel_in_every_scheme(ranks):
    found = ranks.run(3, _short)
    for (text, numel), total in found[0].items():
        assert total.shape == (numel,)
        assert all(torch.equal(total, other[text, numel]) for other in found)
        limit = 0.6 if "hush" in text or "thc" in text else 0.1
        assert (total - 6.0).abs().le(6.0 * limit).all(), (text, total)


LENGTHS = ((0, 5, 2), (0, 0, 0), (3, 100_000, 0))  # the longest in paced messages


def _ragged(rank, world):
    from tacit.attachments.handle import own_group
    from tacit.requests import Gather
    from tacit.schemes import Sharded
    from tacit.transports import Wire

    wire, found = Wire(own_group(None, None)), []
    for lengths in LENGTHS:
        before = wire.sent_nbytes
        request = Gather(torch.full((lengths[rank],), rank, dtype=torch.int16), ragged=True)
        answer = Sharded().answer(wire, request, 0)
        found.append((answer, wire.sent_nbytes - before, request.nbytes))
    return found


def test_ranks_gather_what_has_another_length_on_each_and_every_byte_is_counted(ranks):
    for rank, found in enumerate(ranks.run(3, _ragged)):
        for lengths, (answer, sent, declared) in zip(LENGTHS, found, strict=True):
            for source, (numel, part) in enumerate(zip(lengths, answer, strict=True)):
                assert torch.equal(part, torch.full((numel,), source, dtype=torch.int16))
            assert sent == 2 * declared == 2 * (8 + 2 * lengths[rank])
