"""The command line: help, mistakes, and where each command lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgl_kvtier import cli
from sgl_kvtier.errors import KVTierError


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_nothing_at_all_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "usage: kvtier COMMAND" in capsys.readouterr().out


def test_an_unknown_command_names_those_there_are(capsys):
    assert cli.main(["comparre"]) == 2
    assert "compare" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_shows_its_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "example:" in shown and f"kvtier {name}" in shown


def test_an_expected_error_is_one_line_and_status_1(capsys, monkeypatch):
    class Failing:
        @staticmethod
        def add_arguments(parser):
            pass

        @staticmethod
        def run(args):
            raise KVTierError("the disk is on fire: call someone")

    monkeypatch.setattr(cli, "_load", lambda where: Failing)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "kvtier doctor: the disk is on fire: call someone\n"


def test_ctrl_c_ends_with_status_130(capsys, monkeypatch):
    class Stopped:
        add_arguments = staticmethod(lambda parser: None)

        @staticmethod
        def run(args):
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", lambda where: Stopped)
    assert cli.main(["doctor"]) == 130


def test_the_command_starts_without_importing_torch():
    code = (
        "import sys, sgl_kvtier.cli as c\n"
        "c.main(['--help'])\n"
        "for name in c.COMMANDS:\n"
        "    try: c.main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules, 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
