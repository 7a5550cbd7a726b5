"""A server whose copies to the device flip one bit while the file $SPOIL is there: on PYTHONPATH, so
that every process of it is.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

_MODULE = "sgl_kvtier.runtime.restore.copy_device"


class _Spoiler(importlib.abc.MetaPathFinder):
    """Changes the module of copies when it is imported, and nothing before."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _spoil(module)

        spec.loader.exec_module = exec_module
        return spec


def _spoil(module):
    import torch

    made = module.copies_for

    def copies_for(controller, **choices):
        copies = made(controller, **choices)
        begin = copies.begin

        def begin_and_spoil(host_slots, device_slots, fence):
            copy = begin(host_slots, device_slots, fence)
            done, spoiled = copy.done, []

            def done_and_spoil():
                if not done():
                    return False
                if not spoiled and Path(os.environ["SPOIL"]).exists():
                    [transfer] = controller._l2_load_transfers(host_slots, device_slots)
                    row = transfer.device_pool.v_buffer[-1][device_slots[3]]
                    row.view(torch.uint8).view(-1)[5] ^= 1
                spoiled.append(True)
                return True

            copy.done = done_and_spoil
            return copy

        copies.begin = begin_and_spoil
        return copies

    module.copies_for = copies_for


sys.meta_path.insert(0, _Spoiler())
