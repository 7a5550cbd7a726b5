"""What is said to install a part that is missing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvtier import cli, extras

ROOT = Path(__file__).parents[2]
REQUIRES = ["numpy>=1.26", 'aiohttp>=3.9; extra == "lab"', "simpy>=4.1 ; extra == 'lab'"]


def noted(folder: Path, *, editable: bool) -> str:
    """What pip notes of a package that was installed from a folder."""
    return json.dumps({"url": folder.as_uri(), "dir_info": {"editable": editable}})


def test_a_checkout_is_installed_again_from_its_folder(tmp_path):
    said = extras.installing("lab", noted(tmp_path, editable=True), REQUIRES)
    assert said == f"pip install -e '{tmp_path}[lab]'"
    said = extras.installing("lab", noted(tmp_path, editable=False), REQUIRES)
    assert said == f"pip install '{tmp_path}[lab]'"


def test_a_source_that_is_gone_is_not_named_but_the_packages_are(tmp_path):
    said = extras.installing("lab", noted(tmp_path / "gone", editable=False), REQUIRES)
    assert said == "pip install 'aiohttp>=3.9' 'simpy>=4.1'"
    assert extras.installing("lab", None, REQUIRES) == said


def test_a_repository_is_named_with_its_address():
    told = {"url": "https://host/a.git", "vcs_info": {"vcs": "git"}}
    said = extras.installing("remote", json.dumps(told), REQUIRES)
    assert said == "pip install 'sgl-kvtier[remote] @ git+https://host/a.git'"


def test_a_checkout_that_was_never_installed_is_named(tmp_path):
    (tmp_path / "setup.cfg").touch()
    assert extras.installing("lab", None, [], tmp_path) == f"pip install '{tmp_path}[lab]'"
    assert extras.installing("lab", None, []) == "pip install 'sgl-kvtier[lab]'"


@pytest.mark.parametrize("extra", ["lab", "sglang", "remote"])
def test_the_command_names_something_that_pip_finds_here(extra):
    words = extras.how_to_install(extra).split()
    assert words[:2] == ["pip", "install"]
    assert f"[{extra}]'" in words[-1] or "==" in words[-1] or ">=" in words[-1]
    if f"[{extra}]'" in words[-1]:
        assert Path(words[-1].strip("'").removesuffix(f"[{extra}]"), "setup.cfg").is_file()


def test_no_message_names_the_package_as_if_it_were_on_an_index():
    named = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "sgl_kvtier").rglob("*.py")
        if "install 'sgl-kvtier[" in path.read_text("utf-8") and path.name != "extras.py"
    ]
    assert named == []


LAB = sorted(name for name, one in cli.COMMANDS.items() if one.where.startswith("sgl_kvtier.lab."))


def test_every_command_of_the_laboratory_says_in_one_line_what_to_install():
    """Each is started without the laboratory's libraries; one that needs none of them shows its
    help.
    """
    code = (
        "import sys\n"
        "for name in ('aiofiles','aiohttp','matplotlib','psutil','rich','safetensors','simpy'):\n"
        "    sys.modules[name] = None\n"
        "from sgl_kvtier.cli import main\n"
        f"for name in {LAB!r}:\n"
        "    try: main([*name.split(), '--help'])\n"
        "    except SystemExit as end: assert not end.code, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = done.stderr.splitlines()
    assert all(line.startswith("kvtier ") and "pip install " in line for line in refused)
    assert any("kvtier bench restore:" in line for line in refused)
    assert not any("kvtier bench store:" in line for line in refused), "it needs none of them"


def test_a_library_that_is_missed_only_while_a_command_runs_is_one_line_too(capsys, monkeypatch):
    class Late:
        add_arguments = staticmethod(lambda parser: None)

        @staticmethod
        def run(args):
            importlib.import_module("simpy")

    monkeypatch.setitem(sys.modules, "simpy", None)
    monkeypatch.setattr(cli, "_load", lambda where: Late)
    assert cli.main(["sim"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "needs simpy. Install it with: pip install " in said


def test_a_part_of_the_product_that_is_missing_is_no_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kvtier.store.tools.commands", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["fsck", "/"])
