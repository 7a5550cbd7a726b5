"""The folder of an experiment's logs: kept where they say why something failed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.frame import work_folder


@pytest.mark.parametrize(
    ("error", "needed", "kept"),
    [(None, False, False), (None, True, True), (BenchError, False, True), (KeyboardInterrupt, False, False)],
)  # fmt: skip
def test_logs_in_a_temporary_folder_are_kept_when_something_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException] | None,
    needed: bool,
    kept: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def go() -> None:
        with work_folder(None, lambda: needed) as folder:
            (folder / "server.log").write_text("why")
            if error is not None:
                raise error("a server did not start")

    if error is None:
        go()
    else:
        with pytest.raises(error):
            go()
    assert bool(list(tmp_path.glob("**/server.log"))) is kept
