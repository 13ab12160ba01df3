"""An aggregator under attack adds exactly, loses no rank and keeps answering."""

import pytest
from hostile.aggregator import ATTACKS


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.removeprefix("attack_"))
def test_an_aggregator_under_attack_goes_on_as_if_nothing_were(attack):
    counts = attack(seconds=1.0, seed=1)
    assert min(counts.values()) > 0
