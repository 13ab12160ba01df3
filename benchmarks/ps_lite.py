"""ps-lite, a parameter server, beside tacit's rows on the same keys, network and machine. Optional: ps-lite is built outside this repository.

    pip download byteps==0.2.5.post15 --no-deps --no-binary :all:      # or any other way to its sources: 3rdparty/ps-lite
    apt-get install libzmq3-dev
    python benchmarks/ps_lite.py --source byteps-0.2.5.post15/3rdparty/ps-lite --world 4 --servers 1

A step is a pull of the different rows of a batch and a push of their gradients, with barriers before and after it. Keys are those of the lab's job
`tables` (8 bytes each, hashed, so that servers own alike many). Rows are made on the servers on first touch.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from tacit import lab
from tacit.lab.experiments.jobs.tables import Lookups, SparseTables
from tacit.lab.network.lab import Lab
from tacit.records import host_facts
from tacit.topology import star
from tacit.units import parse_rate

PORT = 29600
WARMUP = 2
LIMIT_S = 300.0
# BytePS's ps-lite looks for messages without a pause, with a lock held that its senders need: on cores that processes share
# it only takes time from itself. Here it waits for the socket first.
SPINS = "std::lock_guard<std::mutex> lk(mu_);\n          // the zmq_msg_recv should be non-blocking"


def built(source: Path, folder: Path) -> Path:
    """One program with the part of ps-lite that sends by ZeroMQ."""
    program, own = folder / "peer", folder / "src"
    if not (source / "src" / "customer.cc").is_file():
        sys.exit(f"--source {source}: there is no src/customer.cc; give the folder of ps-lite's sources")
    shutil.copytree(source / "src", own)
    van = own / "zmq_van.h"
    van.write_text('#include "polite.h"\n' + van.read_text().replace(SPINS, f"polite(socket);\n{SPINS}"))
    parts = [str(own / f"{name}.cc") for name in ("customer", "postoffice", "van")]
    include = [f"-I{own}", f"-I{source}/include", f"-I{Path(__file__).with_name('ps_lite')}"]
    command = ["g++", "-std=c++17", "-O3", "-w", *include]
    main = str(Path(__file__).with_name("ps_lite") / "peer.cpp")
    subprocess.run([*command, main, *parts, "-lzmq", "-pthread", "-lrt", "-o", str(program)], check=True)
    return program


def write_keys(folder: Path, options: argparse.Namespace) -> float:
    """A file a rank and step, with sorted different keys; returns how many there are in the mean."""
    spec = SparseTables(zipf=options.zipf, rows=options.rows, lookups=options.lookups, width=options.width)
    counts = []
    for rank in range(options.world):
        for step, looked_up in enumerate(Lookups(spec, rank, options.steps).rows):
            keys = np.unique(mixed(looked_up.unique().numpy().astype(np.uint64)))
            keys.tofile(folder / f"{rank}-{step}.keys")
            counts.append(len(keys))
    return float(np.mean(counts))


def mixed(keys: np.ndarray) -> np.ndarray:
    """splitmix64, a bijection: keys that spread over the servers' ranges."""
    with np.errstate(over="ignore"):
        keys = (keys + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(0xFFFFFFFFFFFFFFFF)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return keys ^ (keys >> np.uint64(31))


def measure(network: Lab, program: Path, folder: Path, options: argparse.Namespace) -> list[float]:
    """Milliseconds of each step, of the slowest worker."""
    hosts = network.hosts
    root = hosts[options.world]  # the first server's host has the scheduler, which is idle in a step
    roles = [
        ("scheduler", root, 0),
        *(("server", host, 0) for host in hosts[options.world :]),
        *(("worker", host, rank) for rank, host in enumerate(hosts[: options.world])),
    ]
    with ExitStack() as stack:
        started = []
        for role, host, rank in roles:
            env = {
                "DMLC_ROLE": role, "DMLC_NUM_WORKER": options.world, "DMLC_NUM_SERVER": options.servers,
                "DMLC_PS_ROOT_URI": root.address, "DMLC_PS_ROOT_PORT": PORT, "DMLC_INTERFACE": host.device,
                "DMLC_NODE_HOST": host.address,
            }  # fmt: skip
            words = [f"{key}={value}" for key, value in env.items()]
            arguments = [str(folder), str(rank), str(options.steps), str(options.width)]
            log = stack.enter_context((folder / f"{role}-{host.name}.log").open("w"))
            process = subprocess.Popen(
                [*network.prefix(host.name, realtime=True), "env", *words, str(program), *arguments],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((role, process))
        watchdog = threading.Timer(LIMIT_S, lambda: [process.kill() for _, process in started])
        watchdog.start()
        stack.callback(watchdog.cancel)
        took = [
            [float(line) for line in process.communicate()[0].split()]
            for role, process in started
            if role == "worker"
        ]
    if any(len(each) != options.steps for each in took):
        sys.exit("ps-lite ended early; its logs have the reason, or its library does not fit this machine")
    return [max(step) for step in zip(*took, strict=True)][WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="the folder of ps-lite's sources")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rate", default="200Mbit")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lookups", type=int, default=4096 * 26, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = built(options.source, folder)
        unique = write_keys(folder, options)
        network = star(options.world + options.servers, rate_bps=parse_rate(options.rate), latency_s=0.0)
        with lab.up(network) as up:
            took = measure(up, program, folder, options)
    # keys and rows of all its workers leave a server, in answers, and then come to it, in pushes: one after the other
    nbytes = unique * options.world / options.servers * 2 * (8 + 4 * options.width)
    computed_ms = 1e3 * 8 * nbytes / parse_rate(options.rate)
    found = {
        "kind": "ps-lite", "world": options.world, "servers": options.servers, "rate": options.rate, "zipf": options.zipf,
        "width": options.width, "unique": unique, "step_ms": median(took), "n": len(took), "computed_ms": computed_ms,
    }  # fmt: skip
    if options.json:
        print(json.dumps({**found, "host": host_facts()}))
    else:
        print(
            f"ps-lite, {options.world} workers, {options.servers} servers, {options.rate}, Zipf {options.zipf:g}, {unique:.0f} rows of "
            f"{options.width}: {median(took):.0f} ms a step (median of {len(took)}; {min(took):.0f} to {max(took):.0f}); computed {computed_ms:.0f}"
        )


if __name__ == "__main__":
    main()
