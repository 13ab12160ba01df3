"""Malformed files and texts: experiments, networks, strategies, own schedules. Each is read, or refused in one sentence."""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tacit.errors import TacitError
from tacit.lab.experiments import experiment
from tacit.schedules import build, own
from tacit.strategy import Strategy
from tacit.topology_files import parse_network

ROOT = Path(__file__).parents[2]
VALUES = [
    "", "0", "-1", "nan", "inf", "1e400", "10" * 20, "[]", "{}", "''", '"', "None", "true", "x" * 3000, "\x00", "\u202e", "\n", "(" * 150,
    "1e9", "3.5", "100Mbit", "1e400Mbit", "-5us", "nanus", "[[1, 2], 3]", "../../etc/passwd", "__import__('os')", "{'a': 1}",
]  # fmt: skip
STRATEGIES = [
    "every / int8(block=256) / sharded",
    "every / ef(int4(block=64), decay=0.9) / sharded",
    "diloco(64, rate=1, momentum=0.2, after=600) / hush / sharded",
    "sparseloco(4, after=400, first=hush) / ef(topk(share=0.25), decay=0.95)",
    "adaptive(0.05, follow=0, by=model) / hush / gossip(mode=push)",
    "every / thc(bits=4, granularity=30) / star(at='127.0.0.1:4800', mtu=1500, slots=64)",
    "every / bf16 / braid(levels='5/2 */7')",
]
NETWORKS = [
    "star(nodes=4, rate=100Mbit, latency=5us, mtu=9000, loss=0.01)",
    "two_racks(nodes=8, rate=10Gbit, uplink_rate=2.5Gbit)",
    "ring(nodes=3, rate=1Gbit)",
    "fat_tree(k=4, rate=10Gbit)",
]


def attack_experiment_files(seconds: float, seed: int) -> dict[str, int]:
    """Every experiment of this repository, damaged in one to four places."""
    files = [path.read_text() for path in sorted((ROOT / "experiments").glob("*.toml"))]
    return _attack_files("experiment.toml", files, experiment.read, seconds, seed)


def attack_own_schedules(seconds: float, seed: int) -> dict[str, int]:
    """Schedules as JSON, damaged; what is still one is verified as any other."""
    texts = [json.dumps(own.to_data(build(name, 4))) for name in ("ring", "tree", "recursive_doubling")]
    return _attack_files("schedule.json", texts, own.load, seconds, seed)


def attack_strategy_texts(seconds: float, seed: int) -> dict[str, int]:
    return _attack(STRATEGIES, Strategy.parse, seconds, seed)


def attack_network_texts(seconds: float, seed: int) -> dict[str, int]:
    return _attack(NETWORKS, parse_network, seconds, seed)


def _attack_files(
    name: str, valid: list[str], read: Callable[[Path], object], seconds: float, seed: int
) -> dict[str, int]:
    """The same for what is read from a file called `name`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name

        def write_and_read(text: str) -> None:
            path.write_text(text, errors="surrogateescape")
            read(path)

        return _attack(valid, write_and_read, seconds, seed)


def _attack(
    valid: list[str], read: Callable[[str], object], seconds: float, seed: int, most: int = 100_000
) -> dict[str, int]:
    """Reads damaged texts until the time is over, `most` of them; whatever is not accepted must be refused in one sentence."""
    rng, counts, deadline = random.Random(seed), Counter[str](), time.monotonic() + seconds
    for text in valid:
        read(text)
    while time.monotonic() < deadline and counts["texts"] < most:
        text = rng.choice(valid)
        for _ in range(rng.randint(1, 4)):
            text = _damaged(text, rng)
        counts["texts"] += 1
        try:
            read(text)
        except TacitError as refusal:
            counts["refused"] += 1
            sentence = str(refusal)
            assert sentence and "\n" not in sentence and "Traceback" not in sentence, (text, sentence)
            assert len(sentence) <= 700, (text[:200], len(sentence))
        except Exception as escaped:
            raise AssertionError(f"{text!r} escaped as {escaped!r}") from escaped
        else:
            counts["accepted"] += 1
    return dict(counts)


def _damaged(text: str, rng: random.Random) -> str:
    """The text with a piece left out, doubled, moved, or replaced by a value that does not belong there."""
    if not text:
        return rng.choice(VALUES)
    a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    b = min(b, a + rng.choice((1, 3, 12, 40)))
    match rng.randrange(6):
        case 0:
            return text[:a] + text[b:]
        case 1:
            return (text[:b] + text[a:])[:20_000]
        case 2:
            return text[:a] + chr(rng.randrange(1, 300)) + text[a + 1 :]
        case 3:
            return text[:a] + rng.choice(VALUES) + text[b:]
        case 4:  # a value behind an equals sign
            head, sign, tail = text.rpartition("=") if rng.random() < 0.5 else text.partition("=")
            rest = tail.lstrip().partition("," if "," in tail[:40] else "\n")
            return head + sign + rng.choice(VALUES) + rest[1] + rest[2]
        case _:
            lines = text.splitlines(keepends=True)
            rng.shuffle(lines)
            return "".join(lines)


ATTACKS = [attack_experiment_files, attack_strategy_texts, attack_network_texts, attack_own_schedules]
