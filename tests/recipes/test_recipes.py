"""The recipes' data, arguments that are made of them, what is read from a log, and signatures."""

from __future__ import annotations

import argparse
import itertools
import json
from types import SimpleNamespace
from typing import Any

import fuzz
import gauntlet
import pytest
import shapes

RECIPES, DROPPED = gauntlet.load()
NAMES = [one.name for one in RECIPES]
DOCS = gauntlet.HERE.parents[1] / "docs" / "results"


def test_there_are_recipes_for_every_family_that_agents_use():
    assert len(set(NAMES)) == len(NAMES) >= 20
    families = (
        "llama-3 llama-4 qwen3-32b qwen3-235b qwen3-next qwen3.5 deepseek-v3 deepseek-v3.2 "
        "deepseek-v4 kimi-k2 kimi-k3 glm-4.6 glm-4.7 glm-5 gpt-oss gemma-3 gemma-4 minimax-m2 "
        "nemotron-3"
    )
    for family in families.split():
        assert any(name.startswith(family) for name in NAMES), family


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipe_has_a_public_source_and_a_stand_in(recipe):
    assert recipe.source.startswith("https://")
    assert recipe.shape in shapes.SHAPES
    assert not recipe.draft or recipe.draft in shapes.SHAPES
    assert bool(recipe.draft) == any(f[0] == "--speculative-draft-model-path" for f in recipe.flags)
    assert recipe.flags


def test_every_reason_for_leaving_a_flag_away_is_used():
    published = {flag[0] for recipe in RECIPES for flag in recipe.flags}
    assert set(DROPPED) <= published
    assert all(reason.strip() for reason in DROPPED.values())


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    server_args = pytest.importorskip("sglang.srt.server_args")
    made = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(made)
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_sglang_takes_the_flags_that_a_server_is_started_with(recipe, parser, tmp_path):
    words = gauntlet.arguments(recipe, DROPPED, tmp_path)
    backend = words.index("--hicache-storage-backend")
    assert words[backend + 1] == "kvtier"
    words[backend + 1] = "file"  # ours is among the choices once the plugin is loaded
    given = parser.parse_args(words)
    assert given.model_path == str(tmp_path / "model")
    for flag in recipe.flags:
        if flag[0] not in DROPPED:
            assert (
                flag[0] in words and flag[1:] == words[words.index(flag[0]) + 1 :][: len(flag) - 1]
            )


def test_a_failed_server_is_told_by_its_first_error_and_sglangs_symbol(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        '  File "/venv/site-packages/sglang/srt/mem_cache/pool.py", line 7, in make\n    raise\n'
        "ValueError: no such pool\n"
        '  File "/venv/site-packages/sglang/srt/engine.py", line 9, in wait\n'
        "RuntimeError: the scheduler died\n"
    )
    said = gauntlet.failure(log)
    assert said == "ValueError: no such pool (sglang/srt/mem_cache/pool.py:7 make)"
    log.write_text("usage: ...\nsglang serve: error: argument --dtype: invalid choice: 'x'\n")
    assert gauntlet.failure(log).startswith("error: argument --dtype: invalid choice")
    assert gauntlet.failure(tmp_path / "none") == ""


