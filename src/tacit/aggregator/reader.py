"""Figures of an aggregator, asked for from anywhere."""

from types import TracebackType
from typing import Self

from tacit.aggregator.addresses import address_text
from tacit.aggregator.line import Line, RefusedError
from tacit.aggregator.reading import Reading
from tacit.aggregator.spec import Address
from tacit.errors import TransportError


class Reader:
    """A connection to control that is asked again and again. TransportError or ConfigError if it does not answer."""

    def __init__(self, control: Address, secret: str, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        try:
            self._line = Line(control, secret, {"say": "status"}, timeout_s)
        except RefusedError as refusal:
            raise refusal.error from None
        try:
            self._answer()  # to the greeting: whether we are refused, or figures that are old when somebody wants them
        except BaseException:
            self._line.close()
            raise

    def read(self) -> Reading:
        """All figures, now."""
        try:
            self._line.send({"say": "status"})
        except OSError as cause:
            self._line.lost(cause)
        return self._answer()

    def _answer(self) -> Reading:
        try:
            told = self._line.receive(self._timeout_s)
        except RefusedError as refusal:
            raise refusal.error from None
        except OSError as cause:
            self._line.lost(cause)
        if told is None:
            where = address_text(self._line.control)
            raise TransportError(
                f"the aggregator at {where} has not answered within {self._timeout_s:.3g} s; is it alive?"
            )
        return Reading.of(told)

    def close(self) -> None:
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
