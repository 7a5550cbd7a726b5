"""The compiled I/O threads, and the landing of remote pages, under ASan, UBSan and TSan: a short
run of `scripts/sanitize`, and whether it would have noticed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sgl_kvtier

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize"

if not SCRIPT.exists():
    pytest.skip("not run from the source tree", allow_module_level=True)


def sanitize(script: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(script), "--python", sys.executable, *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    if "skipped" in done.stdout:
        pytest.skip(done.stdout.strip())
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reports"), [("asan", ("ASan", "UBSan", "leaks of our own")), ("tsan", ("TSan",))]
)
def test_stores_under_load_are_reported_by_no_sanitizer(
    kind: str, reports: tuple[str, ...]
) -> None:
    status, said = sanitize(SCRIPT, "--seconds", "5", "--only", kind)
    assert status == 0, said
    assert len(re.findall(r"[1-9]\d* pages compared, 0 wrong", said)) == 2, said
    for name in reports:
        assert f"{name}: 0 reports" in said, said


def planted(tmp_path: Path, part: str, pattern: str, mistake: str) -> tuple[int, str]:
    """The script in a copy of the package with a mistake in it."""
    package = Path(sgl_kvtier.__file__).parent
    shutil.copytree(
        package, tmp_path / "sgl_kvtier", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for file in (SCRIPT, SCRIPT.parents[1] / "tests" / "remote" / "ring_under_load.py"):
        copy = tmp_path / file.relative_to(SCRIPT.parents[1])
        copy.parent.mkdir(parents=True)
        shutil.copy(file, copy)
    source = tmp_path / "sgl_kvtier" / part
    text, changes = re.subn(pattern, mistake, source.read_text())
    assert changes == 1
    source.write_text(text)
    return sanitize(tmp_path / "scripts" / "sanitize", "--seconds", "3", "--only", "tsan")


@pytest.mark.slow
def test_a_counter_that_two_threads_change_at_once_is_reported(tmp_path: Path) -> None:
    status, said = planted(
        tmp_path,
        "store/native/pool.h",
        r"#define SET\(counter, value\) .*",
        "#define SET(counter, value) ((counter) = (value))",
    )
    assert status == 1 and "data race" in said, said


@pytest.mark.slow
def test_a_list_of_replies_that_two_threads_change_at_once_is_reported(tmp_path: Path) -> None:
    status, said = planted(
        tmp_path,
        "remote/native/landing.c",
        r"pthread_mutex_lock\(&self->lock\);\n( *\*self->last = reply;\n.*\n).*\n",
        r"\1",
    )
    assert status == 1 and "data race" in said, said
