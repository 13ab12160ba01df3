"""What a codec costs a rank, against a copy of the same floats: its own work, without what whoever adds does for all.

Ranks converse in one process. Timed is the first one's CPU time: each request made (encode) and the last answer taken in (decode), on one
thread. Of interleaved rounds the least counts: neighbours on a shared machine only ever add.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time

import torch
from torch import Tensor

from tacit.layout import Layout
from tacit.requests import STEADY_STEP, Codec, LocalMemory, Memory, answer_all, context_for

WORLD = 4
SIZE = 0.003  # as gradients are: thresholds are in their unit


@dataclass(frozen=True, slots=True)
class CostInCopies:
    """Times of one codec as multiples of a copy's; `copy_s` is the copy.

    Example:
        >>> CostInCopies(encode=3.0, decode=1.5, copy_s=0.0004).encode
        3.0
    """

    encode: float
    decode: float
    copy_s: float


def costs(codecs: Sequence[Codec], layout: Layout, rounds: int = 8) -> list[CostInCopies]:
    """A CostInCopies for each codec, all in turn on the same normal vectors, of the size of gradients."""
    rng = torch.Generator().manual_seed(0)
    inputs = [SIZE * torch.randn(layout.numel, generator=rng) for _ in range(WORLD)]
    memories = [[LocalMemory(x, given=layout) for x in inputs] for _ in codecs]
    found: list[list[tuple[float, float]]] = [[] for _ in codecs]
    copies, into = list[float](), torch.empty(layout.numel)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(rounds):
            for codec, memory, times in zip(codecs, memories, found, strict=True):
                for _ in range(3):
                    began = thread_time()
                    into.copy_(inputs[0])
                    copies.append(thread_time() - began)
                times.append(_turn(codec, inputs, memory, step))
    finally:
        torch.set_num_threads(threads)
    copy_s = min(copies)
    least = [[min(column) / copy_s for column in zip(*times, strict=True)] for times in found]
    return [CostInCopies(encode, decode, copy_s) for encode, decode in least]


def _turn(
    codec: Codec, inputs: Sequence[Tensor], memories: Sequence[Memory], step: int
) -> tuple[float, float]:
    """Seconds that rank 0 takes to encode and to decode."""
    contexts = [
        context_for(memory, seed=0, step=STEADY_STEP + step, bucket="b", rank=rank, world=WORLD)
        for rank, memory in enumerate(memories)
    ]
    talks = [codec.reduce(x, context) for x, context in zip(inputs, contexts, strict=True)]
    answers, took = [None] * WORLD, list[float]()
    while True:
        began = thread_time()
        try:
            first = talks[0].send(answers[0])
        except StopIteration:
            return sum(took), thread_time() - began
        took.append(thread_time() - began)
        requests = [first, *(talk.send(own) for talk, own in zip(talks[1:], answers[1:], strict=True))]
        answers = answer_all(requests, [context.own_seed for context in contexts])
