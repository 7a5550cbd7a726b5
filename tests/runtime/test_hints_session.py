"""Which session a request belongs to, asked of SGLang's own request objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvtier.runtime.step.session_name import MOST_CHARACTERS, known_as, session_of


def request(**more: Any) -> Req:
    return Req("rid", "", [1, 2, 3], SamplingParams(max_new_tokens=1), vocab_size=16, **more)


def test_a_request_without_a_name_belongs_to_no_session() -> None:
    assert session_of(request()) is None
    assert session_of(request(session_id="", routing_key="")) is None


@pytest.mark.parametrize("field", ["session_id", "routing_key"])
def test_a_name_is_taken_from_either_field(field: str) -> None:
    assert session_of(request(**{field: "agent-7"})) == "agent-7"


def test_the_session_id_counts_before_the_routing_key() -> None:
    assert session_of(request(session_id="a", routing_key="b")) == "a"


def test_a_session_of_sglangs_own_is_named_by_its_id() -> None:
    req = request(routing_key="b")
    req.session = SimpleNamespace(session_id="own")
    assert session_of(req) == "own"


def test_long_names_are_told_apart_and_kept_short() -> None:
    one, other = "x" * 5000, "x" * 4999 + "y"
    assert known_as(one) != known_as(other)
    assert len(known_as(one)) < MOST_CHARACTERS
    assert known_as("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
