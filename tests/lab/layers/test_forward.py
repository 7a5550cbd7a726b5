"""SGLang's own Llama and Qwen3 forwards, cut at every layer, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvtier.lab.outside.lab_model import write_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("one_forward.py")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "lab-mha"])
def test_a_batch_cut_at_any_layer_has_the_tokens_of_a_whole_one(model: str) -> None:
    env = {"SGLANG_PLATFORM": "kvtier_cpu", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(write_model(model))],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one["equal"] for one in found] == [True] * len(found)
    assert found[-1] == {"plan": [None] * 3, "equal": True, "difference": 0.0}
    # Sums over other numbers of rows are rounded in another way, as with other chunk borders.
    assert max(one["difference"] for one in found) < 1e-4
