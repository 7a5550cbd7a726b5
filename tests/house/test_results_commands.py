"""Commands of results pages and their data: the parsers take them, on the device of the page."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_kvtier import cli
from sgl_kvtier.lab.experiment.scenarios import compare, sweep

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(path for path in RESULTS.glob("**/*.md") if path.name != "README.md")
STANDS_FOR = {"PROFILE": "h100-llama8b", "D": "1", "LENGTH": "2048", "OPTIONS": ""}
"""Words that a page explains."""


def blocks(text: str) -> Iterator[str]:
    """Lines of a page's code, those that go on as one."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.S | re.M):
        yield from block.replace("\\\n", " ").splitlines()


def variables() -> dict[str, str]:
    """Those that pages set in their code."""
    lines = [line for page in PAGES for line in blocks(page.read_text("utf-8"))]
    return {name: value for line in lines for name, value in re.findall(r'^(\w+)="([^"]*)"$', line)}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `kvtier` command of a line, without remarks and what stands for others."""
    for one in re.split(r"; |&&", re.split(r"\s#|, and| \(", text)[0]):
        found = re.search(r"\bkvtier (?=[a-z])(.*)", one)
        if found is None:
            continue
        words = re.sub(r"\$(\w+)", lambda name: variables()[name[1]], found[1])
        for word, other in STANDS_FOR.items():
            words = re.sub(rf"\b{word}\b", other, words)
        yield shlex.split(words)


def named() -> Iterator[tuple[Path, str]]:
    """Every page with each line that names a command, of it and of its data."""
    for page in PAGES:
        yield from ((page, line) for line in blocks(page.read_text("utf-8")))
        data = RESULTS / "data" / f"{page.stem}.json"
        grids = json.loads(data.read_text("utf-8"))["grids"] if data.exists() else {}
        for grid in grids.values():
            line = re.sub(r"\b\w[\w ,]*: (?=kvtier )", "", grid.get("command", ""))
            yield page, line
            if "Options" in grid.get("columns", ()):
                at = grid["columns"].index("Options")
                yield from ((page, f"{line.split(', and')[0]} {row[at]}") for row in grid["rows"])


def parsed(words: list[str]) -> tuple[str, argparse.Namespace]:
    """The command's name and what its parser makes of the rest. Raises SystemExit."""
    two = " ".join(words[:2]) in cli.COMMANDS
    name, rest = " ".join(words[: 1 + two]), words[1 + two :]
    parser = argparse.ArgumentParser(prog=name)
    cli._load(cli.COMMANDS[name].where).add_arguments(parser)
    return name, parser.parse_args(rest)


def every_command() -> list[tuple[Path, list[str]]]:
    return [(page, words) for page, line in named() for words in commands(line)]


def test_parsers_take_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for page, words in every_command():
        try:
            parsed(words)
        except SystemExit:
            wrong.append((page.name, " ".join(words), capsys.readouterr().err.splitlines()[-1]))
    assert wrong == []
    assert len(every_command()) > 100


def test_a_comparison_runs_on_the_device_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "detect_device", lambda: "cpu")
    scenarios = {"compare": compare, "compare sweep": sweep}
    other = []
    for page, words in every_command():
        if words[0] != "compare" or (found := parsed(words))[0] not in scenarios:
            continue
        compare.choose_device(found[1])
        paced = "; paced, not computed." in page.read_text("utf-8")
        if paced != found[1].device.startswith("paced:"):
            other.append((page.name, " ".join(words)))
    assert other == []


def test_a_wrong_command_and_remarks_are_noticed() -> None:
    line = "kvtier compare --quick --arms kvtier   # quick; --gap-scale 1"
    assert list(commands(line)) == [["compare", "--quick", "--arms", "kvtier"]]
    assert len(list(commands("kvtier fsck A && kvtier stat A; kvtier stat B (JSON)"))) == 3
    with pytest.raises(SystemExit):
        parsed(["compare", "--no-such-option"])
