"""Documents read as a manual: short, with no broken link, and nothing named that is not there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from statistics import median

import pytest
from test_results_pages import numbers

from sgl_kvtier import cli, config
from sgl_kvtier.lab import settings_page

ROOT = Path(__file__).parents[2]
MANUAL = sorted((ROOT / "docs" / "manual").glob("*.md"))
SPLIT_UP = [
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "design").glob("*.md")),
    ROOT / "docs" / "results" / "papers" / "cake.md",
    *(
        ROOT / "sgl_kvtier" / room / "README.md"
        for room in ("console", "lab", "lab/experiment", "store")
    ),
]
"""Beside the manual: documents without a long sentence, though with a higher median."""
MOST_WORDS, MEDIAN_WORDS = 30, 15
MOST_README_LINES, MOST_CONTRIBUTING_LINES = 80, 45
MOST_ENTRIES, MOST_ENTRY_WORDS = 14, 15
GENERATED = "settings.md"

PRIVATE = re.compile(
    r"\b(lanes|hands|seams|stands aside|asked back|mended|nobody|so many|asked for|gives? way)\b",
    re.I,
)
"""The source's own words for I/O threads, the runtime, SGLang's symbols, falling back, cancelling,
evicting.
"""

PACKAGE = ROOT / "sgl_kvtier"
NAMED_FILE = re.compile(
    r"(?<![\w<>/.*$~-])(?:\.\./)*(?:[\w*.-]+/)*[\w*.-]+"
    r"(?:\.(?:pyi?|json|md|[ch]|csv|svg|toml|cfg|css)(?![\w.])|/(?![\w<.*-]))"
)
"""In a span of code: a file by its name or path, or a folder, which ends with a slash."""
NOT_OURS = (
    "kvtier.json",
    "config.json",  # a store's folder and a model's have one
    "swe_tools.json",
    "docs/results/data/NAME.json",
    ".gpu/",
    "srt/utils/auth.py",  # SGLang's
    "mem_cache/utils.py",
    "linux/io_uring.h",
)
"""What users, servers, traces, SGLang and Linux have."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
WORD = re.compile(r"\w")


def documents() -> list[Path]:
    """Every markdown file that git knows, or all below the root where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = [ROOT / name for name in listed.stdout.split()]
    return [path for path in found if path.is_file()] or sorted(ROOT.glob("*.md")) + sorted(
        ROOT.glob("docs/**/*.md")
    )


def without_code(text: str) -> str:
    """The text less its blocks of code and its comments."""
    return re.sub(
        r"<!--.*?-->", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M), flags=re.S
    )


def sentences(text: str) -> list[str]:
    """The sentences of a markdown text without headings, tables and code. A code span is one word;
    a list item begins a sentence.
    """
    lines = [line for line in without_code(text).splitlines() if not line.lstrip().startswith("|")]
    starts = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
    prose = "\n".join(
        "\n\n" + starts.sub("", line)
        if starts.match(line)
        else ""
        if line.startswith("#")
        else line
        for line in lines
    )
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`\n]+`", "code", prose))
    found = (
        one
        for part in re.split(r"\n\s*\n", plain)
        for one in re.split(r"(?<=[.!?])[*_)\"]*\s+", part)
    )
    return [" ".join(one.split()) for one in found if WORD.search(one)]


def words(sentence: str) -> int:
    return sum(1 for word in sentence.split() if WORD.search(word))


def anchors(text: str) -> set[str]:
    """The names by which headings are linked to, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", without_code(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(document: Path) -> list[str]:
    """Links of a document that lead to no file, or to no heading in it."""
    wrong = []
    for link in LINK.findall(without_code(document.read_text("utf-8"))):
        target, _, heading = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = document.parent / target if target else document
        if not found.exists() or (
            heading and found.suffix == ".md" and heading not in anchors(found.read_text("utf-8"))
        ):
            wrong.append(link)
    return wrong


