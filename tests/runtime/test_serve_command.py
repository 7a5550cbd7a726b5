"""What `kvtier serve` says before it becomes the server."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sgl_kvtier import cli
from sgl_kvtier.runtime.settings import from_extra_config
from sgl_kvtier.runtime.tools import serve_command


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What --print says of a server of some model."""
    assert cli.main(["serve", "m", *words, "--print"]) == 0
    return capsys.readouterr().out


def settings_in(command: list[str]) -> Any:
    """The settings in SGLang's command."""
    return json.loads(command[command.index("--hicache-storage-backend-extra-config") + 1])


def test_settings_go_to_sglang_as_text_and_no_file_is_written(tmp_path, capsys):
    words = ("--store", str(tmp_path / "pages"), "--capacity", "3GiB", "--device", "cuda")
    command = shlex.split(printed(capsys, *words).splitlines()[-1])
    given = settings_in(command)
    assert given == {"store": {"path": str(tmp_path / "pages"), "capacity_bytes": 3 << 30}}
    assert from_extra_config(given).store.path == str(tmp_path / "pages")
    assert list(tmp_path.iterdir()) == []


def test_a_home_in_the_stores_folder_is_this_users(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    said = printed(capsys, "--store=~/pages", "--device", "cuda")
    assert f'"path": "{tmp_path}/pages"' in said


def test_a_host_without_a_gpu_is_told_that_the_flags_are_a_cpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve_command, "detect_device", lambda: "cpu")
    said = printed(capsys, "--store", str(tmp_path / "s"))
    assert said.startswith("# No GPU was found here") and "--device cuda" in said
    assert "No GPU" not in printed(capsys, "--store", str(tmp_path / "s"), "--device", "cpu")
    monkeypatch.setattr(serve_command, "detect_device", lambda: "cuda")
    assert "No GPU" not in printed(capsys, "--store", str(tmp_path / "s"))


def test_a_cpus_pool_has_a_size_of_its_own_unless_another_is_given(tmp_path, capsys):
    words = ("--store", str(tmp_path / "s"), "--device")
    assert " --max-total-tokens 16384 " in printed(capsys, *words, "cpu")
    assert "--max-total-tokens" not in printed(capsys, *words, "cuda")
    command = shlex.split(printed(capsys, *words, "cpu", "--max-total-tokens", "4096"))
    sizes = [command[at + 1] for at, word in enumerate(command) if word == "--max-total-tokens"]
    assert sizes == ["16384", "4096"]  # the last one counts


def test_modes_are_settings_and_other_flags_are_sglangs(capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_STORE_PATH", "/mnt/kv")
    words = ("--restore", "load", "--lookahead", "off", "--tp", "2", "--device", "cuda")
    assert cli.main(["serve", "m", *words, "--print", "--", "--dtype", "half"]) == 0
    said = capsys.readouterr()
    assert "passed to SGLang: --tp 2" in said.err
    command = shlex.split(said.out)
    policy = {"restore": "load", "prefetch": "off", "eviction": "lru"}
    assert settings_in(command) == {"store": {"path": "/mnt/kv"}, "policy": policy}
    assert command[-6:] == ["--tp", "2", "--dtype", "half", "--port", "30000"]
    for wrong in (["m", "other"], ["--tp", "2", "m"]):
        with pytest.raises(SystemExit):
            cli.main(["serve", *wrong, "--print"])
    assert "name the model before --tp" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model-path", "Qwen/Qwen3-8B", "--store", "s"])
    assert "without --model-path: kvtier serve Qwen/Qwen3-8B" in capsys.readouterr().err


def test_a_capacity_may_be_a_share_of_the_disk(tmp_path, capsys):
    words = ("--store", str(tmp_path / "pages"), "--capacity", "80%", "--device", "cuda")
    given = settings_in(shlex.split(printed(capsys, *words).splitlines()[-1]))
    assert given["store"]["capacity_bytes"] == "80%"
    assert from_extra_config(given).store.capacity_bytes > 1 << 20


def test_a_share_in_a_file_is_of_the_disk_that_the_environment_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_STORE_PATH", str(tmp_path / "pages"))
    config = tmp_path / "kvtier.json"
    config.write_text('{"store": {"capacity_bytes": "80%"}}')
    assert f"@{config}" in printed(capsys, "--config", str(config))


def test_a_capacity_beside_a_file_that_has_its_own_is_refused(tmp_path, capsys):
    config = tmp_path / "kvtier.json"
    config.write_text(json.dumps({"store": {"path": "/s"}}))
    words = ["serve", "m", "--config", str(config), "--capacity", "3GiB", "--print"]
    assert cli.main(words) != 0
    assert "store.capacity_bytes" in capsys.readouterr().err


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    """A port of `host` that another server has."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that this process was to become, on a machine that has SGLang."""
    commands: list[list[str]] = []

    def become(program: str, command: list[str], environment: Any) -> None:
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(serve_command, "missing_packages", list)
    monkeypatch.setattr(serve_command, "compile_page_hash", lambda: None)
    return commands


@pytest.mark.parametrize("form", ["--port 30001", "--port=30001", "--port 1 --port=30001"])
def test_a_port_among_sglangs_arguments_is_the_last_one(form, capsys):
    assert cli.main(["serve", "m", "--device", "cuda", "--print", "--", *form.split()]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f" {form}")


@pytest.mark.parametrize("form", ["--port {}", "--port={}"])
def test_the_port_among_sglangs_arguments_has_to_be_free_and_no_other(form, started, capsys):
    with listening() as free:
        pass
    with listening() as taken:
        words = ["serve", "m", "--device", "cuda", "--port"]
        assert cli.main([*words, str(taken), "--", *form.format(free).split()]) == 130
        assert started.pop()[-1].endswith(str(free))
        capsys.readouterr()
        assert cli.main([*words, str(free), "--", *form.format(taken).split()]) == 1
        assert f"port {taken} of 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert started == []


def test_the_port_has_to_be_free_on_the_host_that_the_server_listens_on(started, capsys):
    with listening("127.0.0.2") as taken:
        words = ["serve", "m", "--device", "cuda", "--port", str(taken)]
        assert cli.main(words) == 130
        assert cli.main([*words, "--", "--host=127.0.0.2"]) == 1
        assert f"port {taken} of 127.0.0.2 cannot be used" in capsys.readouterr().err
        assert cli.main([*words, "--", "--host", "0.0.0.0"]) == 1
    assert len(started) == 1


def test_a_models_folder_that_is_not_there_starts_no_server(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "/models/none", "--device", "cuda"]
    assert cli.main(words) == 1 and started == []
    assert 'serve: "/models/none": no such folder' in capsys.readouterr().err
    assert cli.main([*words, "--print"]) == 0, "the command may be for another machine"


@pytest.mark.parametrize("words", [["m", "--store", ""], ["m", "--config", ""], [""]])
def test_a_variable_that_is_not_set_is_no_working_directory(
    words: list[str], started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["serve", *words, "--print"])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status in (1, 2) and started == []
    said = capsys.readouterr().err
    assert (
        'argument --store: ""' in said or 'argument --config: ""' in said or "which model" in said
    )
