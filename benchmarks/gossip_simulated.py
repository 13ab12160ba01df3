"""Gossip among 8 replicas in one process, on Fashion-MNIST: accuracy of the merged model against bytes sent.

    python benchmarks/gossip_simulated.py --epochs 10 --seeds 0 1 2 --rules 'every / none' 'adaptive(0.05) / hush'

Traffic is in models sent by a replica in a step: gossip at every step, one exchange a replica, sends 1.0. One JSON record a line.

    python benchmarks/gossip_simulated.py --plot docs/images/gossip-theta.svg sweep.jsonl

draws what the threshold does, from such records (of files, or of stdin): accuracy and bytes against gossip at every step.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tacit.demo.tasks import idx
from tacit.gossip.layers import Layers
from tacit.gossip.simulated import SimulatedReplicas
from tacit.rounds import Adaptive, TriggerRule
from tacit.schemes import Gossip
from tacit.strategy import Strategy

WORLD, BATCH, LR, MOMENTUM = 8, 32, 0.05, 0.9
RULES = (
    "every / none / gossip",
    "adaptive / topk(share=0.0625) / gossip",
    "adaptive / hush / gossip",
    "adaptive(0.1, by=model) / none / gossip",
    "local(18) / none / gossip",
)


def mlp() -> nn.Module:
    """109,386 parameters."""
    layers = (nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """54,314 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def pictures(x: Tensor) -> Tensor:
    return (x.float() / 255 - 0.286).unsqueeze(1) / 0.353


class Sea:
    """The replicas' training: SGD with momentum on each, by one batched pass for all of them."""

    def __init__(self, model: nn.Module, strategy: Strategy, seed: int, world: int = WORLD) -> None:
        self.model, self.named = model, dict(model.named_parameters())
        start = torch.cat([p.detach().reshape(-1) for p in self.named.values()])
        trigger = strategy.when
        assert isinstance(trigger, TriggerRule)
        assert isinstance(strategy.who, Gossip)
        layers = Layers.of(self.named)
        self.replicas = SimulatedReplicas(
            start.repeat(world, 1), layers, trigger, strategy.what, strategy.who, seed
        )
        self.velocity = torch.zeros_like(self.replicas.models)
        self.gradients = vmap(grad(self._loss), in_dims=(0, 0, 0))

    def _loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(self.model, self.split(flat), (x,)), y)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([p.numel() for p in self.named.values()])
        return {n: part.view(p.shape) for (n, p), part in zip(self.named.items(), parts, strict=True)}

    def step(self, x: Tensor, y: Tensor, lr: float, ranks: Sequence[int] | None = None) -> None:
        """A step of these replicas (None: all), each with its own batch."""
        moving = list(range(len(self.velocity)) if ranks is None else ranks)
        velocity = self.velocity[moving] * MOMENTUM + self.gradients(self.replicas.models[moving], x, y)
        self.velocity[moving] = velocity
        self.replicas.models[moving] -= lr * velocity
        self.replicas.stepped(lr, ranks)

    def accuracy(self, x: Tensor, y: Tensor, flat: Tensor | None = None) -> float:
        """Of this model; of the merged one, if none is given."""
        flat = self.replicas.mean() if flat is None else flat
        with torch.no_grad():
            found = functional_call(self.model, self.split(flat), (x,))
        return float((found.argmax(1) == y).float().mean())


