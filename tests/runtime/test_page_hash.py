"""SGLang's page hash is compiled before a server starts, once on a machine, or the start is refused
with what to install. A stand-in takes SGLang's place, but for the last test.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_kvtier import cli, page_hash
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.page_hash import compile_page_hash, refusal
from sgl_kvtier.runtime.sglang import page_hash as in_process

GOOD = """
import os, pathlib
def _load_native_hash_module():
    folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], "hicache_hash_cpp")
    folder.mkdir(parents=True)
    (folder / "hicache_hash_cpp.so").touch()
"""
BAD = """
def _load_native_hash_module():
    try:
        raise RuntimeError("Error building extension\\n[1/2] c++ x.cpp\\n/bin/sh: 1: c++: not found\\nninja: stopped")
    except RuntimeError as error:
        raise RuntimeError("Failed to load HiCache native hash extension") from error
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An SGLang without a page hash, and an empty folder for what torch compiles."""
    folder = tmp_path / "site" / "sglang" / "srt" / "mem_cache" / "cpp_utils"
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents[:3]):
        (parent / "__init__.py").touch()
    before = filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(before))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    compile_page_hash.cache_clear()
    yield folder
    compile_page_hash.cache_clear()


def programs(tmp_path: Path, *names: str) -> str:
    """A PATH with programs of these names alone, beside the shell's."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a compiler and ninja."""
    monkeypatch.setenv("PATH", programs(tmp_path, "c++", "ninja"))
    monkeypatch.delenv("CXX", raising=False)


def test_a_page_hash_is_compiled_once_on_a_machine(site, tools, capfd):
    (site / "native_hash.py").write_text(GOOD)
    assert compile_page_hash() == ""
    assert "Compiling SGLang's page hash" in capfd.readouterr().err
    compile_page_hash.cache_clear()  # as another process
    assert compile_page_hash() == ""
    assert capfd.readouterr().err == ""


def test_a_machine_without_a_compiler_is_told_what_to_install(site):
    (site / "native_hash.py").write_text(BAD)
    said = compile_page_hash()
    assert said.count("\n") == 0
    assert "(/bin/sh: 1: c++: not found)" in said and "apt-get install g++" in said


def test_an_sglang_without_a_page_hash_needs_none(site, capfd):
    assert compile_page_hash() == ""
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("missing", ["c++", "ninja"])
def test_a_compiled_hash_is_not_enough_where_a_tool_is_missing(
    site, tools, tmp_path, missing, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    kept = tmp_path / "compiled" / "hicache_hash_cpp"
    kept.mkdir(parents=True)
    (kept / "hicache_hash_cpp.so").touch()
    assert page_hash.is_compiled()
    (tmp_path / "bin" / missing).unlink()
    assert not page_hash.is_compiled()


def test_ninja_is_found_beside_the_interpreter_of_an_environment_that_is_not_active(
    tools, tmp_path, monkeypatch
):
    own = tmp_path / "venv" / "bin"
    own.mkdir(parents=True)
    (tmp_path / "bin" / "ninja").rename(own / "ninja")
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    page_hash.find_ninja()
    assert os.environ["PATH"].split(os.pathsep) == [str(tmp_path / "bin"), str(own)]


@pytest.mark.parametrize(
    ("said", "why", "what"),
    [
        ("Ninja is required to load C++ extensions", "Ninja is required", "apt-get install g++"),
        ("a.cpp:1: fatal error: openssl/sha.h: No such file", "openssl/sha.h", "libssl-dev"),
        ("/usr/bin/ld: cannot find -lcrypto: No such file", "-lcrypto", "libssl-dev"),
        ("[Errno 30] Read-only file system: '/x'", "Read-only", "TORCH_EXTENSIONS_DIR"),
        ("[Errno 13] Permission denied: '/x'", "Permission denied", "TORCH_EXTENSIONS_DIR"),
        ("x.so: failed to map segment from shared object", "map segment", "TORCH_EXTENSIONS_DIR"),
        ("native hash is only supported on Linux", "only supported", "another --hicache-storage"),
        ("", "no reason was given", "apt-get install"),
    ],
)
def test_every_reason_is_named_in_one_line_with_what_to_do(said, why, what):
    line = refusal(said + "\nFailed to load HiCache native hash extension" if said else "")
    assert why in line and what in line and "\n" not in line and len(line) < 500


@pytest.mark.parametrize(
    ("lacks", "package"),
    [
        ("c++", "g++"),
        ("ninja", "ninja-build"),
        ("sha.h", "libssl-dev"),
        ("Python.h", "python3-dev"),
    ],
)
def test_only_the_packages_that_are_missing_are_named(lacks, package, tools, tmp_path, monkeypatch):
    for file in ("openssl/sha.h", "Python.h"):
        place = tmp_path / "include" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    monkeypatch.setattr(page_hash, "_headers", lambda: iter([str(tmp_path / "include")]))
    paths = SimpleNamespace(get_path=lambda name: str(tmp_path / "include"))
    monkeypatch.setattr(page_hash, "sysconfig", paths)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    for folder in (tmp_path / "bin", tmp_path / "include"):
        for file in folder.rglob(lacks):
            file.unlink()
    assert refusal("it failed").endswith(f"Run: apt-get install {package}")


def stand_in(monkeypatch: pytest.MonkeyPatch, load: object) -> None:
    """Puts a loader in the place of SGLang's in this process."""
    module = SimpleNamespace(_load_native_hash_module=load)
    package = SimpleNamespace(native_hash=module)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.cpp_utils", package)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.cpp_utils.native_hash", module)
    monkeypatch.setattr(in_process, "is_compiled", lambda: True)


def test_a_launch_is_refused_with_the_first_cause(monkeypatch):
    def load():
        try:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/home/x/.cache")
        except OSError as error:
            raise RuntimeError("Failed to load HiCache native hash extension") from error

    stand_in(monkeypatch, load)
    with pytest.raises(ConfigError, match=r"Read-only file system: '/home/x/.cache'") as found:
        in_process.load()
    assert "TORCH_EXTENSIONS_DIR" in str(found.value) and "\n" not in str(found.value)


def test_another_process_that_stands_still_while_it_compiles_ends_the_wait(monkeypatch):
    stopped = threading.Event()
    stand_in(monkeypatch, stopped.wait)
    try:
        with pytest.raises(ConfigError, match="another process may be compiling"):
            in_process.load(limit_s=0.05)
    finally:
        stopped.set()


def test_serve_refuses_to_start_a_server_that_would_store_nothing(site, tmp_path, capsys):
    (site / "native_hash.py").write_text(BAD)
    words = ["serve", "m", "--store", str(tmp_path / "s"), "--port", "1025"]
    assert cli.main(words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvtier serve: SGLang's page hash cannot be compiled here (")
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="sglang is not installed: pip install '.[sglang]'",
)
def test_sglangs_own_loader_without_a_compiler_in_path_is_refused_in_one_line(tmp_path):
    env = {
        **os.environ,
        "PATH": programs(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "sgl_kvtier.runtime.sglang.page_hash"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("SGLang's page hash cannot be compiled here (") and "g++" in last
