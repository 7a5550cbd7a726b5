"""What takes the place of forwards, attention and copies in a scheduler process: the emulated
device of `sgl_kvtier.lab.paced`, with pools of any kind and with drafts.

SGLANG_EXTERNAL_MODEL_PACKAGE names `recipe_device.models`, whose forward is `Device.forward`. The
rest is SGLang's own: its workers for speculative decoding too, with torch for their kernels
(tests/runtime/changed_site/chain_drafts.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from recipe_device.rows import Pools, Rows
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced import device as paced
from sgl_kvtier.lab.paced.signatures import chain_of, mix
from sgl_kvtier.runtime.cpu import copies

logger = logging.getLogger(__name__)
COUNTS = "KVTIER_RECIPE_COUNTS"
"""A folder. Each rank writes a file into it that says, as JSON, how many rows of each kind were
checked and how many were wrong.
"""
_CHAIN = "recipe_chain"
_MORE_POOLS = ("pool_host.mamba", "pool_host.dsa", "pool_host.unified", "memory_pool_host")


class Attention(paced.Attention):
    """Stands in for every attention backend, a draft's and a hybrid model's too."""

    needs_cpu_seq_lens = True
    verify_mask = None

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.attn_backends: list[Any] = []

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing."""

    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices: Any, mamba_track_indices: Any, mamba_steps_to_track: Any,
        model: Any, req_pool_indices: Any = None,
    ) -> None:  # fmt: skip
        """After a verification of a model with states."""
        del model, req_pool_indices
        of_process().keep_verified(
            last_correct_step_indices, mamba_track_indices, mamba_steps_to_track
        )


class _Verified(NamedTuple):
    """What a verification would make of one request's states."""

    slot: torch.Tensor
    states: list[torch.Tensor]
    chain: torch.Tensor
    """Of each token that is verified."""


