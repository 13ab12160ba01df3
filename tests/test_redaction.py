"""A secret in a strategy's text stays out of every error, whatever else is wrong with that text."""

import traceback

import pytest

from tacit.errors import ConfigError
from tacit.redaction import take_secrets, without_secrets
from tacit.strategy import Strategy
from tacit.transports import Star

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


def test_other_options_are_left_as_they_are():
    for text in (
        "every / int8(block=256) / sharded",
        "braid(levels='5/2 */7')",
        "a == b",
        "set=1, token=2",
        "",
    ):
        assert take_secrets(text) == (text, {})
    assert without_secrets("star(secret='x', mtu=1)") == "star(secret='...', mtu=1)"
