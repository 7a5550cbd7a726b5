"""Rows and results for people and for programs: tables, JSON, HTML with plots, statistics and progress."""

from sgl_kvtier.report.compare import compare_tables, losing_cells
from sgl_kvtier.report.compare_html import compare_html
from sgl_kvtier.report.document import check_target, envelope, to_json, write_json, write_text
from sgl_kvtier.report.environment import environment
from sgl_kvtier.report.progress import Progress, format_duration, progress
from sgl_kvtier.report.stats import pair_ratios, percentile, summary
from sgl_kvtier.report.table import (
    MISSING,
    Column,
    Table,
    format_share,
    format_value,
    print_table,
    to_markdown,
)
from sgl_kvtier.sizes import format_bytes

__all__ = [
    "MISSING",
    "Column",
    "Progress",
    "Table",
    "check_target",
    "compare_html",
    "compare_tables",
    "envelope",
    "environment",
    "format_bytes",
    "format_duration",
    "format_share",
    "format_value",
    "losing_cells",
    "pair_ratios",
    "percentile",
    "print_table",
    "progress",
    "summary",
    "to_json",
    "to_markdown",
    "write_json",
    "write_text",
]
