"""stat, fsck and purge: right beside a running owner, right on a damaged store, and readable by
programs.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, only
from store_pages import IDENTITY, Open, key, lose_the_end, named, open_at, put, read, stored_at

from sgl_kvtier.errors import StoreBusyError, StoreError
from sgl_kvtier.sizes import format_bytes
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.tools import commands
from sgl_kvtier.tenants import digest_of, pool_of
from sgl_kvtier.types import Lookup

STAT = commands.Stat(lambda folder: None)
OTHER = Identity({"model": "other", "dtype": "float8"}, name="other")
PAGES = named(range(10))


def run(command: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(list(arguments))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for identity in (IDENTITY, OTHER):
        stored_at(tmp_path, PAGES, identity=identity)
    return tmp_path


def result(command: Any, root: Path, *arguments: str) -> tuple[int, dict]:
    out = root / "out.json"
    status = run(command, str(root), *arguments, "--json", str(out))
    return status, json.loads(out.read_text())


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_stat_says_what_the_disk_has_free_since_no_folder_keeps_the_capacity(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Env, "free_bytes", lambda self, path: 3 << 30)
    _, data = result(STAT, root)
    assert data["disk_free_bytes"] == 3 << 30
    used = format_bytes(sum(row["nbytes"] for row in data["namespaces"]))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{used} in all, and 3.0 GiB free on the disk" in said
    assert "store.capacity_bytes, which no folder keeps" in said


def test_stat_lists_identities_pages_and_owners(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_at(root, rank="tp1")
    status, data = result(STAT, root)
    assert status == 0
    assert data["schema"] == "kvtier.stat/1"
    rows = {row["identity"]["model"]: row for row in data["namespaces"]}
    assert [rows[m]["pages"] for m in ("lab", "other")] == [10, 10]
    assert [rows[m]["in_use"] for m in ("lab", "other")] == ["yes", "no"]
    assert rows["lab"]["ranks"] == 2
    assert "other" in capsys.readouterr().out


def test_stat_says_how_a_models_fingerprints_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in ("1", "2"):
        fields = {"model": {"seed": seed, "dtype": "bf16"}, "layout": "1"}
        open_at(tmp_path, Identity(fields, name="m")).close()
    open_at(tmp_path, OTHER).close()
    run(STAT, str(tmp_path))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "differs" in line)
    assert line.endswith('opened last: model.seed = "1", not "2"')


def test_json_alone_goes_to_standard_output(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(STAT, str(root), "--json", "-")
    assert len(json.loads(capsys.readouterr().out)["namespaces"]) == 2


def test_a_sound_store_passes_fsck(root: Path) -> None:
    status, data = result(commands.fsck, root)
    assert status == 0
    rows = [(row["pages"], row["good"], row["corrupt"]) for row in data["ranks"]]
    assert rows == [(10, 10, 0)] * 2


def test_fsck_finds_damage_and_repairs_it_only_when_told(root: Path) -> None:
    store = open_at(root)
    store.damage(key(3), bit=99)
    store.close()
    for arguments, damaged, status in (((), 1, 1), (("--repair",), 0, 0), ((), 0, 0)):
        found_status, data = result(commands.fsck, root, *arguments)
        assert (found_status, data["damaged"]) == (status, damaged)
    outcomes = [outcome for outcome, _ in read(open_at(root), dict.fromkeys(PAGES, 5000))]
    assert outcomes.count(ReadOutcome.OK) == 9


def test_fsck_refuses_beside_a_running_owner(root: Path) -> None:
    open_at(root)
    with pytest.raises(StoreBusyError, match="Stop that server first"):
        run(commands.fsck, str(root))
    assert run(commands.fsck, str(root), "--match", "model=other") == 0


def test_purge_removes_what_matches_and_spares_what_is_in_use(root: Path) -> None:
    with pytest.raises(StoreError, match="say which pages"):
        run(commands.purge, str(root))
    _, data = result(commands.purge, root, "--all", "--dry-run")
    assert {row["removed"] for row in data["namespaces"]} == {"would be"}
    store = open_at(root)
    for more, removed in ((["--dry-run"], "would be"), ([], "yes")):
        status, data = result(commands.purge, root, "--all", *more)
        assert status == 1
        assert {row["identity"]["model"]: row["removed"] for row in data["namespaces"]} == {
            "lab": "no: in use. Stop that server first",
            "other": removed,
        }
    assert store.lookup([key(1)]) == [Lookup.HIT]
    store.close()
    assert run(commands.purge, str(root), "--match", "model=lab") == 0
    assert [p.name for p in root.iterdir()] == ["out.json"]


def test_an_identity_is_found_by_its_name_and_by_nested_fields(root: Path) -> None:
    model = {"dtype": "float16", "revision": None}
    nested = Identity({"engine": "x", "model": model, "ranks": {"tp_size": 2}}, name="Big-8B")
    open_at(root, nested).close()
    for match in ("name=Big-8B", "model.dtype=float16", "ranks.tp_size=2"):
        _, data = result(STAT, root, "--match", match)
        assert [row["name"][:6] for row in data["namespaces"]] == ["Big-8B"]
    with pytest.raises(StoreError, match=r"no fingerprint has model=Big.*: model\.dtype=float16, "):
        run(commands.purge, str(root), "--match", "model=Big")
    with pytest.raises(StoreError, match=r"has name=Big\. There are: name=Big-8B, name=lab, name="):
        run(commands.purge, str(root), "--match", "name=Big")
    with pytest.raises(StoreError, match=r"There are: dtype, engine, model, model\.dtype, "):
        run(commands.purge, str(root), "--match", "modl=Big")


def test_looking_at_a_store_changes_nothing_in_it(root: Path) -> None:
    open_at(root, rank="tp1")
    before = files(root)
    run(STAT, str(root))
    assert files(root) == before


def test_a_path_without_a_store_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"store\.path"):
        run(STAT, str(tmp_path / "none"))


def test_a_store_that_this_user_may_not_read_is_not_called_missing_or_damaged(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    advice = "Permission denied. Run this as the user whose servers use it"
    monkeypatch.setattr(Env, "open", denied)
    run(STAT, str(root))
    assert capsys.readouterr().out.count(f"config.json: {advice}") == 2
    monkeypatch.setattr("sgl_kvtier.store.tools.offline.list_ranks", lambda *_: [])
    with pytest.raises(StoreError, match=advice):
        run(commands.fsck, str(root))
    monkeypatch.setattr(Env, "list", denied)
    for command in (STAT, commands.fsck):
        with pytest.raises(StoreError, match=f"{root}: {advice}"):
            run(command, str(root))


@pytest.mark.parametrize("command", [STAT, commands.fsck, commands.purge])
def test_a_folder_without_a_store_is_no_empty_store(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--all"] if command is commands.purge else []
    said = f"no store in {tmp_path}: give the folder that store.path"
    with pytest.raises(StoreError, match=said):
        run(command, str(tmp_path), *more)
    assert capsys.readouterr().out == ""


def test_pages_offered_twice_are_admitted_by_the_second_hit_filter(tmp_path: Path) -> None:
    store = open_at(tmp_path, admission="second-hit")
    for pool in ("draft", "kv"):
        assert put(store, PAGES, pool) == [PutOutcome.NOT_ADMITTED] * 10
    for pool in ("draft", "kv"):
        assert put(store, PAGES, pool) == [PutOutcome.STORED] * 10
        assert put(store, PAGES, pool) == [PutOutcome.KEPT] * 10
    assert (store.stats().pages_not_admitted, store.stats().pages_refused) == (20, 0)


def test_what_went_to_the_device_is_reported_beside_what_was_stored(opened: Open) -> None:
    store = opened()
    put(store, named(range(100), 4096))
    stats = store.stats()
    # a header block per 4 KiB page, and the index's log
    assert 2.0 < stats.bytes_written_to_device / stats.bytes_written < 2.1


def a_models_folder(root: Path) -> dict[Path, bytes]:
    """Somebody's fine-tuned model, called as identities are; and its files."""
    folder = root / "finetune-00c0ffee00c0ffee"
    (folder / "tp0" / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["Llama"]}')
    (folder / "tp0" / "lock").write_text("mine")
    (folder / "tp0" / "deep" / "text").write_text("mine")
    return files(folder)


