"""What can go wrong, by what the reader can do about it. Every message names the value, the limit and the way out."""

from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name in `known` that is nearest, as a question for the middle of a sentence; nothing if none is near."""
    from difflib import get_close_matches  # only a mistake needs it

    close = get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""


def one_line(text: str, most: int = 600) -> str:
    """`text` fit for a terminal and a log: on one line, control characters escaped, and of at most `most` characters: the middle goes."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " if c == "\n" else repr(c)[1:-1] for c in text)
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


class TacitError(Exception):
    """The root of all errors that tacit raises on purpose; its text is one line, whatever the value that it quotes.

    Example:
        >>> try:
        ...     raise ConfigError("world=0: give at least 1")
        ... except TacitError as refused:
        ...     print(refused)
        world=0: give at least 1
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(TacitError):
    """A value that cannot be used: correct it and call again."""


class PairingError(ConfigError):
    """Two parts that cannot work together: replace one of them."""


class CheckpointError(ConfigError):
    """A saved state that does not belong to this model, strategy or world."""


class TransportError(TacitError):
    """The other ranks can no longer be reached: restart from the last checkpoint."""


class DivergenceError(TacitError):
    """Ranks hold different bits where all should hold the same: restart from a checkpoint before that."""


class ConformanceError(TacitError):
    """A codec broke the contract of the conversation: it is a bug in the codec."""


class ScheduleError(ConfigError):
    """A schedule that does not compute what it promises: the message names the rank, the chunk and the fault."""
