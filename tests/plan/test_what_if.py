"""Another link, other ranks, an aggregator: by formula, worked out by hand."""

import pytest
from plan_probes import BF16, INT8, PLAIN, cost, probe

from tacit.errors import ConfigError
from tacit.plan.what_if import PAYLOAD_SHARE, WhatIf, elsewhere, parsed_what_if

THC = cost("every / thc / sharded", nbytes_each=0.25, operation="all_to_all long", lossy=True)


def test_the_text_is_read():
    assert parsed_what_if("link=25Gbit, world=64 switch=aggregator") == WhatIf(25e9, 64, None, True)
    assert str(parsed_what_if("latency=5us world=8")) == "8 ranks, a latency of 5 us"


@pytest.mark.parametrize(
    "text", ["", "link", "link=25", "world=1", "world=x", "switch=fast", "speed=9", "link=1e-300bit"]
)
def test_a_wrong_text_gets_one_sentence(text):
    with pytest.raises(ConfigError, match=r"write|units|whole number|--what-if"):
        parsed_what_if(text)


def test_an_all_reduce_on_another_link_takes_that_links_time():
    found = elsewhere(probe(PLAIN), WhatIf(link_bps=1e9))
    assert found.operation("all_reduce float32").at(1e6) == pytest.approx(
        8 * 1.5 * 1e6 / (1e9 * PAYLOAD_SHARE), rel=1e-3
    )
    assert not found.calibrations and "links of 1 Gbit/s, by formula" in found.assumed


def test_more_ranks_have_more_stages_and_smaller_shards():
    found = elsewhere(probe(PLAIN, THC, latency_s=0.006), WhatIf(world=8))
    reduce = found.operation("all_reduce float32")
    assert reduce.at(0) == pytest.approx(0.006 * 14 / 6, rel=1e-3)
    assert reduce.at(1e6) - reduce.at(0) == pytest.approx(0.1 * (2 * 7 / 8) / (2 * 3 / 4), rel=1e-3)
    assert found.cost(THC.choice).requests[0].uses[0].nbytes[-1] == pytest.approx(0.25e6 * 4 / 8)


def test_what_the_cpu_spends_on_a_byte_is_the_least():
    slow = probe(PLAIN)
    (name, curve), *_ = [
        (each.operation, each.curve) for each in slow.operations if each.operation.startswith("all")
    ]
    busy = type(curve)(curve.sizes, curve.p50_s, curve.low_s, curve.high_s, (0.0, 0.05))
    made = type(slow)(
        **{n: getattr(slow, n) for n in slow.__slots__}
        | {"operations": (type(slow.operations[0])(name, busy),)}
    )
    assert elsewhere(made, WhatIf(link_bps=1e12)).operation(name).at(1e6) == pytest.approx(0.05, rel=1e-3)


def test_an_aggregator_adds_what_it_can_add():
    found = elsewhere(probe(PLAIN, BF16, INT8, THC), WhatIf(link_bps=1e9, aggregator=True))
    stars = [each for each in found.costs if each.choice.endswith("star")]
    assert [each.choice for each in stars] == ["every / thc / star"]  # int8 cannot be added in the network
    assert stars[0].requests[0].uses[0].nbytes[-1] == pytest.approx(4 * 0.25e6)


def test_choices_that_do_not_fit_so_many_ranks_are_left_out():
    found = elsewhere(probe(PLAIN, THC), WhatIf(world=64), lambda choice, world: "thc" not in choice)
    assert [each.choice for each in found.costs] == ["DDP"]
