import pytest

from tacit.errors import ConfigError
from tacit.sim.texts import parse_model, parse_schedule, parse_world, split_list
from tacit.topology import OpticalRing


def test_a_schedule_with_options_of_all_kinds():
    assert parse_schedule("ring", 8).world == 8
    assert parse_schedule(" wrht(wavelengths=4, all_to_all=true) ", 20).notes["all_to_all"] is True
    assert parse_schedule("hierarchical(group=4)", 16).name == "hierarchical"


def test_wavelengths_are_the_rings_unless_told_otherwise():
    assert parse_schedule("wrht", 100, OpticalRing(100, 8)).notes["wavelengths"] == 8
    assert parse_schedule("wrht(wavelengths=4)", 100, OpticalRing(100, 8)).notes["wavelengths"] == 4
    assert parse_schedule("wrht", 100).notes["wavelengths"] == 64


@pytest.mark.parametrize("text", ["", "ring(", "ring(8)", "3", "ring(x=y())", "ring; tree", "lambda: 0"])
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ConfigError):
        parse_schedule(text, 8)


def test_lists_are_split_outside_brackets():
    assert split_list("ring, wrht(wavelengths=4, group=9),ring") == ["ring", "wrht(wavelengths=4, group=9)"]
    with pytest.raises(ConfigError, match="empty item"):
        split_list("ring,,tree")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "1__0", "100000000000"])
def test_a_world_is_a_whole_number(text):
    with pytest.raises(ConfigError, match="whole number of ranks"):
        parse_world(text)


def test_worlds_that_are():
    assert (parse_world("100_000"), parse_world("1"), parse_world(None)) == (100_000, 1, None)


@pytest.mark.parametrize(
    ("text", "name"),
    [("VGG16", "vgg16"), ("vgg-16", "vgg16"), ("BEiT-L", "beit_l"), ("GPT-2", "gpt2"), ("bert", "bert_base")],
)
def test_models_in_any_spelling(text, name):
    assert parse_model(text).name == name


def test_an_unknown_model_gets_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        parse_model("resnet51")
