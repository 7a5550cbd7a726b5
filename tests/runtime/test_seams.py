"""The manifest of SGLang symbols: it fits the installed release, and what does not fit is named."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry

from sgl_kvtier.runtime.scheduler.radix_cache import KVTierRadixCache
from sgl_kvtier.runtime.sglang import hooks, seams, types
from sgl_kvtier.runtime.sglang.hooks import HOOKS, Where
from sgl_kvtier.runtime.sglang.seams import (
    AND_MORE,
    CALLS,
    DATA,
    HOW,
    PAGES,
    REPLACES,
    Release,
    Seam,
)

HOUSE = """
from fakehost.attic import Roof as _Roof
LIMIT = 3
class House(_Roof[int]):
    floors: int = 1
    def __init__(self):
        self.rooms, self.cellar = 3, None
    def door(self, key, *, wide=False, lock):
        return key
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in place of SGLang, with one class to rely on."""
    folder = tmp_path / "fakehost"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "attic.py").write_text("class Roof:\n    tiles = 9\n")
    (folder / "room.py").write_text(HOUSE)
    monkeypatch.syspath_prepend(str(tmp_path))
    seams._parse.cache_clear()
    yield folder
    seams._parse.cache_clear()


def door(**changes) -> Seam:
    values = {"feature": "f", "port": "server", "symbol": "fakehost.room.House.door", "why": "w"}
    return Seam(**{**values, **changes})


def rewrite(package: Path, old: str, new: str) -> None:
    (package / "room.py").write_text(HOUSE.replace(old, new))
    seams._parse.cache_clear()


def test_every_seam_is_as_the_installed_sglang_has_it():
    assert [(s.seam.symbol, s.problem) for s in seams.check() if s.problem] == []


def test_the_installed_sglang_is_a_release_that_was_tried():
    version = seams.installed_version()
    assert version in [release.version for release in seams.releases()], (
        "scripts/check-release tries it; CONTRIBUTING.md says what to do then"
    )


def test_every_seam_says_how_it_is_relied_on():
    manifest = seams.load_manifest()
    assert {seam.how for seam in manifest} == set(HOW)
    assert [s.symbol for s in manifest if s.how in (REPLACES, PAGES) and s.names] == []


def test_every_body_of_the_newest_release_is_listed():
    bodies = {s.symbol for s in seams.load_manifest() if s.how in (REPLACES, PAGES)}
    assert bodies == set(seams.releases()[-1].digests)


def test_every_hook_is_a_seam():
    symbols = {s.symbol for s in seams.load_manifest()}
    assert [hook.target for hook in HOOKS if hook.target not in symbols] == []


def test_every_method_that_our_radix_cache_overrides_is_a_seam_of_restoring():
    """Also those for lookahead: they are overridden where only prefixes are restored."""
    place = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
    called = {s.symbol for s in seams.load_manifest() if (s.feature, s.how) == ("restore", CALLS)}
    overridden = [
        name
        for name, value in vars(KVTierRadixCache).items()
        if isinstance(value, FunctionType)
        and not name.startswith("__")
        and hasattr(UnifiedRadixCache, name)
    ]
    assert len(overridden) > 20
    assert [name for name in overridden if place + name not in called] == []


def test_what_types_say_of_sglangs_objects_is_checked():
    read = {s.why: set(s.names) for s in seams.load_manifest() if s.how == DATA}
    tree = ast.parse(Path(types.__file__).read_text())
    given = {"Operation": {"handle"}}  # SGLang's tree gives it to an operation
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name not in ("Handle",):
            names = {
                one.name if isinstance(one, ast.FunctionDef) else one.target.id
                for one in node.body
                if isinstance(one, (ast.FunctionDef, ast.AnnAssign))
            }
            assert read[f"`types.{node.name}`: what is used of it"] == names - given.get(
                node.name, set()
            )


def test_every_seam_names_its_port_and_no_port_is_without_one():
    named = {seam.port for seam in seams.load_manifest()}
    assert named == set(seams.PORTS)


def test_a_missing_symbol_is_missing(package):
    assert seams._problem(door(symbol="fakehost.room.House.window")) == "missing"
    assert seams._problem(door(symbol="fakehost.cellar.House")) == "missing"
    assert seams._problem(door(symbol="no_such_host.room.House")) == "missing"


def test_data_has_to_have_the_attributes_that_are_read(package):
    assert seams._problem(door(symbol="fakehost.room.LIMIT", how=DATA)) == ""
    house = {"symbol": "fakehost.room.House", "how": DATA}
    assert seams._problem(door(**house, names=("floors", "rooms", "cellar", "door", "tiles"))) == ""
    assert seams._problem(door(**house, names=("floors", "stairs"))) == "it has no stairs"


def test_a_call_fits_while_what_it_passes_is_taken(package):
    fitting = door(names=("self", "key", "lock"))
    assert seams._problem(fitting) == ""
    rewrite(package, "wide=False", "wide=False, high=2")
    assert seams._problem(fitting) == "", "another optional parameter"
    rewrite(package, "return key", "return None")
    assert seams._problem(fitting) == "", "its body does not matter"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("lock)", "bolt)", "it takes no lock"),
        ("key, *", "key, hour, *", "it demands hour"),
        ("self, key", "key, self", "it takes key, self, wide, lock in this order"),
    ],
)
def test_a_call_that_no_longer_fits_is_told(package, old, new, problem):
    rewrite(package, old, new)
    assert seams._problem(door(names=("self", "key", "lock"))) == problem


def test_what_is_passed_on_may_be_demanded(package):
    rewrite(package, "key, *", "key, hour, *")
    assert seams._problem(door(names=("self", "key", AND_MORE))) == ""


def test_a_body_has_to_be_one_of_those_that_were_tried(package, monkeypatch):
    body = door(how=REPLACES)
    listed = {}
    monkeypatch.setattr(
        seams, "releases", lambda: (Release("1", "1", {}), Release("2", "1", listed))
    )
    assert seams._problem(body) == "its source is not one that was tried"
    listed[body.symbol] = seams._find(body.symbol).digest
    assert seams._problem(body) == ""
    rewrite(package, "return key", "return None")
    assert seams._problem(body) == "its source is not one that was tried"


def test_pages_are_named_by_release_or_by_their_code(package, monkeypatch):
    layout = door(how=PAGES)
    monkeypatch.setattr(seams, "load_manifest", lambda: [layout])
    known = {layout.symbol: seams._find(layout.symbol).digest}
    monkeypatch.setattr(
        seams, "releases", lambda: (Release("1", "a", {}), Release("2", "b", known))
    )
    assert seams.page_format() == "b"
    rewrite(package, "return key", "return None")
    other = seams.page_format()
    assert other.startswith("code-")
    assert seams._problem(layout) == "", "pages of an unknown layout are kept apart, not refused"
    rewrite(package, "return key", "return 1")
    assert seams.page_format() not in ("b", other)


# The table of hooks on SGLang: what it names is there, and the documentation shows the same.


README = Path(__file__).parents[2] / "patches" / "README.md"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_the_function_of_every_hook_is_ours_and_takes_whatever_another_release_passes(hook):
    function = hook.load()
    assert function.__module__.startswith("sgl_kvtier."), (
        "the check before serving knows ours by it"
    )
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def test_what_this_sglang_does_not_have_is_not_hooked(monkeypatch):
    registered: list[str] = []
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: registered.append(target)
    )
    there, gone, broken = (
        replace(HOOKS[0], target=HOOKS[0].target),
        replace(HOOKS[0], target="sglang.srt.server_args.ServerArgs.gone"),
        replace(HOOKS[0], function="no_such_module:hook"),
    )
    monkeypatch.setattr(hooks, "HOOKS", (gone, broken, there))
    hooks.register(Where.EVERY)
    assert registered == [there.target]


def test_a_symbol_is_hooked_once():
    targets = [hook.target for hook in HOOKS]
    assert sorted(set(targets)) == sorted(targets)


def test_the_table_in_the_documentation_is_made_from_the_hooks():
    assert f"\n{hooks.table()}\n" in README.read_text(), (
        "python -m sgl_kvtier.runtime.sglang.hooks prints it"
    )
