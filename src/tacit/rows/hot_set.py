"""Which rows are hot, agreed by all owners of shards without anybody seeing all counts. Pure numpy; START HERE: `HotSet.agree`.

Every so many steps (50 are enough) the owners agree in three collectives, whatever the number of rows:

1. Each makes a histogram of its rows' counts in 64 steps, each sqrt(2) times the one before. Their sum shows all of them how many rows
   are touched how often; they compute the same H by the cost rule, and the count of the H-th row lies in one step.
2. A second histogram divides that step into 64: the threshold, the count of the H-th row to within 0.6 %.
3. Each announces which of its rows could enter (the threshold or more) and which leave (below 0.8 x). All compute the same list: what
   room there is below H goes to the hottest; beyond it a row enters only with 1.25 x the threshold or more, in the place of a hot
   row below the threshold. That is the hysteresis: between 0.8 x and 1.25 x a row mostly stays what it is.

Measured over 5 M rows, H = 32,768, batches of 106,496 look-ups, half-life 1 M touches, s = 0.7 / 0.9 / 1.05 / 1.2: after 1 M look-ups exact
counts cover .189 / .485 / .749 / .909 of look-ups, a sketch .172 / .475 / .747 / .910, the best rows .215 / .505 / .767 / .926. Agreed on after
every batch, hysteresis changes 4.2 x fewer rows at s = 0.7, 4.9 x at 1.05 and 3.3 x at 1.2; after every fifth 2.5 to 3 x.

The cost rule: with q = count / steps of ranks and U = 1 - (1 - q)^W for a row, the H hottest rows make a rank's link and a server's busy for

    lanes   sum of U b_hot + H touch        pull, push    Q_c b_cold on a rank's link, r times that on a server's        Q_c: what cold rows have of q

bytes. Lanes run beside the push and the next pull (decision 23), so a step takes as long as the busier link. H is the one with the shortest
step; none, if that gains less than `pays_from`. Once rows are hot, half of that is enough to keep them, so that a gain near the limit does
not empty and fill the list again and again.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ConfigError
from tacit.rows.hot_counts import Floats, Ints, RowCounts

STEPS = 64
HOT_ROWS = 32_768
PAYS_FROM = 1.1  # as tacit.sim.rows has it


@dataclass(frozen=True, slots=True)
class HotCost:
    """What a row costs, hot and cold, in bytes on the wire."""

    world: int  # W
    ratio: float  # r = max(1, W/S): how much busier a server's link is than a rank's
    hot_nbytes: float  # b_hot, a row's lanes
    cold_nbytes: float  # b_cold, a key and a row; times 1 - 1/W where shards are on the ranks
    touch_nbytes: float = 0.5

    def step_nbytes(self, hot: Floats, unique: Floats, union: Floats, total: float) -> Floats:
        """Of the busiest link, where `hot` rows have `unique` of all `total` unique rows of a rank, and `union` of the union."""
        cold = np.maximum(total - unique, 0) * self.cold_nbytes
        lanes = union * self.hot_nbytes + hot * self.touch_nbytes
        return np.maximum(2 * self.ratio * cold, lanes + 2 * cold)


@dataclass(frozen=True, slots=True)
class HotRule:
    """When a row is hot."""

    most: int = HOT_ROWS  # rows, on every rank
    enter: float = 1.25  # times the count of the H-th row
    leave: float = 0.8
    pays_from: float = (
        PAYS_FROM  # a smaller gain is not worth a hot set; 0 takes the best H whatever it gains
    )

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ConfigError(f"most={self.most}: give 0 hot rows or more")
        if not 0 < self.leave <= 1 <= self.enter < inf:
            raise ConfigError(
                f"enter={self.enter}, leave={self.leave}: a row enters at 1 or more times the threshold and leaves at 1 or less, above 0"
            )


@dataclass(frozen=True, slots=True)
class CountSteps:
    """64 steps of counts: step k is [least ratio^k, least ratio^(k+1)), and the last one has no end."""

    least: float = 1.0  # a row that was touched once is no more likely to be touched again than many others
    ratio: float = 2**0.5

    def histogram(self, counts: Floats) -> Ints:
        found = counts[counts >= self.least]
        return np.bincount(np.clip(self._places(found), 0, STEPS - 1), minlength=STEPS)

    def edge(self, step: int) -> float:
        """The least count of a step."""
        return float(self.least * self.ratio**step)

    def inside(self, step: int) -> "CountSteps":
        """The step divided into 64."""
        return CountSteps(self.edge(step), self.ratio ** (1 / STEPS))

    def middles(self) -> Floats:
        return np.asarray(self.least * self.ratio ** (np.arange(STEPS) + 0.5), np.float64)

    def _places(self, counts: Floats) -> Ints:
        edges = self.least * self.ratio ** np.arange(STEPS)
        return np.searchsorted(edges, counts, side="right").astype(np.int64) - 1


@dataclass(frozen=True, slots=True)
class HotDecision:
    """What all owners computed alike: how many rows should be hot, and in which step the count of the last of them lies."""

    hot: int
    gain: float  # of a step's bytes without hot rows over those with them
    step: int | None = None  # of CountSteps(); None where no row is hot
    above: int = 0  # rows in higher steps


def decide(
    histogram: Ints, total: float, rank_steps: float, cost: HotCost, rule: HotRule, size: int = 0
) -> HotDecision:
    """H by the cost rule, from the histogram and the total of the counts of all owners, and the steps of ranks they are of; `size` rows are hot now."""
    rows = histogram[::-1].astype(np.float64)  # from the hottest on
    if not rank_steps > 0 or not rows.any():
        return HotDecision(0, 1.0)
    q = np.minimum(CountSteps().middles()[::-1] / rank_steps, 1.0)
    hotter = np.concatenate(([0.0], np.cumsum(rows)[:-1]))
    room = np.clip(rule.most - hotter, 0, rows)  # the part of each step that may be hot
    hot, unique, union = (
        np.concatenate(([0.0], np.cumsum(room * of_row))) for of_row in (1.0, q, 1 - (1 - q) ** cost.world)
    )
    nbytes = cost.step_nbytes(hot, unique, union, total / rank_steps)
    best = int(np.argmin(nbytes))
    gain = float(nbytes[0] / nbytes[best]) if nbytes[best] else 1.0
    needed = (1 + rule.pays_from) / 2 if size else rule.pays_from
    if best == 0 or gain < needed:
        return HotDecision(0, gain)
    last = int(np.flatnonzero(room[:best])[-1])  # places without rows change nothing
    return HotDecision(round(hot[best]), gain, STEPS - 1 - last, round(hot[last]))


def threshold(decision: HotDecision, inner: Ints) -> float:
    """The least count of the decision's hot rows, from the histogram inside its step; inf where no row is hot."""
    if decision.step is None:
        return inf
    reached = decision.above + np.cumsum(inner[::-1]) >= decision.hot
    last = int(np.argmax(reached)) if reached.any() else STEPS - 1
    return CountSteps().inside(decision.step).edge(STEPS - 1 - last)