def test_a_published_table_is_that_of_the_last_run():
    data = json.loads((DOCS / "data" / "recipes.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in data["recipes"]] == NAMES
    assert data["grids"] == gauntlet.grids(data["recipes"])
    assert gauntlet.table(data["recipes"]) in (DOCS / "recipes.md").read_text(encoding="utf-8")
    for row in data["recipes"]:
        every = [row[name] for name in gauntlet.COLUMNS]
        assert all(every) or row["reason"], f"{row['name']} has no reason"
        assert all(kind["wrong"] == 0 for kind in row["rows"].values())


def test_a_changed_row_of_any_kind_of_pool_is_seen(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(gauntlet.HERE / "stand_in"))
    from recipe_device.rows import IndexKeys, Rows

    chain = torch.arange(5, dtype=torch.int64) * 0x123456789ABCDEF
    slots = torch.tensor([0, 3, 64, 65, 127])
    latent = torch.zeros(128, 1, 576, dtype=torch.bfloat16)
    odd = torch.zeros(128, 10, dtype=torch.uint8)
    packed = torch.zeros(2, 64 * 132, dtype=torch.uint8)
    buffers: list[tuple[Any, Any]] = [
        (Rows("kv", "0", latent, 0), latent),
        (Rows("state", "0", odd, 1), odd),
        (IndexKeys("index keys", "0", packed, 2, 64), packed),
    ]
    for rows, buffer in buffers:
        rows.write(slots, chain)
        assert bool((rows.read(slots) == chain[:, None]).all()), rows.kind
        flat = buffer.view(buffer.shape[0], -1).view(torch.uint8)
        places = [(0, 7), (0, flat.shape[1] - 4 * 64)] if rows.kind == "index keys" else [(3, 7)]
        for place in places:
            before = int(flat[place])
            flat[place] = before ^ 4
            assert int((rows.read(slots) != chain[:, None]).any(1).sum()) == 1, (rows.kind, place)
            flat[place] = before
    moved = latent.clone()
    latent[3] = moved[64]  # a page of another place
    assert not bool((buffers[0][0].read(slots) == chain[:, None]).all())


def test_states_of_a_compressor_are_signed_by_window_page(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(gauntlet.HERE / "stand_in"))
    from recipe_device.rows import Rows, _keeps, _state_pages

    every = torch.zeros(4 * 8 + 3, 6)  # of four window pages, and three that belong to none
    states = SimpleNamespace(ratio=4, ring_size=8, kv_score_buffer=SimpleNamespace(kv_score=every))
    rows = Rows("compressor state", "0", _state_pages(states), 4000)
    rows.write(torch.tensor([1, 3]), torch.tensor([5, 7]))
    assert [bool(ring.any()) for ring in every.split(8)] == [False, True, False, True, False]
    every.view(torch.uint8)[8 + 7, -1] ^= 4
    assert (rows.read(torch.tensor([1, 3])) != torch.tensor([[5], [7]])).any(1).tolist() == [
        True, False,
    ]  # fmt: skip
    assert _keeps(states) and not _keeps(None) and not _keeps(SimpleNamespace(ratio=128))


def test_a_fuzzed_recipe_is_sound_when_something_was_compared_and_nothing_was_wrong():
    log = fuzz.FuzzLog()
    rows = {"kv": {"checked": 9, "wrong": 0}}
    found = {**fuzz.counts(log), "rows": rows}
    assert not fuzz.is_sound(found), "no answer was compared"
    found["compared"] = 3
    assert fuzz.is_sound(found)
    assert not fuzz.is_sound({**found, "rows": {}}), "nor any row"
    assert not fuzz.is_sound({**found, "leaks": 1})
    assert not fuzz.is_sound({**found, "rows": {"kv": {"checked": 9, "wrong": 1}}})


def test_fuzzed_sessions_go_on_from_the_answers_that_the_device_gives():
    one, other = fuzz._sessions(3)[0], fuzz._sessions(3)[0]
    assert one == other and len(one) > 1
    for before, after in itertools.pairwise(one):
        ids = [*before.ids, *fuzz.expected(before.ids, before.outputs)]
        assert list(after.ids[: len(ids)]) == ids and len(after.ids) > len(ids)
    longer = fuzz.expected(one[0].ids, 3)
    assert fuzz.expected([*one[0].ids, *longer[:1]], 2) == longer[1:]


def test_results_of_one_kind_or_recipe_leave_the_others_in_their_file(tmp_path):
    file = tmp_path / "results.json"
    gauntlet.keep(None, {"fuzz": []})
    gauntlet.keep(file, {"fuzz": [{"name": "a", "seed": 0}]})
    gauntlet.keep(file, {"fuzz": [{"name": "b", "seed": 0}], "page": "recipes.md"})
    gauntlet.keep(file, {"fuzz": [{"name": "a", "seed": 1}]})
    gauntlet.keep(file, {"speed": [{"name": "a"}]})
    kept = json.loads(file.read_text())
    assert kept["fuzz"] == [{"name": "b", "seed": 0}, {"name": "a", "seed": 1}]
    assert (kept["page"], kept["speed"]) == ("recipes.md", [{"name": "a"}])
    assert gauntlet.merged(file, []) == []
