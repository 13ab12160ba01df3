"""Which model, and which machine: what a probe is compared with before it is believed. Starts without torch's process groups."""

from __future__ import annotations

from hashlib import blake2b

from tacit.plan.values import ProbedMachine
from tacit.records import host_facts
from tacit.sim.workloads import Workload


def digest_of_model(work: Workload) -> str:
    """The sizes of the layers, by name, in 60 bits; times differ between ranks, models do not."""
    sizes = sorted((layer.name, layer.parameters) for layer in work.layers)
    digest = blake2b(repr(sizes).encode(), digest_size=8).digest()
    return f"{int.from_bytes(digest, 'little') >> 4:x}"


def machine_here(nodes: int = 1) -> ProbedMachine:
    """This machine."""
    facts = host_facts()
    return ProbedMachine(facts["cpu"], facts["cores"], facts["memory_nbytes"], facts["torch"], nodes)
