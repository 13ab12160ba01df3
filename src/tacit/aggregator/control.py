"""Control: who may use an aggregator's plane, and with whom. Admits jobs, deals out slots and cookies, notices who is gone.

    with UserPlane(("0.0.0.0", 4800)) as plane, Control(plane, ("0.0.0.0", 4800), ["the secret"]):
        ...  # serves until closed

A rank keeps one TCP connection for each of its jobs (membership.py); how they talk is in talk.py. Nothing here survives a
restart: the connections break, and the ranks join again. One thread does everything, so there is nothing to lock.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from types import TracebackType
from typing import Any, Protocol, Self

from tacit.aggregator.addresses import address_text
from tacit.aggregator.admission import Admission, Member, ranks_text
from tacit.aggregator.asker import REASONS, Asker, Refusal
from tacit.aggregator.membership import Terms
from tacit.aggregator.metrics import serve_metrics
from tacit.aggregator.reading import EndedJob, Reading
from tacit.aggregator.shares import Shares
from tacit.aggregator.spec import Address, Job
from tacit.aggregator.stats import JobStats
from tacit.aggregator.talk import MOST_ASKED, ForgedError, Message
from tacit.aggregator.wire import MOST_JOBS
from tacit.errors import ConfigError

MOST_CONNECTIONS = 4096
MOST_STRANGERS = 64  # of them, those that have proved nothing yet; one more, and the oldest is cut off
GREETING_S = 5.0  # for a stranger to prove something
MOST_PATIENCE_S = 600.0  # for ranks to wait for the others
PARTING_S = 5.0  # for a rank to take note that its job is over
IDLE_S = 60.0  # for a reader of figures between two questions
QUIET_S = 10.0  # between two words about refusals for the same reason
REMEMBERED = 16  # jobs that are over


class AnyPlane(Protocol):
    """What control and the command need of a plane."""

    @property
    def address(self) -> Address: ...
    @property
    def slots(self) -> int: ...
    def add_job(self, job: Job) -> None: ...
    def remove_job(self, id: int) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def sockets(self) -> dict[str, int]: ...
    def stats(self, id: int) -> JobStats: ...
    def close(self) -> None: ...


class Control:
    """Serves from when it is built until it is closed; then its ranks are told, and the plane has no job left. The plane stays open.

    `keys` are secrets: jobs under one know nothing of jobs under another. `jobs` is how many must always find their share of
    the slots. `tell` gets a sentence for each job that begins, ends or is refused, in control's own thread.
    """

    def __init__(
        self,
        plane: AnyPlane,
        listen: Address,
        keys: Sequence[str],
        *,
        kind: str = "user",
        jobs: int = 4,
        lease_s: float = 10.0,
        metrics: Address | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        if not keys:
            raise ConfigError(
                "no secret: name at least one, or [''] where only this machine reaches the aggregator"
            )
        if not 0.1 <= lease_s <= 3600:
            raise ConfigError(f"lease_s={lease_s}: a silent rank is given up after 0.1 to 3600 s")
        self._plane, self._kind = plane, kind
        self._keys, self._lease_s = tuple(keys), lease_s
        self._tell = tell
        self._told: dict[str, float] = {}  # when a refusal was last told of, by reason
        self._shares = Shares(plane.slots, jobs)
        self._version = _version()
        self._jobs: dict[tuple[int, str], Admission] = {}  # by number of the key, and name
        self._over: deque[tuple[float, EndedJob]] = deque(maxlen=REMEMBERED)
        self._refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._admitted = self._lost = 0
        self._connections: set[asyncio.Task[Any]] = set()
        self._strangers: dict[asyncio.Task[Any], None] = {}  # the oldest first
        with contextlib.ExitStack() as opened:
            self._socket = opened.enter_context(_listening(listen))
            self._metrics_socket = opened.enter_context(_listening(metrics)) if metrics else None
            opened.pop_all()  # the servers close them
        self.address: Address = self._socket.getsockname()
        self.metrics_address: Address | None = (
            self._metrics_socket.getsockname() if self._metrics_socket else None
        )
        self._loop = asyncio.new_event_loop()
        self._started_s = self._loop.time()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tacit control", daemon=True)
        self._thread.start()

    def reading(self) -> Reading:
        """All figures, now."""

        async def read() -> Reading:
            return self._reading()

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result()

    def close(self) -> None:
        """Returns when the ports are free. Again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the thread ----

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        servers = [await asyncio.start_server(self._attend, sock=self._socket, limit=MOST_ASKED)]
        if self._metrics_socket:
            servers.append(await serve_metrics(self._metrics_socket, self._reading))
        await self._stop.wait()
        for server in servers:
            server.close()
        for job in list(self._jobs.values()):
            self._end(job, "the aggregator was stopped")
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        if len(self._connections) >= MOST_CONNECTIONS:
            self._refused["busy"] += 1
            writer.transport.abort()
            return
        asker = Asker(reader, writer)
        self._connections.add(task)
        self._strangers[task] = None
        if len(self._strangers) > MOST_STRANGERS:
            next(iter(self._strangers)).cancel()
        try:
            await self._answer(asker, task)
        except Refusal as refusal:
            asker.dismiss(refusal=refusal)
            self._refuse(refusal, asker.host)
        except (OSError, ForgedError, asyncio.CancelledError):
            pass  # it hung up, or is cut off: it knows
        finally:
            self._strangers.pop(task, None)
            try:
                await asker.close()
            finally:
                self._connections.discard(task)

    async def _answer(self, asker: Asker, task: asyncio.Task[Any]) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                key, wish = await asker.prove(self._keys)
        except TimeoutError:
            raise Refusal("silent", f"nothing was asked for within {GREETING_S:g} s") from None
        self._strangers.pop(task, None)
        if wish.get("say") == "join":
            await self._keep(asker, key, wish)
        elif wish.get("say") == "status":
            await self._report(asker)
        else:
            raise Refusal("malformed", f"control has no answer to {wish.get('say')!r:.40}", config=True)

    def _refuse(self, refusal: Refusal, host: str) -> None:
        """Counts it; tells of it unless it just did so, lest strangers fill a disk."""
        self._refused[refusal.reason] += 1
        now_s = self._loop.time()
        if now_s - self._told.get(refusal.reason, -QUIET_S) >= QUIET_S:
            self._told[refusal.reason] = now_s
            self._tell(f"refused {host}: {refusal}")

    async def _report(self, asker: Asker) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S) as clock:
                while True:
                    asker.send(self._reading().as_dict())
                    await asker.receive()
                    clock.reschedule(self._loop.time() + IDLE_S)

    # ---- a rank, from its first word to its last ----

    async def _keep(self, asker: Asker, key: int, wish: Message) -> None:
        terms, rank, address, patience_s = _wish(wish, asker.host)
        job = self._admit(key, terms, rank, address)
        left, why = False, "its connection closed without a word"
        try:
            async with asyncio.timeout(patience_s) as clock:
                job.members[rank] = member = Member(rank, address, asker, clock)
                job.addresses[rank] = address
                if not job.absent:
                    self._start(job)
                while not left:
                    left = self._hear(job, member, await asker.receive())
        except TimeoutError:
            why = f"it was silent for {self._lease_s:g} s"
            if job.id is None and not job.over:
                absent = f"{ranks_text(job.absent)} of {terms.world} {'has' if len(job.absent) == 1 else 'have'} not joined"
                self._gone(job, rank, left, why)
                raise Refusal(
                    "late",
                    f"{absent} job {job.name!r} within {patience_s:.3g} s; are they started, and do they ask for the same name?",
                ) from None
        except ForgedError:
            why = "it sent a line that it cannot have meant"
        finally:
            self._gone(job, rank, left, why)

    def _admit(self, key: int, terms: Terms, rank: int, address: Address) -> Admission:
        now_s = self._loop.time()
        if job := self._jobs.get((key, terms.name)):
            job.check(terms, rank, address, now_s)
            return job
        slots = self._shares.take(terms.slots) if len(self._jobs) < MOST_JOBS else None
        if slots is None:
            why = f"all {self._shares.slots} slots are in use by {len(self._jobs)} jobs; wait for one to end, or start the aggregator with more --slots or --jobs"
            raise Refusal("full", why)
        job = self._jobs[key, terms.name] = Admission(key, terms, slots, now_s)
        return job

    def _start(self, job: Admission) -> None:
        """All are there: the plane gets the job, the ranks their grants."""
        used = {other.id for other in self._jobs.values()}
        # counting on, so that packets of a job that is over do not meet the next one
        id = next(
            n % MOST_JOBS
            for n in range(self._admitted, self._admitted + MOST_JOBS)
            if n % MOST_JOBS not in used
        )
        cookie = secrets.randbits(64)
        members = tuple(job.addresses[rank] for rank in range(job.terms.world))
        try:
            self._plane.add_job(job.terms.granted(id, cookie, members, job.slots))
        except ConfigError as cause:
            refusal = Refusal("plane", str(cause), config=True)
            self._end(job, str(cause), refusal=refusal)
            self._refuse(refusal, "all its ranks")
            return
        job.id, job.since_s = id, self._loop.time()
        self._admitted += 1
        grant = {"say": "granted", "id": id, "members": members, "slots": [job.slots.start, len(job.slots)]}
        grant |= {"plane": self._plane.address, "lease_s": self._lease_s}
        for member in job.members.values():
            member.asker.send(grant | {"cookie": member.asker.masked(cookie)})
            member.wind(job.since_s + self._lease_s)
        self._tell(f"job {job.name!r} runs: {job.terms.world} ranks, {len(job.slots)} slots")

    def _hear(self, job: Admission, member: Member, message: Message) -> bool:
        """Answers; whether this was the rank's last word."""
        if job.id is None or job.over:
            return message.get("say") == "leave"
        member.wind(self._loop.time() + self._lease_s)
        if message.get("say") == "missing":
            ranks = self._plane.stats(job.id).ranks
            missing = {rank: stats.missing for rank, stats in enumerate(ranks) if stats.missing}
            member.asker.send({"say": "missing", "number": message.get("number"), "ranks": missing})
        elif message.get("say") == "keep":
            member.asker.send({"say": "keep"})
        return message.get("say") == "leave"

    def _gone(self, job: Admission, rank: int, left: bool, why: str) -> None:
        """A rank is not there any more: the others are told, and where they cannot go on the job is over."""
        if job.over or rank not in job.members:
            return
        del job.members[rank]
        if job.id is None:
            del job.addresses[rank]
            if not job.members:
                self._end(job, "not all of its ranks came")
            return
        (job.left if left else job.lost).append(rank)
        self._lost += not left
        for member in job.members.values():
            member.asker.send({"say": "gone", "lost": job.lost, "left": job.left})
        if job.broken:
            self._end(
                job,
                f"{ranks_text(job.lost)} of job {job.name!r} {'is' if len(job.lost) == 1 else 'are'} lost: {why}",
            )
        elif not job.members:
            self._end(job, "all ranks have left")

    def _end(self, job: Admission, why: str, refusal: Refusal | None = None) -> None:
        """The job is over: its slots are free, and who is still there is told."""
        job.over = True
        del self._jobs[job.key, job.name]
        self._shares.give_back(job.slots)
        now_s, chunks = self._loop.time(), 0
        if job.id is not None:
            chunks = self._plane.stats(job.id).counts["completed"]
            self._plane.remove_job(job.id)
        well = job.id is not None and not job.members and not job.lost
        self._over.appendleft((now_s, EndedJob(job.name, why, well, 0.0, now_s - job.since_s, chunks)))
        for member in job.members.values():
            member.asker.dismiss(None if refusal else {"say": "ended", "why": why}, refusal=refusal)
            member.wind(now_s + PARTING_S)
        self._tell(f"job {job.name!r} is over after {now_s - job.since_s:.1f} s and {chunks} chunks: {why}")

    def _reading(self) -> Reading:
        now_s = self._loop.time()
        jobs = sorted(self._jobs.values(), key=lambda job: (job.name, job.key))
        return Reading(
            version=self._version,
            plane=self._kind,
            address=self._plane.address,
            time_s=now_s,
            up_s=now_s - self._started_s,
            lease_s=self._lease_s,
            slots=self._shares.slots,
            free_slots=self._shares.free,
            share=self._shares.share,
            counts=dict(self._plane.counts()),
            sockets=dict(self._plane.sockets()),
            refused=dict(self._refused),
            admitted=self._admitted,
            lost_ranks=self._lost,
            jobs=tuple(
                job.reading(None if job.id is None else self._plane.stats(job.id), now_s) for job in jobs
            ),
            ended=tuple(replace(job, ago_s=now_s - at_s) for at_s, job in self._over),
        )


