"""For all rooms: long files run first, and property tests have no time limit per example, because
machines are noisy and tests assert no times.

Property tests try the same examples in every run, so that a change fails or passes by its own doing. With
KVTIER_EXPLORE=20 in the environment they try other ones in each run, and those of policy/ 20 times
as many: to be run after a change there.

KVTIER_MOONCAKE_SITE names a folder with Mooncake's wheel in it, for the tests with the marker
mooncake and the servers that they start, where this interpreter does not have the wheel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from server_starts import ServerStarts

LONG = (
    "test_remote_trouble",
    "test_store_torture",
    "test_gpu_scripts",
    "test_paper_cake",
    "test_browser",
    "test_scatter",
    "test_compare_run",
    "test_remote_store",
    "test_plots",
    "test_compare_figures",
    "test_compare",
    "test_fuzz_scenes",
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
    "ranks": ("restore_ranks_served", "lookahead_ranks_served", "holes_served"),
    "restoring": ("restore_notes_served", "restore_left_served"),
    "one at a time": ("turn_reads_served", "queue_served"),
}
"""Files whose tests share servers: with `--dist loadfile` one process runs them, one after the
other. The group that takes longest first. After `restore_left_served`, which changes a bandwidth, a
server keeps nothing of what it learns.
"""

_GROUPS = {f"test_{name}": group for group, names in SHARING.items() for name in names}
_SHARED: pytest.StashKey[Any] = pytest.StashKey()
if folder := os.environ.get("KVTIER_MOONCAKE_SITE"):
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getenv("PYTHONPATH"), folder)))

settings.register_profile(
    "kvtier",
    deadline=None,
    derandomize="KVTIER_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtier")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--most-server-starts", type=int, help="fail when more real servers were started"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ServerStarts(config))


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
