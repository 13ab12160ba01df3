"""THC: tensor homomorphic compression (Li et al., NSDI 2024, arXiv 2302.08545), as published.

    M = max over ranks of |x|;   y = H diag(s) x / sqrt(B);   z = clamp(y sqrt(D) / M, -t, t)
    v = (z + t) g / 2t, rounded without bias to a neighbour in T; its index is sent;   whoever adds, adds T[index]
    x^ = (sum / n - g/2) 2t/g M / sqrt(D), rotated back

Defaults of the paper: 4 bits, granularity 30, clamped fraction 1/32, slices of 2^20. `block` limits the rotation to runs
of that many elements (0: the whole slice), under the slice's one norm: the variant that suffers on real gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.in_torch import kernels, thc_lengths
from tacit.codecs.tables import clamp_at, stochastic_table
from tacit.errors import ConfigError
from tacit.requests import (
    Context,
    Conversation,
    Lanes,
    Max,
    Reduced,
    TableSum,
    Total,
    Traits,
    seed_of,
    threads_for,
)


@dataclass(frozen=True, slots=True)
class Thc:
    """b bits up, integers added, one lane a coordinate down: 8 bits while granularity x ranks <= 255, then 16."""

    bits: int = 4
    granularity: int = 30
    clamped: float = 1 / 32
    slice: int = 2**20
    block: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise ConfigError(f"bits={self.bits}: thc has 2, 3 or 4 bits")
        if not isinstance(self.granularity, int) or not 2**self.bits - 1 <= self.granularity <= 255:
            raise ConfigError(
                f"granularity={self.granularity}: {2**self.bits} levels need {2**self.bits - 1} to 255"
            )
        if not isinstance(self.clamped, float) or not 0 < self.clamped < 1:
            raise ConfigError(
                f"clamped={self.clamped}: the clamped fraction lies between 0 and 1; the paper's is 0.03125"
            )
        for name, value in (("slice", self.slice), ("block", self.block or 8)):
            if not isinstance(value, int) or not 8 <= value <= 2**20 or value & (value - 1):
                raise ConfigError(f"{name}={value}: a power of two from 8 to 1048576 is needed")

    def __str__(self) -> str:
        options = [f"bits={self.bits}", f"granularity={self.granularity}"]
        defaults = {"clamped": 1 / 32, "slice": 2**20, "block": 0}
        options += [f"{name}={value}" for name, value in self._rest().items() if value != defaults[name]]
        return f"thc({', '.join(options)})"

    def _rest(self) -> dict[str, float]:
        return {"clamped": self.clamped, "slice": self.slice, "block": self.block}

    @property
    def reach(self) -> float:
        return clamp_at(self.clamped)

    @property
    def table(self) -> tuple[int, ...]:
        return stochastic_table(2**self.bits, self.granularity, self.reach)

    @property
    def traits(self) -> Traits:
        # with 2 bits, a rank far larger than the others makes all of them round too far
        contracting = self.bits > 2
        return Traits(rounds=2, summable=True, contracting=contracting, lanes=Lanes(16, self.granularity))

    def nbytes(self, numel: int) -> int:
        lengths = thc_lengths(numel, self.slice)
        return 4 * len(lengths) + sum(lengths) // (
            4 if self.bits == 2 else 2
        )  # 3-bit indices travel as nibbles

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x, signs = x.float(), seed_of(context.shared_seed, "signs")
        lanes = Lanes(8 if context.world * self.granularity <= 255 else 16, self.granularity)
        table = self.table + (0,) * (8 if self.bits == 3 else 0)
        padded = sum(thc_lengths(x.numel(), self.slice))
        largest = yield Max(_norms_sent(x, self.slice))
        norms = largest.double() / _SENT
        index = self.encode(x, norms, signs, context.own_seed)
        total: Total = yield TableSum(index, table, padded, lanes)
        own = TableSum(index, table, padded, Lanes(8, self.granularity))
        return Reduced(
            self.decode(total.value, norms, signs, total.count, x.numel()),
            contribution=lambda: self.decode(own.look_up(), norms, signs, 1, x.numel()),
        )

    def encode(self, x: Tensor, norms: Tensor, signs: int, noise: int) -> Tensor:
        """The packed indices of x, rotated, scaled to N(0, 1), clamped and rounded."""
        packed = self.nbytes(x.numel()) - 4 * norms.numel()
        out = recycled.empty(packed, torch.uint8, x.device)
        table = torch.tensor(self.table, dtype=torch.uint8)
        kernels(x).thc_encode(
            x, norms, *self._logs(), signs, noise, self.reach, table, self.bits, out, threads_for(x.numel())
        )
        return out

    def decode(self, lanes: Tensor, norms: Tensor, signs: int, count: int, numel: int) -> Tensor:
        """The sum over `count` ranks."""
        out, g = recycled.empty(numel, torch.float32, norms.device), self.granularity
        lanes = (
            lanes.view(torch.uint16) if lanes.dtype == torch.int16 and lanes.device.type == "cpu" else lanes
        )
        kernels(norms).thc_decode(
            lanes,
            numel,
            *self._logs(),
            signs,
            norms,
            self.reach,
            g,
            count,
            out,
            float(count),
            threads_for(numel),
        )
        return out

    def _logs(self) -> tuple[int, int]:
        return self.slice.bit_length() - 1, (self.block or self.slice).bit_length() - 1


_SENT = 2.0**-10  # of a norm: that of 2^20 of the largest floats is then a float too


def _norms_sent(x: Tensor, size: int) -> Tensor:
    """The norm of each slice, as it is sent."""
    if not x.numel():
        return x
    return (torch.stack([_norm(part) for part in x.split(size)]) * _SENT).float()


def _norm(x: Tensor) -> Tensor:
    """|x| as a double; summed in double where squares may overflow or vanish in float32, and on an accelerator always,
    which would have to stop to look."""
    norm: Tensor = x.norm().double()
    if x.device.type != "cpu" or not 2.0**-40 <= norm <= 2.0**60:
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm
