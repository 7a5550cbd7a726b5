"""The table of hooks on SGLang: what it names is there, and the documentation shows the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvtier.runtime.sglang import hooks
from sgl_kvtier.runtime.sglang.hooks import HOOKS, Hook

README = Path(__file__).parents[2] / "patches" / "README.md"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_the_function_of_every_hook_is_there(hook: Hook) -> None:
    function = hook.load()
    assert callable(function) and function.__module__.startswith("sgl_kvtier."), (
        "by which the check before serving knows ours"
    )


def test_a_symbol_is_hooked_once() -> None:
    targets = [hook.target for hook in HOOKS]
    assert sorted(set(targets)) == sorted(targets)


def test_the_table_in_the_documentation_is_made_from_the_hooks() -> None:
    assert f"\n{hooks.table()}\n" in README.read_text(), (
        "python -m sgl_kvtier.runtime.sglang.hooks prints it"
    )
