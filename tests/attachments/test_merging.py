"""Models that part and merge, on real ranks: what a rule of rounds/ makes of a training loop."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from toys import deep, flat, loss_of, train

import tacit
from tacit.errors import ConfigError

RULES = (
    "local(4)",
    "post_local(4, after=3)",
    "slowmo(4)",
    "diloco(4)",
    "sparseloco(4)",
    "streaming(4, parts=2, delay=1)",
    "elastic(4)",
    "stale(4, delay=2)",
    "diloco(4, after=5)",
    "streaming(4, parts=2, delay=1, after=3, first=hush)",
)
STEPS = 11
_sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_adam = functools.partial(torch.optim.AdamW, lr=0.01)


def _start(rank, text, bucket="20kB"):
    model = deep(seed=rank)
    optimizer = _sgd(model.parameters())
    return model, optimizer, tacit.attach(model, optimizer, text, bucket=bucket)


def _trained(rank, world, text, steps=STEPS):
    model, optimizer, handle = _start(rank, text)
    train(model, optimizer, rank, range(steps))
    apart = handle.divergence()
    handle.merge()
    return flat(model), apart, handle.divergence(), handle.stats.as_dict()["steps"]


def _reference(world, every, steps, make, after=0):
    """Written out: the mean gradient for `after` steps, then each model its own way and the mean of them every `every` steps."""
    models = [deep(seed=0) for _ in range(world)]
    optimizers = [make(m.parameters()) for m in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        if step < after:
            for parts in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.grad for p in parts]).mean(0)
                for part in parts:
                    part.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        if step >= after and (step + 1 - after) % every == 0:
            mean = torch.stack([flat(m) for m in models]).mean(0)
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return [flat(m) for m in models]


def test_local_sgd_on_real_ranks_is_local_sgd(ranks):
    found = ranks.run(3, _trained, "local(4) / none")
    for merged, apart, after, steps in found:
        assert torch.equal(merged, found[0][0]) and steps == STEPS
        assert apart > 1e-3 and after == 0.0
    mean = torch.stack(_reference(3, 4, STEPS, _sgd)).mean(0)
    torch.testing.assert_close(found[0][0], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rule", "said"), list(zip(RULES, ["hush / sharded", "none"] * 5, strict=True)))
def test_every_rule_merges_to_the_same_bits_on_two_ranks_with_any_codec(ranks, rule, said):
    found = ranks.run(2, _trained, f"{rule} / {said}")
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].isfinite().all()
    assert found[0][2] == 0.0


# ---- rules with an outer step, on real ranks, against their formulas


def _watched(rank, world, text):
    """The model after every step, and every element's bucket."""
    model, optimizer, handle = _start(rank, text)
    seen = []
    for step in range(STEPS):
        train(model, optimizer, rank, range(step, step + 1))
        seen.append(flat(model))
    places = {name: bucket.index for bucket in handle._attachment._buckets for name in bucket.names}
    buckets = [torch.full((p.numel(),), places[name]) for name, p in model.named_parameters()]
    return seen, torch.cat(buckets)


class _SlowMo:
    """slowmo(4, momentum=0.6, rate=0.9), at the learning rate of _sgd."""

    def __init__(self, start):
        self.x, self.u = start, torch.zeros_like(start)

    def __call__(self, step, models):
        if step % 4 == 0:
            self.u = 0.6 * self.u + (self.x - sum(models) / 2) / 0.05
            self.x = self.x - 0.9 * 0.05 * self.u
            models[:] = [self.x, self.x]


class _DiLoCo:
    """diloco(4, rate=0.7, momentum=0.9): Nesterov's momentum on what the ranks have moved by, in the mean."""

    def __init__(self, start):
        self.x, self.v = start, torch.zeros_like(start)

    def outer(self, mean):
        self.v = 0.9 * self.v + (self.x - mean)
        self.x = self.x - 0.7 * ((self.x - mean) + 0.9 * self.v)

    def __call__(self, step, models):
        if step % 4 == 0:
            self.outer(sum(models) / 2)
            models[:] = [self.x, self.x]


