"""Any sequence of puts, reads, deletes and faults on two servers agrees with a plain dictionary."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from remote_pages import STARTED_S
from store_pages import content, key, put, read

from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.types import Lookup

NAMES = st.integers(0, 20)
WHO = st.integers(0, 1)
FAULTS = st.sampled_from(
    [{}, {"get": {"flip": 0.3}}, {"get": {"swap": 0.5, "late": 0.2}}, {"refuse": True}, {"get": {"torn": 0.5, "fail": 0.2}}]
)  # fmt: skip
_example = itertools.count()


def test_two_servers_agree_with_a_dictionary(
    opened: Callable[..., RemoteStore], folder: Path
) -> None:
    stores = [opened(), opened()]

    class Model(RuleBasedStateMachine):
        """`stored` is what was written and not deleted since. A page may be missed, never another
        one returned.
        """

        @initialize()
        def begin(self) -> None:
            set_faults(folder, {})
            self.stored: dict[int, tuple[object, int]] = {}
            self.round = next(_example)
            self.writes = 0
            self.usable(0).clear()
            self.usable(1).clear()

        def usable(self, who: int) -> RemoteStore:
            assert stores[who].wait_usable(STARTED_S)
            return stores[who]

        @rule(
            who=WHO,
            names=st.lists(NAMES, min_size=1, max_size=8, unique=True),
            size=st.sampled_from((1, 500, 70_000)),
        )
        def put(self, who: int, names: list[int], size: int) -> None:
            self.writes += 1
            mark = (self.round, self.writes)
            found = put(self.usable(who), {key(n): content((n, mark), size) for n in names})
            for n, outcome in zip(names, found, strict=True):
                if outcome is PutOutcome.STORED:
                    self.stored[n] = (mark, size)

        @rule(who=WHO, names=st.lists(NAMES, min_size=1, max_size=12, unique=True))
        def read(self, who: int, names: list[int]) -> None:
            for n in names:
                mark, size = self.stored.get(n, (0, 100))
                ((outcome, data),) = read(self.usable(who), {key(n): size})
                if outcome is ReadOutcome.OK:
                    assert n in self.stored
                    assert data == content((n, mark), size)

        @rule(who=WHO, names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
        def delete(self, who: int, names: list[int]) -> None:
            self.usable(who).delete([key(n) for n in names])
            for n in names:
                self.stored.pop(n, None)
            assert self.usable(who).lookup([key(n) for n in names]) == [Lookup.MISS] * len(names)

        @rule(who=WHO)
        def clear(self, who: int) -> None:
            self.usable(who).clear()
            self.stored.clear()

        @rule(who=WHO)
        def ask(self, who: int) -> None:
            self.usable(who).ask([key(n) for n in range(21)], timeout_s=5)

        @rule(faults=FAULTS)
        def change_faults(self, faults: dict[str, object]) -> None:
            set_faults(folder, faults)

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for store in stores:
        os.kill(store.condition().child, signal.SIGKILL)
