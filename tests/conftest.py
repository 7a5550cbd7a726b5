"""For all rooms: long files run first, and property tests have no time limit per example, because
machines are noisy and tests assert no times.

Property tests try the same examples in every run, so that a change fails or passes by its own doing. With
KVTIER_EXPLORE=20 in the environment they try other ones in each run, and 20 times as many: to be
run in the folder that was changed.

Every JSON result that a command writes is compared with its schema (`json_results.py`).

KVTIER_MOONCAKE_SITE names a folder with Mooncake's wheel in it, for the tests with the marker
mooncake and the servers that they start, where this interpreter does not have the wheel.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from json_results import wrong_in
from server_starts import ServerStarts

from sgl_kvtier.console import document

LONG = (
    "test_on_the_stand_in",
    "test_remote_trouble",
    "test_store_torture",
    "test_gpu_scripts",
    "test_paper_cake",
    "test_browser",
    "test_scatter",
    "test_compare_run",
    "test_remote_store",
    "test_plots",
    "test_compare",
    "test_fuzz_run",
    "test_generate",
    "test_paper_tierkv",
    "test_store_forks",
    "test_store_rings",
    "test_storage",
)
"""Files of more than 8 seconds, the longest first. With two processes a long file at the end would
leave one of them idle. Those with real servers come before.
"""

SHARING = {
    "plain": ("served", "shared_folder_served", "lookahead_served", "hints_served"),
    "ranks": ("restore_ranks_served", "lookahead_ranks_served"),
    "restoring": ("restore_notes_served", "restore_left_served"),
    "one at a time": ("turn_reads_served", "queue_served"),
}
"""Files whose tests share servers: with `--dist loadfile` one process runs them, one after the
other. The group that takes longest first. After `restore_left_served`, which changes a bandwidth, a
server keeps nothing of what it learns.
"""

_GROUPS = {f"test_{name}": group for group, names in SHARING.items() for name in names}
_SHARED: pytest.StashKey[Any] = pytest.StashKey()
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
if TRACES.is_dir():
    os.environ.setdefault("KVTIER_TRACES", str(TRACES))
if folder := os.environ.get("KVTIER_MOONCAKE_SITE"):
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getenv("PYTHONPATH"), folder)))

settings.register_profile(
    "kvtier",
    deadline=None,
    max_examples=50 * max(1, int(os.environ.get("KVTIER_EXPLORE", "1"))),
    derandomize="KVTIER_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtier")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ServerStarts())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays until the end, a million objects of torch and SGLang:
    no collection of garbage walks through them, meanwhile or later, and no forked child copies them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate((*_GROUPS, *LONG))}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` files that share servers are as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _GROUPS.get(Path(file).stem, file)

    return ByGroup(config, log)


@pytest.fixture(scope="session", autouse=True)
def _results_are_what_their_schemas_say() -> Iterator[None]:
    """Every result that a command writes in this process is compared with its schema."""
    made = document.to_json

    def compared(result: dict[str, Any]) -> str:
        text = made(result)
        wrong = sorted(set(wrong_in(text)))
        assert not wrong, f"not what the schema says: {wrong[:20]}"
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "to_json", compared)
        yield


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """As many threads of torch afterwards as before."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _group(item: pytest.Item) -> str:
    return _GROUPS.get(item.path.stem, item.path.stem)


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Real servers that tests share (`runtime/shared.py`)."""
    from shared import sharing

    with sharing(tmp_path_factory.mktemp("servers")) as shared:
        request.config.stash[_SHARED] = shared
        yield shared


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Shared servers end with the last test of their group: their memory is for the next one's."""
    shared = item.config.stash.get(_SHARED, None)
    if shared is not None and (nextitem is None or _group(nextitem) != _group(item)):
        shared.close()
