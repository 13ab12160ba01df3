"""The process that holds a lab: while it lives, the namespaces do; when it ends, the kernel takes all of it back.

    caller -- Popen --> watcher -- fork --> init, process 1 of a PID namespace: builds, then answers over `connection`

- the caller leaves its `with`: the connection closes, init ends, the kernel ends every process in the lab;
- the caller is killed: the watcher sees it (a pidfd, so threads do not matter), ends, and init is killed with it;
- the watcher is killed: init is killed with it (PR_SET_PDEATHSIG).

The namespaces have no name outside the lab's own mount namespace, so there is nothing to clean up.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from tacit.errors import TacitError
from tacit.lab.errors import LabError, NoNamespacesError
from tacit.lab.network import lab_list, namespaces
from tacit.lab.network.plan import NetworkPlan

How = Literal["root", "user"]


@dataclass(frozen=True, slots=True)
class KeeperSpec:
    """What the caller asks of a new keeper; the plan follows over the connection, for init alone."""

    connection: int  # a file descriptor
    parent: int
    how: How | None  # None: without a user namespace if allowed, with one otherwise
    folder: str  # where running labs are listed
    network: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The watcher's answer: `init` is process 1 of the lab, as seen from outside."""

    how: How
    init: int


def main() -> None:
    """Takes an `KeeperSpec` as JSON from the command line, and stays."""
    spec = KeeperSpec(**json.loads(sys.argv[1]))
    os.set_inheritable(spec.connection, False)
    connection: Connection = Connection(spec.connection)
    parent = os.pidfd_open(spec.parent)
    if os.getppid() != spec.parent:
        sys.exit("the caller has gone")
    try:
        how = _leave(spec.how)
    except OSError as cause:
        connection.send(NoNamespacesError(_refusal(cause)))
        return
    wait, go = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(parent)
        os.close(go)
        _init(connection, wait)
    os.close(wait)
    _watch(connection, spec, Ready(how, init), parent, go)


def _leave(how: How | None) -> How:
    """This process's next child will be in a PID namespace of its own, and may make the others."""
    if how != "user":
        try:
            namespaces.check_root()
            namespaces.unshare(namespaces.NEWPID)
            return "root"
        except OSError as cause:
            if cause.errno not in (errno.EPERM, errno.EACCES) or how == "root":
                raise
    uid, gid = os.geteuid(), os.getegid()
    namespaces.unshare(namespaces.NEWUSER | namespaces.NEWPID)
    namespaces.be_seen()
    namespaces.map_to_root(uid, gid)
    return "user"


def _refusal(cause: OSError) -> str:
    why = (
        "user.max_user_namespaces is reached"
        if cause.errno == errno.ENOSPC
        else os.strerror(cause.errno or 0)
    )
    return (
        f"no network can be built here: this user may not make namespaces ({why}); "
        f"be root, or allow user namespaces as `tacit lab check` tells"
    )


# ---- the watcher ----


def _watch(connection: Connection, spec: KeeperSpec, ready: Ready, parent: int, go: int) -> None:
    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    child, listed = os.pidfd_open(ready.init), None
    signal.signal(signal.SIGTERM, leave)
    try:
        if spec.hosts:
            listed = lab_list.add(_note(spec, ready), Path(spec.folder))
        with suppress(OSError):  # the caller may have gone
            connection.send(ready)
        connection.close()
        os.write(go, b"1")  # from here on the connection is init's
        os.close(go)
        poll = select.poll()
        for fd in (child, parent):
            poll.register(fd, select.POLLIN)
        poll.poll()
    finally:
        with suppress(ProcessLookupError):
            os.kill(ready.init, signal.SIGKILL)
        os.waitpid(ready.init, 0)  # returns when every process of the PID namespace has ended
        if listed is not None:
            listed.unlink(missing_ok=True)


def _note(spec: KeeperSpec, ready: Ready) -> lab_list.LabEntry:
    return lab_list.LabEntry(
        pid=os.getpid(),
        init=ready.init,
        parent=spec.parent,
        how=ready.how,
        network=spec.network,
        hosts=tuple(spec.hosts),
    )


# ---- process 1 of the lab ----


def _init(connection: Connection, wait: int) -> NoReturn:
    code = 1
    try:
        namespaces.die_with_parent()
        if not os.read(wait, 1):
            os._exit(0)  # the watcher ended before it could watch
        namespaces.be_seen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the lab are reaped at once
        _serve(connection)
        code = 0
    except EOFError:
        code = 0
    finally:
        os._exit(code)


def _serve(connection: Connection) -> None:
    """Builds the plan that it receives first, then serves requests; without a plan it reports what the kernel can do."""
    plan: NetworkPlan | None = connection.recv()
    try:
        namespaces.unshare(namespaces.NEWNS | namespaces.NEWNET)
        namespaces.own_mounts()
        from tacit.lab.network.wiring import Wiring, features

        if plan is None:
            connection.send(features())
            return
        wiring = Wiring()
        wiring.build(plan)
    except Exception as cause:
        connection.send(_renamed(cause))
        return
    connection.send("built")
    while True:
        verb, *args = connection.recv()
        answer: Any
        try:
            answer = getattr(wiring, verb)(*args)
        except Exception as cause:
            answer = _renamed(cause)
        connection.send(answer)


def _renamed(cause: Exception) -> TacitError:
    if isinstance(cause, TacitError):
        return cause
    if isinstance(cause, PermissionError) or getattr(cause, "code", None) == errno.EPERM:
        return NoNamespacesError(_refusal(OSError(errno.EPERM, "")))
    return LabError(f"the lab could not be built: {type(cause).__name__}: {cause}")
