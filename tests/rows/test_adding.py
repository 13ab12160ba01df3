"""The two rules of adding, and the exponent that all ranks agree on."""

import torch

from tacit.rows.adding import NOTHING, Adder


def means(adder: Adder, values: list[float], world: int = 1) -> float:
    gradients = torch.tensor(values)[:, None]
    return float(adder.means(gradients, torch.zeros(len(values), dtype=torch.int64), 1, world))


def test_the_exponent_leaves_25_bits_to_the_largest_sum_of_the_last_16_steps() -> None:
    adder = Adder(exact=True)
    assert adder.exponent == 40
    assert means(adder, [3.0, 2.0], world=2) == 2.5
    assert adder.own == 3  # 5 < 2^3
    adder.agree([adder.own, 7, NOTHING])
    assert (adder.own, adder.history, adder.exponent) == (NOTHING, [7], 18)
    for _ in range(15):
        adder.agree([2])
    assert adder.exponent == 18
    adder.agree([2])
    assert (len(adder.history), adder.exponent) == (16, 23)
    adder.agree([NOTHING, NOTHING])  # a step without gradients changes nothing
    assert (len(adder.history), adder.exponent) == (16, 23)
    adder.agree([-300])
    assert adder.exponent == 23
    for _ in range(16):
        adder.agree([-300])
    assert adder.exponent == 150


def test_exact_sums_keep_what_float32_loses_and_round_what_lies_below_the_exponent() -> None:
    values = [1.0, 2.0**-30, -1.0]
    assert means(Adder(exact=True), values) == 2.0**-30
    assert means(Adder(exact=False), values) == 0.0
    coarse = Adder(exact=True)
    coarse.agree([25])  # 2^0 is the last bit
    assert means(coarse, [0.75, 0.75, 0.25]) == 2.0


def test_a_sum_that_is_not_finite_decides_no_exponent() -> None:
    adder = Adder(exact=True)
    assert means(adder, [float("nan"), 1.0]) != means(adder, [float("inf"), 1.0])  # NaN both
    assert adder.own == NOTHING


def test_rank_order_needs_no_exponent() -> None:
    adder = Adder(exact=False)
    assert means(adder, [1.0, 2.0], world=2) == 1.5
    assert adder.own == NOTHING
