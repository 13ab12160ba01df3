"""OmniReduce (Fei et al. 2021): blocks that are zero on all ranks are not sent.

    used = yield Max(block is not zero on this rank);      total = yield Sum(x on the blocks that some rank uses)

Nothing is lost: the sum is that of all blocks. It pays where gradients are sparse by nature in runs of `block` elements, as embeddings' are. The
paper's aggregator is asked block by block, so a rank does not send a block that is zero on it alone; here it does, and in exchange whatever adds may add: a ring,
a tree, an aggregator, and the numbers take any codec, `omnireduce > int8`. A byte a block goes first.

How many bytes that is depends on the numbers: `nbytes` is the most. On an accelerator the number of blocks is waited for.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit import _core
from tacit.codecs.cast import Plain
from tacit.codecs.shared_places import check_values
from tacit.codecs.sparse_form import with_values
from tacit.errors import ConfigError
from tacit.requests import (
    Codec,
    Context,
    Conversation,
    LocalMemory,
    Max,
    Reduced,
    Traits,
    as_reduced,
    seed_of,
)


@dataclass(frozen=True, slots=True)
class OmniReduce:
    """`omnireduce(block=256)`; `omnireduce > bf16` writes the numbers as bf16 does."""

    block: int = 256
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or isinstance(self.block, bool) or not 1 <= self.block <= 2**20:
            raise ConfigError(f"block={self.block}: elements of a block, 1 to 1048576; try 256")
        check_values("omnireduce", self.values)

    def __str__(self) -> str:
        return with_values(f"omnireduce(block={self.block})", self.values)

    @property
    def traits(self) -> Traits:
        inner = self.values.traits
        return replace(inner, rounds=1 + inner.rounds, varies=True)

    def over(self, values: Codec) -> Codec:
        return replace(self, values=values)

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) + self.values.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x = x.float()
        used: Tensor = yield Max(self.used(x))
        blocks = used.nonzero().view(-1)
        rest = -x.numel() % self.block if blocks.numel() and int(used[-1]) else 0  # of the last block
        numbers = self._rows(x)[blocks].view(-1)
        numbers = numbers[: numbers.numel() - rest]
        seeds = [seed_of(seed, "blocks") for seed in (context.own_seed, context.shared_seed)]
        told = replace(context, memory=LocalMemory(numbers), own_seed=seeds[0], shared_seed=seeds[1])
        reduced = as_reduced((yield from self.values.reduce(numbers, told)))
        contribution = reduced.contribution

        def place(sent: Tensor) -> Tensor:
            out = sent.new_zeros(used.numel(), self.block)
            out[blocks] = pad(sent, (0, rest)).view(-1, self.block)
            return out.view(-1)[: x.numel()].float()

        return Reduced(
            place(reduced.total), lambda: place(numbers if contribution is None else contribution())
        )

    def used(self, x: Tensor) -> Tensor:
        """1 for every block that is not zero, or not a number."""
        if x.device.type != "cpu":
            return (self._rows(x) != 0).any(1).to(torch.uint8)
        out = torch.empty(-(-x.numel() // self.block), dtype=torch.uint8)
        _core.used_blocks(x.contiguous(), self.block, out)
        return out

    def _rows(self, x: Tensor) -> Tensor:
        return pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
