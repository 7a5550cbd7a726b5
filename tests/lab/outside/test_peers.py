"""Whether SGLang's NIXL and Mooncake backends can be here, as an interpreter of its own says; and
scripts/install --with, which installs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from sgl_kvtier.lab.outside import peers

ROOT = Path(__file__).parents[3]

_AGENT = """
class nixl_agent:
    def __init__(self, name, config): pass
    def get_plugin_list(self): return {plugins!r}
def nixl_agent_config(backends): return backends
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named nixl that the interpreters of this test find first."""
    folder = tmp_path / "nixl"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


def test_nothing_is_missing_where_the_posix_plugin_is(wheel: Path) -> None:
    (wheel / "_api.py").write_text(_AGENT.format(plugins=["UCX", "POSIX"]))
    assert peers.missing_nixl() is None


def test_without_the_plugin_the_others_are_named(wheel: Path) -> None:
    (wheel / "_api.py").write_text(_AGENT.format(plugins=["UCX"]))
    assert "no POSIX plugin here, but ['UCX']" in str(peers.missing_nixl())


def test_a_wheel_for_another_cuda_is_a_reason_in_its_own_words(wheel: Path) -> None:
    (wheel / "_api.py").write_text(
        "raise ImportError('detected CUDA 13 but nixl-cu13 is not installed')"
    )
    reason = str(peers.missing_nixl())
    assert "detected CUDA 13 but nixl-cu13 is not installed" in reason
    assert reason.endswith("scripts/compare --with nixl, or pip install nixl")


def test_an_interpreter_that_is_not_there_is_a_reason() -> None:
    assert "could not be tried" in str(peers.missing_nixl("/no/python"))


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module mooncake.store that the interpreters of this test find first."""
    (tmp_path / "mooncake").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "missing_engine", lambda: "")
    return tmp_path / "mooncake" / "store.py"


def test_mooncake_has_to_import_too(mooncake: Path) -> None:
    mooncake.write_text("")
    assert peers.missing_mooncake() is None
    mooncake.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    assert "cannot be used (ImportError: libcudart.so.12" in str(peers.missing_mooncake())


def test_a_library_that_mooncake_lacks_is_the_reason(
    mooncake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "missing_engine", lambda: "Mooncake needs libibverbs")
    assert peers.missing_mooncake() == "Mooncake needs libibverbs"


def install(venv: Path, names: str, wheels: Path) -> subprocess.CompletedProcess[str]:
    """scripts/install --with, which finds packages in the folder `wheels` alone."""
    # An environment that scripts/install would not install again.
    sums = "cat setup.cfg pyproject.toml | cksum | tr ' ' '-'"
    stamp = subprocess.check_output(["bash", "-c", sums], cwd=ROOT, text=True).strip()
    (venv / ".kvtier-installed").write_text(f"{stamp}-dev\n")
    sums = """eval "$(grep '^native()' scripts/install)"; native"""
    stamp = subprocess.check_output(["bash", "-c", sums], cwd=ROOT, text=True)
    (venv / ".kvtier-native").write_text(stamp)
    words = ["--venv", str(venv), "--extras", "dev", "--source", "--with", names]
    return subprocess.run(
        [ROOT / "scripts" / "install", *words],
        # Where this environment has such libraries itself, pip would find them on the path.
        env={**os.environ, "PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)},
        capture_output=True,
        text=True,
        check=False,
    )


def write_wheel(folder: Path, files: dict[str, str]) -> None:
    """A wheel named nixl."""
    about = "nixl-7.0.dist-info"
    files = {
        **files,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: nixl\nVersion: 7.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "nixl-7.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that has the packages of this one."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (own,) = home.glob("lib/python3.*/site-packages")
    beneath = sysconfig.get_path("purelib")
    (own / "beneath.pth").write_text(f"import site; site.addsitedir({beneath!r})\n")
    return home


def test_what_the_script_installs_is_found_by_comparisons_and_leaves_the_environment_alone(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _AGENT.format(plugins=["POSIX"])
    write_wheel(tmp_path, {"nixl/__init__.py": "", "nixl/_api.py": agent})
    done = install(venv, "nixl", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Installing nixl into {venv}/peers" in done.stdout
    assert not list(venv.glob("lib/python3.*/site-packages/nixl*"))
    monkeypatch.setattr(sys, "prefix", str(venv))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    peers.use_installed()
    peers.use_installed()
    (added,) = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    assert sys.path.count(added) == 1 and (Path(added) / "nixl").is_dir()
    assert peers.missing_nixl() is None


def test_a_package_that_cannot_be_had_ends_the_script_with_what_pip_said(
    venv: Path, tmp_path: Path
) -> None:
    done = install(venv, "nixl", tmp_path)
    assert done.returncode == 1
    assert "No matching distribution found for nixl" in done.stderr
    assert f"the whole log is {venv}/peers/install.log" in done.stderr


def test_an_unknown_backend_is_refused_before_anything_is_installed(
    venv: Path, tmp_path: Path
) -> None:
    done = install(venv, "nixl,tape", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "scripts/install: --with tape: there are nixl and mooncake\n"
    assert not (venv / "peers").exists()
