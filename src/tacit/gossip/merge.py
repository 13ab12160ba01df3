"""The merge at the end: all that live get the mean of their models by steps, to the same bits, or keep their own.

    wait       a rank that waits answers meetings and holds its model: peers that still train move towards it, and it does not move
    agree      all that live write their steps into the store; the lowest of them writes who takes part, and each one's weight
    bring      each takes the others' models, and adds them up in the same order
    all have   only when everybody has everything does anybody take the mean; if one died meanwhile, those that are left agree again

The store carries the words, sockets the models. A model that is not finite is left out, by all alike; its rank gets the others' mean.

Two rules, chosen by measurement (docs/rounds.md, "Unequal ranks"). Models count by the steps behind them: a rank that is slower and has parted from the
others is weighed down, but not left out, since it may be the only one that knows its data. And who waits holds: its training is
over, and a last rank that goes on alone would turn all models to its own data.
"""

import itertools
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

from tacit.errors import TransportError
from tacit.gossip.frames import PeerError
from tacit.gossip.island import Island
from tacit.gossip.line import StoreError
from tacit.gossip.meeting import merge_weights
from tacit.gossip.members import Members
from tacit.gossip.peers import Peers, Shown
from tacit.gossip.rest import Mean

MERGE_S = 1800.0  # for all that live to call it, and their models to travel: as long as torch's own collectives wait
STORE_S = 120.0  # without the store
SAYS_S = 60.0  # then it says for whom it waits
RETURN_S = 30.0  # for a rank that died to be started again, since it was last seen: it takes the model of one that waits
LITTLE = 0.5  # of the largest weight: who counts for less is named


def merge(island: Island, peers: Peers, members: Members, rank: int) -> dict[int, float]:
    """The training thread's. Returns the share of every rank's model in the mean (0: left out).

    Raises TransportError where it does not come about; this rank's model is its own then.
    """
    deadline, key = time.monotonic() + MERGE_S, f"merge/{island.merges + 1}"
    merging = _Merge(island, peers, members, rank, deadline)
    try:
        island.gather_in()
        island.holds = True
        chosen = merging.agree(f"{key}/1")  # meanwhile it answers
        peers.settle()
        with peers.apart():
            island.gather_in()
            island.offered = island.snapshot
            model, buffers = merging.mean(key, chosen).of_all()
            island.start = model
            island.set(model)
            island.rest.take(buffers)
        return merging.shares()
    finally:
        island.offered, island.holds = None, False
        island.merges += 1


class _Merge:
    def __init__(self, island: Island, peers: Peers, members: Members, rank: int, deadline: float) -> None:
        self._island, self._peers, self._members = island, peers, members
        self._rank, self._deadline = rank, deadline
        self._missing: list[int] = []  # that live, or died just now, and have not called it
        self._weights: dict[int, float] = {}  # as agreed
        self._left_out: list[int] = []

    def agree(self, key: str) -> list[int]:
        """Who takes part: all that live, once all of them are here, and those that died have had time to come back."""
        for _ in self._turns():
            with suppress(StoreError):
                self._members.set(f"{key}/{self._rank}", f"{self._island.step}")
                if (found := self._members.get(f"{key}/who")) is not None:
                    self._weights = {int(rank): weight for rank, weight in json.loads(found).items()}
                    return list(self._weights)
                live = sorted([*self._members.look(), self._rank])
                steps = {rank: self._members.get(f"{key}/{rank}") for rank in live}
                self._missing = [rank for rank, step in steps.items() if step is None]
                self._missing += self._members.lost(RETURN_S)
                if live[0] == self._rank and not self._missing and not self._members.store_lost:
                    weights = merge_weights([int(step or 0) for step in steps.values()])
                    self._members.claim(f"{key}/who", json.dumps(dict(zip(live, weights, strict=True))))
        if self._members.store_lost:
            raise TransportError("the models cannot be merged: torch's store is gone")
        raise TransportError(
            f"rank {self._rank} waited {MERGE_S:g} s for ranks {self._missing} to merge; all that live must call merge()"
        )

    def mean(self, key: str, chosen: list[int]) -> Mean:
        for attempt in itertools.count(1):
            if self._rank not in chosen:
                break
            brought = self._brought(chosen)
            if self._all_have(f"{key}/{attempt}", chosen, brought is not None):
                assert brought is not None
                if not brought.weight:
                    raise TransportError("no rank has a model that is finite; there is nothing to merge")
                return brought
            chosen = self.agree(f"{key}/{attempt + 1}")
        raise TransportError(
            f"rank {self._rank} came too late to the merge of ranks {chosen}; its model stays its own"
        )

    def _brought(self, chosen: Sequence[int]) -> Mean | None:
        """The mean of everybody's model, or None where one of them cannot be had any more."""
        mean, self._left_out = Mean(), []
        for rank in chosen:
            shown = self._own() if rank == self._rank else self._offer_of(rank)
            if shown is None or shown.model is None:
                return None
            if not mean.add(shown.model, shown.buffers, self._weights[rank]):
                self._left_out.append(rank)
                warnings.warn(
                    f"the model of rank {rank} is not finite: the merge leaves it out", stacklevel=2
                )
        return mean

    def shares(self) -> dict[int, float]:
        """What each rank's model counts for; those that count for little are named in a warning."""
        counted = {rank: weight * (rank not in self._left_out) for rank, weight in self._weights.items()}
        most, whole = max(counted.values()), sum(counted.values())
        if few := {rank: weight for rank, weight in counted.items() if 0 < weight < LITTLE * most}:
            named = ", ".join(f"rank {r} with {weight:g}" for r, weight in few.items())
            warnings.warn(f"the merge weighs models by their steps, of {most:g}: {named}", stacklevel=2)
        return {rank: weight / whole for rank, weight in counted.items()}

    def _own(self) -> Shown:
        rest = self._island.rest
        return Shown(self._island.offered, rest.read(rest.tell()), {"step": self._island.step})

    def _offer_of(self, rank: int) -> Shown | None:
        """What `rank` brings, asked for until it is given or its lease has run out."""
        for _ in self._turns():
            if (address := self._members.look().get(rank)) is None:
                return None
            with suppress(PeerError):
                shown = self._peers.fetch(address, "merge", self._deadline)
                if shown.model is not None:
                    return shown
        return None

    def _all_have(self, key: str, chosen: Sequence[int], have: bool) -> bool:
        """Whether all that still live have all models; one that has not makes all of them agree again."""
        for _ in self._turns():
            with suppress(StoreError):
                self._members.set(f"{key}/{self._rank}", "done" if have else "failed")
                live = self._members.look()
                said = {r: self._members.get(f"{key}/{r}") for r in chosen if r == self._rank or r in live}
                if "failed" in said.values():
                    return False
                if set(said.values()) == {"done"}:
                    return True
        raise TransportError(
            f"rank {self._rank} did not hear from all that merge in time; its model stays its own"
        )

    def _turns(self) -> Iterator[None]:
        """Polls until the deadline, or until the store has been away for too long; says once that it waits."""
        heard = began = time.monotonic()
        said = False
        while (now := time.monotonic()) < min(self._deadline, heard + STORE_S):
            yield
            heard = heard if self._members.store_lost else now
            if now - began > SAYS_S and not said:
                said = True
                whom = f"ranks {self._missing}" if self._missing else "the others' models"
                warnings.warn(f"rank {self._rank} waits for {whom} to merge", stacklevel=2)
            time.sleep(0.02)
