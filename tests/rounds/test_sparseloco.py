"""SparseLoCo against the paper's formula in float64, in one process and by two real ranks: what is not said lives on in the memory."""

import pytest
import torch
from toys import deep, flat, train

import tacit
from tacit.codecs import ErrorFeedback, TopK
from tacit.errors import ConfigError
from tacit.requests import LocalMemory, loop_back
from tacit.rounds import Local, Moment, SparseLoCo
from tacit.strategy import Strategy

RANKS, NUMEL, ROUNDS = 3, 300, 8
SPARSE = TopK(share=0.05, bits=2, chunk=100)
TEXT = f"sparseloco(4) / ef({SPARSE}, decay=0.95)"
STEPS = 14


def say(e):
    """C of the paper's formula: the codec by itself, of a float64 vector."""
    return SPARSE.unpack_add(SPARSE.pack(e.float()), torch.zeros(e.numel())).double()


def walk(rule, decay):
    """Rounds in which each rank walks a random way, says it through error feedback and merges: models, slots and ways of each."""
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    models, slots = [start.clone() for _ in range(RANKS)], [LocalMemory(start) for _ in range(RANKS)]
    for slot in slots:
        slot.vector("anchor").copy_(start)
    noise = torch.Generator().manual_seed(1)
    for number in range(ROUNDS):
        ways = [0.1 * torch.randn(NUMEL, generator=noise) for _ in range(RANKS)]
        walked = [w + way for w, way in zip(models, ways, strict=True)]
        own = [rule.difference(w, slot) for w, slot in zip(walked, slots, strict=True)]
        heard = loop_back(ErrorFeedback(SPARSE, decay), own, memories=slots, step=number)
        at = Moment(number + 1, 0.1, RANKS)
        models = [
            rule.merge(w, h.total / RANKS, x, slot, at).clone()
            for w, h, x, slot in zip(walked, heard, own, slots, strict=True)
        ]
        yield models, slots, [way.double() for way in ways]


def close(left, right):
    torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rate", "decay"), [(1.0, 0.95), (0.8, 0.9), (1.0, 1.0)])
def test_sparseloco_is_error_feedback_on_differences_and_an_outer_step_of_sgd(rate, decay):
    theta = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).double()
    errors = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(RANKS)]
    for models, slots, ways in walk(SparseLoCo(4, rate=rate), decay):
        outer = torch.zeros(NUMEL, dtype=torch.float64)
        for rank, way in enumerate(ways):
            e = decay * errors[rank] - way  # theta - theta_r: the paper's sign
            said = say(e)
            errors[rank] = e - said
            outer += said / RANKS
        theta = theta - rate * outer
        for rank in range(RANKS):
            assert torch.equal(models[rank], models[0])
            close(models[rank], theta)
            close(slots[rank].vector("residual"), -errors[rank])


def test_all_that_was_walked_is_in_the_model_or_still_to_be_said():
    walked = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).double()
    for models, slots, ways in walk(SparseLoCo(4), decay=1.0):
        walked = walked + torch.stack(ways).mean(0)
        unsaid = torch.stack([slot.vector("residual") for slot in slots]).double().mean(0)
        assert unsaid.norm() > 0.05
        close(models[0].double() + unsaid, walked)


def test_with_rate_one_and_all_said_it_is_local():
    w, mean = torch.randn(9, generator=torch.Generator().manual_seed(0)), torch.ones(9)
    merged = [
        rule.merge(w, mean, mean, LocalMemory(w), Moment(1, 0.1, 2)) for rule in (SparseLoCo(4), Local(4))
    ]
    assert torch.equal(merged[0], merged[1])


# ---- by two real ranks


def _start(rank, text=TEXT):
    model = deep(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, tacit.attach(model, optimizer, text)


def _trained(rank, world, broken_at=0):
    """What a rank has after STEPS steps, with a checkpoint loaded into a new handle after `broken_at` of them, if any."""
    model, optimizer, handle = _start(rank)
    if broken_at:
        train(model, optimizer, rank, range(broken_at))
        kept = handle.full_state_dict(), optimizer.state_dict()
        handle.close()
        model, optimizer, handle = _start(rank + 5)
        handle.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    train(model, optimizer, rank, range(broken_at, STEPS))
    return flat(model), handle.stats.sent_nbytes - handle.stats.as_dict()["sent_by_group"]["control"]


def _backwards(model):
    """The model as its only bucket holds it: the last parameter first."""
    return torch.cat([p.detach().reshape(-1) for p in reversed(list(model.parameters()))])


def _written_out(world):
    """The paper's algorithm, line by line: every rank's model after STEPS steps."""
    models = [deep(seed=0) for _ in range(world)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    theta = _backwards(models[0]).double()
    errors = [torch.zeros_like(theta) for _ in range(world)]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, range(step, step + 1))
        if (step + 1) % 4 == 0:
            outer = torch.zeros_like(theta)
            for rank, model in enumerate(models):
                e = 0.95 * errors[rank] + (theta - _backwards(model).double())
                said = say(e)
                errors[rank] = e - said
                outer += said / world
            theta = theta - outer
            for model in models:
                at = 0
                for parameter in reversed(list(model.parameters())):
                    values = theta[at : at + parameter.numel()]
                    parameter.detach().copy_(values.view(parameter.shape))
                    at += parameter.numel()
    return [flat(model) for model in models]


def test_two_real_ranks_do_what_the_paper_says_and_send_what_the_codec_declares(ranks):
    found = ranks.run(2, _trained)
    for (model, sent_nbytes), expected in zip(found, _written_out(2), strict=True):
        torch.testing.assert_close(model, expected, rtol=1e-4, atol=1e-5)
        assert sent_nbytes == 3 * SPARSE.nbytes(model.numel())  # 3 merges, to one other rank
    assert not torch.equal(found[0][0], found[1][0])  # two steps after the third


def test_what_was_not_said_is_in_the_checkpoint(ranks):
    whole, resumed = ranks.run(2, _trained), ranks.run(2, _trained, 6)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, resumed, strict=True))


# ---- its text


def test_the_text_parses_back_to_itself():
    text = f"sparseloco(30, rate=1) / ef({TopK()}, decay=0.95) / sharded"
    assert str(Strategy.parse("sparseloco(30) / ef(topk, decay=0.95)")) == text == str(Strategy.parse(text))
    assert str(Strategy.parse(f"sparseloco / {SparseLoCo.default_codec}")) == text


def test_a_bad_rule_is_one_sentence():
    with pytest.raises(ConfigError, match="every=0: a whole number of at least 1"):
        Strategy.parse("sparseloco(0) / none")
    with pytest.raises(ConfigError, match="rate=11: a number from 0 to 10"):
        Strategy.parse("sparseloco(8, rate=11) / none")
