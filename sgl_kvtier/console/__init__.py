"""Output of results on the terminal and as JSON: tables, documents, progress."""

from sgl_kvtier.console.document import check_target, envelope, to_json, write_json, write_text
from sgl_kvtier.console.environment import environment
from sgl_kvtier.console.progress import Progress, format_duration
from sgl_kvtier.console.show import print_statement, print_table, progress
from sgl_kvtier.console.table import MISSING, Column, Table, format_share, format_value, to_markdown
from sgl_kvtier.sizes import format_bytes

__all__ = [
    "MISSING",
    "Column",
    "Progress",
    "Table",
    "check_target",
    "envelope",
    "environment",
    "format_bytes",
    "format_duration",
    "format_share",
    "format_value",
    "print_statement",
    "print_table",
    "progress",
    "to_json",
    "to_markdown",
    "write_json",
    "write_text",
]
