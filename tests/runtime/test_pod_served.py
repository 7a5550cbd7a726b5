"""The life of a pod on a volume with an fsGroup: a server that is not root, ended by SIGTERM while it
writes, finds its pages again when it is started anew, and serves when the volume is full.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from patience import until
from serving import STRICT, TOKENS, Answer, Served, config_file, flags, prompts
from volumes import GROUP, ME, in_memory, kubelet, loose

from sgl_kvtier.lab.outside.server import Launch, Server
from sgl_kvtier.page_hash import compile_page_hash

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="another user's server needs root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux"),
]
(GRACE_S,) = (
    one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for one in yaml.safe_load_all(
        (Path(__file__).parents[2] / "examples" / "k8s" / "kvtier.yaml").read_text()
    )
    if one["kind"] == "Deployment"
)
"""Seconds that a pod has to end after SIGTERM, before Kubernetes kills it."""
PAGES = (TOKENS - 1) // 16
MOST_PROMPTS = 200


class PodServer(Server):
    """A server of another user, who may read what root may: this interpreter, the model."""

    @property
    def command(self) -> list[str]:
        who = [f"--reuid={ME}", f"--regid={GROUP}", f"--groups={GROUP}"]
        may = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        return ["setpriv", *who, *may, *super().command]


@pytest.fixture
def home() -> Iterator[Path]:
    """The pod's own folder, with SGLang's compiled page hash in it, as an image brings it."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-pod-"))
    folder.chmod(0o755)
    compile_page_hash()
    own = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    shutil.copytree(Path(own).expanduser(), folder / "home" / "extensions")
    for path in (folder / "home", *(folder / "home").rglob("*")):
        os.chown(path, ME, GROUP)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def pod(home: Path, volume: Path, life: int, **throttle: float) -> Iterator[Served]:
    """A pod's container, from kubelet's changes to the volume on; ended by SIGTERM alone."""
    kubelet(volume)
    folder = home / f"life-{life}"
    store = {"path": str(volume), "capacity_bytes": "64MiB", "segment_bytes": "512KiB"}
    config = config_file(folder, store=store, throttle=throttle)
    extra = ["--hicache-storage-backend-extra-config", f"@{config}"]
    own = str(home / "home")
    # A process that has imported SGLang would hand down the folder of its own user.
    env = {
        "HOME": own,
        "FLASHINFER_WORKSPACE_BASE": own,
        "SGLANG_CACHE_DIR": f"{own}/.cache/sglang",
        "TORCH_EXTENSIONS_DIR": f"{own}/extensions",
    }
    server = PodServer(folder.name, Launch((*flags(), *extra), {**STRICT, **env}), folder)
    with server:
        server.wait_until_healthy(900)
        assert not loose(volume), "a group may not change pages while they are served"
        yield Served(server)
        launcher = psutil.Process(server.pid)
        assert {process.uids().real for process in (launcher, *launcher.children())} == {ME}
        server.ask_to_end()
        launcher.wait(GRACE_S)
    log = server.log_path.read_text(errors="replace")
    assert log.count("could be written by other users") == (life > 1)
    assert "Traceback" not in log


def stored(server: Served) -> float:
    return server.metric("kvtier:store_pages")


def is_full(server: Served) -> bool:
    return bool(
        server.metric("kvtier:pages_evicted_total") + server.metric("kvtier:pages_refused_total")
    )


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def test_a_pod_finds_its_pages_again_until_its_volume_is_full(home, record_property):
    volume = home / "volume"
    volume.mkdir()
    asked = prompts(MOST_PROMPTS, seed=71)
    with in_memory(volume, "4m", "777"):
        with pod(home, volume, 1, write_gbps=0.0002) as server:
            told = [server.ask(asked[0])]
            until(lambda: stored(server) >= PAGES, 600)
            told += [server.ask(ids) for ids in asked[1:3]]
            assert server.metric("kvtier:restore_writes_waiting") > 0
        with pod(home, volume, 2) as server:
            again = [server.ask(ids) for ids in asked[:3]]
            assert again[0].storage == PAGES * 16
            assert tokens(again) == tokens(told)
            lives = [sum(answer.storage for answer in again)]
            for ids in asked[3:]:
                told.append(server.ask(ids))
                if is_full(server):
                    break
            assert is_full(server)
            server.settle()
            assert stored(server) >= PAGES
        with pod(home, volume, 3) as server:
            assert stored(server) >= PAGES
            # The last ones first: what is stored anew evicts what was used longest ago.
            again = [server.ask(ids) for ids in reversed(asked[: len(told)])]
            assert sum(answer.storage for answer in again) >= PAGES * 16
            assert tokens(again) == tokens(told[::-1])
            assert server.metric("kvtier:pages_corrupt_total") == 0
            lives.append(sum(answer.storage for answer in again))
            asked_again = {"asked": [3, len(told)], "tokens from storage": lives}
            record_property("lives after the first", json.dumps(asked_again))
        owners = {path.stat().st_uid for path in volume.rglob("*")}
        assert owners == {ME}
