"""A server that is changed for a test: this folder is on PYTHONPATH, so that every process of it is.

With $SPOIL, copies to the device flip one bit while that file is there. With $RAN, each rank writes
every prefill that it runs into a file of that folder, named by its number: a line of JSON with
[tokens of the prompt, first one computed, tokens computed] for each request.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path


class _Changer(importlib.abc.MetaPathFinder):
    """Changes a module when it is imported, and nothing before."""

    def __init__(self, name, change):
        self._name = name
        self._change = change

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._change(module)

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


def _tell(module):
    launch = module.ChunkClock.launch

    def launch_and_tell(clock, batch, *args):
        from sgl_kvtier.runtime.sglang import tree_ranks

        rank = tree_ranks.tensor_rank(batch.tree_cache)
        parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        row = [[len(req.origin_input_ids), start, tokens] for req, start, tokens in parts]
        with Path(os.environ["RAN"], str(rank)).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return launch(clock, batch, *args)

    module.ChunkClock.launch = launch_and_tell


for variable, name, change in (
    ("SPOIL", "sgl_kvtier.runtime.restore.copy_device", _spoil),
    ("RAN", "sgl_kvtier.runtime.step.chunk_clock", _tell),
):
    if variable in os.environ:
        sys.meta_path.insert(0, _Changer(name, change))
