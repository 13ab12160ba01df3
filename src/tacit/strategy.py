"""START HERE. A Strategy is WHEN ranks communicate, WHAT they send and WHO adds it:

    Strategy.parse("every / ef(int4(block=64)) / sharded")
    Strategy(EveryStep(), ErrorFeedback(Int4(block=64)), Sharded())        # the same

Parts that can be left out are filled in: "int8" alone means "every / int8(block=256) / sharded". A pairing that
cannot work is refused when the strategy is built or attached, not on step 4000.
"""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from inspect import signature
from typing import Any, Self

from tacit.codecs import CODECS, Exact
from tacit.errors import ConfigError, PairingError
from tacit.grammar import check_length, check_names, is_call, read, split, unfit, value
from tacit.redaction import plain_secret, take_secrets
from tacit.registry import Registry
from tacit.requests import Codec, Composes
from tacit.rounds import RULES, EveryStep, GradientRule, MergeRule, Rule, TriggerRule
from tacit.schemes import SCHEMES, AllReduce, Gossip, Scheme, Sharded, Star

_SHAPE = "write 'when / what / who', for example 'every / int8(block=256) / sharded'"


@dataclass(frozen=True, slots=True)
class Strategy:
    """When x what x who. Its text form parses back to an equal Strategy.

    Args:
        when: The rule: in which steps ranks communicate.
        what: The codec: how a bucket is encoded.
        who: The scheme: which ranks exchange, and who adds.

    Raises:
        PairingError: The parts cannot work together; the message names the way out.

    Example:
        >>> Strategy.parse("int8").who
        Sharded()
        >>> print(Strategy.parse("local(8) / none"))
        local(8) / none / allreduce
    """

    when: Rule
    what: Codec
    who: Scheme | Gossip

    def __post_init__(self) -> None:
        bits = 8 * self.what.nbytes(1 << 20) / (1 << 20)
        object.__setattr__(self, "when", self.when.for_codec(bits))
        self.check()

    def __str__(self) -> str:
        return f"{self.when} / {self.what} / {self.who}"

    def check(self, world: int | None = None) -> None:
        """Refuses what cannot work.

        Args:
            world: How many ranks there are, once that is known.

        Raises:
            PairingError: The parts cannot work together, or not among so many ranks.
        """
        self._check_codec(self.what, world)
        if (first := self.first) is not self.what:
            try:
                self._check_codec(first, world)
            except PairingError as cause:
                raise PairingError(f"{self.when} sends its first gradients with {first}: {cause}") from cause
        pairs = isinstance(self.who, Gossip)
        if pairs and not isinstance(self.when, TriggerRule):
            raise PairingError(
                f"{self.when} needs the mean of all ranks, and gossip has none; write '{self.when} / {self.what}'"
            )
        if not pairs and not isinstance(self.when, GradientRule | MergeRule):
            raise PairingError(
                f"with {self.when} every rank decides by itself when to exchange: write '{self.when} / {self.what} / gossip'"
            )
        if isinstance(self.who, Star) and self.who.loss and not isinstance(self.when, GradientRule):
            raise PairingError(
                f"{self.when} merges models, and with loss={self.who.loss} a sum may lack some: write 'every / {self.what} / star(loss=...)'"
            )
        if pairs and isinstance(self.when, MergeRule) and self.when.after > 0:
            raise PairingError(
                f"{self.when} begins with gradients of all ranks, and gossip has none; leave after= out"
            )

    def _check_codec(self, codec: Codec, world: int | None) -> None:
        self.who.check(codec, world)
        if codec.traits.lanes is not None and world is not None:
            codec.traits.lanes.check(world)
        if isinstance(codec, Exact) and isinstance(self.who, Star) and self.who.loss and not self.who.forgets:
            raise PairingError(
                f"{codec} with loss={self.who.loss}: exact steps go past the codec's memory, so what is left out of them is lost; write "
                f"'{codec.inner}', or star(..., forgets=True)"
            )

    @classmethod
    def parse(cls, text: "str | Strategy") -> Self:
        """The strategy that `text` describes.

        Args:
            text: `when / what / who`; parts that are left out are filled in. A Strategy is returned as it is.

        Returns:
            The strategy.

        Raises:
            ConfigError: The text cannot be read, or a name or an option is unknown.
            PairingError: The parts cannot work together.
        """
        if isinstance(text, cls):
            return text
        check_length(str(text), "strategy")
        text, secrets = take_secrets(str(text))  # whatever is wrong with it, no error can quote them
        try:
            parts = split(text, "/")
        except ValueError as cause:
            raise ConfigError(f"strategy {text!r} cannot be read ({cause}); {_SHAPE}") from cause
        if not 1 <= len(parts) <= 3 or not all(parts):
            raise ConfigError(f"strategy {text!r} has {len(parts)} parts; {_SHAPE}")
        if any(part.partition("(")[0].strip() == "auto" for part in parts):
            raise ConfigError(
                f"strategy {text!r}: auto stands alone, and chooses while a model trains; give it to tacit.attach, or name a strategy here"
            )
        named = _is_rule(parts[0].partition("(")[0].strip())
        when = _build(parts.pop(0), RULES) if len(parts) == 3 or named else EveryStep()
        sent = parts[0] if parts else when.default_codec
        if not sent:
            raise ConfigError(f"strategy {text!r} names no codec; {_SHAPE}")
        what = _build(sent, CODECS)
        who = _build(parts[1], SCHEMES, secrets) if len(parts) == 2 else default_who(when, what)
        return cls(when, what, who)

    @property
    def first(self) -> Codec:
        """The codec of the gradients before models part, where a rule has an `after`."""
        return first_codec(self.when, self.what)

    @property
    def scheme(self) -> Scheme:
        """The scheme, where all ranks exchange at the same time."""
        assert not isinstance(self.who, Gossip), "ranks that gossip have no scheme"
        return self.who


