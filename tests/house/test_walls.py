"""The walls between rooms, and that nothing of a workplace stands in the project."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvtier.runtime.proof import memory
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.tools.schema_command import schemas

ROOT = Path(__file__).parents[2]


def test_rooms_import_downwards_only():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wall_checker_would_notice(tmp_path):
    rule = (
        "[importlinter]\nroot_package = sgl_kvtier\n"
        "[importlinter:contract:no]\nname = no\ntype = forbidden\n"
        "source_modules = sgl_kvtier.store\nforbidden_modules = sgl_kvtier.config\n"
    )
    (tmp_path / "rules.ini").write_text(rule)
    code = f"from importlinter.cli import lint_imports; raise SystemExit(lint_imports(config_filename={str(tmp_path / 'rules.ini')!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1


@pytest.mark.parametrize(
    "room",
    [
        "policy",
        "store",
        "remote",
        "runtime",
        "console",
        "lab",
        "lab/sim",
        "lab/workload",
        "lab/experiment",
        "lab/paced",
    ],
)
def test_every_room_has_a_readme(room):
    readme = ROOT / "sgl_kvtier" / room / "README.md"
    assert readme.is_file()
    inside = [
        p
        for p in (ROOT / "sgl_kvtier" / room).iterdir()
        if p.name not in ("__init__.py", "__pycache__")
    ]
    folders = [f"{p.name}/" for p in inside if p.is_dir()]
    modules = folders + [p.name for p in inside if p.suffix == ".py"]
    text = readme.read_text()
    missing = [name for name in modules if name not in text and f"`{name[:-3]}`" not in text]
    assert missing == []


def test_every_part_of_the_product_but_runtime_has_strict_types():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    strict = {
        name.removesuffix(".*")
        for section in config.sections()
        if section.startswith("mypy-") and config[section].get("warn_return_any")
        for name in section.removeprefix("mypy-").split(",")
    }
    package = ROOT / "sgl_kvtier"
    parts = [p for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    names = {f"sgl_kvtier.{p.stem}" for p in parts if p.stem not in ("__init__", "runtime", "lab")}
    assert strict == {"sgl_kvtier", *names}


def test_every_extra_that_is_named_is_one_that_can_be_installed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = {
        (path.name, extra)
        for path in (ROOT / "sgl_kvtier").rglob("*.py")
        for extra in re.findall(
            r"(?:(?:sgl-kvtier|the extra )\[|how_to_install\(['\"])(\w+)", path.read_text()
        )
    }
    assert len(named) > 5
    known = config["options.extras_require"]
    assert sorted(one for one in named if one[1] not in known) == []


def test_the_manifest_in_patches_is_the_one_the_package_ships():
    link = ROOT / "patches" / "seams.json"
    assert link.resolve() == ROOT / "sgl_kvtier" / "runtime" / "sglang" / "seams.json"


def test_every_json_result_that_is_written_has_a_schema():
    written = set()
    for source in (ROOT / "sgl_kvtier").rglob("*.py"):
        written |= set(re.findall(r'"(kvtier\.[a-z.-]+/\d+)"', source.read_text()))
    own = {cost_profile.SCHEMA, memory.SCHEMA}
    assert sorted(written - {schema.name for schema in schemas()} - own) == []
