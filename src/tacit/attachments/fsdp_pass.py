"""One backward pass under FSDP2: exchanges go on beside it, and what they bring is added to the gradients when it is over.

FSDP2 reads what a reduce-scatter returns at once: it casts it and adds it to the gradients of the shards. So it is given -0.0, the number
that changes nothing it is added to, and the means are added to the same gradients later: the same bits as if it had waited.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import recycled
from tacit.attachments.backward import PassWatch
from tacit.attachments.fsdp_units import Unit
from tacit.attachments.guard import BackgroundGuard
from tacit.attachments.handle import Handle
from tacit.exchange import Exchange, Reduction, RowsTalk
from tacit.layout import Layout
from tacit.requests import Conversation, Reduced

_MOST_UNDER_WAY = (
    4  # units whose whole gradients wait for the wire: what FSDP2 saves in memory is not given back
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A unit's exchange: `talk` reads `x`, and `mean` makes of its end what FSDP2 asked for."""

    unit: Unit
    part: Layout  # what the result has of the unit's parameters
    talk: Conversation | RowsTalk
    rounds: int
    seed: int
    x: Tensor
    mean: Callable[[Reduced], Tensor]


@dataclass(frozen=True, slots=True)
class _Due:
    """A result that is not in the gradients yet."""

    job: Reduction
    unit: Unit
    part: Layout
    result: Tensor

    def add(self) -> None:
        if self.result.device.type != "cpu":
            self.result.record_stream(torch.accelerator.current_stream())
        for own, new in zip(self.unit.params, self.part.split(self.result).values(), strict=True):
            grad = own.sharded_param.grad.to_local()
            grad += new.view_as(grad).to(grad.dtype)


class FsdpPass:
    """Collects what the units of one pass after another send. All methods run in the training thread."""

    def __init__(self, handle: Handle, exchange: Exchange, guard: BackgroundGuard):
        self._handle, self._exchange, self._guard = handle, exchange, guard
        self._due: list[_Due] = []
        self._numel = 0
        self._watch = PassWatch(self._finish)

    def begin(self) -> None:
        """Before anything is sent in a pass: ranks compare notes. An accelerator's answer is read one pass later."""
        if not self._watch.under_way:
            self._guard.begin()
            self._guard.end()
            self._watch.begin()

    def send(self, outgoing: Outgoing, output: Tensor, *, late: bool) -> None:
        """Starts an exchange. `late`: FSDP2 may have its result when the pass is over; otherwise it is in `output` on return."""
        result = recycled.empty_like(output)

        def finish(reduced: Reduced) -> None:
            result.copy_(outgoing.mean(reduced))

        job = self._exchange.submit(
            outgoing.talk,
            outgoing.rounds,
            finish,
            outgoing.unit.label,
            outgoing.seed,
            read=(outgoing.x, result),
        )
        self._numel += outgoing.x.numel()
        if not late or not outgoing.unit.lands_late():
            self._exchange.wait([job])
            output.copy_(result)
            return
        output.fill_(-0.0)
        self._due.append(_Due(job, outgoing.unit, outgoing.part, result))
        if len(self._due) > _MOST_UNDER_WAY:
            self._exchange.wait([self._due[-1 - _MOST_UNDER_WAY].job])

    def _finish(self) -> None:
        """When autograd has computed everything, and FSDP2 has asked for the last exchange."""
        numel, due = self._numel, self._due
        self._numel, self._due = 0, []
        self._exchange.wait(one.job for one in due)
        with torch.no_grad():
            for one in due:
                one.add()
        self._handle.stepped(numel)
