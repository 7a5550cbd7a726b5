"""`scripts/house`: what it counts, and that the package has no circle of imports."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "house"


def loaded():
    loader = SourceFileLoader("house", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("house", loader))
    loader.exec_module(module)
    return module


def test_lines_of_code_have_no_blanks_comments_and_docstrings(tmp_path: Path):
    house = loaded()
    module = tmp_path / "module.py"
    module.write_text(
        '"""One.\n\ntwo\n"""\n\n# three\nTEXT = """a\n\n# b\n"""  # four\n\n\ndef f():\n    """Five."""\n    return 1\n'
    )
    assert house.code_of(module) == 6
    native = tmp_path / "file.c"
    native.write_text('/* one\n   two */\n\nint a; // three\nchar *b = "/*";\nint c; /* four\n*/\n')
    assert house.code_of_native(native) == 3


def test_a_circle_and_an_upward_arrow_are_noticed():
    house = loaded()
    boxes = {"a": {"b"}, "b": {"a"}, "c": set()}
    assert house.circles_in(boxes) == [["a", "b"]]
    assert house.upward_in({"low": {"high"}, "high": set()}, [["high"], ["low"]]) == ["low -> high"]


def test_no_two_test_files_have_one_name() -> None:
    """The folders of tests are no packages: pytest tells files apart by their names alone."""
    tests = Path(__file__).parents[1]
    names = Counter(
        path.name for path in tests.rglob("*.py") if path.name not in ("conftest.py", "__init__.py")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_package_has_no_circle_and_no_upward_import() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
