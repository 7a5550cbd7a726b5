"""Replaces aten's CUDA kernels in this process by those of the CPU, on their streams' threads."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings

import torch

_TORCHS_OWN = (
    "empty", "empty_strided", "resize_", "set_", "as_strided", "view", "_reshape_alias", "record_stream", "is_pinned", "_pin_memory",
    "pin_memory", "copy_", "alias", "unfold", "view_as_real", "view_as_complex", "_efficientzerotensor", "is_set_to",
)  # fmt: skip
"""Operations that compute nothing: memory and views, which are torch's own on the stand-in too."""


@functools.cache
def library() -> ctypes.CDLL:
    """Built from aten.cpp."""
    return ctypes.PyDLL(os.path.join(os.environ["CUDA_STAND_IN_HOME"], "libcuda_stand_in_aten.so"))


def install() -> None:
    """Once, when torch was imported. Raises RuntimeError."""
    gpu = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    cpu = set(torch._C._dispatch_get_registrations_for_dispatch_key("CPU"))
    names = [
        name[6:].encode()
        for name in gpu
        if name.startswith("aten::") and name in cpu and name[6:].split(".")[0] not in _TORCHS_OWN
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced, a thousand times
        if not library().stand_in_install((ctypes.c_char_p * len(names))(*names), len(names)):
            raise RuntimeError("aten's CUDA kernels were not replaced")


def counts() -> tuple[int, int]:
    """Kernels put on streams so far, and kernels that waited for theirs."""
    return library().stand_in_put_kernels(), library().stand_in_waiting_kernels()


def bytes_now(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor of the device as it is now, whatever is on its way: uint8
    of the CPU over the same memory, which does not keep it.
    """
    nbytes = tensor.numel() * tensor.element_size()
    return torch.frombuffer(
        (ctypes.c_char * nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8
    )
