"""Optimizers with the exchange inside, on four real ranks: one model, its bytes, a resume to the same bits; and what they refuse."""

import io

import pytest
import torch
import toys
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.codecs import Dct
from tacit.errors import ConfigError
from tacit.optim import Lamb, Lars, OneBitAdam, SignSgd, trust_groups

EXACT, STEPS = 2, 3
ONE_BIT = f"every / exact(ef(sign(block=64)), until={EXACT}) / sharded"
DEMO = "every / ef(dct(0.1, chunk=32), decay=0.9) / sharded"
KINDS = {
    "one-bit": (ONE_BIT, lambda model: OneBitAdam(model.parameters(), lr=0.003)),
    "demo": (DEMO, lambda model: SignSgd(model.parameters(), lr=0.003)),
    "lars": ("every / int8 / sharded", lambda model: Lars(trust_groups(model), lr=1.0, trust=0.05)),
    "lamb": ("every / int8 / sharded", lambda model: Lamb(trust_groups(model), lr=0.01)),
}


def _start(kind, wrap):
    text, make = KINDS[kind]
    model = toys.deep(layers=3)
    model = DDP(model, bucket_cap_mb=0.03) if wrap == "ddp" else model
    optimizer = make(model)
    return model, optimizer, tacit.attach(model, optimizer, text, bucket="20kB", seed=3)


def _train(model, optimizer, handle, rank, steps):
    """Two batches a step, the first of them accumulated in silence; the bytes of each step."""
    sent = []
    for step in steps:
        before = handle.stats.sent_nbytes
        optimizer.zero_grad()
        with handle.no_sync():
            toys.loss_of(model, rank, 2 * step).backward()
        toys.loss_of(model, rank, 2 * step + 1).backward()
        optimizer.step()
        sent.append(handle.stats.sent_nbytes - before)
    return sent


def _all(rank, world):
    found = {}
    for kind in KINDS:
        for wrap in ("plain", "ddp"):
            model, optimizer, handle = _start(kind, wrap)
            before, file = toys.loss_of(model, 0, 99).item(), io.BytesIO()
            with handle:
                numels = [b.layout.numel for b in handle.attachment._backward.buckets]
                layouts = [b.layout for b in handle.attachment._backward.buckets]
                sent = _train(model, optimizer, handle, rank, range(STEPS))
                torch.save([model.state_dict(), optimizer.state_dict(), handle.state_dict()], file)
                sent += _train(model, optimizer, handle, rank, range(STEPS, 2 * STEPS))
                by_request = handle.stats.as_dict()["sent_by_request"]
            whole, after = toys.flat(model), toys.loss_of(model, 0, 99).item()
            file.seek(0)
            weights, steps, state = torch.load(file, weights_only=True)
            model, optimizer, handle = _start(kind, wrap)
            model.load_state_dict(weights)
            optimizer.load_state_dict(steps)
            with handle:
                handle.load_state_dict(state)
                _train(model, optimizer, handle, rank, range(STEPS, 2 * STEPS))
            declared = sum(Dct(0.1, chunk=32).nbytes_of(layout) for layout in layouts)
            found[kind, wrap] = (
                whole, toys.flat(model), before, after, sent, by_request, numels, declared,
            )  # fmt: skip
    return found


def _sharded_nbytes(numels, world, rank, nbytes):
    """What `sharded` sends of a Sum: the others' shards of the payload, and its own shard of the result to each of them."""
    from tacit.requests import even_cuts

    total = 0
    for numel in numels:
        cuts = even_cuts(numel, world, 64)
        own = nbytes(cuts[rank + 1]) - nbytes(cuts[rank])
        total += nbytes(numel) - own + (world - 1) * own
    return total


