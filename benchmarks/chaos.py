"""Ranks that gossip, disturbed: one is killed, another's link is cut, the first comes back; what must hold, held against what they wrote.

    make chaos                          # or: python benchmarks/chaos.py --seeds 0..2 --cut 20 --json

Four ranks on a star of the lab train Fashion-MNIST, each at its own pace. The store lives in the switch: neither the kill nor the cut ends it,
but the rank that is cut off is cut off from it too. The seed chooses who is killed (SIGKILL) and when, how long it stays away, whose
link goes down and when. The same training without any of it comes first; `chaos_promises.py` says what must hold.

The deadline: training never waits for a peer, the store or the network, only for a lock that is held while a few vectors are added, so a pause
of more than `--deadline` is a broken promise. On a machine with fewer cores than processes the kernel makes everybody wait; that counts
as a pause too, and is told in brackets: for how long of it the training thread wanted a core and had none.
"""

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chaos_promises import Life, Line, Run, broken

from tacit import lab
from tacit.authentication import SECRET
from tacit.demo.facts import FASHION_MNIST
from tacit.lab.network.lab import Host, Lab
from tacit.records import host_facts
from tacit.topology import star

WORLD, PORT = 4, 29400
NODE = Path(__file__).with_name("chaos_node.py")
LIMIT_S = 600.0  # for a run to come to its end, more than its steps take
STRATEGY = "adaptive / hush / gossip"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to whom. Steps are the victims' own."""

    killed: int
    kill_at: int
    away_s: float
    cut: int
    cut_at: int
    cut_s: float

    @classmethod
    def of(cls, seed: int, steps: int, pace_s: float, cut_s: float) -> "Plan":
        rng = random.Random(seed)
        killed, cut = rng.sample(range(WORLD), 2)
        return cls(
            killed, round(rng.uniform(0.05, 0.5) * steps), rng.uniform(0.01, 0.15) * steps * pace_s,
            cut, round(rng.uniform(0.05, 0.25) * steps), cut_s,
        )  # fmt: skip


class Rank:
    """One life of one rank: a process on its host, and what it has written so far."""

    def __init__(self, built: Lab, folder: Path, rank: int, life: int, order: Line, secret: str) -> None:
        self.rank, self.life, self.killed = rank, life, False
        self._book, self._log = folder / f"{rank}-{life}.jsonl", folder / f"{rank}-{life}.log"
        env = {
            "RANK": rank, "WORLD_SIZE": WORLD, "OMP_NUM_THREADS": 1, "TACIT_STORE": f"{built.switches[0].address}:{PORT}",
        }  # fmt: skip
        order = {
            **order,
            "life": life,
            "book": str(self._book),
            "records": str(folder / f"{rank}-{life}.records"),
        }
        words = [
            "env",
            *(f"{k}={v}" for k, v in env.items()),
            sys.executable,
            str(NODE),
            "rank",
            json.dumps(order),
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*built.prefix(built.hosts[rank].name), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {SECRET: secret},  # not among the words, which others can read
            )
        self._read, self._lines = 0, list[Line]()

    def lines(self) -> list[Line]:
        """What it has written so far; half a line is not read yet."""
        if self._book.exists():
            with self._book.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self._lines.append(json.loads(line))
        return self._lines

    def as_life(self) -> Life:
        return Life(self.rank, self.life, self.lines(), self.killed)

    def ready(self) -> bool:
        return bool(self.lines()) or self.process.poll() is not None

    def go(self) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self._log.read_text()[-2000:]


class Switch:
    """The store, and the links."""

    def __init__(self, built: Lab, process: subprocess.Popen[str]) -> None:
        self._process = process
        name = built.switches[0].name
        self._ports = {cable.a.node: cable.b.device for cable in built.plan.cables if cable.b.node == name}
        self._hear("ready")

    def set(self, host: str, state: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"device": self._ports[host], "state": state}) + "\n")
        self._process.stdin.flush()
        self._hear("done")

    def _hear(self, wanted: str) -> None:
        assert self._process.stdout
        if self._process.stdout.readline().strip() != wanted:
            sys.exit("the switch's process has ended")


@contextmanager
def _switch(built: Lab, secret: str) -> Iterator[Switch]:
    node = built.switches[0]
    order = json.dumps({"address": node.address, "port": PORT})
    process = subprocess.Popen(
        [*built.prefix(node.name), sys.executable, str(NODE), "switch", order],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {SECRET: secret},
    )  # fmt: skip
    try:
        yield Switch(built, process)
    finally:
        process.kill()
        process.communicate()


# ---- one run


