"""Low rank: what it sends, what it remembers, and input that degenerates."""

import pytest
import torch

from tacit.errors import CheckpointError, ConfigError, PairingError
from tacit.layout import Layout
from tacit.requests import LocalMemory, declared_nbytes, loop_back
from tacit.shapes import requests_of
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check, nmse

LAYOUT = Layout.of(
    {"a.weight": (96, 80), "a.bias": (96,), "conv": (32, 16, 3, 3), "thin": (1, 500), "table": (64, 64)},
    outer={"table"},
)
PLAIN = "lowrank(4, p=none, q=none, rest=none)"


def noise(world, seed=0, numel=LAYOUT.numel):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=rng) for _ in range(world)]


def memories(world, layout=LAYOUT):
    return [LocalMemory(torch.empty(layout.numel), given=layout) for _ in range(world)]


def low_rank(rows, columns, rank, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=rng) @ torch.randn(rank, columns, generator=rng)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "lowrank(2)",
        "lowrank(1, p=int8, rest=bf16)",
        "lowrank(2, p=hush, q=hush, rest=hush)",
        "lowrank(2, p=thc, q=none)",
        "lowrank(2, start=3, refresh=1, embeddings=True)",
        "lowrank(rank=auto, refresh=2)",
        "lowrank(rank=auto, budget=0.1, p=int8)",
        PLAIN,
    ],
)
def test_it_keeps_all_rules_and_its_text_reads_back(text):
    codec = parse_codec(text)
    assert [f for f in check(codec) if not f.passed] == []
    assert Strategy.parse(str(Strategy.parse(text))) == Strategy.parse(text)


def test_defaults_are_left_out_of_its_text():
    assert str(parse_codec("lowrank")) == "lowrank(8)"
    assert str(parse_codec("lowrank(rank=4, refresh=64, rest=int8)")) == "lowrank(4, rest=int8(block=256))"


def test_only_factors_of_large_matrices_travel_and_the_rest_travels_beside_them():
    codec = parse_codec("lowrank(4, p=none, q=none, rest=none)")
    rest = 96 + 500 + 64 * 64
    factors = 4 * (96 + 80) + 4 * (32 + 144)
    assert declared_nbytes(codec, LAYOUT) == 4 * (factors + rest)
    asked = requests_of(codec, LAYOUT.numel, 4, LAYOUT)
    assert [each.up_nbytes for each in asked] == [4 * 4 * (96 + 32), 4 * (4 * (80 + 144) + rest)]
    assert {each.on for each in asked} == {"meta"}
    other = parse_codec("lowrank(4, p=none, q=none, rest=bf16, embeddings=True)")
    assert other.traits.rounds == 3
    assert declared_nbytes(other, LAYOUT) == 4 * (factors + 4 * 128) + 2 * (96 + 500)


def test_without_rounding_a_matrix_of_low_rank_arrives_whole():
    layout = Layout.of({"m": (60, 90)})
    whole = low_rank(60, 90, 4)
    shares = [whole * share for share in (0.5, 2.0, -1.0)]
    reduced = loop_back(parse_codec(PLAIN), [s.reshape(-1) for s in shares], layout=layout)
    torch.testing.assert_close(reduced[0].total.view(60, 90), 1.5 * whole, rtol=1e-4, atol=1e-4)


def test_what_is_sent_and_what_is_remembered_add_up_for_every_rank():
    codec, kept = parse_codec("lowrank(4)"), memories(3)
    before = torch.zeros(3, LAYOUT.numel)
    for step in range(4):
        inputs = noise(3, seed=step)
        reduced = loop_back(codec, inputs, memories=kept, step=step)
        after = torch.stack([memory.vector("residual") for memory in kept])
        sent = torch.stack([each.contribution() for each in reduced])
        torch.testing.assert_close(sent + after, torch.stack(inputs) + before, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sent.sum(0), reduced[0].total, rtol=1e-4, atol=1e-4)
        before = after.clone()


