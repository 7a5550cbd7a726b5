"""What `import sgl_kvtier` offers, and that the examples that use it run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sgl_kvtier

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_these_and_all_of_them_are_there():
    assert sorted(sgl_kvtier.__all__) == [
        "EngineShape", "KVTierConfig", "KVTierError", "Link", "PageKey", "Planner", "PolicyConfig", "PutOutcome",
        "ReadOutcome", "Span", "Store", "Tier", "load_config", "messages", "open_store", "page_key",
    ]  # fmt: skip
    assert all(getattr(sgl_kvtier, name) is not None for name in sgl_kvtier.__all__)
    assert set(sgl_kvtier.__all__) <= set(dir(sgl_kvtier))


def test_type_checkers_are_told_the_same_names():
    told = re.findall(r" as (\w+)", (ROOT / "sgl_kvtier" / "__init__.pyi").read_text())
    assert sorted(told) == sorted(sgl_kvtier.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'opne_store'"):
        _ = sgl_kvtier.opne_store


def test_importing_the_package_imports_none_of_its_parts():
    code = "import sys, sgl_kvtier; print([m for m in sys.modules if m.startswith('sgl_kvtier.') or m == 'numpy'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("use_the_store.py", "9000 bytes are back; another page: None\n"),
        ("use_the_planner.py", "mode: both (configured)\n"),
    ],
)
def test_an_example_runs_and_says_what_it_shows(example, says):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
