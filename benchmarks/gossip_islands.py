"""Gossip among 8 islands in one process, on Fashion-MNIST: accuracy of the merged model against bytes sent.

    python benchmarks/gossip_islands.py --epochs 10 --seeds 0 1 2 --rules 'every / none' 'adaptive(0.02) / hush'

Traffic is in models sent by an island in a step: gossip at every step, one exchange an island, sends 1.0. One JSON record a line.
"""

import argparse
import json
import math
import time

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tacit.demo.tasks import idx
from tacit.gossip.islands import Islands
from tacit.gossip.partners import Gossip
from tacit.rounds import Trigger
from tacit.strategy import Strategy

WORLD, BATCH, LR, MOMENTUM = 8, 32, 0.05, 0.9
RULES = (
    "every / none / gossip",
    "local(13) / none / gossip",
    "adaptive(0.04) / none / gossip",
    "adaptive(0.02) / hush / gossip",
    "adaptive(0.02) / int4 / gossip",
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
    """The islands' training: SGD with momentum on each, by one batched pass for all of them."""

    def __init__(self, model: nn.Module, strategy: Strategy, seed: int) -> None:
        self.model, self.named = model, dict(model.named_parameters())
        start = torch.cat([p.detach().reshape(-1) for p in self.named.values()])
        trigger: Trigger = strategy.when  # type: ignore[assignment]
        assert isinstance(strategy.who, Gossip)
        layers = [p.numel() for p in self.named.values()]
        self.islands = Islands(start.repeat(WORLD, 1), layers, trigger, strategy.what, strategy.who, seed)
        self.velocity = torch.zeros_like(self.islands.models)
        self.gradients = vmap(grad(self._loss), in_dims=(0, 0, 0))

    def _loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(self.model, self.split(flat), (x,)), y)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([p.numel() for p in self.named.values()])
        return {n: part.view(p.shape) for (n, p), part in zip(self.named.items(), parts, strict=True)}

    def step(self, x: Tensor, y: Tensor, lr: float) -> None:
        self.velocity.mul_(MOMENTUM).add_(self.gradients(self.islands.models, x, y))
        self.islands.models.sub_(self.velocity, alpha=lr)
        self.islands.stepped(lr)

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            found = functional_call(self.model, self.split(self.islands.mean()), (x,))
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
            apart = sea.islands.consensus()
    islands = sea.islands
    return {
        "benchmark": "gossip islands", "model": kind, "strategy": text, "seed": seed, "epochs": epochs, "steps": steps,
        "islands": WORLD, "parameters": islands.models.shape[1], "accuracy": sea.accuracy(test_x, test_y),
        "traffic": islands.sent_nbytes / (4 * islands.models.shape[1] * WORLD * steps),
        "exchanges": islands.exchanges, "apart_halfway": apart, "apart": islands.consensus(),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for text in args.rules:
            print(json.dumps(train(args.model, text, seed, args.epochs)), flush=True)


if __name__ == "__main__":
    main()
