"""Workloads: every published parameter count to the parameter, times that follow from the multiply-adds."""

import json

import pytest

from tacit.errors import ConfigError
from tacit.sim.workloads import MODELS, PAPER_PARAMETERS, Layer, Workload, from_model, read_workload, workload

PUBLISHED = {  # as counted in torchvision, timm, transformers and Caffe's model zoo
    "alexnet": 62_378_344,  # Krizhevsky's layers without the split over two devices
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "googlenet": 6_998_552,
    "beit_l": 304_430_568,
    "gpt2": 124_439_808,
    "bert_base": 109_482_240,
}
GIGA_MACS = {"alexnet": 1.135, "vgg16": 15.47, "resnet50": 4.09, "googlenet": 1.58, "beit_l": 61.6}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_published_number_of_parameters(name):
    assert workload(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", PAPER_PARAMETERS)
def test_the_papers_round_the_same_models(name):
    assert workload(name).parameters == pytest.approx(PAPER_PARAMETERS[name], rel=0.03)


@pytest.mark.parametrize("name", GIGA_MACS)
def test_multiply_adds_are_the_published_ones(name):
    assert sum(shape.macs for shape in MODELS[name]()) / 1e9 == pytest.approx(GIGA_MACS[name], rel=0.005)


def test_times_are_two_flops_a_multiply_add_and_twice_that_backward():
    found = workload("vgg16", batch=8, flops_per_s=1e12, efficiency=0.5)
    assert found.forward_s == pytest.approx(2 * 8 * 15.47026432e9 / 0.5e12)
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    assert found.source == "estimated: batch 8 at 50% of 1e+12 flop/s"


def test_a_recorded_table_reads_back(tmp_path):
    made = Workload("mine", (Layer("a", 10, 0.1, 0.2), Layer("b", 5, 0.3, 0.4)), "recorded on a GPU")
    (tmp_path / "mine.json").write_text(json.dumps(made.as_record()))
    assert read_workload(tmp_path / "mine.json") == made


class FakeParameter:
    requires_grad = True

    def __init__(self, numel):
        self._numel = numel

    def numel(self):
        return self._numel


class FakeModule:
    """What from_model needs of a module: torch is not asked for."""

    def __init__(self, **parameters):
        self.own, self.children = parameters, {}

    def named_parameters(self, recurse=True):
        return self.own.items()

    def named_modules(self):
        return [("", self), *self.children.items()]


def test_any_model_that_names_its_modules_becomes_a_workload_of_sizes():
    model, shared = FakeModule(scale=FakeParameter(1)), FakeParameter(30)
    model.children = {
        "first": FakeModule(weight=shared, bias=FakeParameter(3)),
        "act": FakeModule(),
        "tied": FakeModule(weight=shared),
    }
    found = from_model(model, name="tiny")
    assert [(layer.name, layer.parameters) for layer in found.layers] == [("tiny", 1), ("first", 33)]
    assert "sizes only" in found.source


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: workload("resnet5"), "unknown model 'resnet5'; did you mean 'resnet50'. known are alexnet, vgg16"),
        (lambda: workload("VGG16"), "did you mean 'vgg16'"),
        (lambda: workload("zzz"), "unknown model 'zzz'; known are alexnet"),
        (lambda: workload("vgg16", batch=0), "batch=0, .*: the batch is 1 or more"),
        (lambda: workload("vgg16", efficiency=1.5), "the efficiency above 0 and at most 1"),
        (lambda: workload("vgg16", flops_per_s=0), "the rate above 0"),
        (lambda: Workload("x", (), "none"), "workload x has no layer"),
        (lambda: Workload("x", (Layer("a", -1),), ""), "layer 'a' has -1 parameters"),
        (lambda: Workload("x", (Layer("a", 1), Layer("a", 1)), ""), "two layers called 'a'"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_gets_one_sentence(call, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"name": "x"}', '{"name": "x", "source": "y", "layers": [{"size": 1}]}']
)
def test_a_bad_table_gets_one_sentence(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json cannot be read .* it needs name, source and layers"):
        read_workload(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="cannot be opened: No such file"):
        read_workload(tmp_path / "none.json")
