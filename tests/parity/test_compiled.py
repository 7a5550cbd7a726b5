"""The deciding half as a wheel holds it, compiled: it decides what its source decides. The build
takes about a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorded_run import record

ROOT = Path(__file__).parents[2]
SOURCE_ONLY = {"__init__", "messages", "decision_log", "rules"}
PROPERTIES = (
    "test_restore_machine.py",
    "test_planner_machine.py",
    "test_forecast.py",
    "test_sessions.py",
    "test_prefetch.py",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that imports the package with its deciding half compiled."""
    pytest.importorskip("mypyc")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler here")
    place = tmp_path_factory.mktemp("compiled")
    sources, lib = place / "source", place / "lib"
    shutil.copytree(
        ROOT / "sgl_kvtier",
        sources / "sgl_kvtier",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(sources / "sgl_kvtier", lib / "sgl_kvtier")
    build = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(lib),
        "--build-temp",
        str(place / "o"),
    ]
    built = subprocess.run(
        build,
        cwd=sources,
        env={**os.environ, "CFLAGS": "-O1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    assert "is not compiled" not in built.stderr, built.stderr[-2000:]
    return {**os.environ, "PYTHONPATH": str(lib)}


def test_it_is_compiled_as_a_whole(compiled: dict[str, str]) -> None:
    folder = Path(compiled["PYTHONPATH"], "sgl_kvtier")
    sources = {path.stem for path in (folder / "policy").rglob("*.py")} - SOURCE_ONLY
    assert {path.name.split(".")[0] for path in (folder / "policy").rglob("*.so")} == sources
    script = "import sgl_kvtier.types, sgl_kvtier.policy.planner as p; print(p.__file__, sgl_kvtier.types.__file__)"
    found = _python(compiled, "-c", script).split()
    assert all(name.startswith(str(folder)) and name.endswith(".so") for name in found)


@pytest.mark.parametrize("rule", ["kvtier", "cake", "cacheflow"])
def test_it_plans_what_its_source_plans(rule: str, compiled: dict[str, str]) -> None:
    assert _python(
        compiled, str(Path(__file__).with_name("recorded_run.py")), rule
    ).splitlines() == record(rule)


def test_it_has_the_properties_of_its_source(compiled: dict[str, str]) -> None:
    tests = [str(ROOT / "tests" / "policy" / name) for name in PROPERTIES]
    _python(
        compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *tests
    )


def _python(environment: dict[str, str], *arguments: str) -> str:
    """What a Python with the compiled package prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(environment["PYTHONPATH"]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
