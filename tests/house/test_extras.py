"""What is said to install a part that is missing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvtier import cli, extras

ROOT = Path(__file__).parents[2]
REQUIRES = ["numpy>=1.26", 'aiohttp>=3.9; extra == "bench"', "simpy>=4.1 ; extra == 'bench'"]


def noted(folder: Path, *, editable: bool) -> str:
    """What pip notes of a package that was installed from a folder."""
    return json.dumps({"url": folder.as_uri(), "dir_info": {"editable": editable}})


def test_a_checkout_is_installed_again_from_its_folder(tmp_path):
    said = extras.installing("bench", noted(tmp_path, editable=True), REQUIRES)
    assert said == f"pip install -e '{tmp_path}[bench]'"
    said = extras.installing("bench", noted(tmp_path, editable=False), REQUIRES)
    assert said == f"pip install '{tmp_path}[bench]'"


def test_a_source_that_is_gone_is_not_named_but_the_packages_are(tmp_path):
    said = extras.installing("bench", noted(tmp_path / "gone", editable=False), REQUIRES)
    assert said == "pip install 'aiohttp>=3.9' 'simpy>=4.1'"


def test_a_package_that_pip_found_by_its_name_is_named():
    assert extras.installing("bench", None, REQUIRES) == "pip install 'sgl-kvtier[bench]'"


def test_a_wheel_is_named_with_its_extra(tmp_path):
    wheel = tmp_path / "sgl_kvtier-0.1.0-py3-none-any.whl"
    wheel.touch()
    said = extras.installing("bench", json.dumps({"url": wheel.as_uri()}), REQUIRES)
    assert said == f"pip install '{wheel}[bench]'"


def test_a_repository_is_named_with_its_address():
    told = {"url": "https://host/a.git", "vcs_info": {"vcs": "git"}}
    said = extras.installing("remote", json.dumps(told), REQUIRES)
    assert said == "pip install 'sgl-kvtier[remote] @ git+https://host/a.git'"


def test_a_checkout_that_was_never_installed_is_named(tmp_path):
    (tmp_path / "setup.cfg").touch()
    assert extras.installing("bench", None, [], tmp_path) == f"pip install '{tmp_path}[bench]'"
    assert extras.installing("bench", None, []) == "pip install 'sgl-kvtier[bench]'"


@pytest.mark.parametrize("extra", ["bench", "sglang", "remote"])
def test_the_command_names_something_that_pip_finds_here(extra):
    words = extras.how_to_install(extra).split()
    assert words[:2] == ["pip", "install"]
    assert f"[{extra}]'" in words[-1] or "==" in words[-1] or ">=" in words[-1]
    if f"[{extra}]'" in words[-1]:
        assert Path(words[-1].strip("'").removesuffix(f"[{extra}]"), "setup.cfg").is_file()


OPTIONAL = (
    *("aiofiles", "aiohttp", "matplotlib", "psutil", "rich", "safetensors", "simpy"),
    *("sglang", "torch", "triton", "transformers", "tokenizers", "prometheus_client"),
    *("huggingface_hub", "starlette", "mooncake"),
)
"""What comes with an extra, or with what comes with one."""
BLOCKED = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
from sgl_kvtier.cli import main
def run(words):
    print("#", *words, file=sys.stderr, flush=True)
    try: return main(words)
    except SystemExit as end: return end.code
"""
AT_WORK = ("bench store", "bench torture")
"""Commands that need no extra, and would work for long."""
EXAMPLES = [
    shlex.split(line)[1:]
    for name, command in cli.COMMANDS.items()
    if name not in AT_WORK
    for line in command.example.splitlines()
    if line.strip().startswith("kvtier ")  # another begins a pipe
]


def blocked(code: str, folder: Path) -> tuple[str, list[str]]:
    """Output of code that runs with no library but numpy and xxhash, and what it said of each
    command on stderr.
    """
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr.split("# ")[1:]


def test_the_help_of_commands_that_need_no_extra_is_shown_without_one(tmp_path):
    _, said = blocked(
        f"for name in {AT_WORK!r}: assert run([*name.split(), '--help']) == 0", tmp_path
    )
    assert said == [f"{name} --help\n" for name in AT_WORK]


def test_no_command_ends_in_a_traceback_where_no_extra_is_installed(tmp_path):
    """The examples of the help, each of which works with all extras."""
    _, said = blocked(f"for words in {EXAMPLES!r}: assert run(words) in (0, 1), words", tmp_path)
    assert len(said) == len(EXAMPLES) > 25
    wrong = [text for text in said if "Traceback" in text or text.count("\n") > 2]
    assert wrong == []
    advised = [text for text in said if "pip install " in text]
    assert len(advised) > 15
    for word in ("compare --quick", "sim run", "model lab-mha", "bench restore-fuzz", "replay"):
        assert any(text.startswith(word) and "[bench]" in text for text in advised), word
    for word in ("serve", "explain", "top", "bench copy-table"):
        assert any(text.startswith(word) and "[sglang]" in text for text in advised), word
    assert any(text.startswith("remote up") and "[remote]" in text for text in advised)


def test_a_part_of_the_product_that_is_missing_is_no_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kvtier.store.tools.commands", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["fsck", "/"])
