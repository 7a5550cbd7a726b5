"""Files as numbered lines."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.lines import (
    MOST_BAD_LINES,
    MOST_LINE_BYTES,
    BadLine,
    BadRecord,
    count_of,
    parse_object,
    read_lines,
    seconds_of,
    text_of,
    whole,
)


def lines_of(path: Path) -> tuple[list[tuple[int, str]], list[BadLine]]:
    bad: list[BadLine] = []
    return [(n, text.strip()) for n, text in read_lines(path, bad)], bad


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_empty_lines_are_passed_over_but_counted(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = b"one\n\n  \nfour"
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert lines_of(path) == ([(1, "one"), (4, "four")], [])


def test_a_line_that_is_not_utf8_is_noted_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\nt\xffwo\nthree\n")
    assert lines_of(path) == (
        [(1, "one"), (3, "three")],
        [BadLine(str(path), 2, "not UTF-8 at byte 1")],
    )


def test_a_packed_file_that_breaks_off_gives_what_it_has_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole_file = gzip.compress(b"".join(b"%064d\n" % (i * 7919) for i in range(5000)))
    path.write_bytes(whole_file[: len(whole_file) // 2])
    lines, bad = lines_of(path)
    assert 0 < len(lines) < 5000
    assert bad[0].line == len(lines) + 1
    assert "breaks off" in bad[0].reason


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_opened_says_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"kvtier trace list|name one of the files"):
        lines_of(tmp_path / name)


def test_a_packed_file_unreadable_from_the_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(50))
    with pytest.raises(TraceError, match="Copy the file again"):
        lines_of(path)


@pytest.mark.parametrize("text", ["{", "[1]", "null", "[" * 200_000])
def test_lines_that_are_no_json_object_are_bad(text: str) -> None:
    with pytest.raises(BadRecord):
        parse_object(text)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_beyond_the_limit_is_noted_and_not_kept_in_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = b"one\n" + bytes(3 * MOST_LINE_BYTES) + b"\nthree\n"
    path.write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    del data
    tracemalloc.start()
    try:
        found = lines_of(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == ([(1, "one"), (3, "three")], [BadLine(str(path), 2, "longer than 64 MiB")])
    assert most < 2.5 * MOST_LINE_BYTES


def test_a_file_of_bad_lines_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"\xff\n" * 5_000_000, 1))
    with pytest.raises(TraceError, match=f"more than {MOST_BAD_LINES} bad lines"):
        lines_of(path)


def test_what_a_bad_record_holds_is_shown_short() -> None:
    for check in (seconds_of, count_of, text_of):
        with pytest.raises(BadRecord) as found:
            check({"key": [["x" * 1_000_000] * 1000]}, "key")
        assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    "value",
    [True, "1", [1], float("nan"), float("inf"), float("-inf"), -0.5, 1e10, 10**400],
    ids=lambda v: str(v)[:9],
)
def test_times_are_finite_numbers(value: object) -> None:
    with pytest.raises(BadRecord, match="'t' must be a number of seconds"):
        seconds_of({"t": value}, "t")


@pytest.mark.parametrize("value", [True, -1, 1.0, None, "1"])
def test_counts_are_whole_numbers_from_0(value: object) -> None:
    with pytest.raises(BadRecord, match="n must be a whole number"):
        whole(value, "n")
