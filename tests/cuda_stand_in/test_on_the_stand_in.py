"""The tests that need a GPU, on the stand-in for one: in a process of their own per file and seed.

`inside/`: of the stand-in itself. `tests/gpu`: of the path to a GPU, with delays that a seed draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
from stand_in import environment, unavailable
from stand_in.build import nvcc_here

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
SKIPPED_FOR = ("real attention kernels", "a real clock")
"""All that a test in tests/gpu may be skipped for on the stand-in."""
WITHOUT_NVCC = (*SKIPPED_FOR, "a kernel that nvcc compiles")
"""And where nothing is compiled."""

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(unavailable() is not None, reason=f"no stand-in: {unavailable()}"),
]


@dataclass(frozen=True)
class Ran:
    """What a child process reported."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    skipped: dict[str, str]
    """By the test's name: why."""
    output: str


def run(folder: Path, *arguments: str, **how: int) -> Ran:
    """pytest on the stand-in."""
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}", *arguments],
        cwd=PROJECT, env=environment(base={**_without_xdist(), "PYTHONPATH": path}, devices=2, **how),
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    output = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert report.exists(), output
    passed, failed, skipped = [], [], {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (reason := case.find("skipped")) is not None:
            skipped[name] = reason.get("message") or ""
        else:
            passed.append(name)
    return Ran(tuple(passed), tuple(failed), skipped, output)


def _without_xdist() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}


def test_the_stand_in_does_what_it_says_and_planted_mistakes_are_found(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    ran = run(tmp_path, str(HERE / "inside"))
    assert not ran.failed, ran.output
    assert not ran.skipped and len(ran.passed) >= 70, ran.output


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_path_to_a_gpu_passes_its_tests_whatever_is_late(
    tmp_path: Path, seed: int, record_property
) -> None:
    pytest.importorskip("sglang")
    ran = run(
        tmp_path, "tests/gpu", "-m", "gpu and not server and not slow", seed=seed, jitter_us=400
    )
    record_property("passed", len(ran.passed))
    assert not ran.failed, ran.output
    why = {
        name: reason for name, reason in ran.skipped.items() if not reason.endswith(WITHOUT_NVCC)
    }
    assert not why, "a test was skipped without one of the stated reasons"
    assert len(ran.passed) >= 51, ran.output


@pytest.mark.slow
@pytest.mark.skipif(
    nvcc_here() is None, reason="no nvcc, which compiles SGLang's and FlashInfer's kernels"
)
def test_the_kernels_that_sglang_and_flashinfer_compile_pass_too(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    pytest.importorskip("flashinfer")
    ran = run(tmp_path, "tests/gpu", "-m", "gpu and not server", nvcc=True)
    assert not ran.failed, ran.output
    assert all(reason.endswith(SKIPPED_FOR) for reason in ran.skipped.values())
    assert len(ran.passed) >= 60, ran.output
