"""Who is there: every rank keeps a lease in torch's store, and reads those of the others. No server of our own.

A rank whose beat has not changed for `LEASE_S` by this rank's clock is not called. Where the store itself cannot be reached (it lives in rank
0's process, or in torchrun's agent on its host, or where TACIT_STORE says), the ranks go on with those they know; nobody can join
until it is back.

A store may outlive a run. Who finds that all of an earlier one have gone begins the next, and so do all that find the same: keys carry the
run's number.
"""

import json
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tacit.gossip.line import Line, StoreError
from tacit.gossip.peers import Address

BEAT_S = 0.5
LEASE_S = 5.0


class Members:
    """Beats for this rank, and watches the others."""

    def __init__(
        self,
        line: Line,
        rank: int,
        world: int,
        *,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
        start_s: float = 60.0,
    ) -> None:
        self._line, self._rank, self._world = line, rank, world
        self._beat_s, self._lease_s = beat_s, lease_s
        self._seen: dict[int, tuple[int, float, Address]] = {}  # beat, when it changed, where
        self._own: Address | None = None
        self._beats = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.store_lost = False
        self.run = line.ask(lambda store: int(store.add("run", 0)), start_s)
        self.life = self._lives()  # 1: the first; more: this rank was here before

    def enter(self, *, next_run: bool) -> None:
        """Looks which run this is, before `begin`; with `next_run`, begins another, unless somebody has."""
        run = self._line.ask(
            lambda store: _run_after(store, self.run) if next_run else int(store.add("run", 0))
        )
        if run != self.run:
            self.run, self._seen = run, {}
            self.life = self._lives()

    def _lives(self) -> int:
        return self._line.ask(lambda store: int(store.add(self._key(f"{self._rank}/lives"), 1)))

    def begin(self, own: Address) -> None:
        """From here on this rank can be called."""
        self._own = own
        self._look()
        with suppress(StoreError):
            self.set(f"{self._rank}/began", "yes")
        threading.Thread(target=self._run, name="tacit-gossip-members", daemon=True).start()

    @property
    def all_left(self) -> bool:
        """Whether nobody is known that may still live: all of the others have said that they go, or never came."""
        with self._lock:
            return not self._seen

    def live(self) -> Mapping[int, Address]:
        """The others whose lease has not run out, by rank."""
        now = time.monotonic()
        with self._lock:
            held = self._seen.items()
            return {r: a for r, (_, at, a) in held if self.store_lost or now - at < self._lease_s}

    def lost(self, seconds: float) -> list[int]:
        """Ranks whose lease ran out without their leaving, last renewed less than `seconds` ago: they may be starting again."""
        now = time.monotonic()
        with self._lock:
            return sorted(r for r, (_, at, _) in self._seen.items() if self._lease_s <= now - at < seconds)

    def all_began(self) -> bool:
        """Whether every rank has been here, if only for a moment."""
        keys = [self._key(f"{rank}/began") for rank in range(self._world)]
        with suppress(StoreError):
            return self._line.ask(lambda store: bool(store.check(keys)))
        return False

    def look(self) -> Mapping[int, Address]:
        """The same, after reading the store now."""
        self._look()
        return self.live()

    def close(self) -> None:
        self._closed.set()
        with suppress(StoreError):
            self.set(f"{self._rank}", "")
        self._line.close()

    def set(self, key: str, value: str) -> None:
        self._line.ask(lambda store: store.set(self._key(key), value))

    def get(self, key: str) -> str | None:
        return self._line.ask(lambda store: _get(store, self._key(key)))

    def claim(self, key: str, value: str) -> str:
        """Sets `key` unless somebody has; returns what it is then, the same for all."""
        told: str = self._line.ask(lambda store: store.compare_set(self._key(key), "", value).decode())
        return told

    def _key(self, key: str) -> str:
        return f"{self.run}/{key}"

    def _run(self) -> None:
        while not self._closed.wait(self._beat_s):
            self._look()

    def _look(self) -> None:
        try:
            leases = self._line.ask(self._swap_leases)
        except StoreError as cause:
            if not self.store_lost and not self._closed.is_set():
                self.store_lost = True
                warnings.warn(
                    f"torch's store is gone ({cause}): rank {self._rank} goes on with the peers it knows, and nobody can join "
                    f"until it is back; where it may die, host it elsewhere with TACIT_STORE=host:port",
                    stacklevel=2,
                )
            return
        for rank, text in leases.items():
            self._read(rank, text)
        self.store_lost = False

    def _swap_leases(self, store: Any) -> dict[int, str | None]:
        """Writes this rank's, reads the others'; in the line's thread."""
        self._beats += 1
        if self._own is not None and not self._closed.is_set():
            own = [self._beats, self._own.host, self._own.port, self._own.incarnation]
            store.set(self._key(f"{self._rank}"), json.dumps(own))
        return {rank: _get(store, self._key(f"{rank}")) for rank in range(self._world) if rank != self._rank}

    def _read(self, rank: int, text: str | None) -> None:
        with self._lock:
            if not text:
                self._seen.pop(rank, None)  # it left
                return
            beat, host, port, incarnation = json.loads(text)
            address = Address(host, int(port), incarnation)
            known = self._seen.get(rank)
            if known is None or (known[0], known[2]) != (beat, address):
                self._seen[rank] = (beat, time.monotonic(), address)


def _get(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _run_after(store: Any, run: int) -> int:
    return int(store.compare_set("run", str(run), str(run + 1)).decode())
