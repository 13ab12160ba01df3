"""Who is there: every rank keeps a lease in a store, torch's or our own, and reads those of the others.

A rank whose beat has not changed for `LEASE_S` by this rank's clock is not called. Where the store itself cannot be reached (it lives in rank
0's process, or in torchrun's agent on its host, or at TACIT_STORE), the ranks go on with those they know; nobody can join
until it is back.

A store may outlive a run. Who finds that all of an earlier one have gone begins the next, and so do all that find the same: keys carry the
run's number.

torch's store answers whoever reaches it. So every value carries a proof, keyed by the run's secret, of what it is and where it stands: one that is
forged, moved or damaged counts as none. A lease counts once: its beats grow, and a life that another has followed does not come back.
"""

import hmac
import json
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tacit.authentication import SECRET, is_loopback, value_proof
from tacit.gossip.peers import MOST_NAME, PeerAddress
from tacit.gossip.refusals import Refusals
from tacit.gossip.store_client import DeadlineClient, StoreError

BEAT_S = 0.5
LEASE_S = 5.0
ASKED_AGAIN_S = 0.2  # between two questions about the same rank's life
MOST_VALUE = 1 << 14  # bytes; a lease has about 100
MOST_HOST = 255
_PAST = 8  # lives of a rank that are over, which do not come back
_TRIES = 100  # to change a value that others change, too


