"""Two ranks that meet: the mean stays, the distance shrinks, whatever is said."""

import dataclasses

import pytest
import torch

from tacit.errors import PairingError
from tacit.gossip.layers import Layers
from tacit.gossip.meeting import difference, meet, merge_weights
from tacit.gossip.simulated import SimulatedReplicas
from tacit.requests import LocalMemory
from tacit.rounds import Local
from tacit.rounds.adaptive import Adaptive, learned
from tacit.rounds.rules import UNRELATED, Movement, Wish
from tacit.schemes import Gossip
from tacit.strategy import Strategy, parse_codec

CODECS = ("none", "bf16", "int8(block=64)", "int4(block=64)", "ef(int4(block=64))", "thc", "hush")


def pair(numel=5000, apart=0.1):
    rng = torch.Generator().manual_seed(3)
    reference = torch.randn(numel, generator=rng)
    moved = 0.2 * torch.randn(numel, generator=rng)
    left, right = (reference + moved + apart * torch.randn(numel, generator=rng) for _ in range(2))
    return left, right, reference


def both(codec, left, right, reference, number=1, memories=None):
    memories = memories or (LocalMemory(left), LocalMemory(right))
    low, high = meet(parse_codec(codec), left, right, reference, memories, seed=7, number=number)
    assert torch.equal(low.middle, high.middle)
    return left + low.delta, right + high.delta, low.middle


