"""What comes from outside: what is shown of it, and what passes as a number, a text, JSON or a
file.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier import arguments, outside


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        (7, "7"),
        ("a\nb", '"a\\nb"'),
        ("\ud800", '"\\ud800"'),
        ("ü", '"ü"'),
        (10**400, "a whole number of 1329 bits"),
        (10**5000, "a whole number of 16610 bits"),
        ([1, [2, [3, [4]]]], "[1, [2, [3, […]]]]"),
        ({"a": []}, '{"a": []}'),
        (b"x", "<bytes>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_as_json(value: object, text: str) -> None:
    assert outside.shown(value) == text


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000_000, list(range(1_000_000)), {str(n): n for n in range(100_000)}],
    ids=type,
)
def test_of_a_large_value_the_beginning_is_shown(value: object) -> None:
    assert len(outside.shown(value)) <= outside.MOST_SHOWN
    assert outside.shown(value).endswith("…")


def test_a_value_nested_without_end_is_shown() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert outside.shown(endless) == "[[[[…]]]]"


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.characters()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(anything)
def test_whatever_is_shown_is_short_and_fit_for_utf8(value: object) -> None:
    text = outside.shown(value)
    assert len(text.encode("utf-8")) <= 4 * outside.MOST_SHOWN


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, None, "1", [], {}, 10**400, 1e308, -1]
)
def test_what_is_no_finite_number_in_the_range_is_none(value: object) -> None:
    assert not outside.is_number(value, 0, 100)
    assert not outside.is_whole(value, 0, 100)


def test_the_bounds_belong_to_the_range_and_fractions_are_not_whole() -> None:
    assert outside.is_number(0, 0, 1) and outside.is_number(1.0, 0, 1)
    assert outside.is_whole(1, 0, 1) and not outside.is_whole(1.0, 0, 1)


def test_a_text_is_short_and_has_no_halves_of_characters() -> None:
    assert outside.is_text("", 2) and outside.is_text("\U0001f600", 1)
    assert not any(
        outside.is_text(value, 2) for value in ("abc", "\ud800", "\udc00a", 1, None, b"a")
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 200_000, '{"a":' * 200_000, b"\xff\xfe\xff", "1" * 5000, "[1]]"],
    ids=len,
)
def test_what_is_not_json_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        outside.parse_json(text)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("ü" * 8)
    assert outside.read_bounded(path, 16) == "ü" * 8
    with pytest.raises(ValueError, match="more than 15 bytes"):
        outside.read_bounded(path, 15)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="byte 0 of it is not UTF-8 text"):
        outside.read_bounded(path)


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        outside.read_bounded(Path("/dev/zero"))


NUMBERS = [
    arguments.positive,
    arguments.count,
    arguments.port,
    arguments.not_negative,
    arguments.above_nought,
    arguments.size,
]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(
    "text",
    ["inf", "nan", "-inf", "-1", "1e308", "9" * 400, "9" * 5000, "", "[]", "x" * 100_000, "0x10"],
    ids=len,
)
def test_an_argument_that_is_no_number_in_its_range_is_refused_in_one_short_line(
    kind: object, text: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as found:
        kind(text)  # type: ignore[operator]
    assert len(str(found.value)) < 150
    assert "must be a" in str(found.value)


def test_arguments_in_their_range_are_numbers() -> None:
    assert (
        arguments.positive("3"),
        arguments.count("0"),
        arguments.not_negative("1.5"),
        arguments.size("2KiB"),
    ) == (3, 0, 1.5, 2048)
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 65535"):
        arguments.port("65536")
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        arguments.above_nought("0")
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        arguments.above_nought("x")
