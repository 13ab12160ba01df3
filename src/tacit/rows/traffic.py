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
        hot_rows: rows that are hot now, on all ranks alike.
        hot_looked_up: ids whose row was hot.
        hot_read: different hot rows among the look-ups, which no pull was needed for.
        hot_trained: hot rows whose gradients were added over ranks.
        hot_repaired: of them, those that were sent again because a number did not fit into its lane.
        touch_nbytes: a nibble a hot row, from which follows which of them some rank has touched.
        lane_nbytes: gradients of hot rows.
        agreement_nbytes: counts, and rows that became hot.

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
    hot_rows: int = 0
    hot_looked_up: int = 0
    hot_read: int = 0
    hot_trained: int = 0
    hot_repaired: int = 0
    touch_nbytes: int = 0
    lane_nbytes: int = 0
    agreement_nbytes: int = 0

    @property
    def sent_nbytes(self) -> int:
        """All bytes that left this rank."""
        cold = self.header_nbytes + self.key_nbytes + self.row_nbytes + self.gradient_nbytes
        return cold + self.touch_nbytes + self.lane_nbytes + self.agreement_nbytes

    @property
    def coverage(self) -> float:
        """The share of different rows looked up that were hot; what is left was pulled."""
        return self.hot_read / max(1, self.hot_read + self.pulled)

    def __add__(self, other: "RowTraffic") -> "RowTraffic":
        return RowTraffic(**{name: number + getattr(other, name) for name, number in asdict(self).items()})

    def as_dict(self) -> dict[str, int]:
        """Plain numbers, ready for JSON."""
        return {**asdict(self), "sent_nbytes": self.sent_nbytes}
