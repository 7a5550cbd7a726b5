"""For all rooms: long files run first, and property tests have no time limit per example, because
machines are noisy and tests assert no times.

Property tests try the same examples in every run, so that a change fails or passes by its own doing. With
KVTIER_EXPLORE=20 in the environment they try other ones in each run, and those of policy/ 20 times
as many: to be run after a change there.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

LONG = (
    "test_served",
    "test_store_torture",
    "test_gpu_scripts",
    "test_store_forks",
    "test_plots",
    "test_browser",
    "test_scatter",
    "test_fuzz_scenes",
    "test_compare_run",
    "test_real_traces",
    "test_store_rings",
    "test_storage",
)
"""Files of more than 8 seconds, the longest first. With two processes a long file at the end would
leave one of them idle.
"""

settings.register_profile(
    "kvtier",
    deadline=None,
    derandomize="KVTIER_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtier")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
