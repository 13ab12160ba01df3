"""What asyncio servers for authenticated clients have in common: a limit on tasks that have proved nothing yet, and how they end."""

import asyncio
from typing import Any


class NewestTasks:
    """At most `most` tasks, the oldest first. One more, and the oldest is removed and cancelled."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        if len(self._tasks) > self._most:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]  # now, since the next one may come before it has ended
            oldest.cancel()

    def discard(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)


async def cancel_other_tasks() -> None:
    """Cancels all tasks of the running loop but this one, and returns when they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
