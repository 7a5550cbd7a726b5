"""Types of command line arguments: text to a number in its range, with a message that names the
allowed range.

All raise argparse.ArgumentTypeError, which argparse turns into its one line of usage error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sgl_kvtier.outside import MOST_WHOLE, is_number, is_whole, shown
from sgl_kvtier.sizes import parse_bytes
from sgl_kvtier.types import PACED


def whole_from(low: int, high: int = MOST_WHOLE) -> Callable[[str], int]:
    """The type of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value: object = int(text)
        except ValueError:
            value = None
        if not is_whole(value, low, high):
            raise argparse.ArgumentTypeError(
                f"{shown(text)}: must be a whole number {_span(low, high)}"
            )
        return value

    return parse


def number_from(low: float, high: float = MOST_WHOLE) -> Callable[[str], float]:
    """The type of finite numbers from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value: object = float(text)
        except ValueError:
            value = None
        if not is_number(value, low, high):
            raise argparse.ArgumentTypeError(f"{shown(text)}: must be a number {_span(low, high)}")
        return value

    return parse


positive = whole_from(1)
count = whole_from(0)
seed = whole_from(0)
port = whole_from(1, 65535)
not_negative = number_from(0)


def above_nought(text: str) -> float:
    """A finite number above 0."""
    try:
        value = not_negative(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if not value:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be a number above 0")
    return value


def size(text: str) -> int:
    """A size in bytes such as 4GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be a size such as 4GiB or 500MB"
        ) from error


def path(text: str) -> Path:
    """The path of a file or folder. An empty text, as of a variable that is not set, would be the
    working directory.
    """
    if not text:
        raise argparse.ArgumentTypeError('"": must be a path')
    return Path(text)


def url(text: str) -> str:
    """The address of a server, with its scheme."""
    if text.startswith(("http://", "https://")):
        return text
    if "://" in text or not text:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be http://HOST:PORT")
    raise argparse.ArgumentTypeError(f"{shown(text)}: give the scheme, as in http://{text[:60]}")


def any_device(text: str) -> str:
    """A kind of machine, or paced:PROFILE, for commands that can do with one."""
    if text in ("cpu", "cuda") or (text.startswith(PACED) and text != PACED):
        return text
    raise argparse.ArgumentTypeError(f"{shown(text)}: must be cpu, cuda or {PACED}PROFILE")


def _span(low: float, high: float) -> str:
    return f"of at least {low:g}" if high == MOST_WHOLE else f"from {low:g} to {high:g}"
