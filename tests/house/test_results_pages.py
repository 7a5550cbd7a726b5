"""Results pages: one question each, short, and every figure on them follows from the data beside
them.

`docs/results/data/NAME.json` holds the full grids of a page, each with the commit and the command
that gave it. `tables` says which cells the page shows, `claims` which figures stand in its text;
both are compared here. A grid that says `generated` is a table which `scripts/reproduce` writes
into the page: its text cannot become stale. The files of papers have the claims of papers/NAME.md;
`theirs` are figures that the paper prints or that were chosen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DATA = RESULTS / "data"
PAGES = sorted(RESULTS.glob("*.md"))
INDEX = RESULTS / "README.md"
WITHOUT_DATA = ("README.md", "attacks.md")
QUESTIONS = [page for page in PAGES if page.name not in WITHOUT_DATA]
PAPERS = sorted((RESULTS / "papers").glob("*.md"))
SOURCES = sorted(DATA.glob("*.json"))
MOST_LINES, MOST_COLUMNS, MOST_CHARACTERS, MOST_LIMITS = 60, 8, 400, 5

NUMBER = re.compile(r"(?<![\w.,/])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w/]|,\d|\.\d)")
HASH = re.compile(r"(?<!\w)(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}(?!\w)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
REDUCED = {"median": median, "min": min, "max": max, "sum": sum, "count": len}

Record = Mapping[str, Any]


def written(page: Path) -> str:
    """The text of a page without what a command writes into it."""
    return re.sub(
        r"<!-- (\S+): begin -->.*?<!-- \1: end -->", "", page.read_text("utf-8"), flags=re.S
    )


def cells(line: str) -> list[str]:
    """The cells of a line of a table, less what makes them bold."""
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [
        cell.strip().replace("**", "").replace("\\*", "*") for cell in re.split(r"(?<!\\)\|", inner)
    ]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page, each with its heads first."""
    found = re.findall(r"(?:^\|.*\|\n)+", text + "\n", flags=re.M)
    return [[cells(line) for at, line in enumerate(one.splitlines()) if at != 1] for one in found]


def numbers(text: str) -> list[str]:
    """The figures of a text; names such as `2k` and `p50`, ratios such as 1/4 and code have none."""
    return NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text))


def line_of(page: Path, name: str) -> str:
    """The line of a page that begins with a name in bold."""
    return next(
        (line for line in page.read_text("utf-8").splitlines() if line.startswith(f"**{name}.**")),
        "",
    )


def same(shown: str, value: object) -> bool:
    """Whether a figure as printed is that value, rounded to the places printed."""
    if isinstance(value, str):
        return shown == value
    places = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - float(value)) <= 0.5 * 10**-places + 1e-9  # type: ignore[arg-type]


def plain(cell: str) -> object:
    """What a cell of a generated table says: its number, also of GiB, or else its text."""
    found = re.fullmatch(r"(-?[\d,]+(?:\.\d+)?)(?: GiB)?", cell)
    return float(found[1].replace(",", "")) if found else None if cell == "–" else cell


def records(source: Record, names: Sequence[str]) -> Iterator[Record]:
    """The rows of some of a source's grids, by column."""
    for name in names:
        grid = source["grids"][name]
        if "same_as" in grid:
            file, other = grid["same_as"]
            yield from records(json.loads((DATA / file).read_text("utf-8")), [other])
        elif "generated" in grid:
            text = (RESULTS / source["page"]).read_text("utf-8")
            heads, *rows = tables(text[text.index(f"**{grid['generated']}") :])[0]
            yield from (dict(zip(heads, map(plain, row), strict=True)) for row in rows)
        else:
            yield from (dict(zip(grid["columns"], row, strict=True)) for row in grid["rows"])


def listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def picked(rows: Sequence[Record], column: object, where: Record) -> list[Any]:
    """The cells of some columns in the rows that `where` names; a cell that is not known is left
    out.
    """
    kept = [
        row for row in rows if all(row.get(key) in listed(asked) for key, asked in where.items())
    ]
    return [row[name] for row in kept for name in listed(column) if row.get(name) is not None]


