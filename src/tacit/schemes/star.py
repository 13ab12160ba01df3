"""Star: an aggregator in the network adds for all. What SwitchML, ATP and THC do, on any Linux machine.

    tacit aggregate --listen 0.0.0.0:4800                      # there
    every / thc / star(at='10.0.0.1:4800')                     # here; or `star`, with TACIT_AGGREGATOR set

    every rank sends its payload to the aggregator, chunk by chunk;  it adds integers;  every rank receives the sum.

Bytes that leave a rank: its payload once, whatever the world. What the aggregator adds:

- TableSum: 4-bit indices, looked up and added there; other widths as lanes. Bit-equal to `sharded`.
- Sum of integers: 32-bit lanes.
- Sum of floats: fixed point in 32-bit lanes. The exponent follows from the largest number of all ranks, which they agree on
  first; what rounding takes from a rank's payload goes to its memory (`lost`).

**Bounded loss.** `star(loss=0.01)` does not wait for what is lost or late: a chunk is closed without ranks whose packets are missing, and all
ranks get what was closed. Floats are then added as floats, in order of arrival, so no exponent need be agreed; schemes/presence.py reports who
is in, and what becomes of the rest; aggregator/lossy.py, when a chunk is closed. Never on unless `loss` is given.

Ranks with the same address have the same aggregator; where addresses differ (a rack each), those aggregators must have one above them.

Small sums that every rank waits for, maxima and gathers take the process group: they cost latency, not bandwidth. While the
aggregator is gone, so does everything else: see transports/aggregator_link.py. It survives whatever `sharded` survives, with the same bits; only at the
very first join is a wrong secret or host name an error, since only the user can correct it.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import ClassVar

import torch
from torch import Tensor

from tacit import environment
from tacit.aggregator.addresses import PORT, parse_address
from tacit.aggregator.lossy import MOST_DEADLINE_MS
from tacit.aggregator.spec import NO_TABLE, Address
from tacit.aggregator.wire import MOST_RANKS, LaneType
from tacit.errors import ConfigError, PairingError
from tacit.requests import Codec, Dense, Payload, Sum, TableSum, Total
from tacit.schemes import presence
from tacit.schemes.scheme import Scheme, max_over_ranks
from tacit.schemes.sharded import Sharded
from tacit.stats import Losses
from tacit.transports import Wire
from tacit.transports.aggregator_link import AggregatorLink, SumRequest
from tacit.transports.lanes import sum_lanes

_MOST_SLOTS = 1 << 14
_MOST_IN_A_TREE = 255  # a result has its count in 8 bits
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_BY_BITS = {8: LaneType.U8, 16: LaneType.U16, 32: LaneType.I32}
_INDEXED = {8: LaneType.TABLE_U8, 16: LaneType.TABLE_U16}
_DEADLINE_MS = 20
_WAY_OUT = "write star(at='host:port'), or set TACIT_AGGREGATOR"


@dataclass(frozen=True, slots=True)
class Star(Scheme):
    """`at` is the aggregator's control, host:port; `secret` its key. Left out, the environment has both when it is attached.

    `patience` is how many seconds a sum may wait for a rank before a warning names it. `mtu` is what the path to the
    aggregator takes in one piece, which is tested when ranks join; `slots` the packets on their way at a time, less if the aggregator has not so many to give.
    """

    at: str = ""
    _: KW_ONLY
    secret: str = field(default="", repr=False, compare=False)  # shown nowhere, by no error
    patience: float = 10.0
    mtu: int = 1500
    slots: int = 64
    loss: float = 0.0
    deadline_ms: int = _DEADLINE_MS
    forgets: bool = False

    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.secret, str):
            raise ConfigError("secret= is a text: put it between quotes")
        if not isinstance(self.at, str):
            raise ConfigError(f"at={self.at}: the aggregator's address is a text; {_WAY_OUT}")
        if self.at:
            parse_address(self.at, port=PORT)
        if not isinstance(self.patience, int | float) or not self.patience > 0:
            raise ConfigError(f"patience={self.patience}: seconds before a late rank is named, more than 0")
        if not isinstance(self.mtu, int) or LaneType.I32.elements(self.mtu) < 8:
            raise ConfigError(f"mtu={self.mtu}: bytes that the path takes in one piece, 1500 on most")
        if not isinstance(self.slots, int) or not 2 <= self.slots <= _MOST_SLOTS:
            raise ConfigError(f"slots={self.slots}: 2 to {_MOST_SLOTS} packets on their way at a time")
        self._check_loss()

    def _check_loss(self) -> None:
        if isinstance(self.loss, bool) or not isinstance(self.loss, int | float) or not 0 <= self.loss < 1:
            raise ConfigError(
                f"loss={self.loss}: the share of what ranks send that sums may lack before a warning, 0.01 for 1 %; 0 for none"
            )
        if type(self.deadline_ms) is not int or not 1 <= self.deadline_ms <= MOST_DEADLINE_MS:
            raise ConfigError(
                f"deadline_ms={self.deadline_ms}: 1 to {MOST_DEADLINE_MS} milliseconds that ranks wait for a late one"
            )
        if not isinstance(self.forgets, bool):
            raise ConfigError(f"forgets={self.forgets}: True or False")
        if not self.loss and (self.forgets or self.deadline_ms != _DEADLINE_MS):
            raise ConfigError("deadline_ms= and forgets= are for star(loss=...), which is left out")

    def __str__(self) -> str:
        defaults = {"at": "", "patience": 10.0, "mtu": 1500, "slots": 64}
        defaults |= {"loss": 0.0, "deadline_ms": _DEADLINE_MS, "forgets": False}
        said = [
            f"{name}={getattr(self, name)!r}"
            for name, usual in defaults.items()
            if getattr(self, name) != usual
        ]
        return f"star({', '.join(said)})" if said else "star"

    def check(self, codec: Codec, world: int | None) -> None:
        if not codec.traits.summable:
            raise PairingError(f"{codec} payloads cannot be added in the network; write '{codec} / sharded'")
        if self.loss:
            self._check_lossy(codec, world)
        if world is not None and world > _MOST_IN_A_TREE:
            raise PairingError(
                f"world {world}: aggregators add for at most {_MOST_IN_A_TREE} ranks, {MOST_RANKS} each; "
                f"write '{codec} / sharded'"
            )

    def _check_lossy(self, codec: Codec, world: int | None) -> None:
        if codec.traits.lanes is not None or codec.traits.rounds != 1:
            raise PairingError(
                f"{codec} with loss={self.loss}: a sum of integers in a common scale cannot be scaled up where ranks are missing, and maxima "
                f"wait for all; write 'ef(bf16)' or 'ef(randomk(0.1))', or leave loss= out"
            )
        if not codec.traits.remembers and not self.forgets:
            raise PairingError(
                f"{codec} with loss={self.loss} keeps nothing of what is left out of a sum; write 'ef({codec})', or star(..., forgets=True) to "
                f"let it go"
            )
        if world is not None and world > MOST_RANKS:
            raise PairingError(
                f"world {world} with loss={self.loss}: one aggregator adds for at most {MOST_RANKS} ranks; leave loss= out"
            )

    def prepare(self) -> None:
        self._control()

    def _control(self) -> Address:
        at = self.at or environment.aggregator_address()
        if not at:
            raise ConfigError(f"star does not say where the aggregator is; {_WAY_OUT}")
        return parse_address(at, port=PORT)

    def open(self, wire: Wire, timeout: timedelta | None) -> "OpenStar":
        """No message goes to the aggregator yet: the first sum of each kind joins a job there."""
        link = AggregatorLink(
            wire,
            self._control(),
            self.secret or environment.aggregator_secret(),
            patience_s=self.patience,
            mtu=self.mtu,
            slots=self.slots,
            timeout=timeout,
            deadline_ms=self.deadline_ms if self.loss else 0,
        )
        wire.lost_ranks = link.lost
        if not self.loss:
            return OpenStar(link)
        return LossyStar(link, LaneType.F32.elements(self.mtu), Losses(self.loss, wire.world, wire.rank))

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        raise _unopened()

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        raise _unopened()


@dataclass(frozen=True, slots=True)
class OpenStar(Scheme):
    """A rank's end, once it has a link to the aggregator."""

    link: AggregatorLink

    def check(self, codec: Codec, world: int | None) -> None:
        """Done by `Star`."""

    def on_lost(self, fail: Callable[[BaseException], None]) -> None:
        self.link.on_lost = fail

    def close(self) -> None:
        self.link.close()

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload = request.payload
        assert isinstance(payload.format, Dense), "a summable payload is plain numbers"
        if request.small or not payload.numel or payload.format.dtype == torch.float64:
            return Sharded().sum(wire, request, seed)
        if payload.format.dtype in _INTEGERS:
            total = self._add(wire, payload.data.int())
            return Total(total.float(), wire.world)
        x = payload.unpack().reshape(-1)
        largest = float(max_over_ranks(wire, x.abs().amax().reshape(1)))
        if largest == 0.0 or math.isinf(largest):  # nothing to scale by; all ranks see it alike
            return Sharded().sum(wire, request, seed)
        shift = _shift_for(largest, wire.world)
        fixed = _scaled(x, shift).round_().int()
        lost = x - _scaled(fixed.float(), -shift)
        return Total(_scaled(self._add(wire, fixed).float(), -shift), wire.world, (0, payload.numel, lost))

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        if not request.numel:
            return Sharded().table_sum(wire, request)
        bits = request.lanes.bits
        if request.bits == 4 and bits in _INDEXED:
            lanes, data = _INDEXED[bits], request.index[: -(-request.numel // 2)]
            table = (request.table + NO_TABLE)[:16]
        else:
            lanes, data, table = _BY_BITS[bits], request.look_up().view(torch.uint8), NO_TABLE
        asked = SumRequest(
            lanes, table, data, request.numel, lambda: Sharded().table_sum(wire, request).value
        )
        return Total(self.link.sum(asked).view(request.lanes.dtype), wire.world)

    def _add(self, wire: Wire, own: Tensor) -> Tensor:
        """The sum of every rank's 32-bit integers."""
        return sum_lanes(wire, self.link, own)


@dataclass(frozen=True, slots=True)
class LossyStar(OpenStar):
    """The same with `loss`: sums of floats may lack ranks."""

    elements: int  # of a packet
    found: Losses

    @property
    def losses(self) -> Losses:
        return self.found

    @property
    def ahead(self) -> int:
        return self.link.ahead

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload = request.payload
        assert isinstance(payload.format, Dense), "a summable payload is plain numbers"
        if request.small or payload.format.dtype not in _FLOATS:
            return Sharded().sum(wire, request, seed)
        x = payload.unpack().reshape(-1)
        own = presence.framed(x, self.elements, wire.rank).view(-1)

        def over_the_group() -> Tensor:
            return Sharded().sum(wire, Sum(Payload.dense(own)), seed).value

        asked = SumRequest(LaneType.F32, NO_TABLE, own.view(torch.uint8), own.numel(), over_the_group)
        total = self.link.sum(asked).view(-1, self.elements)
        found = presence.read(total, x, wire.world, wire.rank)
        missing = ~found.present
        self.found.add(missing.sum(0).tolist(), len(missing), int(missing.any(1).sum()))
        lost = None if found.lost is None else (0, payload.numel, found.lost)
        return Total(found.value, wire.world, lost)


def _unopened() -> ConfigError:
    return ConfigError("this process group has no way to an aggregator; attach the model with the strategy")


def _shift_for(largest: float, world: int) -> int:
    """The power of two that makes the most of 32 bits: the sum of all ranks stays below 2^30, and so does its rounding."""
    return 30 - math.frexp(largest * world)[1]


def _scaled(x: Tensor, shift: int) -> Tensor:
    """x 2^shift, in two steps: where all numbers are tiny, one factor alone would not be a float."""
    half = shift // 2
    return x * 2.0**half * 2.0 ** (shift - half)