class _Streaming:
    """streaming(4, parts=2, delay=1): every bucket by itself, those of odd number half a period earlier; half of what went on stays."""

    def __init__(self, start):
        self.start, self.buckets, self.rules, self.means = start, None, None, {}

    def __call__(self, step, models):
        count = int(self.buckets.max()) + 1
        self.rules = self.rules or [_DiLoCo(self.start[self.buckets == b]) for b in range(count)]
        for b, rule in enumerate(self.rules):
            chosen = self.buckets == b
            if (step - 1, b) in self.means:
                rule.outer(self.means.pop((step - 1, b)))
                for model in models:
                    model[chosen] = (model[chosen] + rule.x) / 2
            if step % 4 == (2 if b % 2 else 0):
                self.means[step, b] = sum(model[chosen] for model in models) / 2


class _Elastic:
    """elastic(4, pull=0.6), so a = 0.3."""

    def __init__(self, start):
        self.c = start

    def __call__(self, step, models):
        if step % 4 == 0:
            ways = [model - self.c for model in models]
            models[:] = [model - 0.3 * way for model, way in zip(models, ways, strict=True)]
            self.c = self.c + 0.3 * sum(ways)


class _Stale:
    """stale(4, delay=2)."""

    def __init__(self, start):
        self.said = None

    def __call__(self, step, models):
        if step % 4 == 2 and self.said:
            mean = sum(self.said) / 2
            models[:] = [mean + now - then for now, then in zip(models, self.said, strict=True)]
        if step % 4 == 0:
            self.said = list(models)


FORMULAS = {
    "slowmo(4, momentum=0.6, rate=0.9)": _SlowMo,
    "diloco(4, rate=0.7, momentum=0.9)": _DiLoCo,
    "streaming(4, parts=2, delay=1, rate=0.7, momentum=0.9, mix=0.5)": _Streaming,
    "elastic(4, pull=0.6)": _Elastic,
    "stale(4, delay=2)": _Stale,
}


@pytest.mark.parametrize("rule", FORMULAS)
def test_two_ranks_do_what_the_rules_formula_says_after_every_step(ranks, rule):
    found = ranks.run(2, _watched, f"{rule} / none")
    models = [deep(seed=0) for _ in range(2)]
    optimizers, formula = [_sgd(m.parameters()) for m in models], FORMULAS[rule](flat(models[0]))
    formula.buckets = found[0][1]
    assert int(found[0][1].max()) >= 3
    moved = 0.0
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, range(step, step + 1))
        expected = [flat(m) for m in models]
        alone = [w.clone() for w in expected]
        formula(step + 1, expected)
        for model, w in zip(models, expected, strict=True):
            torch.nn.utils.vector_to_parameters(w.clone(), model.parameters())
        for rank, w in enumerate(expected):
            torch.testing.assert_close(found[rank][0][step], w, rtol=1e-4, atol=1e-5)
        moved = max(moved, *(float((a - w).abs().max()) for a, w in zip(alone, expected, strict=True)))
    assert moved > 1e-2  # a rule that does nothing would be seen


def _with_adam(rank, world, text, steps=STEPS):
    model = deep(seed=rank)
    optimizer = _adam(model.parameters())
    handle = tacit.attach(model, optimizer, text, bucket="20kB")
    alike, sent = [], []
    for step in range(steps):
        train(model, optimizer, rank, range(step, step + 1))
        alike.append(flat(model))
        sent.append(handle.stats.sent_nbytes)
    return alike, sent, handle.step


@pytest.mark.parametrize("text", ["local(4, after=5) / none", "post_local(4, after=5) / none"])
def test_gradients_come_first_and_then_the_models_part(ranks, text):
    found = ranks.run(2, _with_adam, text)
    for (models, _, step), wanted in zip(found, _reference(2, 4, STEPS, _adam, after=5), strict=True):
        torch.testing.assert_close(models[-1], wanted, rtol=1e-3, atol=1e-5)
        assert step == STEPS
    alike = [torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True)]
    assert alike == [True] * 5 + [False] * 3 + [True] + [False] * 2


def test_the_first_gradients_have_a_codec_of_their_own(ranks):
    numel = flat(deep()).numel()
    _, sent, _ = ranks.run(2, _with_adam, "sparseloco(4, after=5, first=none) / ef(topk, decay=0.95)")[0]
    steps = [later - before for before, later in zip([0, *sent], sent, strict=False)]
    assert all(4 * numel <= nbytes < 4.2 * numel for nbytes in steps[:5])
    assert steps[5:8] == [0, 0, 0] and 0 < steps[8] < 0.05 * 4 * numel