class Members:
    """Beats for this rank, and watches the others."""

    def __init__(
        self,
        store_client: DeadlineClient,
        rank: int,
        world: int,
        *,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
        start_s: float = 60.0,
        secret: str = "",
        scope: str = "",
        refusals: Refusals | None = None,
    ) -> None:
        """`scope` is whose values these are; those of another are refused."""
        self._store_client, self._rank, self._world = store_client, rank, world
        self._secret, self._scope = secret, scope
        self._refusals = refusals or Refusals(rank)
        self._past: dict[int, deque[str]] = {}  # lives of a rank that are over
        self._lives_known: dict[int, str] = {}  # as announced in the store
        self._asked_at: dict[int, float] = {}
        self._incarnation = ""
        self._thread: threading.Thread | None = None
        self._beat_s, self._lease_s = beat_s, lease_s
        self._seen: dict[int, tuple[int, float, PeerAddress]] = {}  # beat, when it changed, where
        self._own: PeerAddress | None = None
        self._beats = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.store_lost = False
        self.run = store_client.ask(lambda store: _number(self._value(store, "run")), start_s)
        self.life = self._lives()  # 1: the first; more: this rank was here before

    def enter(self, *, next_run: bool) -> None:
        """Looks which run this is, before `begin`; with `next_run`, begins another, unless somebody has."""
        run = self._store_client.ask(
            lambda store: self._run_after(store) if next_run else _number(self._value(store, "run"))
        )
        if run != self.run:
            with self._lock:
                self.run, self._seen, self._lives_known = run, {}, {}
            self.life = self._lives()
            self.announce(self._incarnation)

    def _lives(self) -> int:
        return self._store_client.ask(lambda store: self._count(store, self._key(f"{self._rank}/lives")))

    def announce(self, incarnation: str) -> None:
        """From here on others know this life, and answer it, though they cannot call it yet."""
        self._incarnation = incarnation
        with suppress(StoreError):
            self.set(f"{self._rank}/life", incarnation)

    def knows(self, rank: int, incarnation: str) -> bool:
        """Whether `rank` lives this life, by its lease or by what it announced; the store is asked where it may be a new one."""
        with self._lock:
            known = self._seen.get(rank)
            if incarnation in self._past.get(rank, ()):
                return False
            if incarnation in (known and known[2].incarnation, self._lives_known.get(rank)):
                return True
            now = time.monotonic()
            if now - self._asked_at.get(rank, -1e9) < ASKED_AGAIN_S:
                return False
            self._asked_at[rank] = now
        with suppress(StoreError):
            if (announced := self.get(f"{rank}/life")) is not None:
                self._lives_known[rank] = announced
            return announced == incarnation
        return False

    def begin(self, own: PeerAddress) -> None:
        """From here on this rank can be called."""
        self._own = own
        self._look()
        with suppress(StoreError):
            self.set(f"{self._rank}/began", "yes")
        self._thread = threading.Thread(target=self._run, name="tacit-gossip-members", daemon=True)
        self._thread.start()

    @property
    def all_left(self) -> bool:
        """Whether nobody is known that may still live: all of the others have left, or never joined."""
        with self._lock:
            return not self._seen

    def live(self) -> Mapping[int, PeerAddress]:
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
            return None not in self._store_client.ask(lambda store: self._values(store, keys))
        return False

    def look(self) -> Mapping[int, PeerAddress]:
        """The same, after reading the store now."""
        self._look()
        return self.live()

    def close(self) -> None:
        self._closed.set()
        if self._own is not None and not self.store_lost:
            with suppress(StoreError):
                self.set(f"{self._rank}", self._lease(left=True))
        self._store_client.close()
        if self._thread is not None:
            self._thread.join(self._store_client.answer_s)

    def set(self, key: str, value: str) -> None:
        full_key = self._key(key)
        self._store_client.ask(lambda store: store.set(full_key, self._sealed(full_key, value)))

    def get(self, key: str) -> str | None:
        return self._store_client.ask(lambda store: self._value(store, self._key(key)))

    def claim(self, key: str, value: str) -> str:
        """Sets `key` unless somebody has; returns what it is then, the same for all."""
        return self._store_client.ask(lambda store: self._claimed(store, self._key(key), value))

    def _key(self, key: str) -> str:
        return f"{self.run}/{key}"

    # ---- values with a proof; in the store client's thread

    def _sealed(self, key: str, value: str) -> str:
        return f"{value_proof(self._secret, f'{self._scope}/{key}', value)} {value}"

    def _unsealed(self, key: str, raw: bytes | None) -> str | None:
        """The value, or None where there is none that was written by one of this run."""
        if not raw:
            return None
        text = raw[:MOST_VALUE].decode(errors="replace")
        proof, _, value = text.partition(" ")
        due = value_proof(self._secret, f"{self._scope}/{key}", value)
        if len(raw) <= MOST_VALUE and hmac.compare_digest(proof.encode(), due.encode()):
            return value
        self._refusals.add(
            "store value",
            f"what the store holds under {key!r:.80} does not prove this run's {SECRET}, and is ignored",
            key,
        )
        return None

    def _value(self, store: Any, key: str) -> str | None:
        return self._values(store, [key])[0]

    def _values(self, store: Any, keys: Sequence[str]) -> list[str | None]:
        return [self._unsealed(key, raw) for key, raw in zip(keys, _get_all(store, keys), strict=True)]

    def _claimed(self, store: Any, key: str, value: str) -> str:
        for _ in range(_TRIES):
            (raw,) = _get_all(store, [key])
            if (held := self._unsealed(key, raw)) is not None:
                return held
            if self._replaced(store, key, raw, self._sealed(key, value)):
                return value
        raise RuntimeError(f"{key} changes all the time")

    def _count(self, store: Any, key: str) -> int:
        """One more than it was. The value also holds a random number: two that count at the same time must not both take it for theirs."""
        for _ in range(_TRIES):
            (raw,) = _get_all(store, [key])
            number = _number(self._unsealed(key, raw)) + 1
            if self._replaced(store, key, raw, self._sealed(key, f"{number} {secrets.token_hex(4)}")):
                return number
        raise RuntimeError(f"{key} changes all the time")

    def _run_after(self, store: Any) -> int:
        """The run after this one, unless somebody has begun another."""
        (raw,) = _get_all(store, ["run"])
        held = _number(self._unsealed("run", raw))
        if held == self.run:
            self._replaced(store, "run", raw, self._sealed("run", str(held + 1)))
        return _number(self._value(store, "run"))

    def _replaced(self, store: Any, key: str, raw: bytes | None, value: str) -> bool:
        """Whether `raw` was still there, and `value` is now."""
        try:
            expected = (raw or b"").decode()
        except UnicodeDecodeError:  # nobody of this run wrote that
            store.set(key, "")
            return False
        return bool(store.compare_set(key, expected, value).decode(errors="replace") == value)

    # ---- leases

    def _run(self) -> None:
        while not self._closed.wait(self._beat_s):
            with suppress(Warning):  # where warnings are errors, they must not end this thread
                self._look()

    def _look(self) -> None:
        try:
            leases = self._store_client.ask(self._swap_leases)
        except StoreError as cause:
            if not self.store_lost and not self._closed.is_set():
                self.store_lost = True
                warnings.warn(
                    f"torch's store is gone ({cause}): rank {self._rank} goes on with the peers it knows, and nobody can join "
                    f"until it is back; where it may die, host it elsewhere with TACIT_STORE=host:port",
                    stacklevel=2,
                )
            return
        if self.store_lost:  # the others find it again a little later: each has a lease's time for that
            with self._lock:
                now = time.monotonic()
                self._seen = {r: (beat, now, where) for r, (beat, _, where) in self._seen.items()}
        for rank, text in leases.items():
            try:
                self._read(rank, text)
            except (ValueError, TypeError, RecursionError) as cause:
                self._refusals.add(
                    "lease", f"a lease of rank {rank} that cannot be read ({cause!s:.80})", rank
                )
        self.store_lost = False

    def _swap_leases(self, store: Any) -> dict[int, str | None]:
        """Writes this rank's, reads the others'; in the store client's thread."""
        self._beats += 1
        if self._own is not None and not self._closed.is_set():
            full_key = self._key(f"{self._rank}")
            store.set(full_key, self._sealed(full_key, self._lease()))
        others = [rank for rank in range(self._world) if rank != self._rank]
        return dict(zip(others, self._values(store, [self._key(f"{rank}") for rank in others]), strict=True))

    def _lease(self, *, left: bool = False) -> str:
        assert self._own is not None
        self._beats += left
        return json.dumps([self._beats, self._own.host, 0 if left else self._own.port, self._own.incarnation])

    def _read(self, rank: int, text: str | None) -> None:
        """A lease that is not there runs out like one that is not renewed: only an authenticated one shows that its rank has left."""
        if text is None:
            return
        beat, address = _lease_of(text)
        if not self._secret and not is_loopback(address.host):
            self._refusals.add(
                "address",
                f"rank {rank} at {address.host}: without {SECRET} only loopback is called; give all ranks the same secret",
                rank,
            )
            return
        with self._lock:
            known, past = self._seen.get(rank), self._past.setdefault(rank, deque(maxlen=_PAST))
            if address.incarnation in past:
                if address.port:
                    self._refusals.add("replayed", f"a lease of rank {rank} that was over", rank)
                return
            if known is not None and known[2].incarnation == address.incarnation:
                if beat < known[0]:
                    self._refusals.add(
                        "replayed", f"a lease of rank {rank} that is older than the last", rank
                    )
                if beat <= known[0]:
                    return
            elif known is not None:
                newer = _life_of(address) - _life_of(known[2])
                if newer <= 0 and time.monotonic() - known[1] < self._lease_s:
                    return  # an older life, such as a process that was stopped for a while
                if newer >= 0:
                    past.append(known[2].incarnation)
            if address.port:
                self._seen[rank] = (beat, time.monotonic(), address)
            else:
                self._seen.pop(rank, None)
                past.append(address.incarnation)


