"""A served model on the CUDA stand-in: SGLang with `is_cuda()`, its overlap loop, streams, pools and
write-back; prefixes come back, and what is answered is what transformers answers. Then mistakes are
put into the copies, and each of them is seen.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from restore_lab import CHECKED, change
from serving import Answer, Served, prompts
from stand_in import unavailable
from stand_in.build import nvcc_here

from served.asking import (
    DIRECT,
    KERNEL,
    PAGE,
    UNPROVEN,
    Wanted,
    counted,
    crowd,
    log_of,
    on_launch_line,
    on_stand_in,
    pages,
    proof,
    waited_for,
    wanted,
    with_shared_prefix,
)
from served.latents import write_latent_model
from served.launch import linear_layers
from served.states import write_state_model
from served.windows import write_windowed_model
from sgl_kvtier.launch import GPU_PAGE
from sgl_kvtier.runtime.proof.record import FIRST_ATTACHES, FIRST_LOADS, State

REASON = unavailable()
pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(REASON is not None, reason=f"the CUDA stand-in: {REASON}"),
]
ROOT = Path(__file__).resolve().parents[3]
PROVEN_BYTES = "STAND_IN_PROVEN_BYTES"
AHEAD = {"prefetch": "on", "eviction": "next-use"}
LONG = 440
CROWD = {"max_total_tokens": 1536, "context_length": 1500}
"""A device pool for three of six prompts: the others are evicted, and come back while it computes."""


def restored(server: Served, asked: list[list[int]]) -> tuple[list[Answer], list[Answer]]:
    """What a server answers to prompts that it computes, and again once they are in the store
    alone.
    """
    first = [server.ask(ids) for ids in asked]
    server.flush()
    again = [server.ask(ids) for ids in asked]
    server.settle()
    return first, again


def check_restored(server: Served, again: list[Answer], ranks: int = 1, page: int = PAGE) -> None:
    """Prefixes were restored from the store, on every rank; every page was compared and is the
    store's.
    """
    assert all(answer.storage >= 4 * PAGE for answer in again), again
    assert counted(server, "restore_ended_total", "how")["met"] >= len(again) * ranks
    found = pages(server)
    loaded = sum(answer.storage for answer in again) // page
    assert set(found) == {"equal"} and found["equal"] >= loaded * ranks, found
    log = log_of(server)
    assert "Traceback" not in log and "cuda stand-in:" not in log


def settings_in_force(server: Served) -> tuple[str, str, str]:
    """Restoration, prefetching and eviction, as the log says at the start."""
    log = log_of(server)
    (restore,) = re.findall(r"kvtier: restoring prefixes, policy (\w+), ", log)
    ((prefetch, eviction),) = re.findall(
        r"kvtier: looking ahead, prefetch (\w+), eviction ([\w-]+), ", log
    )
    return restore, prefetch, eviction


def settings_measured() -> tuple[str, str, str]:
    """The same, of the kvtier whose figures are in the README."""
    page = (ROOT / "docs" / "results" / "emulated-h100.md").read_text("utf-8")
    said = r"restoration `(\w+)`, `policy\.prefetch` `(\w+)` and `policy\.eviction` `([\w-]+)`"
    (found,) = re.findall(said, page)
    return tuple(found)


def test_the_launch_line_starts_what_was_measured_and_it_proves_itself(tmp_path: Path) -> None:
    """One server: its settings, then prefixes restored until it is proven. Which way is fastest on
    this machine is no matter: all prefixes are restored from both ends.
    """
    asked = prompts(8, LONG, seed=5)
    right = wanted(asked)
    with on_launch_line(tmp_path, graphs=(1, 2), env={PROVEN_BYTES: str(2 << 20)}) as server:
        assert settings_in_force(server) == settings_measured() == ("auto", "on", "next-use")
        log = log_of(server)
        assert "copies by StagedCopies by TritonScatter" in log
        assert waited_for(lambda: proof(server) == State.PROVING)

        server.restore("both")
        answers = [crowd(server, asked, at_once=4, seed=0)]
        while proof(server) != State.PROVEN and len(answers) < 10:
            server.flush()
            answers.append(crowd(server, asked, at_once=4, seed=len(answers)))
            server.settle()
        assert proof(server) == State.PROVEN and "restoration is proven on" in log_of(server)
        server.ask(asked[0], 48)  # SGLang says once in 40 decode steps what ran them

        assert counted(server, "restore_ended_total", "how")["met"] >= FIRST_LOADS
        found = counted(server, "restore_proof_pages_total", "result")
        assert set(found) == {"equal"} and found["equal"] >= FIRST_LOADS, found
        attaches = counted(server, "restore_proof_attaches_total", "result")
        assert attaches["equal"] >= FIRST_ATTACHES and "differs" not in attaches, attaches
        assert not server.metric("kvtier:lookahead_failures_total")
        log = log_of(server)
        assert "cuda graph: True" in log
        assert "Traceback" not in log and "cuda stand-in:" not in log
    assert all(are_met(right, said) for said in answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        (KERNEL, {"bus_gbps": 0.05}),
        (KERNEL, {"disable_overlap_schedule": True, "seed": 2}),
        (DIRECT, {"disable_overlap_schedule": True, "graphs": (1, 2), "seed": 3}),
    ],
    ids=["kernel, a slow bus", "kernel, no overlap", "direct, no overlap, graphs"],
)
def test_every_way_of_copying_restores_what_transformers_computes(
    tmp_path: Path, way: tuple[str, str], more: dict[str, Any]
) -> None:
    asked = prompts(2, LONG, seed=6)
    with on_stand_in(tmp_path, way, **more) as server:
        first, again = restored(server, asked)
        check_restored(server, again)
    for right, computed, back in zip(wanted(asked), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


@pytest.mark.slow
@pytest.mark.parametrize("way", [KERNEL, DIRECT], ids=["kernel", "direct"])
def test_bfloat16_is_restored_bit_by_bit(tmp_path: Path, way: tuple[str, str]) -> None:
    asked = prompts(2, LONG, seed=7)
    with on_stand_in(tmp_path, way, dtype="bfloat16", policy={"restore": "load"}) as server:
        first, again = restored(server, asked)
        check_restored(server, again)
    # All but the last page was loaded, and that one is computed as it was: nothing is rounded elsewhere.
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{}, AHEAD], ids=["restores", "looks ahead"])
def test_two_ranks_restore_what_transformers_computes(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    asked = prompts(2, LONG, seed=8)
    with on_stand_in(tmp_path, ranks=2, policy=policy) as server:
        first, again = restored(server, asked)
        check_restored(server, again, ranks=2)
    for right, computed, back in zip(wanted(asked), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


@pytest.mark.slow
@pytest.mark.parametrize("way", [KERNEL, DIRECT], ids=["kernel", "direct"])
def test_latents_are_restored_as_they_were_stored(tmp_path: Path, way: tuple[str, str]) -> None:
    model = write_latent_model(tmp_path / "model")
    asked = prompts(2, LONG, seed=9)
    with on_stand_in(tmp_path, way, policy=AHEAD, model_path=model) as server:
        first, again = restored(server, asked)
        check_restored(server, again)
        for metric in ("restore_proof_pages_total", "restore_proof_attaches_total"):
            assert set(counted(server, metric, "result")) == {"equal"}
    for right, computed, back in zip(wanted(asked, path=model), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


def bytes_from_disk(server: Served) -> int:
    """What the server's processes had the disk read so far, without what the page cache had."""
    main = psutil.Process(server.server.pid)
    processes = [main, *main.children(recursive=True)]
    return sum(process.io_counters().read_bytes for process in processes)


