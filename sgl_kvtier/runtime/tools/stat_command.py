"""`kvtier stat`: a store's content, and the prefill and link speeds that servers learned and keep
in it.
"""

from __future__ import annotations

from pathlib import Path

from sgl_kvtier.console import format_bytes
from sgl_kvtier.outside import shown
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.store.tools.commands import Learned, Stat


def learned(folder: str) -> Learned | None:
    """The profile in a fingerprint's folder; None if there is none, or if it cannot be read."""
    profile = cost_profile.read(Path(folder) / cost_profile.NAME)
    if profile is None:
        return None
    prefill = profile.prefill
    device = shown(profile.conditions.get("device")).strip('"')
    rates = [f"{link} {format_bytes(int(rate))}/s" for link, rate in profile.links.items()]
    return Learned(
        {
            "conditions": profile.conditions,
            "prefill": prefill,
            "links_bytes_per_s": profile.links,
            "restore": profile.restore,
            "chunks": profile.chunks,
            "transfers": profile.transfers,
            "written_s": profile.written,
        },
        f"learned from {profile.chunks} chunks and {sum(profile.transfers.values())} transfers on "
        f"{device}: a chunk takes {1e3 * prefill['fixed_s']:.2f} "
        f"ms, {1e6 * prefill['per_token_s']:.2f} us per token, and "
        f"{1e9 * prefill['per_token_position_s']:.3f} ns per token and token before it; links: "
        f"{', '.join(rates) or 'none measured yet'}",
    )


stat = Stat(learned)