def _accumulated(rank, world):
    """Two backward passes a step, the second of which is said."""
    model, optimizer, handle = _start(rank, "local(2, after=2) / none")
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        with handle.no_sync():
            loss_of(model, rank, 2 * step).backward()
        sent = handle.stats.sent_nbytes
        loss_of(model, rank, 2 * step + 1).backward()
        seen.append((handle.stats.sent_nbytes > sent, model[0][0].weight.grad.clone()))
        optimizer.step()
    return seen, handle.step


def test_gradients_accumulate_before_they_are_said(ranks):
    found = ranks.run(2, _accumulated)
    for step, (one, other) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        assert one[0] == (step < 2) and torch.equal(one[1], other[1]) == (step < 2)
    assert found[0][1] == 3


def _losses(rank, world, text):
    model, optimizer, handle = _start(rank, text)
    train(model, optimizer, rank, range(60))
    handle.merge()
    with torch.no_grad():
        held_out = sum(loss_of(model, 99, step).item() for step in range(20)) / 20
    return held_out, handle.stats.sent_nbytes


def test_fewer_rounds_send_as_much_less_and_learn_as_well(ranks):
    every, every_nbytes = ranks.run(2, _losses, "local(1) / none")[0]
    for rule in ("local(8)", "diloco(8, rate=0.7, momentum=0.5)", "stale(8, delay=4)"):
        loss, nbytes = ranks.run(2, _losses, f"{rule} / none")[0]
        assert loss < 1.1 * every + 0.01, rule
        assert nbytes < 0.15 * every_nbytes, rule


def _resumed(rank, world, text, broken_at):
    """The model after STEPS steps, with a checkpoint loaded into a new handle after `broken_at` of them, if any."""
    model, optimizer, handle = _start(rank, text)
    if broken_at:
        train(model, optimizer, rank, range(broken_at))
        kept = handle.full_state_dict(), optimizer.state_dict()
        handle.close()
        model, optimizer, handle = _start(rank + 5, text)
        handle.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    train(model, optimizer, rank, range(broken_at, STEPS))
    return flat(model)


@pytest.mark.parametrize(
    "rule", ["local(4)", "slowmo(4)", "diloco(4)", "streaming(4, parts=2, delay=1)", "stale(4, delay=2)"]
)
def test_a_resumed_run_has_the_same_bits(ranks, rule):
    broken_at = 4 if "delay" in rule else 7  # between saying and merging, where there is time in between
    whole, resumed = (ranks.run(2, _resumed, f"{rule} / ef(int4)", at) for at in (0, broken_at))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("broken_at", [3, 5, 7])  # among gradients, where models part, and after it
def test_a_run_that_began_with_gradients_resumes_to_the_same_bits(ranks, broken_at):
    whole, resumed = (ranks.known(2, _resumed, "diloco(4, after=5) / ef(int4)", at) for at in (0, broken_at))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def _between(rank, world):
    """Saved after the last gradients, before the optimizer's step: the models have not parted yet."""
    model, optimizer, handle = _start(rank, "local(4, after=5) / none")
    train(model, optimizer, rank, range(4))
    optimizer.zero_grad()
    loss_of(model, rank, 4).backward()
    handle.load_state_dict(handle.full_state_dict())
    assert handle.divergence() == 0.0
    handle.merge()  # of models that are alike: nothing changes
    optimizer.step()
    train(model, optimizer, rank, range(5, STEPS))
    return flat(model)


def test_a_checkpoint_between_gradients_and_step_parts_models_later(ranks):
    whole = ranks.run(2, _resumed, "local(4, after=5) / none", 0)
    assert all(torch.equal(a, b) for a, b in zip(ranks.run(2, _between), whole, strict=True))


def _rewound(rank, world):
    """The model after STEPS steps; then again from a checkpoint of the third, by the same handle, which has still something on its way."""
    model, optimizer, handle = _start(rank, "streaming(4, parts=2, delay=3, after=5) / ef(int4)")
    train(model, optimizer, rank, range(3))
    kept = handle.full_state_dict(), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, range(3, STEPS))
    first = flat(model)
    handle.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(model, optimizer, rank, range(3, STEPS))
    return first, flat(model)


