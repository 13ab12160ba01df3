"""`tacit codecs table`: every method of the catalogue, what it sends, what it promises, and what it costs here.

    tacit codecs table --markdown > docs/codecs.md

What it is and what it sends is computed; errors on real gradients and costs are measured, in half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit import _core
from tacit.codecs.catalogue import METHODS, Method
from tacit.demo.tasks import BUILDERS
from tacit.errors import TacitError
from tacit.layout import Layout
from tacit.requests import STEADY_STEP, LocalMemory, declared_nbytes, loop_back
from tacit.shapes import requests_of
from tacit.strategy import Strategy, parse_codec
from tacit.testing import nmse
from tacit.testing.costs import CostInCopies, costs

SCHEMES = ("allreduce", "sharded", "server", "ring", "star", "gossip")
TASKS = {"fashion": "CNN", "bytes": "transformer"}  # whose gradients errors are measured on
WORLD = 4
GRADIENT_STEP = 20
MOST_COPIES = 5.0  # a pass over memory; what takes more has a reason in the table
_MATRIX = Layout.of({"matrix": (1024, 1024)})
_CLAIMS = {
    "summable": "adds",
    "unbiased": "unbiased",
    "contracting": "contracts",
    "remembers": "remembers",
    "varies": "varies",
}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One method with what is known without measuring."""

    method: Method
    bits_up: float
    bits_down: float
    requests: int
    claims: tuple[str, ...]
    schemes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one method: errors by model, costs in copies."""

    errors: dict[str, float]
    cost: CostInCopies


def rows() -> list[Row]:
    """All methods, in the order of the catalogue."""
    return [_row(method) for method in METHODS]


def _row(method: Method) -> Row:
    codec = parse_codec(method.codec)
    asked = requests_of(codec, _MATRIX.numel, WORLD, _MATRIX)
    return Row(
        method,
        bits_up=8 * declared_nbytes(codec, _MATRIX) / _MATRIX.numel,
        bits_down=8 * sum(each.down_nbytes for each in asked) / _MATRIX.numel,
        requests=len(asked),
        claims=tuple(word for trait, word in _CLAIMS.items() if getattr(codec.traits, trait)),
        schemes=tuple(who for who in SCHEMES if _carries(who, method)),
    )


def _carries(who: str, method: Method) -> bool:
    when = "adaptive" if who == "gossip" else method.when
    try:
        Strategy.parse(f"{when} / {method.codec} / {who}").check(WORLD)
    except TacitError:
        return False
    return True


def measure(progress: Progress = lambda phase: None) -> list[Measured]:
    """Errors and costs of all methods here; the models' data has to be on this machine."""
    codecs = [parse_codec(method.codec) for method in METHODS]
    errors: list[dict[str, float]] = [{} for _ in METHODS]
    for task, model in TASKS.items():
        progress(f"gradients of the {model}")
        layout, gradients = _gradients(task)
        for codec, own in zip(codecs, errors, strict=True):
            progress(f"error of {codec}")
            memories = [LocalMemory(x, given=layout) for x in gradients]
            total = loop_back(codec, gradients, memories=memories, step=STEADY_STEP)[0].total
            own[model] = nmse(total, gradients)
    progress("costs")
    return [Measured(own, cost) for own, cost in zip(errors, costs(codecs, _MATRIX), strict=True)]


def _gradients(task_name: str) -> tuple[Layout, list[Tensor]]:
    """What each rank's own batch gives after some steps of training, at the same weights."""
    task = BUILDERS[task_name]()
    torch.manual_seed(0)
    model = task.model()
    optimizer, rng = task.optimizer(model), torch.Generator().manual_seed(1)

    def gradient() -> Tensor:
        x, y = task.batch(rng)
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        return torch.cat([each.reshape(-1) for each in found])

    for _ in range(GRADIENT_STEP):
        whole, place = gradient(), 0
        for parameter in model.parameters():
            parameter.grad = whole[place : place + parameter.numel()].view_as(parameter).clone()
            place += parameter.numel()
        optimizer.step()
    layout = Layout.of({name: tuple(p.shape) for name, p in model.named_parameters()})
    return layout, [gradient() for _ in range(WORLD)]


def slow(row: Row, cost: CostInCopies) -> str:
    """Why a codec takes more than 5 copies a pass, or nothing."""
    method = row.method
    passes = (cost.encode / method.passes[0], cost.decode / method.passes[1])
    return method.why if max(passes) > MOST_COPIES else ""


