"""Control: who may use an aggregator's plane, and with whom. Admits jobs, deals out slots and cookies, notices who is gone.

    with UserPlane(("0.0.0.0", 4800)) as plane, ControlServer(plane, ("0.0.0.0", 4800), ["the secret"]):
        ...  # serves until closed

A rank keeps one TCP connection for each of its jobs (membership.py); messages are authenticated by authentication.py. Nothing here survives a
restart: the connections break, and the ranks join again. One thread does everything, so there is nothing to lock.

An aggregator with a parent (parent.py) joins the job there when its own ranks are complete, and only then grants it to them. What
ends there ends here, and the other way round.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from importlib import metadata
from types import TracebackType
from typing import Any, Protocol, Self

from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.admission import Admission, Member
from tacit.aggregator.control.metrics import serve_metrics
from tacit.aggregator.control.notices import Notices
from tacit.aggregator.control.parent import Parent
from tacit.aggregator.control.protocol import MOST_WHY, REASONS, ControlConnection, Refusal
from tacit.aggregator.control.slot_allocator import SlotAllocator
from tacit.aggregator.control.status import AggregatorStatus, EndedJob
from tacit.aggregator.naming import size_text
from tacit.aggregator.planes.stats import JobStats
from tacit.aggregator.spec import MOST_COUNTED, Address, PlaneJob, Upstream
from tacit.aggregator.wire import MOST_JOBS
from tacit.authentication import MOST_REQUEST_NBYTES, ForgedError, Message
from tacit.errors import ConfigError, TacitError, TransportError
from tacit.keyed_server import NewestTasks, cancel_other_tasks

MOST_CONNECTIONS = 4096
# Of them, those that have proved nothing yet; one more, and the oldest is cut off. asyncio accepts up to 101 before it turns to what
# others sent: a rank that answers at once must not be the oldest by then.
MOST_STRANGERS = 512
GREETING_S = 5.0  # for a stranger to prove something
MOST_PATIENCE_S = 600.0  # for ranks to wait for the others
PARTING_S = 5.0  # for a rank to take note that its job is over
IDLE_S = 60.0  # for a reader of figures between two questions
QUIET_S = 10.0  # between two log lines about refusals for the same reason
REMEMBERED = 16  # jobs that are over
GRACE_S = 1.0  # for the parent to report itself who did not join


class AnyPlane(Protocol):
    """What control and the command need of a plane."""

    @property
    def address(self) -> Address: ...
    @property
    def slots(self) -> int: ...
    def add_job(self, job: PlaneJob) -> None: ...
    def remove_job(self, id: int) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def sockets(self) -> dict[str, int]: ...
    def stats(self, id: int) -> JobStats: ...
    def close(self) -> None: ...


class FailedError(Exception):
    """A member has reported that it cannot go on, and why."""


class ControlServer:
    """Serves from when it is built until it is closed; then its ranks are notified, and the plane has no job left. The plane stays open.

    `keys` are secrets: jobs under one know nothing of jobs under another. `jobs` is how many must always find their share of
    the slots. `parent` is the aggregator that adds our sums to those of other racks. `log` gets a sentence for each job that begins, ends or
    is refused, from a thread of its own: if it fails or blocks, that is counted (`AggregatorStatus.lost_notices`) and control goes on.
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
        parent: Parent | None = None,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        if not keys:
            raise ConfigError(
                "no secret: name at least one, or [''] where only this machine reaches the aggregator"
            )
        if not 0.1 <= lease_s <= 3600:
            raise ConfigError(f"lease_s={lease_s}: a silent rank is given up after 0.1 to 3600 s")
        self._plane, self._kind, self._parent = plane, kind, parent
        self._keys, self._lease_s = tuple(keys), lease_s
        self._logged: dict[str, float] = {}  # when a refusal was last logged, by reason
        self._allocator = SlotAllocator(plane.slots, jobs)
        self._version = _version()
        self._jobs: dict[tuple[int, str], Admission] = {}  # by number of the key, and name
        self._over: deque[tuple[float, EndedJob]] = deque(maxlen=REMEMBERED)
        self._refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._admitted = self._lost = 0
        self._connections: set[asyncio.Task[Any]] = set()
        self._errands: set[asyncio.Future[Any]] = set()  # to the parent
        self._strangers = NewestTasks(MOST_STRANGERS)
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
        self._notices = Notices(log)
        self._thread = threading.Thread(target=self._run, name="tacit control", daemon=True)
        self._thread.start()

    def status(self) -> AggregatorStatus:
        """All figures, now."""

        async def read() -> AggregatorStatus:
            return self._status()

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result()

    def close(self) -> None:
        """Returns when the ports are free. Again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._notices.close()

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
        servers = [await asyncio.start_server(self._attend, sock=self._socket, limit=MOST_REQUEST_NBYTES)]
        if self._metrics_socket:
            servers.append(await serve_metrics(self._metrics_socket, self._status))
        await self._stop.wait()
        for server in servers:
            server.close()
        for job in list(self._jobs.values()):
            self._end(job, "the aggregator was stopped")
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)
        if self._errands:
            await asyncio.wait(self._errands, timeout=1.0)
        await cancel_other_tasks()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        if len(self._connections) >= MOST_CONNECTIONS:
            self._refused["busy"] += 1
            writer.transport.abort()
            return
        connection = ControlConnection(reader, writer)
        self._connections.add(task)
        self._strangers.add(task)
        try:
            try:
                await self._answer(connection, task)
            except Refusal as refusal:
                connection.dismiss(refusal=refusal)
                self._refuse(refusal, connection.host)
            await connection.wait_for_end()
        except (OSError, ForgedError, asyncio.CancelledError):
            pass  # it hung up, or is cut off: it knows
        finally:
            writer.transport.abort()
            self._strangers.discard(task)
            self._connections.discard(task)

    async def _answer(self, connection: ControlConnection, task: asyncio.Task[Any]) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                key, wish = await connection.prove(self._keys)
        except TimeoutError:
            raise Refusal("silent", f"nothing was asked for within {GREETING_S:g} s") from None
        self._strangers.discard(task)
        if wish.get("say") == "join":
            await self._keep(connection, key, wish)
        elif wish.get("say") == "status":
            await self._report(connection)
        else:
            raise Refusal("malformed", f"control has no answer to {wish.get('say')!r:.40}", config=True)

    def _refuse(self, refusal: Refusal, host: str) -> None:
        """Counts it; logs it unless one for the same reason was just logged, lest strangers fill a disk."""
        self._refused[refusal.reason] += 1
        now_s = self._loop.time()
        if now_s - self._logged.get(refusal.reason, -QUIET_S) >= QUIET_S:
            self._logged[refusal.reason] = now_s
            self._notices.add(f"refused {host}: {refusal}")

    async def _report(self, connection: ControlConnection) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S) as clock:
                while True:
                    connection.send(self._status().as_dict())
                    await connection.receive()
                    clock.reschedule(self._loop.time() + IDLE_S)

    # ---- a rank, from its first message to its last ----

    async def _keep(self, connection: ControlConnection, key: int, wish: Message) -> None:
        terms, rank, address, patience_s, ranks = _wish(wish, connection.host)
        job = self._admit(key, terms, rank, address)
        left, why = False, "its connection closed without a message"
        try:
            async with asyncio.timeout(patience_s) as clock:
                job.members[rank] = member = Member(rank, address, connection, clock, ranks)
                job.addresses[rank] = address
                if not job.absent:
                    self._start(job)
                while not left:
                    left = self._received(job, member, await connection.receive())
        except TimeoutError:
            why = f"it was silent for {self._lease_s:g} s"
            if job.id is None and not job.over:
                refusal = self._late(job, patience_s)
                self._gone(job, rank, left, why)
                raise refusal from None
        except FailedError as failure:
            why = str(failure)
        except ForgedError:
            why = "it sent a line that it cannot have meant"
        finally:
            self._gone(job, rank, left, why)

    def _late(self, job: Admission, patience_s: float) -> Refusal:
        if not job.absent:
            return Refusal(
                "parent", f"the aggregator above, at {job.parent}, did not grant job {job.name!r} in time"
            )
        has = "has" if len(job.absent) == 1 else "have"
        whole = size_text(job.terms.world, job.terms.shards) if job.terms.shards else job.terms.world
        return Refusal(
            "late",
            f"{job.text_of(*job.absent)} of {whole} {has} not joined job {job.name!r} within {patience_s:.3g} s; "
            "are they started, and do they ask for the same name?",
        )

    def _admit(self, key: int, terms: Terms, rank: int, address: Address) -> Admission:
        now_s = self._loop.time()
        if job := self._jobs.get((key, terms.name)):
            job.check(terms, rank, address, now_s)
            return job
        if self._parent and terms.quorum:
            why = f"quorum={terms.quorum}: this aggregator has another above it, and then sums are of all ranks; leave the quorum out"
            raise Refusal("terms", why, config=True)
        if self._parent and terms.shards:
            why = f"shards={terms.shards}: rows go through one aggregator, and this one has another above it; let the shards be on the ranks"
            raise Refusal("terms", why, config=True)
        slots = self._allocator.take(terms.slots) if len(self._jobs) < MOST_JOBS else None
        if slots is None:
            why = f"all {self._allocator.slots} slots are in use by {len(self._jobs)} jobs; wait for one to end, or start the aggregator with more --slots or --jobs"
            raise Refusal("full", why)
        job = self._jobs[key, terms.name] = Admission(key, terms, slots, now_s)
        return job

    def _start(self, job: Admission) -> None:
        """All are there: with a parent, it is asked first."""
        if self._parent:
            job.rises += 1
            self._run_errand(self._rise(job, self._parent))
        else:
            self._grant(job)

    async def _rise(self, job: Admission, parent: Parent) -> None:
        """Joins the job of the parent, and then grants ours; all of it in vain if one of our ranks goes meanwhile."""
        turn, now_s = job.rises, self._loop.time()
        ends_s = [when for member in job.members.values() if (when := member.clock.when()) is not None]
        for member in job.members.values():  # the parent's report of who is late comes first
            member.wind((member.clock.when() or now_s) + GRACE_S)

        def wanted() -> bool:
            return not job.over and not job.absent and job.rises == turn

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # we are closing: the job ends anyway
                self._loop.call_soon_threadsafe(self._check_parent, job)

        job.parent = str(parent)
        membership, error = None, None
        try:
            membership = await parent.join(
                self._keys[job.key],
                job.terms,
                self._plane.address,
                job.below,
                timeout_s=max(0.0, min(ends_s, default=now_s) - now_s),
                wanted=wanted,
                changed=changed,
            )
        except TacitError as cause:
            error = cause
        if not wanted():
            if membership:
                self._part(membership, f"a rank of rack {parent.rack} went before job {job.name!r} began")
        elif membership:
            job.above = membership
            if len(membership.job.slots) < len(job.slots):
                job.slots = self._allocator.shorten(job.slots, len(membership.job.slots))
            self._grant(job)
            self._check_parent(job)
        else:
            why = f"above, at {parent}: {error}"
            refusal = Refusal("parent", why, config=isinstance(error, ConfigError))
            self._end(job, why, refusal=refusal)
            self._refuse(refusal, "all its ranks")

    def _check_parent(self, job: Admission) -> None:
        """What is over there is over here."""
        if job.above and not job.above.alive and not job.over:
            self._end(job, job.above.why)

    def _part(self, membership: Membership, failure: str = "") -> None:
        """Gives up our place above, without waiting for it here."""
        self._run_errand(asyncio.to_thread(membership.leave, failure))

    def _run_errand(self, errand: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _grant(self, job: Admission) -> None:
        """The plane gets the job, the ranks their grants."""
        used = {other.id for other in self._jobs.values()}
        # counting on, so that packets of a job that is over do not meet the next one
        id = next(
            n % MOST_JOBS
            for n in range(self._admitted, self._admitted + MOST_JOBS)
            if n % MOST_JOBS not in used
        )
        cookie = secrets.randbits(64)
        members = tuple(job.addresses[rank] for rank in range(job.terms.members))
        try:
            own = job.terms.granted(id, cookie, members, job.slots, job.below)
            self._plane.add_job(replace(own, upstream=_upstream(job.above)))
        except ConfigError as cause:
            refusal = Refusal("plane", str(cause), config=True)
            self._end(job, str(cause), refusal=refusal)
            self._refuse(refusal, "all its ranks")
            return
        job.id, job.since_s = id, self._loop.time()
        self._admitted += 1
        grant = {"say": "granted", "id": id, "members": members, "slots": [job.slots.start, len(job.slots)]}
        grant |= {"plane": self._plane.address, "plane_kind": self._kind}
        grant |= {"lease_s": self._lease_s, "ranks": job.ranks}
        grant |= {"rows": not job.above and not job.terms.relayed}  # whether they reach all of its ranks
        for member in job.members.values():
            member.connection.send(grant | {"cookie": member.connection.masked(cookie)})
            member.wind(job.since_s + self._lease_s)
        whole = size_text(job.terms.world, job.terms.shards, job.noun)
        self._notices.add(f"job {job.name!r} runs: {whole}, {len(job.slots)} slots")

    def _received(self, job: Admission, member: Member, message: Message) -> bool:
        """Answers a message; whether it was the rank's last."""
        if job.id is None or job.over:
            return message.get("say") in ("leave", "fail")
        member.wind(self._loop.time() + self._lease_s)
        if message.get("say") == "missing":
            self._report_missing(job, member, message.get("number"))
        elif message.get("say") == "fail":
            why = str(message.get("why"))[:MOST_WHY]
            raise FailedError(why if why.isprintable() else "it says that it cannot go on")
        elif message.get("say") == "keep":
            member.connection.send({"say": "keep"})
        return message.get("say") == "leave"

    def _report_missing(self, job: Admission, member: Member, number: object) -> None:
        assert job.id is not None
        stats = self._plane.stats(job.id)
        missing = {rank: own.missing for rank, own in enumerate(stats.ranks) if own.missing}
        answer = {"say": "missing", "number": number, "ranks": missing}
        if job.above and stats.above:
            self._run_errand(self._ask_parent(job.above, member, answer))
        else:
            member.connection.send(answer)

    async def _ask_parent(self, above: Membership, member: Member, answer: Message) -> None:
        racks: dict[int, int] = {}
        with contextlib.suppress(TransportError):  # it ends the job if it is gone
            racks = await asyncio.to_thread(above.missing, GRACE_S / 2)
        member.connection.send(answer | {"racks": racks})

    def _gone(self, job: Admission, rank: int, left: bool, why: str) -> None:
        """A rank has gone: the others are notified, and where they cannot go on the job is over."""
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
            member.connection.send({"say": "gone", "lost": job.lost, "left": job.left})
        if job.broken:
            self._end(
                job,
                f"{job.text_of(*job.lost)} of job {job.name!r} {'is' if len(job.lost) == 1 else 'are'} lost: {why}",
            )
        elif not job.present:
            self._end(job, "all ranks have left")

    def _end(self, job: Admission, why: str, refusal: Refusal | None = None) -> None:
        """The job is over: its slots are free, and the ranks still connected are notified."""
        job.over = True
        del self._jobs[job.key, job.name]
        self._allocator.give_back(job.slots)
        now_s, chunks = self._loop.time(), 0
        if job.id is not None:
            chunks = self._plane.stats(job.id).counts["completed"]
            self._plane.remove_job(job.id)
        well = job.id is not None and not job.present and not job.lost
        if job.above:
            self._part(job.above, "" if well else why)
        self._over.appendleft((now_s, EndedJob(job.name, why, well, 0.0, now_s - job.since_s, chunks)))
        for member in job.members.values():
            last = None if refusal else {"say": "ended", "why": why, "well": well}
            member.connection.dismiss(last, refusal=refusal)
            member.wind(now_s + PARTING_S)
        self._notices.add(
            f"job {job.name!r} is over after {now_s - job.since_s:.1f} s and {chunks} chunks: {why}"
        )

    def _status(self) -> AggregatorStatus:
        now_s = self._loop.time()
        jobs = sorted(self._jobs.values(), key=lambda job: (job.name, job.key))
        return AggregatorStatus(
            version=self._version,
            plane=self._kind,
            address=self._plane.address,
            time_s=now_s,
            up_s=now_s - self._started_s,
            lease_s=self._lease_s,
            slots=self._allocator.slots,
            free_slots=self._allocator.free,
            share=self._allocator.share,
            counts=dict(self._plane.counts()),
            sockets=dict(self._plane.sockets()),
            refused=dict(self._refused),
            admitted=self._admitted,
            lost_ranks=self._lost,
            jobs=tuple(
                job.status(None if job.id is None else self._plane.stats(job.id), now_s) for job in jobs
            ),
            ended=tuple(replace(job, ago_s=now_s - at_s) for at_s, job in self._over),
            lost_notices=self._notices.lost,
        )


