"""A card whose driver does nothing: what is left of a copy is the time of the interpreter.

Streams, events, launches and memory copies return at once. All Python above them is the real one:
ours, SGLang's, Triton's launcher, and torch's views.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class _Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        del enable_timing, blocking

    def record(self, stream: Any = None) -> None:
        """Nothing."""

    def wait(self, stream: Any = None) -> None:
        """Nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing."""

    def elapsed_time(self, _other: Any) -> float:
        return 1.0


class _Stream:
    cuda_stream = 0

    def wait_event(self, event: Any) -> None:
        """Nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    del stream
    yield


def null_module() -> Any:
    """The module that `torch.get_device_module` gives for it."""
    stream = _Stream()
    return SimpleNamespace(
        Event=_Event,
        Stream=_Stream,
        stream=_on,
        current_stream=lambda *_: stream,
        current_device=lambda: 0,
        set_device=lambda _index: None,
    )


class NullMemory:
    """`CardMemory` whose copies are not made."""

    def pinned(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=torch.int64)

    def indices(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=torch.int64)

    def raw(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def write(self, pinned: torch.Tensor, values: torch.Tensor) -> None:
        pinned.copy_(values)

    def driver_copy(self) -> int | None:
        """Of two addresses it answers 0 unless they are equal, as a driver whose copy began."""
        return ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes


def launch_into_nothing() -> None:
    """From here on Triton compiles for sm_90 in this process, and its launches do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    vars(nvidia)["PyKernelArg"] = SimpleNamespace  # of a module that is loaded with the real driver
    limits = {"max_shared_mem": 228 << 10}
    utils = SimpleNamespace(
        get_device_properties=lambda _device: limits,
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        unload_module=lambda _module: None,
        launch=lambda *_: None,
        build_signature_metadata=lambda _signature: b"",
    )
    null: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=nvidia.CudaLauncher,
        utils=utils,
    )
    driver.set_active(null)
