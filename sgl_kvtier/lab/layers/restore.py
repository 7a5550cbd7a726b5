"""Restores prefixes by layers, in a server whose pages are stored in parts (`lab.layer_parts`).

To SGLang and the planner such a request computes its whole prompt. While it waits, its stored pages
are read from the top layers down. In its forward, after every part of the layers, it is asked which
of its upper layers have come. When all above have, they are copied into the request's own slots,
and only the tokens behind the prefix go on (`forward.py`; `paced/device.py` on a paced device). A
part of a page that is lost is computed for all tokens, and so are all parts when the reads are
slower. So a request always ends its forward with all its pages complete, whatever happened.

Before a part the scheduler's thread waits for the device, and where that is predicted to pay for
the parts above: nothing else is scheduled meanwhile. Scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.front.wrappers import cut, pool_of
from sgl_kvtier.lab.layers import forward
from sgl_kvtier.lab.layers.job import Job, best_cut
from sgl_kvtier.runtime.backend.host_pages import parts_of
from sgl_kvtier.runtime.cpu.platform import works_at_once
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.sglang import slot_pools
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import PageRead
from sgl_kvtier.types import Link, Span, Tier

logger = logging.getLogger(__name__)

_LAYOUT = "page_first_direct"
_PATIENCE, _PATIENCE_S = 2.0, 0.02
"""Longest wait: this many times what is predicted, and these seconds more."""
_RESET_S = 30.0
_NEW_WEIGHT = 0.3
_LEAVE = "Leave lab.layer_parts away"


@dataclass(eq=False)
class Share:
    """One request of a batch: `tokens` behind `prefix` others. `pages` of it can be taken from its
    job, and `slots` are the device slots of their tokens.
    """

    tokens: int
    prefix: int
    rid: str = ""
    job: Job | None = None
    pages: Span = field(default_factory=lambda: Span(0, 0))
    slots: Any = None
    taken: bool = False
    """Its pages are not computed from here on: all parts above are in their slots."""
    first_loaded: int = 0
    copied: set[int] = field(default_factory=set)


class Layers:
    """The prefixes of one process that are being read by layers."""

    def __init__(
        self, context: Any, server_args: Any, parts: int, counters: RestoreCounters
    ) -> None:
        """Raises ConfigError where a server cannot restore by layers."""
        from sglang.srt.arg_groups.model_override_base import resolving_view

        args = resolving_view(server_args)
        self._context = context
        self._counters = counters
        self._controller = context.tree.cache_controller
        some = torch.zeros(context.page, dtype=torch.int64)
        transfers = slot_pools.transfers(self._controller, some, some)
        self.parts = parts
        self.layers = int(self._controller.transfer_layer_id_max)
        self._block = max(1, (args.chunked_prefill_size or 0) // context.page)
        _refuse(args, forward.architectures_of(server_args), transfers, self.layers, parts)
        self._jobs: dict[str, Job] = {}
        self._ending: list[Job] = []
        self._computed_all = True
        self.tail_share = 0.0
        """Seconds of a part for suffixes alone over those for all tokens, of late."""
        self._module: Any = None
        self._side: Any = None
        if not works_at_once(self._controller.device):
            self._module = torch.get_device_module(self._controller.device)
            self._side = self._module.Stream()
        forward.serve(self)
        logger.warning("kvtier: pages are stored in %d parts of %d layers (lab.layer_parts)", parts,
                       self.layers // parts)  # fmt: skip

    # --- prefixes that wait -----------------------------------------------------------------------

    def begin(self, r: Restoration) -> bool:
        """Begins reading what storage has of this prefix at its end. False: there is nothing, or no
        room; it is computed. Never raises.
        """
        self.forget(r.rid)
        try:
            return self._begin(r)
        except Exception:
            logger.exception("kvtier: %s could not be read by layers; it is computed", r.rid)
            self.forget(r.rid)
            return False

    def _begin(self, r: Restoration) -> bool:
        span, tier = r.sources[-1]
        storage = store_of(self._controller)
        if tier <= Tier.HOST or span.stop != r.pages or storage is None:
            return False
        host = self._context.slots.claim_host(len(span) * self._context.page)
        if host is None:
            return False
        job = self._jobs[r.rid] = Job(r.rid, span, host, self.parts)
        pages = parts_of(storage.mem_pool_host, len(span), host)
        keys = r.keys_of(span)[::-1]
        for start in range(span.start, span.stop, self._block):
            block = Span(start, min(start + self._block, span.stop))
            own = slice(block.start - span.start, block.stop - span.start)
            reads = [
                [
                    PageRead(key, cut(page, part, self.parts), pool_of(part))
                    for part in range(self.parts)
                ]
                for key, page in zip(keys[own], pages[own], strict=True)
            ]
            if not job.read(storage, block, reads):
                self.forget(r.rid)
                return False
        return True

    def forget(self, rid: str) -> None:
        """A request is gone, or needs its reads no more."""
        job = self._jobs.pop(rid, None)
        if job is not None:
            job.cancel()
            self._ending.append(job)
            self.sweep()

    def sweep(self) -> None:
        """Frees host pages that nothing touches any more."""
        if not self._ending:
            return
        over = [job for job in self._ending if job.over]
        self._ending = [job for job in self._ending if job not in over]
        for job in over:
            self._context.slots.put_back_host(job.host_slots)

    def reset(self) -> None:
        """Ends everything before the pools are emptied. Blocks until no read is under way."""
        for rid in list(self._jobs):
            self.forget(rid)
        end = time.monotonic() + _RESET_S
        for job in self._ending:
            if not job.wait_over(max(0.0, end - time.monotonic())):
                logger.error("kvtier: a read by layers is still under way after %.0f s", _RESET_S)
        self.sweep()

    def all_computed(self) -> bool:
        """Whether no batch since the last call was restored by layers: its time is that of its
        tokens.
        """
        found, self._computed_all = self._computed_all, True
        return found

    # --- forwards ---------------------------------------------------------------------------------

    def take(self, batch: Any) -> Pass | None:
        """What a forward of this batch can take from storage; None where that is nothing."""
        if not self._jobs or batch.forward_mode.name != "EXTEND" or any(batch.lora_ids or ()):
            return None
        shares, at = [], 0
        tokens, prefix = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        for rid, own, before in zip(batch.rids, tokens, prefix, strict=True):
            share = Share(int(own), int(before), rid)
            self._find(share, batch.out_cache_loc[at : at + share.tokens])
            shares.append(share)
            at += share.tokens
        if all(share.job is None for share in shares):
            return None
        self._computed_all = False
        return Pass(self, shares)

    def _find(self, share: Share, slots: torch.Tensor) -> None:
        job, page = self._jobs.get(share.rid), self._context.page
        if job is None:
            return
        # The last token is computed in any case: it says the next one.
        end = min((share.prefix + share.tokens - 1) // page, job.span.stop)
        start = share.prefix // page
        if share.prefix % page or start < job.span.start or end <= start:
            return
        share.job, share.pages = job, Span(start, end)
        share.slots = slots[: (end - start) * page]

    def copy(self, share: Share, part: int) -> None:
        """Begins copying this part of a share's pages to the device."""
        job, page = share.job, self._context.page
        assert job is not None, "a share without a job has nothing to copy"
        own = (share.pages.start - job.span.start) * page
        host = job.host_slots[own : own + len(share.pages) * page]
        device = share.slots.to(torch.int64)
        stream = nullcontext() if self._side is None else self._module.stream(self._side)
        with stream:
            if self._side is not None:
                host, device = self._controller.move_indices(host, device)
            each = self.layers // self.parts
            for transfer in self._controller._l2_load_transfers(host, device):
                for layer in range(part * each, (part + 1) * each):
                    mapper = transfer.layer_mapper
                    local = layer if mapper is None else mapper(layer)
                    if local is not None:
                        transfer.host_pool.load_to_device_per_layer_physical(
                            transfer.device_pool, transfer.host_indices, transfer.device_indices,
                            local, self._controller.io_backend, is_draft=transfer.is_draft,
                        )  # fmt: skip
        if self._side is not None:
            job.copied = self._side.record_event()
        share.copied.add(part)

    def meet(self) -> None:
        """What is launched from now on comes behind all copies."""
        if self._side is not None:
            self._module.current_stream().wait_stream(self._side)

    def come_to_rest(self) -> None:
        """Blocks until the device has done what was launched."""
        if self._side is not None:
            self._module.current_stream().synchronize()

    def learn_tail(self, share: float) -> None:
        """A part took this share of its time once the prefixes were taken out."""
        old = self.tail_share or share
        self.tail_share = min(1.0, old + _NEW_WEIGHT * (share - old))

    def passed(self, shares: list[Share]) -> None:
        """A forward was launched: pages below its end need no reads any more."""
        for share in shares:
            if share.taken:
                loaded = self._context.page_bytes * (self.parts - share.first_loaded) // self.parts
                self._counters.bytes_loaded[Link.STORAGE_TO_DEVICE] += len(share.pages) * loaded
            job = self._jobs.get(share.rid)
            if job is None:
                continue
            end = (share.prefix + share.tokens) // self._context.page
            if end >= job.span.stop:
                self.forget(share.rid)
            else:
                job.cancel(below=end)


