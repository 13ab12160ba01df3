"""A secret in a strategy's text stays out of every error, whatever else is wrong with that text."""

import traceback

import pytest

from tacit.codecs import CODECS
from tacit.errors import ConfigError
from tacit.redaction import names_secret, take_secrets, without_secrets
from tacit.rounds import RULES
from tacit.schemes import SCHEMES, Gossip, Star
from tacit.strategy import Strategy

SECRET = "hunter2hunter2"
WRONG = [
    f"every / thc / star(secret='{SECRET}', mtuu=1500)",
    f"every / thc / star(mtuu=1500, secret='{SECRET}')",
    f"every / thc / star(secret='{SECRET}', mtu=1)",
    f"every / thc / star(secret='{SECRET}', slots=-3)",
    f"every / thc / star(secret='{SECRET}', mtu=1500+x)",
    f"every / thc / star(secret='{SECRET}' mtu=1500)",
    f"every / thc / star(secret='{SECRET}'",
    f"every / thc / star(secret='{SECRET})",
    f"every / thc / star(secret={SECRET}, mtuu=1500)",
    f"every / thc / star(secret={SECRET}-{SECRET})",
    f"every / thc / star(secret=f({SECRET}, {SECRET}))",
    f"every / thc / star(secret=f'{SECRET}{{x}}')",
    f'every / thc / star(secret="""{SECRET}""", mtuu=1)',
    f"every / thc / star(secret='{SECRET}''{SECRET}', mtuu=1)",
    f"every / thc / star(secret='{SECRET}'{SECRET}', mtuu=1)",
    f"every / thc / star(at='10.0.0.1, secret='{SECRET}')",
    f"every / thc / star(at='10.0.0.1', secret='ab/{SECRET}+==', mtu=1500",
    f"every / thc / star(secrett='{SECRET}')",
    f"every / thc / star(secert='{SECRET}')",
    f"every / thc / star(Secret = '{SECRET}')",
    f"every / thc / strr(secret='{SECRET}')",
    f"every / thc(secret='{SECRET}') / star",
    f"every(secret='{SECRET}') / thc / star",
    f"every / thc / star(secret='{SECRET}') / sharded",
    f"topk / star(secret='{SECRET}')",
    f"star(secret='{SECRET}')",
    f"every / thc / star('10.0.0.1:4800', '{SECRET}')",
    f"every / thc / star('secret', '{SECRET}')",
    *(
        f"every / thc / star({wrong})"
        for wrong in (
            f"secret:'{SECRET}'",
            f"secret '{SECRET}'",
            f"secret=='{SECRET}'",
            f"secret:='{SECRET}'",
            f"secret+='{SECRET}'",
            f"secret=[{SECRET},{SECRET}]",
            f"secret={{1,{SECRET}}}",
            f"secret=('a', '{SECRET}')",
            f"secret='a', '{SECRET}'",
            f"secret=1, b'{SECRET}' 'x'",
            f"**{{'secret':'{SECRET}'}}",
            f'**{{"secret" : "{SECRET}"}}',
            f"aggregator_secret='{SECRET}'",
            f"agg_secert='{SECRET}'",
            f"password='{SECRET}'",
            f"token='{SECRET}'",
            f"key='{SECRET}'",
            f"api_keys='{SECRET}'",
        )
    ),
]


@pytest.mark.parametrize("text", WRONG)
def test_no_error_and_no_traceback_shows_the_secret(text):
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "written", [repr(SECRET), f'"{SECRET}"', SECRET, f"'{SECRET[:7]}' '{SECRET[7:]}'", f"'''{SECRET}'''"]
)
def test_a_secret_arrives_as_it_was_written(written):
    star = Strategy.parse(f"every / thc / star(at='10.0.0.1:4800', secret={written}, mtu=9000)").who
    assert isinstance(star, Star) and (star.secret, star.mtu, star.at) == (SECRET, 9000, "10.0.0.1:4800")
    for value in ("a/b", "a,b)c(", "it's", 'say "no"', "back\\slash", "=", "'", "..."):
        star = Strategy.parse(f"every / thc / star(secret={value!r}, mtu=9000)").who
        assert isinstance(star, Star) and (star.secret, star.mtu) == (value, 9000)


def test_a_strategy_and_its_text_show_no_secret():
    strategy = Strategy.parse(f"every / thc / star(secret='{SECRET}')")
    assert SECRET not in f"{strategy} {strategy!r}"


def test_a_secret_that_is_a_number_has_to_be_put_between_quotes():
    with pytest.raises(ConfigError, match="^secret= is a text: put it between quotes$"):
        Strategy.parse("every / thc / star(secret=1234567812345678)")


def test_hosts_may_have_any_name():
    for at in ("keyserver:4800", "token", "secret.monkey:1"):
        for text in (f"star(at='{at}', mtu=9000)", f"star('{at}', mtu=9000)", f'star(mtu=9000, at="{at}")'):
            star = Strategy.parse(f"every / thc / {text}").who
            assert isinstance(star, Star) and (star.at, star.mtu) == (at, 9000)


def test_no_option_but_the_secret_has_a_name_that_is_hidden():
    makers = {**CODECS, **RULES, **SCHEMES, "gossip": Gossip}
    options = {name for maker in makers.values() for name in getattr(maker, "__dataclass_fields__", {})}
    assert {name for name in (*makers, *options) if names_secret(name)} == {"secret"}


def test_other_options_are_left_as_they_are():
    for text in (
        "every / int8(block=256) / sharded",
        "braid(levels='5/2 */7')",
        "a == b",
        "set=1, tone=2",
        "",
    ):
        assert take_secrets(text) == (text, {})
    assert without_secrets("star(secret='x', mtu=1)") == "star(secret='...', mtu=1)"