def as_json(found: Sequence[Row], measured: Sequence[Measured] | None) -> list[dict[str, Any]]:
    """One object a method."""
    told = []
    for place, row in enumerate(found):
        own = asdict(row.method) | {
            "bits_up": row.bits_up,
            "bits_down": row.bits_down,
            "requests": row.requests,
            "claims": row.claims,
            "schemes": row.schemes,
        }
        if measured is not None:
            figures = measured[place]
            own |= {"nmse": figures.errors, "encode_copies": figures.cost.encode}
            own |= {"decode_copies": figures.cost.decode, "copy_s": figures.cost.copy_s}
            own |= {"slow_because": slow(row, figures.cost)}
        told.append(own)
    return told


Cells = list[list[str]]


def what_it_is(found: Sequence[Row], link: Callable[[Method], str]) -> tuple[list[str], Cells]:
    """Heads and rows of the first table."""
    heads = ["method", "codec", "paper", "what becomes of x", "bound"]
    return heads, [
        [row.method.name, row.method.text, link(row.method), row.method.formula, row.method.bound]
        for row in found
    ]


def what_it_sends(found: Sequence[Row]) -> tuple[list[str], Cells]:
    heads = ["codec", "bits up", "down", "requests", "claims", "carried by"]
    return heads, [
        [
            row.method.text,
            f"{row.bits_up:.3g}",
            f"{row.bits_down:.3g}",
            str(row.requests),
            ", ".join(row.claims),
            _all_but(row.schemes),
        ]
        for row in found
    ]


def _all_but(schemes: Sequence[str]) -> str:
    missing = [who for who in SCHEMES if who not in schemes]
    if not missing:
        return "all"
    return f"all but {' and '.join(missing)}" if len(missing) < 3 else ", ".join(schemes)


def what_it_costs(found: Sequence[Row], measured: Sequence[Measured]) -> tuple[list[str], Cells]:
    heads = ["codec", *(f"error, {model}" for model in TASKS.values()), "encode", "decode", "passes", "why"]
    return heads, [
        [
            row.method.text,
            *(f"{figures.errors[model]:.3g}" for model in TASKS.values()),
            f"{figures.cost.encode:.1f}",
            f"{figures.cost.decode:.1f}",
            "{} + {}".format(*row.method.passes),
            slow(row, figures.cost),
        ]
        for row, figures in zip(found, measured, strict=True)
    ]


SENDS = (
    "Bits an element of a 1024 x 1024 matrix: what a rank hands to its requests, and what it has back among 4 ranks. `varies`: the most. "
    "`adds`: payloads may be added in flight. Of `ring`, read: any schedule. A method with a rule of its own (`local(8)`) sends that every 8 steps."
)
COSTS = (
    "Error: |mean - estimate|^2 / mean |x_i|^2 on the gradients of 4 ranks after {step} steps of training, one shot, nothing remembered before. "
    "Costs: a rank's own CPU time on one thread as multiples of a copy of the same floats (1024 x 1024), error feedback included, without what "
    "whoever adds does for all. Passes: how often all of x is read or written, to encode and to decode; more than {most:.0f} copies a pass have a reason."
)


def costs_note() -> str:
    return COSTS.format(step=GRADIENT_STEP, most=MOST_COPIES)


def markdown(found: Sequence[Row], measured: Sequence[Measured]) -> str:
    """docs/codecs.md."""
    return (
        "\n\n".join(
            [
                "# Codecs: every method in one table",
                "Made by `tacit codecs table --markdown`. Options and advice are in [strategies.md](strategies.md), trainings with all of them in "
                "[survey.md](survey.md).",
                static_markdown(found),
                "## What it costs",
                costs_note(),
                f"Measured on {date.today().isoformat()}, {_core.simd()}, other work beside: least of interleaved rounds.",
                _markdown_table(*what_it_costs(found, measured)),
            ]
        )
        + "\n"
    )


def static_markdown(found: Sequence[Row]) -> str:
    """The part of docs/codecs.md that no machine changes."""
    return "\n\n".join(
        [
            "## What it is",
            _markdown_table(*what_it_is(found, _linked)),
            "## What it sends",
            SENDS,
            _markdown_table(*what_it_sends(found)),
        ]
    )


def _linked(method: Method) -> str:
    return f"[{method.paper}]({method.link})" if method.link else method.paper


def _markdown_table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    code = {place for place, head in enumerate(heads) if head in ("codec", "what becomes of x")}
    lines = [_line(heads), _line(["---"] * len(heads))]
    lines += [
        _line([f"`{c.replace('|', _BAR)}`" if i in code else c.replace("|", _BAR) for i, c in enumerate(row)])
        for row in cells
    ]
    return "\n".join(lines)


_BAR = "\\|"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
