"""From a probe and a recorded step to a choice: the plan's advice among what `auto` may choose, and the size of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tacit.attachments.auto.choice import Choice, Expected
from tacit.attachments.auto.options import HALF, TRIAL, Auto
from tacit.plan.advising import advise, codec_of
from tacit.plan.predicting import predict
from tacit.plan.values import BucketSizes, Probe, RecordedStep
from tacit.units import size_text, time_text

BUCKETS = (1 << 20, 4 << 20, 25 << 20)
"""Sizes that are compared with the one that was asked for, beside DDP's own, in which gradients are reduced where they lie."""
WORTH = 0.97
"""A codec that is not as much faster than bf16, measured, is not worth its loss; nor is another size of buckets the change."""


def decide(found: Probe, step: RecordedStep, options: Auto, sizes: BucketSizes) -> Choice:
    """The advised strategy: where its interval overlaps with that of bf16 or none, the one of those."""
    predictions = predict(found, step, options.choices, buckets=sizes)
    best = advise(found, predictions, lossy=options.lossy).winner
    for nbytes in (sizes.ddp_nbytes, *BUCKETS) if sizes.ddp_nbytes > 1 else BUCKETS:
        other = predict(found, step, [best.choice], buckets=replace(sizes, nbytes=nbytes))[0]
        best = other if other.step_s < WORTH * best.step_s else best
    half = next(each for each in predictions if each.choice == HALF)
    why = f"limited by {best.limited_by}"
    if best.choice != HALF:
        why += f", bf16 would take {time_text(half.step_s)} a step"
    if codec_of(best.choice) not in ("none", "bf16"):
        error = f", error {best.nmse:.2g} (NMSE) on this model's gradients" if best.nmse is not None else ""
        why += f"; lossy{error}: auto(lossy=False) rules it out"
    expected = Expected(best.step_s, best.low_s, best.high_s, best.compute_s, best.wire_s, best.codec_s)
    return Choice(best.choice, best.buckets.nbytes, "probed", why, expected)


def contenders_for(choice: Choice, asked_nbytes: int) -> list[Choice]:
    """What is tried in steps of the training: the choice, the same in the buckets that were asked for, and in its own bf16 (of bf16: none)."""
    asked = replace(choice, bucket_nbytes=asked_nbytes)
    other = replace(choice, strategy=TRIAL if choice.strategy == HALF else HALF)
    return list(dict.fromkeys((choice, asked, other)))


def confirmed(contenders: Sequence[Choice], measured_s: Sequence[float]) -> Choice:
    """The fastest as measured; a codec only where it is worth its loss. What it took against the others is added to why, and is what is
    expected from then on, within an interval as wide as the prediction's."""
    times = list(zip(measured_s, contenders, strict=True))
    plain = min((each for each in times if each[1].strategy in (TRIAL, HALF)), key=lambda each: each[0])
    codecs = [each for each in times if each[1].strategy not in (TRIAL, HALF)]
    best = min(codecs, key=lambda each: each[0]) if codecs else plain
    best_s, best_choice = plain if codecs and best[0] > WORTH * plain[0] else best
    rest = [
        f"{codec_of(each.strategy)} in buckets of {size_text(each.bucket_nbytes)} {time_text(s)}"
        for s, each in times
        if each is not best_choice
    ]
    measured = f"measured {time_text(best_s)} a step, {', '.join(rest)}"
    first = contenders[0]
    if best_choice.strategy != first.strategy:
        why = f"{first.strategy!r} was to be faster and is not: {measured}"
        return replace(best_choice, why=why, expected=None)
    expected = best_choice.expected
    if expected is not None:
        share = best_s / expected.step_s if expected.step_s else 1.0
        expected = replace(
            expected, step_s=best_s, low_s=share * expected.low_s, high_s=share * expected.high_s
        )
    why = "; ".join(filter(None, (best_choice.why, measured)))
    return replace(best_choice, why=why, expected=expected)
