"""Real ranks for tests: fresh processes for every run, forked from one that has imported torch.

    def body(rank, world): ...
    assert ranks.run(4, body) == [...]        # results in rank order

Functions are sent by module file and name, so a body must be a top-level function of a test file or of this folder.
"""

import contextlib
import copy
import faulthandler
import importlib.util
import io
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from forked import server

TIMEOUT_S = 120


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class Ranks:
    """Runs functions on ranks that live for one run: nothing a test leaves behind (threads, groups, caches) meets the next."""

    def __init__(self) -> None:
        self._context = server()
        self._workers: list[tuple[Any, Any]] = []
        self._known: dict[Any, list[Any]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(
        self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="tacit-test-")
        store = f"file://{self._folder.name}/store"
        where = (function.__code__.co_filename, function.__qualname__)
        for rank in range(world):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            here.send((where, args, rank, world, store, timeout_s, f"{self._folder.name}/stacks-{rank}"))
            self._workers.append((process, here))

    def process_id(self, rank: int) -> int:
        return int(self._workers[rank][0].pid)

    def result(self, rank: int) -> tuple[str, Any]:
        """One rank's ("ok", value), ("error", text) or ("died", exit code)."""
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(TIMEOUT_S * 2):
                found: tuple[str, Any] = pipe.recv()
                return found
            return "error", f"no answer in time; its threads are in\n{self._stacks(rank)}"
        except EOFError:
            process.join(10)
            return "died", process.exitcode

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank that does not answer are."""
        assert self._folder is not None
        os.kill(self.process_id(rank), signal.SIGUSR1)
        time.sleep(1.0)
        return Path(self._folder.name, f"stacks-{rank}").read_text()

    def results(self, world: int) -> list[tuple[str, Any]]:
        found = [self.result(rank) for rank in range(world)]
        self.close()
        return found

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        self.start(world, function, *args, timeout_s=timeout_s)
        found = self.results(world)
        errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(found) if kind != "ok"]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in found]

    def known(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As run(), but run once, and copied: for a reference that several tests compare with."""
        key = world, function.__code__.co_filename, function.__qualname__, args
        if key not in self._known:
            self._known[key] = self.run(world, function, *args)
        return copy.deepcopy(self._known[key])  # ranks that are given its tensors write to the same memory

    def close(self) -> None:
        """Ends all ranks, whatever they do."""
        for process, _ in self._workers:
            process.kill()
        for process, pipe in self._workers:
            process.join()
            pipe.close()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def printed(rank: int, world: int, script: str, words: Sequence[str], port: int) -> str:
    """What a file, or a module by its name, prints when it is started as torchrun would, but where torch is imported already."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    run = runpy.run_path if script.endswith(".py") else runpy.run_module
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}),
        mock.patch.object(sys, "argv", [script, *words]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        run(script, run_name="__main__")
    return out.getvalue()


def _serve(pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    where, args, rank, world, store, timeout_s, stacks = pipe.recv()
    faulthandler.register(signal.SIGUSR1, Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    try:
        function = _load(where)
        if function.__name__ != printed.__name__:  # which joins a group itself
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
            dist.barrier()  # nobody leaves while others still connect to it
        answer = ("ok", function(rank, world, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    with contextlib.suppress(Exception):
        dist.destroy_process_group()  # those who still wait for this rank hear at once that it has left
    pipe.send(answer)
    pipe.poll(None)  # tensors of the answer are this process's until they have been received


def _load(where: tuple[str, str]) -> Callable[..., Any]:
    path, name = where
    module_name = "ranks_" + Path(path).stem
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    function: Callable[..., Any] = getattr(sys.modules[module_name], name)
    return function
