"""Settings of a running server: which can be changed, and what that changes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import Mode, RestoreOffered, StepView
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.restore import EngineShape
from sgl_kvtier.runtime.agreement import Agreement
from sgl_kvtier.runtime.control import FIXED, HANDLERS
from sgl_kvtier.runtime.cost_profile import Learning, Profile
from sgl_kvtier.runtime.restore_notes import RestoreNotes
from sgl_kvtier.types import Span, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
NAMES = [f.name for f in dataclasses.fields(PolicyConfig)]


def lab(config: PolicyConfig) -> SimpleNamespace:
    """A scheduler with notes, an engine that only has what is changed, and a real planner."""
    engine = SimpleNamespace(taking=True, min_tokens=config.min_restore_tokens)
    planner = make_planner(config, ENGINE)
    learning = Learning(planner, planner.profile, None, Profile({}, {}, {}, 0, {}))
    notes = RestoreNotes(config, engine, learning, SimpleNamespace(reductions=0), None)  # type: ignore[arg-type]
    tree = SimpleNamespace(tick=SimpleNamespace(notes=notes))
    return SimpleNamespace(tree_cache=tree, engine=engine, notes=notes, planner=planner)


def test_every_setting_of_the_policy_section_has_a_handler() -> None:
    assert {f"policy.{name}" for name in NAMES} <= set(HANDLERS)


def test_a_setting_is_in_force_for_the_next_offer() -> None:
    scheduler = lab(PolicyConfig(restore="both"))

    def mode(rid: str) -> Mode:
        scheduler.planner.observe(RestoreOffered(rid, 1.0, 1024, 0, 60, ((Span(0, 60), Tier.SSD),)))
        return scheduler.planner.step(StepView(1.0, (rid,), free_pages={Tier.HBM: 500, Tier.DRAM: 500})).starts[0].mode

    assert mode("a") is Mode.BOTH
    HANDLERS["policy.restore"](scheduler, 2)
    assert mode("b") is Mode.LOAD
    assert scheduler.notes.config.restore == "load"


def test_off_closes_the_engine_to_hits_and_on_opens_it() -> None:
    scheduler = lab(PolicyConfig())
    HANDLERS["policy.restore"](scheduler, 4)
    assert not scheduler.engine.taking
    HANDLERS["policy.restore"](scheduler, 0)
    assert scheduler.engine.taking


def test_the_least_length_is_the_engines_as_well() -> None:
    scheduler = lab(PolicyConfig())
    HANDLERS["policy.min_restore_tokens"](scheduler, 1024)
    assert scheduler.engine.min_tokens == 1024


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_at_the_start_is_refused(name: str) -> None:
    scheduler = lab(PolicyConfig())
    with pytest.raises(ValueError, match="fixed when the server starts"):
        HANDLERS[f"policy.{name}"](scheduler, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FIXED])
def test_what_is_not_fixed_is_taken_at_its_default(name: str) -> None:
    scheduler = lab(PolicyConfig())
    default = getattr(PolicyConfig(), name)
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(PolicyConfig)}[name]
    HANDLERS[f"policy.{name}"](scheduler, choices.index(default) if choices else float(default))
    assert scheduler.notes.config == PolicyConfig()


def test_a_server_that_cannot_restore_can_be_told_off_but_not_on() -> None:
    stock = SimpleNamespace(tree_cache=SimpleNamespace())
    HANDLERS["policy.restore"](stock, 4)
    for name, value in (("restore", 0), ("load_tokens", 64)):
        with pytest.raises(ValueError, match="SGLang's own way since it started"):
            HANDLERS[f"policy.{name}"](stock, value)


class Joined:
    """The reduction of two ranks that come one after the other: the second gets the minimum of both."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None

    def _all_reduce(self, data: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        if self.first is None:
            self.first = data.clone()
        else:
            torch.minimum(data, self.first, out=data)


@pytest.mark.parametrize("own", [[0.0, 0.0, 0.0], [9.0, 1e-30, 1e30]])
def test_all_ranks_begin_with_the_first_ranks_costs_to_the_bit(own: list[float]) -> None:
    tree, said = Joined(), [1.0, 0.1 + 0.2, 3.3e-9]
    assert Agreement(tree, 2, first=True).first_says(said) == said
    assert Agreement(tree, 2, first=False).first_says(own) == said


def test_a_rank_alone_asks_nobody() -> None:
    assert Agreement(None, 1, first=True).first_says([1.5, 0.0]) == [1.5, 0.0]
