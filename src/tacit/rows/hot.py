"""What a user writes about hot rows: how many, how often they are agreed on, and where their gradients are added."""

from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta

import torch.distributed as dist

from tacit import environment
from tacit.aggregator.addresses import PORT, parse_address
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import LaneType
from tacit.errors import ConfigError
from tacit.rows.hot_counts import HALF_LIFE_TOUCHES
from tacit.transports import Wire
from tacit.transports.aggregator_link import AggregatorLink

MOST_WORLD = 255  # a touch has 8 bits
AUTO_MOST = 1 << 20  # rows; from here on the ranks' memory is what limits
_PATIENCE_S = 10.0
_MOST_SLOTS = 1 << 14


@dataclass(frozen=True, slots=True)
class Hot:
    """Rows that many ranks touch are copied to every rank; their gradients are added as integers, by an aggregator if there is one.

    Args:
        rows: how many at most. "auto": as many as make a step shortest by the cost rule, none where that is less than 1.1 times; a number: the
            hottest so many, whether they pay or not.
        every: steps between two agreements on which rows are hot.
        at: the aggregator's control, host:port; left out, TACIT_AGGREGATOR, and without that the process group adds.
        secret: the aggregator's; left out, TACIT_AGGREGATOR_SECRET.
        mtu: what the path to the aggregator takes in one piece.
        slots: packets on their way to it at a time.
        half_life_touches: touches of rows of one owner after which one counts half.

    Raises:
        ConfigError: an option out of its range.

    Example:
        >>> tacit.rows.shard(model, optimizer=RowAdagrad(lr=0.05), hot=Hot(rows=32768, at="10.0.0.1:4800"))
    """

    rows: int | str = "auto"
    _: KW_ONLY
    every: int = 50
    at: str = ""
    secret: str = field(default="", repr=False, compare=False)
    mtu: int = 1500
    slots: int = 64
    half_life_touches: float = HALF_LIFE_TOUCHES

    def __post_init__(self) -> None:
        if self.rows != "auto" and not (_is_whole(self.rows, 1)):
            raise ConfigError(f'Hot(rows={self.rows!r}): a number of rows, at least 1, or "auto"')
        if not _is_whole(self.every, 1):
            raise ConfigError(
                f"Hot(every={self.every!r}): a whole number of steps, at least 1; 50 are enough"
            )
        if not isinstance(self.at, str) or not isinstance(self.secret, str):
            raise ConfigError("Hot(at=..., secret=...): texts, host:port and the aggregator's secret")
        if self.at:
            parse_address(self.at, port=PORT)
        if not _is_whole(self.mtu, 1) or LaneType.I32.elements(self.mtu) < 8:
            raise ConfigError(f"Hot(mtu={self.mtu!r}): bytes that the path takes in one piece, 1500 on most")
        if not _is_whole(self.slots, 2) or self.slots > _MOST_SLOTS:
            raise ConfigError(f"Hot(slots={self.slots!r}): 2 to {_MOST_SLOTS} packets on their way at a time")
        if not isinstance(self.half_life_touches, int | float) or not self.half_life_touches > 0:
            raise ConfigError(f"Hot(half_life_touches={self.half_life_touches!r}): a number above 0")

    def check(self, adding: str, world: int) -> None:
        """Raises ConfigError where hot rows cannot be."""
        if adding != "exact":
            raise ConfigError(
                f'adding={adding!r} with hot rows, which are added in any order: pass adding="exact", or leave it out'
            )
        if world > MOST_WORLD:
            raise ConfigError(f"world {world}: hot rows are for at most {MOST_WORLD} ranks; leave hot= out")

    @property
    def about(self) -> tuple[object, ...]:
        """What all ranks must pass alike; their aggregators may differ, one a rack."""
        return self.rows, self.every, self.in_the_network, self.mtu, self.slots, self.half_life_touches

    @property
    def in_the_network(self) -> bool:
        """Whether an aggregator adds."""
        return self._control() is not None

    def open(
        self, wire: Wire, timeout: timedelta | None, meeting: dist.ProcessGroup | None = None
    ) -> AggregatorLink | None:
        """The link to the aggregator; None without one. A collective. The first sum joins. `meeting` as AggregatorLink has it."""
        control = self._control()
        if control is None:
            return None
        link = AggregatorLink(
            wire,
            control,
            self.secret or environment.aggregator_secret(),
            patience_s=_PATIENCE_S,
            mtu=self.mtu,
            slots=self.slots,
            timeout=timeout,
            meeting=meeting,
        )
        wire.lost_ranks = link.lost
        return link

    def _control(self) -> Address | None:
        at = self.at or environment.aggregator_address()
        return parse_address(at, port=PORT) if at else None


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
