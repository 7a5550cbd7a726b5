"""The table of hooks on SGLang: what it names is there, and the documentation shows the same."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sgl_kvtier.runtime.sglang import hooks
from sgl_kvtier.runtime.sglang.hooks import HOOKS, Hook, Where

README = Path(__file__).parents[2] / "patches" / "README.md"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_the_function_of_every_hook_is_there(hook: Hook) -> None:
    function = hook.load()
    assert callable(function) and function.__module__.startswith("sgl_kvtier."), (
        "by which the check before serving knows ours"
    )


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_every_hook_takes_whatever_another_release_passes(hook: Hook) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(hook.load()).parameters.values()}
    assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def test_what_this_sglang_does_not_have_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_symbol_is_hooked_once() -> None:
    targets = [hook.target for hook in HOOKS]
    assert sorted(set(targets)) == sorted(targets)


def test_the_table_in_the_documentation_is_made_from_the_hooks() -> None:
    assert f"\n{hooks.table()}\n" in README.read_text(), (
        "python -m sgl_kvtier.runtime.sglang.hooks prints it"
    )
