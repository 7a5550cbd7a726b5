"""The command line: help, mistakes, and where each command lives."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier import cli
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import is_number


def test_nothing_at_all_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "usage: kvtier COMMAND" in capsys.readouterr().out


def said(capsys, *words: str) -> str:
    """The one line of an error about arguments."""
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    line = capsys.readouterr().err
    assert status == 2 and line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["comparre"], "compare"),
        (["serv"], "serve"),
        (["remote"], "remote up"),
        (["bench", "tortur"], "bench torture"),
        (["compare", "restor"], "compare restore"),
    ],
)
def test_an_unknown_command_names_those_there_are_and_which_may_be_meant(words, meant, capsys):
    line = said(capsys, *words)
    assert f"kvtier {meant}" in line or f"say which: kvtier {meant}" in line
    assert "?." not in line


def test_an_unknown_word_that_is_like_no_command_only_names_those_there_are(capsys):
    line = said(capsys, "xyzzy")
    assert "Did you mean" not in line and "serve, compare" in line


def test_a_group_of_commands_without_a_part_names_its_parts(capsys):
    assert "kvtier bench store" in said(capsys, "bench")
    assert cli.main(["bench", "--help"]) == 0
    assert "bench torture" in capsys.readouterr().out


def test_an_error_in_the_arguments_is_one_line_that_says_where_the_usage_is(capsys):
    line = said(capsys, "stat", "/", "--jsn", "x")
    assert line == "kvtier stat: unrecognized arguments: --jsn x. See kvtier stat --help\n"
    assert said(capsys, "sim", "paper", "none").startswith("kvtier sim paper: argument paper:")


LONG = "n" * 100_000


@pytest.mark.parametrize(
    "words",
    [
        ["stat", LONG],
        ["stat", "/tmp", "--json", LONG],
        ["fsck", LONG],
        ["purge", LONG, "--all"],
        ["serve", "m", "--store", LONG, "--print"],
        ["serve", "m", "--config", LONG, "--print"],
        ["doctor", "--json", LONG],
        ["trace", "describe", LONG],
        ["trace", "list", "--traces-dir", LONG],
        ["sim", "run", "--trace", LONG],
        ["sim", "run", "--config", LONG],
        ["sim", "replay-log", LONG],
        ["report", LONG],
        [LONG],
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_a_name_of_100_000_characters_is_one_short_line(words, capsys):
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    line = capsys.readouterr().err
    assert status in (1, 2)
    assert line.count("\n") == 1 and len(line) < 1500, line[:200]


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_shows_its_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "example:" in shown and f"kvtier {name}" in shown


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (KVTierError("the disk is on fire: call someone"), 1, "the disk is on fire: call someone"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "/root/x: Permission denied."),
        (
            ModuleNotFoundError("no torch", name="torch"),
            1,
            "this needs torch. Install it with: pip ",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_ends_a_command_is_one_line_and_a_status(raised, status, line, capsys, monkeypatch):
    def fails(args):
        raise raised

    command = SimpleNamespace(add_arguments=lambda parser: None, run=fails)
    monkeypatch.setattr(cli, "_load", lambda where: command)
    assert cli.main(["doctor"]) == status
    said = capsys.readouterr().err
    assert f"kvtier doctor: {line}" in said and "\n" not in said.strip()


def test_help_and_metrics_are_those_that_are_written_down():
    script = Path(__file__).parents[2] / "scripts" / "golden"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # A Python without packages has not the help of every command.
    done = subprocess.run(
        [sys.executable, "-S", script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "a package is missing here" in done.stderr


def test_the_command_starts_without_importing_torch():
    code = (
        "import sys, sgl_kvtier.cli as c\n"
        "c.main(['--help'])\n"
        "for name in c.COMMANDS:\n"
        "    try: c.main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules, 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Numbers among the command line's arguments: all of them, by the parsers themselves.


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option with a type of its own, those of subcommands too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.type not in (None, str, Path) and not action.choices:
            yield action


def every_option() -> Iterator[Any]:
    for name, command in cli.COMMANDS.items():
        parser = argparse.ArgumentParser()
        cli._load(command.where).add_arguments(parser)
        for action in options(parser):
            yield pytest.param(action.type, id=f"{name} {action.option_strings or action.dest}")


HOSTILE = (
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1e308",
    "9" * 400,
    "9" * 5000,
    "-9" + "9" * 400,
    "",
    "[]",
)


@pytest.mark.parametrize("kind", every_option())
def test_no_option_takes_a_number_that_nobody_means(kind: Any) -> None:
    for text in HOSTILE:
        try:
            found = kind(text)
        except argparse.ArgumentTypeError as error:
            assert len(str(error)) < 200
        else:
            for value in found if isinstance(found, (list, tuple)) else [found]:
                assert isinstance(value, (str, Path)) or is_number(value), text[:6]