def test_without_a_codec_both_are_the_mean():
    left, right, reference = pair()
    a, b, middle = both("none", left, right, reference)
    for model in (a, b, middle):
        torch.testing.assert_close(model, (left + right) / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_the_mean_of_the_two_stays(codec):
    left, right, reference = pair()
    a, b, _ = both(codec, left, right, reference)
    torch.testing.assert_close(a + b, left + right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
def test_they_come_nearer_each_time_they_meet_until_they_agree(codec):
    left, right, reference = pair()
    memories = LocalMemory(left), LocalMemory(right)
    first = (left - right).norm()
    for number in range(12):
        left, right, reference = both(codec, left, right, reference, number, memories)
    assert (left - right).norm() < 0.05 * first


def test_what_a_codec_did_not_say_stays_in_the_model():
    left, right, reference = pair()
    codec, said = parse_codec("topk(share=0.25)"), [torch.zeros_like(left), torch.zeros_like(right)]
    for w, heard in zip((left, right), said, strict=True):
        codec.unpack_add(codec.pack(w - reference), heard)
    a, b, middle = both("topk(share=0.25)", left, right, reference)
    torch.testing.assert_close(middle, reference + (said[0] + said[1]) / 2)
    for model, w, own in ((a, left, said[0]), (b, right, said[1])):
        torch.testing.assert_close(model - middle, (w - reference) - own, atol=1e-5, rtol=0)
    silent = (said[0] == 0) & (said[1] == 0)
    assert (
        silent.sum() > 2000 and torch.equal(a[silent], left[silent]) and torch.equal(b[silent], right[silent])
    )


# ---- when and with whom


def moved(*by, lr=0.1, top=0.1, lengths=None, sizes=None):
    """Layers that have come so far, relative to their lengths; all as large, if nothing else is said."""
    lengths = lengths or [1.0] * len(by)
    squares = [b**2 * length for b, length in zip(by, lengths, strict=True)]
    return Movement(3, squares, lengths, sizes or [100] * len(by), lr, top)


def test_the_trigger_fires_on_a_relative_change_of_the_model():
    rule = Adaptive(0.02)
    assert rule.wish(moved(0.0199)) is None
    assert rule.wish(moved(0.0201)) == Wish("moved 2.01 %")


def test_the_threshold_follows_the_learning_rate():
    root, straight, constant = Adaptive(0.02), Adaptive(0.02, follow=1), Adaptive(0.02, follow=0)
    for rule, limit in ((root, 0.01), (straight, 0.005), (constant, 0.02)):  # a quarter of the rate
        assert rule.wish(moved(1.001 * limit, lr=0.025)) and not rule.wish(moved(0.999 * limit, lr=0.025))
    for rule in (root, Adaptive(0.02, by="model")):  # at a rate of 0 nobody learns any more
        assert rule.wish(moved(0.0, lr=0.0)) is None and rule.wish(moved(0.5, 0.1, lr=0.0)) is None
    assert constant.wish(moved(0.5, lr=0.0, top=0.0)) == Wish("moved 50 %")


def test_one_layer_is_enough_by_layer_and_says_itself_and_by_model_all_are_said():
    movement = moved(0.1, 0.0, lengths=[1.0, 99.0])
    assert Adaptive(0.05).wish(movement) == Wish("moved 10 %", (0,))
    assert Adaptive(0.05, by="model").wish(movement) is None
    assert Adaptive(0.0099, by="model").wish(movement) == Wish("moved 1 %")
    assert Adaptive(0.05).wish(Movement(1, [0.0, 1e-9], [1.0, 0.0], [1, 1], 0.1, 0.1)) == Wish(
        "moved inf %", (1,)
    )


def test_small_layers_talk_sooner_by_the_fourth_root_of_their_size_and_the_smallest_not_for_nothing():
    rule, sizes = Adaptive(0.08), [160_000, 40_000, 10]
    for layer, limit in enumerate((0.08, 0.08 * 0.5**0.5, 0.08 * (1 / 16) ** 0.25)):
        just_over = [1.001 * limit if k == layer else 0.0 for k in range(3)]
        assert layer in rule.wish(moved(*just_over, sizes=sizes)).layers
        assert rule.wish(moved(*(0.998 * by for by in just_over), sizes=sizes)) is None


def test_layers_go_along_if_that_wastes_less_than_a_meeting_of_their_own_costs():
    """A layer of a 16th of the largest may go at any time; the largest if it would in a 16th of its steps, which go with the square."""
    rule, sizes = Adaptive(0.02), [6400, 6400, 390, 410]
    nearly = 0.02 * (15 / 16) ** 0.5
    assert rule.wish(moved(0.0201, nearly + 1e-5, 0.0, 0.0, sizes=sizes)).layers == (0, 1, 2)
    assert rule.wish(moved(0.0201, nearly - 1e-5, 0.0, 0.01, sizes=sizes)).layers == (0, 2, 3)
    assert rule.wish(moved(0.0201, 0.0201, 0.0, 0.01, sizes=sizes)).layers is None  # all of them
    assert rule.wish(moved(0.0199, 0.0199, 0.0, 0.0, sizes=sizes)) is None


def test_a_meeting_costs_no_more_in_a_model_with_one_huge_layer():
    sizes = [1 << 30, 1 << 20, 1 << 14]
    far = moved(0.0201, 0.001, 0.0, sizes=sizes)
    assert Adaptive(0.02).wish(far).layers == (0,)
    just = 0.02 * 2**-4  # of 2^14 elements of 2^30
    assert Adaptive(0.02).wish(moved(0.0, 0.0, 1.001 * just, sizes=sizes)).layers == (2,)
    assert Adaptive(0.02).wish(moved(0.0, 0.0, 0.999 * just, sizes=sizes)) is None


@pytest.mark.parametrize("codec", ["none", "hush"])
def test_two_that_meet_see_whether_they_moved_alike_unrelated_or_against_each_other(codec):
    rng = torch.Generator().manual_seed(5)
    reference, one, other = (torch.randn(20_000, generator=rng) for _ in range(3))
    for left, right, expected in ((one, one, 0.0), (one, other, 1.0), (one, -one, 2.0)):
        memories = LocalMemory(one), LocalMemory(other)
        low, high = meet(
            parse_codec(codec), reference + left, reference + right, reference, memories, seed=7, number=1
        )
        shown = difference(low.delta, low.middle - reference)
        assert shown == pytest.approx(expected, abs=0.03)  # of 4 bits: each has its own noise
        assert difference(high.delta, high.middle - reference) == pytest.approx(shown, abs=1e-5)
    assert difference(torch.zeros(3), torch.ones(3)) == 0.0
    assert (
        difference(torch.full((3,), 1e30), torch.ones(3)) == 0.0
    )  # beyond float32's squares: not learned from


def test_theta_falls_where_two_that_meet_pull_against_each_other_and_only_there():
    rule = Adaptive(0.06)
    for differs, limit in ((0.0, 0.06), (1.0, 0.06), (1.1, 0.06 / 1.1**6), (1.2009369, 0.02), (2.0, 0.02)):
        for by, fires in ((1.001 * limit, True), (0.999 * limit, False)):
            movement = dataclasses.replace(moved(by), differs=differs)
            assert (rule.wish(movement) is not None) == fires


def test_a_rank_needs_some_meetings_to_learn_that_data_differ():
    differs = UNRELATED
    for _ in range(16):
        differs = learned(differs, 1.3)
    assert 1.15 < differs < 1.3


def test_what_remembers_is_refused_among_models_that_remember_anyway():
    with pytest.raises(PairingError, match="leave ef\\(\\) out"):
        Strategy.parse("adaptive / ef(int4(block=64)) / gossip")


def test_exponential_partners_meet_everybody_in_log_n_rounds():
    who = Gossip(peers="exponential")
    assert [who.partner(0, 8, number, range(8), 0) for number in range(4)] == [1, 2, 4, 1]
    assert who.partner(0, 8, 0, [0, 3, 5], 0) == 3  # the next one that lives
    assert who.partner(7, 8, 1, range(8), 0) == 1


def test_random_partners_are_others_that_live_and_all_of_them_come():
    who = Gossip()
    chosen = [who.partner(2, 8, number, [1, 2, 5, 7], seed=0) for number in range(60)]
    assert set(chosen) == {1, 5, 7}
    assert who.partner(2, 8, 0, [2], 0) is None


@pytest.mark.parametrize(
    "text",
    [
        "adaptive(0.02) / none / gossip",
        "adaptive(0.05, follow=0, by=model) / hush / gossip(peers=exponential, mode=push)",
        "every / int8(block=256) / gossip",
        "local(13) / none / gossip(mode=pull)",
    ],
)
def test_the_text_parses_back_to_itself(text):
    assert str(Strategy.parse(text)) == text


# ---- replicas


def replicas(trigger, codec="none", who=None, numel=2000, world=8):
    models = torch.randn(numel, generator=torch.Generator().manual_seed(0)).repeat(world, 1)
    return SimulatedReplicas(
        models, Layers((numel // 2, numel // 2)), trigger, parse_codec(codec), who or Gossip()
    )


def test_symmetric_replicas_keep_their_mean_and_find_together():
    found = replicas(Local(1), who=Gossip(peers="exponential"))
    rng = torch.Generator().manual_seed(1)
    found.models += 0.1 * torch.randn(found.models.shape, generator=rng)
    mean, apart = found.mean().clone(), found.divergence()
    for _ in range(12):
        found.stepped(0.1)
    torch.testing.assert_close(found.mean(), mean, rtol=1e-4, atol=1e-5)
    assert found.divergence() < 0.05 * apart


def test_push_moves_the_called_and_pull_the_caller():
    for mode in ("push", "pull"):
        found = replicas(Local(1), who=Gossip(mode=mode), world=2)
        found.models[1] += 1.0
        before = found.models.clone()
        found._meet(0, 1, None)
        still, went = (0, 1) if mode == "push" else (1, 0)
        assert torch.equal(found.models[still], before[still])
        torch.testing.assert_close(found.models[went], before.mean(0))
        assert found.sent_nbytes == 4 * 2000


def test_an_replica_that_waits_holds_its_model_and_those_that_step_move_towards_it():
    found = replicas(Local(1), world=2)
    found.waiting = {0}
    found.models[1] += 1.0
    before = found.models.clone()
    found.stepped(0.1, [1])
    assert torch.equal(found.models[0], before[0]) and found.exchanges == 1
    torch.testing.assert_close(found.models[1], before.mean(0))
    found.stepped(0.1, [1])
    assert found.steps == [0, 2]  # a model counts by its steps, and one without any hardly
    torch.testing.assert_close(found.mean(), (found.models[0] + 2 * found.models[1]) / 3)


def test_a_trigger_talks_as_rarely_as_the_models_move():
    rng = torch.Generator().manual_seed(1)
    counts = {}
    for theta in (0.02, 0.05):
        found = replicas(Adaptive(theta))
        for _ in range(40):
            found.models += 0.01 * torch.randn(found.models.shape, generator=rng)
            found.stepped(0.1)
        counts[theta] = found.exchanges
    assert 0 < 3 * counts[0.05] < counts[0.02] < 8 * 40


@pytest.mark.parametrize("codec", ["none", "hush"])
def test_replicas_say_the_layers_that_have_moved_and_keep_their_mean(codec):
    found = replicas(Adaptive(0.02), codec, world=2)
    found.models[:, 1000:] += torch.tensor([[0.1], [0.3]])
    before = found.models.clone()
    found.stepped(0.1)
    assert found.exchanges == 1 and found.sent_nbytes == 2 * parse_codec(codec).nbytes(1000)
    assert torch.equal(found.models[:, :1000], before[:, :1000])
    torch.testing.assert_close(found.mean(), before.mean(0), rtol=1e-4, atol=1e-4)
    far = [(models[0] - models[1]).norm() for models in (before, found.models)]
    assert far[1] < 0.25 * far[0]  # 4 bits of what was said
    found.stepped(0.1)
    assert found.exchanges == 1  # nobody has moved since


def test_models_count_by_their_steps_and_none_is_all_of_the_mean():
    assert merge_weights([1000, 1000, 1000, 1000, 200]) == [1000, 1000, 1000, 1000, 200]
    assert merge_weights([0, 0]) == [1, 1]
    assert merge_weights([100, 100, 10**18]) == [100, 100, 1600]
    assert merge_weights([10**18, 100]) == [1600, 100]
