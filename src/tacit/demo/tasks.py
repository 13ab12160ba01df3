"""The two tasks of the demo: real data that needs no download, a model, and how it is judged."""

from __future__ import annotations

import gzip
import hashlib
import struct
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, LRScheduler

from tacit.demo.facts import FASHION_MNIST
from tacit.errors import ConfigError

CONTEXT = 96
CORPUS_NBYTES = 4_000_000
HELD_OUT_NBYTES = 256_000
WARMUP_STEPS = 10  # the learning rate rises, DDP regroups its buckets: these steps are not timed
BUCKET_MB = 1  # several buckets for the transformer, one for the MLP
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A model to build, batches to draw, a metric to judge by; equal on every rank but for the batches drawn."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], Batch]
    evaluate: Callable[[nn.Module], float]
    data_sha256: str


def learning_rates(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """A rise over the first steps, then half a cosine down to nothing after `steps`."""
    rise = LinearLR(optimizer, 0.1, total_iters=WARMUP_STEPS)
    return ChainedScheduler([rise, CosineAnnealingLR(optimizer, max(1, steps))])


def digits() -> Task:
    """1,797 handwritten digits, the last 360 held out; an MLP of 85 k parameters; test accuracy."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    train_x, train_y, test_x, test_y = x[:-360], y[:-360], x[-360:], y[-360:]

    def batch(rng: torch.Generator) -> Batch:
        pick = torch.randint(len(train_x), (32,), generator=rng)
        return train_x[pick], train_y[pick]

    def accuracy(model: nn.Module) -> float:
        return float((model(test_x).argmax(1) == test_y).float().mean())

    return Task(
        model=_mlp,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch=batch,
        evaluate=accuracy,
        data_sha256=hashlib.sha256(data.data.tobytes()).hexdigest(),
    )


def source_bytes() -> Task:
    """The standard library's own text, its last 256 kB held out; a transformer of 0.84 M parameters; loss in nats."""
    corpus = stdlib_text()
    text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    train, held_out = text[:-HELD_OUT_NBYTES], text[-HELD_OUT_NBYTES:]
    starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 128).long()

    def batch(rng: torch.Generator) -> Batch:
        return _windows(train, torch.randint(len(train) - CONTEXT, (4,), generator=rng))

    def loss(model: nn.Module) -> float:
        x, y = _windows(held_out, starts)
        return F.cross_entropy(model(x), y).item()

    return Task(
        model=ByteModel,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
        batch=batch,
        evaluate=loss,
        data_sha256=hashlib.sha256(corpus).hexdigest(),
    )


def fashion_mlp() -> Task:
    """The same pictures for an MLP of 109,386 parameters."""
    return replace(fashion(), model=_flat_mlp)


def fashion() -> Task:
    """60,000 pictures of clothes, 10,000 held out; a CNN of 225 k parameters; test accuracy."""
    train_x, train_y = idx("train-images-idx3-ubyte"), idx("train-labels-idx1-ubyte")
    test_x, test_y = idx("t10k-images-idx3-ubyte"), idx("t10k-labels-idx1-ubyte").long()

    def pictures(x: Tensor) -> Tensor:
        normal = (x.float() / 255 - 0.286).unsqueeze(1) / 0.353
        return normal.to(memory_format=torch.channels_last)  # twice as fast on a CPU

    def batch(rng: torch.Generator) -> Batch:
        pick = torch.randint(len(train_x), (32,), generator=rng)
        return pictures(train_x[pick]), train_y[pick].long()

    def accuracy(model: nn.Module) -> float:
        right = [
            (model(pictures(x)).argmax(1) == y).sum()
            for x, y in zip(test_x.split(500), test_y.split(500), strict=True)
        ]
        return float(torch.stack(right).sum() / len(test_y))

    return Task(
        model=_cnn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        batch=batch,
        evaluate=accuracy,
        data_sha256=hashlib.sha256(train_x.numpy().tobytes()).hexdigest(),
    )


def idx(name: str, folder: Path = Path(FASHION_MNIST)) -> Tensor:
    """An IDX file of bytes, as MNIST's: magic 0x0000080D with D dimensions, their sizes, then the values."""
    path = folder / f"{name}.gz"
    if not path.exists():
        raise ConfigError(f"{path} is missing; install Debian's dataset-fashion-mnist, or choose other tasks")
    raw = gzip.decompress(path.read_bytes())
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).view(shape)


BUILDERS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "bytes": source_bytes,
    "fashion": fashion,
    "fashion_mlp": fashion_mlp,
}


def stdlib_text() -> bytes:
    """The standard library's top-level modules, sorted by name and joined, cut at 4 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:CORPUS_NBYTES]
    if len(text) < 4 * HELD_OUT_NBYTES:
        raise ConfigError(
            f"{folder} holds {len(text)} bytes of Python source, too few to train on; use --tasks digits"
        )
    return text


def _windows(text: Tensor, starts: Tensor) -> Batch:
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _flat_mlp() -> nn.Module:
    layers = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def _cnn() -> nn.Module:
    convolutions = (
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),  # in this order: the same numbers, a quarter of the work
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
    )  # fmt: skip
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10))


class ByteModel(nn.Module):
    """Next-byte logits, (batch, 256, context), from a pre-norm transformer whose embedding is tied to its output."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.place.weight[: x.shape[1]]
        logits: Tensor = self.norm(self.blocks(hidden)) @ self.embed.weight.T
        return logits.transpose(1, 2)


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_attention(x))
        fed: Tensor = self.mlp(self.norm_mlp(x))
        return x + fed

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
