"""Processes that start with torch imported: forked from a server that has imported it, which takes 30 ms instead of seconds.

    process = Forked(["-c", code, "word"], env=os.environ | {"RANK": "0"})     # as subprocess.Popen with pipes
    assert run(["-m", "tacit", "plan", "--json"]).returncode == 0              # as subprocess.run

Each is a process as any other, with its own memory, words, environment and output, and ends as an interpreter does.
"""

import contextlib
import ctypes
import multiprocessing as mp
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any
from unittest import mock

IMPORTED_ONCE = [  # seconds of every process otherwise; none of them starts a thread of torch
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "tacit.attachments.ddp",
    "tacit.attachments.fsdp",
    "tacit.attachments.merging",
    "tacit.attachments.plain",
    "tacit.schemes",
    "tacit.transports",
    "frozen",
]


def server() -> Any:
    """The multiprocessing context whose processes are forked from the server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    here = str(Path(__file__).parent)  # where "frozen" is found
    paths = [here, os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        forkserver.ensure_running()
    return context


class Forked:
    """A process that runs `words` as `python *words` would: "-c" and code, "-m" and a module, or a file. With pipes for what it prints."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        context = server()
        out, to_out = context.Pipe(duplex=False)
        err, to_err = context.Pipe(duplex=False)
        told = dict(os.environ if env is None else env)
        given = list(words), told, str(Path.cwd()), to_out, to_err
        self._process = context.Process(target=_become, args=given, daemon=True)  # it ends with the tests
        self._process.start()
        self.words, self.pid = list(words), int(self._process.pid)
        self.stdout, self.stderr = (_reader(pipe) for pipe in (out, err))
        to_out.close()
        to_err.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self.words, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it prints until it ends, on stdout and on stderr."""
        told: dict[int, str] = {}
        streams = (self.stdout, self.stderr)
        readers = [
            threading.Thread(
                target=lambda at=at, stream=stream: told.setdefault(at, stream.read()), daemon=True
            )
            for at, stream in enumerate(streams)
            if not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        for stream in streams:
            stream.close()
        return told.get(0, ""), told.get(1, "")

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def run(words: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120) -> Any:
    """What `words` came to: a CompletedProcess with all that was printed."""
    process = Forked(words, env)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return CompletedProcess(process.words, process.returncode, out, err)


def _reader(pipe: Any) -> Any:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), encoding="utf-8")


def _become(words: list[str], env: dict[str, str], folder: str, to_out: Any, to_err: Any) -> None:
    """Runs `words` in this process, and ends it as an interpreter ends: threads, exit handlers, finalization."""
    for pipe, number in ((to_out, 1), (to_err, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1, encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    mp.current_process().daemon = False  # it may have children
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    code = _exit_code(words)
    ctypes.pythonapi.Py_Exit(code)


def _exit_code(words: list[str]) -> int:
    """What an interpreter that runs `words` would end with."""
    kind, *rest = words
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
