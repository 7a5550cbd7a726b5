"""scripts/gpu-run and scripts/gpu-pack where there is no card: everything but what a card computes."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import tarfile
import time
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
from commands import parsed

from sgl_kvtier import cli
from sgl_kvtier.launch import detect_device

ROOT = Path(__file__).parents[3]
RUN, PACK = ROOT / "scripts" / "gpu-run", ROOT / "scripts" / "gpu-pack"
STAGES = ("setup", "smoke", "unit", "table", "correct", "real", "grid", "fuzz", "swe")
LIMIT_S = 600
SPARE_S = 20
"""Of a stage's ten minutes, for packing its results."""
no_card = pytest.mark.skipif(detect_device() != "cpu", reason="this machine has a card")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RUN), *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def dry(*stages: str) -> list[dict[str, Any]]:
    done = run("--dry-run", *stages)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def commands() -> list[dict[str, Any]]:
    return dry(*STAGES)


class Stub:
    """What runs in place of each command: it notes its name and does what the test says."""

    def __init__(self, folder: Path, *, fails: str = "none", hangs: str = "none") -> None:
        folder /= "it's mine"
        folder.mkdir(parents=True)
        self.out, self.keep = folder / "out", folder / "keep"
        self.seen = folder / "seen"
        self.program = folder / "stub"
        self.program.write_text(
            "#!/usr/bin/env bash\n"
            f'echo "$1" >>{quote(str(self.seen))}\n'
            'echo "said by $1"\n'
            f'if [ "$1" = {fails} ]; then echo "no such kernel"; exit 7; fi\n'
            f'if [ "$1" = {hangs} ]; then exec sleep 60; fi\n'
            f'echo "{{}}" >{quote(str(self.keep))}/$1.json\n'
        )
        self.program.chmod(0o755)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        place = ["--out", str(self.out), "--keep", str(self.keep), "--stub", str(self.program)]
        return run(*place, *words, **env)

    def names(self) -> list[str]:
        """The commands that were run."""
        return self.seen.read_text().split() if self.seen.exists() else []


def test_every_stage_fits_into_ten_minutes(commands: list[dict[str, Any]]) -> None:
    assert {row["stage"] for row in commands} == set(STAGES)
    assert len({row["name"] for row in commands}) == len(commands)
    for stage in STAGES:
        assert sum(row["limit_s"] for row in commands if row["stage"] == stage) <= LIMIT_S - SPARE_S


def test_every_command_of_ours_is_one_that_the_command_line_takes(
    commands: list[dict[str, Any]],
) -> None:
    checked = 0
    for row in commands:
        words = row["command"]
        if "sgl_kvtier.cli" not in " ".join(words[:3]):
            continue
        ours = words[3:]
        pair = " ".join(ours[:2])
        name = pair if pair in cli.COMMANDS else ours[0]
        part = importlib.import_module(cli.COMMANDS[name].where)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parsed(part, *ours[len(name.split()) :])
        except SystemExit:
            pytest.fail(f"{row['name']}: {said.getvalue()}")
        checked += 1
    assert checked >= 8


def test_modules_and_tests_that_are_run_are_there(commands: list[dict[str, Any]]) -> None:
    for row in commands:
        words = row["command"]
        if "-m" not in words[:2]:
            continue
        module = words[2]
        if module.startswith("sgl_kvtier."):
            assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
        if module == "pytest":
            assert (ROOT / words[-1]).is_dir()


