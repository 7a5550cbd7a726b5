"""The paced device in a scheduler process: what takes the place of SGLang's forwards, copies and
attention.

The CPU platform calls `install` when SGLang asks it for its backend, before any stream or pool is
made. Models come from `stub/`, whose forward is `Device.forward`: everything around it is SGLang's.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prometheus_client import Gauge
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.layers import forward as layers
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced.copies import (
    Copies,
    Damage,
    Pages,
    compared,
    file_backend,
    mooncake_backend,
    nixl_backend,
)
from sgl_kvtier.lab.paced.launching import DISK_READ_GBYTES_PER_S, METRIC, MOONCAKE_WAITS
from sgl_kvtier.lab.paced.pace import PaceLog
from sgl_kvtier.lab.paced.signatures import Decode, Extend, Signer, chain_of
from sgl_kvtier.lab.paced.watching import Loads, Ticks
from sgl_kvtier.lab.profile import BF16
from sgl_kvtier.policy import shape
from sgl_kvtier.runtime.cpu import copies as host_copies
from sgl_kvtier.runtime.cpu.platform import ATTENTION
from sgl_kvtier.runtime.cuda import staging
from sgl_kvtier.runtime.cuda.page_shape import host_pool_of
from sgl_kvtier.runtime.proof import pages, record
from sgl_kvtier.runtime.restore.copy_device import CARDS
from sgl_kvtier.runtime.sglang import step

logger = logging.getLogger(__name__)

VARIABLE = "KVTIER_PACED"
"""Holds a `Settings` as JSON."""
_DEVICE = "cpu"
_POOLS = ("mha", "mla")
_SIZES = (
    (shape, "WHOLE_LOAD_BYTES"), (staging, "ROOM_BYTES"), (staging, "MOST_BYTES"),
    (pages, "PIECE_BYTES"), (pages, "THIN_BYTES"), (record, "FIRST_BYTES"),
)  # fmt: skip
_COMPARED_BYTES_PER_S = 5.3e9
"""Of pages that were read back, by one core: 203 ms per GiB of memcmp on a Xeon of 2.5 GHz."""
_CHAIN = "kvtier_paced_chain"
_NIXL = "storage.nixl.hicache_nixl.HiCacheNixl._xfer_pre_registered"
_MOONCAKE = "storage.mooncake_store.mooncake_store.MooncakeStore."


@dataclass(frozen=True)
class Settings:
    """Settings of a paced server. Bandwidths are the model's, without dilation; 0 leaves the file
    backend as fast as it is. `damage` changes one bit on purpose: in `device` or `host`.
    """

    profile: str
    dilation: float
    bytes_scale: float
    page_size: int
    disk_read_gbytes_per_s: float
    disk_write_gbytes_per_s: float
    log: str
    most_log_bytes: int = 0
    damage: str = ""
    damage_at: int = 1
    kv_dtype: str = BF16


class Attention(AttentionBackend):
    """Stands in for attention: nothing is computed, so nothing is prepared."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing."""


