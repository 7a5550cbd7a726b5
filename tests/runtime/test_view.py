"""What the planner is shown of the queue: tokens that will be computed, not those that are loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.runtime.scheduler.view import Views
from sgl_kvtier.runtime.step.tracked import Requests

PAGE = 16


def request(rid: str, prompt: int, prefix: int = 0, host: int = 0) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=range(prompt),
        full_untruncated_fill_ids=(),
        prefix_len=prefix,
        host_hit_length=host,
    )


def scheduler(*waiting: Any) -> Any:
    batch = SimpleNamespace(reqs=[], batch_is_full=False)
    return SimpleNamespace(
        chunked_req=None, waiting_queue=list(waiting), running_batch=batch, last_batch=None
    )


def views(*restoring: str) -> Views:
    tree = SimpleNamespace(req_to_token_pool=SimpleNamespace(available_size=lambda: 8))
    context = SimpleNamespace(
        tree=tree, page=PAGE, device=SimpleNamespace(claimable=lambda: 1024),
        slots=SimpleNamespace(host_tokens=0), looking_ahead=False, requests=Requests(),
    )  # fmt: skip
    begun: Any = SimpleNamespace(mode=Mode.BOTH)
    for rid in restoring:
        context.requests.of(rid).restoration = begun
    engine = SimpleNamespace(
        context=context,
        restorations=dict.fromkeys(restoring, begun),
        of=lambda rid: context.requests.of(rid).restoration,
    )
    return Views(engine, 512, 4096)  # type: ignore[arg-type]


def fresh(shown: Views, queue: Any) -> int:
    return shown.of(queue, 0.0).fresh_tokens


def before(shown: Views, queue: Any, rid: str) -> tuple[int, int]:
    view = shown.before(shown.of(queue, 0.0), queue, rid)
    return view.fresh_tokens, view.wanted_tokens


def test_what_lies_in_memory_is_not_computed() -> None:
    assert fresh(views(), scheduler(request("a", 1000, prefix=320, host=160))) == 520


def test_a_stored_prefix_that_is_left_to_sglang_is_not_computed() -> None:
    shown, queue = views(), scheduler(request("a", 1000), request("b", 600))
    shown.left("a", 960)
    assert fresh(shown, queue) == 40 + 600


def test_what_came_to_memory_beyond_the_stored_prefix_counts_too() -> None:
    shown = views()
    shown.left("a", 320)
    assert fresh(shown, scheduler(request("a", 1000, prefix=640))) == 360


def test_a_prefix_that_is_offered_after_all_is_not_loaded_by_sglang() -> None:
    shown = views()
    shown.left("a", 960)
    shown.left("a", 0)
    assert fresh(shown, scheduler(request("a", 1000))) == 1000


def test_a_request_that_restores_is_told_apart() -> None:
    assert fresh(views("a"), scheduler(request("a", 1000), request("b", 600))) == 600


def test_what_is_not_on_the_device_is_still_to_be_claimed_there() -> None:
    queue = scheduler(request("a", 1000, prefix=320, host=160), request("b", 600))
    shown = views("b")
    shown.left("a", 960)
    assert shown.of(queue, 0.0).wanted_tokens == 680


def test_an_offer_without_an_answer_has_claimed_nothing_yet() -> None:
    queue, shown = scheduler(request("a", 1000), request("b", 600)), views("a")
    shown._engine.restorations["a"].mode = None
    assert before(shown, queue, "b") == (0, 1000)


def test_only_requests_before_one_in_the_queue_are_computed_before_it() -> None:
    queue = scheduler(request("a", 300), request("b", 500, host=400), request("c", 700))
    assert before(views(), queue, "a") == (0, 0)
    assert before(views(), queue, "c") == (400, 800)


def test_all_that_wait_are_before_one_that_is_not_in_the_queue_yet() -> None:
    queue = scheduler(request("a", 300), request("b", 500))
    assert before(views(), queue, "c") == (800, 800)


def test_requests_left_to_sglang_do_not_grow_into_seconds_of_compute() -> None:
    """Six agents whose contexts are stored: the seventh sees their last turns, not their contexts,
    as compute. All of it will be on the device.
    """
    shown = views()
    queue = scheduler(*(request(str(n), 30_000) for n in range(7)))
    for n in range(6):
        shown.left(str(n), 29_696)
    assert before(shown, queue, "6") == (6 * 304, 6 * 30_000)


def test_requests_that_have_gone_are_forgotten() -> None:
    shown = views()
    shown.left("a", 960)
    shown._context.requests.forget("a")
    shown._context.requests.forget("never seen")
    assert fresh(shown, scheduler(request("a", 1000))) == 1000


def test_the_view_says_how_much_of_it_each_waiting_request_computes() -> None:
    queue = scheduler(request("a", 600), request("r", 900), request("b", 300))
    assert views("r").of(queue, 0.0).fresh == (600, 0, 300)
    assert views("r").of(scheduler(request("r", 900)), 0.0).fresh == ()
