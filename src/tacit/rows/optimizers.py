"""Row optimizers: what a step does to the rows that a batch has touched, and to no other.

Each is a frozen dataclass of options with its formula; the loop is in native/row_kernels.cpp. g is the mean over ranks of a row's gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from tacit import _core
from tacit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """What all row optimizers share; use one of SGD, Adagrad, RowAdagrad, FTRL and LazyAdam.

    Args:
        lr: the learning rate; `tables.step(lr=...)` replaces it for one step.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tables = tacit.rows.shard(model, optimizer=tacit.rows.RowAdagrad(lr=0.05))
    """

    lr: float

    def __post_init__(self) -> None:
        _check(self, "lr", self.lr, positive=True)

    @property
    def state(self) -> Mapping[str, bool]:
        """What is kept: name -> whether it has a number an element of the row (or else one a row)."""
        return {}

    def begin(self, weights: Tensor) -> dict[str, Tensor]:
        """The state of rows that have just been made; `weights` are theirs, float32."""
        return {
            name: torch.zeros_like(weights) if wide else torch.zeros(len(weights))
            for name, wide in self.state.items()
        }

    def update(
        self,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rows: Tensor,
        g: Tensor,
        lr: float,
        step: int,
        threads: int,
    ) -> None:
        """One step of the rows numbered `rows`, which increase. `step` counts from 1."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SGD(RowOptimizer):
    """w -= lr g.

    Args:
        lr: the learning rate.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=SGD(lr=0.1))
    """

    def update(
        self,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rows: Tensor,
        g: Tensor,
        lr: float,
        step: int,
        threads: int,
    ) -> None:
        _core.row_sgd(weights, rows, g, lr, threads)


@dataclass(frozen=True, slots=True)
class Adagrad(RowOptimizer):
    """s += g^2;  w -= lr g / (sqrt(s) + eps): torch.optim.Adagrad's, on sparse gradients.

    Args:
        lr: the learning rate.
        eps: keeps the quotient finite.
        start: what s is at first.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=Adagrad(lr=0.05))
    """

    eps: float = 1e-10
    start: float = 0.0

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        _check(self, "eps", self.eps)
        _check(self, "start", self.start)

    @property
    def state(self) -> Mapping[str, bool]:
        return {"squares": True}

    def begin(self, weights: Tensor) -> dict[str, Tensor]:
        return {"squares": torch.full_like(weights, self.start)}

    def update(
        self,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rows: Tensor,
        g: Tensor,
        lr: float,
        step: int,
        threads: int,
    ) -> None:
        _core.row_adagrad(weights, state["squares"], rows, g, lr, self.eps, threads)


@dataclass(frozen=True, slots=True)
class RowAdagrad(RowOptimizer):
    """Adagrad with one number a row: s += mean(g^2);  w -= lr g / (sqrt(s) + eps). A width-th of Adagrad's memory.

    Args:
        lr: the learning rate.
        eps: keeps the quotient finite.
        start: what s is at first.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=RowAdagrad(lr=0.05))
    """

    eps: float = 1e-10
    start: float = 0.0

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        _check(self, "eps", self.eps)
        _check(self, "start", self.start)

    @property
    def state(self) -> Mapping[str, bool]:
        return {"squares": False}

    def begin(self, weights: Tensor) -> dict[str, Tensor]:
        return {"squares": torch.full((len(weights),), float(self.start))}

    def update(
        self,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rows: Tensor,
        g: Tensor,
        lr: float,
        step: int,
        threads: int,
    ) -> None:
        _core.row_row_adagrad(weights, state["squares"], rows, g, lr, self.eps, threads)


@dataclass(frozen=True, slots=True)
class FTRL(RowOptimizer):
    """FTRL-proximal (McMahan et al. 2013, Algorithm 1), with zeros where |z| <= l1.

        n' = n + g^2;  z += g - (sqrt(n') - sqrt(n)) / lr w;  w = (sign(z) l1 - z) / ((beta + sqrt(n')) / lr + l2)

    A new row's z is the one whose w is the row's first value: rows need not begin with zeros.

    Args:
        lr: alpha in the paper.
        l1: how far z may be from 0 where w is 0.
        l2: pulls w to 0.
        beta: keeps the first steps small.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=FTRL(lr=0.1, l1=1.0))
    """

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        for name in ("l1", "l2"):
            _check(self, name, getattr(self, name))
        _check(self, "beta", self.beta, positive=True)

    @property
    def state(self) -> Mapping[str, bool]:
        return {"z": True, "squares": True}

    def begin(self, weights: Tensor) -> dict[str, Tensor]:
        z = -weights * (self.beta / self.lr + self.l2) - weights.sign() * self.l1
        return {"z": z, "squares": torch.zeros_like(weights)}

    def update(
        self,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rows: Tensor,
        g: Tensor,
        lr: float,
        step: int,
        threads: int,
    ) -> None:
        _core.row_ftrl(
            weights, state["z"], state["squares"], rows, g, lr, self.beta, self.l1, self.l2, threads
        )


@dataclass(frozen=True, slots=True)
class LazyAdam(RowOptimizer):
    """Adam over touched rows alone, torch.optim.SparseAdam's: moments of the other rows stay as they are.

    Args:
        lr: the learning rate.
        beta1: how long the mean of g remembers.
        beta2: how long the mean of g^2 remembers.
        eps: keeps the quotient finite.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=LazyAdam(lr=0.001))
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        RowOptimizer.__post_init__(self)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"LazyAdam({name}={getattr(self, name)}): from 0 to less than 1")
        _check(self, "eps", self.eps)

    @property
    def state(self) -> Mapping[str, bool]:
        return {"m": True, "v": True}

    def update(
        self,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rows: Tensor,
        g: Tensor,
        lr: float,
        step: int,
        threads: int,
    ) -> None:
        rate = lr * sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        _core.row_lazy_adam(
            weights, state["m"], state["v"], rows, g, rate, self.beta1, self.beta2, self.eps, threads
        )


def _check(owner: RowOptimizer, name: str, value: object, positive: bool = False) -> None:
    good = isinstance(value, float | int) and isfinite(value) and (value > 0 or (not positive and value == 0))
    if not good:
        kind = type(owner).__name__
        raise ConfigError(
            f"{kind}({name}={value!r}): a finite number {'above 0' if positive else 'of 0 or more'}"
        )
