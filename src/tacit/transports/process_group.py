"""Transfers over a torch.distributed process group (gloo, nccl, mpi), with every payload byte counted as it leaves.

`Wire` is used by one thread at a time: collectives of one group must be issued in one order on all ranks.
Counted are payload bytes: not TCP headers, nor the one-byte tokens that pace the pairwise rounds.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import recycled
from tacit.errors import TransportError
from tacit.transports.interfaces import Interface

_PACED_NBYTES = 64 * 1024  # a longer message fills the link for milliseconds: senders must not collide
_PROBE_NBYTES = 256 * 1024
_PROBE_S = 1e-3  # with gloo's latency about 3 Gbit/s; from there on rounds cost more than collisions
_PROBES = 4  # the first one also connects


@dataclass(slots=True)
class Wire:
    """One process group as seen by one rank; `group` is used by nobody else while this wire is in use."""

    group: dist.ProcessGroup
    sent_nbytes: int = 0
    paced: bool = True  # whether long messages between all pairs go in rounds; alike on all ranks
    uneven: bool = (
        False  # whether a rank may have long messages where others have short ones: each pair then decides
    )
    first: int | None = (
        None  # so many ranks of the group alone; the others take no part, which needs `uneven`
    )
    lost_ranks: Callable[[], Sequence[int]] = (
        tuple  # those known to be gone, where something beside the group knows it
    )
    interfaces: Sequence[Interface] = ()  # those that carry it, as far as they are known
    rank: int = field(init=False)
    world: int = field(init=False)
    _token: Tensor = field(init=False)
    _purpose: str = "transfer"

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._token = torch.zeros(1, dtype=torch.uint8)

    @contextmanager
    def purpose(self, what: str) -> Iterator[None]:
        """Inside of it, an error of a transfer names `what` was lost."""
        before, self._purpose = self._purpose, what
        try:
            yield
        finally:
            self._purpose = before

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Renames a failure of the process group; nothing but transfers may stand in the block."""
        try:
            yield
        except (RuntimeError, ValueError, dist.DistError) as cause:
            raise self.lost(self._purpose, cause) from cause

    def lost(self, what: str, cause: BaseException) -> TransportError:
        reason = " ".join(str(cause).split())[:300]
        gone = ", ".join(f"rank {rank}" for rank in self.lost_ranks())
        who = (
            f"{gone} went away"
            if gone
            else "another rank ended, stalled beyond the process group's time-out or the link broke"
        )
        return TransportError(
            f"rank {self.rank} of {self.world} lost the exchange in a {what}: {who}; restart all ranks from the last "
            f"checkpoint ({reason})"
        )

    def unreachable(self) -> tuple[int, ...]:
        """After an error: the ranks whose connection to this one is broken."""
        return tuple(rank for rank in range(self.world) if rank != self.rank and self._breaks(rank))

    def _breaks(self, rank: int) -> bool:
        try:
            self._send(self._token, rank)
        except (RuntimeError, ValueError):
            return True
        return False

    def measure(self) -> None:
        """Finds out whether long messages need rounds here: not between two ranks, nor where every link is fast. All ranks call it together."""
        cpu = self._token.device
        if self.world > 2 and cpu in self.group._device_types and self._is_gloo(cpu):
            took = torch.tensor([min(self._probe_s() for _ in range(_PROBES))])
            self.paced = self._largest(took) > _PROBE_S
        else:
            self.paced = False

    def _probe_s(self) -> float:
        """Seconds for a long message to the next rank, while another comes from the one before."""
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        data = torch.zeros(_PROBE_NBYTES, dtype=torch.uint8)
        with self.purpose("probe of the link"), self._moving():
            dist.barrier(self.group)
            start = time.perf_counter()
            _wait([self._receive(torch.empty_like(data), source), self._send(data, to)])
            return time.perf_counter() - start

    def _largest(self, seconds: Tensor) -> float:
        with self.purpose("probe of the link"), self._moving():
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        return seconds.item()

    def all_reduce(self, value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The element-wise reduction, in a new tensor. Counted as a ring sends it: 2 (n - 1) / n of the payload."""
        return self.start_all_reduce(value, op)()

    def start_all_reduce(
        self, value: Tensor, op: Any = dist.ReduceOp.SUM, *, in_place: bool = False
    ) -> Callable[[], Tensor]:
        """Begins an all-reduce; what is returned waits for its end. Others may begin meanwhile, in the same order on all ranks.
        `in_place`: the answer is `value` itself, overwritten, if it is contiguous."""
        out = value if in_place and value.is_contiguous() else recycled.clone(value)
        if self.world == 1 or not value.numel():
            return lambda: out
        with self._moving():
            work = dist.all_reduce(out, op=op, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        self.sent_nbytes += ring_nbytes(value.numel(), value.element_size(), self.world, self.rank)
        purpose = self._purpose

        def end() -> Tensor:
            with self.purpose(purpose), self._moving():
                work.wait()
            return out

        return end

    def all_gather(self, numels: Sequence[int], own: Tensor, shape: torch.Size | None = None) -> list[Tensor]:
        """Every rank's tensor in rank order; rank r's has numels[r] elements. Each rank sends its own n - 1 times."""
        own = own.contiguous()
        parts = self.all_to_all([own.view(-1)] * self.world, numels)
        return [part.view(shape) for part in parts] if shape is not None else parts

    def all_to_all(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """parts[r] goes to rank r; back comes what every rank had for this one, numels[r] elements from rank r."""
        dtype, size = parts[0].dtype, parts[0].element_size()
        raw = [part.contiguous().view(torch.uint8) for part in parts]  # bytes: gloo knows no 16-bit integers
        nbytes = [numel * size for numel in numels]
        self.sent_nbytes += sum(part.numel() for rank, part in enumerate(raw) if rank != self.rank)
        # The longest message decides, and it is the same on all ranks: each either sends or receives every shard.
        long = max(*(part.numel() for part in raw), *nbytes) >= _PACED_NBYTES
        with self._moving():
            if self.uneven:
                received = self._by_pair(raw, nbytes)
            elif long and self._is_gloo(raw[0].device):
                received = self._pairwise(raw, nbytes) if self.paced else self._together(raw, nbytes)
            else:
                received = self._at_once(raw, nbytes)
        return [part.view(dtype) for part in received]

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Point to point, (rank, contiguous tensor) each, all at the same time; returns when all have left and arrived.

        Several between one pair of ranks are matched in the order given. Both sides know the lengths: empty ones do
        not travel.
        """
        ways = ((dist.irecv, receives), (dist.isend, sends))
        raw = [(op, rank, t.view(torch.uint8)) for op, side in ways for rank, t in side if t.numel()]
        if raw:
            with self._moving():
                batch = [dist.P2POp(op, t, group=self.group, group_peer=rank) for op, rank, t in raw]
                _wait(dist.batch_isend_irecv(batch))
        self.sent_nbytes += sum(t.numel() for op, _, t in raw if op is dist.isend)

    def _is_gloo(self, device: torch.device) -> bool:
        return bool(self.group._get_backend(device).name() == "gloo")

    def _at_once(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """Short messages cost latency, not bandwidth: one operation for all."""
        out = recycled.empty(sum(nbytes), torch.uint8, parts[0].device)
        dist.all_to_all_single(
            out, recycled.join(parts), list(nbytes), [p.numel() for p in parts], group=self.group
        )
        return list(out.split(list(nbytes)))

    def _together(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """All pairs at the same time, from where the parts lie."""
        out = [recycled.empty(nbytes[rank], torch.uint8, parts[0].device) for rank in range(self.world)]
        out[self.rank] = parts[self.rank]
        ahead = [(self.rank + k) % self.world for k in range(1, self.world)]
        works = [self._receive(out[rank], rank) for rank in reversed(ahead) if out[rank].numel()]
        works += [self._send(parts[rank], rank) for rank in ahead if parts[rank].numel()]
        _wait(works)
        return out

    def _pairwise(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """In round k rank r sends to r + k and receives from r - k, so that no two senders meet at one receiver.

        gloo's own all-to-all starts all pairs at once; they collide, and only 57-60 % of the link is used. The rounds
        stay in step through a one-byte token: a sender goes on when its receiver has everything.
        """
        out = [recycled.empty(nbytes[rank], torch.uint8, parts[0].device) for rank in range(self.world)]
        out[self.rank] = parts[self.rank]
        for k in range(1, self.world):
            to, source = (self.rank + k) % self.world, (self.rank - k) % self.world
            works = [self._receive(out[source], source)] if out[source].numel() else []
            works += [self._send(parts[to], to)] if parts[to].numel() else []
            _wait(works)
            _wait([self._receive(torch.empty_like(self._token), to), self._send(self._token, source)])
        return out

    def _by_pair(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """Short messages all at once, long ones in the rounds of `_pairwise`; empty ones do not travel. Sender and receiver of a message
        both know its length, so they agree without the others."""
        out = [recycled.empty(nbytes[rank], torch.uint8, parts[0].device) for rank in range(self.world)]
        out[self.rank] = parts[self.rank]
        pairs = [((self.rank + k) % self.world, (self.rank - k) % self.world) for k in range(1, self.world)]
        short = [self._receive(out[source], source) for _, source in pairs if self._is_short(out[source])]
        short += [self._send(parts[to], to) for to, _ in pairs if self._is_short(parts[to])]
        late = []
        for to, source in pairs:
            sends, receives = parts[to].numel() >= _PACED_NBYTES, out[source].numel() >= _PACED_NBYTES
            works = [self._receive(out[source], source)] if receives else []
            works += [self._send(parts[to], to)] if sends else []
            if self.paced:
                _wait(works)
                tokens = [self._receive(torch.empty_like(self._token), to)] if sends else []
                _wait(tokens + ([self._send(self._token, source)] if receives else []))
            else:
                late += works
        _wait([*late, *short])
        return out

    @staticmethod
    def _is_short(part: Tensor) -> bool:
        return 0 < part.numel() < _PACED_NBYTES

    def _send(self, part: Tensor, to: int) -> Any:
        return dist.isend(part, group=self.group, group_dst=to)

    def _receive(self, into: Tensor, source: int) -> Any:
        return dist.irecv(into, group=self.group, group_src=source)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def ring_nbytes(numel: int, itemsize: int, world: int, rank: int) -> int:
    """Bytes that leave `rank` in a ring all-reduce: each chunk but one in the first half, each but one in the second.

    Chunks are as even as whole elements allow, so the count is exact for any numel.
    """
    size = [numel * (r + 1) // world - numel * r // world for r in range(world)]
    return itemsize * (2 * numel - size[(rank + 1) % world] - size[(rank + 2) % world])