class Device:
    """Signs what a forward would write, checks what stands before it, and takes its time."""

    def __init__(self, settings: Any) -> None:
        self._profile = profile.read(settings.profile)
        self._dilation = settings.dilation
        self._pools: dict[int, Pools] = {}
        self._counts: dict[str, list[int]] = {}
        self._counts_file = Path(os.environ[COUNTS], f"{os.getpid()}.json")
        self._states: Pools | None = None
        self._unverified: list[_Verified] = []
        self._begins: dict[int, torch.Tensor] = {}
        """The first token's chain of the request in each row, where rows of pages do not tell it."""
        self.requests: dict[str, Any] = {}
        """SGLang's requests of the batch at hand, by id."""

    def forward(self, model: Any, tokens: torch.Tensor, places: torch.Tensor, fb: Any) -> Any:
        """The next tokens of a batch, as logits."""
        called = clock.now()
        mode = fb.forward_mode
        if mode.is_idle():
            return LogitsProcessorOutput(next_token_logits=torch.zeros((0, model.vocabulary)))
        pool, requests = get_token_to_kv_pool(), get_req_to_token_pool()
        pools = self._pools.get(id(pool))
        if pools is None:
            pools = self._pools[id(pool)] = Pools(pool, requests, "draft " if model.draft else "")
            logger.warning("recipe: %s: %s", type(pool).__name__, pools.described())
        if pools.states:
            self._states = pools
            self._unverified.clear()
        each = mode.is_target_verify() or mode.is_draft_extend_v2()
        prefills = not (mode.is_decode() or each)
        if prefills:
            lengths = [int(n) for n in fb.extend_seq_lens_cpu]
        else:
            lengths = [tokens.numel() // fb.batch_size] * fb.batch_size
        found, at, spans = [], 0, []
        for number, length in enumerate(lengths):
            piece = slice(at, at + length)
            first = int(places[at])
            spans.append((length, first))
            chain = self._request(
                model, pools, requests, fb, number, first, tokens[piece],
                fb.out_cache_loc[piece].to(torch.int64), prefills,
            )  # fmt: skip
            found.append(chain if each else chain[-1:])
            at += length
        answers = (mix(torch.cat(found)) & 0x7FFFFFFF) % 240 + 16
        logits = torch.zeros((answers.numel(), model.vocabulary))
        logits[torch.arange(answers.numel()), answers] = 64.0
        if not model.draft:
            seconds = (
                self._profile.prefill_seconds(spans)
                if prefills
                else self._profile.decode_seconds([first + n for n, first in spans])
            )
            paced.of_process()._launch(pool, seconds * self._dilation, called)
        self._tell()
        hidden = None
        capture = getattr(fb, "capture_hidden_mode", None)
        if capture is not None and capture.need_capture():
            rows = tokens.numel() if capture.is_full() else answers.numel()
            hidden = torch.zeros((rows, model.width))
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)

    def _request(
        self, model: Any, pools: Pools, requests: Any, fb: Any, number: int, first: int,
        tokens: torch.Tensor, own: torch.Tensor, prefills: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Signs the tokens of one request, from the position `first` on. Returns the chains by
        which its next tokens are chosen, int64 [tokens]: of all tokens but the first, which a draft
        never sees.
        """
        row = requests.req_to_token[int(fb.req_pool_indices[number])]
        prefix = row[:first].to(torch.int64)
        shift = int(model.draft)
        known = self._known(fb, number, first, shift) if prefills and first else None
        before = torch.zeros((), dtype=torch.int64)
        states: list[torch.Tensor] = []
        slot = pools.state_slots(fb.req_pool_indices[number : number + 1]) if pools.states else None
        if first:
            if pools.tokens:
                before = pools.tokens[0].read(prefix[-1:])[0, 0]
            elif known is not None:  # rows of pages do not tell it
                before = known[-1]
            else:
                before = pools.computed[prefix[-1]]
            if slot is not None:
                states = [rows.read(slot) - before for rows in pools.states]
            if known is not None:
                before = before + self._check(fb, number, pools.tokens, prefix, known)
                if slot is not None:
                    self._check(fb, number, pools.states, slot, known[-1:])
                if pools.windows:
                    low = max(0, first - model.window)
                    near = pools.window_slots(prefix[low:])
                    self._check(fb, number, pools.windows, near, known[low:])
                if not pools.tokens:
                    before = before + self._check_pages(fb, number, pools, prefix, known)
        chain = chain_of(tokens, first + shift, before)
        for rows in pools.tokens:
            rows.write(own, chain)
        if pools.windows:
            there = pools.window_slots(own)
            for rows in pools.windows:
                rows.write(there[there > 0], chain[there > 0])
        if not pools.tokens:
            pools.note(own, chain)
            ends = (torch.arange(first, first + len(own)) + 1) % pools.page == 0
            for rows in pools.pages:
                rows.write(own[ends] // pools.page, chain[ends])
            there = pools.window_slots(own[ends])
            for rows in pools.window_pages:
                rows.write(there[there > 0] // pools.page, chain[ends][there > 0])
        if slot is not None and fb.forward_mode.is_target_verify():
            self._unverified.append(_Verified(slot, states, chain))
        elif slot is not None:
            self._sign_states(pools, fb, number, slot, states, chain, first, before)
        if shift:
            return chain
        if prefills and not pools.tokens:
            begin = chain[0] if known is None else known[0]
            self._begins[int(fb.req_pool_indices[number])] = begin
        if not first:
            return chain - chain[0]
        if pools.tokens:
            return chain - pools.tokens[0].read(prefix[:1])[0, 0]
        begin = self._begins[int(fb.req_pool_indices[number])]
        return chain - begin

    def _check_pages(
        self, fb: Any, number: int, pools: Pools, prefix: torch.Tensor, known: torch.Tensor
    ) -> torch.Tensor:
        """Compares the whole pages of a prefix, and its last page in the window."""
        last = slice(pools.page - 1, None, pools.page)
        slots, chains = prefix[last], known[last]
        damage = self._check(fb, number, pools.pages, slots // pools.page, chains)
        if len(prefix) % pools.page == 0 and len(slots):
            near = pools.window_slots(slots[-1:]) // pools.page
            damage = damage + self._check(fb, number, pools.window_pages, near, chains[-1:])
        return damage

    def _sign_states(
        self, pools: Pools, fb: Any, number: int, slot: torch.Tensor, states: list[torch.Tensor],
        chain: torch.Tensor, first: int, before: torch.Tensor,
    ) -> None:  # fmt: skip
        """The state behind the last token, and the one that SGLang asks to keep on the way. What
        was wrong before stays wrong.
        """
        tracked = None
        if fb.mamba_track_mask is not None and bool(fb.mamba_track_mask[number]):
            place, kept = fb.mamba_track_indices[number : number + 1].to(torch.int64), chain[-1]
            req = self.requests.get(fb.rids[number]) if fb.rids else None
            if not fb.forward_mode.is_decode() and req is not None:
                behind = int(req.kv.mamba_last_track_seqlen) - first
                kept = chain[behind - 1] if behind > 0 else before
            tracked = place, kept
        for number_of, rows in enumerate(pools.states):
            off = states[number_of] if states else torch.zeros((1, 1), dtype=torch.int64)
            rows.put(slot, off + chain[-1] + rows.constants)
            if tracked is not None:
                rows.put(tracked[0], off + tracked[1] + rows.constants)

    def keep_verified(self, steps: torch.Tensor, tracked: Any, tracked_steps: Any) -> None:
        """After a verification: the states behind the last accepted tokens, and those that SGLang
        asks to keep (a step below 0: none).
        """
        assert self._states is not None, "there are states"
        for number, found in enumerate(self._unverified):
            for rows, off in zip(self._states.states, found.states, strict=True):
                rows.put(found.slot, off + found.chain[int(steps[number])] + rows.constants)
                if tracked is not None and tracked_steps is not None and tracked_steps[number] >= 0:
                    kept = found.chain[int(tracked_steps[number])]
                    rows.put(tracked[number : number + 1].long(), off + kept + rows.constants)
        self._unverified.clear()

    def _check(
        self, fb: Any, number: int, buffers: list[Rows], slots: torch.Tensor, known: torch.Tensor
    ) -> torch.Tensor:
        """Compares rows with their chains: 0, or a number made of what is wrong."""
        damage = torch.zeros((), dtype=torch.int64)
        for rows in buffers:
            off = rows.read(slots) - known[:, None]
            counted = self._counts.setdefault(rows.kind, [0, 0])
            counted[0] += slots.numel()
            if bool(off.any()):
                wrong = off.any(1)
                counted[1] += int(wrong.sum())
                damage = damage + mix(off).sum()
                logger.error(
                    "recipe: %d of %d rows of %s %s are wrong, the first at %d of these, of %s",
                    int(wrong.sum()), slots.numel(), rows.kind, rows.name,
                    int(wrong.nonzero()[0]), fb.rids[number] if fb.rids else "a request",
                )  # fmt: skip
        return damage

    def _known(self, fb: Any, number: int, count: int, shift: int) -> torch.Tensor | None:
        """The chains of a request's first `count` rows; None where its tokens are not known."""
        req = self.requests.get(fb.rids[number]) if fb.rids else None
        if req is None:
            return None
        chain = getattr(req, f"{_CHAIN}{shift}", None)
        if chain is None or chain.numel() < count:
            every = torch.tensor([*req.origin_input_ids, *req.output_ids], dtype=torch.int64)
            chain = chain_of(every[shift:], shift)
            setattr(req, f"{_CHAIN}{shift}", chain)
        return chain[:count] if chain.numel() >= count else None

    def _tell(self) -> None:
        told = {kind: {"checked": n, "wrong": wrong} for kind, (n, wrong) in self._counts.items()}
        draft = self._counts_file.with_suffix(".draft")
        draft.write_text(json.dumps(told))
        draft.rename(self._counts_file)


_device: Device | None = None


def of_process() -> Device:
    """The device of this process."""
    assert _device is not None, "install() was not called"
    return _device


def install() -> None:
    """Puts the device in the place of the CPU in this process."""
    global _device
    paced.install()
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # there is no driver
    _device = Device(paced.of_process()._settings)
    for name in list(ATTENTION_BACKENDS):
        ATTENTION_BACKENDS[name] = Attention
    _time_more_copies(paced.of_process())


def _time_more_copies(device: Any) -> None:
    """Copies of pools that `paced` does not know, on its links."""
    scale = device._settings.bytes_scale

    def timed(copy: Any, link: clock.Link, device_side: int) -> Any:
        def run(
            src_ptrs: Any,
            dst_ptrs: Any,
            src_indices: Any,
            dst_indices: Any,
            *rest: Any,
            **named: Any,
        ) -> None:
            copy(src_ptrs, dst_ptrs, src_indices, dst_indices, *rest, **named)
            rows = (src_ptrs, dst_ptrs)[device_side]
            moved = sum(one[0].numel() * one.element_size() for one in rows)
            link.copy(clock.current_stream(), len(src_indices) * moved * scale)

        return run

    for name in _MORE_POOLS:
        module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        for function, link, side in (
            ("transfer_kv_per_layer_direct_pf_lf", device.to_device, 1),
            ("transfer_kv_all_layer_direct_lf_pf", device.to_host, 0),
        ):
            own = getattr(copies, function)
            if getattr(module, function, own) is own:  # V4's module has none without CUDA
                setattr(module, function, timed(own, link, side))


_watching = False


def watch() -> None:
    """When the first model is made, every module of SGLang's that is changed here is there."""
    global _watching
    if _watching:
        return
    _watching = True
    attention = "sglang.srt.layers.attention.attention_registry."
    HookRegistry.register(attention + "attn_backend_wrapper", _unwrapped, HookType.AROUND)
    compressed = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool."
    cleaned = compressed + "clear_unaccepted_c128_draft_states"
    HookRegistry.register(cleaned, _nothing, HookType.AROUND)
    draft = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backend"
    HookRegistry.register(draft, _draft_attention, HookType.AROUND)
    run = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    HookRegistry.register(run, _around_batch, HookType.AROUND)
    HookRegistry.apply_hooks()


def _unwrapped(original: Any, runner: Any, backend: Any, *args: Any, **named: Any) -> Any:
    del original, runner, args, named
    return backend


def _nothing(original: Any, *args: Any, **named: Any) -> None:
    """In the place of a kernel that changes rows which are not signed."""
    del original, args, named


def _draft_attention(original: Any, worker: Any) -> None:
    from sglang.srt.speculative.eagle_utils import default_tree_mask_mode

    del original
    runner = worker.draft_runner
    worker.draft_extend_attn_backend = None
    worker.draft_attn_backend = steps = Attention(runner)
    steps.attn_backends = [Attention(runner) for _ in range(worker.speculative_num_steps - 1)]
    runner.draft_attn_backend = steps
    worker.tree_mask_mode = default_tree_mask_mode()


def _around_batch(original: Any, worker: Any, batch: Any, *args: Any, **named: Any) -> Any:
    if batch is not None:  # a verification has none; rows are checked in prefills
        of_process().requests = {req.rid: req for req in batch.reqs}
    return original(worker, batch, *args, **named)
