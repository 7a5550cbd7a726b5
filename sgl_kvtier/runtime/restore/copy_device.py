"""Copies from host pages into device slots, apart from those that HiCache does for the tree. The
way is chosen here:

    a CPU                     `CpuCopies`: a copy is done when it is placed
    a card, pages in order    `StagedCopies` (runtime/cuda): copy engine and one launch; windows
                              that come with pages, by `StreamCopies`
    a card, other pages, or   `StreamCopies`: SGLang's own kernels, one launch for all layers where
    several pools             rows lie equally far apart (latents), else a launch per layer
    any other accelerator     `StreamCopies`, a launch per layer

A server takes the first way that the check at start finds right (`chosen_for`). What copies as
a card does is in `CARDS`.

A slot that was just freed may still be read or written by a forward that runs. So the code
that claims slots takes a fence, and no page is placed in them before it has come.
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
"""Of shape, pages of a room, and buffers."""
SCATTER: MakeScatter = TritonScatter
"""`FlashInferScatter` needs one launch per layer. Which is faster is to be measured on a card
(kvtier bench copy-table).
"""


def _cuda(controller: Any) -> tuple[CardMemory, MakeScatter]:
    return CardMemory(torch.get_device_module(controller.device).current_device()), SCATTER


CARDS: dict[str, Callable[[Any], tuple[CardMemory, MakeScatter]]] = {"cuda": _cuda}
"""Kinds of devices that have a copy engine and a kernel for pages in staging: what gives a HiCache
controller both. A stand-in for the CPU adds itself.
"""


class CpuCopies:
    """Copies in all pools by the calling thread, with one torch thread so that the forward keeps
    its cores.
    """

    most_tokens: int | None = None

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def enter(self) -> None:
        """One torch thread for the calling thread; the scheduler's keeps its own."""
        torch.set_num_threads(1)

    def fence(self) -> None:
        """Nothing runs beside the scheduler's thread: everything launched before has ended."""

    def begin(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        fence: Any,
        window: slot_pools.Slots | None = None,
    ) -> Copy:
        """A copy that is done once it is placed."""
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
        """Nothing was taken."""

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        """Nothing is ever under way."""


class StreamCopies:
    """Copies on a transfer engine of our own, so that HiCache's layer counters and acknowledgements
    are not involved. Built on the scheduler's thread.
    """

    most_tokens: int | None = None

    def __init__(
        self, controller: Any, memory: CardMemory | None = None, all_layers: AllLayers | None = None
    ) -> None:
        """With `memory`, indices go through pinned memory; it is of this process's card. Without
        `all_layers` every layer is a launch.
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
        """SGLang's "cuda" has no index, and a thread no device of its own."""
        self._module.set_device(self._index)

    def fence(self) -> Any:
        """A mark behind everything that may still use slots claimed before."""
        return fence(self._module, self._controller)

    def begin(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        fence: Any,
        window: slot_pools.Slots | None = None,
    ) -> Copy:
        """A copy that is submitted once it is placed: these kernels write into slots at once."""
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
            pages = self._moved(slots) if len(slots[0]) else slots  # none where windows come alone
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
        """Nothing was taken."""

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
    """Why nothing can be copied to this server's device beside SGLang's own copies, or None."""
    kind = torch.device(controller.device).type
    if kind == "cpu" or hasattr(torch.get_device_module(kind), "Stream"):
        return None
    return f"this torch ({torch.__version__}) has no streams on {kind} (another build of torch)"


def memory_of(controller: Any) -> CardMemory | None:
    """The memory of this controller's device, where it is one of `CARDS`."""
    card = CARDS.get(torch.device(controller.device).type)
    return None if card is None or works_at_once(controller.device) else card(controller)[0]