def test_a_handle_goes_back_to_gradients_with_the_checkpoint(ranks):
    for first, again in ranks.run(2, _rewound):
        assert torch.equal(first, again)


def _other_world(rank, world, state, text):
    model, _, handle = _start(rank, text)
    handle.load_state_dict(state)
    return flat(model)


def _state(rank, world, text):
    model, optimizer, handle = _start(rank, text)
    train(model, optimizer, rank, range(6))
    return handle.full_state_dict(), flat(model)


@pytest.mark.parametrize("text", ["local(4) / none", "local(4, after=9) / none"])
def test_another_world_starts_from_the_mean_of_the_models(ranks, text):
    states = ranks.run(3, _state, text)
    mean = torch.stack([model for _, model in states]).mean(0)
    for model in ranks.run(2, _other_world, states[0][0], text):
        torch.testing.assert_close(model, mean)


def _hosts(rank, world):
    """Two hosts of two ranks: DDP inside, diloco between."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = torch.nn.parallel.DistributedDataParallel(deep(), process_group=inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, "diloco(4) / hush", group=across)
    parted = []
    for step in range(8):
        train(model, optimizer, rank, range(step, step + 1))
        parted.append(flat(model))
    return parted, handle.stats.sent_nbytes


def test_ddp_inside_a_host_and_a_rule_between_hosts(ranks):
    found = ranks.run(4, _hosts)
    for step in range(8):
        models = [parted[step] for parted, _ in found]
        assert torch.equal(models[0], models[1]) and torch.equal(models[2], models[3])
        assert torch.equal(models[0], models[2]) == (step in (3, 7))


def _adacomm(rank, world, tell):
    model, optimizer, handle = _start(rank, "adacomm(8) / none")
    merged_at = []
    for step in range(30):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if tell:
            handle.report_loss((0.5 + rank) / (1 + step))  # the ranks' losses differ, their mean does not
        before = handle.stats.sent_nbytes
        optimizer.step()
        if handle.stats.sent_nbytes > before:
            merged_at.append(step)
    return merged_at


def test_adacomm_agrees_on_a_period_from_the_mean_loss(ranks):
    found = ranks.run(2, _adacomm, True)
    # The mean is 1 / (1 + step), relative to 1 / 8: periods of 8, 8, then 8 (8 / 16)^0.5 = 5.7, 8 (8 / 22)^0.5 = 4.8, 8 (8 / 27)^0.5 = 4.4, rounded up.
    assert found[0] == found[1] == [7, 15, 21, 26]


def _not_told(rank, world):
    try:
        return _adacomm(rank, world, False)
    except ConfigError as error:
        return str(error)


def test_adacomm_without_a_loss_says_what_is_missing(ranks):
    assert "handle.report_loss(loss)" in ranks.run(2, _not_told)[0]


def _refusals(rank, world):
    model, said = deep(), []
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for candidate, given in ((model, None), (wrapped, optimizer)):
        try:
            tacit.attach(candidate, given, "local(4) / none")
        except ConfigError as error:
            said.append(str(error))
    try:
        tacit.attach(wrapped, optimizer, "local(4, after=5) / none", group=dist.group.WORLD)
    except ConfigError as error:
        said.append(str(error))
    return said


def test_what_cannot_work_is_refused_with_the_way_out(ranks):
    without, ddp, early = ranks.run(2, _refusals)[0]
    assert "give attach() the optimizer" in without and "attach the plain module" in ddp
    assert "a rule without after, such as local(4)" in early


def _recorded(rank, world, path):
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tacit.attach(model, optimizer, "local(4) / none", records=f"{path}/{rank}.jsonl")
    train(model, optimizer, rank, range(8))
    handle.close()


def test_records_tell_when_and_why_models_were_merged(ranks, tmp_path):
    from tacit import records

    ranks.run(2, _recorded, str(tmp_path))
    rounds = [r for r in records.read(tmp_path / "1.jsonl") if r["kind"] == "round"]
    assert [(r["step"], r["why"]) for r in rounds] == [(4, "every 4"), (8, "every 4")]
