"""TierKV's experiments as this simulator sets them up: servers, loads and printed tables, from json
and csv with sources.

Two experiments hide behind one name. The *sweep* (Tables 5, 6, 7, Fig. 3) lets the batch grow.
Throughput times TPOT of its printed cells is about 26 requests while nothing stalls and up to 246
when it does. The *column* experiment (Table 4, Figs 4 to 6) keeps "batch size 32" of appendix A.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sgl_kvtier.lab.papers.tierkv.load import Lengths, Load
from sgl_kvtier.lab.papers.tierkv.machine import Server

COEFFICIENTS = Path(__file__).with_name("coefficients.json")
PUBLISHED = Path(__file__).parents[1] / "published"

POLICIES = ("LRU", "Freq", "Attn-Pref.", "Static", "Prefetch", "Oracle")
"""In the order and by the names of Tables 5 to 7."""

COLUMN_POLICIES: Mapping[str, str] = {
    "LRU": "LRU",
    "Frequency": "Freq",
    "Static-Tiering": "Static",
    "TierKV-Prefetch": "Prefetch",
    "Oracle": "Oracle",
}
"""Table 4's names for them."""

LEVELS = (1.0, 1.5, 2.0, 3.0, 5.0)
"""Oversubscription: the HBM of the sweep is the paper's 80 GB over this. The paper also has the
levels between.
"""

PRINTED_LEVELS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
"""All of Tables 5 and 6."""

_SECTIONS = ("printed", "models", "assumed", "fitted", "fitted_on")
_SATURATING = 1e9
"""Tokens per second asked for where the batch is to be full all the time."""


@dataclass(frozen=True)
class Setup:
    """Everything a run needs; the sections of the json file under their own names."""

    printed: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    assumed: Mapping[str, Any]
    fitted: Mapping[str, Any]
    fitted_on: Mapping[str, Sequence[Sequence[str]]]

    def is_fitted(self, part: str, table: str, row: str, column: str) -> bool:
        """Whether a part of the fitted quantities was solved from this printed cell: "load" is the
        sweep's, "columns" Table 4's, "shares" the accounting's.
        """
        return [table, row, column] in self.fitted_on[part]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Three, as in the paper; which ones it does not say."""
        return tuple(self.assumed["seeds"])

    def kv_bytes(self, model: str) -> int:
        """Keys and values of one token at 16 bit."""
        shape = self.models[model]
        return int(2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * 2)

    def sweep_server(self, level: float) -> Server:
        """The 7B server of Tables 5 to 7 at one oversubscription."""
        return self._server(
            "7B",
            hbm_bytes=self.printed["hbm_bytes"] / level,
            most_running=self.printed["most_running"],
            step_s=self.fitted["step_s"],
            step_s_per_request=self.fitted["step_s_per_request"],
        )

    def sweep_load(self) -> Load:
        """The arrivals of Tables 5 to 7: the same at every level, as the printed 6473 tokens/s at
        1.0x are.
        """
        return Load(
            requests=self.fitted["requests"],
            tokens_per_s=self.fitted["tokens_per_s"],
            contexts=lengths(self.printed["contexts"]),
            generated=lengths(self.fitted["generated"]),
        )

    def column_server(self, model: str) -> Server:
        """The server of one column of Table 4, with the HBM of the sweep at 3x."""
        step_s = self.column_step_s(model)
        growth = self.fitted["step_s_per_request"] / self.printed["step_s"]["7B"]
        return self._server(
            model,
            hbm_bytes=self.printed["hbm_bytes"] / 3.0,
            most_running=self.printed["batch"],
            # Appendix A's step times are those at batch size 32.
            step_s=step_s * (1 - self.printed["batch"] * growth),
            step_s_per_request=step_s * growth,
        )

    def column_step_s(self, model: str) -> float:
        """Compute time of a step at batch size 32: printed in appendix A, or fitted on Table 4's
        Oracle.
        """
        return float(self.printed["step_s"].get(model) or self.fitted["column_step_s"][model])

    def column_load(self) -> Load:
        """A queue that never empties."""
        return Load(
            requests=self.assumed["column_requests"],
            tokens_per_s=_SATURATING,
            contexts=lengths(self.printed["contexts"]),
            generated=lengths(self.fitted["column_generated"]),
        )

    def _server(self, model: str, **changes: Any) -> Server:
        printed = self.printed
        return Server(
            **{
                "kv_bytes_per_token": self.kv_bytes(model),
                "dram_bytes": printed["dram_bytes"],
                "link_bytes_per_s": printed["link_bytes_per_s"],
                "link_latency_s": printed["link_latency_s"],
                "schedule_s": printed["schedule_s"],
                "block_tokens": printed["block_tokens"],
                **changes,
            }
        )


@cache
def load_setup() -> Setup:
    """The contents of coefficients.json."""
    data = json.loads(COEFFICIENTS.read_text("utf-8"))
    return Setup(**{name: data[name] for name in _SECTIONS})


def lengths(parts: Any) -> Lengths:
    """A mixture from its json form, [[share, lowest, highest], ...]."""
    return Lengths(tuple((float(share), int(low), int(high)) for share, low, high in parts))


@cache
def printed_table(table: str) -> dict[tuple[str, str], float]:
    """Tables 4 to 7 as printed: (row, column) -> number. Rows of Tables 5 to 7 are levels,
    "1.5".
    """
    with (PUBLISHED / f"tierkv_table{table}.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    return {
        (row[0], column): float(cell)
        for row in rows
        for column, cell in zip(header[1:], row[1:], strict=True)
    }


@cache
def printed_figure(table: str) -> dict[tuple[str, str], float]:
    """Numbers the text gives for a figure ("fig4"): (row, column) -> number."""
    with (PUBLISHED / "tierkv_text.csv").open(newline="", encoding="utf-8") as file:
        return {
            (row["row"], row["column"]): float(row["value"])
            for row in csv.DictReader(file)
            if row["table"] == table
        }
