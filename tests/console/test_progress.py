"""Progress of long work: what is counted, estimated and printed, and where."""

from __future__ import annotations

import asyncio
import io
import re
import threading

import pytest

from sgl_kvtier.console import format_duration, progress


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Lines(io.StringIO):
    """A stream that tells when a line with `word` has been written."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word
        self.seen = threading.Event()

    def write(self, text: str) -> int:
        if self._word in text:
            self.seen.set()
        return super().write(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-3, "0 s"),
        (48.4, "48 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_a_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_time_left_is_estimated_from_the_pace_so_far() -> None:
    clock = Clock()
    with progress("compare", 40, "requests", file=io.StringIO(), clock=clock) as work:
        assert work.left_s is None
        clock.now += 30
        work.advance(10, note="kvtier, round 2")
        assert work.left_s == 90
        assert (
            work.line()
            == "compare: 10/40 requests, 30 s elapsed, about 1 min 30 s left (kvtier, round 2)"
        )
        work.expect(20)
        assert work.left_s == 30


def test_work_that_overruns_its_total_has_no_time_left_and_no_negative_one() -> None:
    with progress("fill", 1, file=io.StringIO(), clock=Clock()) as work:
        work.advance(3)
        assert work.left_s == 0


def test_work_of_unknown_length_shows_what_is_done() -> None:
    with progress("scan", unit="files", file=io.StringIO(), clock=Clock()) as work:
        work.advance(1234)
        assert work.left_s is None
        assert work.line() == "scan: 1,234 files, 0 s elapsed"


def test_without_a_terminal_a_plain_line_comes_by_itself_while_the_caller_waits() -> None:
    out = Lines("start server")
    with progress("compare", 4, file=out, every_s=0.01) as work:
        work.describe("start server")
        assert out.seen.wait(60)
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_the_last_plain_line_tells_how_far_the_work_came_even_when_it_failed() -> None:
    out = io.StringIO()
    with (
        pytest.raises(RuntimeError),
        progress("compare", 4, "rounds", file=out, every_s=3600) as work,
    ):
        work.advance(3)
        raise RuntimeError
    assert out.getvalue().splitlines()[-1].startswith("compare: 3/4 rounds, ")


def test_a_message_is_a_line_of_its_own() -> None:
    out = io.StringIO()
    with progress("compare", 4, file=out, every_s=3600) as work:
        work.say("hicache [file]: server started")
    assert out.getvalue().splitlines()[0] == "hicache [file]: server started"


def test_a_terminal_gets_a_live_bar_with_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress("compare", 4, "rounds", file=out) as work:
        work.advance(3, note="kvtier [x]")
        work.say("a message")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "3/4 rounds" in text
    assert "kvtier [x]" in text
    assert "a message" in text


def test_by_default_everything_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("compare", 1) as work:
        print("the result")
        work.say("a message")
    captured = capsys.readouterr()
    assert captured.out == "the result\n"
    assert "a message" in captured.err


def test_what_is_printed_beside_a_live_bar_still_goes_to_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with progress("compare", 1, file=Terminal()):
        print("the result")
    assert capsys.readouterr().out == "the result\n"


def test_steps_from_many_threads_and_coroutines_are_all_counted() -> None:
    with progress("count", 4000, file=io.StringIO()) as work:

        def count() -> None:
            for _ in range(1000):
                work.advance()

        async def count_too() -> None:
            await asyncio.gather(*(asyncio.to_thread(count) for _ in range(2)))
            for _ in range(1000):
                work.advance()
                await asyncio.sleep(0)

        thread = threading.Thread(target=count)
        thread.start()
        asyncio.run(count_too())
        thread.join()
    assert work.done == 4000