def run(order: Line, plan: Plan | None, folder: Path, tell: Tell, *, unprivileged: bool = False) -> Run:
    """Four ranks to their end, disturbed as `plan` says; all processes and the network are gone when it returns."""
    network = star(WORLD, rate_bps=50e6, latency_s=0.0)
    folder.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_hex(32)  # of this run; ranks and store prove it to each other
    with ExitStack() as stack:
        built = stack.enter_context(lab.up(network, how="user" if unprivileged else None))
        switch = stack.enter_context(_switch(built, secret))
        ranks: list[Rank] = []
        stack.callback(lambda: [rank.kill() for rank in ranks if rank.process.poll() is None])
        ranks += [Rank(built, folder, rank, 1, order, secret) for rank in range(WORLD)]
        spare = [Rank(built, folder, plan.killed, 2, order, secret)] if plan else []
        stack.callback(lambda: [rank.kill() for rank in spare])
        _all_go(ranks, spare)
        disturbance = _disturb(switch, built.hosts, ranks, spare, plan, tell)
        cut_s = _until_all_end(ranks, disturbance, order, tell)
        lives = [rank.as_life() for rank in ranks]
    return Run(lives, order["steps"], WORLD, plan.cut if plan and cut_s else None, cut_s or (0.0, 0.0))


Cut = tuple[float, float]


def _all_go(ranks: Sequence[Rank], spare: Sequence[Rank]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(rank.ready() for rank in (*ranks, *spare)):
        if time.monotonic() > deadline:
            sys.exit(f"the ranks did not start within {LIMIT_S:g} s")
        time.sleep(0.02)  # polled, within the deadline
    for rank in ranks:
        rank.go()


def _disturb(
    switch: Switch, hosts: Sequence[Host], ranks: list[Rank], spare: list[Rank], plan: Plan | None, tell: Tell
) -> Iterator[Cut | None]:
    """A step at a time: looks how far the ranks are, and does what is due. Gives the cut's times when all is done."""
    if plan is None:
        yield (0.0, 0.0)
        return
    victim, host = ranks[plan.killed], hosts[plan.cut].name
    down_s = up_s = back_s = 0.0
    again = False
    while not (again and up_s):
        now = time.monotonic()
        if not victim.killed and victim.as_life().step >= plan.kill_at:
            time.sleep(random.Random(plan.kill_at).random() * 0.1)  # anywhere between two lines of its book
            victim.kill()
            back_s = time.monotonic() + plan.away_s
            tell(f"rank {plan.killed} killed after step {victim.as_life().step}")
        if victim.killed and not again and now >= back_s > 0:
            ranks.append(spare.pop())
            ranks[-1].go()
            again = True
            tell(f"rank {plan.killed} started again")
        if not down_s and ranks[plan.cut].as_life().step >= plan.cut_at:
            switch.set(host, "down")
            down_s = time.monotonic()
            tell(f"rank {plan.cut} cut off after step {ranks[plan.cut].as_life().step}")
        if down_s and not up_s and now >= down_s + plan.cut_s:
            up_s = time.monotonic()
            switch.set(host, "up")
            tell(f"rank {plan.cut} linked again, at step {ranks[plan.cut].as_life().step}")
        yield None
    yield (down_s, up_s)


def _until_all_end(
    ranks: list[Rank], disturbance: Iterator[Cut | None], order: Line, tell: Tell
) -> Cut | None:
    deadline = time.monotonic() + LIMIT_S + 4 * order["steps"] * order["pace_s"]
    cut: Cut | None = None
    while time.monotonic() < deadline:
        cut = next(disturbance, cut) or cut
        alive = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if not rank.killed and rank.process.poll() not in (None, 0)]
        for rank in failed:
            tell(f"rank {rank.rank}, life {rank.life}, failed:\n{rank.said()}")
        if failed or (not alive and cut is not None):
            break
        time.sleep(0.02)  # polled, within the deadline
    else:
        where = ", ".join(f"rank {rank.rank} at step {rank.as_life().step}" for rank in ranks)
        tell(f"not all came to their end in time: {where}")
    return cut


# ---- seeds, and what is said


