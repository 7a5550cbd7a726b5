"""The manifest of SGLang symbols: it fits the installed release, and what does not fit is named."""

from __future__ import annotations

import pytest

from sgl_kvtier.errors import SeamError
from sgl_kvtier.runtime.sglang import seams
from sgl_kvtier.runtime.sglang.hooks import HOOKS
from sgl_kvtier.runtime.sglang.seams import Seam


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in place of SGLang, with one function to rely on."""
    folder = tmp_path / "fakehost"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "room.py").write_text(
        "LIMIT = 3\nclass House:\n    def door(self, key, *, wide=False):\n        return key\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seams._parse.cache_clear()
    yield folder
    seams._parse.cache_clear()


def door(**changes: str) -> Seam:
    values = {"feature": "f", "symbol": "fakehost.room.House.door", "why": "w"}
    return Seam(**{**values, **changes})


def test_every_seam_is_as_the_installed_sglang_has_it():
    assert [(s.seam.symbol, s.problem) for s in seams.check() if s.problem] == []


def test_every_function_in_the_manifest_has_a_digest():
    functions = [s for s in seams.load_manifest() if s.signature]
    assert len(functions) > 20
    assert all(len(s.digest) == 16 for s in functions)


def test_every_hook_is_a_seam():
    symbols = {s.symbol for s in seams.load_manifest()}
    assert [hook.target for hook in HOOKS if hook.target not in symbols] == []


def test_every_seam_names_its_port_and_no_port_is_without_one():
    named = {seam.port for seam in seams.load_manifest()}
    assert named == set(seams.PORTS)


def test_a_symbol_has_one_port_whatever_it_is_needed_for():
    ports: dict[str, set[str]] = {}
    for seam in seams.load_manifest():
        ports.setdefault(seam.symbol, set()).add(seam.port)
    assert {symbol: named for symbol, named in ports.items() if len(named) > 1} == {}


def test_a_missing_symbol_is_missing(package):
    assert seams._problem(door(symbol="fakehost.room.House.window")) == "missing"
    assert seams._problem(door(symbol="fakehost.attic.House")) == "missing"
    assert seams._problem(door(symbol="no_such_host.room.House")) == "missing"


def test_data_only_has_to_be_there(package):
    assert seams._problem(door(symbol="fakehost.room.LIMIT")) == ""


def test_another_signature_is_told(package):
    signature, _ = seams._find("fakehost.room.House.door")
    assert signature == "(self, key, *, wide=False)"
    assert "expected (self, key)" in seams._problem(door(signature="(self, key)"))


def test_another_body_is_told_though_the_signature_is_the_same(package):
    signature, digest = seams._find("fakehost.room.House.door")
    same = door(signature=signature, digest=digest)
    assert seams._problem(same) == ""
    (package / "room.py").write_text(
        "class House:\n    def door(self, key, *, wide=False):\n        return None\n"
    )
    seams._parse.cache_clear()
    assert seams._problem(same) == "its source has changed"


def test_another_release_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: "0.6.0")
    with pytest.raises(
        SeamError, match=r"SGLang 0\.6\.0 is installed.*pip install 'sglang==0\.5\.23'"
    ):
        seams.require("storage")


def test_no_sglang_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: None)
    with pytest.raises(SeamError, match="not installed"):
        seams.require("storage")


def test_a_changed_symbol_is_refused_by_name_and_reason(monkeypatch):
    broken = Seam("storage", "sglang.srt.server_args.ServerArgs.gone", "we call it")
    monkeypatch.setattr(seams, "load_manifest", lambda: [broken])
    with pytest.raises(SeamError, match=r"ServerArgs\.gone: missing \(needed: we call it\)"):
        seams.require("storage")
    seams.require("platform")