def drop_from_page_cache(folder: Path) -> None:
    """The next read of a segment below this folder comes from the disk."""
    for path in folder.rglob("seg-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.slow
def test_two_ranks_with_the_same_latents_read_each_page_from_the_disk_once(tmp_path: Path) -> None:
    model = write_latent_model(tmp_path / "model")
    asked = prompts(2, LONG, seed=10)
    with on_stand_in(tmp_path, ranks=2, policy={"restore": "load"}, model_path=model) as server:
        first = [server.ask(ids) for ids in asked]
        server.settle()
        server.flush()
        drop_from_page_cache(tmp_path)
        loaded, before = loaded_bytes(server), bytes_from_disk(server)
        again = [server.ask(ids) for ids in asked]
        server.settle()
        read = bytes_from_disk(server) - before
        check_restored(server, again, ranks=2)
        by_each = (loaded_bytes(server) - loaded) / 2
        assert 0.9 * by_each < read < 1.2 * by_each, (read, by_each)
    for right, computed, back in zip(wanted(asked, path=model), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


WINDOWED = {"swa_full_tokens_ratio": 0.5}
"""Fewer window slots than KV slots, so that they have other numbers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        (DIRECT, {"graphs": (1, 2)}),
        (KERNEL, {"bus_gbps": 0.05}),
        (DIRECT, {"ranks": 2, "env": CHECKED}),
    ],
    ids=["direct, graphs", "kernel, a slow bus", "two ranks"],
)
def test_windows_are_restored_as_transformers_computes(
    tmp_path: Path, way: tuple[str, str], more: dict[str, Any]
) -> None:
    model = write_windowed_model(tmp_path / "model")
    asked = prompts(2, LONG, seed=31)
    with on_stand_in(tmp_path, way, model_path=model, **WINDOWED, **more) as server:
        log = log_of(server)
        assert "Components: (<ComponentType.FULL: 0>, <ComponentType.SWA: 1>)" in log
        assert "copies by StagedCopies by TritonScatter" in log
        first, again = restored(server, asked)
        check_restored(server, again, more.get("ranks", 1))
        assert set(counted(server, "restore_proof_pages_total", "result")) == {"equal"}
    for right, computed, back in zip(wanted(asked, path=model), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


def check_mistake_is_found(
    server: Served,
    spoil: Path,
    model: Path,
    asked: list[list[int]],
    proof_of: str,
    where: str,
    page: int = PAGE,
) -> None:
    """A mistake that begins once prefixes were restored: the comparison of pages finds it `where`
    and all answers are right, or some are wrong where pages are not compared.
    """
    first, again = restored(server, asked)
    check_restored(server, again, page=page)
    spoil.touch()
    server.flush()
    last = [server.ask(ids) for ids in reversed(asked)][::-1]
    if proof_of == "auto":
        assert waited_for(lambda: proof(server) == State.REFUTED)
        assert counted(server, "restore_proof_pages_total", "result")["differs"] > 0
        assert re.search(where, log_of(server))
    right = wanted(asked, path=model)
    assert are_met(right, first) and are_met(right, again)
    assert are_met(right, last) is (proof_of == "auto")


@pytest.mark.slow
@pytest.mark.parametrize("proof_of", ["auto", "off"])
@pytest.mark.parametrize("mistake", ["anchors_left_out", "windows_exchanged"])
def test_wrong_windows_are_found_before_a_forward_reads_them(
    tmp_path: Path, mistake: str, proof_of: str
) -> None:
    """Or in the answers, where pages are not compared."""
    model, spoil = write_windowed_model(tmp_path / "model"), tmp_path / "spoil"
    env = {"STAND_IN_MISTAKE": mistake, "STAND_IN_SPOIL": str(spoil)}
    policy = {"proof": proof_of}
    with on_stand_in(tmp_path, model_path=model, env=env, policy=policy, **WINDOWED) as server:
        where = r"in the window (keys|values) of layer \d"
        check_mistake_is_found(server, spoil, model, prompts(2, LONG, seed=32), proof_of, where)


STATES = {
    "page_size": 64,
    "chunked_prefill_size": 256,
    "mamba_radix_cache_strategy": "extra_buffer",
}
"""SGLang keeps states at multiples of 64 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        (DIRECT, {"graphs": (1, 2)}),
        pytest.param(
            KERNEL,
            {"bus_gbps": 0.05, "nvcc": True},
            marks=pytest.mark.skipif(nvcc_here() is None, reason="no nvcc for SGLang's kernel"),
        ),
        (DIRECT, {"ranks": 2, "env": CHECKED}),
    ],
    ids=["direct, graphs", "kernel, a slow bus", "two ranks"],
)
def test_states_are_restored_as_transformers_computes(
    tmp_path: Path, way: tuple[str, str], more: dict[str, Any]
) -> None:
    model = write_state_model(tmp_path / "model")
    asked = prompts(2, LONG, seed=33)
    env = {**linear_layers(), **more.pop("env", {})}
    policy = {"min_restore_tokens": 128}
    with on_stand_in(
        tmp_path, way, model_path=model, env=env, policy=policy, **STATES, **more
    ) as server:
        log = log_of(server)
        assert "Components: (<ComponentType.FULL: 0>, <ComponentType.MAMBA: 2>)" in log
        assert "copies by StagedCopies by TritonScatter" in log
        first, again = restored(server, asked)
        check_restored(server, again, more.get("ranks", 1), STATES["page_size"])
        assert set(counted(server, "restore_proof_pages_total", "result")) == {"equal"}
        assert "a next turn finds the answer before it up to a multiple of 64 tokens" in log
    for right, computed, back in zip(wanted(asked, path=model), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


@pytest.mark.slow
@pytest.mark.parametrize("proof_of", ["auto", "off"])
def test_a_state_that_does_not_come_is_found_before_a_forward_reads_it(
    tmp_path: Path, proof_of: str
) -> None:
    """Or in the answers, where pages are not compared."""
    model, spoil = write_state_model(tmp_path / "model"), tmp_path / "spoil"
    mistake = {"STAND_IN_MISTAKE": "anchors_left_out", "STAND_IN_SPOIL": str(spoil)}
    policy = {"proof": proof_of, "min_restore_tokens": 128}
    env = {**linear_layers(), **mistake}
    with on_stand_in(tmp_path, model_path=model, env=env, policy=policy, **STATES) as server:
        where, page = r"in the recurrent states of layer \d", STATES["page_size"]
        asked = prompts(2, LONG, seed=34)
        check_mistake_is_found(server, spoil, model, asked, proof_of, where, page)


def asked_by_a_crowd(server: Served, rounds: int) -> tuple[int, int]:
    """Requests four at a time that evict each other from the device: answers, and how many of them
    are transformers'.
    """
    asked = with_shared_prefix(6, 160, 240, seed=11)
    right = wanted(asked)
    got = 0
    for number in range(rounds):
        answers = crowd(server, asked, at_once=4, seed=number)
        got += sum(one.is_met(answer) for one, answer in zip(right, answers, strict=True))
        server.settle()
    return rounds * len(asked), got


@pytest.mark.slow
def test_requests_that_evict_each_other_are_answered_as_transformers_does(tmp_path: Path) -> None:
    with on_stand_in(tmp_path, KERNEL, graphs=(1, 2, 4), jitter_us=1500, **CROWD) as server:
        answers, right = asked_by_a_crowd(server, rounds=3)
        assert right == answers
        assert counted(server, "restore_ended_total", "how").get("met", 0) > 0
        assert set(pages(server)) == {"equal"}


# --- mistakes


@pytest.mark.slow
def test_wrong_pages_are_seen_in_place_and_in_answers(tmp_path: Path) -> None:
    asked = prompts(2, LONG, seed=12)
    env = {"STAND_IN_MISTAKE": "exchanged_layers"}
    with on_stand_in(tmp_path, policy=UNPROVEN, env=env) as server:
        first, again = restored(server, asked)
        assert pages(server).get("differs", 0) > 0
    right = wanted(asked)
    assert all(one.is_met(answer) for one, answer in zip(right, first, strict=True))
    assert not all(one.is_met(answer) for one, answer in zip(right, again, strict=True))


def beside_a_graph(server: Served, asked: list[list[int]]) -> list[Answer]:
    """The answers to prompts in the store, each asked while the device pool is full, until a
    request ends at a token that nobody foresaw. Then a decode graph runs that still writes a row of
    the request that ended, into a page which the load takes first.
    """
    found = []
    for place, ids in enumerate(asked):
        ending, *others = prompts(3, 200, seed=40 + place)
        (alone,) = wanted([ending], 12)
        stop = next(n for n in range(5, 12) if alone.tokens[n] not in alone.tokens[:n])
        with ThreadPoolExecutor(3) as pool:
            begun = threading.Barrier(4)
            tasks = [
                pool.submit(streamed, server, one, begun, tokens, stops)
                for one, tokens, stops in (
                    (ending, 40, [alone.tokens[stop]]),
                    *((one, 15, []) for one in others),
                )
            ]
            begun.wait(120)
            found.append(server.ask(ids))
            assert [task.result() for task in tasks] == [stop + 1, 15, 15]
        server.flush()
    return found


def streamed(
    server: Served, ids: list[int], begun: threading.Barrier, tokens: int, stops: list[int]
) -> int:
    """Asks, waits with others for the first token of all, and returns how many there were."""
    ends = {"temperature": 0, "max_new_tokens": tokens, "stop_token_ids": stops}
    body = {"input_ids": ids, "sampling_params": ends, "stream": True}
    request = urllib.request.Request(
        server.server.url + "/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    count = 0
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                if not count:
                    begun.wait(120)
                count = json.loads(line[6:])["meta_info"]["completion_tokens"]
    return count


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["", "fence_without_the_forward"])
def test_slots_are_written_when_a_decode_graph_has_left_them(tmp_path: Path, mistake: str) -> None:
    asked = prompts(4, 500, seed=21)
    env = {"STAND_IN_DECODE_MS": "250", "STAND_IN_MISTAKE": mistake}
    policy = {"restore": "load", **UNPROVEN}
    pool = {"max_total_tokens": 1088, "context_length": 1000}
    with on_stand_in(
        tmp_path, KERNEL, graphs=(4,), jitter_us=0, read_gbps=0, policy=policy, env=env, **pool
    ) as server:
        for ids in asked:
            server.ask(ids, 1)
        server.flush()
        answers = beside_a_graph(server, asked)
        assert sum(answer.storage for answer in answers) > 0
    right: list[Wanted] = wanted(asked)
    met = [one.is_met(answer) for one, answer in zip(right, answers, strict=True)]
    assert all(met) is (not mistake), met


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["exchanged_layers", "no_fence", "fence_without_the_forward"])
def test_the_check_at_start_leaves_a_wrong_way_of_copying_before_a_request_comes(
    tmp_path: Path, mistake: str
) -> None:
    """SGLang's own kernels are right, so prefixes are restored by these."""
    asked = prompts(2, LONG, seed=13)
    with on_stand_in(tmp_path, env={"STAND_IN_MISTAKE": mistake}) as server:
        log = log_of(server)
        assert "pages are not copied by StagedCopies by TritonScatter" in log
        assert "copies by StreamCopies" in log
        first, again = restored(server, asked)
        check_restored(server, again)
    for right, computed, back in zip(wanted(asked), first, again, strict=True):
        assert right.is_met(computed) and right.is_met(back)