def one_seed(seed: int, args: argparse.Namespace, folder: Path, tell: Tell) -> Line:
    """The undisturbed run, the disturbed one, and the sentences about promises that were not kept."""
    order = {
        "task": args.task, "strategy": args.strategy, "seed": seed, "steps": args.steps, "pace_s": args.pace / 1e3,
    }  # fmt: skip
    plan = Plan.of(seed, args.steps, args.pace / 1e3, args.cut)
    calm, sentences = None, list[str]()
    if not args.no_baseline:
        tell(f"seed {seed}: undisturbed")
        calm = run(order, None, folder / f"{seed}-calm", tell, unprivileged=args.unprivileged)
        sentences += [f"undisturbed: {s}" for s in broken(calm, deadline_s=args.deadline)]
    tell(f"seed {seed}: disturbed")
    wild = run(order, plan, folder / f"{seed}", tell, unprivileged=args.unprivileged)
    sentences += broken(wild, deadline_s=args.deadline, undisturbed=calm.accuracy if calm else None)
    pause = wild.longest_pause
    both = [sides for sides in wild.meetings.values() if len(sides) == 2]
    back = next(
        (life.of("began")[0]["step"] for life in wild.lives if life.life > 1 and life.of("began")), None
    )
    return {
        "benchmark": "chaos", "seed": seed, "task": args.task, "strategy": args.strategy, "steps": args.steps,
        "killed": plan.killed, "killed_at": next((x.step for x in wild.lives if x.killed), None), "back_at": back,
        "cut": plan.cut, "cut_at": plan.cut_at, "cut_s": round(wild.cut_s[1] - wild.cut_s[0], 2),
        "steps_while_cut": [wild.steps_while_cut(life) for life in wild.lives if life.life == 1],
        "longest_pause_s": round(pause["longest_s"], 3), "of_which_for_want_of_a_core_s": round(pause["kept_s"], 3),
        "longest_pause_at": [pause["rank"], pause["first"], pause["last"]],
        "deadline_s": args.deadline, "meetings": len(both), "one_sided": len(wild.meetings) - len(both),
        "lost": wild.lost, "undisturbed_accuracy": calm.accuracy if calm else None,
        "undisturbed_pause_s": round(calm.longest_pause["longest_s"], 3) if calm else None,
        "accuracy": wild.accuracy, "broken": sentences, "host": host_facts(),
    }  # fmt: skip


def row(found: Line) -> str:
    percent = [
        "-" if x is None else f"{100 * x:.2f}" for x in (found["undisturbed_accuracy"], found["accuracy"])
    ]
    killed = f"{found['killed']}: {found['killed_at']}-{found['back_at']}"
    cut = f"{found['cut']}: {found['cut_at']}, {found['cut_s']:g} s"
    pause = f"{found['longest_pause_s']:.3f} ({found['of_which_for_want_of_a_core_s']:.3f})"
    return (
        f"{found['seed']:>4}  {killed:<14}{cut:<18}{found['meetings']:>8}{found['one_sided']:>10}{pause:>20}"
        f"{found['lost']:>10.1e}{percent[0]:>12}{percent[1]:>10}  {'BROKEN' if found['broken'] else 'kept'}"
    )


HEAD = (
    f"{'seed':>4}  {'killed: steps':<14}{'cut: step':<18}{'meetings':>8}{'one-sided':>10}{'pause s (of a core)':>20}"
    f"{'lost':>10}{'undisturbed':>12}{'accuracy':>10}  promises"
)


def seeds_of(text: str) -> list[int]:
    """`3`, `0..9` or `1,4,7`."""
    first, dots, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if dots else [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=seeds_of, default=list(range(10)), help="0..9, 3 or 1,4 (0..9)")
    parser.add_argument("--steps", type=int, default=8000, help="of every rank (8000)")
    parser.add_argument("--pace", type=float, default=4.0, help="milliseconds that a step takes at least (4)")
    parser.add_argument("--cut", type=float, default=20.0, help="seconds for which a link is down (20)")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds that training may pause (1)")
    parser.add_argument("--strategy", default=STRATEGY, help=STRATEGY)
    parser.add_argument(
        "--task", default=None, help="of tacit.demo.tasks (fashion_mlp, or digits where its data is missing)"
    )
    parser.add_argument("--no-baseline", action="store_true", help="without the undisturbed run")
    parser.add_argument(
        "--unprivileged", action="store_true", help="in user namespaces, as for whoever is not root"
    )
    parser.add_argument("--keep", type=Path, help="a folder in which the ranks' books and logs stay")
    parser.add_argument("--json", action="store_true", help="one record a line")
    args = parser.parse_args()
    args.task = args.task or ("fashion_mlp" if Path(FASHION_MNIST).exists() else "digits")

    def tell(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    sentences: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tacit-chaos-") as scratch, suppress(BrokenPipeError):
        if not args.json:
            print(HEAD, flush=True)
        for seed in args.seeds:
            found = one_seed(seed, args, args.keep or Path(scratch), tell)
            print(json.dumps(found) if args.json else row(found), flush=True)
            sentences += [f"seed {seed}: {sentence}" for sentence in found["broken"]]
    if sentences:
        sys.exit("\n".join(sentences))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too, where a shell ignores the first
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; ranks and network are gone", file=sys.stderr)
        sys.exit(130)