def copies_for(controller: Any, *, restores: bool = True) -> CopyDevice:
    """The copies of the device that this HiCache controller serves, unchecked. A server that
    restores nothing gets no staging, which takes device memory. Scheduler's thread.
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
    """The way of copying that a server takes, and what the check at start has shown of it."""

    copies: CopyDevice
    start: StartResult | None = None
    """None where nothing is checked, or no way was right."""
    wrong: str = ""
    """Why no way of copying is right on this device; empty where one is."""
    unreadable: str = ""
    """Why no way of copying can be checked; empty where one can."""


def chosen_for(controller: Any, policy: PolicyConfig) -> Chosen:
    """The copies of a server with these settings. Nothing is checked on a CPU, on a server that
    restores nothing, and where `policy.proof` is off. Scheduler's thread, before the server has
    requests.
    """
    on_cpu = torch.device(controller.device).type == "cpu"
    if policy.restore == "off" or policy.proof == "off" or on_cpu:
        return Chosen(copies_for(controller, restores=policy.restore != "off"))
    return proven_copies(controller)


def proven_copies(controller: Any) -> Chosen:
    """The first way of copying that the check at start finds right, if it can read pages back. On
    an accelerator; blocks until the device is done.
    """
    card = CARDS.get(torch.device(controller.device).type)
    ways: Iterator[CopyDevice] = iter([StreamCopies(controller)])
    if card is not None:
        ways = _ways(controller, *card(controller))
    wrong: list[str] = []
    while True:
        copies = None  # its staging is free before the next way takes its own
        if (copies := next(ways, None)) is None:
            return Chosen(StreamCopies(controller), wrong="; ".join(dict.fromkeys(wrong)))
        try:
            found = start.check(copies, controller)
        except start.StartUnreadable as error:
            return Chosen(copies, unreadable=str(error))
        except Exception as error:
            # Whatever a driver raises: a way that cannot be shown to be right is not taken.
            named = isinstance(error, start.StartDiffers)
            said = str(error) if named else f"{type(error).__name__}: {error}"
            wrong.append(said.partition("\n")[0])
            logger.warning("kvtier: pages are not copied by %s: %s", way_of(copies), wrong[-1])
        else:
            logger.info("kvtier: copies by %s: %s", way_of(copies), found.line)
            return Chosen(copies, found)


def way_of(copies: CopyDevice) -> str:
    """How these copies go, as logs and proofs name it."""
    scatter = getattr(copies, "_scatter", None)
    ways = (copies,) if scatter is None else (copies, scatter)
    return " by ".join(type(way).__name__ for way in ways)


def _ways(controller: Any, memory: CardMemory, scatter: MakeScatter) -> Iterator[CopyDevice]:
    """Every way to copy there is on this card, the fastest first. Each is made when it is asked
    for; at least one is.
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
    """Why a load cannot go through staging, which has pages of one pool, or None. Windows come
    beside them.
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
    """Staged copies, or why there are none."""
    needed, free = staging_bytes(shape_of(host_pool_of(controller))), memory.free_bytes()
    if free < 2 * needed:  # what is taken here is missing at the next long prefill
        return (
            f"{free >> 20} MiB of device memory are free, and staging takes {needed >> 20} and "
            "leaves as much (a lower --mem-fraction-static)"
        )
    try:
        return staged_by(scatter, controller, memory)
    except Exception as error:
        # Whatever a driver, a compiler or another version of Triton raises: there is another way.
        return (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no kernel'}"
        )


def staged_by(make: MakeScatter, controller: Any, memory: CardMemory) -> StagedCopies:
    """Copies through staging and this scatter, for a pool that is not `unfit`. Raises whatever a
    driver or a compiler raises.
    """
    pool = host_pool_of(controller)
    shape = shape_of(pool)
    scatter = make(shape, pages_of_room(shape), [*pool.device_k_buffers, *pool.device_v_buffers])
    scatter.prepare()
    beside = StreamCopies(controller, memory) if slot_pools.has_anchors(controller) else None
    return StagedCopies(controller, scatter, memory, beside)