def test_four_ranks_stay_one_model_count_their_bytes_and_resume_to_the_same_bits(ranks):
    world = 4
    found = ranks.run(world, _all)
    for rank, own in enumerate(found):
        for (kind, wrap), (whole, resumed, before, after, sent, by_request, numels, declared) in own.items():
            place = f"{kind}, {wrap}, rank {rank}"
            assert torch.equal(whole, found[0][kind, wrap][0]), place
            assert torch.equal(whole, resumed), place
            assert after < before and len(numels) >= 3, (place, before, after)
            if kind == "demo":
                assert by_request["Gather"] == 2 * STEPS * (world - 1) * declared, place
            if kind == "one-bit":
                control = sent[-1] - _sharded_nbytes(numels, world, rank, _one_bit_nbytes)
                assert sent[EXACT] == sent[-1] and 0 <= control < 1000, (place, sent)
                assert sent[0] > 15 * sent[-1], (place, sent)


def _one_bit_nbytes(numel):
    """A float32 and 8 bytes a block of 64."""
    return 4 * -(-numel // 64) + -(-numel // 8)


def test_both_attachments_make_the_same_steps(ranks):
    """A plain module's bits are DDP's, where its buckets are."""
    plain, ddp = ranks.run(2, _short, "plain"), ranks.run(2, _short, "ddp")
    for a, b in zip(plain, ddp, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _convolutions():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def _short(rank, world, wrap):
    model = _convolutions()
    wrapped = DDP(model) if wrap == "ddp" else model
    optimizer = OneBitAdam(model.parameters(), lr=0.01)
    with tacit.attach(wrapped, optimizer, "exact(int8, until=2)", seed=1):
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            wrapped(x.to(memory_format=torch.channels_last)).square().sum().backward()
            optimizer.step()
    return toys.flat(model)


def _model(sparse=False):
    return nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("ef(sign)", "has none; write 'exact(ef(sign(block=1024)), until=1000)'"),
        ("local(4) / exact(ef(sign), until=9)", "exchanges momenta in every step; write 'every / exact"),
        ("adaptive / int8 / gossip", "exchanges momenta in every step; write 'every / exact"),
        ("auto", "compares codecs for gradients, and OneBitAdam exchanges momenta; write"),
    ],
)
def test_a_strategy_without_exact_steps_is_refused_before_anything_is_opened(strategy, sentence, tmp_path):
    model, file = _model(), tmp_path / "records.jsonl"
    with pytest.raises(ConfigError) as refused:
        tacit.attach(model, OneBitAdam(model.parameters()), strategy, records=file)
    assert sentence in str(refused.value) and not file.exists()


def test_a_model_that_cannot_exchange_momenta_is_refused():
    model, text = _model(sparse=True), "exact(ef(sign), until=9)"
    with pytest.raises(
        ConfigError, match=r"table '0\.weight' has sparse gradients, and OneBitAdam takes dense"
    ):
        tacit.attach(model, OneBitAdam(model.parameters()), text)
    model = _model()
    with pytest.raises(ConfigError, match=r"parameter '1\.weight' is not in OneBitAdam"):
        tacit.attach(model, OneBitAdam(model[0].parameters()), text)


def _refused(rank, world):
    from torch.distributed.fsdp import fully_shard

    found, text = [], "exact(ef(sign), until=9)"
    for wrap in (lambda m: DDP(m, find_unused_parameters=True), fully_shard, lambda m: m):
        model = wrap(nn.Linear(4, 4))
        handle = None
        try:
            handle = tacit.attach(model, OneBitAdam(model.parameters()), text)
            for _ in range(11):  # the last two of them without a step
                model(torch.ones(1, 4)).sum().backward()
        except ConfigError as error:
            found.append(str(error))
        if handle is not None:
            handle.close()
    return found


def test_what_only_ranks_can_tell_is_refused_on_all_of_them(ranks):
    for unused, sharded, twice in ranks.run(2, _refused):
        assert "build DDP without find_unused_parameters=" in unused
        assert "FSDP2 leaves each rank a part of the momenta" in sharded
        assert "a momentum that no step has taken" in twice


def test_alone_it_is_adam():
    found = []
    for make in (OneBitAdam, torch.optim.AdamW):
        model = toys.deep(layers=1)
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.0)
        with tacit.attach(model, optimizer, "exact(ef(sign), until=1)"):
            toys.train(model, optimizer, 0, range(4))
        found.append(toys.flat(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
