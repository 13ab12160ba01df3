"""Every attack on gossip and its store, for a second."""

import pytest
from hostile import gossip


@pytest.mark.parametrize("attack", gossip.ATTACKS, ids=lambda attack: attack.__name__)
def test_a_rank_and_its_store_stand_the_attack(attack):
    assert sum(attack(1.0, 0).values()) > 0
