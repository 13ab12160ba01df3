"""Real ranks for tests: processes that imported torch once, and run one function after another in a fresh process group.

    def body(rank, world): ...
    assert ranks.run(4, body) == [...]        # results in rank order

Functions are sent by module file and name, so a body must be a top-level function of a test file or of this folder.
"""

import contextlib
import importlib.util
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class Ranks:
    """A pool of rank processes, started when first needed and replaced when one of them has died."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(
        self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
    ) -> None:
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        self._folder = tempfile.TemporaryDirectory(
            prefix="tacit-test-"
        )  # the last one goes when the next one comes
        where = (function.__code__.co_filename, function.__qualname__)
        for rank in range(world):
            self._workers[rank][1].send(
                (where, args, rank, world, f"file://{self._folder.name}/store", timeout_s)
            )

    def process_id(self, rank: int) -> int:
        return int(self._workers[rank][0].pid)

    def result(self, rank: int) -> tuple[str, Any]:
        """One rank's ("ok", value), ("error", text) or ("died", exit code)."""
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(TIMEOUT_S * 2):
                found: tuple[str, Any] = pipe.recv()
                return found
            process.kill()
            process.join(10)
            return "error", "no answer in time"
        except EOFError:
            process.join(10)
            return "died", process.exitcode

    def results(self, world: int) -> list[tuple[str, Any]]:
        found = [self.result(rank) for rank in range(world)]
        self.forget_dead()
        return found

    def forget_dead(self) -> None:
        for process, _ in self._workers:
            if not process.is_alive():
                process.join()
        self._workers = [w for w in self._workers if w[0].is_alive()]

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        self.start(world, function, *args, timeout_s=timeout_s)
        found = self.results(world)
        errors = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(found) if kind != "ok"]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in found]

    def close(self) -> None:
        for process, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
        self._workers = []


def _serve(pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        where, args, rank, world, store, timeout_s = job
        torch.manual_seed(0)
        try:
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
            answer = ("ok", _load(where)(rank, world, *args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        pipe.send(answer)


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
