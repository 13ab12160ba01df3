"""Allocates slots to jobs: runs of a power of two, and never so many that the next of the expected jobs finds none."""

from tacit.errors import ConfigError

LEAST = 2  # slots of a job: with one, a rank would wait for every result before it sends again


class SlotAllocator:
    """`slots` for `jobs` at a time: each may have up to `share`, and so many are always served.

    A job that wants less leaves room for more jobs. The promise holds because a run never crosses the border of a share:
    as long as fewer than `jobs` are there, they touch fewer than `jobs` shares, and one is free.
    """

    def __init__(self, slots: int, jobs: int) -> None:
        self.share = _power_of_two(slots // jobs) if jobs > 0 else 0
        if self.share < LEAST:
            raise ConfigError(
                f"{slots} slots for {jobs} jobs: each job needs at least {LEAST}; give more slots or expect fewer jobs"
            )
        self.slots = jobs * self.share
        self.taken: list[range] = []

    @property
    def free(self) -> int:
        return self.slots - sum(len(run) for run in self.taken)

    def take(self, wish: int) -> range | None:
        """The largest run up to `wish` and the share that is free; None if not even the smallest is."""
        count = _power_of_two(max(LEAST, min(wish, self.share)))
        while count >= LEAST:
            runs = [range(start, start + count) for start in range(0, self.slots, count)]
            if free := [run for run in runs if not self._meets(run)]:
                # in a share that is in use already, if there is one: whole ones stay whole
                chosen = min(free, key=lambda run: (not self._meets(self._share_of(run)), run.start))
                self.taken.append(chosen)
                return chosen
            count //= 2
        return None

    def shorten(self, run: range, count: int) -> range:
        """The first `count` of a run that was taken; the others are free again."""
        self.taken[self.taken.index(run)] = run[:count]
        return run[:count]

    def give_back(self, run: range) -> None:
        self.taken.remove(run)

    def _share_of(self, run: range) -> range:
        start = run.start - run.start % self.share
        return range(start, start + self.share)

    def _meets(self, run: range) -> bool:
        return any(run.start < other.stop and other.start < run.stop for other in self.taken)


def _power_of_two(number: int) -> int:
    """The largest that is not above `number`."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0
