"""What a server learned, kept for its next start: whole or not at all, and only under the same
conditions.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.config import PolicyConfig, StoreConfig
from sgl_kvtier.policy.messages import ChunkDone, Mode, RestoreOffered, StepView, TransferDone
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.records.cost_profile import NAME, Learning, Profile, ProfileKeeper
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.types import Link, Span, Tier

CONFIG = PolicyConfig()
ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
EMPTY = Profile({"device": "cpu"}, {}, {}, 0, {})
KNOWN = Profile(
    {"device": "cpu"},
    {"fixed_s": 0.004, "per_token_s": 0.0003, "per_token_position_s": 1e-8},
    {"storage-device": 3e6},
    40,
    {"storage-device": 12},
    restore={"own_s": 0.012},
)


def planned_with(profile: Profile) -> dict[str, object]:
    """A planner's arguments from a profile."""
    return {"prefill": profile.prefill, "links": profile.links, "restore": profile.restore}


def learning(
    folder: Path, planner: Planner, known: Profile = EMPTY
) -> tuple[Learning, ProfileKeeper]:
    keeper = ProfileKeeper(folder / NAME, period_s=0.01)
    return Learning(planner, planner.profile, keeper, known, ENGINE), keeper


def chunk(number: int, shared: int = 0) -> ChunkDone:
    return ChunkDone(
        "r", Span(256 * number, 256 * number + 256), 0.05 + 0.01 * number, 10.0 * number, shared
    )


def test_the_break_even_bandwidth_is_that_of_a_chunk_and_known_once_chunks_were_timed(tmp_path):
    learner, _ = learning(tmp_path, make_planner(CONFIG, ENGINE))
    for number in range(cost_profile.LEAST_CHUNKS):
        assert learner.break_even_bytes_per_s is None
        learner.observe(chunk(number))
    # The first of these chunks took 0.05 s for its 16 pages of 4096 bytes.
    assert learner.break_even_bytes_per_s == pytest.approx(16 * 4096 / 0.05, rel=0.2)
    learner.close()


def test_the_break_even_bandwidth_of_an_earlier_server_holds_from_the_start(tmp_path):
    profile = planned_with(KNOWN)
    learner, _ = learning(tmp_path, make_planner(CONFIG, ENGINE, profile), KNOWN)
    seconds = 0.004 + 256 * (0.0003 + 1e-8 * 128)
    assert learner.break_even_bytes_per_s == pytest.approx(16 * 4096 / seconds)
    learner.close()


def test_the_next_start_decides_its_first_restoration_from_what_was_learned(tmp_path):
    planner = make_planner(CONFIG, ENGINE)
    learner, _ = learning(tmp_path, planner)
    for number in range(12):
        learner.observe(chunk(number))
    learner.observe(TransferDone("r", Link.STORAGE_TO_DEVICE, Span(0, 60), 60 * 4096, 0.001, 500.0))
    learner.close()
    read = cost_profile.read(tmp_path / NAME)
    assert read is not None
    assert planned_with(read) == planner.profile()

    def first(profile):
        new = make_planner(CONFIG, ENGINE, profile)
        new.observe(RestoreOffered("a", 1.0, 1024, 0, 60, ((Span(0, 60), Tier.STORAGE),)))
        start = new.step(
            StepView(1.0, ("a",), free_pages={Tier.DEVICE: 5000, Tier.HOST: 5000})
        ).starts[0]
        return start.mode, start.reason

    assert first(None) == (Mode.BOTH, "not measured yet")
    assert first(cost_profile.taken(cost_profile.as_numbers(read))) == (
        Mode.LOAD,
        "loading is faster",
    )


HOSTILE = [
    "NaN",
    "Infinity",
    "-1",
    "1e308",
    "1" + "0" * 400,
    '""',
    "[]",
    "{}",
    "true",
    "null",
    "[" * 100_000,
    "9" * 5000,
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda text: text[:9])
@pytest.mark.parametrize(
    "field",
    [
        "fixed_s",
        "per_token_s",
        "own_s",
        "restore",
        "storage-device",
        "chunks",
        "prefill",
        "links",
        "transfers",
        "conditions",
        "written",
        "schema",
    ],
)
def test_a_file_with_a_hostile_value_is_no_profile(tmp_path, field, value):
    cost_profile.write(tmp_path / NAME, KNOWN)
    text = (tmp_path / NAME).read_text()
    pattern = rf'"{field}": (\{{[^}}]*\}}|"[^"]*"|[-\d.e]+)'
    spoiled = re.sub(pattern, lambda _: f'"{field}": {value}', text, count=1)
    assert spoiled != text
    (tmp_path / NAME).write_text(spoiled)
    harmless = {
        "written": {"-1"},
        "restore": {"{}"},
        "links": {"{}"},
        "transfers": {"{}"},
        "conditions": {"{}"},
    }
    assert (cost_profile.read(tmp_path / NAME) is None) == (value not in harmless.get(field, ()))


