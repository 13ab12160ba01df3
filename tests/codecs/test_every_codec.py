"""Every codec of the registry on four real ranks with many buckets: one model, the bytes that were declared, and a checkpoint that goes on to
the same bits."""

import copy
import re

import pytest
import torch
from toys import deep, train

import tacit
from tacit.codecs import CODECS
from tacit.codecs.catalogue import METHODS
from tacit.errors import TacitError
from tacit.shapes import requests_of
from tacit.strategy import parse_codec

WORLD, STEPS = 4, 2
TEXTS = (
    "none", "fp16", "bf16", "int8", "int4", "fp8(rounding=stochastic)", "natural", "qsgd(levels=127)", "terngrad", "signsgd",
    "ef(onebit)", "ef(sign, decay=0.8)", "ef(twobit)", "thc", "hush", "ef(topk)", "ef(topk(0.01, chunk=bucket) > qsgd)", "ef21(topk)",
    "ef(threshold(0.01))", "ef(randomk(0.05) > hush)", "dgc(0.02, warmup=0)", "ef(gtopk(0.02))", "ef(scalecom(0.05) > bf16)", "omnireduce(16)",
    "lowrank(2)", "by_shape(matrix=ef(topk), rest=bf16)", "ef(dct)", "exact(int8, until=1)",
)  # fmt: skip


def test_the_texts_name_every_codec():
    ours = {name for name, maker in CODECS.built_in.items() if maker.__module__.startswith("tacit.")}
    assert ours <= {word for text in TEXTS for word in re.findall(r"\w+", text)}
    assert {re.findall(r"\w+", method.codec)[0] for method in METHODS} <= set(CODECS.built_in)


def _start(text):
    model = deep(layers=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, tacit.attach(model, optimizer, f"{text} / sharded", bucket="20kB", seed=7)


def _flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _trained(rank, world):
    """By codec: the bits after a training in one go, and resumed half-way; what was sent by kind of request; its buckets."""
    found = {}
    for text in TEXTS:
        model, optimizer, handle = _start(text)
        with handle:
            train(model, optimizer, rank, range(STEPS))
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            train(model, optimizer, rank, range(STEPS, 2 * STEPS))
            layouts = [bucket.layout for bucket in handle._attachment._backward.buckets]
            sent = handle.stats.as_dict()["sent_by_request"]
        whole = _flat(model)
        model, optimizer, handle = _start(text)
        with handle:
            for part, state in zip((model, optimizer, handle), kept, strict=True):
                part.load_state_dict(state)
            train(model, optimizer, rank, range(STEPS, 2 * STEPS))
        found[text] = whole, _flat(model), sent, layouts
    return found


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(WORLD, _trained)


@pytest.mark.parametrize("text", TEXTS)
def test_four_ranks_stay_one_model_and_resume_to_the_same_bits(found, text):
    whole, _, _, layouts = found[0][text]
    assert len(layouts) >= 5 and whole.isfinite().all() and not torch.equal(whole, _flat(deep(layers=5)))
    for own in found:
        assert torch.equal(own[text][0], whole) and torch.equal(own[text][1], whole)


# what all ranks send together for one request, in payloads up and payloads of the answer
_TIMES = {
    "Sum": lambda up, down: (WORLD - 1) * (up + down),
    "TableSum": lambda up, down: (WORLD - 1) * (up + down),
    "Max": lambda up, down: 2 * (WORLD - 1) * up,
    "Gather": lambda up, down: WORLD * (WORLD - 1) * up,
    "Merge": lambda up, down: 2 * (WORLD - 1) * up,
}


@pytest.mark.parametrize("text", TEXTS[:-1])  # the first steps of `exact` are not its steady ones
def test_what_leaves_the_ranks_is_what_the_codec_asks_for_to_the_byte(found, text):
    codec, expected = parse_codec(text), dict[str, int]()
    for layout in found[0][text][3]:
        for asked in requests_of(codec, layout.numel, WORLD, layout):
            nbytes = _TIMES[asked.kind](asked.up_nbytes, asked.down_nbytes)
            expected[asked.kind] = expected.get(asked.kind, 0) + 2 * STEPS * nbytes
    # every step also asks for a few numbers of all ranks, whatever the codec
    notes = sum(own["natural"][2]["Max"] for own in found)
    sent = {
        kind: sum(own[text][2][kind] for own in found) - (kind == "Max") * notes for kind in found[0][text][2]
    }
    sent = {kind: nbytes for kind, nbytes in sent.items() if nbytes or kind in expected}
    if codec.traits.varies:
        assert all(0 < nbytes <= expected[kind] for kind, nbytes in sent.items())
    else:
        assert sent == expected


OPTIONS = {
    "none": "none(bits=3)",
    "ef": "ef(int9)",
    "ef21": "ef21(qsgd)",
    "by_shape": "by_shape(matrix=int8, size=3)",
}


@pytest.mark.parametrize("name", list(CODECS.built_in))
def test_an_option_that_does_not_exist_or_fit_is_one_sentence_for_every_codec(name):
    for text in (f"{name}(nonsense=1)", OPTIONS.get(name, f"{name}(-7)")):
        with pytest.raises(TacitError) as caught:
            parse_codec(text)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
