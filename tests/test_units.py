import pytest

from tacit.units import parse_rate, parse_size, parse_time, size_text, time_text


def test_sizes_rates_and_times_are_parsed_to_bytes_bits_a_second_and_seconds():
    assert parse_size("4MiB") == 4 * 2**20
    assert parse_size("25 MB") == 25_000_000
    assert parse_size(17) == 17
    assert parse_rate("10Gbit") == 1e10
    assert parse_rate("40GB/s") == 8 * parse_rate("5GB/s") == 3.2e11
    assert parse_rate("100Mbit") == 1e8
    assert parse_time("25us") == pytest.approx(2.5e-5)


def test_numbers_are_shown_with_three_digits_and_a_unit():
    assert size_text(1_234_567) == "1.23 MB"
    assert size_text(0) == "0 B"
    assert size_text(999) == "999 B"
    assert time_text(0.00123) == "1.23 ms"
    assert time_text(5000) == "5000 s"
