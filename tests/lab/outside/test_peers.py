"""Whether SGLang's NIXL and Mooncake backends can be here, as an interpreter of its own says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_kvtier.lab.outside import peers

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
    assert reason.endswith("pip install nixl")


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
