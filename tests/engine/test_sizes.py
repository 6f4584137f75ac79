"""Sizes as people write them."""

import pytest

from amem import InputError
from amem.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(7, 7), ("500MB", 500_000_000), (" 2 gb ", 2 * 10**9), ("10.2GiB", int(10.2 * 2**30)), ("1 TiB", 2**40)],
)
def test_a_size_is_a_number_with_a_unit(text, nbytes):
    """Decimal and binary units, in either case; a bare number counts bytes."""
    assert nbytes == parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "0", "-1GB", "1XB", "nan", "inf", "1e3", "GB", "9" * 400 + "GB", "1." + "0" * 400]
)
def test_what_is_no_size_is_an_input_error(text):
    """In one line that shows how to write it, however long it is."""
    with pytest.raises(InputError, match="is not a size: write it like 500MB, 2GB"):
        parse_size(text)


def test_sizes_are_shown_in_three_digits():
    """Whole bytes below a thousand."""
    assert ["999 B", "1.23 kB", "8.9 TB"] == [format_size(n) for n in (999, 1234, 8_900_000_000_000)]
