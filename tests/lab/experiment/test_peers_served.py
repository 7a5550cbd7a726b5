"""SGLang's own NIXL and Mooncake backends with a real server on the emulated H100."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.experiment.arms import missing
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.launch import missing_packages

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing_packages()), reason="sglang is not installed: pip install '.[sglang]'"
    ),
]


@pytest.mark.parametrize("arm", ["hicache-nixl", "hicache-mooncake"])
def test_a_session_that_returns_is_served_from_storage_and_answers_are_equal(
    arm: str, tmp_path: Path
) -> None:
    peers.use_installed()
    if reason := missing(arm):
        pytest.skip(reason)
    out = tmp_path / "out.json"
    load = ("--quick", "--returning", "--sessions", "2", "--turns", "2", "--rounds", "1")
    where = ("--device", "paced:h100-llama8b", "--folder", str(tmp_path / "work"))
    # With SGLang's default policy a request that finds the device idle does not wait for storage.
    waits = ("--server-arg=--hicache-storage-prefetch-policy", "--server-arg=wait_complete")
    main(["compare", *load, *where, *waits, "--arms", arm, "--json", str(out)])
    result = json.loads(out.read_text())
    assert result["arms"][arm]["failure"] is None
    samples = result["samples"]
    assert len(samples) == 2 and all(one["equal"] is True for one in samples)
    # Host memory may hold one of the two prompts.
    assert max(one["cached"]["storage"] / one["prompt_tokens"] for one in samples) > 0.5
