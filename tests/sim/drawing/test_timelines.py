"""Timelines: bars are where the cost says they are."""

import pytest
from matplotlib.patches import Rectangle

from tacit.errors import ConfigError
from tacit.schedules import build, ring, tree
from tacit.sim.drawing.timelines import LOAD, draw_step, draw_timeline
from tacit.sim.fabric import parse_fabric
from tacit.sim.overlap import step_time
from tacit.sim.workloads import workload


def boxes(axes, colours):
    """(left, right, bottom, top) of the rectangles with one of these colours."""
    found = []
    for patch in axes.patches:
        if isinstance(patch, Rectangle) and patch.get_facecolor() in colours:
            x, y = patch.get_xy()
            found.append((x, x + patch.get_width(), y, y + patch.get_height()))
    return found


def test_every_link_is_busy_in_every_stage_of_a_ring_on_a_star():
    # 100 us of latency, 250 kB in 250 us: 6 stages of 350 us
    fabric = parse_fabric("star(rate=8Gbit, latency=50us)", 4)
    figure = draw_timeline(ring(4), 1e6, fabric)
    bars = boxes(figure.axes[0], {LOAD(1.0)})
    assert len(bars) == 6 * 8
    assert sorted({round(bar[0], 6) for bar in bars}) == pytest.approx([0.1 + 0.35 * k for k in range(6)])
    assert {round(bar[1] - bar[0], 6) for bar in bars} == {0.25}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][:2] == [
        "h0 -> switch",
        "switch -> h0",
    ]


def test_a_link_that_waits_for_a_slower_one_is_half_busy():
    figure = draw_timeline(
        tree(2), 1e6, parse_fabric("one_slow_host(rate=8Gbit, slow_rate=4Gbit, latency=0us)", 2)
    )
    assert len(boxes(figure.axes[0], {LOAD(1.0)})) == 2 and len(boxes(figure.axes[0], {LOAD(0.5)})) == 2


def test_arcs_show_how_much_light_is_in_use():
    figure = draw_timeline(
        build("wrht", 9, wavelengths=4), 1e6, parse_fabric("optical(wavelengths=4, setup=0us, rate=1GB/s)", 9)
    )
    clockwise = boxes(figure.axes[0], {LOAD(k / 4) for k in (1, 2, 3, 4)})
    first = sorted((bottom, top) for left, _, bottom, top in clockwise if left == 0)
    assert first == [(0, 1), (1, 2), (2, 3), (3, 4)]  # 1, 2, 3, 4 lights towards node 4
    assert any("28 %" in text.get_text() for text in figure.axes[0].texts)  # 2 x (1 + 2 + 3 + 4) of 2 x 9 x 4


def test_stages_alike_become_one_block_where_there_are_many():
    figure = draw_timeline(ring(100), 1e6, parse_fabric("optical(wavelengths=1)", 100))
    assert len(boxes(figure.axes[0], {LOAD(1.0)})) == 2
    assert {"stages 0 to 98", "stages 99 to 197"} <= {text.get_text() for text in figure.axes[0].texts}


def test_what_no_page_can_show_is_refused():
    with pytest.raises(ConfigError, match="ring uses 512 links .* the limit of a timeline is 128"):
        draw_timeline(ring(256), 1e6, parse_fabric("star", 256))
    with pytest.raises(ConfigError, match="sends nothing"):
        draw_timeline(ring(1), 1e6, parse_fabric("star", 1))
    with pytest.raises(ConfigError, match="more arcs than a timeline can show"):
        draw_timeline(ring(5000), 1e6, parse_fabric("optical", 5000))


def test_a_step_has_a_bar_an_event():
    step = step_time(workload("alexnet"), lambda nbytes: nbytes / 1e10)
    axes = draw_step(step).axes[0]
    boxes_ = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_height() == 0.76]
    assert len(boxes_) == len(step.events)
    ends = max(patch.get_x() + patch.get_width() for patch in boxes_)
    assert ends == pytest.approx(1e3 * step.step_s)
