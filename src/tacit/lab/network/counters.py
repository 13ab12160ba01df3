"""What a process on a host can read of its own interface, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Traffic:
    """An interface's own counters: one header a packet, and a packet is what the kernel hands down (up to gso_max_size)."""

    rx_nbytes: int
    rx_packets: int
    tx_nbytes: int
    tx_packets: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.rx_nbytes - before.rx_nbytes,
            self.rx_packets - before.rx_packets,
            self.tx_nbytes - before.tx_nbytes,
            self.tx_packets - before.tx_packets,
        )


def traffic(device: str) -> Traffic:
    """The counters of `device` in this process's network namespace (/sys shows the one it was mounted in)."""
    return parse(Path("/proc/self/net/dev").read_text(), device)


def parse(text: str, device: str) -> Traffic:
    """The counters of `device` in the text of /proc/net/dev."""
    lines = (line.partition(":") for line in text.splitlines())
    words = next(rest.split() for name, _, rest in lines if name.strip() == device)
    return Traffic(int(words[0]), int(words[1]), int(words[8]), int(words[9]))
