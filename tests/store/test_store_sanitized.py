"""The compiled I/O threads under ASan, UBSan and TSan: a short run of `scripts/sanitize`, and
whether it would have noticed.
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
def test_a_store_under_load_is_reported_by_no_sanitizer(
    kind: str, reports: tuple[str, ...]
) -> None:
    status, said = sanitize(SCRIPT, "--seconds", "5", "--only", kind)
    assert status == 0, said
    assert re.search(r"[1-9]\d* pages compared, 0 wrong", said), said
    for name in reports:
        assert f"{name}: 0 reports" in said, said


@pytest.mark.slow
def test_a_counter_that_two_threads_change_at_once_is_reported(tmp_path: Path) -> None:
    package = Path(sgl_kvtier.__file__).parent
    shutil.copytree(
        package, tmp_path / "sgl_kvtier", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    pool = tmp_path / "sgl_kvtier" / "store" / "native" / "pool.h"
    text, changes = re.subn(
        r"#define SET\(counter, value\) .*",
        "#define SET(counter, value) ((counter) = (value))",
        pool.read_text(),
    )
    assert changes == 1
    pool.write_text(text)
    status, said = sanitize(tmp_path / "scripts" / "sanitize", "--seconds", "3", "--only", "tsan")
    assert status == 1 and "data race" in said, said
