"""DGC: the four parts of the paper, each against its formula in plain float64."""

import pytest
import torch

from tacit.codecs import Dgc
from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.requests import STEADY_STEP, LocalMemory, loop_back
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check


def noise(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _paper(gradients, kept, momentum, most):
    """Algorithm 1 of the paper with momentum correction and masking, a rank; and what each step sends."""
    u = v = torch.zeros(gradients[0].numel(), dtype=torch.float64)
    sent = []
    for g in gradients:
        g = g.double()
        g = g * min(1.0, most / g.norm().item()) if most else g
        u = momentum * u + g
        v = v + u
        mask = torch.zeros_like(v, dtype=torch.bool)
        mask[v.abs().topk(kept).indices] = True
        sent.append(torch.where(mask, v, 0.0))
        u, v = torch.where(mask, 0.0, u), torch.where(mask, 0.0, v)
    return sent, u, v


@pytest.mark.parametrize(("momentum", "clip"), [(0.9, 0.0), (0.9, 12.0), (0.0, 0.0)])
def test_it_is_the_paper_s_algorithm_on_every_rank(momentum, clip):
    codec, world, steps = Dgc(share=0.02, momentum=momentum, clip=clip, warmup=0), 4, 12
    gradients = [[noise(1000, 100 * step + rank) for step in range(steps)] for rank in range(world)]
    memories = [LocalMemory(torch.empty(1000)) for _ in range(world)]
    expected = [_paper(own, 20, momentum, clip / world**0.5) for own in gradients]
    for step in range(steps):
        inputs = [own[step] for own in gradients]
        total = loop_back(codec, inputs, memories=memories, step=step)[0].total
        exact = torch.stack([sent[step] for sent, _, _ in expected]).sum(0)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
    for memory, (_, u, v) in zip(memories, expected, strict=True):
        torch.testing.assert_close(memory.vector("momentum").double(), u, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(memory.vector("residual").double(), v, rtol=1e-4, atol=1e-5)


def test_warm_up_sends_a_quarter_a_sixteenth_and_so_on():
    codec = Dgc(warmup=400)
    shares = [codec.share_at(step) for step in (0, 99, 100, 200, 300, 399, 400, STEADY_STEP)]
    assert [100 - 100 * share for share in shares] == pytest.approx(
        [75, 75, 93.75, 98.4375, 99.609375, 99.609375, 99.9, 99.9]
    )
    assert Dgc(share=0.01, warmup=3).share_at(2) == 1 / 64 and Dgc(share=0.5, warmup=9).share_at(0) == 0.5
    assert Dgc(warmup=0).share_at(0) == 0.001
    seen, x = [], noise(100_000)
    memories = [LocalMemory(x)]
    for step in (0, 100, 400):
        loop_back(codec, [x], memories=memories, step=step, observe=lambda r: seen.append(r.nbytes))
    assert seen == [codec.form(100_000, step).nbytes for step in (0, 100, 400)]
    assert seen[-1] == codec.nbytes(100_000) == 400 + -(-(100 * (9 + 1) + (99_999 >> 9)) // 8)


def test_clipping_is_by_parameter_and_by_the_root_of_the_world():
    layout = Layout.of({"a": (30, 10), "b": (50,), "zero": (4,)})
    codec, x = Dgc(share=1.0, clip=2.0, warmup=0), torch.cat([noise(300), 1e-3 * noise(50), torch.zeros(4)])
    for world in (1, 4):
        total = loop_back(codec, [x] * world, layout=layout)[0].total / world
        parts, own = layout.split(total), layout.split(x)
        assert parts["a"].norm().item() == pytest.approx(2 / world**0.5, rel=1e-5)
        torch.testing.assert_close(parts["b"], own["b"])  # already shorter
        assert not parts["zero"].any()


def test_what_is_sent_loses_its_momentum_and_the_rest_keeps_it():
    codec, memory = Dgc(share=0.25, momentum=0.5, warmup=0), LocalMemory(torch.empty(4))
    x = torch.tensor([4.0, 1.0, 1.0, 1.0])
    assert loop_back(codec, [x], memories=[memory])[0].total.tolist() == [4, 0, 0, 0]
    assert memory.vector("momentum").tolist() == [0, 1, 1, 1]
    loop_back(codec, [torch.zeros(4)], memories=[memory], step=1)
    assert memory.vector("momentum").tolist() == [0, 0, 0.5, 0.5]
    assert memory.vector("residual").tolist() == [0, 0, 1.5, 1.5]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_all_and_is_forgotten(bad):
    codec, memories = Dgc(share=0.01, clip=1.0, warmup=0), [LocalMemory(torch.empty(1000)) for _ in range(2)]
    inputs = [noise(1000), noise(1000, 1)]
    inputs[1][[5, 700]] = bad
    reduced = loop_back(codec, inputs, memories=memories)
    assert not any(r.total[[5, 700]].isfinite().any() for r in reduced)
    assert all(m.vector(slot).isfinite().all() for m in memories for slot in ("residual", "momentum"))
    later = loop_back(codec, [noise(1000, 2)] * 2, memories=memories, step=1)
    assert later[0].total.isfinite().all()


@pytest.mark.slow
def test_all_rules():
    for text in ("dgc(0.05, warmup=3)", "dgc(0.02, clip=0.5, warmup=0) > int8"):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    text = "every / dgc(share=0.001, momentum=0.9, clip=0.0, warmup=400) > bf16 / sharded"
    assert str(Strategy.parse("dgc > bf16")) == text == str(Strategy.parse(text))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dgc(share=0)", "share=0: the part that is sent"),
        ("dgc(momentum=1)", "momentum=1: what a step keeps"),
        ("dgc(clip=-1)", "clip=-1: the norm to which"),
        ("dgc(warmup=0.5)", "warmup=0.5: steps until the share is reached"),
        ("ef(dgc)", "already remembers what it did not send"),
        ("dgc > thc", "write dgc > int8, int4, bf16 or none"),
        ("dgc / ring", "cannot be added in flight"),
        ("adaptive / dgc / gossip", "it would be sent twice"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("what", ["dgc", "by_shape(matrix=dgc(warmup=0), rest=bf16)"])
def test_momentum_in_the_optimizer_too_is_refused(what):
    import tacit

    model = torch.nn.Linear(2, 1)
    twice = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.parameters(), lr=0.1),
    ]
    for optimizer in twice:
        with pytest.raises(
            ConfigError, match="would apply its own to it again; take torch.optim.SGD without"
        ):
            tacit.attach(model, optimizer, what)
    tacit.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), what).close()
    tacit.attach(model, twice[0], "dgc(momentum=0)").close()
