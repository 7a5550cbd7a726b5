"""kvtier doctor: what it finds, and what it says to do."""

from __future__ import annotations

import errno
import json
import os
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier import cli, extras
from sgl_kvtier.launch import tier_flags
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.runtime.proof import memory
from sgl_kvtier.runtime.proof.start import StartDiffers, StartResult
from sgl_kvtier.runtime.sglang import features, seams
from sgl_kvtier.runtime.sglang.features import FEATURES
from sgl_kvtier.runtime.tools import doctor, gpu_probe

SYMBOLS = seams.check
"""Asked for all symbols it takes a second, so that most tests do without."""


@pytest.fixture(autouse=True)
def checked_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "check", lambda groups=(): SYMBOLS(groups) if groups else [])


def settings(folder: Path, **sections: Any) -> tuple[str, str]:
    """The words that name a file of these settings, whose store is below the folder."""
    path = folder / "kvtier.json"
    path.write_text(json.dumps({"store": {"path": str(folder / "store")}, **sections}))
    return ("--config", str(path))


def findings(capsys, *arguments: str) -> dict[str, dict[str, str]]:
    """What doctor --json says, by check; and that its exit status fits."""
    status = cli.main(["doctor", "--json", "-", *arguments])
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "kvtier.doctor/1"
    assert status == (1 if any(f["state"] == "fail" for f in result["findings"]) else 0)
    return {f["check"]: f for f in result["findings"]}


def test_a_good_machine_is_ready(tmp_path, capsys):
    found = findings(capsys, "--store", str(tmp_path))
    assert {f["state"] for f in found.values()} <= {"ok", "warn"}
    assert found["feature: storage"]["state"] == "ok"
    assert found["I/O threads"]["found"] in ("compiled", "Python")
    assert "MB/s" in found["disk speed"]["found"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("built", "state", "advice"),
    [("compiled", "ok", ""), ("source", "warn", "and without -e: pip install ")],
)
def test_a_planner_that_runs_as_source_is_a_warning_that_says_how_to_compile_it(
    built, state, advice, capsys, monkeypatch
):
    monkeypatch.setattr(doctor, "planner_build", lambda: built)
    found = findings(capsys, "--no-disk")["planner"]
    assert found["state"] == state and advice in found["advice"]


