"""Every process of a recipe's server: speculative decoding runs on the CPU
(`tests/runtime/changed_site`), and the GPU that SGLang asks for, before it chooses kernels, is
an H100.
"""

import os
import runpy
import sys
from pathlib import Path

_THERE = Path(__file__).resolve().parents[2] / "runtime" / "changed_site"
sys.path.append(str(_THERE))
_Changer = runpy.run_path(str(_THERE / "sitecustomize.py"))["_Changer"]


def _is_an_h100(module):
    module.get_device_capability = lambda device=None: (9, 0)


def _keeps_states(module):
    module.CpuPlatform.support_mamba_cache_extra_buffer = lambda self: True


def _takes_any_pool(module):
    module.reject_out_of_tree_path = lambda platform, *, subsystem: None


if os.environ.get("KVTIER_CPU_DEVICE", "").startswith("recipe_device"):
    for name, change in (
        ("torch.cuda", _is_an_h100),
        ("sgl_kvtier.runtime.cpu.platform_class", _keeps_states),
        ("sglang.srt.platforms.interface", _takes_any_pool),
    ):
        sys.meta_path.insert(0, _Changer(name, change))
