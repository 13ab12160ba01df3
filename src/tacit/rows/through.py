"""What a user writes to have rows go through an aggregator: where it is, and what the way there takes."""

from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta

from tacit import environment
from tacit.aggregator.addresses import PORT, parse_address
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import MOST_RANKS, rows_room
from tacit.errors import ConfigError
from tacit.transports import Wire
from tacit.transports.row_link import RowLink
from tacit.transports.row_seat import RowPath

_LEAST_WINDOW = 1 << 14
_MOST_WINDOW = 1 << 26


@dataclass(frozen=True, slots=True)
class Through:
    """Rows, keys and gradients travel through an aggregator, which passes them on: one data socket a rank, whatever the number of ranks.

    While the aggregator is gone the process group moves them: the same bytes, so the same training.

    Args:
        at: the aggregator's control, host:port; left out, TACIT_AGGREGATOR.
        secret: the aggregator's; left out, TACIT_AGGREGATOR_SECRET.
        mtu: what the path to the aggregator takes in one piece.
        window_nbytes: bytes on their way to one rank at a time, from all others together.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=RowAdagrad(lr=0.05), through=Through("10.0.0.1:4800"))
    """

    at: str = ""
    _: KW_ONLY
    secret: str = field(default="", repr=False, compare=False)
    mtu: int = 1500
    window_nbytes: int = 1 << 18

    def __post_init__(self) -> None:
        if not isinstance(self.at, str) or not isinstance(self.secret, str):
            raise ConfigError("Through(at=..., secret=...): texts, host:port and the aggregator's secret")
        if self.at:
            parse_address(self.at, port=PORT)
        if not _is_whole(self.mtu) or not 0 < self.mtu < 1 << 16 or not rows_room(self.mtu):
            raise ConfigError(
                f"Through(mtu={self.mtu!r}): bytes that the path takes in one piece, 1500 on most"
            )
        if not _is_whole(self.window_nbytes) or not _LEAST_WINDOW <= self.window_nbytes <= _MOST_WINDOW:
            raise ConfigError(
                f"Through(window_nbytes={self.window_nbytes!r}): {_LEAST_WINDOW} to {_MOST_WINDOW} bytes on their way to a rank"
            )

    def check(self, world: int) -> None:
        """Raises ConfigError where rows cannot go through an aggregator."""
        self._control()
        if world > MOST_RANKS:
            raise ConfigError(
                f"world {world}: an aggregator passes rows on for at most {MOST_RANKS} ranks; leave through= out"
            )

    @property
    def about(self) -> tuple[object, ...]:
        """What all ranks must pass alike."""
        return self.mtu, self.window_nbytes

    @property
    def where(self) -> str:
        """The aggregator's control, as this rank knows it."""
        return self.at or environment.aggregator_address()

    def open(self, wire: Wire, timeout: timedelta | None, patience_s: float) -> RowLink:
        """The link to all other members. A collective, which joins."""
        secret = self.secret or environment.aggregator_secret()
        path = RowPath(self._control(), secret, self.mtu, self.window_nbytes)
        link = RowLink(wire, path, patience_s=patience_s, timeout=timeout)
        wire.lost_ranks = link.lost
        return link

    def _control(self) -> Address:
        if not self.where:
            raise ConfigError(
                "through= does not say where the aggregator is; write Through('host:port'), or set TACIT_AGGREGATOR"
            )
        return parse_address(self.where, port=PORT)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