def test_all_stages_run_and_their_results_are_in_one_folder(
    tmp_path: Path, commands: list[dict[str, Any]]
) -> None:
    stub = Stub(tmp_path)
    done = stub.run(*STAGES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert stub.names() == [row["name"] for row in commands]
    assert 1 < len(list(stub.out.iterdir())) <= 8
    with tarfile.open(stub.out / "run.tar.xz") as archive:
        names = archive.getnames()
    assert {"./stages.jsonl", "./grid.log.end", "./fuzz-off.log.end"} <= set(names)
    rows = [json.loads(line) for line in (stub.keep / "stages.jsonl").read_text().splitlines()]
    assert all(row["status"] == 0 for row in rows)


def test_what_has_succeeded_is_not_run_again_unless_asked(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    stub.run("table", "fuzz")
    assert stub.names() == ["table", "fuzz-on", "fuzz-off"]
    stub.run("table", "fuzz")
    assert len(stub.names()) == 3
    stub.run("--again", "table")
    assert stub.names()[3:] == ["table"]


def test_no_store_is_left_in_memory_after_a_measurement(tmp_path: Path) -> None:
    stub, memory = Stub(tmp_path), tmp_path / "memory"
    with stub.program.open("a") as program:
        program.write(
            'while [ "$1" != --folder ]; do shift; done\n'
            'mkdir -p "$2/fuzzed/storage/pages" && echo >"$2/fuzzed/server.log"\n'
        )
    stub.run("fuzz", "swe", MEMORY=str(memory))
    assert list(memory.rglob("storage")) == []
    assert len(list(memory.glob("*/fuzzed/server.log"))) == 3


def test_a_command_that_fails_ends_no_other_and_is_run_again(tmp_path: Path) -> None:
    stub = Stub(tmp_path, fails="fuzz-on")
    done = stub.run("fuzz", "table")
    assert done.returncode == 1 and "no such kernel" in done.stdout
    assert stub.names() == ["fuzz-on", "fuzz-off", "table"]
    stub.run("fuzz", "table")
    assert stub.names()[3:] == ["fuzz-on"]


@pytest.mark.slow
def test_results_are_there_after_a_run_that_was_cut_off(tmp_path: Path) -> None:
    stub = Stub(tmp_path, hangs="card")
    began = time.monotonic()
    done = stub.run("setup")  # its limit is 20 s
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    rows = [json.loads(line) for line in (stub.keep / "stages.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows if row["status"]] == ["card"]
    assert (stub.out / "run.tar.xz").exists()


def test_another_machine_goes_on_from_the_archive_and_is_set_up_anew(tmp_path: Path) -> None:
    first = Stub(tmp_path / "a")
    first.run("setup", "table")
    pack = tmp_path / "pack"
    pack.mkdir()
    (first.out / "run.tar.xz").rename(pack / "run.tar.xz")
    second = Stub(tmp_path / "b")
    second.run("setup", "table", PACK=str(pack))
    assert second.names() == ["unpack", "wheel", "card", "host"]


def test_results_of_another_card_are_not_gone_on_with(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()

    def on(card: str) -> subprocess.CompletedProcess[str]:
        tool.write_text(f'#!/bin/sh\necho "{card}"\n')
        tool.chmod(0o755)
        return stub.run("table", PATH=f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    assert on("NVIDIA H100").returncode == 0
    assert on("NVIDIA H100").returncode == 0
    other = on("NVIDIA H200")
    assert other.returncode == 3
    assert "of NVIDIA H100, and this machine has NVIDIA H200" in other.stderr
    assert stub.names() == ["table"]


@no_card
def test_it_refuses_without_a_card_and_says_what_can_be_done(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out"), "--keep", str(tmp_path / "keep"), "smoke")
    assert done.returncode == 3
    assert "no NVIDIA card" in done.stderr and "--dry-run" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", [RUN, PACK])
def test_a_wrong_word_is_named(script: Path) -> None:
    done = subprocess.run(
        [str(script), "--gpus", "2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "--gpus" in done.stderr
    assert run("warp").returncode == 2


def test_packing_refuses_another_python_and_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    def pack(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PACK), "--work", str(tmp_path / "w"), "--target", str(tmp_path / "t"), *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    other = pack("--python", "/bin/false")
    assert other.returncode == 1 and "Python 3.12" in other.stderr
    old = tmp_path / "python3.12"
    old.write_text("#!/bin/sh\nexit 0\n")
    old.chmod(0o755)
    gone = pack("--python", str(old), "--recipe", str(tmp_path / "no"))
    assert gone.returncode == 1 and "prepare.sh" in gone.stderr
    assert not (tmp_path / "t").exists()


def test_a_pack_is_refused_unless_its_wheel_has_every_compiled_part() -> None:
    parts = re.findall(r'^ +"(sgl_kvtier\.[\w.]+)",$', (ROOT / "setup.py").read_text(), re.M)
    parts = [part for part in parts if ".lab." not in part]  # the campaign's own, run on no card
    assert len(parts) >= 2
    asked = PACK.read_text()
    assert [part for part in parts if f'"{part.replace(".", "/")}"' not in asked] == []


def test_the_settings_of_served_tests_on_a_card_are_settings_that_a_server_takes(
    tmp_path: Path,
) -> None:
    """They are read on a card alone, and a renamed setting must show here."""
    pytest.importorskip("sglang", reason="SGLang is not installed")
    import importlib.util

    from sgl_kvtier.config import load_config

    spec = importlib.util.spec_from_file_location(
        "served_on_a_card", ROOT / "tests/gpu/test_served_on_card.py"
    )
    assert spec is not None and spec.loader is not None
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    found = load_config(served.settings(tmp_path, **served.AHEAD))
    assert (found.policy.restore, found.lab.audit) == ("both", True)
    assert found.lab.throttle.read_gbps == served.GBPS
