"""
The C++ core: loops at the speed of memory. Arrays are 1-D, contiguous, on the CPU.
"""

import numpy
import numpy.typing
import torch


def packed_nbytes(numel: int, bits: int, block: int) -> int:
    """Bytes that `numel` elements take once packed."""

def pack_blocks(x: torch.Tensor | numpy.typing.NDArray[numpy.float32], bits: int, block: int, seed: int, stochastic: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.uint8]) -> int:
    """
    How many blocks were not finite, after packing `x` into `out` (of packed_nbytes() bytes).

    A block with a NaN or an infinity decodes to NaN. `x` is only read; the GIL is released.
    """

def unpack_blocks(data: torch.Tensor | numpy.typing.NDArray[numpy.uint8], numel: int, bits: int, block: int, gain: float, add: bool, out: torch.Tensor | numpy.typing.NDArray[numpy.float32]) -> None:
    """
    out[i] = (out[i] if add else 0) + gain * decoded[i]; `data` is only read, the GIL is released.
    """

def random_bits(seed: int, out: torch.Tensor | numpy.typing.NDArray[numpy.uint32]) -> None:
    """
    Fills `out` with the bits that stochastic rounding uses for elements 0, 1, 2, ... under `seed`.
    """

def simd() -> str:
    """The instruction set in use."""

def simd_variants() -> list[str]:
    """
    The instruction sets this CPU can run, slowest first; all give the same bits.
    """

def use_simd(name: str) -> None:
    """Runs on the named instruction set from now on, in all threads."""
