"""Copies from host pages into device slots for restorations, apart from HiCache's own copies:

    a CPU                     `CpuCopies`: a copy is done when it is placed
    a GPU, one pool with      `StagedCopies` (runtime/cuda): copy engine and one kernel launch;
    rows in order             windows that come with pages go by `StreamCopies`
    a GPU, other pages, or    `StreamCopies`: SGLang's own kernels, one launch for all layers where
    several pools             rows are equally spaced (latents), else one launch per layer
    any other accelerator     `StreamCopies`, one launch per layer

A server takes the first way that the check at start finds right (`chosen_for`). `CARDS` has the
kinds of devices that copy as a GPU does.

A slot that was just freed may still be read or written by a running forward. So code that allocates
slots records a fence, and no page is written to them before the fence is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.runtime.cpu.platform import works_at_once
from sgl_kvtier.runtime.cuda.all_layers import AllLayers, all_layers_of
from sgl_kvtier.runtime.cuda.card_memory import CardMemory, IndexRing
from sgl_kvtier.runtime.cuda.fences import fence
from sgl_kvtier.runtime.cuda.flashinfer_scatter import FlashInferScatter
from sgl_kvtier.runtime.cuda.page_shape import PageShape, host_pool_of, shape_of, unfit
from sgl_kvtier.runtime.cuda.scatter import Scatter, TritonScatter
from sgl_kvtier.runtime.cuda.staged_copies import StagedCopies
from sgl_kvtier.runtime.cuda.staging import pages_of_room, staging_bytes
from sgl_kvtier.runtime.proof import start
from sgl_kvtier.runtime.proof.start import StartResult
from sgl_kvtier.runtime.restore.page_mover import Copy, CopyDevice
from sgl_kvtier.runtime.sglang import slot_pools

logger = logging.getLogger(__name__)

MakeScatter: TypeAlias = Callable[[PageShape, int, list[torch.Tensor]], Scatter]
"""Takes the page shape, the pages of a staging room, and the device buffers."""
SCATTER: MakeScatter = TritonScatter
"""The default scatter. `FlashInferScatter` needs one launch per layer. Which one is faster on a GPU
is not measured yet (kvtier bench copy-table).
"""


def _cuda(controller: Any) -> tuple[CardMemory, MakeScatter]:
    return CardMemory(torch.get_device_module(controller.device).current_device()), SCATTER


CARDS: dict[str, Callable[[Any], tuple[CardMemory, MakeScatter]]] = {"cuda": _cuda}
"""Makes both for a HiCache controller, by kind of device; a CPU stand-in of the tests adds
itself.
"""


class CpuCopies:
    """Copies in all pools on the calling thread, with one torch thread so that the forward keeps
    its cores.
    """

    most_tokens: int | None = None

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def enter(self) -> None:
        """Sets one torch thread for the calling thread only."""
        torch.set_num_threads(1)

    def fence(self) -> None:
        """Returns None: forwards run on the scheduler's thread, so everything launched before has
        ended.
        """

    def begin(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        fence: Any,
        window: slot_pools.Slots | None = None,
    ) -> Copy:
        """Returns a copy that is done once it is placed."""
        del fence
        return _CpuCopy(self, host_slots, device_slots, window)

    def _copy(self, host: torch.Tensor, device: torch.Tensor, window: Any) -> None:
        controller = self._controller
        for transfer in slot_pools.transfers(controller, host, device, window):
            for layer in range(controller.transfer_layer_id_max):
                local = transfer.layer_mapper(layer) if transfer.layer_mapper is not None else layer
                if local is not None:
                    transfer.host_pool.load_to_device_per_layer_physical(
                        transfer.device_pool,
                        transfer.host_indices,
                        transfer.device_indices,
                        local,
                        controller.io_backend,
                        is_draft=transfer.is_draft,
                    )  # fmt: skip


class _CpuCopy:
    seconds: float | None = None

    def __init__(
        self, copies: CpuCopies, host: torch.Tensor, device: torch.Tensor, window: Any
    ) -> None:
        self._copies, self._host, self._device, self._over = copies, host, device, False
        self._window = window

    def place(self) -> None:
        self._copies._copy(self._host, self._device, self._window)
        self._over = True

    def drop(self) -> None:
        """Nothing to release."""

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        """Returns at once: nothing is ever in flight."""


class StreamCopies:
    """Copies by a transfer engine of its own, apart from HiCache's layer counters and
    acknowledgements. Constructed on the scheduler's thread.
    """

    most_tokens: int | None = None

    def __init__(
        self, controller: Any, memory: CardMemory | None = None, all_layers: AllLayers | None = None
    ) -> None:
        """With `memory`, which belongs to this process's GPU, slot indices go through pinned
        memory. Without `all_layers` every layer is a launch.
        """
        from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

        self._controller = controller
        self._module = torch.get_device_module(controller.device)
        self._index = self._module.current_device()
        self._engine = L2TransferEngine(controller.io_backend)
        self._all_layers = all_layers
        self._ring: IndexRing | None = None
        if memory is not None and controller.io_backend == "kernel":
            self._ring = IndexRing(self._module, memory)

    def enter(self) -> None:
        """Sets the thread's device: a new thread has none, and SGLang's "cuda" names no index."""
        self._module.set_device(self._index)

    def fence(self) -> Any:
        """Returns an event after everything that may still use slots allocated before."""
        return fence(self._module, self._controller)

    def begin(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        fence: Any,
        window: slot_pools.Slots | None = None,
    ) -> Copy:
        """Returns a copy that is submitted once it is placed, since these kernels write to the
        slots directly.
        """
        return _StreamCopy(self, (host_slots, device_slots), window, fence)

    def _moved(self, slots: slot_pools.Slots) -> slot_pools.Slots:
        host, device = slots
        if self._ring is None:
            moved: slot_pools.Slots = self._controller.move_indices(host, device)
            return moved
        return self._ring.upload(host), device

    def _submit(self, slots: slot_pools.Slots, window: slot_pools.Slots | None, fence: Any) -> Any:
        controller, engine = self._controller, self._engine
        with self._module.stream(engine.host_to_device_stream):
            engine.host_to_device_stream.wait_event(fence)
            moved = None if window is None else self._moved(window)
            pages = self._moved(slots) if len(slots[0]) else slots  # none if windows go alone
            transfers = slot_pools.transfers(controller, *pages, moved)
            layers = controller.transfer_layer_id_max
            one = self._all_layers and self._all_layers.of(transfers)
            if one:
                transfers, layers = one, 1
            return engine.submit_host_to_device(
                transfers, transfer_layer_id_max=layers, start_event=fence
            )


class _StreamCopy:
    def __init__(
        self,
        copies: StreamCopies,
        slots: slot_pools.Slots,
        window: slot_pools.Slots | None,
        fence: Any,
    ) -> None:
        self._copies, self._slots, self._window, self._fence = copies, slots, window, fence
        self._submitted: Any = None

    def place(self) -> None:
        self._submitted = self._copies._submit(self._slots, self._window, self._fence)

    def drop(self) -> None:
        """Nothing to release."""

    def done(self) -> bool:
        return self._submitted is not None and bool(self._submitted.finish_event.query())

    def wait(self) -> None:
        self._submitted.finish_event.synchronize()

    @property
    def seconds(self) -> float | None:
        if not self._submitted.timing_enabled:
            return None
        start, finish = self._submitted.start_event, self._submitted.finish_event
        return float(start.elapsed_time(finish)) / 1e3


def lacking(controller: Any) -> str | None:
    """Why this server cannot make copies apart from SGLang's own, or None."""
    kind = torch.device(controller.device).type
    if kind == "cpu" or hasattr(torch.get_device_module(kind), "Stream"):
        return None
    return f"this torch ({torch.__version__}) has no streams on {kind} (another build of torch)"