def train(kind: str, text: str, seed: int, epochs: float) -> dict[str, object]:
    """One training to its end, and what it sent."""
    train_x, train_y = idx("train-images-idx3-ubyte"), idx("train-labels-idx1-ubyte").long()
    test_x, test_y = pictures(idx("t10k-images-idx3-ubyte")), idx("t10k-labels-idx1-ubyte").long()
    torch.manual_seed(seed)
    sea = Sea({"mlp": mlp, "cnn": cnn}[kind](), Strategy.parse(text), seed)
    rng, steps = torch.Generator().manual_seed(seed), round(epochs * len(train_x) / WORLD / BATCH)
    began, apart = time.perf_counter(), 0.0
    for step in range(steps):
        pick = torch.randint(len(train_x), (WORLD, BATCH), generator=rng)
        x, y = pictures(train_x[pick.reshape(-1)]), train_y[pick]
        sea.step(x.view(WORLD, BATCH, 1, 28, 28), y, LR * 0.5 * (1 + math.cos(math.pi * step / steps)))
        if step == steps // 2:
            apart = sea.replicas.divergence()
    replicas = sea.replicas
    return {
        "benchmark": "gossip replicas", "model": kind, "strategy": text, "seed": seed, "epochs": epochs, "steps": steps,
        "replicas": WORLD, "parameters": replicas.models.shape[1], "accuracy": sea.accuracy(test_x, test_y),
        "traffic": replicas.sent_nbytes / (4 * replicas.models.shape[1] * WORLD * steps),
        "exchanges": replicas.exchanges, "apart_halfway": apart, "apart": replicas.divergence(),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


BASELINE, POINTS, SHARE = (
    "every / none / gossip",
    -0.3,
    8.0,
)  # the bounds of docs/rounds.md: points, and % of the bytes
Curve = dict[float, list[tuple[float, float]]]  # by theta: of each seed, points and % of the bytes


def against_every_step(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """By model and codec, what each threshold came to beside gossip at every step with the same seed and length."""
    # run again: the last counts
    told = {(r["model"], r["strategy"], r["seed"], r["epochs"]): r for r in records}
    found: dict[str, dict[str, Curve]] = {}
    for (model, text, seed, epochs), record in told.items():
        strategy, base = Strategy.parse(text), told.get((model, BASELINE, seed, epochs))
        when = strategy.when
        if (
            base is None
            or not isinstance(when, Adaptive)
            or when.follow != Adaptive().follow
            or when.by != "layer"
        ):
            continue
        figures = (
            100 * (record["accuracy"] - base["accuracy"]),
            100 * record["traffic"] / base["traffic"],
        )
        codecs = found.setdefault(model, {})
        codecs.setdefault(str(strategy.what), {}).setdefault(when.theta, []).append(figures)
    return found


def plot(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Above accuracy, below bytes, a column a model, a line a codec; whiskers over the seeds; dashed, what is promised; dotted, the default."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from tacit.report.figures import drawing

    found = against_every_step(records)
    if not found:
        raise SystemExit(
            f"nothing to draw: give records of adaptive(...) and of {BASELINE!r} with the same seed"
        )
    names = sorted(
        {codec for codecs in found.values() for codec in codecs}, key=lambda codec: codec != "none"
    )
    thetas = sorted({theta for codecs in found.values() for curve in codecs.values() for theta in curve})
    ink = drawing.colours(["", *names])
    models, unnamed = sorted(found, reverse=True), set(names)
    with drawing.canvas(5.2) as figure:
        figure.set_size_inches(1.2 + 3.3 * len(models), 5.2)
        panels = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
        for column, model in enumerate(models):
            for which, axes in enumerate(panels[:, column]):
                for codec in (name for name in names if name in found[model]):
                    label = codec if codec in unnamed else None
                    unnamed.discard(codec)
                    _line(axes, found[model][codec], which, ink[codec], label)
                    axes.axvline(_default(codec), color=ink[codec], lw=0.9, ls=(0, (1, 2)))
                axes.axhline((POINTS, SHARE)[which], color=drawing.INK, lw=0.9, ls=(0, (4, 3)))
            panels[0, column].set_title(model.upper(), fontsize=10)
            panels[0, column].axhline(0, color=drawing.INK, lw=0.8)
            panels[1, column].set_xlabel("theta: talk when a layer has moved so far")
        panels[0, 0].set_ylabel("points of accuracy\nagainst every step")
        panels[1, 0].set(ylabel="bytes, % of every step", yscale="log")
        panels[1, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[1, 0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
        panels[1, 0].yaxis.set_minor_formatter(NullFormatter())
        for axes, bound, told in ((panels[0, -1], POINTS, "-0.3 points"), (panels[1, -1], SHARE, "8 %")):
            axes.annotate(told, (1, bound), xycoords=("axes fraction", "data"), xytext=(0, 3), ha="right",
                          textcoords="offset points", fontsize=8.5)  # fmt: skip
        axes = panels[0, 0]
        axes.set_xscale("log")
        axes.set_xticks(thetas, [f"{theta:g}" for theta in thetas])
        axes.xaxis.set_minor_formatter(NullFormatter())
        drawing.legend(figure, ncols=len(names))
        path.write_text(drawing.standalone(drawing.svg(figure, path.stem)))


def _default(codec: str) -> float:
    """The threshold of `adaptive` for this codec, if none is given."""
    when = Strategy.parse(f"adaptive / {codec}").when
    assert isinstance(when, Adaptive)
    assert when.theta is not None
    return when.theta


def _line(axes: Any, curve: Curve, which: int, colour: str, label: str | None) -> None:
    thetas = sorted(curve)
    values = [[figures[which] for figures in curve[theta]] for theta in thetas]
    means = [fmean(seeds) for seeds in values]
    reach = [[mean - min(s) for mean, s in zip(means, values, strict=True)],
             [max(s) - mean for mean, s in zip(means, values, strict=True)]]  # fmt: skip
    axes.errorbar(
        thetas, means, yerr=reach, color=colour, lw=1.5, marker="o", ms=4, elinewidth=1, label=label
    )


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The benchmark's own records in these files, or in stdin."""
    lines = (
        [line for file in files for line in file.read_text().splitlines()] if files else sys.stdin.readlines()
    )
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [record for record in found if record.get("benchmark") == "gossip replicas"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path, help="with --plot: files of records (stdin)")
    parser.add_argument(
        "--plot", type=Path, metavar="SVG", help="train nothing; draw what records say of theta"
    )
    parser.add_argument("--model", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    args = parser.parse_args()
    if args.plot:
        plot(read(args.records), args.plot)
        return
    torch.set_num_threads(1)
    for seed in args.seeds:
        for text in args.rules:
            print(json.dumps(train(args.model, text, seed, args.epochs)), flush=True)


if __name__ == "__main__":
    main()
