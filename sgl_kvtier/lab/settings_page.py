"""docs/manual/settings.md from the settings: python -m sgl_kvtier.lab.settings_page >
docs/manual/settings.md
"""

from __future__ import annotations

from sgl_kvtier.config import KVTierConfig, describe_config

_HEAD = """# Settings

All settings of `kvtier.json`. A test compares this page with the code, and
`kvtier doctor --settings` prints the same rows. The simulator reads the same file.
A section `lab` slows the store or makes it fail on purpose: only the laboratory writes it
([its README](../../sgl_kvtier/lab/README.md)).
"""
_COLUMNS = "| Setting | Default | Allowed | Meaning |\n| :--- | :--- | :--- | :--- |\n"


def page() -> str:
    """The whole page as markdown: one table for each section of kvtier.json."""
    rows = describe_config()
    parts = [_HEAD]
    for section in dict.fromkeys(row["key"].partition(".")[0] for row in rows):
        parts.append(f"\n## `{section}`\n\n{_summary(section)}\n\n{_COLUMNS}")
        parts += [_row(row) for row in rows if row["key"].startswith(f"{section}.")]
    return "".join(parts)


def _summary(section: str) -> str:
    return " ".join(str(type(getattr(KVTierConfig(), section)).__doc__).split())


def _row(row: dict[str, str]) -> str:
    name = row["key"].partition(".")[2]
    return f"| `{name}` | `{row['default']}` | {row['allowed']} | {row['meaning']} |\n"


if __name__ == "__main__":
    print(page(), end="")