def figures(rows: Sequence[Record], asked: Record) -> list[Any]:
    """The values a claim or a cell of a page stands for."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in asked.get("each", ())), []).append(row)
    found = []
    for group in groups.values():
        where = asked.get("where", {})
        values = picked(group, asked["column"], where)
        for sign in ("over", "minus"):
            if sign in asked:
                other = asked[sign]
                beside = picked(
                    group, other.get("column", asked["column"]), {**where, **other.get("where", {})}
                )
                beside = beside * len(values) if len(beside) == 1 else beside
                values = [
                    a / b if sign == "over" else a - b for a, b in zip(values, beside, strict=False)
                ]
        found += values
    if "as" in asked:
        found = [
            {"less": 100 - 100 * value, "more": 100 * value - 100, "percent": 100 * value}[
                asked["as"]
            ]
            for value in found
        ]
    if "at_most" in asked:
        found = [value for value in found if value <= asked["at_most"]]
    return [REDUCED[how](found) for how in listed(asked["how"])] if "how" in asked else found


def expected(source: Record, table: Record) -> Iterator[list[tuple[str, list[Any]]]]:
    """Each row of a page's table: its heads, and what has to stand below them."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in records(source, table["grids"]):
        groups.setdefault(tuple(row[key] for key in table["by"]), []).append(row)
    for key, rows in groups.items():
        known = dict(zip(table["by"], key, strict=True))
        yield [
            (one["shown"], [known[name]] if (name := one.get("column", one["shown"])) in table["by"] else
             figures(rows, {"column": name, **one}))
            for one in table["columns"]
        ]  # fmt: skip


def agrees(cell: str, values: Sequence[Any]) -> bool:
    if not values:
        return cell == "–"
    shown = [cell] if isinstance(values[0], str) else numbers(cell)
    return len(shown) == len(values) and all(map(same, shown, values))


