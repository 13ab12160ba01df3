"""All ranks attach one strategy to one model, or all raise one error; agreed in torch's store, before anything else is opened.

Different strategies open different things (a process group, an aggregator, leases), each of which waits for the other ranks: only
what they all have already can tell them apart in time.

    rank r      set r = digest and text;  add 1 to the count of this digest;  add 1 to `arrived`
    the last    set `all` = alike, or differ
    everyone    waits for `all`;  reads the others' only where they differ
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tacit.attachments.handle import timeout_of
from tacit.errors import PairingError, TransportError
from tacit.redaction import without_secrets
from tacit.requests import seed_of
from tacit.strategy import Strategy

_DIGEST = 16  # hexadecimal digits


def agree(
    group: dist.ProcessGroup | None, strategy: Strategy, facts: Sequence[object], timeout: timedelta | None
) -> None:
    """Raises PairingError, on every rank of `group`, unless all of them attach the same strategy to the same model."""
    patience = timeout or timeout_of(group) or dist.default_pg_timeout
    Agreement(dist.get_process_group_ranks(group), strategy, facts).wait(patience)


class Agreement:
    """What the ranks of one group are about to attach. The n-th of a process in this group is compared with the others' n-th."""

    def __init__(self, ranks: Sequence[int], strategy: Strategy, facts: Sequence[object]):
        self._ranks, self._rank = list(ranks), dist.get_rank()
        self._store = _store_for(self._ranks)
        text = without_secrets(str(strategy))
        digest = f"{seed_of(text, *facts):0{_DIGEST}x}"
        self._own = digest + text
        self._late = self._store.check(["all"]) or self._store.check([str(self._rank)])
        try:
            strategy.check(len(self._ranks))
        finally:  # where it raises, it does so on all ranks that attach the same
            self._store.set(str(self._rank), self._own)
            if not self._late:
                self._arrive(digest)

    def _arrive(self, digest: str) -> None:
        alike = self._store.add(digest, 1)
        if self._store.add("arrived", 1) == len(self._ranks):  # the counts of all digests are complete
            self._store.set("all", "alike" if alike == len(self._ranks) else "differ")

    def wait(self, timeout: timedelta) -> None:
        """Returns when all ranks have come with the same; the store keeps nothing of it."""
        try:
            self._store.wait(["all"], timeout)
        except RuntimeError as cause:  # of every kind of store
            absent = [rank for rank in self._ranks if not self._store.check([str(rank)])]
            raise TransportError(
                f"rank {self._rank} waited {timeout.total_seconds():.0f} s for ranks {absent} to attach {self._own[_DIGEST:]!r}; "
                f"call attach() on all ranks"
            ) from cause
        try:
            self.look()
        finally:
            self._leave()

    def look(self) -> None:
        """Raises PairingError if ranks are known to differ; waits for nobody. A rank that was started again compares itself with those it finds."""
        if self._late or (self._store.check(["all"]) and self._store.get("all") == b"differ"):
            self._compare([rank for rank in self._ranks if self._store.check([str(rank)])])

    def _compare(self, ranks: Sequence[int]) -> None:
        notes = [self._store.get(str(rank)).decode(errors="replace") for rank in ranks]
        found = next(((r, note) for r, note in zip(ranks, notes, strict=True) if note != notes[0]), None)
        if found is None:
            return
        (first, (other, note)), own = (ranks[0], found), notes[0]
        if note[_DIGEST:] != own[_DIGEST:]:
            raise PairingError(
                f"rank {first} attached {own[_DIGEST:]!r} and rank {other} attached {note[_DIGEST:]!r}; give all ranks one strategy"
            )
        raise PairingError(
            f"rank {first} and rank {other} attached {own[_DIGEST:]!r} to different models, kinds of module, bucket sizes, seeds or "
            f"check_every; build the same model on all ranks"
        )

    def _leave(self) -> None:
        """The last to leave removes the keys: they would be found by who uses the store again."""
        with suppress(RuntimeError):
            if self._store.add("left", 1) == len(self._ranks):
                notes = [self._store.get(str(rank)).decode() for rank in self._ranks]
                digests = {note[:_DIGEST] for note in notes}
                for key in (*map(str, self._ranks), *digests, "arrived", "all", "left"):
                    self._store.delete_key(key)


_attached: tuple[Any, Counter[tuple[int, ...]]] = (
    None,
    Counter(),
)  # by store: one of a new world counts anew


def _store_for(ranks: Sequence[int]) -> Any:
    global _attached
    c10d: Any = dist  # it does not name its stores for type checkers
    store = c10d.distributed_c10d._get_default_store()
    if _attached[0] is not store:
        _attached = (store, Counter())
    _attached[1][tuple(ranks)] += 1
    own = store.clone() if hasattr(store, "clone") else store  # a wait must not block the process's others
    return c10d.PrefixStore(f"tacit/attach/{seed_of(*ranks):x}/{_attached[1][tuple(ranks)]}", own)
