"""What of a model is not trained: buffers, such as BatchNorm's statistics, and frozen parameters. Meetings leave it alone.

All ranks begin with rank 0's; who comes later, with that of one who lives. A merge gives all of them the mean of the buffers (of those that
count, the lowest rank's). Frozen parameters are compared by checksum before they travel: who fine-tunes has read them from the same file,
and they may be large.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from tacit.gossip.frames import PeerError

Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Untrained:
    """The tensors themselves, in the order in which the module names them."""

    buffers: Sequence[Tensor] = ()
    frozen: Sequence[Tensor] = ()
    _crc: int | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        return cls(list(model.buffers()), [p.detach() for p in model.parameters() if not p.requires_grad])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.buffers, *self.frozen))

    @property
    def crc(self) -> int:
        """Of the frozen parameters."""
        if self._crc is None:
            self._crc = 0
            for tensor in self.frozen:
                self._crc = zlib.crc32(raw_bytes(tensor), self._crc)
        return self._crc

    def encode(self) -> bytes:
        """The buffers, as they travel. Training may be writing to them: of a running mean, half may be a step older."""
        return b"".join(map(raw_bytes, self.buffers))

    def decode(self, data: Buffer) -> list[Tensor]:
        """A peer's buffers."""
        return _decode(data, self.buffers)

    def take(self, buffers: Sequence[Tensor]) -> None:
        _copy(self.buffers, buffers)

    def take_frozen(self, data: Buffer) -> None:
        _copy(self.frozen, _decode(data, self.frozen))
        self._crc = None


class Mean:
    """Of models and their buffers by weight, added up in the order in which they come: the same bits wherever that is the same."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._model: Tensor | None = None
        self._buffers: list[Tensor] = []

    def add(self, model: Tensor, buffers: Sequence[Tensor], weight: float = 1.0) -> bool:
        """Whether the model could be added: one that is not finite would leave nothing of the others."""
        if not bool(model.isfinite().all()):
            return False
        if self._model is None:
            self._model = weight * model
            self._buffers = [
                weight * b.to(torch.promote_types(b.dtype, torch.float32)) if _averages(b) else b
                for b in buffers
            ]
        else:
            self._model.add_(model, alpha=weight)
            self._buffers = [
                s + weight * b if _averages(b) else s for s, b in zip(self._buffers, buffers, strict=True)
            ]
        self.weight += weight
        return True

    def of_all(self) -> tuple[Tensor, list[Tensor]]:
        assert self._model is not None, "somebody has brought a model"
        return self._model / self.weight, [s / self.weight if _averages(s) else s for s in self._buffers]


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor as it travels. One on an accelerator comes to the host here: sockets cannot read it there."""
    return raw_view(tensor).tobytes()


def raw_view(tensor: Tensor) -> memoryview:
    """The same without a copy, where the tensor is contiguous and the host's: nobody may write to it meanwhile."""
    found: memoryview = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    return found


def _averages(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _decode(data: Buffer, like: Sequence[Tensor]) -> list[Tensor]:
    if len(data) != sum(tensor.nbytes for tensor in like):
        raise PeerError("a peer's model has other buffers or frozen parameters")
    found, at = list[Tensor](), 0
    for tensor in like:
        part = bytearray(data[at : at + tensor.nbytes])
        at += tensor.nbytes
        read = torch.frombuffer(part, dtype=tensor.dtype) if part else torch.empty(0, dtype=tensor.dtype)
        found.append(read.view(tensor.shape).to(tensor.device))
    return found


@torch.no_grad()
def _copy(own: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for tensor, other in zip(own, others, strict=True):
        tensor.copy_(other)
