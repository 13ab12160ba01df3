"""From a probe and a recorded step to a choice: the plan's advice among what `auto` may choose, and the size of buckets."""

from __future__ import annotations

from dataclasses import replace

from tacit.attachments.auto.choice import Choice, Expected
from tacit.attachments.auto.options import HALF, Auto
from tacit.plan.advising import advise, codec_of
from tacit.plan.predicting import predict
from tacit.plan.values import BucketSizes, Probe, RecordedStep
from tacit.units import time_text

BUCKETS = (1 << 20, 4 << 20, 25 << 20)
"""Sizes that are compared with the one that was asked for."""
WORTH = 0.97
"""A codec that is not as much faster than bf16, measured, is not worth its loss; nor is another size of buckets the change."""


def decide(found: Probe, step: RecordedStep, options: Auto, sizes: BucketSizes) -> Choice:
    """The advised strategy: where its interval overlaps with that of bf16 or none, the one of those."""
    predictions = predict(found, step, options.choices, buckets=sizes)
    best = advise(found, predictions, lossy=options.lossy).winner
    for nbytes in BUCKETS:
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
