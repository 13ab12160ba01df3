"""Optimizers with the exchange inside, on four real ranks: one model, its bytes, a resume to the same bits; and what they refuse."""

import io
from collections import Counter

import pytest
import torch
import toys
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.errors import ConfigError
from tacit.optim import Lamb, Lars, OneBitAdam, SignSgd, trust_groups
from tacit.shapes import requests_of
from tacit.strategy import parse_codec

WORLD, EXACT, STEPS = 4, 2, 3
SIGN, DCT = "ef(sign(block=64))", "ef(dct(0.1, chunk=32), decay=0.9)"
KINDS = {
    "one-bit": (
        f"every / exact({SIGN}, until={EXACT}) / sharded",
        lambda model: OneBitAdam(model.parameters(), lr=0.003),
    ),
    "demo": (f"every / {DCT} / sharded", lambda model: SignSgd(model.parameters(), lr=0.003)),
    "lars": ("every / int8 / sharded", lambda model: Lars(trust_groups(model), lr=1.0, trust=0.05)),
    "lamb": ("every / int8 / sharded", lambda model: Lamb(trust_groups(model), lr=0.01)),
}


def _start(kind, wrap):
    text, make = KINDS[kind]
    model = toys.deep(layers=3)
    model = DDP(model, bucket_cap_mb=0.03) if wrap == "ddp" else model
    optimizer = make(model)
    return model, optimizer, tacit.attach(model, optimizer, text, bucket="20kB", seed=3)


def _step(model, optimizer, handle, rank, step):
    """Two batches, the first of them accumulated in silence."""
    optimizer.zero_grad()
    with handle.no_sync():
        toys.loss_of(model, rank, 2 * step).backward()
    toys.loss_of(model, rank, 2 * step + 1).backward()
    optimizer.step()


def _sent(handle):
    return Counter(handle.stats.as_dict()["sent_by_request"])


def _all(rank, world):
    """The bits after a training in one go, and resumed half-way; what each step sent by kind of request; the buckets."""
    found = {}
    for kind in KINDS:
        for wrap in ("plain", "ddp"):
            model, optimizer, handle = _start(kind, wrap)
            sent, file = [], io.BytesIO()
            with handle:
                layouts = [bucket.layout for bucket in handle.attachment._backward.buckets]
                for step in range(2 * STEPS):
                    before = _sent(handle)
                    _step(model, optimizer, handle, rank, step)
                    sent.append(_sent(handle) - before)
                    if step == STEPS - 1:
                        torch.save([model.state_dict(), optimizer.state_dict(), handle.state_dict()], file)
            whole = toys.flat(model)
            file.seek(0)
            model, optimizer, handle = _start(kind, wrap)
            with handle:
                for part, state in zip((model, optimizer, handle), torch.load(file), strict=True):
                    part.load_state_dict(state)
                for step in range(STEPS, 2 * STEPS):
                    _step(model, optimizer, handle, rank, step)
            found[kind, wrap] = whole, toys.flat(model), sent, layouts
    return found


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(WORLD, _all)


CASES = [(kind, wrap) for kind in KINDS for wrap in ("plain", "ddp")]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_four_ranks_stay_one_model_and_resume_to_the_same_bits(found, case):
    first, _, _, layouts = found[0][case]
    assert (
        len(layouts) >= 3
        and first.isfinite().all()
        and not torch.equal(first, toys.flat(toys.deep(layers=3)))
    )
    for own in found:
        assert torch.equal(own[case][0], first) and torch.equal(own[case][1], first)


def _declared(text, layouts):
    """Bytes of all ranks together: a Sum is scattered and gathered, n - 1 payloads up and as many down; a Gather goes to everybody."""
    found = Counter()
    for layout in layouts:
        for asked in requests_of(parse_codec(text), layout.numel, WORLD, layout):
            times = {"Sum": asked.up_nbytes + asked.down_nbytes, "Gather": WORLD * asked.up_nbytes}
            found[asked.kind] += (WORLD - 1) * times[asked.kind]
    return found


