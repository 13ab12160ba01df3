import pytest

from tacit.errors import ConfigError
from tacit.sim.fabric import rate_words
from tacit.units import parse_rate, parse_size, parse_time, rate_text, size_text, time_text

VALUES = [value * 10.0**power for power in range(-9, 19) for value in (1, 1.25, 7.77, 9.994, 9.996, 999.4)]


def test_sizes_rates_and_times_are_parsed_to_bytes_bits_a_second_and_seconds():
    assert parse_size("4MiB") == 4 * 2**20
    assert parse_size("25 MB") == 25_000_000
    assert parse_size(17) == 17
    assert parse_rate("10Gbit") == 1e10 == parse_rate("10Gbit/s")
    assert parse_rate("40GB/s") == 8 * parse_rate("5GB/s") == 3.2e11
    assert parse_rate("100Mbit") == 1e8
    assert parse_time("25us") == pytest.approx(2.5e-5)


def test_numbers_are_shown_with_three_digits_and_a_unit():
    assert size_text(1_234_567) == "1.23 MB"
    assert size_text(0) == "0 B"
    assert size_text(999) == "999 B"
    assert time_text(0.00123) == "1.23 ms"
    assert time_text(5000) == "5000 s"


@pytest.mark.parametrize("value", VALUES)
def test_whatever_is_printed_can_be_read_again(value):
    assert parse_time(time_text(value)) == pytest.approx(value, rel=6e-3)
    assert parse_rate(rate_text(value)) == pytest.approx(value, rel=1e-9)
    in_bytes, in_bits = rate_words(value).removesuffix(")").split(" (")
    assert parse_rate(in_bytes) == pytest.approx(value, rel=6e-4)
    assert parse_rate(in_bits) == pytest.approx(value, rel=6e-4)
    if value >= 1:
        assert parse_size(size_text(value)) == pytest.approx(value, rel=6e-3, abs=0.5)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_size, "1e400MB"), (parse_rate, "1e400Gbit"), (parse_rate, "1e308GB/s"), (parse_time, "1e999s")],
)
def test_no_number_is_infinite(parse, text):
    with pytest.raises(ConfigError, match=f"{text}' is infinite"):
        parse(text)


@pytest.mark.parametrize("parse", [parse_size, parse_rate, parse_time])
@pytest.mark.parametrize(
    "text", ["inf", "infs", "nan", "nanGbit", "-1s", "-1MB", "", "1", "1 parsec", 5000 * "9"]
)
def test_what_is_no_number_with_a_unit_gets_one_short_sentence(parse, text):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert len(str(refused.value)) < 300
