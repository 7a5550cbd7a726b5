"""The arms of a comparison of two servers on one remote store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_kvtier.lab.experiment.arms import BASELINE, MOONCAKE, OURS, Setup

LOCAL, REMOTE, REMOTE_LOAD, ORACLE = "kvtier-local", "kvtier-remote", "kvtier-remote-load", "oracle"
ROUTES = ("moved", "round-robin")
"""How a session's turns are spread over two servers: it begins on A and goes on at B, or they take
turns.
"""


@dataclass(frozen=True)
class RemoteArm:
    """One way: the arm of `arms.ARMS` that both servers are, and more of kvtier.json."""

    kind: str
    about: str
    shares: bool = False
    """Both servers use the remote store."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    at_home: bool = False
    """All turns of a session go to B."""

    def setup(self, setup: Setup, master: str) -> Setup:
        """The servers' settings over the store of this master."""
        sections = {**setup.sections}
        if self.shares and self.kind == OURS:
            sections["remote"] = {"engine": "mooncake", "master": master}
        if self.policy:
            sections["policy"] = {**sections.get("policy", {}), **self.policy}
        return replace(setup, sections=sections, master=master, linked=True)


REMOTE_ARMS = {
    BASELINE: RemoteArm(BASELINE, "nothing is kept between servers: B computes the prompt"),
    LOCAL: RemoteArm(OURS, "kvtier with a folder for each server, nothing shared"),
    MOONCAKE: RemoteArm(MOONCAKE, "stock SGLang's own Mooncake backend", shares=True),
    REMOTE: RemoteArm(OURS, "kvtier with the remote store, restored from both ends", shares=True),
    REMOTE_LOAD: RemoteArm(OURS, "the same, loaded whole", shares=True, policy={"restore": "load"}),
    ORACLE: RemoteArm(OURS, "B served the session itself, and has it in memory", at_home=True),
}
"""Every arm. The order is the one results are shown in."""


def server_of(route: str, arm: RemoteArm, turn: int, turns: int) -> int:
    """Which server a turn, counted from 0, goes to: 0 is A, 1 is B."""
    if arm.at_home:
        return 1
    return turn % 2 if route == "round-robin" else int(turn >= turns // 2)


def is_moved(route: str, turn: int, turns: int) -> bool:
    """Whether the turn before was another server's."""
    plain = REMOTE_ARMS[BASELINE]
    now, before = (server_of(route, plain, t, turns) for t in (turn, turn - 1))
    return turn > 0 and now != before
