"""One launch line: README, manual, examples, `kvtier serve` and `kvtier doctor` name the same flags."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sgl_kvtier import cli
from sgl_kvtier.launch import tier_flags
from sgl_kvtier.runtime.tools import doctor

ROOT = Path(__file__).parents[2]
LINE = tier_flags("@kvtier.json")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "manual").glob("*.md"))]


def flags_in(text: str) -> list[list[str]]:
    """The words of every launch line with this tier in a text's blocks of code, from the first of
    our flags on.
    """
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if "--hicache-storage-backend kvtier" in line:
                words = shlex.split(line, comments=True)
                found.append(words[words.index(LINE[0]) :])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_have_the_launch_line(page):
    assert all(words == LINE for words in flags_in(page.read_text("utf-8")))


def test_readme_and_manual_have_one_each():
    assert {page.name for page in PAGES if flags_in(page.read_text("utf-8"))} >= {
        "README.md",
        "store.md",
        "restore.md",
    }


def test_serve_prints_the_launch_line(tmp_path, capsys):
    config = tmp_path / "kvtier.json"
    config.write_text(json.dumps({"store": {"path": str(tmp_path / "pages")}}))
    assert cli.main(["serve", "m", "--config", str(config), "--device", "cuda", "--print"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--model-path") :] == [
        *("--model-path", "m", *tier_flags(f"@{config}")),
        *("--enable-metrics", "--enable-cache-report", "--port", "30000"),
    ]


def test_the_example_starts_a_server_with_the_launch_line(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "examples" / "serve.sh", "m", "kvtier.json", "--tp", "2"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [
        *("-m", "sglang.launch_server", "--model-path", "m", *LINE),
        *("--enable-metrics", "--enable-cache-report", "--tp", "2"),
    ]


def test_doctor_ends_with_the_launch_line():
    last = doctor._launch_line("kvtier.json", None).splitlines()[-1]
    assert shlex.split(last.partition(": ")[2]) == LINE


def test_the_attention_backend_is_sglangs_choice_on_a_gpu():
    assert not {"--attention-backend", "--prefill-attention-backend"} & {*LINE}