def _wish(wish: Message, host: str) -> tuple[Terms, int, Address, float]:
    """What a rank asks for: terms, its number, its UDP address, and how long it will wait for the others."""
    try:
        terms = Terms.of(wish.get("terms"))
    except ConfigError as cause:
        raise Refusal("terms", str(cause), config=True) from None
    rank, port, patience_s = wish.get("rank"), wish.get("port"), wish.get("patience_s")
    if (
        type(rank) is not int
        or not 0 <= rank < terms.world
        or type(port) is not int
        or not 1 <= port <= 65535
    ):
        why = f"rank={rank!r:.20}, port={port!r:.20}: job {terms.name!r} has ranks 0 to {terms.world - 1}, and a port is from 1 to 65535"
        raise Refusal("terms", why, config=True)
    if not isinstance(patience_s, int | float) or not patience_s >= 0:
        raise Refusal(
            "terms", f"patience_s={patience_s!r:.20}: seconds to wait for the other ranks", config=True
        )
    return terms, rank, (host, port), min(float(patience_s), MOST_PATIENCE_S)


def _listening(address: Address) -> socket.socket:
    try:
        return socket.create_server(address, backlog=128)
    except OSError as cause:
        why = cause.strerror or str(cause)
        raise ConfigError(
            f"TCP {address_text(address)} cannot be listened on ({why}); name another address or port"
        ) from cause


def _version() -> str:
    try:
        return metadata.version("tacit")
    except metadata.PackageNotFoundError:
        return "(not installed)"
