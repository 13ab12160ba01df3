"""Vectors to be compressed: the families every codec is measured on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Family = Callable[[int, int, torch.Generator], list[Tensor]]


def _gauss(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    return [torch.randn(numel, generator=rng) for _ in range(world)]


def _lognormal(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    """Heavy tails, all positive: most of the energy in few elements, and a mean that all ranks share."""
    return [x.exp() for x in _gauss(world, numel, rng)]


def _blocky(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    """Runs of 4096 with scales over two decades, the same on all ranks: like the layers of a model."""
    scale = 10 ** (2 * torch.rand(-(-numel // 4096), generator=rng)).repeat_interleave(4096)[:numel]
    return [x * scale for x in _gauss(world, numel, rng)]


def _identical(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    """The same vector everywhere: errors that do not differ between ranks do not average out."""
    return [_gauss(1, numel, rng)[0]] * world if world else []


def _windows(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    """Each rank is 10 times as large in a part of its own: experts, embeddings, whatever its data has most of."""
    made = _gauss(world, numel, rng)
    for rank, x in enumerate(made):
        x[numel * rank // world : numel * (rank + 1) // world] *= 10
    return made


def _loud(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    """The first rank is 10 times as large as the others, everywhere."""
    return [x * (1 if rank else 10) for rank, x in enumerate(_gauss(world, numel, rng))]


def _zero(world: int, numel: int, rng: torch.Generator) -> list[Tensor]:
    return [torch.zeros(numel) for _ in range(world)]


FAMILIES: dict[str, Family] = {
    "gauss": _gauss,
    "lognormal": _lognormal,
    "blocky": _blocky,
    "identical": _identical,
    "windows": _windows,
    "loud": _loud,
    "zero": _zero,
}


def vectors(family: str, world: int, numel: int, seed: int = 0) -> list[Tensor]:
    """One vector a rank, the same for the same arguments on every machine.

    Args:
        family: A name of `FAMILIES`.
        world: How many ranks.
        numel: Elements of a vector.
        seed: Chooses among vectors of a family.

    Returns:
        `world` float32 vectors, which the caller owns.

    Raises:
        KeyError: No such family.

    Example:
        >>> from tacit.testing import vectors
        >>> [x.numel() for x in vectors("gauss", world=2, numel=3)]
        [3, 3]
    """
    made = FAMILIES[family](world, numel, torch.Generator().manual_seed(seed))
    return [x.clone() for x in made]


def nmse(total: Tensor, inputs: Sequence[Tensor]) -> float:
    """The normalised mean square error of a sum: |mean - estimate|^2 / mean |x_i|^2.

    Args:
        total: The sum over ranks as a codec gave it.
        inputs: Every rank's vector.

    Returns:
        The error; 0 for an exact answer to zeros.

    Example:
        >>> from tacit.testing import nmse, vectors
        >>> inputs = vectors("gauss", world=2, numel=3)
        >>> nmse(inputs[0] + inputs[1], inputs) < 1e-12
        True
    """
    exact = torch.stack([x.double() for x in inputs])
    error = (exact.mean(0) - total.double() / len(inputs)).square().sum().item()
    energy = exact.square().sum().item() / len(inputs)
    return error / energy if energy else error
