"""Where a rank stands: its number, the store in which ranks find one another, and the address at which others reach this one."""

import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tacit import environment
from tacit.authentication import MAKE_ONE, SECRET, is_loopback
from tacit.errors import ConfigError
from tacit.gossip.frames import close_in_children
from tacit.gossip.store import StoreClient, StoreServer

START_S = 60.0  # for the first ranks to find one another, and the store


def rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return environment.rank(), environment.world_size()


# ---- the store


def store_of(rank: int, secret: str) -> tuple[Callable[[], Any], str]:
    """Opens a store of this attachment's alone, and again when it is lost; and its prefix, which no other attachment has.

    It is at TACIT_STORE, in the process group, with torchrun's agent, or in rank 0's process, at MASTER_ADDR: our own (store.py), where it is not
    torch's already. A process's first attachment in a process group meets the others' first, and so on: a rank that comes back must
    attach in the same order.
    """
    global _attached
    c10d: Any = dist  # it does not name its stores for type checkers
    group_store, named = _group_store(), environment.store_address()
    _attached = (group_store, _attached[1] + 1 if _attached[0] is group_store else 1)
    host, port = _split(named) if named else _master()
    # torchrun starts all workers again when one has died; in a store that lives on, those are others.
    attempt = "" if named else environment.restart_count()
    prefix = f"tacit/gossip/{attempt}/{_attached[1]}"
    if group_store is not None and not named:
        return lambda: c10d.PrefixStore(
            prefix, group_store.clone() if hasattr(group_store, "clone") else group_store
        ), prefix
    if not named and environment.uses_agent_store():
        return lambda: c10d.PrefixStore(prefix, _agents_store(host, port)), prefix
    if not named and rank == 0 and (host, port) not in _HOSTED:
        # Where the name is this machine's, it may be another address here than elsewhere.
        _HOSTED[host, port] = StoreServer((host if is_loopback(host) or not secret else "", port), secret)
    return lambda: StoreClient(host, port, secret, prefix=f"{prefix}/", start_s=START_S), prefix


def _agents_store(host: str, port: int) -> Any:
    c10d: Any = dist
    _await_port(host, port, START_S)
    patience = timedelta(seconds=START_S)
    return c10d.TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)


_HOSTED: dict[tuple[str, int], StoreServer] = {}  # they serve the others for as long as the process lives
_attached: tuple[Any, int] = (None, 0)  # the process group's store, and how many attachments it has seen


def _group_store() -> Any:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _master() -> tuple[str, int]:
    return environment.master()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"TACIT_STORE={address!r} is no address; write host:port, for example 10.0.0.1:29400"
        )
    return host.strip("[]"), int(port)


def _await_port(host: str, port: int, seconds: float) -> None:
    """Waits until a server listens there; torch's own client would log every attempt."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # polled, within the deadline


# ---- the address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where others call this rank, and where it listens for that."""

    advertised_host: str
    listen_host: str


def own_endpoint(secret: str) -> Endpoint:
    """The address that leads to the store's host, unless TACIT_HOST names another. Without a secret it is loopback, or a ConfigError.

    A name that means this machine here (Debian gives its own name to 127.0.1.1) means it elsewhere, too: it is passed on as it is, and any
    interface listens.
    """
    named, host = environment.own_host(), _store_host()
    try:
        own = _source_towards(host)
    except OSError:
        own, host = "127.0.0.1", "127.0.0.1"
    if named:
        endpoint = Endpoint(named, named if is_loopback(named) else "")
    elif is_loopback(own) and not is_loopback(host):
        endpoint = Endpoint(host, "")
    else:
        endpoint = Endpoint(own, own)
    if secret or is_loopback(endpoint.advertised_host):
        return endpoint
    if named or not (_all_here() or _is_own(own, host)):
        raise ConfigError(
            f"this rank would have to be reachable at {endpoint.advertised_host}, and there is no secret to know its peers by; "
            f"set {SECRET} for all ranks and the store, one line: {MAKE_ONE}"
        )
    if not _all_here():
        warnings.warn(
            f"without {SECRET} this rank serves loopback only, and ranks of other machines cannot reach it; "
            f"for those, give all ranks a secret: {MAKE_ONE}",
            stacklevel=2,
        )
    return Endpoint("127.0.0.1", "127.0.0.1")


def _all_here() -> bool:
    """Whether torchrun has started all ranks on this machine."""
    return environment.all_ranks_here()


def _is_own(source: str, host: str) -> bool:
    """Whether `host`, to which this machine connects from `source`, is this machine."""
    with suppress(OSError):
        return is_loopback(source) or socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0] == source
    return False


def listening(endpoint: Endpoint) -> socket.socket:
    """A server of any port. Raises ConfigError where the address is not this machine's."""
    family = socket.AF_INET6 if ":" in endpoint.listen_host else socket.AF_INET
    try:
        server = socket.create_server((endpoint.listen_host, 0), family=family)
    except OSError as cause:
        raise ConfigError(
            f"this rank cannot listen at {endpoint.listen_host or 'any address'} ({cause}); name one of its own in TACIT_HOST"
        ) from cause
    close_in_children(server)
    return server


def _store_host() -> str:
    if named := environment.store_address():
        return _split(named)[0]
    store = _group_store()
    while store is not None:
        with suppress(AttributeError, RuntimeError):
            if host := str(store.host):
                return host
        store = getattr(store, "underlying_store", None)
    return _master()[0]


def _source_towards(host: str) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