def test_nothing_is_kept_before_chunks_were_timed_alone(tmp_path):
    learner, _ = learning(tmp_path, make_planner(CONFIG, ENGINE))
    for number in range(20):
        learner.observe(chunk(number, shared=64))
    learner.observe(TransferDone("r", Link.STORAGE_TO_DEVICE, Span(0, 60), 60 * 4096, 0.001, 500.0))
    learner.close()
    assert not (tmp_path / NAME).exists()


def test_after_the_bandwidth_was_changed_on_purpose_nothing_more_is_kept(tmp_path):
    learner, _ = learning(tmp_path, make_planner(CONFIG, ENGINE), KNOWN)
    learner.observe(chunk(1))
    learner.stop_keeping()
    kept = (tmp_path / NAME).read_text()
    for number in range(2, 30):
        learner.observe(chunk(number))
    learner.close()
    assert (tmp_path / NAME).read_text() == kept


def test_counts_go_on_from_run_to_run(tmp_path):
    learner, _ = learning(tmp_path, make_planner(CONFIG, ENGINE, planned_with(KNOWN)), KNOWN)
    learner.observe(chunk(1))
    learner.close()
    read = cost_profile.read(tmp_path / NAME)
    assert read is not None
    assert (read.chunks, read.transfers) == (41, {"storage-device": 12})


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    cost_profile.write(tmp_path / NAME, KNOWN)
    assert cost_profile.read(tmp_path / NAME) == KNOWN
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_is_no_file_is_no_profile_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / NAME)
    assert cost_profile.read(tmp_path / NAME) is None
    cost_profile.write(tmp_path / NAME, KNOWN)
    os.truncate(tmp_path / NAME, 8 << 40)
    assert cost_profile.read(tmp_path / NAME) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("kvtier.restore-profile/1", "kvtier.restore-profile/9"),
        lambda text: text.replace("storage-device", "tape-hbm"),
        lambda text: text.replace('"fixed_s"', '"fixed"'),
    ],
)
def test_a_damaged_or_foreign_file_is_no_profile(tmp_path, damage):
    cost_profile.write(tmp_path / NAME, KNOWN)
    path = tmp_path / NAME
    path.write_text(damage(path.read_text()))
    assert cost_profile.read(path) is None


def test_under_other_conditions_a_profile_is_passed_over():
    assert cost_profile.fitting(KNOWN, {"device": "cpu"}) is KNOWN
    assert cost_profile.fitting(KNOWN, {"device": "H100"}) is None
    assert cost_profile.fitting(None, {"device": "cpu"}) is None


def test_ranks_agree_on_the_same_numbers():
    assert cost_profile.taken(cost_profile.as_numbers(KNOWN)) == planned_with(KNOWN)
    assert cost_profile.taken(cost_profile.as_numbers(None)) is None
    assert len(cost_profile.as_numbers(None)) == len(cost_profile.as_numbers(KNOWN))


def test_a_folder_that_is_gone_is_survived(tmp_path):
    keeper = ProfileKeeper(tmp_path / "purged" / NAME, period_s=0.01)
    keeper.keep(dataclasses.replace(KNOWN))
    keeper.close()
    assert not (tmp_path / "purged").exists()


# `kvtier stat`: the speeds that servers learned and keep in a store.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an identity in a store."""
    config = StoreConfig(path=str(tmp_path / "store"), min_free_bytes=0)
    open_store(config, Identity({"model": "lab"}, name="lab"), "tp0").close()
    (found,) = (tmp_path / "store").glob("lab-*")
    return found


def test_what_was_learned_is_told_in_a_sentence(folder, capsys):
    cost_profile.write(folder / NAME, KNOWN)
    assert main(["stat", str(folder.parent)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{folder.name}: learned from 40 chunks and 12 transfers on cpu" in said
    assert "a chunk takes 4.00 ms, 300.00 us per token, and 10.000 ns per token" in said
    assert "links: storage-device 2.9 MiB/s" in said


def test_what_was_learned_is_in_the_json(folder, capsys):
    cost_profile.write(folder / NAME, KNOWN)
    assert main(["stat", str(folder.parent), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert row["learned"] == {
        "conditions": KNOWN.conditions,
        "prefill": KNOWN.prefill,
        "links_bytes_per_s": KNOWN.links,
        "restore": KNOWN.restore,
        "chunks": 40,
        "transfers": KNOWN.transfers,
        "written_s": 0.0,
    }


@pytest.mark.parametrize("text", [None, "{"])
def test_a_store_without_a_profile_is_listed_all_the_same(folder, text, capsys):
    if text is not None:
        (folder / NAME).write_text(text)
    assert main(["stat", str(folder.parent), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert row["learned"] is None


def test_a_profile_of_an_unknown_device_and_no_link_is_told(folder, capsys):
    cost_profile.write(folder / NAME, replace(KNOWN, conditions={}, links={}, transfers={}))
    assert main(["stat", str(folder.parent)]) == 0
    assert "links: none measured yet" in " ".join(capsys.readouterr().out.split())
