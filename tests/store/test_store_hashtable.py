"""The table that finds a page's row, in C and in Python."""

from __future__ import annotations

import numpy as np
import pytest
from store_pages import key

from sgl_kvtier.store.index import hashtable
from sgl_kvtier.store.index.hashtable import EMPTY, HashTable

ROWS = 500
WORDS = np.frombuffer(b"".join(key(i) for i in range(ROWS)), np.uint64).reshape(ROWS, 4)


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(hashtable, "_native", None)
    elif hashtable._native is None:
        pytest.skip("the native table is not built here")


def filled(pools: np.ndarray) -> HashTable:
    table = HashTable()
    table.insert(np.arange(ROWS), WORDS, pools)
    return table


def test_a_key_of_two_pools_has_a_row_in_each() -> None:
    words = np.concatenate([WORDS[:250], WORDS[:250]])
    pools = np.repeat(np.array([0, 1], np.uint16), 250)
    table = HashTable()
    table.insert(np.arange(ROWS), words, pools)
    assert (table.find(words[:250], 0, words, pools) == np.arange(250)).all()
    assert (table.find(words[:250], 1, words, pools) == np.arange(250, 500)).all()
    table.remove(np.arange(250), words, pools)
    assert (table.find(words[:250], 0, words, pools) == EMPTY).all()
    assert (table.find(words[:250], 1, words, pools) == np.arange(250, 500)).all()


def test_a_key_that_differs_in_its_last_word_alone_is_another_one() -> None:
    pools = np.zeros(ROWS, np.uint16)
    table = filled(pools)
    for bit in range(0, 64, 7):
        others = WORDS.copy()
        others[:, 3] ^= np.uint64(1 << bit)
        assert (table.find(others, 0, WORDS, pools) == EMPTY).all()
