"""WHO exchanges with whom when ranks gossip: one live peer at a time, chosen without asking anybody.

random        any live peer
exponential   2^k places further on, k = 0, 1, 2, ... in turn: after log2(n) rounds every model has reached every rank (Ying et al. 2021)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tacit.errors import ConfigError, PairingError
from tacit.requests import Codec, seed_of

PEERS = ("random", "exponential")
MODES = ("symmetric", "push", "pull")


@dataclass(frozen=True, slots=True)
class Gossip:
    """`gossip`, `gossip(peers=exponential, mode=push)`. Symmetric: both move; push: the one who is called; pull: the caller."""

    peers: str = "random"
    mode: str = "symmetric"

    pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.peers not in PEERS:
            raise ConfigError(f"peers={self.peers!r}: {' or '.join(PEERS)}")
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}: {', '.join(MODES[:-1])} or {MODES[-1]}")

    def __str__(self) -> str:
        options = [f"peers={self.peers}"] * (self.peers != "random") + [f"mode={self.mode}"] * (
            self.mode != "symmetric"
        )
        return f"gossip({', '.join(options)})" if options else "gossip"

    def check(self, codec: Codec, world: int | None) -> None:
        """Any codec works between two, but none may keep a residual: what it does not send stays in the model, and is sent the next time."""
        if codec.traits.remembers:
            raise PairingError(
                f"{codec} remembers what it did not send, and so do models that gossip: it would be sent twice; leave ef() out"
            )
        if codec.traits.varies:
            raise PairingError(
                f"{codec} sends as many bytes as the numbers ask for, and what two ranks swap is of one length; write topk or int8"
            )

    def partner(self, rank: int, world: int, number: int, live: Sequence[int], seed: int) -> int | None:
        """Whom `rank` calls for its exchange `number`, of the `live` ranks; None: nobody is there."""
        others = [peer for peer in live if peer != rank]
        if not others:
            return None
        if self.peers == "random":
            return others[seed_of(seed, rank, number, "partner") % len(others)]
        hops = max(1, (world - 1).bit_length())
        wanted = (rank + (1 << number % hops)) % world
        return min(others, key=lambda peer: ((peer - wanted) % world, peer))  # the next live one
