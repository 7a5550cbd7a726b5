"""`kvtier remote up`: what it prints, and that nothing of it stays."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until
from remote_pages import alive

from sgl_kvtier import cli
from sgl_kvtier.extras import how_to_install

ROOT = Path(__file__).parents[2]


@pytest.mark.mooncake
@pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="Mooncake is not installed: pip install 'sgl-kvtier[remote]'",
)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_master_and_an_owner_run_until_they_are_stopped(end: signal.Signals) -> None:
    main = "from sgl_kvtier.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", main, "remote", "up", "--segment", "64MiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        said = "".join(lines)
        pids = [int(number) for number in re.findall(r"process (\d+)", said)]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        (line,) = (line for line in lines if '"remote"' in line)
        section = json.loads("{" + line + "}")["remote"]
        assert section["engine"] == "mooncake" and section["master"].startswith("127.0.0.1:")
        address = re.findall(r"stat --remote (\S+)", said)[0]
        assert cli.main(["stat", "--remote", address]) == 0
        process.send_signal(end)
        assert process.wait(30) == 0
        until(lambda: not any(alive(pid) for pid in pids), 10)
    finally:
        process.terminate()  # where it did not end by itself
        process.wait(30)


def test_it_says_what_to_install_where_mooncake_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["remote", "up"]) == 1
    assert how_to_install("remote") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--segment", "much"), ("--host", "203.0.113.77")], ids=["size", "host"]
)
def test_a_wrong_option_is_one_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["remote", "up", option, value]) == 1
    said = capsys.readouterr().err
    assert option in said and said.count("\n") == 1
