"""Where a rank stands: its number, the store in which ranks find one another, and the address at which others reach this one."""

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tacit.errors import ConfigError

START_S = 60.0  # for the first ranks to find one another, and the store


def rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- the store


def store_of(rank: int) -> Callable[[], Any]:
    """Opens a store of this attachment's alone: of the process group, of TACIT_STORE, or of torchrun's environment; and again, when lost.

    A process's first attachment in a process group meets the others' first, and so on: a rank that comes back must attach in the same
    order.
    """
    global _attached
    c10d: Any = dist  # it does not name its stores for type checkers
    group_store, named = _group_store(), os.environ.get("TACIT_STORE")
    _attached = (group_store, _attached[1] + 1 if _attached[0] is group_store else 1)
    host, port = _split(named) if named else _master()
    # torchrun starts all workers again when one has died; in a store that lives on, those are others.
    attempt = "" if named else os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    prefix = f"tacit/gossip/{attempt}/{_attached[1]}"
    hosted = not named and rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True"

    def opened() -> Any:
        nonlocal hosted
        if group_store is not None and not named:
            made = group_store.clone() if hasattr(group_store, "clone") else group_store
        else:
            master, hosted = hosted, False  # once: a lost line to it is not a lost store
            if not master:
                _await_port(host, port, START_S)
            patience = timedelta(seconds=START_S)
            made = c10d.TCPStore(host, port, is_master=master, timeout=patience, wait_for_workers=False)
            if master:
                _HOSTED.append(made)  # it serves the others for as long as the process lives
        return c10d.PrefixStore(prefix, made)

    return opened


_HOSTED: list[Any] = []
_attached: tuple[Any, int] = (None, 0)  # the process group's store, and how many attachments it has seen


def _group_store() -> Any:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _master() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"TACIT_STORE={address!r} is no address; write host:port, for example 10.0.0.1:29400"
        )
    return host.strip("[]"), int(port)


def _await_port(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there; torch's own client would say much about every attempt."""
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
class Door:
    """Where others call this rank, and where it listens for that."""

    known_as: str
    listens_at: str


def own_door() -> Door:
    """The address that leads to the store's host, unless TACIT_HOST says another.

    A name that means this machine here (Debian gives its own name to 127.0.1.1) means it elsewhere, too: it is passed on as it is, and any
    interface listens.
    """
    if named := os.environ.get("TACIT_HOST"):
        return Door(named, "")
    host = _store_host()
    try:
        own = _source_towards(host)
    except OSError:
        return Door("127.0.0.1", "127.0.0.1")
    if _is_loopback(own) and not _is_loopback(host):
        return Door(host, "")
    return Door(own, own)


def listening(door: Door) -> socket.socket:
    """A server of any port. Raises ConfigError where the address is not this machine's."""
    family = socket.AF_INET6 if ":" in door.listens_at else socket.AF_INET
    try:
        return socket.create_server((door.listens_at, 0), family=family)
    except OSError as cause:
        raise ConfigError(
            f"this rank cannot listen at {door.listens_at or 'any address'} ({cause}); name one of its own in TACIT_HOST"
        ) from cause


def _store_host() -> str:
    if named := os.environ.get("TACIT_STORE"):
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
