"""Run by the system's Python: the stages of a schedule between SimGrid's hosts, a barrier after each. Prints the seconds."""

import json
import sys

from simgrid import Actor, Barrier, Engine, Mailbox


def main() -> None:
    job = json.load(sys.stdin)
    engine = Engine(["check", "--log=root.threshold:critical", *job["options"]])
    engine.load_platform(job["platform"])
    barrier, ends = Barrier(job["hosts"]), []

    def rank(r: int) -> None:
        for times, transfers in job["stages"]:
            out = [(dst, nbytes) for src, dst, nbytes in transfers if src == r]
            into = [src for src, dst, _ in transfers if dst == r]
            for _ in range(times):
                # (comm, buffer): keep both
                gets = [Mailbox.by_name(f"{src}-{r}").get_async() for src in into]
                puts = [Mailbox.by_name(f"{r}-{dst}").put_async(b"", nbytes) for dst, nbytes in out]
                for comm in [*puts, *(comm for comm, _ in gets)]:
                    comm.wait()
                barrier.wait()
        ends.append(engine.clock)

    for r in range(job["hosts"]):
        Actor.create(f"r{r}", engine.host_by_name(f"h{r}"), rank, r)
    engine.run()
    print(json.dumps(max(ends)))


main()
