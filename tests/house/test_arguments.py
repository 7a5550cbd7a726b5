"""Numbers among the command line's arguments: all of them, by the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier import cli
from sgl_kvtier.outside import is_number


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
                assert isinstance(value, str) or is_number(value), text[:6]
