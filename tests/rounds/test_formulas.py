"""Every rule against its formula, written out here in plain float64, for three ranks in one process."""

import math

import pytest
import torch

from tacit.errors import ConfigError
from tacit.requests import LocalMemory
from tacit.rounds import AdaComm, DiLoCo, Elastic, Local, Moment, PostLocal, SlowMo, Stale, Streaming
from tacit.strategy import Strategy

RANKS, NUMEL, ROUNDS, LR = 3, 40, 5, 0.1


def walk(rule, moved=None):
    """`ROUNDS` rounds in which every rank walks a random step, says its difference and merges; yields all there is."""
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    models = [start.clone() for _ in range(RANKS)]
    slots = [LocalMemory(start) for _ in range(RANKS)]
    for slot in slots:
        slot.vector("anchor").copy_(start)
    noise = torch.Generator().manual_seed(1)
    for number in range(ROUNDS):
        before = [w.double().clone() for w in models]
        walked = [w + 0.1 * torch.randn(NUMEL, generator=noise) for w in models]
        own = [rule.difference(w, slot) for w, slot in zip(walked, slots, strict=True)]
        mean = torch.stack(own).mean(0)
        later = [w + 0.01 * torch.randn(NUMEL, generator=noise) for w in walked] if rule.delay else walked
        at = Moment(number + 1, LR, RANKS)
        models = [
            rule.merge(w, mean, x, slot, at).clone() for w, x, slot in zip(later, own, slots, strict=True)
        ]
        yield number, before, [w.double() for w in walked], [w.double() for w in later], models, slots


def close(left, right):
    torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-6)


def equal_bits(vectors):
    assert all(torch.equal(vectors[0], other) for other in vectors)


def test_local_is_the_mean_of_the_models():
    for _, _, walked, _, models, _ in walk(Local(4)):
        equal_bits(models)
        close(models[0], torch.stack(walked).mean(0))


def test_slowmo_is_momentum_over_merges():
    slow = torch.zeros(NUMEL, dtype=torch.float64)
    for _, before, walked, _, models, _ in walk(SlowMo(4, momentum=0.6, rate=0.9)):
        slow = 0.6 * slow + (before[0] - torch.stack(walked).mean(0)) / LR
        close(models[0], before[0] - 0.9 * LR * slow)
        equal_bits(models)


def test_slowmo_without_momentum_is_local():
    rules = walk(SlowMo(4, momentum=0.0, rate=1.0)), walk(Local(4))
    for slow, local in zip(*rules, strict=True):
        close(slow[4][0], local[4][0].double())


def test_diloco_is_sgd_with_nesterov_on_the_mean_difference():
    outer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for _, _, walked, _, models, _ in walk(DiLoCo(4)):
        outer.grad = outer.detach() - torch.stack(walked).mean(0)
        optimizer.step()
        close(models[0], outer.detach())
        equal_bits(models)


def test_streaming_mixes_what_went_on_with_the_outer_step():
    outer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for _, _, walked, later, models, slots in walk(Streaming(8, parts=2, delay=3, mix=0.25)):
        outer.grad = outer.detach() - torch.stack(walked).mean(0)
        optimizer.step()
        equal_bits([slot.vector("anchor") for slot in slots])
        for model, went_on in zip(models, later, strict=True):
            close(model, 0.25 * went_on + 0.75 * outer.detach())


def test_elastic_pulls_models_and_centre_together():
    centre = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).double()
    pull = 0.6 / RANKS
    for _, _, walked, _, models, slots in walk(Elastic(4, pull=0.6)):
        for model, w in zip(models, walked, strict=True):
            close(model, w - pull * (w - centre))
        centre = centre + pull * sum(w - centre for w in walked)
        close(slots[0].vector("anchor"), centre)
        equal_bits([slot.vector("anchor") for slot in slots])


def test_stale_merges_what_was_said_and_keeps_what_was_done_since():
    for _, _, walked, later, models, _ in walk(Stale(4, delay=3)):
        mean = torch.stack(walked).mean(0)
        for model, then, now in zip(models, walked, later, strict=True):
            close(model, mean + (now - then))