def test_a_file_beside_the_identities_is_passed_over_and_stays(root: Path) -> None:
    """As the log of a server on an emulated device (lab/paced)."""
    (log := root / "pace.jsonl").write_text("{}\n")
    for command, *more in ((STAT,), (commands.fsck,), (commands.purge, "--all")):
        assert result(command, root, *more)[0] == 0
    assert log.read_text() == "{}\n" and not [path for path in root.iterdir() if path.is_dir()]


def test_purge_leaves_a_strangers_folder_and_says_what_to_do(root: Path) -> None:
    mine = a_models_folder(root)
    for arguments in (("--all", "--dry-run"), ("--all",)):
        status, data = result(commands.purge, root, *arguments)
        removed = {row["name"]: row["removed"] for row in data["namespaces"]}
        strangers = removed.pop("finetune-00c0ffee00c0ffee")
        assert status == 1
        assert strangers.startswith("no: ") and "remove it yourself" in strangers
        assert set(removed.values()) == {"would be" if "--dry-run" in arguments else "yes"}
    (root / "out.json").unlink()
    assert files(root) == mine


def test_stat_and_fsck_pass_a_strangers_folder_over_and_say_so(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = a_models_folder(root)
    rank = root / "finetune-00c0ffee00c0ffee" / "tp0"
    (rank / "lock").rename(rank / "README")
    status, data = result(STAT, root)
    assert status == 0 and len(data["namespaces"]) == 2
    status, data = result(commands.fsck, root)
    assert status == 0 and len(data["ranks"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("left out:") == 2 and "finetune-00c0ffee00c0ffee" in printed
    assert len(list((root / "finetune-00c0ffee00c0ffee").rglob("*"))) == len(before) + 2


def test_fsck_says_that_a_config_is_damaged(root: Path) -> None:
    (root / IDENTITY.directory_name / "config.json").write_text("{")
    with pytest.raises(StoreError, match=r"config\.json is damaged"):
        run(commands.fsck, str(root))
    assert run(commands.fsck, str(root), "--match", "model=other") == 0


@pytest.mark.parametrize("kind", ["8 TiB", "fifo"])
def test_an_index_that_cannot_be_read_whole_hinders_nobody(root: Path, kind: str) -> None:
    log = root / IDENTITY.directory_name / "tp0" / "index.log"
    if kind == "fifo":
        log.unlink()
        os.mkfifo(log)
    else:
        os.truncate(log, 8 << 40)
    _, data = result(STAT, root, "--match", "model=lab")
    assert [row["pages"] for row in data["namespaces"]] == [0]
    status, data = result(commands.fsck, root, "--match", "model=lab")
    assert (status, data["ranks"][0]["good"], data["ranks"][0]["index_whole"]) == (0, 10, False)
    assert stat.S_ISFIFO(log.stat().st_mode) or log.stat().st_size == 8 << 40
    assert run(commands.fsck, str(root), "--match", "model=lab", "--repair") == 0
    assert not log.exists()
    assert open_at(root).stats().pages == 10
    assert log.is_file() and log.stat().st_size < 1 << 20


def test_a_repair_keeps_what_a_log_that_ends_early_says_was_deleted(root: Path) -> None:
    env = Scripted()
    store = open_at(root, env=env)
    env.fails = only("head")
    assert store.delete(list(PAGES)) == 10
    store.close()
    lose_the_end(root / IDENTITY.directory_name)
    assert run(commands.fsck, str(root), "--match", "model=lab", "--repair") == 0
    assert open_at(root).stats().pages == 0


def test_fsck_leaves_what_is_no_segment_alone_even_when_it_repairs(root: Path) -> None:
    rank = root / IDENTITY.directory_name / "tp0"
    (rank / "seg-00000002").write_bytes(b"a film" * 5000)
    (rank / "seg-00000003").mkdir()
    (rank / "seg-00000004").symlink_to(root / "out.json")
    os.mkfifo(rank / "seg-00000005")
    assert run(commands.fsck, str(root), "--repair") == 0
    assert (rank / "seg-00000002").read_bytes() == b"a film" * 5000
    assert (rank / "seg-00000003").is_dir()
    assert (rank / "seg-00000004").is_symlink()
    assert (rank / "seg-00000005").exists()


class Master(BaseHTTPRequestHandler):
    """Answers as Mooncake's master does; `figures` are of the class."""

    figures = ""

    def do_GET(self) -> None:
        text = self.figures if self.path == "/metrics" else "10.0.0.1:5\n10.0.0.2:5\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *said: object) -> None:
        pass


@pytest.fixture
def master() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Master)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_stat_remote_shows_what_a_master_says(
    master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = (
        "# HELP master_key_count keys\nmaster_key_count 7\nmaster_allocated_bytes 1e+06\n"
        "master_total_capacity_bytes 268435456\nmaster_evicted_key_count 3\n"
        'master_active_clients 2\nsegment_allocated_bytes{segment="10.0.0.1:5"} 0\n'
    )
    monkeypatch.setattr(Master, "figures", figures)
    out = tmp_path / "out.json"
    assert run(STAT, "--remote", master, "--json", str(out)) == 0
    said = json.loads(out.read_text())
    assert said["schema"] == "kvtier.stat.remote/1"
    names = ("master", "keys", "nbytes", "capacity_bytes", "evicted_keys", "clients", "segments")
    assert [said[name] for name in names] == [
        master, 7, 1_000_000, 256 << 20, 3, 2, ["10.0.0.1:5", "10.0.0.2:5"],
    ]  # fmt: skip


@pytest.mark.parametrize("figures", ["", "master_key_count many\n", "<html>"])
def test_stat_remote_refuses_what_is_no_master(
    figures: str, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Master, "figures", figures)
    with pytest.raises(StoreError, match="no Mooncake master"):
        run(STAT, "--remote", master)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "not an address", "[::1"])
def test_stat_remote_says_what_to_give_where_nothing_answers(address: str) -> None:
    with pytest.raises(StoreError, match="metrics_port"):
        run(STAT, "--remote", address)


def test_stat_needs_a_folder_or_a_master() -> None:
    with pytest.raises(StoreError, match="--remote"):
        run(STAT)


ACME, BETA = digest_of("salt of acme"), digest_of("salt of beta")
ALIKE = r"tp0-pp0(?:-dp[0-9]+)?(?:-copy[0-9]+)?"


def served(path: Path) -> DiskStore:
    return open_at(path, rank="tp0-pp0", alike=ALIKE)


def tenants_at(path: Path) -> tuple[DiskStore, dict[Any, bytes], dict[Any, bytes]]:
    """A server's store with 30 pages of one tenant and 20 of another."""
    store = served(path)
    acme, beta = named(("acme", i) for i in range(30)), named(("beta", i) for i in range(20))
    put(store, acme, pool_of("kv", ACME))
    put(store, beta, pool_of("kv", BETA))
    return store, acme, beta


def salt_on_stdin(monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(salt + "\n"))


def test_stat_counts_pages_by_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, _, _ = tenants_at(tmp_path)
    put(store, named(["nobody's"]))
    _, data = result(STAT, tmp_path)
    store.close()
    (row,) = data["namespaces"]
    assert row["pages"] == 51
    assert row["tenants"] == [
        {"digest": ACME, "pages": 30, "nbytes": 30 * 12288},
        {"digest": BETA, "pages": 20, "nbytes": 20 * 12288},
        {"digest": "", "pages": 1, "nbytes": 12288},
    ]
    shown = capsys.readouterr().out
    assert ACME in shown and "(none named)" in shown


def test_stat_says_the_digest_of_a_salt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    salt_on_stdin(monkeypatch, "salt of acme")
    assert run(STAT, "--salt", "-") == 0
    assert capsys.readouterr().out == f"{ACME}\n"
    with pytest.raises(StoreError, match="on standard input"):
        run(STAT, "--salt", "")


def test_a_tenant_is_purged_from_folders_that_nobody_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, acme, beta = tenants_at(tmp_path)
    two = served(tmp_path)
    more = named(("acme", i) for i in range(100, 110))
    put(two, more, pool_of("kv", ACME))
    one.close()
    two.close()
    salt_on_stdin(monkeypatch, "salt of acme")
    status, data = result(commands.purge, tmp_path, "--salt", "-", "--dry-run")
    assert (status, [row["removed"] for row in data["namespaces"]]) == (0, ["would be"])
    assert [row["pages"] for row in data["namespaces"]] == [40]
    status, data = result(commands.purge, tmp_path, "--salt", "salt of acme")
    assert (status, [row["removed"] for row in data["namespaces"]]) == (0, ["yes"])
    for _ in range(2):
        again = served(tmp_path)
        assert again.lookup([*acme, *more]) == [Lookup.MISS] * 40
        assert again.lookup(list(beta)) == [Lookup.HIT] * 20
        again.close()


def test_a_salt_without_pages_is_not_taken_for_a_tenant_that_was_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants_at(tmp_path)[0].close()
    none = "no page of this tenant is here"
    for salt, said in (("salt of acne", True), ("salt of acme", False)):
        assert run(commands.purge, str(tmp_path), "--salt", salt) == 0
        assert (none in capsys.readouterr().out) is said


def test_a_tenant_is_purged_beside_running_servers(tmp_path: Path) -> None:
    one, acme, beta = tenants_at(tmp_path)
    two = served(tmp_path)
    two.follow()
    assert two.lookup(list(acme)) == [Lookup.HIT] * 30
    status, data = result(commands.purge, tmp_path, "--salt", "salt of acme")
    assert (status, [row["removed"] for row in data["namespaces"]]) == (0, ["yes"])
    for store in (one, two):
        store.follow()
        assert store.lookup(list(acme)) == [Lookup.MISS] * 30
        assert store.lookup(list(beta)) == [Lookup.HIT] * 20
    # What is stored from now on is new.
    assert put(one, acme, pool_of("kv", ACME)) == [PutOutcome.STORED] * 30
    one.close()
    two.close()
    assert served(tmp_path).lookup(list(acme)) == [Lookup.HIT] * 30


def test_pages_of_a_removed_segment_are_not_counted_and_hold_up_no_purge(tmp_path: Path) -> None:
    store, _, beta = tenants_at(tmp_path)
    assert store.clear() == 50
    put(store, beta, pool_of("kv", BETA))
    _, data = result(STAT, tmp_path)
    assert data["namespaces"][0]["pages"] == store.stats().pages == 20
    status, data = result(commands.purge, tmp_path, "--salt", "salt of acme")
    assert (status, data["namespaces"][0]["removed"]) == (0, "yes")


def test_a_purge_says_so_where_a_server_does_not_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_kvtier.store.tools.tenant.purge_tenant.__defaults__", (0.3,))
    alone = open_at(tmp_path, rank="tp0-pp0")
    put(alone, named([1]), pool_of("kv", ACME))
    status, data = result(commands.purge, tmp_path, "--salt", "salt of acme")
    assert status == 1
    assert data["namespaces"][0]["removed"].startswith("no: 1 pages are still there")


def test_a_salt_is_not_recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (["--salt", "secret"], ["--salt=secret"], ["--s", "secret"], ["--sal=secret"]):
        monkeypatch.setattr("sys.argv", ["kvtier", "purge", str(root), *given])
        status, data = result(commands.purge, root, *given)
        assert status == 0
        assert "secret" not in json.dumps(data)