def _wish(wish: Message, host: str) -> tuple[Terms, int, Address, float, int]:
    """What a rank asks for: terms, its number, its UDP address, how long it will wait for the others, and how many it stands for."""
    try:
        terms = Terms.of(wish.get("terms"))
    except ConfigError as cause:
        raise Refusal("terms", str(cause), config=True) from None
    rank, port, patience_s = wish.get("rank"), wish.get("port"), wish.get("patience_s")
    if (
        type(rank) is not int
        or not 0 <= rank < terms.members
        or type(port) is not int
        or not 1 <= port <= 65535
    ):
        noun = "members" if terms.shards else "ranks"
        why = f"rank={rank!r:.20}, port={port!r:.20}: job {terms.name!r} has {noun} 0 to {terms.members - 1}, and a port is from 1 to 65535"
        raise Refusal("terms", why, config=True)
    if not isinstance(patience_s, int | float) or not patience_s >= 0:
        raise Refusal(
            "terms", f"patience_s={patience_s!r:.20}: seconds to wait for the other ranks", config=True
        )
    ranks = wish.get("ranks", 1)
    if type(ranks) is not int or not 1 <= ranks <= (MOST_COUNTED if terms.relayed else 1):
        why = f"ranks={ranks!r:.20}: a rank stands for itself, an aggregator for 1 to {MOST_COUNTED}"
        raise Refusal("terms", why, config=True)
    return terms, rank, (host, port), min(float(patience_s), MOST_PATIENCE_S), ranks


def _upstream(above: Membership | None) -> Upstream | None:
    return Upstream(above.plane, above.job, above.rank, above.segment) if above else None


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