class Pass:
    """One forward, part by part. `at(0)`, then the layers of part 0, and so on, then `end`."""

    def __init__(self, layers: Layers, shares: list[Share]) -> None:
        self._layers = layers
        self.shares = shares
        self.parts, self.layers = layers.parts, layers.layers
        self._part_s = 0.0
        self._since = 0.0
        self._whole = True

    def at(self, part: int) -> list[int]:
        """Before the layers of this part: how many of each request's first tokens are not computed
        in them. Waits for the device, and for pages where that is predicted to pay.
        """
        layers, open_ = self._layers, [s for s in self.shares if s.job and not s.taken]
        layers.come_to_rest()
        self._note(part)
        must_meet = False
        for share in open_:
            try:
                share.taken = self._take(share, part)
            except Exception:
                logger.exception("kvtier: %s: its layers are computed", share.rid)
                share.job = None
            if share.taken:
                share.first_loaded = part
                self._whole = False
            must_meet |= share.taken or share.job is None or part in share.copied
        if must_meet:
            layers.meet()
        self._since = time.monotonic()
        return [len(s.slots) if s.taken else 0 for s in self.shares]

    def end(self) -> None:
        """The last part was launched, or the forward has failed."""
        self._layers.meet()
        self._layers.passed(self.shares)

    def _note(self, part: int) -> None:
        """Learns what the part before took."""
        took_s = time.monotonic() - self._since
        if part and self._whole:
            self._part_s = took_s
        elif part and self._part_s:
            self._layers.learn_tail(took_s / self._part_s)

    def _take(self, share: Share, part: int) -> bool:
        job = share.job
        assert job is not None, "asked of open shares only"
        found = job.all_there(share.pages, part) or self._waited(job, share.pages, part)
        for upper in reversed(range(part, self.parts)):
            if upper not in share.copied and job.is_there(share.pages, upper):
                self._layers.copy(share, upper)
        return found

    def _waited(self, job: Job, pages: Span, part: int) -> bool:
        """Waits for this part and those above it where computing one more takes longer."""
        if not self._part_s or job.is_lost(pages, part):
            return False
        waits_s = [job.wait_s(pages, upper) for upper in range(part, self.parts)] + [0.0]
        if best_cut(waits_s, self._part_s, self._layers.tail_share) > 0:
            return False
        return job.wait(pages, part, waits_s[0] * _PATIENCE + _PATIENCE_S)


def _refuse(args: Any, names: list[str], transfers: Any, layers: int, parts: int) -> None:
    """Raises ConfigError where this server cannot restore by layers."""
    pool = transfers[0].host_pool if len(transfers) == 1 else None
    ranks = args.tp_size * args.pp_size * args.dp_size
    why = None
    if ranks > 1:
        why = f"takes one process, and this server has {ranks}"
    elif pool is None or getattr(transfers[0].device_pool, "k_buffer", None) is None:
        why = "takes a model with keys and values of every layer, not latents, states or windows"
    elif pool.layout != _LAYOUT:
        why = f"takes --hicache-mem-layout {_LAYOUT}, not {pool.layout}"
    elif layers % parts:
        why = f"takes parts that divide the {layers} layers, not {parts}"
    else:
        why = forward.unknown_model(names)
    if why is not None:
        raise ConfigError(f"lab.layer_parts {parts}: restoring by layers {why}. {_LEAVE}")
