"""WHEN to talk: after which steps the ranks exchange something."""

from tacit.rounds.every_step import EveryStep

ROUNDS: dict[str, type] = {"every": EveryStep}

__all__ = ["ROUNDS", "EveryStep"]
