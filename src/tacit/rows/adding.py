"""How an owner adds the gradients that several ranks have of one row.

`rank order`: in float32, rank 0's first. The same bits in every run of one world.
`exact`: as integers, round(g 2^e) in 64 bits. The same bits in any order, so whoever adds may add as gradients arrive, or have a node in
the network add some rows (sparse.md, "Hot rows on the wire"): training does not depend on which.

The exponent e is one a table: the largest sum of the last steps then has 25 bits, which leaves an int32 lane 6 bits of headroom. All ranks
agree on it, for each sends the largest exponent of its own last sums along with its next push.
"""

from collections.abc import Iterable
from math import frexp

import torch
from torch import Tensor

from tacit import _core
from tacit.requests import threads_for

RULES = ("rank order", "exact")
NOTHING = -(2**31)  # the exponent of a sum of zeros
_STEPS = 16  # whose largest sum decides
_BITS = 25  # of that sum: an int32 lane has 6 more
_FIRST = 40  # before anything was added: 2^-40 is small for a gradient, and up to 2^10 fit in 50 bits
_LIMIT = 150
_MOST = 2.0**50  # of one rounded gradient, as native/row_kernels.cpp has it


class Adder:
    """Adds gradients of one table by one of RULES; `own` and `history` are in the checkpoint."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.own = NOTHING  # of this rank's last sums
        self.history: list[int] = []  # of all ranks' sums, step by step

    def agree(self, owns: Iterable[int]) -> None:
        """Takes all ranks' `own` of the last step."""
        if (largest := max(owns)) != NOTHING:
            self.history = [*self.history, largest][-_STEPS:]
        self.own = NOTHING

    @property
    def exponent(self) -> int:
        if not self.history:
            return _FIRST
        return max(-_LIMIT, min(_LIMIT, _BITS - max(self.history)))

    def means(self, gradients: Tensor, targets: Tensor, total: int, world: int) -> Tensor:
        """Row t is the sum of the gradients whose target is t, divided by `world`."""
        out = torch.empty(total, gradients.shape[1])
        threads = threads_for(gradients.numel())
        if not self._exact:
            _core.row_sums(gradients, targets, float(world), out, threads)
            return out
        _core.row_exact_sums(gradients, targets, self.exponent, float(world), out, threads)
        self._note(out, world)
        return out

    def fixed(self, gradients: Tensor) -> Tensor:
        """What `means` adds of each number where rows are added elsewhere: round(g 2^e), at most 2^50; 0 for NaN."""
        scaled = gradients.double() * 2.0**self.exponent
        return scaled.clamp_(-_MOST, _MOST).nan_to_num_(0.0).round_().long()

    def means_of(self, sums: Tensor, broken: Tensor, world: int) -> Tensor:
        """`means` from sums of `fixed` over ranks; `broken` rows, in which some number was not finite, are NaN."""
        out = (sums.double() / 2.0**self.exponent / world).float()
        out[broken] = torch.nan
        self._note(out, world)
        return out

    def _note(self, means: Tensor, world: int) -> None:
        largest = float(means.nan_to_num(0.0, 0.0, 0.0).abs().max()) if means.numel() else 0.0
        if largest:  # nothing is written otherwise: another thread may be adding hot rows
            self.own = max(self.own, frexp(largest * world)[1])
