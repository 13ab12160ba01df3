"""Deep gradient compression (Lin et al. 2018): one of 1000, with momentum where the gradient waits instead of in the optimizer.

    g  = clip(gradient, to a norm of clip / sqrt(n), parameter by parameter)             local gradient clipping
    u  = momentum u + g;    v = v + u;    send v on the k places where |v| is largest    momentum correction
    u  = v = 0 on those places                                                           momentum factor masking
    share = 1/4, 1/16, 1/64, 1/256 over the first `warmup` steps, then `share`           warm-up of the sparsity

What arrives is the momentum step itself: train with SGD(momentum=0), else there is momentum twice. Sparsity is that of a bucket, and steps
stand for the paper's 4 epochs of warm-up. As in the authors' code the norm that is clipped is a parameter's: of the whole model no bucket knows it.
Every rank receives the others' numbers and their places, (n - 1) payloads: k is small. `dgc > bf16` writes the numbers as bf16 does.
"""

from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.cast import Plain
from tacit.codecs.in_torch import kernels
from tacit.codecs.sparse_form import SparseForm, check_share, kept_of, largest, with_values
from tacit.codecs.topk import format_of
from tacit.errors import ConfigError
from tacit.requests import STEADY_STEP, Codec, Context, Conversation, Gather, Reduced, Traits

_FIRST = 0.25  # of the warm-up; each stage sends a quarter of the one before
_MOST_WARMUP = 10**9


@dataclass(frozen=True, slots=True)
class Dgc:
    """`dgc(share=0.001, momentum=0.9, clip=0, warmup=400)`; `clip=0`: gradients are not clipped."""

    share: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    warmup: int = 400
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_share(self.share, 0.001)
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"momentum={self.momentum}: what a step keeps of the velocity, 0 to below 1; try 0.9"
            )
        if not _is_number(self.clip) or not 0 <= self.clip < float("inf"):
            raise ConfigError(
                f"clip={self.clip}: the norm to which a parameter's gradient is clipped, above 0; 0 clips nothing"
            )
        if (
            not isinstance(self.warmup, int)
            or isinstance(self.warmup, bool)
            or not 0 <= self.warmup <= _MOST_WARMUP
        ):
            raise ConfigError(
                f"warmup={self.warmup}: steps until the share is reached, 0 to {_MOST_WARMUP}; try 400"
            )
        format_of(self.values, "dgc")

    def __str__(self) -> str:
        options = f"share={self.share}, momentum={self.momentum}, clip={self.clip}, warmup={self.warmup}"
        return with_values(f"dgc({options})", self.values)

    @property
    def traits(self) -> Traits:
        return Traits(rounds=1, summable=False, remembers=True)

    def over(self, values: Codec) -> Codec:
        return replace(self, values=values)

    def nbytes(self, numel: int) -> int:
        return self.form(numel, STEADY_STEP).nbytes

    def share_at(self, step: int) -> float:
        """The part that is sent in a step."""
        stages = list(takewhile(lambda share: share > self.share, (_FIRST**k for k in count(1))))
        stage = step * len(stages) // self.warmup if step < self.warmup else len(stages)
        return [*stages, self.share][stage]

    def form(self, numel: int, step: int) -> SparseForm:
        """How what is sent of a bucket in a step lies on the wire."""
        return SparseForm(numel, kept_of(self.share_at(step), numel), format_of(self.values, "dgc"))

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        velocity, residual = context.memory.vector("momentum"), context.memory.vector("residual")
        form = self.form(x.numel(), context.step)
        wanted = recycled.empty_like(residual)
        kernels(x).accumulate(self._clipped(x.float(), context), self.momentum, velocity, residual, wanted)
        index = largest(wanted, form.kept)
        numbers = wanted[index]
        own = form.pack(index, numbers, context.own_seed)
        _, sent = form.unpack(own)
        left = numbers - sent  # zero, but for what the format of the numbers rounds off
        # what was not finite must not live on
        residual.index_copy_(0, index, torch.where(left.isfinite(), left, residual[index]))
        velocity.index_fill_(0, index, 0.0)
        payloads: list[Tensor] = yield Gather(own)
        return Reduced(form.sum_of(payloads), lambda: form.sum_of([own]))

    def _clipped(self, x: Tensor, context: Context) -> Tensor:
        if not self.clip:
            return x
        most, x = self.clip / context.world**0.5, x.clone()
        for part in context.layout.split(x).values():
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)
            factor = torch.where(norm.isfinite(), (most / norm).clamp(max=1), 1.0)  # 0 / 0 clamps to NaN
            part.mul_(torch.where(norm > 0, factor, 1.0).to(part.dtype))
        return x


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
