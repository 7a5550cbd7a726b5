"""What is remembered of a proof between two starts, and when a server counts as proven."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_kvtier.runtime.proof import memory, record
from sgl_kvtier.runtime.proof.memory import NAME, Shown, find, keep, read
from sgl_kvtier.runtime.proof.record import Difference, Proof, State

HERE = {"device": "NVIDIA H100", "driver": "580.95.05", "way": "staged"}
OTHER = {**HERE, "driver": "590.1"}


def test_what_was_kept_is_found_under_its_own_conditions_alone(tmp_path: Path) -> None:
    path = tmp_path / NAME
    assert find(path, HERE) is None and find(None, HERE) is None
    keep(path, Shown(HERE, "proven", pages=9, nbytes=900))
    keep(path, Shown(OTHER, "refuted", what="page 3, layer 1"))
    found, other = find(path, HERE), find(path, OTHER)
    assert found is not None and other is not None
    assert (found.verdict, found.pages, found.nbytes) == (State.PROVEN, 9, 900)
    assert (other.verdict, other.what) == (State.REFUTED, "page 3, layer 1")
    assert found.written > 1e9
    assert find(path, {**HERE, "torch": "9"}) is None
    assert [one.name for one in tmp_path.iterdir()] == [NAME]


def test_a_later_entry_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / NAME
    keep(path, Shown(HERE, "proven", pages=9))
    keep(path, Shown(HERE, "refuted"))
    assert [shown.state for shown in read(path)] == ["refuted"]


def test_the_oldest_of_too_many_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / NAME
    for number in range(memory._MOST_ENTRIES + 3):
        keep(path, Shown({"driver": str(number)}, "proven"))
    assert [shown.conditions["driver"] for shown in read(path)] == [
        str(number) for number in range(memory._MOST_ENTRIES + 2, 2, -1)
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:40],
        lambda text: text.replace("restore-proof/1", "restore-proof/9"),
        lambda text: text.replace('"proven"', '"shown"'),
        lambda text: text.replace('"pages": 9', '"pages": -9'),
        lambda text: text.replace('"pages": 9', '"pages": true'),
        lambda text: text.replace('"staged"', "7"),
        lambda text: text.replace('"conditions"', '"under"'),
        lambda text: "[]",
        lambda text: '{"schema": "kvtier.restore-proof/1", "shown": 3}',
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_file_is_no_memory_and_is_written_anew(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    path = tmp_path / NAME
    keep(path, Shown(HERE, "proven", pages=9))
    path.write_text(damage(path.read_text()))
    assert read(path) == ()
    keep(path, Shown(HERE, "proven", pages=1))
    assert json.loads(path.read_text())["shown"][0]["pages"] == 1


def test_a_sound_entry_is_read_beside_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / NAME
    keep(path, Shown(HERE, "proven"))
    keep(path, Shown(OTHER, "refuted"))
    path.write_text(path.read_text().replace('"refuted"', '"unknown"'))
    assert [shown.state for shown in read(path)] == ["proven"]


def proof_after(loads: int, nbytes: int) -> Proof:
    proof = Proof(looks=True)
    for _ in range(loads):
        proof.note_load(nbytes // loads)
    return proof


GIB = 1 << 30


@pytest.mark.parametrize(
    ("loads", "nbytes", "state"),
    [
        (16, 8 * GIB, State.PROVEN),
        (16, 7 * GIB, State.PROVING),
        (15, 15 * GIB, State.PROVING),
        (1000, 8000, State.PROVING),
    ],
)
def test_as_many_loads_and_as_many_bytes_have_to_be_right(
    loads: int, nbytes: int, state: State
) -> None:
    proof = proof_after(loads, nbytes)
    proof.conclude()
    assert proof.state is state


def test_loads_of_which_nothing_landed_show_nothing() -> None:
    proof = proof_after(15, 15 * GIB)
    proof.note_load(0)
    proof.conclude()
    assert proof.state is State.PROVING


def test_attaches_have_to_be_right_as_well_where_they_are_looked_at() -> None:
    proof = proof_after(16, 16 * GIB)
    proof.looks_at_attaches = True
    proof.attaches["equal"] = record.FIRST_ATTACHES - 1
    proof.conclude()
    assert proof.state is State.PROVING and proof.in_doubt
    proof.attaches["equal"] += 1
    proof.conclude()
    assert proof.state is State.PROVEN and not proof.in_doubt


def test_attaches_that_cannot_be_compared_do_not_keep_a_server_in_doubt_for_ever() -> None:
    proof = proof_after(16, 16 * GIB)
    proof.looks_at_attaches = True
    proof.attaches["skipped"] = 4 * record.FIRST_ATTACHES - 1
    proof.conclude()
    assert proof.in_doubt
    proof.attaches["skipped"] += 1
    proof.conclude()
    assert proof.state is State.PROVEN


def test_nothing_is_proven_after_a_difference_and_a_refuted_server_stays_so() -> None:
    proof = proof_after(16, 16 * GIB)
    told: list[State] = []
    proof.changed = lambda proof: told.append(proof.state)
    proof.differs(Difference("page", "layer 3"))
    proof.conclude()
    assert proof.state is State.PROVING
    assert not proof.in_doubt, "ranks order their queues alike until all of them know"
    for _ in range(2):
        proof.refute()
        proof.conclude()
    assert (proof.state, told) == (State.REFUTED, [State.REFUTED])
    assert proof.in_doubt


def test_where_nothing_is_compared_nothing_is_proven_nor_in_doubt() -> None:
    proof = Proof()
    for _ in range(20):
        proof.note_load(GIB)
    proof.conclude()
    assert proof.state is State.PROVING and not proof.in_doubt
    assert list(proof.samples()) == []
