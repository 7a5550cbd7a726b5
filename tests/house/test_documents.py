"""Documents: links lead somewhere, and commands, scripts, settings and the page of settings are
those of the code.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from sgl_kvtier import cli, config
from sgl_kvtier.launch import tier_flags
from sgl_kvtier.runtime.tools import doctor

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


# One launch line: README, manual, examples, `kvtier serve` and `kvtier doctor` name the same
# flags.


LINE = tier_flags("@kvtier.json")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "manual").glob("*.md"))]


def flags_in(text: str) -> list[list[str]]:
    """The words of every launch line with this tier in a text's blocks of code, from the first of
    our flags on.
    """
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if "--hicache-storage-backend kvtier" in line:
                words = shlex.split(line, comments=True)
                found.append(words[words.index(LINE[0]) :])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_have_the_launch_line(page):
    assert all(words == LINE for words in flags_in(page.read_text("utf-8")))


def test_readme_and_manual_have_one_each():
    assert {page.name for page in PAGES if flags_in(page.read_text("utf-8"))} >= {
        "README.md",
        "store.md",
    }


def test_serve_prints_the_launch_line(tmp_path, capsys):
    config = tmp_path / "kvtier.json"
    config.write_text(json.dumps({"store": {"path": str(tmp_path / "pages")}}))
    assert cli.main(["serve", "m", "--config", str(config), "--device", "cuda", "--print"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--model-path") :] == [
        *("--model-path", "m", *tier_flags(f"@{config}")),
        *("--enable-metrics", "--enable-cache-report", "--port", "30000"),
    ]


def test_the_example_starts_a_server_with_the_launch_line(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "examples" / "serve.sh", "m", "kvtier.json", "--tp", "2"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [
        *("-m", "sglang.launch_server", "--model-path", "m", *LINE),
        *("--enable-metrics", "--enable-cache-report", "--tp", "2"),
    ]


def test_doctor_ends_with_the_launch_line():
    last = doctor._launch_line("kvtier.json", None).splitlines()[-1]
    assert shlex.split(last) == LINE
