"""Documents: links lead somewhere, and commands, scripts, settings and the page of settings are
those of the code.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path

from sgl_kvtier import cli, config

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", flags=re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split()


def documents() -> list[Path]:
    """Every markdown file that git knows, or those of the root and `docs` where there is no git."""
    found = [ROOT / name for name in git("ls-files", "*.md")]
    return [path for path in found if path.is_file()] or [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
    ]


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def anchors(text: str) -> set[str]:
    """The names by which headings are linked to, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", without_blocks(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(document: Path) -> list[str]:
    """Links of a document that lead to no file, or to no heading in it."""
    wrong = []
    for link in LINK.findall(without_blocks(document.read_text("utf-8"))):
        target, _, heading = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = document.parent / target if target else document
        if not found.exists() or (
            heading and found.suffix == ".md" and heading not in anchors(found.read_text("utf-8"))
        ):
            wrong.append(link)
    return wrong


def code_of(document: Path) -> str:
    return "\n".join(CODE.findall(document.read_text("utf-8")))


def test_no_link_leads_nowhere():
    assert {
        str(path.relative_to(ROOT)): wrong for path in documents() if (wrong := broken(path))
    } == {}


def test_a_broken_link_is_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Why not?\n\n[a](page.md#why-not) [b](#why-not) [c](#why) [d](none.md) [e](https://x.org)\n"
    )
    assert broken(page) == ["#why", "none.md"]


def test_pages_that_messages_and_docstrings_name_are_there():
    # With a colon before it, it is a page of an older commit.
    named = set(git("grep", "-hoE", r":?\bdocs/[a-z0-9/_-]+\.md\b"))
    assert [name for name in sorted(named) if name[0] != ":" and not (ROOT / name).exists()] == []


def test_commands_and_scripts_that_documents_name_are_there():
    words = {name.split()[0] for name in cli.COMMANDS}
    missing = set()
    for path in documents():
        code = code_of(path)
        commands = set(re.findall(r"(?:^|[\s`/])kvtier ([a-z]+)\b(?![.:=])", code)) - words
        scripts = set(re.findall(r"(?<![\w/.])scripts/[\w-]+", code))
        modules = set(re.findall(r"-m (sgl_kvtier[\w.]*)", code))
        missing |= {(path.name, f"kvtier {name}") for name in commands}
        missing |= {(path.name, name) for name in scripts if not (ROOT / name).is_file()}
        missing |= {
            (path.name, name)
            for name in modules
            if not (ROOT / (name.replace(".", "/") + ".py")).is_file()
        }
    assert sorted(missing) == []


def test_settings_that_documents_name_are_there():
    sections = ("store", "policy", *config.LAB_SECTIONS)
    known = {row["key"] for row in config.describe_config(sections)} | {*config.LAB_SECTIONS}
    missing = set()
    for path in documents():
        code = code_of(path)
        named = re.findall(
            r"(?<![\w./-])(?:policy|store|lab)\.[a-z_]+(?:\.[a-z_]+)?(?![\w/]|\.py)", code
        )
        for section, keys in re.findall(r'"(policy|store)":\s*\{([^{}]*)\}', code):
            named += [f"{section}.{key}" for key in re.findall(r'"(\w+)"\s*:', keys)]
        missing |= {(path.name, name) for name in named if name not in known}
    assert sorted(missing) == []


def test_the_table_of_releases_is_made_from_what_was_found_of_them():
    results = [json.loads(path.read_text()) for path in (ROOT / "docs/manual/releases").iterdir()]
    made = runpy.run_path(str(ROOT / "scripts" / "check-release"))["table"](results)
    assert made in (ROOT / "docs/manual/install.md").read_text(), (
        "scripts/check-release --table docs/manual/releases/*.json prints it"
    )


def test_the_page_of_settings_has_the_settings_of_the_code():
    """A line that is missing there is shown as it has to stand there."""
    wanted: list[str] = []
    for row in config.describe_config():
        section, _, name = row["key"].partition(".")
        if f"## `{section}`" not in wanted:
            wanted.append(f"## `{section}`")
        wanted.append(f"| `{name}` | `{row['default']}` | {row['allowed']} | {row['meaning']} |")
    page = (ROOT / "docs" / "manual" / "settings.md").read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith(("## ", "| `"))] == wanted