def loaded_bytes(server: Served) -> int:
    """What restorations have loaded to the device."""
    return sum(counted(server, "restore_loaded_bytes_total", "link").values())


@pytest.mark.slow
def test_a_refuted_server_serves_on_by_sglangs_own_way_and_the_next_one_begins_so(
    tmp_path: Path,
) -> None:
    """A copy that writes a wrong row once requests are there, in a server with the launch line."""
    long, *short = prompts(1, 1200, seed=15) + prompts(20, LONG, seed=16)
    right, *others = wanted([long, *short])
    spoil = tmp_path / "spoil"
    env = {"STAND_IN_MISTAKE": "spoiled_row", "STAND_IN_SPOIL": str(spoil)}
    with on_launch_line(tmp_path, env=env) as server:
        server.restore("load")
        assert right.is_met(server.ask(long)) and are_met(others, crowd(server, short, 4, 0))
        server.flush()
        again = server.ask(long)
        assert right.is_met(again) and again.storage >= 16 * GPU_PAGE
        assert waited_for(lambda: proof(server) == State.PROVING and loaded_bytes(server) > 0)

        spoil.touch()
        server.flush()
        assert right.is_met(server.ask(long))
        assert waited_for(lambda: proof(server) == State.REFUTED)
        assert counted(server, "restore_proof_pages_total", "result")["differs"] > 0
        log = log_of(server)
        assert "restoration is not right on this device" in log
        assert "not looking ahead any more" in log
        assert waited_for(lambda: "refuted" in "".join(verdicts(tmp_path)))

        server.settle()
        before = loaded_bytes(server), counted(server, "lookahead_moved_bytes_total", "link")
        from_storage = 0
        for seed in range(1, 6):
            server.flush()
            answers = crowd(server, short, 4, seed)
            assert are_met(others, answers)
            from_storage += sum(answer.storage for answer in answers)
        assert from_storage > 0, "SGLang reads them itself"
        server.settle()
        after = loaded_bytes(server), counted(server, "lookahead_moved_bytes_total", "link")
        assert after == before
        assert not change(server, policy__restore=1)
        begun = len(log_of(server))

    spoil.unlink()  # the check at start finds nothing: what is left is what was remembered
    with on_launch_line(tmp_path, env=env) as server:
        log = log_of(server)[begun:]
        assert "restoring is off: it was not right on" in log
        assert "kvtier: looking ahead" not in log
        assert are_met([right, *others], crowd(server, [long, *short], 4, 6))
        assert waited_for(lambda: proof(server) == State.REFUTED)
        assert not loaded_bytes(server)


def are_met(right: list[Wanted], answers: list[Answer]) -> bool:
    return all(one.is_met(answer) for one, answer in zip(right, answers, strict=True))


def verdicts(folder: Path) -> list[str]:
    """What was written of the proof beside the store's pages."""
    return [path.read_text() for path in (folder / "store").glob("**/proof.json")]
