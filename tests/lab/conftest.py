"""Fixtures of the bench's tests."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command, Done, environment, result_in, with_files
from fake_arms import ThreadServer
from fake_engine import FakeCluster, FakeEngine
from fake_sglang import FakeServer

from sgl_kvtier.cli import main
from sgl_kvtier.lab.experiment import frame, rounds
from sgl_kvtier.lab.experiment.remote import run as remote_run
from sgl_kvtier.lab.experiment.restore import server as restore_server
from sgl_kvtier.lab.experiment.restore import trial as restore_trial
from sgl_kvtier.lab.experiment.scenarios import remote as remote_scenario
from sgl_kvtier.lab.experiment.scenarios import restore as restore_scenario
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.lab.stress.server import run as fuzz_run
from sgl_kvtier.lab.stress.server import server as fuzz_server


@pytest.fixture
def fake_server() -> FakeServer:
    """A server that is not up yet: set it up, then `async with fake_server.up()`."""
    return FakeServer()


@pytest.fixture(scope="module")
def kvtier() -> Iterator[Command]:
    """Commands in this process, their servers threads of it: nothing has to be started. Waits that
    only real servers need are short.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(frame, "missing_packages", lambda: [])
    for module in (rounds, restore_server, fuzz_server, remote_run):
        patch.setattr(module, "Server", ThreadServer)
    patch.setattr(rounds, "LOOK_S", 0.01)
    patch.setattr(remote_run, "LOOK_S", 0.01)
    patch.setattr(remote_run, "Cluster", FakeCluster)
    patch.setattr(rounds, "Servers", FakeEngine)
    patch.setattr(remote_scenario, "missing_engine", lambda: "")
    patch.setattr(peers, "missing_mooncake", lambda: None)
    quick = functools.partial(restore_trial.Trials, look_every_s=0.0, pace=lambda: 1.0)
    patch.setattr(restore_scenario, "Trials", quick)
    patch.setattr(restore_trial, "PUBLISHED_S", 0.0)
    for name in ("_IDLE_S", "_ROLL_S", "_PUBLISHED_S"):
        patch.setattr(fuzz_run, name, 0.01)

    def run(folder: Path, *words: str, task: str = "") -> Done:
        for name, value in environment(folder, task).items():
            if name != "PYTHONPATH":
                patch.setenv(name, value)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(with_files(folder, words))
            except SystemExit as end:
                status = int(end.code or 0)
        return Done(status, out.getvalue(), err.getvalue(), result_in(folder))

    yield run
    patch.undo()
