"""Two ranks meet, and each goes halfway to the other: the arithmetic of one exchange, without sockets.

Both hold the same reference r (what they agreed on when they last met). With any codec, in a world of two:

    sent   x = w - r,    sum    t = the sum of both
    middle m = r + t / 2,    w <- w + m - (r + own share of t),    r <- m

Shares add up to the total, so what one gains the other loses and the mean of all models stays, whatever the codec lost. What a
codec did not send stays in its rank's model, and is sent the next time. Without a codec that loses (`none`), w <- (w_i + w_j) / 2.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from torch import Tensor

from tacit.requests import Codec, Memory, Request, answer_all, as_reduced, context_for

MOST_WEIGHT = 16.0  # of a model in a merge, against the median


@dataclass(frozen=True, slots=True)
class MeetingResult:
    """The result of a meeting for one of the two: how its model moves, and the middle, the same on both sides."""

    delta: Tensor
    middle: Tensor


def meeting_side(
    codec: Codec, w: Tensor, reference: Tensor, *, side: int, memory: Memory, seed: int, number: int
) -> Generator[Request, Any, MeetingResult]:
    """One side's part of the conversation; `side` is 0 for one of them and 1 for the other. Yields requests of a world of two."""
    context = context_for(memory, seed=seed, step=number, bucket="meeting", rank=side, world=2)
    x = w.float() - reference
    reduced = as_reduced((yield from codec.reduce(x, context)))
    own = reduced.contribution() if reduced.contribution is not None else x
    half = reduced.total.float() / 2
    return MeetingResult(half - own, reference + half)


def meet(
    codec: Codec,
    left: Tensor,
    right: Tensor,
    reference: Tensor,
    memories: tuple[Memory, Memory],
    *,
    seed: int,
    number: int,
) -> tuple[MeetingResult, MeetingResult]:
    """Both sides in one process: what sockets do between two, for tests and simulations."""
    sides = [
        meeting_side(codec, w, reference, side=side, memory=memory, seed=seed, number=number)
        for side, (w, memory) in enumerate(zip((left, right), memories, strict=True))
    ]
    answers: list[Any] = [None, None]
    results: list[MeetingResult] = []
    while not results:
        requests: list[Request] = []
        for own, answer in zip(sides, answers, strict=True):
            try:
                requests.append(own.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if requests:
            answers = answer_pair(requests[0], requests[1])
    return results[0], results[1]


def difference(delta: Tensor, common: Tensor) -> float:
    """How two models differ, against how both have moved since they met: |w_i - w_j|^2 / (|w_i - r|^2 + |w_j - r|^2).

    0 if both moved alike, 1 if the moves have nothing to do with each other (noise), 2 if they are opposite. More than 1 means that
    the data differ: each goes back to where its own data are better. `delta` is what a side moves by, -(w_i - w_j) / 2, and `common` the middle
    less the reference, so both sides find the same.
    """
    apart, alike = float(delta.square().sum()), float(common.square().sum())
    return 2 * apart / (apart + alike) if 0 < apart < math.inf else 0.0


def keeps_reference(codec: Codec) -> bool:
    """Whether two that meet must remember where: an exact codec sends the whole model each time."""
    return not codec.traits.exact


def merge_weights(steps: Sequence[int]) -> list[float]:
    """How much each model counts in a merge: as much as the steps behind it. One that is five times slower has learned a fifth.

    None counts for more than MOST_WEIGHT times the median (of two, the lower): a rank whose count of steps is wrong must not be all of the
    mean.
    """
    most = MOST_WEIGHT * max(1.0, median_low(steps))
    return [min(most, max(1.0, step)) for step in steps]


def distance_apart(models: Tensor) -> float:
    """How far models (rows) are apart: root mean square distance from their mean, over its length."""
    mean = models.mean(0)
    return float(((models - mean).square().sum(1).mean() / mean.square().sum()).sqrt())


def answer_pair(first: Request, second: Request) -> list[Any]:
    """The answers to a request of each of two ranks that swap their payloads: nothing is cut, packed again or lost."""
    return answer_all([first, second], [0, 0], scheme="ideal")
