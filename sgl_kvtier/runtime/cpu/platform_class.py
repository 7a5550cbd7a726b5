"""The platform class, separate from `platform.activate`, which must not import SGLang."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sgl_kvtier.runtime.cpu.platform import ATTENTION, stand_in, threads_per_rank

logger = logging.getLogger(__name__)


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on a plain CPU with torch's own operators: no sgl_kernel, no Triton, no pinned memory,
    gloo collectives.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """The device as text, which SGLang splits at the colon if --device is omitted."""
        del device_id
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """False: there is no device to pin host memory for."""
        del device
        return False

    def get_default_attention_backend(self) -> str:
        """Ours, whose prefill costs O(chunk x sequence); `torch_native` can be chosen by flag."""
        return ATTENTION

    def get_dispatch_key_name(self) -> str:
        """Selects the torch implementations of SGLang's layers."""
        return "native"

    def get_torch_distributed_backend_str(self) -> str:
        """gloo."""
        return "gloo"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Replaces defaults that need a GPU. Runs in the launching process, so the environment
        reaches the workers.
        """
        chosen = getattr(server_args, "_raw_input", None) or {}
        if chosen.get("attention_backend") is None:
            server_args.attention_backend = ATTENTION
        elif server_args.attention_backend == "intel_amx":
            raise ValueError(
                "--attention-backend intel_amx needs SGLang's CPU engine (SGLANG_USE_CPU_ENGINE=1 "
                f"and a CPU build of sgl_kernel). Omit the flag for {ATTENTION}, or choose "
                "torch_native"
            )
        if server_args.hicache_io_backend == "kernel":
            server_args.hicache_io_backend = "direct"
            if server_args.hicache_mem_layout == "page_first":
                server_args.hicache_mem_layout = "page_first_direct"
        if server_args.hicache_mem_layout not in ("layer_first", "page_first", "page_first_direct"):
            raise ValueError(
                f"--hicache-mem-layout {server_args.hicache_mem_layout} needs GPU kernels. On this "
                "host choose page_first_direct (default) or layer_first"
            )
        if server_args.page_size is None:
            server_args.page_size = 16
        self._bind_threads(server_args)

    def init_backend(self) -> None:
        """Sets up HiCache's host pools, our attention, and the emulated device if any; once per
        worker process.
        """
        from sgl_kvtier.runtime.cpu import hicache

        hicache.install()
        stand_in()

    @staticmethod
    def _bind_threads(server_args: Any) -> None:
        """One group of cores per rank (SGLang's own default needs a NUMA node for each), and no
        spinning OpenMP threads.

        With the default wait policy one busy neighbour slows two torch threads by ten times and
        more.
        """
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        if ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = threads_per_rank(ranks, cores)
            logger.info(
                "%d ranks on %d cores: %s",
                ranks,
                len(cores),
                os.environ["SGLANG_CPU_OMP_THREADS_BIND"],
            )
