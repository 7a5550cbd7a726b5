"""What a user meets when something is wrong with the disk or the installation: a message, and no
lost request.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import ADMIN, TOKENS, changed, config_file, flags, prompts, refused, serving

pytestmark = [pytest.mark.server, pytest.mark.slow]
WHOLE = (TOKENS - 1) // 16 * 16


@contextmanager
def small_filesystem(folder: Path, size: str):
    """A tmpfs of its own; skips where this user cannot mount."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small filesystem needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


def test_damaged_page_files_cost_hits_and_change_no_answer(tmp_path):
    asked = prompts(3, seed=21)
    with serving(tmp_path, flags(), config_file(tmp_path)) as server:
        first = [server.ask(ids) for ids in asked]
        server.flush()
        for segment in (tmp_path / "store").glob("*/*/seg-*"):
            with segment.open("r+b") as file:
                for offset in range(6000, segment.stat().st_size, 100_000):
                    file.seek(offset)
                    file.write(b"\xa5" * 64)
                os.fsync(file.fileno())
        again = [server.ask(ids) for ids in asked]
        assert [a.tokens for a in again] == [a.tokens for a in first]
        server.settle()
        assert server.metric("kvtier:pages_corrupt_total") > 0
        assert sum(a.storage for a in again) < WHOLE * 3


def test_a_flush_beside_a_read_that_takes_longer_than_sglang_waits_does_not_end_the_server(
    tmp_path,
):
    asked = prompts(2, seed=23)
    sections = {
        "throttle": {"read_gbps": 0.0002},
        "policy": {"restore": "off"},
    }  # half a minute for one prompt
    arguments = flags(hicache_storage_prefetch_policy="timeout")
    with serving(tmp_path, arguments, config_file(tmp_path, **sections)) as server:
        first = [server.ask(ids) for ids in asked]
        server.flush()
        again = server.ask(
            asked[0]
        )  # SGLang gives its read up after a second or two; the I/O thread goes on
        server.call("POST", "/flush_cache", {}, ADMIN)
        assert again.tokens == first[0].tokens
        assert server.ask(asked[1]).tokens == first[1].tokens


def test_a_full_filesystem_stops_writes_and_nothing_else(tmp_path):
    with small_filesystem(tmp_path / "small", "3m") as folder:
        config = config_file(
            tmp_path, store={"path": str(folder / "store"), "segment_bytes": "1MiB"}
        )
        asked = prompts(6, seed=22)
        with serving(tmp_path, flags(), config) as server:
            first = [server.ask(ids) for ids in asked]
            server.flush()
            again = [server.ask(ids) for ids in reversed(asked)]
            assert [a.tokens for a in reversed(again)] == [a.tokens for a in first]
            assert sum(a.storage for a in again) > 0, "what had found room before is still read"
            server.settle()
            assert (
                server.metric("kvtier:pages_refused_total")
                + server.metric("kvtier:pages_evicted_total")
                > 0
            )
            assert server.metric("kvtier:store_bytes_on_disk") <= 3 << 20


def test_a_read_only_folder_is_refused_at_start_with_what_to_do(tmp_path):
    with small_filesystem(tmp_path / "disk", "1m") as folder:
        remount(folder, "ro")
        log = refused(
            tmp_path, flags(), config_file(tmp_path, store={"path": str(folder / "store")})
        )
        assert "Read-only file system" in log and "store.path" in log


def test_an_sglang_without_a_symbol_refuses_what_was_asked_for_by_name(tmp_path):
    log = refused(tmp_path, flags(), config_file(tmp_path), **changed(GONE=tmp_path))
    assert "restore cannot be had from this SGLang" in log
    assert "Scheduler.gone: missing" in log and "leave that setting at auto" in log
    assert "Load weight" not in log


def test_an_sglang_without_a_symbol_serves_without_what_needs_it(tmp_path):
    config = config_file(tmp_path, policy={"restore": "auto"})
    with serving(tmp_path, flags(), config, **changed(GONE=tmp_path)) as served:
        ids = prompts(1, seed=1)[0]
        first = served.ask(ids)
        served.flush()
        again = served.ask(ids)
        assert again.storage > 0 and again.tokens == first.tokens
        text = served.call("GET", "/metrics", None, raw=True)
        off = {
            line.split('feature="')[1].split('"')[0]
            for line in text.splitlines()
            if line.startswith("kvtier:feature{") and line.endswith(" 0.0")
        }
        assert off == {"restore", "lookahead"}
        assert "kvtier:restore_started_total{" not in text
    log = (tmp_path / "server.log").read_text(errors="replace")
    (line,) = {line.split("kvtier: ")[1] for line in log.splitlines() if "restore is off" in line}
    assert "Scheduler.gone: missing" in line


def test_a_server_whose_plugins_were_restricted_refuses_instead_of_serving_stock(tmp_path):
    log = refused(tmp_path, flags(), config_file(tmp_path), SGLANG_PLUGINS="kvtier_cpu")
    assert "invalid choice: 'kvtier'" in log