def source_of(page: Path) -> Record:
    return json.loads((DATA / f"{page.stem}.json").read_text("utf-8"))


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("page", [page for page in PAGES if page != INDEX], ids=lambda p: p.name)
def test_a_page_shows_a_plot_or_the_index_says_why_not(page: Path) -> None:
    without = re.search(r"^No plot: (.*)$", INDEX.read_text("utf-8"), flags=re.M)
    assert without is not None
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", page.read_text("utf-8"))
    assert all((RESULTS / name).is_file() for name in shown)
    assert bool(shown) != (f"`{page.stem}`" in without[1])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_data_that_describe_a_plot_have_it_on_their_page(source: Path) -> None:
    if "plot" in json.loads(source.read_text("utf-8")):
        page = (RESULTS / f"{source.stem}.md").read_text("utf-8")
        assert f"]({source.stem}.svg)" in page


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_short_enough_to_be_read(page):
    text = page.read_text("utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert max(len(heads) for heads, *_ in [*tables(text), [[]]]) <= MOST_COLUMNS
    assert max(map(len, text.splitlines())) <= MOST_CHARACTERS


@pytest.mark.parametrize("page", QUESTIONS, ids=name)
def test_a_page_asks_one_question_answers_it_and_says_where_it_does_not_hold(page):
    assert line_of(page, "Question").endswith("?")
    assert line_of(page, "Answer")
    limits = page.read_text("utf-8").split("**Limits**\n")[1]
    assert 1 <= len(re.findall(r"^- ", limits, flags=re.M)) <= MOST_LIMITS


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_one_state_at_most(page):
    assert len(set(HASH.findall(page.read_text("utf-8")))) <= 1


@pytest.mark.parametrize("page", [*PAGES, *PAPERS], ids=name)
def test_every_file_a_page_links_exists(page):
    asked = [target for target in LINK.findall(page.read_text("utf-8")) if "://" not in target]
    assert [target for target in asked if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", QUESTIONS, ids=name)
def test_a_tables_cells_are_those_of_the_data(page):
    source = source_of(page)
    shown = tables(written(page))
    assert len(shown) == len(source["tables"])
    for (heads, *rows), table in zip(shown, source["tables"], strict=True):
        wanted = list(expected(source, table))
        assert heads == [one["shown"] for one in table["columns"]] and len(rows) == len(wanted)
        for row, right in zip(rows, wanted, strict=True):
            wrong = [
                (head, cell, v)
                for cell, (head, v) in zip(row, right, strict=True)
                if not agrees(cell, v)
            ]
            assert not wrong, row


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_claim_stands_on_its_page_and_follows_from_the_data(path):
    source = json.loads(path.read_text("utf-8"))
    text = re.sub(r"\s+", " ", written(RESULTS / source["page"]))
    for claim in source["claims"]:
        values = figures(list(records(source, claim["grids"])), claim)
        assert values and agrees(claim["shown"], values), (claim["shown"], values)
        assert claim["shown"] in text


@pytest.mark.parametrize("page", QUESTIONS, ids=name)
def test_every_figure_of_an_answer_is_a_claim(page):
    claimed = {number for claim in source_of(page)["claims"] for number in numbers(claim["shown"])}
    assert set(numbers(line_of(page, "Answer"))) <= claimed


@pytest.mark.parametrize("page", QUESTIONS, ids=name)
def test_every_broken_figure_of_the_limits_is_in_the_data(page):
    source = source_of(page)
    known = {number for claim in source["claims"] for number in numbers(claim["shown"])}
    values = [
        v
        for row in records(source, list(source["grids"]))
        for v in row.values()
        if isinstance(v, int | float)
    ]
    limits = written(page).split("**Limits**\n")[1].replace("0.5.23", "")
    broken = [number for number in numbers(limits) if "." in number and number not in known]
    assert [number for number in broken if not any(same(number, value) for value in values)] == []


@pytest.mark.parametrize("page", PAPERS, ids=name)
def test_every_broken_figure_of_a_papers_page_is_a_claim_or_the_papers_own(page):
    source = json.loads((DATA / f"{page.stem}.json").read_text("utf-8"))
    claimed = {number for claim in source["claims"] for number in numbers(claim["shown"])}
    text = re.sub(r"```.*?```", "", written(page), flags=re.S)
    broken = {number for number in numbers(text) if "." in number}
    assert broken - claimed - set(source["theirs"]) == set()
    assert set(source["theirs"]) - claimed <= broken


def test_the_index_names_every_page_with_figures_of_its_answer():
    rows = tables(INDEX.read_text("utf-8"))[0][1:]
    linked = {target for row in rows for target in LINK.findall(row[-1])}
    assert {page.name for page in QUESTIONS} <= linked
    for _, answer, link in rows:
        for page in (RESULTS / target for target in LINK.findall(link)):
            assert page not in QUESTIONS or set(numbers(answer)) <= set(
                numbers(line_of(page, "Answer"))
            ), page.name


@pytest.mark.parametrize("document", [INDEX, RESULTS.parents[1] / "README.md"], ids=str)
def test_a_paced_result_is_marked_wherever_it_is_listed(document):
    marked = []
    for row in tables(document.read_text("utf-8"))[0][1:]:
        for target in LINK.findall(" ".join(row)):
            page = document.parent / target
            if "; paced, not computed." in page.read_text("utf-8"):
                marked.append((page.name, "pace" in re.sub(r"\([^)]*\.md\)", "", " ".join(row))))
    assert marked and all(said for _, said in marked), marked


def test_links_from_other_documents_find_the_pages():
    root = RESULTS.parents[1]
    others = [
        *root.glob("*.md"),
        *root.glob("docs/*.md"),
        *root.glob("docs/manual/*.md"),
        *root.glob("sgl_kvtier/**/*.md"),
    ]
    asked = [
        (other, target) for other in others for target in LINK.findall(other.read_text("utf-8"))
    ]
    assert [(o.name, t) for o, t in asked if "results/" in t and not (o.parent / t).exists()] == []


def test_figures_are_compared_to_the_places_printed():
    assert agrees("1.85 to 2.34", [1.847, 2.338]) and not agrees("1.86", [1.847])
    assert agrees("1,409", [1409]) and agrees("–", []) and not agrees("1", [])
    assert numbers("p50 at 2k and 1/4: 97.6 %, 4,168 of `9`") == ["97.6", "4,168"]


def test_a_changed_cell_or_claim_is_noticed():
    source = {
        "page": "none.md",
        "grids": {"g": {"columns": ["a", "b"], "rows": [["x", 1.0], ["x", 3.0], ["y", 4.0]]}},
    }
    rows = list(records(source, ["g"]))
    assert figures(rows, {"column": "b", "how": ["min", "max"]}) == [1.0, 4.0]
    assert figures(rows, {"column": "b", "where": {"a": "y"}, "minus": {"where": {"a": "x"}}}) == [
        3.0
    ]
    assert not agrees("3.9", figures(rows, {"column": "b", "where": {"a": "y"}}))