def memory_of(controller: Any) -> CardMemory | None:
    """The memory of this controller's device, if it is one of `CARDS`; else None."""
    card = CARDS.get(torch.device(controller.device).type)
    return None if card is None or works_at_once(controller.device) else card(controller)[0]


def copies_for(controller: Any, *, restores: bool = True) -> CopyDevice:
    """The copies for this HiCache controller's device, unchecked. A server that restores nothing
    gets no staging, which takes device memory. Scheduler's thread.
    """
    if works_at_once(controller.device):
        return CpuCopies(controller)
    card = CARDS.get(torch.device(controller.device).type)
    if card is None:
        return StreamCopies(controller)
    memory, scatter = card(controller)
    if not restores:
        return StreamCopies(controller, memory, _all_layers(controller))
    return next(_ways(controller, memory, scatter))


@dataclass(frozen=True)
class Chosen:
    """The chosen way of copying, and what the check at start has shown of it."""

    copies: CopyDevice
    start: StartResult | None = None
    """None where nothing is checked, or no way was right."""
    wrong: str = ""
    """Why no way of copying is right on this device; empty if one is."""
    unreadable: str = ""
    """Why no way of copying can be checked; empty if one can."""


def chosen_for(controller: Any, policy: PolicyConfig) -> Chosen:
    """The copies of a server with these settings. Nothing is checked on a CPU, where nothing is
    restored, or with `policy.proof` off. Scheduler's thread, before the first request.
    """
    on_cpu = torch.device(controller.device).type == "cpu"
    if policy.restore == "off" or policy.proof == "off" or on_cpu:
        return Chosen(copies_for(controller, restores=policy.restore != "off"))
    return proven_copies(controller)