@dataclass(frozen=True, slots=True, eq=False)
class Announced:
    """What one owner would change, as keys and counts: rows that may enter, that leave, and that make way for hotter ones (`weak`)."""

    enter: Ints
    enter_counts: Floats
    weak: Ints
    weak_counts: Floats
    leave: Ints


@dataclass(frozen=True, slots=True, eq=False)
class HotChange:
    """What all owners agreed on: the keys that enter and leave, owner by owner, and why."""

    enter: Ints
    leave: Ints
    size: int  # hot rows from now on
    decision: HotDecision
    threshold: float


@dataclass(frozen=True, slots=True, eq=False)
class SumOver:
    """A request for the sum over owners."""

    values: Floats


@dataclass(frozen=True, slots=True, eq=False)
class GatherOver:
    """A request for what every owner announces, in the order of the owners."""

    announced: Announced


Bools = NDArray[np.bool_]
Agreeing = Generator[SumOver | GatherOver, Any, HotChange]


@dataclass(eq=False)
class HotSet:
    """One owner's part of the hot set: which of its slots are hot. It reads `counts`, which the owner adds to."""

    counts: RowCounts
    cost: HotCost
    rule: HotRule = field(default_factory=HotRule)
    owner: int = 0
    keys_of: Callable[[Ints], Ints] = field(default=lambda slots: slots)  # what all ranks call these slots
    owns: bool = True  # False: a rank beside row servers, which computes what they decide and has no row
    slots: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # hot ones of this owner, ascending
    size: int = 0  # hot rows of all owners

    def agree(self) -> Agreeing:
        """A conversation with the other owners: it yields three requests, receives three answers, and returns the change."""
        slots, counts = self.counts.candidates(CountSteps().least)
        facts = [self.counts.total, self.counts.rank_steps, 1.0] if self.owns else [0.0, 0.0, 0.0]
        summed: Floats = yield SumOver(np.concatenate((CountSteps().histogram(counts), facts)))
        total, rank_steps, owners = (float(fact) for fact in summed[STEPS:])
        decision = decide(_whole(summed[:STEPS]), total, rank_steps / owners, self.cost, self.rule, self.size)
        inner: Floats = yield SumOver(self._inside(decision, counts).astype(np.float64))
        limit = threshold(decision, _whole(inner))
        proposed = self._proposed(slots, counts, limit)
        every: Sequence[Announced] = yield GatherOver(proposed.announced(self.keys_of))
        entering, leaving = settle(every, self.size, decision.hot, self.rule.enter * limit)
        if self.owns:
            self._apply(proposed, entering[self.owner], leaving[self.owner])
        enter = np.concatenate([each.enter[kept] for each, kept in zip(every, entering, strict=True)])
        gone = [
            np.concatenate((each.leave, each.weak[out])) for each, out in zip(every, leaving, strict=True)
        ]
        leave = np.concatenate(gone)
        self.size += len(enter) - len(leave)
        return HotChange(enter, leave, self.size, decision, limit)

    def _inside(self, decision: HotDecision, counts: Floats) -> Ints:
        if decision.step is None:
            return np.zeros(STEPS, np.int64)
        steps, end = CountSteps(), inf if decision.step == STEPS - 1 else CountSteps().edge(decision.step + 1)
        within = (counts >= steps.edge(decision.step)) & (counts < end)
        return steps.inside(decision.step).histogram(counts[within])

    def _proposed(self, slots: Ints, counts: Floats, limit: float) -> "_Proposed":
        held = self.counts.of(self.slots)
        stays = held >= self.rule.leave * limit
        weak = stays & (held < limit)
        enters = (counts >= limit) & ~np.isin(slots, self.slots, assume_unique=True)
        return _Proposed(slots[enters], counts[enters], self.slots[weak], held[weak], self.slots[~stays])

    def _apply(self, proposed: "_Proposed", entering: Bools, making_way: Bools) -> None:
        gone = np.concatenate((proposed.leave, proposed.weak[making_way]))
        stay = self.slots[~np.isin(self.slots, gone, assume_unique=True)]
        self.slots = np.sort(np.concatenate((stay, proposed.enter[entering])))


