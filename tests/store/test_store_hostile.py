"""Every public method of a store with arguments of wrong types and values: it works, or raises a
TypeError, a ValueError or an error of this package, each with a sentence, and the store goes on.
"""

from __future__ import annotations

import array
import ctypes
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_double import RemoteDouble
from store_pages import IO_KINDS, aligned, found, io_settings, key, named, open_at, put

from sgl_kvtier import open_store
from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.store import simple
from sgl_kvtier.store.base import PageRead, PageWrite
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.types import Lookup

ALLOWED = (KVTierError, TypeError, ValueError)


def released() -> memoryview:
    view = memoryview(bytearray(32))
    view.release()
    return view


def deep() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(5000):
        inner = {"a": inner}
    return inner


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "zero": lambda: 0,
    "negative": lambda: -1,
    "large": lambda: 1 << 31,
    "huge": lambda: 10**400,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "minus inf": lambda: -math.inf,
    "1e300": lambda: 1e300,
    "float": lambda: 1.5,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "abc",
    "long text": lambda: "x" * 100_000,
    "surrogate": lambda: "\ud800",
    "NUL": lambda: "a\0b",
    "newline": lambda: "0\n",
    "accent": lambda: "é",
    "empty bytes": lambda: b"",
    "key": lambda: key(1),
    "short key": lambda: b"x" * 31,
    "two keys": lambda: b"x" * 64,
    "bytearray": lambda: bytearray(32),
    "view": lambda: memoryview(bytearray(32)),
    "read-only view": lambda: memoryview(bytes(32)),
    "strided view": lambda: memoryview(bytearray(64))[::2],
    "released view": released,
    "strided array": lambda: np.arange(100)[::2],
    "array in Fortran order": lambda: np.asfortranarray(np.ones((8, 8))),
    "objects": lambda: np.array([None, 1], object),
    "times": lambda: np.zeros(3, "M8[s]"),
    "records": lambda: np.zeros(4, [("a", "i4"), ("b", "f8")]),
    "doubles": lambda: array.array("d", [1, 2]),
    "ctypes": ctypes.c_int * 5,
    "empty list": lambda: [],
    "list of none": lambda: [None],
    "list of numbers": lambda: [1, 2],
    "list of texts": lambda: ["x" * 32],
    "list of keys": lambda: [key(1), key(2)],
    "list with a short key": lambda: [key(1), b"x"],
    "list of bytearrays": lambda: [bytearray(32)],
    "nested": lambda: [[[[]]]],
    "generator": lambda: (key(i) for i in range(3)),
    "set": lambda: {key(1)},
    "object": lambda: {},
    "object with numbers": lambda: {1: 2},
    "object of pages": lambda: {key(9): b"x" * 10},
    "deep object": deep,
    "function": lambda: lambda *_: 1 / 0,
    "class": lambda: object,
    "instance": object,
}


def pages_with(kind: type[PageRead] | type[PageWrite], value: Any) -> Iterator[Any]:
    """Batches in which one part of a page is the value."""
    memory = [aligned(100)]
    yield [value]
    yield [kind(value, memory)]
    yield [kind(key(1), value)]
    yield [kind(key(1), [value])]
    yield [kind(key(1), memory, value)]
    yield [kind(key(1), memory), kind(key(2), memory, value)]


def calls(store: DiskStore, value: Any) -> Iterator[Callable[[], Any]]:
    """Every method of a store with the value in the place of each argument."""
    right = [PageRead(key(1), [aligned(100)])]
    for method in (store.lookup, store.lengths, store.delete):
        yield lambda method=method: method(value)
        yield lambda method=method: method([value])
        yield lambda method=method: method([key(3)], value)
    yield lambda: store.retain(value, [key(3)], 1.0)
    yield lambda: store.retain("a", value, 1.0)
    yield lambda: store.retain("a", [value], 1.0)
    yield lambda: store.retain("a", [key(3)], value)
    yield lambda: store.delete_tenant(value)
    yield lambda: store.read(value).wait(30)
    yield lambda: store.put(value)
    for batch in pages_with(PageRead, value):
        yield lambda batch=batch: store.read(batch).wait(30)
    for batch in pages_with(PageWrite, value):
        yield lambda batch=batch: store.put(batch)
    yield lambda: store.read(right, priority=value).wait(30)
    yield lambda: store.read(right, deadline_s=value).wait(30)
    yield lambda: store.read(right, on_page=value).wait(30)
    # Not of a read that is under way: it may be waited for without a limit.
    yield lambda: store.read([]).wait(value)
    yield lambda: store.damage(value)
    yield lambda: store.damage(key(3), value)
    yield lambda: store.damage(key(3), bit=value)
    yield lambda: store.check_room(value)


def mapping_calls(store: simple.Store, value: Any) -> Iterator[Callable[[], Any]]:
    yield lambda: store.put(value)
    yield lambda: store.put({key(5): value})
    yield lambda: store.put({value: b"x"})
    yield lambda: store.get(value)
    yield lambda: store.get_many(value)
    yield lambda: store.get_many([value])
    yield lambda: value in store
    yield lambda: store.delete(value)
    yield lambda: store.delete([value])
    yield lambda: simple.page_key(value)


def check(call: Callable[[], Any], where: str) -> None:
    try:
        call()
    except ALLOWED as error:
        said = str(error)
        assert re.search(r"[A-Za-z]{2,}.* .*[A-Za-z]{2,}", said), f"{where}: no sentence: {said!r}"
        assert len(said) < 700 and "\n" not in said, f"{where}: {said[:200]!r}"
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {str(error)[:200]}") from error