def test_a_coarse_p_costs_little_and_the_rounding_of_r_is_an_error_of_the_update():
    layout = Layout.of({"m": (256, 192)})
    rng = torch.Generator().manual_seed(0)
    decay = torch.diag(0.95 ** torch.arange(192.0))
    matrix = torch.linalg.qr(torch.randn(256, 192, generator=rng))[0] @ decay
    inputs = [(matrix @ torch.linalg.qr(torch.randn(192, 192, generator=rng))[0]).reshape(-1)]

    def error(p, q):
        codec = parse_codec(f"lowrank(8, p={p}, q={q}, rest=none)")
        kept = memories(1, layout)
        for step in range(6):  # the subspace settles
            kept[0].vector("residual").zero_()
            total = loop_back(codec, inputs, memories=kept, step=step)[0].total
        return nmse(total, inputs)

    exact = error("none", "none")
    assert 0.4 < exact < 0.5  # 0.95^16
    assert error("int4", "none") < 1.05 * exact
    rounding = nmse(loop_back(parse_codec("int4"), inputs)[0].total, inputs)
    assert 0.3 * rounding < error("none", "int4") - exact < 3 * rounding


def test_noise_now_and_then_finds_what_lies_outside_of_the_subspace():
    layout = Layout.of({"m": (40, 40)})
    gradient, basis = torch.zeros(40, 40), torch.zeros(2, 40)
    gradient[5, 11], gradient[8, 12], gradient[3, 7] = 100.0, 10.0, 0.5
    basis[0, 11] = basis[1, 12] = (
        1.0  # the two strong entries keep it where it is; the third is orthogonal to it
    )

    def still_owed(refresh):
        codec = parse_codec(f"lowrank(2, p=none, q=none, rest=none, refresh={refresh})")
        kept = memories(1, layout)
        kept[0].tensor("q", "m", (2, 40), rule="first", init=lambda: basis)
        for step in range(120):
            loop_back(codec, [gradient.reshape(-1)], memories=kept, step=step)
        return kept[0].vector("residual").view(40, 40)[3, 7].item()

    assert still_owed(refresh=1000) == 60.0  # never seen, however much of it waits
    assert still_owed(refresh=10) < 20.0


@pytest.mark.parametrize("text", ["lowrank(2)", PLAIN, "lowrank(2, p=hush, q=hush, rest=hush)"])
def test_degenerate_matrices_are_right_and_leave_memory_in_order(text):
    codec, layout = parse_codec(text), Layout.of({"m": (48, 40), "v": (10,)})
    zero = torch.zeros(layout.numel)
    kept = memories(2, layout)
    for step in range(2):
        assert not loop_back(codec, [zero, zero], memories=kept, step=step)[0].total.count_nonzero()
    one_row = zero.clone()
    one_row[40 * 7 : 40 * 8] = torch.arange(40.0)
    huge = zero.clone()
    huge[123] = 1e30
    for given in (one_row, huge, torch.ones(layout.numel)):
        kept = memories(2, layout)
        owed = torch.zeros(layout.numel)
        for step in range(12):
            inputs = [given, given] if step == 0 else [zero, zero]
            owed += torch.stack(inputs).sum(0)
            owed -= loop_back(codec, inputs, memories=kept, step=step)[0].total
        assert owed.double().norm() < 0.05 * given.double().norm()