@pytest.mark.parametrize(
    ("kind", "texts"), [("one-bit", EXACT * ["none"] + [SIGN]), ("demo", [DCT])], ids=["one-bit", "demo"]
)
def test_every_step_sends_what_its_codec_declares_to_the_byte(found, kind, texts):
    declared = [_declared(text, found[0][kind, "plain"][3]) for text in texts]
    for wrap in ("plain", "ddp"):
        for step in range(2 * STEPS):
            sent = sum((own[kind, wrap][2][step] for own in found), Counter())
            del sent["Max"]  # the notes of a step, whatever the codec
            assert sent == declared[min(step, len(declared) - 1)], (wrap, step)


def _convolutions():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    return nn.Sequential(*layers)


def _loss(model, step, rank, layout):
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    return model(x.to(memory_format=layout)).square().sum()


def _short(rank, world):
    """What the same steps lead to, by codec, layout of the weights in memory, and kind of module."""
    found = {}
    for codec, layout in (("none", torch.channels_last), ("int8", torch.contiguous_format)):
        for wrap in ("plain", "ddp"):
            model = _convolutions().to(memory_format=layout)
            wrapped = DDP(model) if wrap == "ddp" else model
            optimizer = OneBitAdam(model.parameters(), lr=0.01)
            with tacit.attach(wrapped, optimizer, f"exact({codec}, until=2)", seed=1):
                for step in range(5):
                    optimizer.zero_grad()
                    _loss(wrapped, step, rank, layout).backward()
                    optimizer.step()
            found[codec, wrap] = toys.flat(model)
    return found


def test_both_attachments_make_the_steps_of_one_process_with_all_batches(ranks):
    """DDP lays gradients out as weights lie in memory: blocks of int8 are then other elements, so its bits are compared where they are not."""
    model = _convolutions()
    optimizer = OneBitAdam(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        (sum(_loss(model, step, rank, torch.contiguous_format) for rank in range(2)) / 2).backward()
        if step >= 2:
            for parameter in model.parameters():
                optimizer.offer(parameter, parameter.grad)
        optimizer.step()
    for own in ranks.run(2, _short):
        assert torch.equal(own["none", "plain"], own["none", "ddp"])
        assert torch.equal(own["int8", "plain"], own["int8", "ddp"])
        torch.testing.assert_close(own["none", "plain"], toys.flat(model), rtol=1e-4, atol=1e-5)


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
    for wrap in (lambda m: DDP(m, find_unused_parameters=True), fully_shard):
        model = wrap(nn.Linear(4, 4))
        with pytest.raises(ConfigError) as refused:
            tacit.attach(model, OneBitAdam(model.parameters()), text)
        found.append(str(refused.value))
    for wrap in (DDP, lambda m: m):
        model = wrap(nn.Linear(4, 4))
        optimizer = OneBitAdam(model.parameters())
        with tacit.attach(model, optimizer, text):
            for _ in range(10):  # nine exact ones, and one that no step takes
                model(torch.ones(1, 4)).sum().backward()
            with pytest.raises(ConfigError) as refused:
                model(torch.ones(1, 4)).sum().backward()
        found.append(str(refused.value))
    return found


def test_what_only_ranks_can_tell_is_refused_on_all_of_them(ranks):
    for unused, sharded, *twice in ranks.run(2, _refused):
        assert "build DDP without find_unused_parameters=" in unused
        assert "FSDP2 leaves each rank a part of the momenta" in sharded
        assert len(twice) == 2 and all("a momentum that no step has taken" in said for said in twice)


def test_alone_it_is_adam():
    found = []
    for make in (OneBitAdam, torch.optim.AdamW):
        model = toys.deep(layers=1)
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.0)
        with tacit.attach(model, optimizer, "exact(ef(sign), until=1)"):
            toys.train(model, optimizer, 0, range(4))
        found.append(toys.flat(model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
