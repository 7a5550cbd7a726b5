"""docs/manual/json.md says what is written."""

from __future__ import annotations

import re
from pathlib import Path

from commands import Command

ONLY_PACED = ("device", "compared_with")
DOCUMENT = Path(__file__).parents[3] / "docs" / "manual" / "json.md"


def documented(heading: str) -> set[str]:
    """First path components of the keys in the table below a heading; `a`, `b` and `c.{d,e}` forms
    are understood.
    """
    text = DOCUMENT.read_text(encoding="utf-8")
    section = re.split(r"^#+ ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[
        0
    ]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {re.split(r"[.{]", key)[0] for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def test_every_key_of_the_environment_is_documented_and_no_other(compare_result: dict) -> None:
    assert documented("### `environment`") == set(compare_result["environment"])


def test_every_key_of_a_comparison_is_documented_and_no_other(compare_result: dict) -> None:
    # Some are there only of a paced device, and `declined` only where asked for.
    envelope = documented("## Envelope")
    assert envelope | documented("## `kvtier.compare/1`") == {*compare_result, *ONLY_PACED}
    for arm in compare_result["arms"].values():
        assert documented("### `arms.<name>`") == {*arm, "pace", "bound", "declined"}
    for sample in compare_result["samples"]:
        assert documented("### `samples`") == set(sample)


def test_every_key_of_batches_of_restorations_is_documented_and_no_other(
    kvtier: Command, tmp_path: Path
) -> None:
    words = ("--at-once", "2", "--device", "cpu", "--models", "tiny-qwen3", "--lengths", "256")
    more = ("--rounds", "1", "--foreign", "99", "--decoders", "1", "--arms", "cake,kvtier")
    result = kvtier(tmp_path, "compare", "restore", *words, *more).result
    envelope = documented("## Envelope")
    assert envelope | documented("## `kvtier.restore.batches/1`") == {*result, "device", "pace"}
    (cell,) = result["cells"]
    assert documented("### `cells` of batches") == set(cell)
    for arm in cell["arms"].values():
        assert documented("### `arms` of batches") == set(arm)
