"""Stock on a paced device: a prefix comes back from host memory beside the forward that needs it.

The times are those of the device's own log, in which nothing is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_paced_served import ask, setup_of, tokens, wrong

from sgl_kvtier.lab.experiment.arms import prepare
from sgl_kvtier.lab.outside.server import Server, end_on_signals
from sgl_kvtier.lab.paced import launching, pace

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]
PROFILE = "paced:h100-llama8b"
DILATION = 100.0
SUFFIX, MOST = 1500, 12
"""The scheduler has 1.6 s for a launch while its load runs. A machine that is too busy has more
tries.
"""


def test_a_forward_begins_its_first_layer_before_the_last_one_is_loaded(tmp_path: Path) -> None:
    paced = launching.parse(PROFILE, DILATION)
    setup = setup_of(paced, device=PROFILE, dilation=DILATION, chunk_tokens=8192)
    server = Server("stock", prepare("hicache", setup, tmp_path), tmp_path)
    with end_on_signals(), server:
        server.wait_until_healthy(1500)
        for number in range(MOST):  # each takes the other one's place on the device
            prompt = [*tokens(number % 2), *tokens(2 + number)[:SUFFIX]]
            answer = ask(server, prompt)
            steps = [row for row in pace.read(tmp_path / launching.LOG) if "layers_loaded" in row]
            if steps:
                break
    assert wrong(tmp_path) == []
    assert answer["meta_info"]["cached_tokens_details"]["host"] > 5000
    (step,) = steps
    assert step["rids"] == [answer["meta_info"]["id"]]
    assert step["tokens"] + step["context"] == len(prompt)
    overlaps(step, paced.profile.layers)


def overlaps(step: dict[str, Any], layers: int) -> None:
    loaded = step["layers_loaded"]
    end = step["begin"] + step["seconds"] + step["load_wait_s"]
    load_s = loaded[-1] - step["load_begin"]
    assert loaded == sorted(loaded)
    # The first layer waits for its own share of the load, and no longer.
    assert step["load_begin"] < step["first_layer"] <= loaded[0] < loaded[-1]
    # All is over behind the last layer's load, and before a forward that began there would be.
    assert loaded[-1] < end < loaded[-1] + step["seconds"]
    # The longer of both, and one layer of the other.
    longer = max(step["begin"] + step["seconds"], loaded[-1])
    assert end <= longer + max(step["seconds"], load_s) / layers + 1e-6
