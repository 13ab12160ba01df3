"""The aggregator above this one: a job here is a rank of a job there, of the same name and under the same secret."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.spec import NO_TABLE, Address
from tacit.aggregator.wire import MOST_RANKS
from tacit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parent:
    """Where its control is, and which of how many racks we are there. All jobs of a rack go up."""

    control: Address
    rack: int
    racks: int

    def __post_init__(self) -> None:
        if not 1 <= self.racks <= MOST_RANKS:
            raise ConfigError(f"racks={self.racks}: an aggregator has 1 to {MOST_RANKS} below it")
        if not 0 <= self.rack < self.racks:
            raise ConfigError(f"rack={self.rack}: {self.racks} racks have the numbers 0 to {self.racks - 1}")

    def __str__(self) -> str:
        return address_text(self.control)

    def terms(self, own: Terms) -> Terms:
        """What our ranks' terms are up there: sums, of planes."""
        return replace(own, world=self.racks, lanes=own.lanes.above, table=NO_TABLE, relayed=True)

    async def join(
        self,
        secret: str,
        own: Terms,
        plane: Address,
        ranks: int,
        *,
        timeout_s: float,
        wanted: Callable[[], bool],
        changed: Callable[[], None],
    ) -> Membership:
        """Our place in the job above, for a plane here that has `ranks` below it. TacitError if the other racks do not come."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Membership] = loop.create_future()

        def deliver(membership: Membership | None, error: BaseException | None) -> None:
            if not found.done():
                found.set_exception(error) if error else found.set_result(membership)  # type: ignore[arg-type]
            elif membership:
                threading.Thread(target=membership.leave, daemon=True).start()

        def work() -> None:
            membership, error = None, None
            try:
                membership = Membership(
                    self.control,
                    secret,
                    self.terms(own),
                    self.rack,
                    plane[1],
                    timeout_s=timeout_s,
                    own_host="" if plane[0] == "0.0.0.0" else plane[0],
                    ranks=ranks,
                    wanted=wanted,
                    changed=changed,
                )
            except BaseException as failed:
                error = failed
            try:
                loop.call_soon_threadsafe(deliver, membership, error)
            except RuntimeError:  # control has been closed meanwhile
                if membership:
                    membership.leave()

        threading.Thread(target=work, name=f"tacit rack {self.rack} joins {own.name}", daemon=True).start()
        return await found
