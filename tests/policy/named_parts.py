"""A planner's settings and rules from numbers by name, each where it belongs; and pages by number."""

from __future__ import annotations

import dataclasses

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import PageKey

AHEAD = PolicyConfig(prefetch="on", eviction="next-use")
"""Settings that look ahead."""
SETTINGS = {field.name for field in dataclasses.fields(PolicyConfig)}


def parts(
    rules: type[Rules] = Rules, base: PolicyConfig = AHEAD, **given: object
) -> tuple[PolicyConfig, Rules]:
    """Settings as `base` and rules of a class, but for what is given."""
    settings = {name: value for name, value in given.items() if name in SETTINGS}
    numbers = {name: value for name, value in given.items() if name not in SETTINGS}
    return dataclasses.replace(base, **settings), rules(**numbers)  # type: ignore[arg-type]


def named(count: int, start: int = 0) -> tuple[PageKey, ...]:
    """So many pages, the first of which has this number."""
    return tuple(PageKey(n.to_bytes(32, "big")) for n in range(start, start + count))