def test_a_nan_reaches_all_ranks_and_memory_stays_as_it_was():
    codec, kept = parse_codec("lowrank(2)"), memories(3)
    loop_back(codec, noise(3), memories=kept)
    residuals = [memory.vector("residual").clone() for memory in kept]
    bases = {name: t.clone() for name, t in kept[0].kept.items() if name.startswith("q/")}
    assert len(bases) == 2
    bad = noise(3, seed=1)
    bad[1][5] = torch.nan
    reduced = loop_back(codec, bad, memories=kept, step=1)
    assert not any(bool(each.total[: 96 * 80].isfinite().any()) for each in reduced)
    for memory, before in zip(kept, residuals, strict=True):
        assert memory.vector("residual").isfinite().all()
        assert torch.equal(memory.vector("residual")[: 96 * 80], before[: 96 * 80])
    assert torch.equal(kept[0].kept["q/a.weight"], bases["q/a.weight"])
    assert loop_back(codec, noise(3, seed=2), memories=kept, step=2)[0].total.isfinite().all()


def test_the_first_steps_send_everything_with_the_codec_of_the_rest():
    codec, kept = parse_codec("lowrank(4, p=none, q=none, rest=none, start=2)"), memories(2)
    for step in range(3):
        inputs, asked = noise(2, seed=step), []
        total = loop_back(codec, inputs, memories=kept, step=step, observe=asked.append)[0].total
        exact = torch.allclose(total, inputs[0] + inputs[1])
        assert exact == (step < 2)
        assert len(asked) == codec.traits.rounds


def test_rank_larger_than_a_matrix_sends_the_matrix():
    layout = Layout.of({"m": (12, 12), "n": (200, 200)})
    asked = requests_of(parse_codec("lowrank(64, p=none, q=none, rest=none)"), layout.numel, 2, layout)
    assert sum(each.up_nbytes for each in asked) == 4 * (144 + 40_000)  # 64 x 400 is no half of 40,000
    asked = requests_of(parse_codec("lowrank(32, p=none, q=none, rest=none)"), layout.numel, 2, layout)
    assert sum(each.up_nbytes for each in asked) == 4 * (144 + 32 * 400)


AUTO = "lowrank(rank=auto, p=none, q=none, rest=none, refresh=1"
TWO = Layout.of({"flat": (160, 160), "steep": (160, 160), "v": (10,)})


def two_spectra(world, step):
    """A matrix whose directions are all alike, and one with two."""
    flat = noise(world, seed=step, numel=160 * 160)
    steep = low_rank(160, 160, 2)
    return [torch.cat([own, 100 * steep.reshape(-1), torch.ones(10)]) for own in flat]


def test_auto_gives_ranks_to_the_matrix_that_needs_them_within_the_bytes_of_rank_8():
    kept, seen = memories(3, TWO), []
    for step in range(20):
        asked = []
        loop_back(
            parse_codec(AUTO + ")"), two_spectra(3, step), memories=kept, step=step, observe=asked.append
        )
        factors = sum(each.nbytes for each in asked) - 4 * 10
        assert 0.9 < factors / (4 * 2 * 8 * 320) <= 1
        seen.append(tuple(len(kept[0].kept[f"q/{name}"]) for name in ("flat", "steep")))
    assert all(steep <= 4 and flat >= 11 for flat, steep in seen[-8:]), seen
    for memory in kept[1:]:
        assert torch.equal(memory.kept["q/flat"], kept[0].kept["q/flat"])


def test_matrices_that_are_alike_keep_like_ranks_whatever_waits_in_the_residuals():
    layout = Layout.of(dict.fromkeys("abcd", (100, 100)))
    kept = memories(2, layout)
    for step in range(50):
        loop_back(parse_codec(AUTO + ")"), noise(2, step, layout.numel), memories=kept, step=step)
        ranks = [len(kept[0].kept[f"q/{name}"]) for name in "abcd"]
        assert sum(ranks) == 32 and all(4 <= rank <= 13 for rank in ranks), (step, ranks)


