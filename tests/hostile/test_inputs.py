"""Malformed files and texts are refused in one sentence each."""

import pytest
from hostile.inputs import ATTACKS


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.removeprefix("attack_"))
def test_what_is_malformed_is_refused_in_one_sentence(attack):
    counts = attack(seconds=2.0, seed=1)
    assert counts["texts"] > 100 and counts["refused"] > counts["texts"] / 10