def _lease_of(text: str) -> tuple[int, PeerAddress]:
    """ValueError or TypeError where it is none. A port of 0: the rank has left."""
    beat, host, port, incarnation = json.loads(text)
    if type(beat) is not int or beat < 0 or type(port) is not int or not 0 <= port < 1 << 16:
        raise ValueError("a beat and a port are numbers")
    if not isinstance(host, str) or not 0 < len(host) <= MOST_HOST or not host.isprintable():
        raise ValueError("a host is a name")
    if not isinstance(incarnation, str) or not 0 < len(incarnation) <= MOST_NAME:
        raise ValueError("a life has a name")
    return beat, PeerAddress(host, port, incarnation)


def _life_of(address: PeerAddress) -> int:
    """Which life of its rank this is, by the name's first part; 0 where it has none."""
    number, dash, _ = address.incarnation.partition("-")
    return int(number) if dash and number.isascii() and number.isdigit() else 0


def _get_all(store: Any, keys: Sequence[str]) -> list[bytes | None]:
    """torch's stores wait for what is not there, so they are asked first."""
    if hasattr(store, "get_all"):
        found: list[bytes | None] = store.get_all(keys)
        return found
    return [store.get(key) if store.check([key]) else None for key in keys]


def _number(value: str | None) -> int:
    return int(value.split()[0]) if value else 0
