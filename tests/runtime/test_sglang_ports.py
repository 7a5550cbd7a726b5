"""The ports to SGLang's objects: what they pass on, and what they make of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvtier.runtime.sglang import requests, step, storage_ops, tree_ranks
from sgl_kvtier.runtime.sglang.device_slots import DeviceSlots
from sgl_kvtier.runtime.sglang.host_tier import Grafted, HostTier
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes

PAGE = 4


class Core:
    """A tree core that takes host pages behind node 1 alone, and has their first page already."""

    def __init__(self) -> None:
        self.backed_up: list[int] = []

    def commit_backup(self, node_id: int, host_indices: Any, comp_xfers: Any) -> None:
        self.backed_up.append(node_id)

    def get_hash_values(self, node_id: int) -> list[str]:
        return [f"{node_id}a", f"{node_id}b"] if node_id in self.backed_up else []

    def insert_host(self, node_id: int, key: Any, host_value: Any, hash_value: Any) -> Any:
        if node_id > 1:
            raise KeyError(node_id)
        return SimpleNamespace(
            host_insert_dropped=node_id == 0,
            prefix_len=PAGE,
            inserted_host_node=9,
            cache_actions=["freed"],
        )

    def commit_load_back(self, node_id: int, device: Any, kv_xfer: Any, comp_xfers: Any) -> str:
        return "actions"


def tree_of(core: Core, **controller: Any) -> Any:
    done: list[Any] = []
    return SimpleNamespace(
        page_size=PAGE,
        tree_core=core,
        token_to_kv_pool_allocator=None,
        cache_controller=SimpleNamespace(**controller),
        applied=done,
        _apply_cache_actions=done.extend,
    )


def test_who_watches_host_memory_is_told_names_and_slots_of_what_came_until_it_ends():
    core, came = Core(), []
    backup, insert = core.commit_backup, core.insert_host
    end = HostTier(tree_of(core)).watch(lambda names, slots: came.append((names, slots.tolist())))
    core.commit_backup(7, torch.arange(2 * PAGE), None)
    core.insert_host(1, None, torch.arange(100, 100 + 3 * PAGE), ["x", "y", "z"])
    core.insert_host(0, None, torch.arange(PAGE), ["dropped"])
    assert came == [
        (["7a", "7b"], list(range(2 * PAGE))),
        (["y", "z"], list(range(100 + PAGE, 100 + 3 * PAGE))),
    ], "a node is named once it has its copy, and a page that was there before is not new"
    end()
    core.commit_backup(8, torch.arange(PAGE), None)
    assert len(came) == 2 and core.backed_up == [7, 8]
    assert (core.commit_backup, core.insert_host) == (backup, insert)


def test_what_the_tree_does_not_take_is_nothing_and_its_actions_are_done_all_the_same():
    tree = tree_of(Core())
    host = HostTier(tree)
    assert host.graft(1, None, torch.arange(PAGE), ["x"]) == Grafted(PAGE, 9)
    assert host.graft(0, None, torch.arange(PAGE), ["x"]) is None
    assert host.graft(5, None, torch.arange(PAGE), ["x"]) is None, "its anchor is gone"
    assert tree.applied == ["freed", "freed"]


def test_nodes_that_are_loaded_back_are_told_and_the_core_has_its_answer():
    core, loaded = Core(), []
    end = TreeNodes(tree_of(core)).watch(loaded.append)
    assert core.commit_load_back(1, None, SimpleNamespace(nodes_to_load=[4, 5]), None) == "actions"
    core.commit_load_back(1, None, SimpleNamespace(nodes_to_load=None), None)
    end()
    core.commit_load_back(1, None, SimpleNamespace(nodes_to_load=[6]), None)
    assert loaded == [[4, 5], ()]


def test_copies_that_sglang_begins_are_named_by_their_record_and_none_where_none_are_queued():
    tree = tree_of(Core(), ack_load_queue=[], start_loading=lambda: -1)
    tree.has_free_load_back_slot = lambda: True
    slots = DeviceSlots(tree)
    assert slots.begin_copies() is None and not slots.copies_are_begun
    tree.cache_controller.ack_load_queue.append("record")
    tree.cache_controller.start_loading = lambda: 3
    assert slots.begin_copies() == (3, "record") and slots.copies_are_begun


# --- requests -------------------------------------------------------------------------------------


def request_of(rid: str = "r", prompt: int = 100, **known: Any) -> Any:
    """A request with a prompt of so many tokens, none of them in memory, unless said otherwise."""
    fields = {
        "rid": rid,
        "cache_request_handle": f"handle of {rid}",
        "origin_input_ids": [0] * prompt,
        "full_untruncated_fill_ids": [0] * prompt,
        "output_ids": [],
        "prefix_len": 0,
        "host_hit_length": 0,
        "extend_end": None,
        "sampling_params": SimpleNamespace(max_new_tokens=10),
        "return_logprob": False,
        "logprob_start_len": -1,
        "return_hidden_states": False,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "multimodal_inputs": None,
        "token_indices_to_pool": None,
        "is_prefill_only": False,
        "beam_group": None,
        "session": None,
    }
    return SimpleNamespace(**{**fields, **known})


def test_a_chunked_prompt_has_left_what_is_behind_its_chunk_and_before_it_what_is_behind_its_prefix():
    assert requests.rest_tokens(request_of(prefix_len=32)) == 68
    assert requests.rest_tokens(request_of(prefix_len=32, extend_end=80)) == 20


def test_output_is_reserved_as_sglang_does_it_whole_at_admission_and_what_is_left_later():
    def of(most, made):
        req = request_of(
            sampling_params=SimpleNamespace(max_new_tokens=most), output_ids=[0] * made
        )
        return requests.whole_output_room(req, PAGE), requests.output_room(req, PAGE)

    assert of(10, 3) == (14, 11)
    assert of(10, 12) == (14, 4)
    assert of(10_000, 0) == (4100, 4100)


def test_requests_that_need_outputs_of_their_prompts_tokens_are_left_to_sglang():
    def why(**known):
        return requests.left_to_sglang(request_of(**known))

    assert why() is None
    assert why(return_logprob=True) is None, "log-probs of the output alone"
    assert why(return_logprob=True, logprob_start_len=5) == "input log-probs"
    assert why(return_logprob=True, logprob_start_len=100) is None
    assert why(return_hidden_states=True) == "hidden states"
    assert why(return_routed_experts=True) == "routed experts"
    assert why(input_embeds=[1.0]) == "input embeddings"
    assert why(multimodal_inputs=["image"]) == "multimodal"
    assert why(is_prefill_only=True) == "no generation"
    assert why(beam_group=1) == "beam search"
    assert why(session=SimpleNamespace(streaming=True)) == "streaming session"
    assert why(session=SimpleNamespace(streaming=False)) is None


# --- steps ----------------------------------------------------------------------------------------


def batch(*reqs: Any, extend: bool = False, full: bool = False) -> Any:
    return SimpleNamespace(
        reqs=list(reqs),
        batch_is_full=full,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        decoding_reqs=None,
    )


def scheduler_of(**known: Any) -> Any:
    fields = {
        "waiting_queue": [],
        "running_batch": batch(),
        "last_batch": None,
        "chunked_req": None,
        "is_mixed_chunk": True,
    }
    return SimpleNamespace(**{**fields, **known})


def test_the_slot_is_open_when_nobody_has_it_the_batch_takes_more_and_a_row_is_free():
    def is_open(free=1, **known):
        return step.slot_is_open(
            scheduler_of(**known), SimpleNamespace(available_size=lambda: free)
        )

    assert is_open()
    assert not is_open(free=0)
    assert not is_open(running_batch=batch(full=True))
    assert not is_open(chunked_req=request_of())
    # After a mixed step the running batch is empty, and takes the place of the last one.
    assert is_open(running_batch=batch(full=True), last_batch=batch(request_of(), extend=True))


def test_a_prompt_that_was_in_the_last_batch_decodes_from_now_on_but_not_one_between_chunks():
    running, ended, chunked = request_of("a"), request_of("b"), request_of("c")
    last = batch(ended, chunked, extend=True)
    scheduler = scheduler_of(running_batch=batch(running), last_batch=last, chunked_req=chunked)
    assert step.decoding(scheduler) == [running, ended]
    assert step.decoding_count(scheduler) == 1
    assert step.computes(scheduler) and not step.computes(scheduler_of())
    assert step.in_slot(scheduler) is chunked


def test_requests_that_decoded_in_the_last_batch_beside_a_chunk_decode():
    tail, chunked = request_of("t"), request_of("c")
    last = batch(chunked, tail, extend=True)
    last.decoding_reqs = [tail]
    scheduler = scheduler_of(running_batch=batch(), last_batch=last, chunked_req=chunked)
    assert step.mixed(scheduler) and step.decoding_count(scheduler) == 1
    assert step.decoding(scheduler) == [tail]
    scheduler.running_batch = last  # the replicas of data-parallel attention compute together
    assert step.decoding_count(scheduler) == 2
    plain = scheduler_of(running_batch=batch(tail), last_batch=batch(tail))
    assert not step.mixed(plain) and not step.mixed(scheduler_of())


def test_a_request_with_logprobs_or_beams_is_not_mixed_nor_any_other_beside_it():
    def mixes(*running: Any, **known: Any) -> bool:
        return step.mixes(scheduler_of(running_batch=batch(*running), **known))

    plain, logprobs, beams = request_of("a"), request_of("b"), request_of("c")
    for req in (plain, logprobs, beams):
        req.return_logprob, req.beam_group = req is logprobs, "g" if req is beams else None
    assert mixes() and mixes(plain) and not mixes(plain, is_mixed_chunk=False)
    assert not mixes(plain, logprobs) and not mixes(beams)
    assert not mixes(plain, last_batch=batch(logprobs, extend=True)), "it decodes from now on"


def test_all_requests_are_those_that_wait_run_are_between_chunks_or_in_another_stages_batch():
    a, b, c, d, e = (request_of(name) for name in "abcde")
    scheduler = scheduler_of(
        waiting_queue=[a], running_batch=batch(b), last_batch=batch(c), chunked_req=d
    )
    assert step.all_requests(scheduler) == set("abcd")
    scheduler.running_mbs = [batch(e), None]
    assert step.all_requests(scheduler) == set("abcde")


# --- what storage is asked for --------------------------------------------------------------------


def asking(operation: Any = None, threshold: int = 256, limited: bool = False) -> Any:
    """A tree that asks storage for "handle of r", unless there is no operation."""
    under_way = {} if operation is None else {"handle of r": SimpleNamespace(operation=operation)}
    return SimpleNamespace(
        ongoing_prefetch=under_way,
        prefetch_threshold=threshold,
        cache_controller=SimpleNamespace(prefetch_rate_limited=lambda: limited),
    )


def test_an_answer_is_due_while_storage_has_not_said_how_much_it_has():
    def due(slots, ended):
        operation = SimpleNamespace(host_indices=slots, is_terminated=lambda: ended)
        return storage_ops.answer_is_due(asking(operation), "handle of r")

    assert due(None, ended=False)
    assert not due(None, ended=True)
    assert not due(torch.arange(4), ended=False)
    assert not storage_ops.answer_is_due(asking(), "handle of r")


def test_who_watches_writes_is_told_numbers_and_names_of_those_that_have_names_until_it_ends():
    written: list[Any] = []
    numbers = iter((7, 8, 9))

    def write(slots, tokens, names=None, **how):
        return next(numbers)

    controller = SimpleNamespace(write_storage=write)
    tree = SimpleNamespace(cache_controller=controller, ongoing_backup={7: "under way"})
    end = storage_ops.watch_writes(tree, lambda number, names: written.append((number, names)))
    assert controller.write_storage(None, None, ["ab"]) == 7
    assert controller.write_storage(None, None) == 8, "none of its pages has a name"
    end()
    assert controller.write_storage(None, None, ["cd"]) == 9
    assert written == [(7, ["ab"])]
    assert [storage_ops.written(tree, number) for number in (7, 8)] == [False, True]


# --- ranks ----------------------------------------------------------------------------------------


def test_reductions_are_of_the_first_stages_ranks_or_of_all():
    calls: list[str] = []

    def answer(name, number):
        def reduce(data, op=None):
            calls.append(name)
            data.clamp_(max=number)

        return reduce

    tree = SimpleNamespace(
        tp_world_size=2,
        pp_size=3,
        pp_rank=0,
        tp_group=None,
        _all_reduce=answer("stage", 5),
        _all_reduce_attn_groups=answer("ranks", 4),
        _pp_sync=answer("down", 3),
    )
    assert (tree_ranks.count(tree), tree_ranks.stages(tree)) == (6, 3)
    assert tree_ranks.is_first(tree)
    assert tree_ranks.least(tree, [9, 2, -1]) == [5, 2, -1]
    assert tree_ranks.least_of_all(tree, 9, staged=False) == 4
    assert tree_ranks.pass_down(tree, [9, 1]) == [3, 1]
    assert calls == ["stage", "ranks", "down"]
    tree.pp_rank = 1
    assert not tree_ranks.is_first(tree)


def test_restored_tokens_are_counted_where_sglang_counts_and_as_it_counts():
    class Counts:
        def __init__(self):
            self.told: list[object] = []

        def increment_load_back_num_tokens(self, num_tokens, pool):
            self.told.append((num_tokens, pool))

        def log_prefetched_tokens(self, tokens):
            self.told.append(tokens)

        def increment_load_back_num_bytes(self, num_bytes):
            self.told.append(f"{num_bytes} bytes")

        def observe_load_back_duration(self, duration_seconds):
            self.told.append(f"{duration_seconds} s")

    device, storage = Counts(), Counts()
    both = SimpleNamespace(metrics_collector=device, storage_metrics_collector=storage)
    storage_ops.count_loaded(both, 32, 64)
    storage_ops.count_loaded(both, 0, 0)
    storage_ops.count_copied(both, 4096, 0.5)
    assert (device.told, storage.told) == ([(32, "kv"), "4096 bytes", "0.5 s"], [64])
    # Without --enable-metrics, and with a release that counts in another way.
    for other in (SimpleNamespace(), SimpleNamespace(metrics_collector=object())):
        storage_ops.count_copied(other, 4096, 0.5)
    storage_ops.count_loaded(SimpleNamespace(storage_metrics_collector=None), 32, 64)
    storage_ops.count_loaded(SimpleNamespace(metrics_collector=object()), 32, 64)