@pytest.fixture(scope="module", params=IO_KINDS)
def shared_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DiskStore]:
    folder = tmp_path_factory.mktemp("hostile")
    store = open_at(folder, **io_settings(request.param))
    yield store
    store.close()


def check_all(calls: Callable[..., Iterator[Callable[[], Any]]], store: Any, name: str) -> None:
    for number in range(sum(1 for _ in calls(store, None))):
        # A value for each call: generators and views are used up.
        call = list(calls(store, VALUES[name]()))[number]
        check(call, f"{name}, call {number}")


@pytest.mark.parametrize("name", VALUES)
def test_no_value_breaks_a_method_of_a_store(shared_store: DiskStore, name: str) -> None:
    check_all(calls, shared_store, name)
    put(shared_store, named(["after"]))
    assert found(shared_store, named(["after"])) == 1
    assert shared_store.lookup([key("after")]) == [Lookup.HIT]
    assert not shared_store._core.table.pins.any(), "no page stays pinned"


def tiered_calls(store: TieredStore, value: Any) -> Iterator[Callable[[], Any]]:
    right = [PageRead(key(1), [aligned(100)])]
    for method in (store.lookup, store.find, store.own, store.delete):
        yield lambda method=method: method(value)
        yield lambda method=method: method([value])
        yield lambda method=method: method([key(3)], value)
    for batch in pages_with(PageRead, value):
        yield lambda batch=batch: store.read(batch).wait(30)
    for batch in pages_with(PageWrite, value):
        yield lambda batch=batch: store.put(batch)
    yield lambda: store.read(value).wait(30)
    yield lambda: store.put(value)
    yield lambda: store.read(right, priority=value).wait(30)
    yield lambda: store.read(right, deadline_s=value).wait(30)
    yield lambda: store.read(right, on_page=value).wait(30)
    yield lambda: store.read([*right, PageRead(key(7), [aligned(100)])]).wait(30)


@pytest.fixture(scope="module")
def tiered_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredStore]:
    local = open_at(tmp_path_factory.mktemp("tiered"))
    store = TieredStore(local, RemoteDouble())
    yield store
    store.close()


@pytest.mark.parametrize("name", VALUES)
def test_no_value_breaks_a_store_with_a_remote_one(tiered_store: TieredStore, name: str) -> None:
    check_all(tiered_calls, tiered_store, name)
    put(tiered_store, named(["after"]))
    assert tiered_store.lookup([key("after")]) == [Lookup.HIT]


@pytest.mark.parametrize("name", VALUES)
def test_no_value_breaks_the_mapping(tmp_path: Path, name: str) -> None:
    with open_store(str(tmp_path), identity={"m": 1}, capacity_bytes=8 << 20) as store:
        check_all(mapping_calls, store, name)
        store.put({key("after"): b"x" * 100})
        assert store.get(key("after")) == b"x" * 100


@pytest.mark.parametrize("name", VALUES)
def test_no_value_breaks_opening(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right: dict[str, Any] = {"identity": {"m": 1}, "capacity_bytes": 8 << 20}

    def opens(path: Any = str(tmp_path), **more: Any) -> None:
        open_store(path, **(right | more)).close()

    value = VALUES[name]
    check(lambda: opens(value()), f"{name} as path")
    for argument in ("identity", "name", "rank", "capacity_bytes", "config"):
        check(lambda a=argument: opens(**{a: value()}), f"{name} as {argument}")
    check(lambda: opens(identity={"field": value()}), f"{name} in the identity")
    for setting in StoreConfig.__dataclass_fields__:
        config = {"path": str(tmp_path), "capacity_bytes": 8 << 20} | {setting: value()}
        check(lambda c=config: opens(config=StoreConfig(**c)), f"{name} as store.{setting}")
    opens()


def test_every_public_method_is_among_the_calls() -> None:
    """A new method or argument has to be added above."""
    taken: dict[str, set[str]] = {}
    for made, cls in ((calls, DiskStore), (mapping_calls, simple.Store)):
        source = inspect.getsource(made)
        methods = {
            name: set(inspect.signature(member).parameters) - {"self"}
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and len(inspect.signature(member).parameters) > 1
        }
        missing = {name for name in methods if f"store.{name}" not in source}
        assert not missing
        taken |= methods
    assert taken["read"] == {"pages", "priority", "deadline_s", "on_page"}
    opening = {"path", "identity", "name", "rank", "capacity_bytes", "config"}
    assert set(inspect.signature(simple.open_store).parameters) == opening


def test_looking_up_unknown_pools_remembers_none_of_them(shared_store: DiskStore) -> None:
    before = list(shared_store._core.table.pools)
    for i in range(1000):
        assert shared_store.lookup([key(1)], f"unknown {i}") == [Lookup.MISS]
    assert shared_store.lengths([key(1)], "unknown") == [0]
    assert shared_store.delete([key(1)], "unknown") == 0
    assert shared_store._core.table.pools == before


def test_more_pools_than_a_row_can_number_are_refused_and_the_others_stay_right(
    shared_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, pools = named(["p"]), shared_store._core.table.pools
    monkeypatch.setattr("sgl_kvtier.store.index.slots.MOST_POOLS", len(pools) + 1)
    assert put(shared_store, page, "one more")
    with pytest.raises(ValueError, match="a store has at most"):
        put(shared_store, page, "one too many")
    assert found(shared_store, page, "one more") == 1
    assert shared_store.lookup([key("p")], "one too many") == [Lookup.MISS]
