"""The merge at the end: all that live get the mean of their models by steps, to the same bits, or keep their own.

    wait       a rank that waits answers meetings and holds its model: peers that still train move towards it, and it does not move
    agree      all that live write their steps into the store; the lowest of them writes who takes part, and each one's weight
    bring      each takes the others' models, and adds them up in the same order
    all have   only when everybody has everything does anybody take the mean; if one died meanwhile, those that are left agree again

Agreement goes through the store, models through sockets. A model that is not finite, or much longer than the median, is left out, by all alike; its
rank gets the others' mean. Each writes the length of its model with its steps, and the limit is agreed with the weights.

Two rules, chosen by measurement (docs/rounds.md, "Unequal ranks"). Models count by the steps behind them: a rank that is slower and has parted from the
others is weighed down, but not left out, since it may be the only one that knows its data. And who waits holds: its training is
over, and a last rank that goes on alone would turn all models to its own data.
"""

import itertools
import json
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from statistics import median_low

import torch
from torch import Tensor

from tacit.errors import TransportError
from tacit.gossip.frames import PeerError
from tacit.gossip.meeting import merge_weights
from tacit.gossip.members import Members
from tacit.gossip.peers import Peers, Shown
from tacit.gossip.replica import Replica
from tacit.gossip.store_client import StoreError
from tacit.gossip.untrained import Mean

MERGE_S = 1800.0  # for the models to travel, once all that live have called it: as long as torch's own collectives wait
STORE_S = 120.0  # without the store
WARNS_S = 60.0  # then it warns for whom it waits; and again after 4 times as long, and so on
RETURN_S = 30.0  # for a rank that died to be started again, since it was last seen: it takes the model of one that waits
LITTLE = 0.5  # of the largest weight: who counts for less is named


def merge(replica: Replica, peers: Peers, members: Members, rank: int) -> dict[int, float]:
    """The training thread's. Returns the share of every rank's model in the mean (0: left out).

    Raises TransportError where it does not come about; this rank's model is its own then.
    """
    key = f"merge/{replica.merges + 1}"
    merging = _Merge(replica, peers, members, rank)
    try:
        replica.gather_in()
        replica.holds = True
        chosen = merging.agree(f"{key}/1")  # meanwhile it answers
        peers.settle()
        with peers.apart():
            replica.gather_in()
            replica.offered = replica.snapshot
            model, buffers = merging.mean(key, chosen).of_all()
            replica.start = model
            replica.set(model)
            replica.untrained.take(buffers)
        return merging.shares()
    finally:
        replica.offered, replica.holds = None, False
        replica.merges += 1


class _Merge:
    def __init__(self, replica: Replica, peers: Peers, members: Members, rank: int) -> None:
        self._replica, self._peers, self._members = replica, peers, members
        self._rank, self._deadline = rank, math.inf
        self._missing: list[int] = []  # that live, or died just now, and have not called it
        self._weights: dict[int, float] = {}  # as agreed
        self._most = 0.0  # the length of a model that is taken, as agreed
        self._left_out: list[int] = []

    def agree(self, key: str) -> list[int]:
        """Who takes part: all that live, once all of them are here, and those that died have had time to come back.

        A rank whose lease is renewed is waited for as long as it trains.
        """
        self._deadline = math.inf
        own = f"{self._replica.step} {_length(self._replica.snapshot)}"
        for _ in self._turns():
            with suppress(StoreError):
                self._members.set(f"{key}/{self._rank}", own)
                if (found := self._members.get(f"{key}/who")) is not None:
                    agreed = json.loads(found)
                    self._weights = {int(rank): weight for rank, weight in agreed["weights"].items()}
                    self._most, self._missing = agreed["most"], []
                    return list(self._weights)
                live = sorted([*self._members.look(), self._rank])
                ready = {rank: self._members.get(f"{key}/{rank}") for rank in live}
                self._missing = [rank for rank, text in ready.items() if text is None]
                self._missing += self._members.lost(RETURN_S)
                if live[0] == self._rank and not self._missing and not self._members.store_lost:
                    steps, lengths = zip(*(text.split() for text in ready.values() if text), strict=True)
                    weights = dict(zip(live, merge_weights([int(step) for step in steps]), strict=True))
                    most = self._peers.most_move * _median(float(length) for length in lengths)
                    self._members.claim(f"{key}/who", json.dumps({"weights": weights, "most": most}))
        raise TransportError("the models cannot be merged: torch's store is gone")

    def mean(self, key: str, chosen: list[int]) -> Mean:
        for attempt in itertools.count(1):
            if self._rank not in chosen:
                break
            self._deadline = time.monotonic() + MERGE_S
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
        mean, self._left_out, whole = Mean(), [], sum(self._weights.values())
        for rank in chosen:
            shown = self._own() if rank == self._rank else self._offer_of(rank)
            if shown is None or shown.model is None:
                return None
            length = _length(shown.model)
            if not length <= self._most or not mean.add(
                shown.model, shown.buffers, self._weights[rank] / whole
            ):
                self._left_out.append(rank)
                finite = bool(shown.model.isfinite().all())
                why = f"is too long ({length:.3g}, of {self._most:.3g})" if finite else "is not finite"
                warnings.warn(f"the model of rank {rank} {why}: the merge leaves it out", stacklevel=2)
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
        untrained = self._replica.untrained
        return Shown(
            self._replica.offered, untrained.decode(untrained.encode()), {"step": self._replica.step}
        )

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
                reports = {r: self._members.get(f"{key}/{r}") for r in chosen if r == self._rank or r in live}
                if "failed" in reports.values():
                    return False
                if set(reports.values()) == {"done"}:
                    return True
        raise TransportError(
            f"rank {self._rank} did not receive the models of all that merge in time; its model stays its own"
        )

    def _turns(self) -> Iterator[None]:
        """Polls until the deadline, or until the store has been away for too long; warns now and then that it waits."""
        answered = began = time.monotonic()
        warns_after_s = WARNS_S
        while (now := time.monotonic()) < min(self._deadline, answered + STORE_S):
            yield
            answered = answered if self._members.store_lost else now
            if now - began > warns_after_s:
                warns_after_s *= 4
                whom = f"ranks {self._missing} to merge; all that live must call merge()"
                whom = whom if self._missing else "the others' models"
                warnings.warn(f"rank {self._rank} has waited {now - began:.0f} s for {whom}", stacklevel=2)
            time.sleep(0.02)


def _length(model: Tensor) -> float:
    """Not finite where the model is not, or where its square has no float32."""
    return float(torch.linalg.vector_norm(model))


def _median(lengths: Iterable[float]) -> float:
    """Of those that are finite, the lower of two: one of two models that is too long must not be its own measure."""
    finite = [length for length in lengths if math.isfinite(length)]
    return median_low(finite) if finite else 0.0
