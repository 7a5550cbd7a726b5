"""SGLang's page hash is compiled before the first server, once on a machine. A stand-in takes
SGLang's place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_kvtier.lab.outside.page_hash import compile_page_hash

GOOD = """
import os, pathlib
def _load_native_hash_module():
    folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], "hicache_hash_cpp")
    folder.mkdir(parents=True)
    (folder / "hicache_hash_cpp.so").touch()
"""
BAD = "def _load_native_hash_module(): raise RuntimeError('no g++')"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An SGLang without a page hash, and an empty folder for what torch compiles."""
    folder = tmp_path / "site" / "sglang" / "srt" / "mem_cache" / "cpp_utils"
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents[:3]):
        (parent / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    compile_page_hash.cache_clear()
    yield folder
    compile_page_hash.cache_clear()


def test_a_page_hash_is_compiled_once_on_a_machine(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (site / "native_hash.py").write_text(GOOD)
    assert compile_page_hash()
    assert "Compiling SGLang's page hash" in capfd.readouterr().err
    compile_page_hash.cache_clear()  # as another process
    assert compile_page_hash()
    assert capfd.readouterr().err == ""


def test_a_machine_without_a_compiler_is_told_what_to_install(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (site / "native_hash.py").write_text(BAD)
    assert not compile_page_hash()
    assert "no g++). Install g++, and libcrypto's headers" in capfd.readouterr().err


def test_an_sglang_without_a_page_hash_needs_none(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert compile_page_hash()
    assert capfd.readouterr().err == ""
