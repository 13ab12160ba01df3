"""What rows have cost on the wire: payload bytes that left this rank, counted as they leave."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class RowTraffic:
    """Counters of one rank, since its tables were sharded. Bytes are payload bytes that left it; what it owns itself does not travel.

    Args:
        pulls: exchanges that looked rows up.
        pushes: exchanges that sent gradients.
        looked_up: ids that were looked up, as often as they came.
        pulled: different rows among them, of each exchange.
        pushed: rows of gradients, this rank's own included.
        header_nbytes: what announces how many keys follow.
        key_nbytes: keys, 8 bytes each.
        row_nbytes: rows sent to other ranks, which had asked for them.
        gradient_nbytes: rows of gradients sent to their owners.

    Example:
        >>> tables.stats.sent_nbytes
        0
    """

    pulls: int = 0
    pushes: int = 0
    looked_up: int = 0
    pulled: int = 0
    pushed: int = 0
    header_nbytes: int = 0
    key_nbytes: int = 0
    row_nbytes: int = 0
    gradient_nbytes: int = 0

    @property
    def sent_nbytes(self) -> int:
        """All bytes that left this rank."""
        return self.header_nbytes + self.key_nbytes + self.row_nbytes + self.gradient_nbytes

    def __add__(self, other: "RowTraffic") -> "RowTraffic":
        return RowTraffic(**{name: number + getattr(other, name) for name, number in asdict(self).items()})

    def as_dict(self) -> dict[str, int]:
        """Plain numbers, ready for JSON."""
        return {**asdict(self), "sent_nbytes": self.sent_nbytes}