def test_ranks_that_grow_find_the_new_directions_and_keep_the_old_ones():
    codec, layout = parse_codec(AUTO + ", budget=0.1)"), Layout.of({"m": (200, 100), "n": (200, 100)})
    whole = torch.cat([low_rank(200, 100, 12).reshape(-1), low_rank(200, 100, 1).reshape(-1)])
    kept = memories(2, layout)
    for step in range(12):
        kept[0].vector("residual").zero_()
        kept[1].vector("residual").zero_()
        total = loop_back(codec, [whole, whole], memories=kept, step=step)[0].total
    assert len(kept[0].kept["q/m"]) > 6 > len(kept[0].kept["q/n"])  # one rank for both would be 6
    start = loop_back(codec, [whole, whole], layout=layout)[0].total
    assert nmse(total, [whole, whole]) < 0.2 * nmse(start, [whole, whole])


def test_the_bytes_of_a_budget_are_a_share_of_the_matrices():
    layout = Layout.of({"m": (500, 300), "v": (77,)})
    for budget in (0.01, 0.03, 0.06):
        codec = parse_codec(f"lowrank(rank=auto, budget={budget}, rest=none)")
        factors = declared_nbytes(codec, layout) - 4 * 77
        assert budget - 0.003 < (factors - 100) / (4 * 500 * 300) <= budget  # the last blocks are not full


def test_a_budget_below_rank_1_sends_rank_1():
    least, one = (
        parse_codec(f"lowrank({text}, p=none, q=none, rest=none)")
        for text in ("rank=auto, budget=0.0001", "1")
    )
    kept = memories(2)
    for step in range(3):
        asked = []
        loop_back(least, noise(2, step), memories=kept, step=step, observe=asked.append)
        assert (
            sum(each.nbytes for each in asked)
            == declared_nbytes(one, LAYOUT)
            == declared_nbytes(least, LAYOUT)
        )


@pytest.mark.parametrize("columns", [0, 300])
def test_a_subspace_of_a_damaged_checkpoint_is_refused_in_one_sentence(columns):
    kept = memories(2)
    for memory in kept:
        memory.kept["q/a.weight"] = torch.zeros(columns, 80)
    with pytest.raises(
        CheckpointError, match=rf"'a.weight' has {columns} columns .* from 1 to 21; the checkpoint is damaged"
    ):
        loop_back(parse_codec("lowrank(rank=auto)"), noise(2), memories=kept)


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        ("lowrank(0)", ConfigError, "from 1 to 256"),
        ("lowrank(-3)", ConfigError, "from 1 to 256"),
        ("lowrank(1000)", ConfigError, "from 1 to 256"),
        ("lowrank(2.5)", ConfigError, "from 1 to 256"),
        ("lowrank(True)", ConfigError, "from 1 to 256"),
        ("lowrank(rank=always)", ConfigError, "or auto"),
        ("lowrank(8, budget=0.1)", ConfigError, "a budget needs rank=auto"),
        ("lowrank(rank=auto, budget=0.0)", ConfigError, "above 0 and below 1"),
        ("lowrank(rank=auto, budget=1)", ConfigError, "above 0 and below 1"),
        ("lowrank(rank=auto, budget=nan)", ConfigError, "above 0 and below 1"),
        ("lowrank(8, p=4)", ConfigError, "a codec is needed"),
        ("lowrank(8, q=ef(int4))", PairingError, "a codec without memory"),
        ("lowrank(8, rest=lowrank)", PairingError, "a codec without memory"),
        ("lowrank(8, start=-1)", ConfigError, "0 or more"),
        ("lowrank(8, refresh=0)", ConfigError, "1 or more"),
        ("lowrank(8, embeddings=2)", ConfigError, "True or False"),
        ("lowrank(8, bits=4)", ConfigError, "no option 'bits'"),
        ("ef(lowrank)", PairingError, "already remembers"),
        ("lowrank / star(at='127.0.0.1:1')", PairingError, "sharded"),
        ("adaptive / lowrank / gossip", PairingError, "gossip"),
        ("lowrank / ring", PairingError, "sharded"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(text, error, why):
    with pytest.raises(error) as raised:
        Strategy.parse(text)
    assert why in str(raised.value) and "\n" not in str(raised.value)