class _Proposed(NamedTuple):
    """What an owner would change, by its own slots; in the order of `Announced`."""

    enter: Ints
    enter_counts: Floats
    weak: Ints
    weak_counts: Floats
    leave: Ints

    def announced(self, keys_of: Callable[[Ints], Ints]) -> Announced:
        enter, weak, leave = (keys_of(slots) for slots in (self.enter, self.weak, self.leave))
        return Announced(enter, self.enter_counts, weak, self.weak_counts, leave)


def settle(every: Sequence[Announced], size: int, hot: int, strong: float) -> tuple[list[Bools], list[Bools]]:
    """For each owner which of its rows enter and which weak ones make way, so that `size` hot rows become no more than `hot`.

    Only rows with a count of `strong` or more take a weak one's place.
    """
    counts = np.concatenate([each.enter_counts for each in every])
    weak = np.concatenate([each.weak_counts for each in every])
    room = max(hot - (size - sum(len(each.leave) for each in every)), 0)
    ways = min(max(int((counts >= strong).sum()) - room, 0), len(weak))
    enters, makes_way = np.zeros(len(counts), np.bool_), np.zeros(len(weak), np.bool_)
    enters[np.lexsort((np.concatenate([each.enter for each in every]), -counts))[: room + ways]] = True
    makes_way[np.lexsort((np.concatenate([each.weak for each in every]), weak))[:ways]] = True
    lengths = [len(each.enter) for each in every], [len(each.weak) for each in every]
    return _split(enters, lengths[0]), _split(makes_way, lengths[1])


def agree_in_one_process(owners: Sequence[HotSet]) -> HotChange:
    """One agreement of all owners, each driven in turn: what tests and simulations use instead of collectives."""
    talks = [owner.agree() for owner in owners]
    requests: list[Any] = [next(talk) for talk in talks]
    while True:
        if isinstance(requests[0], SumOver):
            answer: Any = np.sum([request.values for request in requests], axis=0)
        else:
            answer = [request.announced for request in requests]
        requests, changes = [], []
        for talk in talks:
            try:
                requests.append(talk.send(answer))
            except StopIteration as end:
                changes.append(end.value)
        if changes:
            change: HotChange = changes[0]
            return change


def _split(flags: Bools, lengths: Sequence[int]) -> list[Bools]:
    return np.split(flags, np.cumsum(lengths)[:-1])


def _whole(values: Floats) -> Ints:
    """Numbers of rows, summed as floats: exact below 2^53."""
    return np.rint(values).astype(np.int64)
