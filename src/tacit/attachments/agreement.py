"""All ranks attach one strategy to one model, or all raise one error; agreed in torch's store, before anything else is opened.

Different strategies open different things (a process group, an aggregator, leases), each of which waits for the other ranks: only
what they all have already can distinguish them in time.

    rank r      set r = digest and text;  add 1 to the count of this digest;  add 1 to `arrived`
    the last    set `all` = alike, or differ
    everyone    waits for `all`;  reads the others' only where they differ
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from tacit.attachments.handle import timeout_of
from tacit.errors import PairingError, TacitError, TransportError
from tacit.redaction import without_secrets
from tacit.requests import seed_of
from tacit.strategy import Strategy

_DIGEST = 16  # hexadecimal digits
_REFUSED = "refused: "


def agree(
    group: dist.ProcessGroup | None,
    strategy: Strategy,
    facts: Sequence[object],
    timeout: timedelta | None,
    *,
    asked: object = "",
) -> None:
    """Raises PairingError, on every rank of `group`, unless all of them attach the same strategy to the same model. `asked`: what the
    user wrote, where that is no strategy (`auto`)."""
    patience = timeout or timeout_of(group) or dist.default_pg_timeout
    Agreement.about(dist.get_process_group_ranks(group), strategy, facts, asked).wait(patience)


@contextmanager
def refusals_published(ranks: Sequence[int]) -> Iterator[None]:
    """If this rank refuses to attach before the ranks have compared anything, the others learn it at once: they would wait for it, and
    its next attach would be compared with their last."""
    before = _seen(ranks)
    try:
        yield
    except TacitError as refusal:
        if len(ranks) > 1 and _seen(ranks) == before:
            Agreement(ranks, f"{_REFUSED}{refusal}", "").leave()
        raise


class Agreement:
    """What the ranks of one group are about to attach. The n-th of a process in this group is compared with the others' n-th."""

    def __init__(self, ranks: Sequence[int], text: str, facts: object):
        self._ranks, self._rank = list(ranks), dist.get_rank()
        self._store = _store_for(self._ranks)
        digest = f"{seed_of(text, facts):0{_DIGEST}x}"
        self._own = digest + text
        late = self._store.check(["all"]) or self._store.check([str(self._rank)])
        if late:  # it was started again, and must not leave a note that differs from those it finds
            self._compare([rank for rank in self._there() if rank != self._rank])
        self._store.set(str(self._rank), self._own)
        if not late:
            self._arrive(digest)

    @classmethod
    def about(
        cls, ranks: Sequence[int], strategy: Strategy, facts: Sequence[object], asked: object = ""
    ) -> Self:
        """Of ranks that attach `strategy` to a model with these `facts`."""
        made = cls(ranks, without_secrets(str(asked or strategy)), tuple(facts))
        strategy.check(len(ranks))  # where it raises, it does so on all ranks that attach the same
        return made

    def _arrive(self, digest: str) -> None:
        alike = self._store.add(digest, 1)
        if self._store.add("arrived", 1) == len(self._ranks):  # the counts of all digests are complete
            self._store.set("all", "alike" if alike == len(self._ranks) else "differ")

    def wait(self, timeout: timedelta) -> None:
        """Returns when all ranks have come with the same; the store keeps nothing of it."""
        try:
            self._store.wait(["all"], timeout)
        except RuntimeError as cause:  # of every kind of store
            there = self._there()
            absent = [rank for rank in self._ranks if rank not in there]
            raise TransportError(
                f"rank {self._rank} waited {timeout.total_seconds():.0f} s for ranks {absent} to attach {self._own[_DIGEST:]!r}; "
                f"call attach() on all ranks"
            ) from cause
        try:
            self.look()
        finally:
            self.leave()

    def look(self) -> None:
        """Raises PairingError if ranks are known to differ; waits for nobody."""
        if self._store.check(["all"]) and self._store.get("all") == b"differ":
            self._compare(self._there())

    def _there(self) -> list[int]:
        return [rank for rank in self._ranks if self._store.check([str(rank)])]

    def _compare(self, ranks: Sequence[int]) -> None:
        """Raises PairingError unless the notes of `ranks`, and this rank's own, are the same."""
        notes = {rank: self._store.get(str(rank)).decode(errors="replace") for rank in ranks}
        notes = dict(sorted((notes | {self._rank: self._own}).items()))
        texts = {rank: note[_DIGEST:] for rank, note in notes.items()}
        refused = next((rank for rank, text in texts.items() if text.startswith(_REFUSED)), None)
        if refused is not None:
            raise PairingError(f"rank {refused} cannot attach: {texts[refused].removeprefix(_REFUSED)}")
        first = min(notes)
        other = next((rank for rank, note in notes.items() if note != notes[first]), None)
        if other is None:
            return
        if texts[other] != texts[first]:
            raise PairingError(
                f"rank {first} attached {texts[first]!r} and rank {other} attached {texts[other]!r}; give all ranks one strategy"
            )
        raise PairingError(
            f"rank {first} and rank {other} attached {texts[first]!r} to different models, kinds of module, bucket sizes, seeds or "
            f"check_every; build the same model on all ranks"
        )

    def leave(self) -> None:
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


def _seen(ranks: Sequence[int]) -> int:
    """How many attachments this process has compared in this group."""
    store = dist.distributed_c10d._get_default_store() if ranks else None
    return _attached[1][tuple(ranks)] if ranks and _attached[0] is store else 0