def test_the_mean_of_the_models_is_kept_by_rules_without_an_outer_step():
    for rule in (Local(2), Stale(4, delay=2)):
        for _, _, _, later, models, _ in walk(rule):
            close(torch.stack(models).mean(0), torch.stack(later).mean(0))


def test_adacomm_merges_more_often_as_the_loss_falls():
    rule = AdaComm(16)
    assert rule.period(0, None) == 16 and rule.period(10, 1.0) == 16 and rule.period(10, 4.0) == 16
    assert [rule.period(10, loss) for loss in (0.5, 0.25, 0.01, 0.0)] == [math.ceil(16 * 0.5**0.5), 8, 2, 1]
    assert rule.period(10, math.nan) == 16


def test_post_local_begins_with_a_thousand_steps_of_gradients():
    assert (PostLocal(8).after, Local(8).after) == (1000, 0)
    assert str(Strategy.parse("post_local(8) / none")) == "post_local(8, after=1000) / none / allreduce"


def test_a_streaming_period_says_every_part_once_and_spreads_them():
    rule = Streaming(12, parts=4)
    said = {bucket: [since for since in range(1, 13) if rule.due(since, 12, bucket)] for bucket in range(6)}
    assert said == {0: [12], 1: [9], 2: [6], 3: [3], 4: [12], 5: [9]}


@pytest.mark.parametrize(
    "text",
    [
        "local(16) / int8(block=256) / sharded",
        "post_local(16, after=1000) / bf16 / allreduce",
        "adacomm(64) / none / allreduce",
        "slowmo(16, momentum=0.7, rate=1) / none / allreduce",
        "diloco(64, rate=0.7, momentum=0.9) / hush / sharded",
        "streaming(64, rate=0.7, momentum=0.9, parts=4, delay=2, mix=0.5) / hush / sharded",
        "elastic(8, pull=0.9) / none / allreduce",
        "stale(4, delay=3) / none / allreduce",
        "diloco(16, rate=1, momentum=0.5, after=600) / hush / sharded",
        "local(16, after=5, first=hush) / ef(int4(block=256)) / sharded",
        "local(16, after=5, first=int8(block=512)) / none / sharded",
    ],
)
def test_the_text_of_a_rule_parses_back_to_itself(text):
    assert str(Strategy.parse(text)) == text


def test_a_rule_alone_needs_only_what_is_said():
    assert str(Strategy.parse("local(8) / hush")) == "local(8) / hush / sharded"


def test_the_first_gradients_choose_the_scheme_too():
    text = "local(8, after=9, first=int8(block=512)) / none"
    assert str(Strategy.parse(text)) == f"{text} / sharded"
    assert Strategy.parse("local(8, after=9, first='int8(block=512)') / none") == Strategy.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("local(0) / none", "every=0: a whole number of at least 1"),
        ("local(2.5) / none", "every=2.5: a whole number"),
        ("slowmo(8, momentum=2) / none", "momentum=2: a number from 0 to 1"),
        ("streaming(4, parts=8) / none", "parts=8: at most one a step"),
        ("streaming(4, delay=4) / none", "delay=4: a part is merged before it is sent again"),
        ("stale(4, delay=4) / none", "below every=4"),
        ("elastic(4, pull=0) / none", "never be pulled together"),
        ("local(4, after=-1) / none", "after=-1: a whole number of at least 0"),
        ("diloco(4, first=hush) / none", "give after=, the steps until models part"),
        ("diloco(4, after=2, first=3) / none", "first=3: the codec of the first gradients"),
        ("post_local(4, after=0) / none", "after=0: a whole number of at least 1"),
        ("slowmo(4, after=2, first=hash) / none", "unknown codec 'hash'; did you mean 'hush'"),
        ("local(4, after=2, first=int8) / none / ring", "sends its first gradients with int8.*ring"),
        ("local(4, after=2) / none / gossip", "begins with gradients of all ranks"),
        ("lokal(4) / none / sharded", "unknown rule 'lokal'; did you mean 'local'"),
    ],
)
def test_a_bad_rule_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Strategy.parse(text)