def proven_copies(controller: Any) -> Chosen:
    """The first way of copying that the check at start finds right, or that it cannot read back.
    For accelerators; blocks until the device is done.
    """
    card = CARDS.get(torch.device(controller.device).type)
    ways: Iterator[CopyDevice] = iter([StreamCopies(controller)])
    if card is not None:
        ways = _ways(controller, *card(controller))
    wrong: list[str] = []
    while True:
        copies = None  # frees its staging before the next way allocates its own
        if (copies := next(ways, None)) is None:
            return Chosen(StreamCopies(controller), wrong="; ".join(dict.fromkeys(wrong)))
        try:
            found = start.check(copies, controller)
        except start.StartUnreadable as error:
            return Chosen(copies, unreadable=str(error))
        except Exception as error:
            # A driver may raise anything. A way that is not shown to be right is not used.
            named = isinstance(error, start.StartDiffers)
            said = str(error) if named else f"{type(error).__name__}: {error}"
            wrong.append(said.partition("\n")[0])
            logger.warning("kvtier: pages are not copied by %s: %s", way_of(copies), wrong[-1])
        else:
            logger.info("kvtier: copies by %s: %s", way_of(copies), found.line)
            return Chosen(copies, found)


def way_of(copies: CopyDevice) -> str:
    """The name of this way of copying in logs and proofs."""
    scatter = getattr(copies, "_scatter", None)
    ways = (copies,) if scatter is None else (copies, scatter)
    return " by ".join(type(way).__name__ for way in ways)


def _ways(controller: Any, memory: CardMemory, scatter: MakeScatter) -> Iterator[CopyDevice]:
    """All ways to copy on this GPU, fastest first, at least one; each is made when it is its
    turn.
    """
    pool = host_pool_of(controller)
    reason = _several_pools(controller) or unfit(controller) or memory.unread(pool)
    if reason is None:
        staged = _staged(controller, memory, scatter)
        if isinstance(staged, str):
            reason = staged
        else:
            _say_staging(controller, memory, staged)
            yield staged
            staged, reason = "", "pages were not copied right through staging"
            fits = scatter is SCATTER and pool.layout == "page_first"
            if fits and FlashInferScatter.is_compiled():
                staged = _staged(controller, memory, FlashInferScatter)
                if not isinstance(staged, str):
                    _say_staging(controller, memory, staged)
                    yield staged
        del staged
    all_layers = _all_layers(controller)
    how = "layer by layer" if all_layers is None else "all layers in one launch"
    logger.warning("kvtier: loads are copied by SGLang's kernels, %s: %s", how, reason)
    if all_layers is not None:
        yield StreamCopies(controller, memory, all_layers)
    yield StreamCopies(controller, memory)


def _several_pools(controller: Any) -> str | None:
    """Why a load cannot go through staging, which holds pages of one pool, or None. Windows are
    copied apart from it.
    """
    names = [str(entry.name) for entry in slot_pools.beside(controller)]
    return f"pages of several pools, {', '.join(names)} beside KV" if names else None


def _all_layers(controller: Any) -> AllLayers | None:
    return None if slot_pools.others(controller) else all_layers_of(controller)


def _say_staging(controller: Any, memory: CardMemory, staged: StagedCopies) -> None:
    logger.info(
        "kvtier: loads go through %.3g MiB of staging, %d tokens at once; %d MiB of device memory "
        "are free beside it", staging_bytes(shape_of(host_pool_of(controller))) / 2**20,
        staged.most_tokens, memory.free_bytes() >> 20,
    )  # fmt: skip


def _staged(controller: Any, memory: CardMemory, scatter: MakeScatter) -> StagedCopies | str:
    """Staged copies, or the reason why there are none."""
    needed, free = staging_bytes(shape_of(host_pool_of(controller))), memory.free_bytes()
    if free < 2 * needed:  # the next long prefill needs free device memory, too
        return (
            f"{free >> 20} MiB of device memory are free, and staging takes {needed >> 20} and "
            "leaves as much (a lower --mem-fraction-static)"
        )
    try:
        return staged_by(scatter, controller, memory)
    except Exception as error:
        # A driver, a compiler or another version of Triton may raise anything; there is another
        # way.
        return (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no kernel'}"
        )


def staged_by(make: MakeScatter, controller: Any, memory: CardMemory) -> StagedCopies:
    """Copies through staging with this scatter, for a pool that `unfit` accepts. Raises whatever a
    driver or a compiler raises.
    """
    pool = host_pool_of(controller)
    shape = shape_of(pool)
    scatter = make(shape, pages_of_room(shape), [*pool.device_k_buffers, *pool.device_v_buffers])
    scatter.prepare()
    beside = StreamCopies(controller, memory) if slot_pools.has_anchors(controller) else None
    return StagedCopies(controller, scatter, memory, beside)