class Device:
    """One paced device. The scheduler's thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._profile = profile.read(settings.profile, settings.kv_dtype)
        self._log = PaceLog(Path(settings.log), settings.most_log_bytes)
        self.batch: Any = None
        """SGLang's batch that the next forward is of."""
        self.pages = Pages(settings.page_size)
        self._signer: Signer | None = None
        self._spent_s = time.thread_time()
        self._ticks = Ticks()
        self.loads = Loads(self._log)
        self.copied = self._log.copied
        slower = settings.dilation
        self.to_device = clock.Link(self._profile.to_device_gbytes_per_s / slower)
        self.to_host = clock.Link(self._profile.to_host_gbytes_per_s / slower)

    def forward(self, pool: Any, req_to_token: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """Signs and checks a batch, launches its step, and returns its next tokens."""
        called, spent_s = clock.now(), time.thread_time()
        signer = self._signer_of(pool)
        checked = signer.checked_tokens
        requests = [] if self.batch is None else list(self.batch.reqs)
        run = None
        if forward_batch.forward_mode.is_decode():
            lengths = forward_batch.seq_lens.tolist()
            tokens = self._decode(signer, req_to_token, forward_batch, requests, lengths)
            kind, seconds = "decode", self._profile.decode_seconds(lengths)
            size: dict[str, Any] = {"tokens": len(lengths), "context": sum(lengths)}
        else:
            spans, lengths = _spans(forward_batch), list[int]()
            if decoding := () if self.batch is None else step.decoded_in(self.batch):
                lengths = [prefix + 1 for _, prefix in spans[-len(decoding) :]]
                spans = spans[: -len(decoding)]
            tokens = self._extend(signer, req_to_token, forward_batch, requests, spans)
            if lengths:
                rows = _LastRows.of(forward_batch, len(lengths))
                own = requests[len(spans) :]
                more = self._decode(signer, req_to_token, rows, own, lengths)
                tokens = torch.cat([tokens, more])
            kind = "prefill"
            seconds = self._profile.mixed_seconds(spans, len(lengths), sum(lengths))
            run = layers.taken(forward_batch)
            size = {"tokens": sum(n for n, _ in spans), "context": sum(p for _, p in spans)}
        if run is None:
            took = self._launch(pool, seconds * self._settings.dilation, called)
            begin, end, load_wait_s, load = took
            size |= load
        else:
            begin, end, load_wait_s = self._launch_by_layers(signer, requests, run, called)
        self._log.step(
            kind=kind,
            rids=[req.rid for req in requests],
            waiting=self._ticks.restoring,
            called=called,
            begin=begin,
            end=end,
            returned=clock.now(),
            load_wait_s=load_wait_s,
            scheduler_s=spent_s - self._spent_s,
            tick_s=self._ticks.last_s,
            checking_s=time.thread_time() - spent_s,
            checked=signer.checked_tokens - checked,
            **size,
        )
        self._ticks.watch()
        self.loads.watch()
        self._spent_s = time.thread_time()
        self._tell(signer, called)
        return tokens

    def _launch(
        self, pool: Any, seconds: float, called: float
    ) -> tuple[float, float, float, dict[str, Any]]:
        """Begin and end of a step, how long of that it waits for pages, layer by layer, and the
        times of a load that is not over when it begins.
        """
        stream = clock.current_stream()
        begin, end = stream.launch(seconds, at=called)
        counter = getattr(pool, "layer_transfer_counter", None)
        if counter is None or counter.consumer_index < 0:
            return begin, end, 0.0, {}
        loading = counter.events[counter.consumer_index]
        loaded = [event.at for event in loading.load_events]
        if loaded[-1] <= begin:
            return begin, end, 0.0, {}
        part_s = (loaded[-1] - loaded[0]) / max(len(loaded) - 1, 1)
        first = max(loading.start_event.at, loaded[0] - part_s)
        computing, late = clock.layered(begin, seconds, self._profile.layers, loaded, first)
        stream.delay(late)
        load = {"load_begin": first, "layers_loaded": loaded, "first_layer": computing}
        return begin, max(late, end), max(late - end, 0.0), load

    def _launch_by_layers(
        self, signer: Signer, requests: list[Any], run: Any, called: float
    ) -> tuple[float, float, float]:
        """The same of a step in which prefixes end at a layer. A part of the layers takes its share
        of a step with the tokens that are left in it. Rows that were loaded are checked.
        """
        stream, begin, end, busy_s = clock.current_stream(), None, called, 0.0
        jobs = [(share, req) for share, req in zip(run.shares, requests, strict=True) if share.job]
        for share, _ in jobs:
            signer.blank(share.slots.to(torch.int64))
        for part in range(run.parts):
            cuts = run.at(part)
            left = [(s.tokens - n, s.prefix + n) for s, n in zip(run.shares, cuts, strict=True)]
            seconds = self._profile.prefill_seconds(left) / run.parts * self._settings.dilation
            start, end = stream.launch(seconds, at=None if part else called)
            begin, busy_s = start if begin is None else begin, busy_s + seconds
        run.end()
        each = run.layers // run.parts
        for share, req in jobs:
            stop = share.prefix + len(share.slots)
            known = _known(req, stop)
            assert known is not None, "the chain of a prompt's own tokens"
            low = share.first_loaded if share.taken else run.parts
            slots = share.slots.to(torch.int64)
            signer.sign_layers(req.rid, slots, known[share.prefix : stop], low * each)
        assert begin is not None, "there is a part"
        return begin, end, end - begin - busy_s

    def _signer_of(self, pool: Any) -> Signer:
        if self._signer is None:
            self._signer = Signer(_buffers(pool), pool.page_size, self.pages)
            wanted = self._profile.kv_bytes_per_token / self._settings.bytes_scale
            if abs(self._signer.bytes_per_token - wanted) > 0.5:
                raise BenchError(
                    f"the pool keeps {self._signer.bytes_per_token} bytes a token, and the paced "
                    f"device was told {wanted:g}"
                )
        return self._signer

    def _extend(
        self,
        signer: Signer,
        rows: torch.Tensor,
        fb: Any,
        requests: list[Any],
        spans: list[tuple[int, int]],
    ) -> torch.Tensor:
        batch, at = [], 0
        own = fb.out_cache_loc[: sum(tokens for tokens, _ in spans)].to(torch.int64)
        for number, (tokens, prefix) in enumerate(spans):
            req = requests[number] if number < len(requests) else None
            batch.append(
                Extend(
                    rid="" if req is None else req.rid,
                    prefix=rows[int(fb.req_pool_indices[number]), :prefix].to(torch.int64),
                    own=own[at : at + tokens],
                    tokens=fb.input_ids[at : at + tokens],
                    known=None if req is None else _known(req, prefix),
                )
            )
            at += tokens
        found = signer.extend(batch)
        self.pages.computed(own)
        return found

    def _decode(
        self, signer: Signer, rows: torch.Tensor, fb: Any, requests: list[Any], lengths: list[int]
    ) -> torch.Tensor:
        own = fb.out_cache_loc.to(torch.int64)
        batch = [
            Decode(
                rid=req.rid,
                slots=rows[int(row), : length - 1].to(torch.int64),
                length=length - 1,
                known=_known(req, 0),
            )
            for row, length, req in zip(fb.req_pool_indices, lengths, requests, strict=True)
        ]
        found = signer.decode(batch, fb.input_ids, own)
        self.pages.computed(own)
        return found

    def _tell(self, signer: Signer, at: float) -> None:
        for wrong in signer.mismatches:
            logger.error("paced: %s", wrong)
            self._log.mismatch(at, str(wrong), wrong.rid, wrong.tier)
        signer.mismatches.clear()


_device: Device | None = None


def of_process() -> Device:
    """The device of this process."""
    assert _device is not None, "install() was not called"
    return _device


def install() -> None:
    """Puts a paced device in the place of the CPU in this process. Raises BenchError where the
    variable is wrong.
    """
    global _device
    try:
        settings = Settings(**json.loads(os.environ[VARIABLE]))
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{VARIABLE} holds no settings of a paced device: {error}") from error
    clock.stand_in(torch.cpu)
    _device = device = Device(settings)
    ATTENTION_BACKENDS[ATTENTION] = Attention
    damage = Damage(settings.damage, settings.damage_at)
    links = (device.to_device, device.to_host)
    moved = Copies(*links, settings.bytes_scale, device.pages, damage, device.copied)
    _copy_as_a_card(settings, moved)
    for name in _POOLS:
        module: Any = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        module.transfer_kv_per_layer_direct_pf_lf = moved.load(
            host_copies.transfer_kv_per_layer_direct_pf_lf
        )
        module.transfer_kv_all_layer_direct_lf_pf = moved.save(
            host_copies.transfer_kv_all_layer_direct_lf_pf
        )
    _hook_storage(settings, device.pages)
    _say(settings)
    logger.warning(
        "paced: %s, dilation %g: nothing is computed, steps and copies take the profile's time",
        settings.profile,
        settings.dilation,
    )


def _copy_as_a_card(settings: Settings, moved: Copies) -> None:
    """Loads of our own go the way that they go on a card, through staging of as many pages."""

    def card(controller: Any) -> tuple[Any, Any]:
        return moved.card(host_pool_of(controller))

    CARDS[_DEVICE] = card
    gpus = profile.document(settings.profile)["gpus"]  # each stages its share of a page
    for module, name in _SIZES:
        setattr(module, name, int(getattr(module, name) * gpus / settings.bytes_scale))
    of_a_gpu = settings.bytes_scale * settings.dilation / gpus
    pages.compare = compared(pages.compare, of_a_gpu / _COMPARED_BYTES_PER_S)


def _say(settings: Settings) -> None:
    """Has /metrics name the device, for clients that did not start the server."""
    gauge = Gauge(
        METRIC,
        "seconds here for one of the profile",
        ["profile", "kv_dtype"],
        multiprocess_mode="max",
    )
    own = settings.disk_read_gbytes_per_s != DISK_READ_GBYTES_PER_S
    disk = f"@{settings.disk_read_gbytes_per_s:g}" if own else ""
    gauge.labels(settings.profile + disk, settings.kv_dtype).set(settings.dilation)


def _hook_storage(settings: Settings, pages: Pages) -> None:
    def allocated(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
        del pool, args, kwargs
        if result is not None:
            pages.allocated(result)

    root = "sglang.srt.mem_cache."
    HookRegistry.register(root + "pool_host.base.HostKVCache.alloc", allocated, HookType.AFTER)
    if settings.disk_read_gbytes_per_s:
        read = clock.Disk(settings.disk_read_gbytes_per_s / settings.dilation)
        write = clock.Disk(settings.disk_write_gbytes_per_s / settings.dilation)
        get, put = file_backend(read, write, settings.bytes_scale)
        HookRegistry.register(root + "hicache_storage.HiCacheFile.get", get, HookType.AROUND)
        HookRegistry.register(root + "hicache_storage.HiCacheFile.set", put, HookType.AROUND)
        if os.environ.get(peers.NIXL_FOLDER):
            around = nixl_backend(read, write, settings.bytes_scale)
            HookRegistry.register(root + _NIXL, around, HookType.AROUND)
        if os.environ.get(MOONCAKE_WAITS):
            get, put = mooncake_backend(read, write, settings.bytes_scale)
            store = root + _MOONCAKE
            HookRegistry.register(store + "_get_batch_zero_copy_impl", get, HookType.AROUND)
            HookRegistry.register(store + "_put_batch_zero_copy_impl", put, HookType.AROUND)
    HookRegistry.apply_hooks()


def watch_batches() -> None:
    """Has the device know the requests of each forward and of each read that SGLang makes. Called
    when the model is made: then every module of SGLang's that it needs is there.
    """
    target = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    HookRegistry.register(target, _around_forward, HookType.AROUND)
    HookRegistry.apply_hooks()
    of_process().loads.watch_reads()


def _around_forward(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    device = of_process()
    device.batch = batch
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        device.batch = None


def logits_of(tokens: torch.Tensor, vocabulary: int) -> LogitsProcessorOutput:
    """Logits of a model whose next tokens are certain."""
    logits = torch.zeros((tokens.numel(), vocabulary))
    logits[torch.arange(tokens.numel()), tokens] = 64.0
    return LogitsProcessorOutput(next_token_logits=logits)


class _LastRows(NamedTuple):
    """Those requests of a mixed batch that decode: its last ones, of one token each."""

    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    input_ids: torch.Tensor

    @classmethod
    def of(cls, forward_batch: Any, count: int) -> _LastRows:
        """The last `count` requests."""
        return cls(*(getattr(forward_batch, name)[-count:] for name in cls._fields))


def _spans(forward_batch: Any) -> list[tuple[int, int]]:
    """The tokens and the prefix tokens of each request of a prefill batch."""
    tokens = map(int, forward_batch.extend_seq_lens_cpu)
    prefix = map(int, forward_batch.extend_prefix_lens_cpu)
    return list(zip(tokens, prefix, strict=True))


def _buffers(pool: Any) -> dict[str, torch.Tensor]:
    """A pool's buffers by layer."""
    latent = getattr(pool, "kv_buffer", None)
    if latent is not None:
        return {f"layer {n}": rows for n, rows in enumerate(latent)}
    found = {f"layer {n}, keys": rows for n, rows in enumerate(pool.k_buffer)}
    return found | {f"layer {n}, values": rows for n, rows in enumerate(pool.v_buffer)}


def _known(req: Any, tokens: int) -> torch.Tensor | None:
    """The chain of a request's prompt, and of its outputs where `tokens` are more. None where the
    request says less.
    """
    chain: torch.Tensor | None = getattr(req, _CHAIN, None)
    if chain is None:
        chain = chain_of(torch.tensor(req.origin_input_ids, dtype=torch.int64))
        setattr(req, _CHAIN, chain)
    if chain.numel() >= tokens:
        return chain
    more = torch.tensor(list(req.output_ids), dtype=torch.int64)
    prompt = torch.tensor(req.origin_input_ids, dtype=torch.int64)
    chain = chain_of(torch.cat([prompt, more]))
    setattr(req, _CHAIN, chain)
    return chain if chain.numel() >= tokens else None