def test_the_readme_and_the_rules_of_contributing_are_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_README_LINES
    assert (
        len((ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()) <= MOST_CONTRIBUTING_LINES
    )


def test_every_figure_of_the_readme_stands_on_the_page_it_links_to():
    rows = re.findall(
        r"^\| \[[^\]]+\]\((docs/results/\S+\.md)\) \|(.*)\|$",
        (ROOT / "README.md").read_text("utf-8"),
        flags=re.M,
    )
    assert len(rows) >= 5
    for page, said in rows:
        assert set(numbers(said)) - set(numbers((ROOT / page).read_text("utf-8"))) == set(), page


def test_no_link_leads_nowhere():
    assert {
        str(path.relative_to(ROOT)): wrong for path in documents() if (wrong := broken(path))
    } == {}


def test_what_docstrings_and_scripts_name_in_docs_is_there():
    listed = subprocess.run(
        ["git", "grep", "-hoE", r"\bdocs/[a-z0-9/_-]+\.md\b"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(name for name in set(listed.stdout.split()) if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("document", [ROOT / "README.md", *MANUAL], ids=lambda path: path.name)
def test_sentences_are_short(document: Path):
    lengths = {one: words(one) for one in sentences(document.read_text("utf-8"))}
    assert [one for one, many in lengths.items() if many > MOST_WORDS] == []
    assert median(lengths.values()) <= MEDIAN_WORDS


@pytest.mark.parametrize("document", SPLIT_UP, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_long(document: Path):
    found = sentences(document.read_text("utf-8"))
    assert [one for one in found if words(one) > MOST_WORDS] == []


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "CHANGELOG.md", *MANUAL], ids=lambda path: path.name
)
def test_a_reader_needs_no_words_of_the_source(document: Path):
    text = re.sub(r"`[^`\n]+`", "", without_code(document.read_text("utf-8")))
    assert PRIVATE.findall(text) == []


def test_an_entry_of_the_changelog_is_one_short_line():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.split(r"^## ", text, flags=re.M)[1:]
    assert len(versions) >= 1
    for version in versions:
        entries = [line for line in version.splitlines() if line.startswith("- ")]
        assert 0 < len(entries) <= MOST_ENTRIES
        assert [entry for entry in entries if words(entry) > MOST_ENTRY_WORDS] == []
        assert not [line for line in version.splitlines() if line.startswith("  ")], (
            "an entry is one line"
        )


def test_the_page_of_settings_is_what_the_code_gives():
    assert (ROOT / "docs" / "manual" / GENERATED).read_text("utf-8") == settings_page.page(), (
        f"write it again: python -m {settings_page.__name__} > docs/manual/{GENERATED}"
    )


def test_commands_that_documents_name_are_there():
    named = {
        (path.name, word)
        for path in documents()
        for code in re.findall(
            r"^ *```.*?^ *```|`[^`\n]+`", path.read_text("utf-8"), flags=re.S | re.M
        )
        for word in re.findall(r"(?:^|[\s`/])kvtier ([a-z]+)\b(?![.:=])", code)
    }
    assert len(named) > 20
    words = {name.split()[0] for name in cli.COMMANDS}
    assert sorted((name, word) for name, word in named if word not in words) == []


def test_scripts_and_modules_that_documents_name_are_there():
    text = "\n".join(path.read_text("utf-8") for path in documents())
    scripts = set(re.findall(r"(?<![\w/.])scripts/[\w-]+", text))
    modules = set(re.findall(r"-m (sgl_kvtier[\w.]*)", text))
    assert {"scripts/test", "scripts/compare"} <= scripts and modules
    assert sorted(name for name in scripts if not (ROOT / name).is_file()) == []
    files = {name: ROOT / (name.replace(".", "/") + ".py") for name in modules}
    assert sorted(name for name, file in files.items() if not file.is_file()) == []


def files_named(text: str) -> list[str]:
    """Files and folders that a text names in spans of code."""
    spans = re.findall(r"`([^`\n]+)`", without_code(text))
    return [name for span in spans for name in NAMED_FILE.findall(span)]


def is_there(name: str, document: Path) -> bool:
    """Whether a document may name it: by a path from its own folder, the root or the package, or,
    without a folder, anywhere below the package's part that the document describes; `docs` may
    name files of the package and of the tests.
    """
    if name in NOT_OURS:
        return True
    if name.startswith("../"):
        return (document.parent / name).exists()
    if any(True for base in (document.parent, ROOT, PACKAGE) for _ in base.glob(name)):
        return True
    wide = [document.parent] if PACKAGE in document.parents else [PACKAGE, ROOT / "tests"]
    return "/" not in name and any(True for base in wide for _ in base.rglob(name))


def unknown_settings(text: str) -> list[str]:
    """Settings that a text names in code, by their section or as a key of JSON, and that kvtier.json
    does not have.
    """
    sections = ("store", "policy", *config.LAB_SECTIONS)
    known = {row["key"] for row in config.describe_config(sections)} | {*config.LAB_SECTIONS}
    code = "\n".join(re.findall(r"^ *```.*?^ *```|`[^`\n]+`", text, flags=re.S | re.M))
    named = re.findall(
        r"(?<![\w./-])(?:policy|store|lab)\.[a-z_]+(?:\.[a-z_]+)?(?![\w/]|\.py)", code
    )
    for section, keys in re.findall(r'"(policy|store)":\s*\{([^{}]*)\}', code):
        named += [f"{section}.{key}" for key in re.findall(r'"(\w+)"\s*:', keys)]
    return [name for name in named if name not in known]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_settings_that_a_document_names_are_there(document: Path):
    text = document.read_text("utf-8")
    assert sorted({name for name in files_named(text) if not is_there(name, document)}) == []
    assert unknown_settings(text) == []


def test_a_file_and_a_setting_that_are_gone_are_noticed():
    text = "`lab/rules.py` or `none.py`: `sim/*_x.json`, `a = b/c` and `lost/`"
    assert files_named(text) == ["lab/rules.py", "none.py", "sim/*_x.json", "lost/"]
    page = ROOT / "docs" / "results" / "page.md"
    assert [name for name in files_named(text) if not is_there(name, page)] == [
        "none.py", "sim/*_x.json", "lost/"
    ]  # fmt: skip
    assert is_there("failing_env.py", page)
    assert not is_there("failing_env.py", PACKAGE / "store" / "README.md")
    assert unknown_settings("`policy.rules`, `lab.throttle.read_gbps`, `policy/rules.py`") == []
    assert unknown_settings("`policy.rule = cake`, policy.no") == ["policy.rule"]
    assert unknown_settings('```json\n{"policy": {"io_order": "x"}}\n```') == ["policy.io_order"]


def test_a_long_sentence_and_a_broken_link_are_noticed(tmp_path: Path):
    text = "# Head\n\nOne `code of words` two.\nThree, [four](x.md).\n\n- five six\n- seven\n\n```\nnot this\n```\n\n| nor | this |\n"
    assert sentences(text) == ["One code two.", "Three, four.", "five six", "seven"]
    assert words("One, code - two.") == 3
    page = tmp_path / "page.md"
    page.write_text(
        "# Why not?\n\n[a](page.md#why-not) [b](#why-not) [c](#why) [d](none.md) [e](https://x.org)\n"
    )
    assert broken(page) == ["#why", "none.md"]
