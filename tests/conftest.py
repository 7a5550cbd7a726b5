"""For all rooms: property tests have no time limit per example, because machines are noisy and tests assert no times."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")
