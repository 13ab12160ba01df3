"""What there is to exchange and to compute in a step: a model's layers, with sizes from the architecture and times.

Sizes are computed from the shapes below, to the parameter. Times are **estimated**: 2 flops a multiply-add over a stated rate
for the forward pass, twice that for the backward; layers without arithmetic (embeddings, norms, biases) count as free.
Tables that somebody recorded are read with `read_workload`, the user's own model with `from_model`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.registry import unknown_name

PAPER_PARAMETERS = {"alexnet": 62.3e6, "vgg16": 138e6, "resnet50": 25e6, "googlenet": 6.8e6, "beit_l": 307e6}
"""As the WRHT papers round them."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of parameters whose gradients are ready together. Backward reaches the layers last to first."""

    name: str
    parameters: int
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of one rank: layers in the order of the forward pass. `source` names the origin of the times."""

    name: str
    layers: tuple[Layer, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"workload {self.name} has no layer; give at least one")
        names = [layer.name for layer in self.layers]
        for layer in self.layers:
            if names.count(layer.name) > 1:
                raise ConfigError(
                    f"workload {self.name} has two layers called {layer.name!r}; give each its own name"
                )
            if layer.parameters < 0 or not 0 <= layer.forward_s < inf or not 0 <= layer.backward_s < inf:
                raise ConfigError(
                    f"workload {self.name}: layer {layer.name!r} has {layer.parameters} parameters, {layer.forward_s} s "
                    f"forward, {layer.backward_s} s backward; none may be negative"
                )

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    def as_record(self) -> dict[str, Any]:
        """What `read_workload` reads, as JSON."""
        return asdict(self)


def workload(name: str, *, batch: int = 32, flops_per_s: float = 125e12, efficiency: float = 0.4) -> Workload:
    """A known model. Times are estimated for `batch` samples at `efficiency` of `flops_per_s` (125e12: a V100's fp16)."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS, cutoff=0.4)
    if batch < 1 or not 0 < flops_per_s < inf or not 0 < efficiency <= 1:
        raise ConfigError(
            f"batch={batch}, flops_per_s={flops_per_s:g}, efficiency={efficiency:g}: the batch is 1 or more, the rate above 0, "
            f"the efficiency above 0 and at most 1"
        )
    second = 2 * batch / (flops_per_s * efficiency)  # of one multiply-add a sample
    layers = [Layer(s.name, s.parameters, s.macs * second, 2 * s.macs * second) for s in MODELS[name]()]
    source = f"estimated: batch {batch} at {efficiency:.0%} of {flops_per_s:g} flop/s"
    return Workload(name, tuple(layers), source)


def read_workload(path: Path) -> Workload:
    """A recorded workload from JSON: {"name", "source", "layers": [{"name", "parameters", "forward_s", "backward_s"}]}."""
    try:
        data = json.loads(path.read_text())
        layers = tuple(Layer(**layer) for layer in data["layers"])
        return Workload(str(data["name"]), layers, str(data["source"]))
    except OSError as cause:
        raise ConfigError(f"workload file {path} cannot be opened: {cause.strerror}") from cause
    except (ValueError, KeyError, TypeError) as cause:
        raise ConfigError(
            f"workload file {path} cannot be read ({cause!r}); it needs name, source and layers, "
            f"each with name, parameters, forward_s and backward_s"
        ) from cause


def from_model(model: Any, *, name: str = "") -> Workload:
    """The workload of a torch model, without times: `plan.record_workload` measures those.

    A module with parameters of its own is a layer; a parameter that two modules share is counted where it comes first.
    """
    name = name or type(model).__name__
    seen: set[int] = set()
    layers = []
    for path, module in model.named_modules():
        own = [p for _, p in module.named_parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in own)
        if own:
            layers.append(Layer(path or name, sum(int(p.numel()) for p in own)))
    return Workload(name, tuple(layers), "sizes only: give inputs to record times")


# ---- architectures: parameters and multiply-adds a sample of every layer ----


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    parameters: int
    macs: int = 0


def _conv(name: str, channels: int, out: int, kernel: int, size: int, *, bias: bool = True) -> Shape:
    """A square convolution to `out` channels of `size` x `size`."""
    weights = kernel * kernel * channels * out
    return Shape(name, weights + bias * out, weights * size * size)


def _linear(name: str, width: int, out: int, rows: int = 1, *, bias: bool = True) -> Shape:
    return Shape(name, width * out + bias * out, width * out * rows)


def _norm(name: str, width: int) -> Shape:
    return Shape(name, 2 * width)


def alexnet() -> list[Shape]:
    """Krizhevsky 2012 on one device: no groups, 227 x 227."""
    sizes = [(3, 96, 11, 55), (96, 256, 5, 27), (256, 384, 3, 13), (384, 384, 3, 13), (384, 256, 3, 13)]
    return [_conv(f"conv{i + 1}", *size) for i, size in enumerate(sizes)] + _classifier(256 * 6 * 6)


def vgg16() -> list[Shape]:
    """Simonyan and Zisserman 2014, configuration D."""
    shapes, channels = [], 3
    for stage, (out, convs) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        for i in range(convs):
            shapes.append(_conv(f"conv{stage + 1}_{i + 1}", channels, out, 3, 224 >> stage))
            channels = out
    return shapes + _classifier(512 * 7 * 7)


def _classifier(width: int) -> list[Shape]:
    return [_linear("fc6", width, 4096), _linear("fc7", 4096, 4096), _linear("fc8", 4096, 1000)]


def resnet50() -> list[Shape]:
    """He 2015, with the stride in the 3 x 3 convolution, as everybody trains it."""
    shapes = [_conv("conv1", 3, 64, 7, 112, bias=False), _norm("bn1", 64)]
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            size = 56 >> stage
            first = size * (2 if block == 0 and stage else 1)
            name = f"layer{stage + 1}.{block}"
            parts = [(channels, width, 1, first), (width, width, 3, size), (width, 4 * width, 1, size)]
            if block == 0:
                parts.append((channels, 4 * width, 1, size))  # the shortcut
            for i, part in enumerate(parts):
                shapes += [
                    _conv(f"{name}.conv{i + 1}", *part, bias=False),
                    _norm(f"{name}.bn{i + 1}", part[1]),
                ]
            channels = 4 * width
    return [*shapes, _linear("fc", channels, 1000)]


_INCEPTION = {  # name: (size, in, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool)
    "3a": (28, 192, 64, 96, 128, 16, 32, 32),
    "3b": (28, 256, 128, 128, 192, 32, 96, 64),
    "4a": (14, 480, 192, 96, 208, 16, 48, 64),
    "4b": (14, 512, 160, 112, 224, 24, 64, 64),
    "4c": (14, 512, 128, 128, 256, 24, 64, 64),
    "4d": (14, 512, 112, 144, 288, 32, 64, 64),
    "4e": (14, 528, 256, 160, 320, 32, 128, 128),
    "5a": (7, 832, 256, 160, 320, 32, 128, 128),
    "5b": (7, 832, 384, 192, 384, 48, 128, 128),
}


def googlenet() -> list[Shape]:
    """Szegedy 2014, without the auxiliary classifiers."""
    shapes = [_conv("conv1", 3, 64, 7, 112), _conv("conv2r", 64, 64, 1, 56), _conv("conv2", 64, 192, 3, 56)]
    for name, (size, width, one, three_r, three, five_r, five, pool) in _INCEPTION.items():
        parts = [
            ("1x1", width, one, 1), ("3x3r", width, three_r, 1), ("3x3", three_r, three, 3),
            ("5x5r", width, five_r, 1), ("5x5", five_r, five, 5), ("pool", width, pool, 1),
        ]  # fmt: skip
        shapes += [_conv(f"{name}.{part}", a, b, kernel, size) for part, a, b, kernel in parts]
    return [*shapes, _linear("fc", 1024, 1000)]


def _block(name: str, width: int, tokens: int, *, attention_bias: int, extra: int = 0) -> list[Shape]:
    """A transformer block with a fourfold inner layer; `extra`: parameters that are neither weights nor norms."""
    mix = 2 * tokens * tokens * width  # scores, and values by scores
    attention = [
        _norm(f"{name}.norm1", width),
        Shape(f"{name}.qkv", 3 * width * width + attention_bias, 3 * width * width * tokens + mix),
        _linear(f"{name}.proj", width, width, tokens),
    ]
    inner = [
        _norm(f"{name}.norm2", width),
        _linear(f"{name}.fc1", width, 4 * width, tokens),
        _linear(f"{name}.fc2", 4 * width, width, tokens),
    ]
    return [*attention, *([Shape(f"{name}.scales", extra)] if extra else []), *inner]


def beit_l() -> list[Shape]:
    """Bao 2021, large, patches of 16 at 224 x 224, 1000 classes. The papers round it to 307 M, ViT-L's published size."""
    width, tokens, heads = 1024, 14 * 14 + 1, 16
    biases = ((2 * 14 - 1) ** 2 + 3) * heads  # of relative positions
    shapes = [Shape("cls", width), _conv("patches", 3, width, 16, 14)]
    for i in range(24):
        shapes += _block(f"blocks.{i}", width, tokens, attention_bias=2 * width, extra=2 * width + biases)
    return [*shapes, _norm("norm", width), _linear("head", width, 1000)]


def gpt2() -> list[Shape]:
    """Radford 2019, small, 1024 tokens; the output layer is the embedding, so it has no parameters of its own."""
    width, tokens, words = 768, 1024, 50257
    shapes = [Shape("wte", words * width), Shape("wpe", tokens * width)]
    for i in range(12):
        shapes += _block(f"h.{i}", width, tokens, attention_bias=3 * width)
    return [*shapes, _norm("norm", width), Shape("head (tied)", 0, words * width * tokens)]


def bert_base() -> list[Shape]:
    """Devlin 2018, uncased, 512 tokens, with the pooler and no head."""
    width, tokens = 768, 512
    shapes = [Shape("words", 30522 * width), Shape("positions", 512 * width), Shape("types", 2 * width)]
    shapes.append(_norm("norm", width))
    for i in range(12):
        shapes += _block(f"layer.{i}", width, tokens, attention_bias=3 * width)
    return [*shapes, _linear("pooler", width, width)]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    model.__name__: model for model in (alexnet, vgg16, resnet50, googlenet, beit_l, gpt2, bert_base)
}
