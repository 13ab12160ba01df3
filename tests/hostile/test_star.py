"""Every attack on ranks whose aggregator somebody has taken the place of, for a second."""

import pytest
from hostile import star


@pytest.mark.parametrize("attack", star.ATTACKS, ids=lambda attack: attack.__name__)
def test_ranks_train_on_under_the_attack(attack):
    found = attack(1.0, 0)
    assert found["connections"] >= 1 and found["steps"] > 5
