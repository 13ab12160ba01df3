import pytest
from hostile.states import ATTACKS


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_handle_is_as_it_was_after_every_refusal(attack):
    counts = attack(1.0, 0)
    assert counts["refused"] > 0.5 * counts["states"] > 10
