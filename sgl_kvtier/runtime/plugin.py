"""What SGLang runs in each of its processes when this package is installed (entry point group sglang.srt.plugins)."""

from __future__ import annotations


def register() -> None:
    """Widens SGLang's command line. Import-light: everything heavy waits until it is used."""
    from sglang.srt.platforms import current_platform

    if type(current_platform).__module__.startswith("sgl_kvtier."):
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

        from sgl_kvtier.runtime.cpu.platform import ATTENTION

        if ATTENTION not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([ATTENTION])
