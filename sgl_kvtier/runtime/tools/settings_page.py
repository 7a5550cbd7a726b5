"""docs/manual/settings.md from the settings: python -m sgl_kvtier.runtime.tools.settings_page >
docs/manual/settings.md
"""

from __future__ import annotations

import json
from dataclasses import fields

from sgl_kvtier.config import KVTierConfig, describe_config
from sgl_kvtier.runtime.settings import IN_SERVER

_HEAD = """# Settings

All settings of `kvtier.json`. A test compares this page with the code. `kvtier doctor --settings` prints the same rows.
The simulator reads the same file; where its default differs from a server's, both are given.
"""
_COLUMNS = "| Setting | Default | Allowed | Meaning |\n| :--- | :--- | :--- | :--- |\n"


def page() -> str:
    """The whole page as markdown: one table for each section of kvtier.json."""
    rows = describe_config()
    parts = [_HEAD]
    for section in fields(KVTierConfig):
        parts.append(f"\n## `{section.name}`\n\n{_summary(section.name)}\n\n{_COLUMNS}")
        parts += [_row(row) for row in rows if row["key"].startswith(f"{section.name}.")]
    return "".join(parts)


def _summary(section: str) -> str:
    return " ".join(str(type(getattr(KVTierConfig(), section)).__doc__).split())


def _row(row: dict[str, str]) -> str:
    section, _, name = row["key"].partition(".")
    default = f"`{row['default']}`"
    if section == "policy" and name in IN_SERVER:
        default = f"`{json.dumps(IN_SERVER[name])}` in a server, {default} in the simulator"
    return f"| `{name}` | {default} | {row['allowed']} | {row['meaning']} |\n"


if __name__ == "__main__":
    print(page(), end="")
