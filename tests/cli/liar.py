"""A codec that declares fewer bytes than it sends."""

from tacit.codecs import Int8


class Liar(Int8):
    __slots__ = ()

    def __str__(self) -> str:
        return "liar"

    def nbytes(self, numel: int) -> int:
        return numel
