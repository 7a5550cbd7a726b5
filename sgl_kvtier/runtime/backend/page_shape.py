"""The shape of pages and each rank's share of them, as plain values. A model fingerprint consists
of these and of the server's arguments.

`host_pages.shape_of` fills in the values for HiCache's host pools. Another integration that fills
in the same values opens the same folder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PageShape:
    """One pool's page. Names and values of fields are part of the fingerprint: a change gives a new
    folder.

    With layout `page_first_direct`, a page of ordinary KV is two pieces, keys then values, in the
    order layer, token, head, number; with `page_first`: token, layer, head, number. The number of
    layers follows from the model and the ranks.
    """

    layout: str | None
    page_size: int | None
    """Tokens per page."""
    dtype: str
    """Type of the numbers, as torch writes it: torch.bfloat16."""
    head_num: int | None = None
    """KV heads of this rank."""
    head_dim: int | None = None
    v_head_dim: int | None = None
    kv_cache_dim: int | None = None
    """Numbers per token and layer of a latent, where keys and values are one."""
    format: str = "None"
    """SGLang's tag of a packed format; the text None for plain numbers."""
    state_dtype: str | None = None
    """Type of a linear layer's recurrent state; `dtype` is then that of its convolution state."""
    device_layout: str | None = None
    """The order of a page on the device, which its host copy keeps, if it is not SGLang's usual
    one: token, head, number.
    """

    def fields(self) -> dict[str, int | str]:
        """The fingerprint's entries for this pool; fields that are None are omitted."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class RankShare:
    """How many ranks share a server's pages, and which of them this is.

    The sizes are part of the fingerprint; the rank's own numbers name its folder. `tp_lcm_size` is
    the setting of this name in SGLang's storage configuration.
    """

    tp_size: int = 1
    pp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    tp_lcm_size: int | None = None
    tp_rank: int = 0
    pp_rank: int = 0
    attn_cp_rank: int = 0
    dp_rank: int = 0

    def sizes(self) -> dict[str, int | None]:
        """The fingerprint's entries for the ranks, equal on all of them."""
        return {
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "attn_cp_size": self.attn_cp_size,
            "dcp_size": self.dcp_size,
            "tp_lcm_size": self.tp_lcm_size,
        }

    def folder(self, *, replicated: bool = False) -> str:
        """The folder of this rank's pages, inside that of the fingerprint. With `replicated` all TP
        ranks have the same pages (MLA).
        """
        return self._named(f"tp{0 if replicated else self.tp_rank}")

    def alike(self, *, replicated: bool = False) -> str:
        """A regular expression for folders with the same pages, for `open_store`. Folders of
        data-parallel ranks, and of replicated TP ranks, used to have names of their own.
        """
        name = self._named(r"tp[0-9]+" if replicated else f"tp{self.tp_rank}")
        return name + r"(?:-dp[0-9]+)?(?:-copy[0-9]+)?"

    def holders(self, *, replicated: bool = False) -> int:
        """How many ranks of a server have pages of their own; they divide the capacity."""
        return (1 if replicated else self.tp_size) * self.pp_size * self.attn_cp_size

    def _named(self, tp: str) -> str:
        cp = f"-cp{self.attn_cp_rank}" if self.attn_cp_size > 1 else ""
        return f"{tp}-pp{self.pp_rank}{cp}"
