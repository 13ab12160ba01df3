"""Pictures: what is in them is counted, and light that shares a track never touches."""

import xml.etree.ElementTree as ET
from itertools import combinations

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle

from tacit.errors import ConfigError
from tacit.schedules import build, ring, tree
from tacit.sim.drawing.draw import MOST_ARROWS, draw_stages, panels
from tacit.sim.drawing.pictures import check_suffix, render
from tacit.sim.fabric import parse_fabric


def arrows(figure):
    """Arrows of every panel."""
    return [[p for p in axes.patches if isinstance(p, FancyArrowPatch)] for axes in figure.axes]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [
        text.get_text() for text in figure.texts
    ]


def test_a_panel_a_stage_and_an_arrow_a_transfer():
    fabric = parse_fabric("optical(wavelengths=4)", 27)
    figure = draw_stages(build("wrht", 27, wavelengths=4), fabric, "wrht")
    assert [len(panel) for panel in arrows(figure)] == [24, 2, 2, 24]
    colours = {arrow.get_edgecolor() for arrow in arrows(figure)[0]}
    assert len(colours) == 4  # one a wavelength
    assert {"stage 0", "24 transfers, added", "wrht among 27 ranks"} <= set(texts(figure))


def test_stages_alike_are_drawn_once_and_say_so():
    figure = draw_stages(ring(8))
    assert [len(panel) for panel in arrows(figure)] == [8, 8]
    assert {"stages 0 to 6", "stages 7 to 13"} <= set(texts(figure))


def test_sub_stages_have_a_panel_each():
    schedule, fabric = build("recursive_doubling", 16), parse_fabric("optical(wavelengths=2)", 16)
    shown = panels(schedule, fabric)
    assert [panel.title for panel in shown][2:4] == ["stage 2, part 1 of 2", "stage 2, part 2 of 2"]
    assert sum(len(panel.which) for panel in shown) == schedule.transfer_count
    assert len(draw_stages(schedule, fabric).axes) == len(shown) == 8


def test_a_striped_transfer_is_as_many_arrows_as_it_has_wavelengths():
    fabric = parse_fabric("optical(wavelengths=4)", 8, stripe=True)
    assert [len(panel) for panel in arrows(draw_stages(ring(8), fabric))] == [32, 32]


def test_lights_on_one_track_do_not_touch():
    """Same colour, same direction: the angles that the drawn paths cover are disjoint."""
    fabric = parse_fabric("optical(wavelengths=8)", 20)
    for panel in arrows(draw_stages(build("wrht", 20, wavelengths=8, all_to_all=True), fabric)):
        by_track = {}
        for arrow in panel:
            points = arrow._path_original.vertices
            outside = bool(np.hypot(*points[len(points) // 2]) > 1)
            angle = np.unwrap(np.arctan2(points[:, 0], points[:, 1]))
            by_track.setdefault((arrow.get_edgecolor(), outside), []).append((angle.min(), angle.max()))
        for covered in by_track.values():
            for (a, b), (c, d) in combinations(covered, 2):
                turns = [k * 2 * np.pi for k in (-1, 0, 1)]
                assert all(b <= c + turn or d + turn <= a for turn in turns)


@pytest.mark.slow
def test_on_a_network_arrows_say_add_or_copy_and_aggregators_sit_on_switches():
    figure = draw_stages(build("star", 8), parse_fabric("star(rate=10Gbit)", 8))
    assert [len(panel) for panel in arrows(figure)] == [8, 8]
    ends = [arrow._path_original.vertices[-1] for arrow in arrows(figure)[0]]
    assert np.abs(ends).max() < 0.2  # the switch is in the middle
    assert {"added at the destination", "copied"} <= set(texts(figure))
    for on in ("fat_tree(rate=1Gbit)", "torus(rate=1Gbit)", "leaf_spine(hosts=4, rate=1Gbit)"):
        assert len(draw_stages(tree(16), parse_fabric(on, 16)).axes) == 8


def test_a_blot_is_refused_with_the_limit():
    with pytest.raises(
        ConfigError, match=f"stage 0 has 2,048 arrows to draw, the limit is {MOST_ARROWS}; take fewer ranks"
    ):
        draw_stages(tree(4096))
    with pytest.raises(ConfigError, match="more than 60 different stages and parts"):
        draw_stages(build("recursive_doubling", 256), parse_fabric("optical(wavelengths=1)", 256))
    with pytest.raises(ConfigError, match="sends nothing"):
        draw_stages(ring(1))


def test_files_are_well_formed_the_same_twice_and_take_the_readers_ink():
    def make(suffix):
        return render(draw_stages(ring(4), title="a < b"), suffix, "a < b")

    svg = make(".svg")
    assert svg == make(".svg")
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg") and b"currentColor" in svg and b"prefers-color-scheme" in svg
    assert b"a &lt; b" in svg and b"<metadata>" not in svg
    page = make(".html").decode()
    assert (
        page.startswith("<!doctype html>")
        and page.count("<svg") == 1
        and "http://" not in page.replace("http://www.w3.org", "")
    )
    assert make(".png").startswith(b"\x89PNG")
    for suffix in (".gif", ""):
        with pytest.raises(ConfigError, match="written as .svg, .html or .png"):
            check_suffix(suffix)


def test_the_legend_names_every_wavelength_in_use():
    figure = draw_stages(build("wrht", 27, wavelengths=4), parse_fabric("optical(wavelengths=4)", 27))
    assert sum(isinstance(artist, Rectangle) for artist in figure.artists + figure.patches) >= 4
    assert {"0", "1", "2", "3"} <= {text.get_text() for text in figure.texts}
