"""The source archive holds what builds, tests and explains the package, and what an index shows of it
has no link that leads nowhere there.
"""

from __future__ import annotations

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
README = "[a](docs/glossary.md#why) [b](https://x.org) [c](#here)"


PIP = """#!/bin/sh
echo 'Installing build dependencies: started'
echo 'Installing collected packages: one, two, three'
mkdir -p lib/python3.11/site-packages/one.dist-info
echo > begun; while [ ! -e shown ]; do sleep 0.1; done
"""
INSTALL = """set -euo pipefail
sleep() { until [ -e begun ]; do command sleep 0.1; done; SECONDS=$((SECONDS + 15)); }
echo() { builtin echo "$@"; touch shown; }
eval "$(sed -n '/^packages()/,/^}/p' "$1")"
pip_install . whatever
"""


def test_the_installation_counts_packages_while_pip_says_nothing(tmp_path: Path) -> None:
    """A stand-in for pip has installed one of three packages; the clock goes by 15 s a look."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PIP)
    (tmp_path / "bin" / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", INSTALL, "-", str(ROOT / "scripts" / "install")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ": installed 1 of 3 packages\n" in done.stdout


NATIVE = "sgl_kvtier/store/native/module.h", "sgl_kvtier/store/_native.so"
COMPILER = f"""#!/bin/sh
case "$*" in
  *EXT_SUFFIX*) echo .so ;;
  *build_ext*) echo >> compiled; cat {NATIVE[0]} > {NATIVE[1]} ;;
esac
"""


def test_a_change_in_c_is_compiled_by_the_next_installation(tmp_path: Path) -> None:
    for name in ("scripts/install", "setup.py", "setup.cfg", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "venv" / "bin" / "python"
    header, module = (tmp_path / name for name in NATIVE)
    for path in (python, header):
        path.parent.mkdir(parents=True)
    python.write_text(COMPILER)
    python.chmod(0o755)

    def compiled() -> int:
        """How often it was, after one more installation."""
        words = ["--venv", "venv", "--extras", "dev", "--source"]
        subprocess.run([tmp_path / "scripts" / "install", *words], check=True, capture_output=True)
        noted = tmp_path / "compiled"
        return len(noted.read_text().splitlines()) if noted.exists() else 0

    header.write_text("// one\n")
    other = module.with_name("_native.of-another-python")
    other.write_text("another interpreter's module")
    assert [compiled(), compiled()] == [1, 1], "pip may have compiled nothing, and says nothing"
    header.write_text("// two\n")
    assert [compiled(), compiled()] == [2, 2]
    module.unlink()
    assert compiled() == 3 and other.exists()


def test_the_disk_of_the_environment_is_the_one_that_has_to_have_room(tmp_path: Path) -> None:
    df = tmp_path / "df"
    df.write_text(
        f"#!/bin/sh\nshift; echo $* > {tmp_path}/asked; printf 'a\\nb 9 9 1024 9%% /\\n'\n"
    )
    df.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "install", "--venv", tmp_path / "new" / "venv"],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and f"needed in {tmp_path}, 0 are free" in done.stderr
    assert (tmp_path / "asked").read_text() == f"{tmp_path}\n"


FETCHER = """#!/bin/sh
case "$*" in
  *download*) for folder; do :; done; echo > "$folder/sglang.whl"; exit {pip} ;;
  *zipfile*) for folder; do :; done; mkdir -p "$folder/sglang"; exit {unpacked} ;;
esac
"""


def test_a_release_that_was_unpacked_in_part_is_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = runpy.run_path(str(ROOT / "scripts" / "check-release"), run_name="script")
    python = tmp_path / "python"

    def fetched(pip: int, unpacked: int) -> Path | None:
        python.write_text(FETCHER.format(pip=pip, unpacked=unpacked))
        python.chmod(0o755)
        return script["wheel"]("1.2.3", str(python))

    assert fetched(pip=1, unpacked=0) is None
    with pytest.raises(subprocess.CalledProcessError):
        fetched(pip=0, unpacked=1)
    assert fetched(pip=1, unpacked=0) is None, "what was unpacked in part is not kept"
    assert fetched(pip=0, unpacked=0) == tmp_path / "cache" / "kvtier-releases" / "1.2.3"
    assert fetched(pip=1, unpacked=0) is not None


@pytest.fixture
def index_page(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], str]:
    """The function of setup.py, which builds nothing here."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path(str(ROOT / "setup.py"))["index_page"]


def test_links_of_the_readme_lead_to_the_released_files_of_the_repository(index_page):
    assert index_page(README, "0.1.0", "https://host/owner/name/") == (
        "[a](https://host/owner/name/blob/v0.1.0/docs/glossary.md#why) [b](https://x.org) [c](#here)"
    )


def test_without_a_repository_they_name_the_files_of_the_source_archive(index_page):
    assert index_page(README, "0.1.0", "") == "a (`docs/glossary.md`) [b](https://x.org) [c](#here)"


def test_no_link_of_the_readme_is_relative_on_the_page_of_an_index(index_page):
    readme = (ROOT / "README.md").read_text("utf-8")
    assert any("://" not in link for link in LINK.findall(readme))
    for url in ("", "https://host/owner/name"):
        page = index_page(readme, "0.1.0", url)
        assert [link for link in LINK.findall(page) if not link.startswith("https://")] == []


ROUND_TRIP = """
from sgl_kvtier import open_store, page_key
from sgl_kvtier.store import _native
assert _native.__file__.startswith({site!r}), _native.__file__
for found in (False, True):
    with open_store("store", identity={{"model": "m"}}) as store:
        if not found:
            store.put({{page_key("a"): b"its bytes" * 10_000}})
        assert store.get(page_key("a")) == b"its bytes" * 10_000
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_the_source_archive_is_complete_builds_and_stores_pages(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "build-wheels"), run_name="script")
    archive = script["source_archive"](Path(sys.executable), tmp_path)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    source = archive.with_name(archive.name.removesuffix(".tar.gz"))
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tracked = [name for name in done.stdout.split("\n") if name and not name.startswith(".")]
    assert [
        name for name in tracked if (ROOT / name).is_file() and not (source / name).exists()
    ] == []

    about = email.message_from_string((source / "PKG-INFO").read_text("utf-8"))
    assert about["License-Expression"] == "Apache-2.0" and about["Requires-Python"] == ">=3.10"
    assert "bench" in about.get_all("Provides-Extra", [])
    assert "Operating System :: POSIX :: Linux" in about.get_all("Classifier", [])

    env = {**os.environ, "KVTIER_COMPILE": "0"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(wheel, env=env, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(made).namelist()
    assert [name for name in names if name.endswith((".c", ".h", ".md"))] == []
    assert len([name for name in names if name.endswith(".so")]) == 4
    assert {"sgl_kvtier/py.typed", "sgl_kvtier/runtime/sglang/seams.json"} <= {*names}

    site = str(tmp_path / "site")
    install = [*pip, "install", "--no-deps", "--target", site, str(made)]
    subprocess.run(install, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP.format(site=site)],
        env={**os.environ, "PYTHONPATH": site},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
