"""START HERE. A Strategy says WHEN ranks talk, WHAT is said and WHO tells whom:

    Strategy.parse("every / ef(int4(block=64)) / sharded")
    Strategy(EveryStep(), ErrorFeedback(Int4(block=64)), Sharded())        # the same

Parts that can be left out are filled in: "int8" alone means "every / int8(block=256) / sharded". A pairing that
cannot work is refused when the strategy is built or attached, not on step 4000.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tacit.codecs import CODECS
from tacit.errors import ConfigError, PairingError, did_you_mean
from tacit.gossip.partners import Gossip
from tacit.redaction import plain_secret, take_secrets
from tacit.requests import Codec
from tacit.rounds import ROUNDS, Adaptive, EveryStep, Round
from tacit.spelling import check_length, parse_expression, plain_value
from tacit.transports import SCHEMES, AllReduce, Scheme, Sharded

Maker = Callable[..., Any]  # a class, or whatever else turns options into a part
_BETWEEN = re.compile(r"/(?![^(]*\))")  # a slash between parts, not one in an option: braid(levels='5/2 */7')
_SHAPE = "write 'when / what / who', for example 'every / int8(block=256) / sharded'"


@dataclass(frozen=True, slots=True)
class Strategy:
    """When x what x who. Its text form parses back to an equal Strategy."""

    when: Round
    what: Codec
    who: Scheme | Gossip

    def __post_init__(self) -> None:
        if isinstance(self.when, Adaptive):
            bits = 8 * self.what.nbytes(1 << 20) / (1 << 20)
            object.__setattr__(self, "when", self.when.for_codec(bits))
        self.check()

    def __str__(self) -> str:
        return f"{self.when} / {self.what} / {self.who}"

    def check(self, world: int | None = None) -> None:
        """Raises PairingError if this cannot work, among `world` ranks once that is known."""
        self._check_codec(self.what, world)
        if (first := self.first) is not self.what:
            try:
                self._check_codec(first, world)
            except PairingError as cause:
                raise PairingError(f"{self.when} says its first gradients with {first}: {cause}") from cause
        pairs = isinstance(self.who, Gossip)
        if pairs and not hasattr(self.when, "wish"):
            raise PairingError(
                f"{self.when} needs the mean of all ranks, and gossip has none; write '{self.when} / {self.what}'"
            )
        if not pairs and not hasattr(self.when, "due") and self.when.speaks == "models":
            raise PairingError(
                f"with {self.when} every rank talks when it likes: write '{self.when} / {self.what} / gossip'"
            )
        if pairs and getattr(self.when, "after", 0) > 0:
            raise PairingError(
                f"{self.when} begins with gradients of all ranks, and gossip has none; leave after= out"
            )

    def _check_codec(self, codec: Codec, world: int | None) -> None:
        self.who.check(codec, world)
        if codec.traits.lanes is not None and world is not None:
            codec.traits.lanes.check(world)

    @classmethod
    def parse(cls, text: "str | Strategy") -> Self:
        """The strategy that `text` describes."""
        if isinstance(text, cls):
            return text
        check_length(str(text), "strategy")
        text, secrets = take_secrets(str(text))  # whatever is wrong with it, no error can quote them
        parts = [part.strip() for part in _BETWEEN.split(text)]
        if not 1 <= len(parts) <= 3 or not all(parts):
            raise ConfigError(f"strategy {text!r} has {len(parts)} parts; {_SHAPE}")
        named = parts[0].partition("(")[0].strip() in ROUNDS
        when = _build(parts.pop(0), ROUNDS, "round") if len(parts) == 3 or named else EveryStep()
        said = parts[0] if parts else getattr(when, "says", None)  # some rules have a codec of their own
        if said is None:
            raise ConfigError(f"strategy {text!r} does not say what is said; {_SHAPE}")
        what = _build(said, CODECS, "codec")
        who = (
            _build(parts[1], {**SCHEMES, "gossip": Gossip}, "scheme", secrets)
            if len(parts) == 2
            else default_who(when, what)
        )
        return cls(when, what, who)

    @property
    def first(self) -> Codec:
        """What gradients are said with before models part, where a rule has an `after`."""
        return first_codec(self.when, self.what)

    @property
    def scheme(self) -> Scheme:
        """Who tells whom, where all ranks talk at the same time."""
        assert not isinstance(self.who, Gossip), "ranks that gossip have no scheme"
        return self.who


def default_who(when: Round, codec: Codec) -> Scheme | Gossip:
    """Gossip for ranks that talk when they like; a scheme for all others, which has to suit their first gradients too."""
    if isinstance(when, Adaptive):
        return Gossip()
    schemes = [default_scheme(said) for said in (codec, first_codec(when, codec))]
    return next((scheme for scheme in schemes if isinstance(scheme, Sharded)), schemes[0])


def default_scheme(codec: Codec) -> Scheme:
    """All-reduce where plain payloads add in flight; sharded for the rest, for indices (half the bytes of their lanes)
    and under error feedback (a ring's roundings are remembered by nobody)."""
    traits = codec.traits
    return AllReduce() if traits.summable and traits.lanes is None and not traits.remembers else Sharded()


def first_codec(when: Round, what: Codec) -> Codec:
    """What a rule says its first gradients with, before models part."""
    text: str = getattr(when, "first", "")
    return parse_codec(text) if text else what


def parse_codec(text: str) -> Codec:
    """One codec from its text: `parse_codec("int8(block=512)")`."""
    codec: Codec = _build(text, CODECS, "codec")
    return codec


def _build(text: str, known: Mapping[str, Maker], kind: str, secrets: Mapping[str, str] | None = None) -> Any:
    way = "write name or name(option=value)"
    tree = parse_expression(text, kind, way)
    if not isinstance(tree, ast.Name | ast.Call):
        raise ConfigError(f"{kind} {text!r} cannot be read; {way}")
    return _value(tree, text, known, kind, secrets or {})


def _value(
    node: ast.expr, text: str, known: Mapping[str, Maker], kind: str, secrets: Mapping[str, str]
) -> Any:
    """What a piece of strategy text stands for: a known name, with options if it is called, or a plain value."""
    if isinstance(node, ast.Name):
        return _make(_look_up(node.id, known, kind), [], {}, text, kind)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and all(k.arg for k in node.keywords):
        maker = _look_up(node.func.id, known, kind)
        args = [_value(a, text, known, kind, secrets) for a in node.args]
        options = {str(k.arg): _option(k.value, text, kind) for k in node.keywords}
        options |= {name: plain_secret(name, secrets[name]) for name in options if name in secrets}
        return _make(maker, args, options, text, kind)
    return _option(node, text, kind)


def _option(node: ast.expr, text: str, kind: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id  # a bare word, as in rounding=nearest
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODECS:
        return ast.unparse(node)  # a codec in an option, as in first=int8(block=512): Strategy.first reads it
    return plain_value(node, text, kind)


def _look_up(name: str, known: Mapping[str, Maker], kind: str) -> Maker:
    if name in known:
        return known[name]
    hint = did_you_mean(name, known)
    raise ConfigError(f"unknown {kind} {name!r}; {hint}known are {', '.join(known)}")


def _make(maker: Maker, args: list[Any], options: dict[str, Any], text: str, kind: str) -> Any:
    try:
        made = maker(*args, **options)
    except TypeError as cause:
        fields = getattr(maker, "__dataclass_fields__", {})
        if "secret" in fields:  # it may be what was written without its name
            text = f"{text.partition('(')[0]}(...)"
        names = ", ".join(fields) or "none"
        raise ConfigError(f"{kind} {text!r} does not fit its options ({names}): {cause}") from cause
    return made
