"""What was sent and what it cost: counted where it happens, shown as a table, a dict or TensorBoard scalars."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from tacit.errors import ConfigError
from tacit.units import size_text, time_text

log = logging.getLogger("tacit")
TIMES = ("encode", "wire", "decode", "wait")
_RECENT_CHUNKS = 2000  # of which a share is taken


class Losses:
    """What a lossy scheme has left out so far, the same on all ranks; a warning of rank 0 once it is more than was announced."""

    def __init__(self, said: float, world: int, rank: int) -> None:
        self._said, self._rank, self._warned = said, rank, False
        self.chunks = self.partial_chunks = 0
        self.left_out = [0] * world  # chunks without each rank
        self._recent: deque[tuple[int, int]] = (
            deque()
        )  # chunks of a sum, and how many parts of ranks they lack

    def add(self, left_out: Sequence[int], chunks: int, partial: int) -> None:
        """A sum of so many chunks; `left_out` of them by rank."""
        self.chunks += chunks
        self.partial_chunks += partial
        self.left_out = [a + b for a, b in zip(self.left_out, left_out, strict=True)]
        self._recent.append((chunks, sum(left_out)))
        while (
            len(self._recent) > 1 and sum(n for n, _ in self._recent) - self._recent[0][0] >= _RECENT_CHUNKS
        ):
            self._recent.popleft()
        self._warn_if_more()

    def _warn_if_more(self) -> None:
        chunks, lacking = (sum(column) for column in zip(*self._recent, strict=True))
        share = lacking / (chunks * len(self.left_out))
        if self._warned or chunks < _RECENT_CHUNKS or share <= self._said:
            return
        self._warned = True
        most = max(range(len(self.left_out)), key=self.left_out.__getitem__)
        log.log(
            logging.INFO if self._rank else logging.WARNING,
            "%.2g %% of what ranks sent was left out of the last %d chunks, more than loss=%g; most of it is rank %d's. It comes later, from "
            "the codec's memory, if that has one; handle.stats counts on",
            100 * share, chunks, self._said, most,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return {
            "chunks": self.chunks,
            "partial_chunks": self.partial_chunks,
            "left_out_by_rank": {str(rank): n for rank, n in enumerate(self.left_out)},
        }


class Stats:
    """Counters of one handle on one rank, since it was attached. Written by several threads, readable at any time.

    Bytes are payload bytes that left this rank. `wait` is the time the training thread was blocked; `encode`, `wire`
    and `decode` run beside it, in tacit's own threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[tuple[str, str]] = Counter()
        self._seconds = dict.fromkeys(TIMES, 0.0)
        self.nonfinite: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # of what peers sent, by reason; gossip only
        self.losses: Losses | None = None  # of a scheme that may leave ranks out
        self.steps = 0
        self.numel = 0
        self.over = ""  # the network interfaces that carry the exchange, where they are known
        self.chosen = ""  # by `auto`: what, and why
        self.drift = ""  # why the plan no longer holds
        self._step_s: dict[str, float] = {}  # as predicted, and as measured in the last window

    def sent(self, request: str, group: str, nbytes: int) -> None:
        with self._lock:
            self._sent[request, group] += nbytes

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[what] += perf_counter() - start

    def stepped(self, numel: int) -> None:
        with self._lock:
            self.steps += 1
            self.numel += numel

    def planned(self, chosen: str, predicted_s: float | None) -> None:
        """A strategy was chosen, and this is expected of a step."""
        self.chosen, self.drift = chosen, ""
        self._step_s = {} if predicted_s is None else {"predicted_step_s": predicted_s}

    def measured(self, step_s: float, drift: str) -> None:
        """What the last steps of all ranks took, and a sentence if the plan no longer holds."""
        self._step_s = {**self._step_s, "measured_step_s": step_s}
        self.drift = drift or self.drift

    def found_nonfinite(self, names: Sequence[str], step: int, source: str) -> None:
        """Counts every case; logs a warning for the first."""
        if not self.nonfinite:
            log.warning(
                "step %d: the averaged gradient of %s is not finite (%s); every rank sees it, so a GradScaler skips the "
                "step; later cases are only counted, in handle.stats.nonfinite", step, ", ".join(names), source
            )  # fmt: skip
        self.nonfinite.update(names)

    @property
    def sent_nbytes(self) -> int:
        with self._lock:
            return sum(self._sent.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        with self._lock:
            by_request, by_group = Counter[str](), Counter[str]()
            for (request, group), nbytes in self._sent.items():
                by_request[request] += nbytes
                by_group[group] += nbytes
            return {
                "steps": self.steps,
                "sent_nbytes": sum(self._sent.values()),
                "sent_by_request": dict(by_request),
                "sent_by_group": dict(by_group),
                "elements": self.numel,
                "nonfinite": dict(self.nonfinite),
                **{f"{what}_s": self._seconds[what] for what in TIMES},
                **self._step_s,
                **({} if self.losses is None else self.losses.as_dict()),
            }

    def __str__(self) -> str:
        d = self.as_dict()
        steps = max(1, d["steps"])
        rows = [("", "total", "a step")]
        rows += [("steps", str(d["steps"]), "")]
        rows += [("sent", size_text(d["sent_nbytes"]), size_text(d["sent_nbytes"] / steps))]
        rows += [
            (f"  {r}", size_text(n), size_text(n / steps)) for r, n in sorted(d["sent_by_request"].items())
        ]
        rows += [
            (f"  group {g}", size_text(n), size_text(n / steps))
            for g, n in sorted(d["sent_by_group"].items())
        ]
        rows += [(f"{w} time", time_text(d[f"{w}_s"]), time_text(d[f"{w}_s"] / steps)) for w in TIMES]
        rows += [(f"not finite: {name}", f"{n} times", "") for name, n in sorted(d["nonfinite"].items())]
        rows += [
            (name.replace("_", " ").removesuffix(" s"), "", time_text(s)) for name, s in self._step_s.items()
        ]
        if self.losses is not None:
            share = self.losses.partial_chunks / max(1, self.losses.chunks)
            rows += [("chunks without a rank", f"{self.losses.partial_chunks:,}", f"{100 * share:.2g} %")]
        width = max(len(row[0]) for row in rows)
        over = f"over {self.over}" if self.over else ""
        lines = [f"{a:<{width}}  {b:>10}  {c:>10}".rstrip() for a, b, c in rows]
        return "\n".join([*lines, *filter(None, (over, self.chosen, self.drift))])

    def scalars(self, prefix: str = "tacit") -> dict[str, float]:
        """Every figure under a name of its own, such as `tacit/sent_by_request/Sum`: what dashboards take."""
        found: dict[str, float] = {}
        for key, value in self.as_dict().items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                found["/".join(filter(None, (prefix, key, name)))] = number
        return found

    def to_tensorboard(self, writer: Any, step: int | None = None, prefix: str = "tacit") -> None:
        """Adds every figure as a scalar to `writer`, a SummaryWriter or a folder to write to."""
        if isinstance(writer, str):
            with _summary_writer(writer) as opened:
                self.to_tensorboard(opened, step, prefix)
            return
        at = self.steps if step is None else step
        for name, number in self.scalars(prefix).items():
            writer.add_scalar(name, number, at)


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as cause:
        raise ConfigError("TensorBoard is not installed; run: pip install tensorboard") from cause
    return SummaryWriter(folder)
