"""kvtier doctor: what it finds, and what it says to do."""

from __future__ import annotations

import json

import pytest

from sgl_kvtier import cli
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.runtime.sglang import seams
from sgl_kvtier.runtime.tools import disk_probe, doctor

CHECK = seams.check


@pytest.fixture(scope="module")
def symbols() -> list[seams.SeamStatus]:
    """What there is of SGLang here: some seconds to find out."""
    return CHECK()


@pytest.fixture(autouse=True)
def checked_once(symbols: list[seams.SeamStatus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "check", lambda: symbols)


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
    assert found["seams: storage"]["state"] == "ok"
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
    said = doctor.compiling(None if noted is None else json.dumps(noted))
    assert said == f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def test_looking_at_a_folder_that_is_not_there_leaves_none_behind(tmp_path, capsys):
    findings(capsys, "--store", str(tmp_path / "new"), "--no-disk")
    assert not (tmp_path / "new").exists()


def test_a_wrong_setting_fails_with_its_message(tmp_path, capsys):
    config = tmp_path / "kvtier.json"
    config.write_text('{"store": {"path": "x", "io_threads": -1}}')
    found = findings(capsys, "--config", str(config))
    assert found["settings"]["state"] == "fail"
    assert "store.io_threads = -1" in found["settings"]["advice"]


def test_a_folder_that_cannot_be_made_fails(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    found = findings(capsys, "--store", str(tmp_path / "file" / "store"))
    assert found["disk"]["state"] == "fail"


def test_a_folder_that_others_may_write_fails_with_what_to_do(tmp_path, capsys):
    tmp_path.chmod(0o777)
    found = findings(capsys, "--store", str(tmp_path), "--no-disk")
    assert found["store.path"]["state"] == "fail"
    assert "chmod go-w" in found["store.path"]["advice"]


def test_too_little_space_fails_and_names_the_setting(tmp_path, capsys, monkeypatch):
    probe = disk_probe.DiskProbe("ext4", 1000, True)
    monkeypatch.setattr(doctor.disk_probe, "look", lambda folder: probe)
    found = findings(capsys, "--store", str(tmp_path), "--no-disk")
    assert found["disk"]["state"] == "fail"
    assert "store.min_free_bytes" in found["disk"]["advice"]


@pytest.mark.parametrize(("version", "text"), [(None, "not installed"), ("0.6.0", "0.6.0")])
def test_no_or_another_sglang_fails(version, text, capsys, monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: version)
    found = findings(capsys)
    assert (found["sglang"]["state"], found["sglang"]["found"]) == ("fail", text)


def test_a_changed_symbol_is_named(capsys, monkeypatch):
    monkeypatch.setattr(seams, "check", CHECK)
    broken = seams.Seam("storage", "sglang.srt.server_args.ServerArgs.gone", "we call it")
    monkeypatch.setattr(seams, "load_manifest", lambda: [broken])
    found = findings(capsys)
    assert found["seams: storage"]["state"] == "fail"
    assert "gone: missing" in found["seams: storage"]["found"]


def test_a_plugin_list_without_us_fails(capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "kvtier" in findings(capsys)["SGLANG_PLUGINS"]["advice"]


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


def test_on_a_card_it_says_that_restoration_is_off_and_what_turns_it_on(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(doctor.platform, "accelerators", lambda: ["NVIDIA H100"])
    found = findings(capsys)["restoration"]
    assert (found["state"], found["found"]) == ("warn", "off on a GPU")
    assert '"restore": "both"' in found["advice"]
    asked = tmp_path / "kvtier.json"
    asked.write_text(
        json.dumps({"store": {"path": str(tmp_path / "s")}, "policy": {"restore": "both"}})
    )
    found = findings(capsys, "--config", str(asked), "--no-disk")["restoration"]
    assert (found["state"], found["advice"]) == ("ok", "")


def test_on_a_cpu_nothing_is_said_of_restoration(capsys, monkeypatch):
    monkeypatch.setattr(doctor.platform, "accelerators", lambda: [])
    assert "restoration" not in findings(capsys)


def remote_config(tmp_path, **section: str) -> str:
    config = tmp_path / "kvtier.json"
    config.write_text(json.dumps({"store": {"path": str(tmp_path / "store")}, "remote": section}))
    return str(config)


def test_a_remote_store_is_tried_out_and_left_as_it_was(tmp_path, capsys):
    engine = tmp_path / "engine"
    engine.mkdir()
    config = remote_config(tmp_path, engine="memory", master=str(engine))
    found = findings(capsys, "--config", config, "--no-disk")["remote store"]
    assert found["state"] == "ok" and "read" in found["found"] and "32 pages" in found["found"]
    assert list(engine.iterdir()) == []


def test_a_remote_store_that_gives_wrong_bytes_fails(tmp_path, capsys):
    engine = tmp_path / "engine"
    engine.mkdir()
    set_faults(engine, {"get": {"flip": 1.0}})
    config = remote_config(tmp_path, engine="memory", master=str(engine))
    found = findings(capsys, "--config", config, "--no-disk")["remote store"]
    assert found["state"] == "fail" and "32 of 32 pages did not come back" in found["advice"]


def test_a_remote_store_without_room_fails(tmp_path, capsys):
    engine = tmp_path / "engine"
    engine.mkdir()
    set_faults(engine, {"refuse": True})
    config = remote_config(tmp_path, engine="memory", master=str(engine))
    found = findings(capsys, "--config", config, "--no-disk")["remote store"]
    assert found["state"] == "fail" and "took 0 of 32 pages" in found["advice"]


def test_a_remote_store_that_cannot_work_fails_with_what_to_do(tmp_path, capsys):
    config = remote_config(tmp_path, engine="mooncake", master="nowhere")
    found = findings(capsys, "--config", config, "--no-disk")["remote store"]
    assert found["state"] == "fail" and "remote.master" in found["advice"]
