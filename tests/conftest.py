"""For all rooms: property tests have no time limit per example, because machines are noisy and
tests assert no times.

They try the same examples in every run, so that a change fails or passes by its own doing. With
KVTIER_EXPLORE=20 in the environment they try other ones in each run, and those of policy/ 20 times
as many: to be run after a change there.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvtier",
    deadline=None,
    derandomize="KVTIER_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtier")
