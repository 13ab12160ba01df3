"""Tasks of servers: the oldest makes way, and all end."""

import asyncio

from tacit.keyed_server import NewestTasks, cancel_other_tasks


def test_one_task_too_many_cancels_the_oldest_and_the_end_cancels_all() -> None:
    async def main() -> list[bool]:
        newest = NewestTasks(2)
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(4)]
        for task in tasks[:2]:
            newest.add(task)
        newest.discard(tasks[0])  # has authenticated: it no longer counts
        for task in tasks[2:]:
            newest.add(task)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cut_off = [task.cancelled() for task in tasks]
        await cancel_other_tasks()
        assert all(task.cancelled() for task in tasks)
        return cut_off

    assert asyncio.run(main()) == [False, True, False, False]
