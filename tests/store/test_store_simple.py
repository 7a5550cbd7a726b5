"""The store as a mapping of bytes, for programs other than SGLang."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_kvtier import PutOutcome, open_store, page_key
from sgl_kvtier.config import StoreConfig

ME = {"model": "m", "dtype": "bf16"}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "pages")


def opened(path, **more):
    return open_store(path, identity=more.pop("identity", ME), capacity_bytes=64 << 20, **more)


def test_a_page_comes_back_as_it_was_put_also_after_the_store_was_closed(path):
    with opened(path) as store:
        assert store.put({page_key("a"): b"x" * 5000}) == {page_key("a"): PutOutcome.STORED}
        assert store.get(page_key("a")) == b"x" * 5000
    with opened(path) as store:
        assert store.get(page_key("a")) == b"x" * 5000
        assert len(store) == 1


def test_pages_of_different_lengths_are_read_together_and_missing_ones_left_out(path):
    pages = {page_key(str(n)): bytes([n]) * (n * 1000 + 1) for n in range(5)}
    with opened(path) as store:
        store.put(pages)
        assert store.get_many([*pages, page_key("other"), page_key("0")]) == pages
        assert page_key("3") in store and page_key("other") not in store


def test_any_contiguous_buffer_can_be_a_page(path):
    array = np.arange(1000, dtype=np.float32)
    with opened(path) as store:
        store.put({page_key("array"): memoryview(array)})
        assert np.frombuffer(store.get(page_key("array")), np.float32).tolist() == array.tolist()


def test_a_deleted_page_is_gone(path):
    with opened(path) as store:
        store.put({page_key("a"): b"x", page_key("b"): b"y"})
        assert store.delete([page_key("a"), page_key("c")]) == 1
        assert store.get_many([page_key("a"), page_key("b")]) == {page_key("b"): b"y"}


def test_a_damaged_page_is_none(path):
    with opened(path) as store:
        store.put({page_key("a"): b"x" * 4000})
        store.pages.damage(page_key("a"))
        assert store.get(page_key("a")) is None
        assert store.stats().pages_corrupt == 1


def test_more_settings_come_as_a_configuration(path):
    with open_store(
        "", identity=ME, config=StoreConfig(path=path, capacity_bytes=64 << 20, native_io=False)
    ) as store:
        store.put({page_key("a"): b"x"})
        assert store.get(page_key("a")) == b"x"