def default_who(when: Rule, codec: Codec) -> Scheme | Gossip:
    """Gossip for rules that are nothing but triggers; a scheme for all others, which has to suit their first gradients too."""
    if not isinstance(when, GradientRule | MergeRule):
        return Gossip()
    schemes = [default_scheme(sent) for sent in (codec, first_codec(when, codec))]
    return next((scheme for scheme in schemes if isinstance(scheme, Sharded)), schemes[0])


def default_scheme(codec: Codec) -> Scheme:
    """All-reduce where plain payloads add in flight; sharded for the rest, for indices (half the bytes of their lanes)
    and under error feedback (a ring's roundings are remembered by nobody)."""
    traits = codec.traits
    return AllReduce() if traits.summable and traits.lanes is None and not traits.remembers else Sharded()


def first_codec(when: Rule, what: Codec) -> Codec:
    """The codec of a rule's first gradients, before models part."""
    if isinstance(when, MergeRule) and when.first:
        return parse_codec(when.first)
    return what


def parse_codec(text: str) -> Codec:
    """One codec from its text: `parse_codec("int8(block=512)")`."""
    codec: Codec = _build(text, CODECS)
    return codec


def _is_rule(name: str) -> bool:
    """Whether the first part of a text names a rule; packages are searched only for a name that is not built in."""
    if name in RULES.built_in or name in CODECS.built_in:
        return name in RULES.built_in
    return name in RULES


def _build(text: str, known: Registry[Any], secrets: Mapping[str, str] | None = None) -> Any:
    """What a piece of strategy text stands for: a known name, with its options; codecs also in a chain, `topk > int8`."""
    if known is CODECS and len(chain := _chain(text)) > 1 and all(chain):
        return _compose(_build(chain[0], CODECS), _build(" > ".join(chain[1:]), CODECS))
    call, secrets = read(text, known.kind), secrets or {}
    maker = known.find(call.name)
    where = f"{known.kind} {text!r}"
    texts = _text_options(maker) if known is CODECS else []
    args = [
        _build(arg, known, secrets) if _names(arg) and place not in texts else value(arg, where)
        for place, arg in enumerate(call.args)
    ]
    options = {}
    for name, written in call.options.items():
        if name in secrets:
            options[name] = plain_secret(name, secrets[name])
        elif name in _codec_options(maker) and _names(written):
            options[name] = _build(written, CODECS)
        else:
            options[name] = _option(written, where)
    known_options = (
        list(signature(maker).parameters) if isinstance(maker, type) and is_dataclass(maker) else []
    )
    shown = f"{call.name}(...)" if "secret" in known_options else text  # it may be written without its name
    if known_options:
        check_names(known.kind, shown, known_options, options)
    try:
        return maker(*args, **options)
    except TypeError as cause:
        raise unfit(known.kind, shown, known_options, cause) from cause


def _codec_options(maker: Any) -> set[str]:
    """Options that are declared as codecs, as in by_shape(matrix=topk, rest=bf16)."""
    return (
        {each.name for each in fields_of(maker) if each.type in (Codec, "Codec")}
        if is_dataclass(maker)
        else set()
    )


def _text_options(maker: Any) -> list[int]:
    """The places of options that are declared as text, as in fp8(e4m3)."""
    found = fields_of(maker) if is_dataclass(maker) else ()
    return [place for place, each in enumerate(found) if each.type in (str, "str")]


def _option(written: str, where: str) -> Any:
    """A plain value; a codec in an option stays text, as in first=int8(block=512): Strategy.first reads it."""
    if not _names(written) or written.isidentifier():
        return value(written, where)
    calls = [read(part, "codec") for part in _chain(written)]
    return " > ".join(map(str, calls)) if calls[0].name in CODECS else value(written, where)


def _names(text: str) -> bool:
    """Whether `text` names something, or a chain, and is no plain value."""
    return all(map(is_call, _chain(text)))


def _chain(text: str) -> list[str]:
    try:
        return split(text, ">")
    except ValueError:
        return [text]  # `read` refuses it


def _compose(first: Codec, values: Codec) -> Codec:
    if not isinstance(first, Composes):
        raise PairingError(f"{first} > {values}: {first} has no numbers for another codec; topk has")
    return first.over(values)
