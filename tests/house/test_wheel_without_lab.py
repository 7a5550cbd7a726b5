"""The product is whole without the laboratory: a wheel without it imports, has its commands, and
serves.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
WITH_RICH = ("sgl_kvtier.console.rich_table", "sgl_kvtier.console.live_progress")
EXTRAS = ("aiofiles", "aiohttp", "matplotlib", "psutil", "rich", "safetensors", "simpy")

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {blocked}:
    sys.modules[name] = None
import sgl_kvtier
assert sgl_kvtier.__file__.startswith({site!r}), sgl_kvtier.__file__
names = [m.name for m in pkgutil.walk_packages(sgl_kvtier.__path__, "sgl_kvtier.") if m.name.startswith({within})]
names = [name for name in names if name not in {but}]
for name in names:
    importlib.import_module(name)
assert not [name for name in sys.modules if name.startswith("sgl_kvtier.lab")]
print(len(names))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed from a wheel that has no laboratory."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    skip = shutil.ignore_patterns("*.so", "__pycache__", "lab")
    shutil.copytree(ROOT / "sgl_kvtier", source / "sgl_kvtier", ignore=skip)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    env = {**os.environ, "KVTIER_COMPILE": "0"}
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(place), str(source)]
    subprocess.run(build, env=env, check=True, capture_output=True, text=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)],
        check=True,
        capture_output=True,
    )
    return place / "site"


def environment(site: Path) -> dict[str, str]:
    """The wheel's package before the libraries of this environment, whose editable install of the
    whole package is left out: a folder on PYTHONPATH is searched, but its .pth files are not read.
    """
    libraries = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *libraries]),
        "PYTHONSAFEPATH": "1",
    }


def interpreter() -> str:
    """Python without this environment."""
    return getattr(sys, "_base_executable", sys.executable)


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter(), *arguments],
        env=environment(site),
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_but_the_runtime_imports_with_none_of_the_laboratorys_libraries(site: Path) -> None:
    within = (
        "sgl_kvtier.store",
        "sgl_kvtier.remote",
        "sgl_kvtier.policy",
        "sgl_kvtier.console",
        "sgl_kvtier.config",
        "sgl_kvtier.cli",
        "sgl_kvtier.launch",
    )
    done = run(
        site,
        "-c",
        IMPORT_ALL.format(
            blocked=(*EXTRAS, "torch", "sglang"), site=str(site), within=within, but=WITH_RICH
        ),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 60


@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="sglang is not installed: pip install '.[sglang]'",
)
def test_every_module_imports_beside_sglang(site: Path) -> None:
    done = run(
        site, "-c", IMPORT_ALL.format(blocked=(), site=str(site), within=("sgl_kvtier.",), but=())
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_commands_of_the_product_work_and_those_of_the_laboratory_say_what_to_install(
    site: Path, tmp_path: Path
) -> None:
    script = "import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    done = run(site, "-c", script, "stat", str(tmp_path))
    assert done.returncode == 1 and "no store in" in done.stderr
    done = run(site, "-c", script, "compare", "--quick")
    assert done.returncode == 1
    assert "needs sgl_kvtier.lab" in done.stderr and "pip install " in done.stderr


@pytest.mark.server
@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="sglang is not installed: pip install '.[sglang]'",
)
def test_a_server_started_from_it_answers_and_stores(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "runtime"))
    from serving import config_file, flags, prompts, serving

    monkeypatch.setattr(sys, "executable", interpreter())
    ids = prompts(1, seed=3)[0]
    env = {name: environment(site)[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    with serving(tmp_path / "served", flags(), config_file(tmp_path), **env) as server:
        first = server.ask(ids)
        server.flush()
        again = server.ask(ids)
        assert again.tokens == first.tokens
        assert again.storage > 0
        with urllib.request.urlopen(server.server.url + "/health") as answer:
            assert answer.status == 200