@pytest.mark.parametrize(
    ("noted", "source"),
    [
        ({"url": "file:///home/a/clone", "dir_info": {"editable": True}}, "/home/a/clone"),
        ({"url": "file:///home/a/a%20clone", "dir_info": {}}, "'/home/a/a clone'"),
        ({"url": "https://host/a.git", "vcs_info": {"vcs": "git"}}, "git+https://host/a.git"),
        ({"url": "file:///tmp/sgl_kvtier-1-any.whl"}, "--no-binary sgl-kvtier sgl-kvtier"),
        (None, "--no-binary sgl-kvtier sgl-kvtier"),
    ],
)
def test_the_advice_installs_from_where_the_package_came_from(noted, source):
    said = extras.compiling(None if noted is None else json.dumps(noted))
    assert said == f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def test_no_folder_above_a_missing_one_is_left_behind_either(tmp_path, capsys):
    found = findings(capsys, "--store", str(tmp_path / "a" / "b" / "c"), "--no-disk")
    assert found["disk"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_home_is_the_users_and_no_folder_of_that_name_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for words in (["--store", "~/kv"], ["--config", "kvtier.json"]):
        (tmp_path / "kvtier.json").write_text('{"store": {"path": "~/kv"}}')
        found = findings(capsys, *words, "--no-disk")["disk"]
        assert found["found"].startswith(str(tmp_path / "home" / "kv"))
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier.json"]


def test_a_wrong_setting_fails_with_its_message(tmp_path, capsys):
    found = findings(capsys, *settings(tmp_path, store={"path": "x", "io_threads": -1}))
    assert found["settings"]["state"] == "fail"
    assert "store.io_threads = -1" in found["settings"]["advice"]


def test_the_environment_says_what_the_settings_leave_open_as_for_a_server(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("KVTIER_STORE_PATH", str(tmp_path / "pages"))
    found = findings(capsys, *settings(tmp_path, store={"capacity_bytes": "80%"}), "--no-disk")
    assert found["settings"]["state"] == "ok"
    assert found["disk"]["found"].startswith(str(tmp_path / "pages"))
    monkeypatch.setenv("KVTIER_CAPACITY", "much")
    found = findings(capsys, "--store", str(tmp_path), "--no-disk")["disk"]
    assert found["state"] == "fail" and 'store.capacity_bytes = "much"' in found["advice"]


def test_a_disk_whose_speed_cannot_be_measured_fails_with_what_to_do(tmp_path, capsys, monkeypatch):
    def over_quota(fd, block):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(doctor.disk_probe.os, "write", over_quota)
    speed = findings(capsys, "--store", str(tmp_path))["disk speed"]
    assert speed["state"] == "fail" and "quota" in speed["found"] and "quota" in speed["advice"]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_on_a_disk_without_room(tmp_path, monkeypatch):
    full = SimpleNamespace(f_bavail=1023, f_frsize=4096)
    monkeypatch.setattr(doctor.disk_probe.os, "statvfs", lambda folder: full)
    with pytest.raises(OSError, match="No space left"):
        doctor.disk_probe.measure(tmp_path, direct=False)


def test_a_folder_that_cannot_be_made_fails(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    found = findings(capsys, "--store", str(tmp_path / "file" / "store"))
    assert found["disk"]["state"] == "fail"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving folders away needs root")
def test_a_folder_of_somebody_else_that_others_may_write_fails_with_what_to_do(tmp_path, capsys):
    tmp_path.chmod(0o777)
    os.chown(tmp_path, 65534, 65534)
    found = findings(capsys, "--store", str(tmp_path), "--no-disk")
    assert found["store.path"]["state"] == "fail"
    assert "Set store.path to a new folder below it" in found["store.path"]["advice"]


def test_a_filesystem_on_which_no_page_could_be_written_fails_and_names_the_setting(
    tmp_path, capsys
):
    store = {"path": str(tmp_path / "s"), "min_free_bytes": 1 << 50}
    found = findings(capsys, *settings(tmp_path, store=store), "--no-disk")["disk"]
    assert found["state"] == "fail" and "no page could be written" in found["found"]
    assert "store.min_free_bytes = " in found["advice"]


def test_a_page_hash_that_cannot_be_compiled_fails_with_the_packages(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "compile_page_hash", lambda: "cannot: apt-get install g++")
    found = findings(capsys, "--no-disk")["page hash"]
    assert (found["state"], found["advice"]) == ("fail", "cannot: apt-get install g++")
    monkeypatch.setattr(doctor, "compile_page_hash", lambda: "")
    assert findings(capsys, "--no-disk")["page hash"]["state"] == "ok"


def shown(capsys, *words: str) -> list[str]:
    """The lines that doctor prints."""
    cli.main(["doctor", "--no-disk", *words])
    return capsys.readouterr().out.splitlines()


def test_failures_come_first_and_what_to_do_is_whole_on_a_line_of_its_own(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    lines = shown(capsys)
    assert lines[0].split()[:2] == ["fail", "SGLANG_PLUGINS"]
    assert lines[1].strip() == "unset it, or add kvtier,kvtier_cpu"
    assert lines[-1] == "1 to correct before a server can run here"


def test_features_that_are_there_are_one_row(capsys):
    assert not any(" feature: " in line for line in shown(capsys))
    said = " ".join(" ".join(shown(capsys)).split())
    assert f"features {', '.join(feature.name for feature in FEATURES)} " in said
    rows = [line for line in shown(capsys, "--verbose") if " feature: " in line]
    assert len(rows) == len(FEATURES) and all("symbols as expected" in row for row in rows)


def test_a_machine_that_is_ready_is_told_how_to_start_a_server(tmp_path, capsys):
    last = shown(capsys, "--store", str(tmp_path))[-3:]
    assert last[0] == f"ready: kvtier serve MODEL --store {tmp_path}"
    assert shlex.split(last[2]) == tier_flags(f'{{"store": {{"path": "{tmp_path}"}}}}')


@pytest.mark.parametrize("columns", [None, "80", "60"])
def test_no_line_is_wider_than_the_terminal_but_the_launch_command(
    columns, tmp_path, capsys, monkeypatch
):
    """Without a terminal there are 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    monkeypatch.setenv("SGLANG_HUGEPAGE_SIZE", "2MB")
    monkeypatch.setattr(doctor, "planner_build", lambda: "source")
    monkeypatch.setattr(doctor, "compile_page_hash", lambda: "word " * 60)
    monkeypatch.setattr(doctor.disk_probe, "_filesystem", lambda folder: "ext4")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        lines = shown(capsys, "--store", folder)
    table = lines[:-1]
    assert lines[-1] == "2 to correct before a server can run here"
    assert [line for line in table if len(line) > int(columns or 80)] == []
    (first,) = (number for number, line in enumerate(table) if " page hash " in line)
    indent = table[first].index("cannot be compiled")
    assert all(line[:indent].strip() == "" for line in table[first + 1 : first + 4])


def test_no_sglang_fails(capsys, monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: None)
    found = findings(capsys)["sglang"]
    assert (found["state"], found["found"]) == ("fail", "not installed")


def test_an_sglang_that_nobody_has_tried_is_a_warning(capsys, monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: "0.6.0")
    found = findings(capsys)["sglang"]
    assert (found["state"], found["found"]) == ("warn", "0.6.0")
    assert "was not tried" in found["advice"]


@pytest.mark.parametrize(
    ("feature", "cards", "state"),
    [
        ("storage", [], "fail"),
        ("storage", ["/dev/nvidia0"], "fail"),
        ("hints", [], "warn"),
        ("cpu", [], "fail"),
        ("cpu", ["/dev/nvidia0"], "warn"),
    ],
)
def test_a_feature_that_is_off_is_a_row_that_names_the_symbol(feature, cards, state, monkeypatch):
    gone = seams.Seam("any", "server", "sglang.srt.server_args.ServerArgs.gone", "we call it")
    status = (seams.SeamStatus(gone, "missing"),)
    monkeypatch.setattr(features, "moved", lambda name: status if name == feature else ())
    found = {f.check: f for f in doctor._features(cards)}
    assert [name for name, f in found.items() if f.state != "ok"] == [f"feature: {feature}"]
    row = found[f"feature: {feature}"]
    assert (row.state, row.found) == (state, "ServerArgs.gone: missing") and row.advice


def test_every_setting_can_be_listed(capsys):
    assert cli.main(["doctor", "--settings"]) == 0
    assert "store.capacity_bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "reserved", "state", "advice"),
    [
        ("", 0, "ok", "SGLANG_HUGEPAGE_SIZE=2MB"),
        ("2mb", 0, "fail", "nr_hugepages"),
        ("2MB", 512, "ok", ""),
        ("4MB", 512, "warn", "2MB and 1GB"),
    ],
)
def test_huge_pages_that_are_asked_for_have_to_be_there(
    asked, reserved, state, advice, tmp_path, monkeypatch
):
    monkeypatch.setenv("SGLANG_HUGEPAGE_SIZE", asked)
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 1 kB\nHugePages_Free:      {reserved}\nHugepagesize:       2048 kB\n"
    )
    (found,) = doctor._huge_pages(tmp_path / "meminfo")
    assert found.state == state
    assert advice in found.advice
    assert ("1.0 GiB" in found.found) == (reserved == 512)


def test_on_a_card_it_says_how_prefixes_would_be_restored(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor.platform, "accelerators", lambda: ["NVIDIA H100"])
    found = findings(capsys)["restoration"]
    assert (found["state"], found["found"]) == ("ok", "policy.restore = auto")
    off = settings(tmp_path, policy={"restore": "off"})
    found = findings(capsys, *off, "--no-disk")["restoration"]
    assert (found["state"], found["found"]) == ("ok", "policy.restore = off")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A machine whose GPU copies pages right."""
    result = StartResult(40, 24.8, 93.0, 4 << 20, 0.2)
    monkeypatch.setattr(doctor.platform, "accelerators", lambda: ["NVIDIA H100"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_probe, "try_out", lambda: gpu_probe.Probe("NVIDIA H100", result))


@pytest.mark.parametrize(
    ("state", "driver", "found", "said"),
    [
        ("proven", None, "ok", "12,480 pages equal, 0 differ"),
        ("refuted", None, "warn", "refuted on"),
        ("proven", "1.2", "ok", "no server has proven"),
    ],
)
def test_on_a_gpu_one_line_says_how_pages_arrive_and_what_servers_have_shown(
    state, driver, found, said, tmp_path, capsys, on_a_gpu
):
    folder = tmp_path / "identity"
    folder.mkdir()
    conditions = {
        "device": "NVIDIA H100",
        "driver": memory.driver() if driver is None else driver,
        "torch": torch.__version__,
    }
    memory.keep(folder / memory.NAME, memory.Shown(conditions, state, 12480, 1, "page: page 3"))
    copies = findings(capsys, "--store", str(tmp_path), "--no-disk")["copies"]
    assert copies["state"] == found and said in copies["found"]
    assert "24.8 GB/s" in copies["found"] and "93 µs" in copies["found"]


def test_on_a_gpu_where_pages_do_not_arrive_it_says_which(capsys, monkeypatch, on_a_gpu):
    def fails():
        raise StartDiffers("K of layer 3 of host page 7 is not what is on the device")

    monkeypatch.setattr(gpu_probe, "try_out", fails)
    copies = findings(capsys)["copies"]
    assert copies["state"] == "warn" and "K of layer 3" in copies["found"]
    assert "SGLang" in copies["advice"]


def test_on_a_cpu_nothing_is_said_of_restoration(capsys, monkeypatch):
    monkeypatch.setattr(doctor.platform, "accelerators", lambda: [])
    found = findings(capsys)
    assert "restoration" not in found and "copies" not in found


def remote_store(tmp_path: Path, capsys: Any, engine: str, master: str) -> dict[str, str]:
    words = settings(tmp_path, remote={"engine": engine, "master": master})
    return findings(capsys, *words, "--no-disk")["remote store"]


def test_a_remote_store_is_tried_out_and_left_as_it_was(tmp_path, capsys):
    engine = tmp_path / "engine"
    engine.mkdir()
    found = remote_store(tmp_path, capsys, "memory", str(engine))
    assert found["state"] == "ok" and "read" in found["found"] and "32 pages" in found["found"]
    assert list(engine.iterdir()) == []


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"get": {"flip": 1.0}}, "32 of 32 pages did not come back"),
        ({"refuse": True}, "took 0 of 32 pages"),
    ],
    ids=["wrong bytes", "no room"],
)
def test_a_remote_store_that_fails_a_trial_fails(tmp_path, capsys, faults, says):
    engine = tmp_path / "engine"
    engine.mkdir()
    set_faults(engine, faults)
    found = remote_store(tmp_path, capsys, "memory", str(engine))
    assert found["state"] == "fail" and says in found["advice"]


def test_a_remote_store_that_cannot_work_fails_with_what_to_do(tmp_path, capsys):
    found = remote_store(tmp_path, capsys, "mooncake", "nowhere")
    assert found["state"] == "fail" and "remote.master" in found["advice"]
