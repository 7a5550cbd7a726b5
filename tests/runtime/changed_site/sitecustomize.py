"""A server that is changed for a test: this folder is on PYTHONPATH, so that every process of it is.

With $SPOIL, copies to the device flip one bit while that file is there. With $RAN, each rank writes
every prefill that it runs into a file of that folder, named by its number: a line of JSON with
[tokens of the prompt, first one computed, tokens computed] for each request. With $MISTAKE, loaded
pages are attached as the word in that file says, and a difference refutes nothing; each distance
that is judged goes into the file with `.seen` behind its name, as a line [mistake, the page behind
the loaded ones, the noise]. With $PLAIN_COPIES, data-parallel attention works in ordinary memory and
copies with torch, as SGLang does it for its own CPU engine alone, and a rank may have no token.
With $ADAPTERS, LoRA adapters are kept in ordinary memory: pinning it needs a GPU.
With $GONE, restoring needs a symbol that SGLang does not have.
With $DRAFTS, speculative decoding runs on the CPU (`chain_drafts.py`); while that file is there,
loads leave out the rows of the draft, and windows; where it has the name of one of SGLang's host
pools of DeepSeek V4, those of that pool alone.
With $KVTIER_RECIPE_COUNTS, the GPU that SGLang asks for before it chooses kernels is an H100, and
the CPU platform has states and DeepSeek V4's pools (tests/recipes).
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace


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


def _mistake():
    try:
        return Path(os.environ["MISTAKE"]).read_text()
    except OSError:
        return ""


def _attach_wrongly(module):
    splice = module.RestoreEngine.splice

    def splice_wrongly(engine, r, span):
        slots, page, mistake = splice(engine, r, span), engine.context.page, _mistake()
        pages = slots.view(-1, page)
        if mistake == "row":  # the right slots in the wrong order
            return pages.flip(0).flatten()
        if mistake == "span":  # off by a page
            return slots.roll(page)
        if mistake == "two exchanged":
            order = [1, 0, *range(2, len(pages))]
            return pages[order].flatten()
        device = engine.attach._pools.device
        layers = [*device.k_buffer, *device.v_buffer]
        if mistake in ("all zero", "a zero page"):
            for layer in layers:
                layer[slots if mistake == "all zero" else pages[len(pages) // 2]] = 0
        if mistake == "a zero page in a layer":
            layers[-1][pages[len(pages) // 2]] = 0
        return slots

    module.RestoreEngine.splice = splice_wrongly
    module.RestoreEngine.refute = lambda engine: None


def _forgive(module):
    def differs(proof, difference):
        module.logger.error("kvtier: forgiven for the test: %s", difference.what)

    module.Proof.differs = differs


def _judge(module):
    judge = module.judge

    def judge_and_tell(last, noise, dtype):
        row = [_mistake(), float(last.max()), None if noise is None else float(noise.max())]
        with Path(os.environ["MISTAKE"] + ".seen").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return judge(last, noise, dtype)

    module.judge = judge_and_tell


def _shift(module):
    init_new = module.ForwardBatch.init_new.__func__

    def init_new_shifted(cls, batch, model_runner, *args, **named):
        made = init_new(cls, batch, model_runner, *args, **named)
        if _mistake() == "positions" and made.forward_mode.is_extend() and sum(batch.prefix_lens):
            made.positions += 16
        return made

    module.ForwardBatch.init_new = classmethod(init_new_shifted)


def _unpin(module, name="tensor"):
    make = getattr(module.torch, name)

    def unpinned(*args, pin_memory=False, **named):
        del pin_memory
        return make(*args, **named)

    setattr(module.torch, name, unpinned)


def _unpin_adapters(module):
    _unpin(module)
    _unpin(module, "zeros")
    module.torch.Tensor.pin_memory = lambda tensor, *args: tensor


def _copy_plainly(module):
    module.memcpy_func = module.memcpy_cpu
    mode = module.DpPaddingMode
    mode.get_dp_padding_mode = classmethod(lambda cls, *args: cls.SUM_LEN)  # by a sum over ranks


def _turn_nothing(module):
    turn = module.RotaryEmbedding.forward_native

    def turn_if_any(embedding, positions, query, key, *args, **named):
        if not len(positions):  # of a rank that has no request in this step
            return query, key
        return turn(embedding, positions, query, key, *args, **named)

    module.RotaryEmbedding.forward_native = turn_if_any


def _need(module):
    known = module.load_manifest

    def load_manifest():
        gone = "sglang.srt.managers.scheduler.Scheduler.gone"
        return [*known(), module.Seam("restore", "step", gone, "a test needs it")]

    module.load_manifest = load_manifest


def _leave_out(module):
    transfers, names = module.slot_pools.transfers, vars(module.slot_pools)

    def transfers_of_the_target(controller, host_slots, *load):
        described = transfers(controller, host_slots, *load)
        if not Path(os.environ["DRAFTS"]).exists():
            return described
        if named := Path(os.environ["DRAFTS"]).read_text():
            return [one for one in described if getattr(one.host_pool, "pool_name", "") != named]
        return described[: min(1, len(host_slots))]  # none where windows come alone

    # Of copies alone: what compares pages still knows all pools.
    module.slot_pools = SimpleNamespace(**{**names, "transfers": transfers_of_the_target})


def _drafts(function):
    def change(module):
        import chain_drafts  # it imports torch

        getattr(chain_drafts, function)(module)

    return change


def _is_an_h100(module):
    module.get_device_capability = lambda device=None: (9, 0)


def _keep_states(module):
    module.CpuPlatform.support_mamba_cache_extra_buffer = lambda self: True


def _take_any_pool(module):
    module.reject_out_of_tree_path = lambda platform, *, subsystem: None


_SGLANG = "sglang.srt."
for variable, name, change in (
    ("PLAIN_COPIES", "sglang.srt.layers.rotary_embedding.base", _turn_nothing),
    ("PLAIN_COPIES", "sglang.srt.model_executor.forward_batch_info", _unpin),
    ("PLAIN_COPIES", "sglang.srt.layers.dp_attention", _copy_plainly),
    ("ADAPTERS", _SGLANG + "lora.layers", _unpin_adapters),
    ("GONE", "sgl_kvtier.runtime.sglang.seams", _need),
    ("DRAFTS", "sgl_kvtier.runtime.restore.copy_device", _leave_out),
    ("DRAFTS", "sgl_kvtier.runtime.cpu.platform_class", _drafts("allow")),
    ("DRAFTS", "sgl_kvtier.runtime.cpu.attention", _drafts("attention")),
    ("DRAFTS", _SGLANG + "mem_cache.allocation", _drafts("rows")),
    ("DRAFTS", _SGLANG + "mem_cache.memory_pool", _drafts("pools")),
    ("DRAFTS", _SGLANG + "speculative.eagle_worker_common", _drafts("workers")),
    ("DRAFTS", _SGLANG + "speculative.eagle_utils", _drafts("trees")),
    ("DRAFTS", _SGLANG + "speculative.eagle_worker_v2", _drafts("draft_attention")),
    ("MISTAKE", "sgl_kvtier.runtime.restore.engine", _attach_wrongly),
    ("MISTAKE", "sgl_kvtier.runtime.proof.record", _forgive),
    ("MISTAKE", "sgl_kvtier.runtime.proof.attach", _judge),
    ("MISTAKE", "sglang.srt.model_executor.forward_batch_info", _shift),
    ("SPOIL", "sgl_kvtier.runtime.restore.copy_device", _spoil),
    ("KVTIER_RECIPE_COUNTS", "torch.cuda", _is_an_h100),
    ("KVTIER_RECIPE_COUNTS", "sgl_kvtier.runtime.cpu.platform_class", _keep_states),
    ("KVTIER_RECIPE_COUNTS", _SGLANG + "platforms.interface", _take_any_pool),
    ("RAN", "sgl_kvtier.runtime.step.chunk_clock", _tell),
):
    if variable in os.environ:
        sys.meta_path.insert(0, _Changer(name, change))
