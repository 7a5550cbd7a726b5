"""What a fuzz run does to a server is decided by its seed; what its server says and answers is
judged.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.server.chaos import KINDS, Accident, Chaos, Fate, parse_kinds
from sgl_kvtier.lab.stress.server.log import (
    Answer,
    Attempt,
    FuzzLog,
    counts,
    prompt_name,
    suspicious,
)
from sgl_kvtier.lab.stress.trouble import Finding, chance, halted, resume


def attempt(**changed: object) -> Attempt:
    values: dict = {
        "run": "0", "number": 0, "prompt": "p", "prompt_tokens": 100, "mode": "both", "fate": "answered", "seconds": 1.0,
        "tokens": (1, 2), "logprobs": (-0.5, -0.25), "complete": True,
    }  # fmt: skip
    return Attempt(**{**values, **changed})


def test_equal_seeds_make_equal_trouble_and_others_do_not() -> None:
    one, same, other = Chaos(seed=1), Chaos(seed=1), Chaos(seed=2)
    assert [one.accident(n) for n in range(200)] == [same.accident(n) for n in range(200)]
    assert [one.accident(n) for n in range(200)] != [other.accident(n) for n in range(200)]
    assert [one.switch_at(n) for n in range(200)] == [same.switch_at(n) for n in range(200)]
    assert (
        one.order(list(range(20)), 0)
        == same.order(list(range(20)), 0)
        != one.order(list(range(20)), 1)
    )


def test_all_kinds_of_trouble_come_up() -> None:
    chaos = Chaos()
    fates = {chaos.accident(n).fate for n in range(300)}
    assert fates == set(Fate)
    assert any(chaos.flushes_before(n) for n in range(300))
    assert [n for n in range(1000) if chaos.kills_at(n)] == [400, 800]
    assert {mode for n in range(500) if (found := chaos.switch_at(n)) for mode in found[:1]} == {
        "auto",
        "both",
        "load",
    }
    assert set(chaos.faults()) == {
        "seed",
        "read_error_rate",
        "write_error_rate",
        "corrupt_rate",
        "stall_ms",
        "lose_rate",
    }


def test_without_chaos_nothing_happens_but_the_first_setting() -> None:
    calm = Chaos(parse_kinds("none"))
    assert {calm.accident(n) for n in range(100)} == {Accident(Fate.ANSWERED)}
    assert not any(calm.flushes_before(n) or calm.kills_at(n) for n in range(1000))
    assert [n for n in range(100) if calm.switch_at(n)] == [0]
    assert calm.faults() == {"seed": 0}


def test_a_run_may_begin_with_settings_that_are_named() -> None:
    chaos = Chaos(parse_kinds("none"), start=("both", None))
    assert [chaos.switch_at(n) for n in range(3)] == [("both", None), None, None]


def test_requests_have_priorities_where_the_server_is_to_order_them_by_those() -> None:
    assert {Chaos(parse_kinds("priority")).priority_of(n) for n in range(100)} == {0, 5, 10}
    assert {Chaos(parse_kinds("all")).priority_of(n) for n in range(100)} == {None}


def test_kinds_are_named_on_the_command_line() -> None:
    assert parse_kinds("all") == tuple(kind for kind in KINDS if kind != "priority")
    assert parse_kinds("all, priority") == KINDS
    assert parse_kinds("all", ahead=True) == tuple(
        kind for kind in KINDS if kind not in ("holes", "priority")
    )
    assert parse_kinds("holes", ahead=True) == ("holes",)
    assert parse_kinds("abort, flush") == ("abort", "flush")
    with pytest.raises(BenchError, match="no kind named fire"):
        Chaos(parse_kinds("abort,fire"))


ABORTED = {"fate": "aborted", "complete": False}
WHOLE = {"tokens": (1, 2, 3), "logprobs": (-0.5, -0.25, -1.0)}
# what differs from the reference's first two tokens: unequal tokens, unequal log probs, failures.
JUDGED: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "an aborted answer that begins like the reference": (ABORTED, (0, 0, 0)),
    "an aborted answer that begins otherwise": ({**ABORTED, "tokens": (1, 9)}, (1, 0, 0)),
    "an aborted answer without log probs": ({**ABORTED, "logprobs": ()}, (0, 0, 0)),
    "a whole answer": (WHOLE, (0, 0, 0)),
    "a whole answer that is too short": ({}, (1, 1, 0)),
    "log probs that moved": ({**WHOLE, "logprobs": (-0.5, -0.3, -1.0)}, (0, 1, 0)),
    "a whole answer without log probs": ({**WHOLE, "logprobs": ()}, (0, 1, 0)),
    "a whole answer with too few log probs": ({**WHOLE, "logprobs": (-0.5,)}, (0, 1, 0)),
    "a whole answer without tokens": ({"tokens": (), "logprobs": ()}, (0, 0, 1)),
}


@pytest.mark.parametrize("what", JUDGED)
def test_answers_are_compared_with_the_reference(what: str) -> None:
    changed, counted = JUDGED[what]
    log = FuzzLog()
    log.add("reference", ("p", Answer(*WHOLE.values())))
    log.keep(attempt(**changed))
    found = counts(log)
    assert (found["unequal_tokens"], found["unequal_logprobs"], found["failed"]) == counted
    assert found["error_messages"] == ["an answer without tokens"] * counted[2]


def test_a_failure_is_what_nobody_asked_for() -> None:
    log = FuzzLog()
    log.keep(attempt(complete=False, error="HTTP 500"))
    log.keep(attempt(complete=False, error="aborted by the server: Aborted", fate="aborted"))
    log.keep(attempt(complete=False, error=None, fate="disconnected"))
    log.keep(attempt(complete=False, error="ClientError", killed=True))
    log.keep(attempt(complete=False, error="no end after 60 s", hung=True))
    found = counts(log)
    assert (found["failed"], found["under_a_kill"], found["hangs"], found["aborted"]) == (
        1,
        1,
        1,
        1,
    )
    assert found["error_messages"] == ["HTTP 500"]


@pytest.mark.parametrize(
    ("fate", "error"),
    [
        ("aborted", "HTTP 500"),
        ("disconnected", "HTTP 500"),
        ("disconnected", "aborted by the server: x"),
        ("answered", "aborted by the server: x"),
    ],
)
def test_of_a_request_that_is_given_up_any_error_but_its_abort_is_a_failure(
    fate: str, error: str
) -> None:
    log = FuzzLog()
    log.keep(attempt(complete=False, tokens=(), logprobs=(), fate=fate, error=error))
    assert (counts(log)["failed"], counts(log)["error_messages"]) == (1, [error])


def test_the_file_has_what_the_log_has(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.jsonl"
    log = FuzzLog.open(path, {})
    log.add("reference", ("p", Answer((1, 2), (-0.5, -0.25))))
    log.keep(attempt(storage_tokens=64))
    log.note("flush")
    log.find(Finding.LEAK, "16 tokens")
    log.add("ends", {"met": 3})
    log.add("ends", {"met": 2, "aborted": 1})
    with path.open("a") as file:
        file.write('{"attempt": {"run"')
    again = FuzzLog.open(path, {})
    assert again.findings == ["leak: 16 tokens"]
    assert (again.references, again.attempts, again.events, again.findings, again.ends) == (
        log.references, log.attempts, log.events, log.findings, log.ends,
    )  # fmt: skip
    assert counts(again)["restorations"] == {"aborted": 1, "met": 5}
    assert counts(again)["restored"] == 1
    assert counts(again)["leaks"] == 1


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[2026] pool memory leak detected! available=10", "leak"),
        ("Scheduler hit an exception: Traceback (most recent call last):", "crash"),
        ("ValueError: KV page invariants violated", "leak"),
        ("kvtier: restoration is not right on this device, and ends: page: 1 page", "mismatch"),
        ("Prefill batch, #new-seq: 1", None),
        ("server_args=ServerArgs(enable_leak_check=False)", None),
    ],
)
def test_lines_of_a_log_that_nobody_wants_are_found(line: str, kind: str | None) -> None:
    found = suspicious(f"before\n{line}\nafter\n")
    assert [finding.label for finding, _ in found] == ([] if kind is None else [kind])


def test_a_server_that_asked_itself_before_it_listened_did_not_crash() -> None:
    told = "[2026-11-23 12:18:01] post-warmup freeze_gc failed\n"
    trace = "Traceback (most recent call last):\n  File x\nConnectionRefusedError: [Errno 111]\n"
    both = "The above exception was the direct cause of the following exception:\n\n"
    after = "[2026-11-23 12:18:02] the server is fired up\n"
    assert suspicious(f"{told}{trace}\n{both}{trace}{after}") == []
    assert len(suspicious(f"{told}{trace}{after}{trace}")) == 1


def test_a_prompt_and_the_length_of_its_answer_have_one_name() -> None:
    assert prompt_name([1, 2], 3) == prompt_name((1, 2), 3)
    assert prompt_name([1, 2], 3) != prompt_name([1, 2], 4)


# Processes that are halted do nothing until they go on.


def test_a_halted_process_does_nothing_with_any_thread_and_goes_on_after() -> None:
    memory = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        while True:
            memory[:] = (int.from_bytes(memory[:], "little") + 1).to_bytes(8, "little")
    try:
        while not any(memory[:]):
            time.sleep(0.001)
        with halted([child]):
            before = memory[:]
            time.sleep(0.05)
            assert memory[:] == before
        while memory[:] == before:
            time.sleep(0.001)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    resume(child)  # it may have ended meanwhile


def test_what_is_drawn_for_one_purpose_depends_on_no_other() -> None:
    def drawn(*about: object) -> float:
        return chance(1, *about).random()

    assert drawn("kill", 3) == drawn("kill", 3)
    assert len({drawn("kill", 3), drawn("kill", 4), drawn("stop", 3)}) == 3
