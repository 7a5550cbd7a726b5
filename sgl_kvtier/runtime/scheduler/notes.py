"""Settings in force, decision log, learned profile and metrics of a restoring server."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import PolicyChanged, RulesTuned
from sgl_kvtier.runtime.metrics import Sample, Source
from sgl_kvtier.runtime.proof.record import State
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.records.cost_profile import Learning
from sgl_kvtier.runtime.records.decision_file import DecisionFile
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.sglang import storage_ops


class RestoreNotes:
    """One per scheduler process. Scheduler's thread, except `samples`."""

    def __init__(
        self,
        config: PolicyConfig,
        engine: RestoreEngine,
        planner: Learning,
        agreement: Agreement,
        log: DecisionFile | None,
    ) -> None:
        self.config = config
        self.metrics: Source | None = None
        self.is_unproven = False
        """Whether the server started without restoration on a device whose copies are checked at
        the start only.
        """
        self._engine = engine
        self._planner = planner
        self._agreement = agreement
        self._log = log
        self._apply(config)

    def configure(self, config: PolicyConfig) -> None:
        """Applies other settings from the next request on. Restorations in progress keep their
        mode. Restoration stays off where `stays_off` says why.
        """
        self.config = config
        self._apply(config)
        self._planner.observe(PolicyChanged(config, self._engine.context.now))

    def _apply(self, config: PolicyConfig) -> None:
        """Applies the settings that the runtime uses itself, at the start and after a change."""
        self._engine.offers.is_on = config.restore != "off" and not self.stays_off
        self._engine.offers.min_tokens = config.min_restore_tokens

    @property
    def is_refuted(self) -> bool:
        """Whether restored pages were found to be wrong on this device."""
        return self._engine.proof.state is State.REFUTED

    @property
    def stays_off(self) -> str:
        """Why restoration cannot be turned on; empty if it can."""
        if self.is_refuted:
            return "restoring was not right on this device, and stays off: see the server's log"
        if self.is_unproven:
            return (
                "restoring was off when this server started, so its copies were not checked on "
                "this device. Change policy.restore in kvtier.json and restart the server"
            )
        return ""

    def tune(self, name: str, value: float) -> None:
        """Changes a number of the planner's rules from the next request on. Raises ValueError if
        the class in policy.rules has no such name or refuses the value.
        """
        refused = self._planner.query(RulesTuned(name, value))
        if refused is not None:
            raise ValueError(refused)

    def forget_links(self) -> None:
        """An experiment changed the bandwidth: what is learned from now on is not kept."""
        self._planner.stop_keeping()

    def samples(self) -> Iterator[Sample]:
        """All metrics of restorations, for /metrics. Each meeting point is reported once."""
        yield from self._engine.counters.counts(self._engine.context.page)
        yield from self._engine.proof.samples()
        yield "reductions", {}, self._agreement.reductions
        for result, attaches in dict(self._engine.proof.attaches).items():
            yield "proof_attaches", {"result": result}, attaches
        yield "log_lines_dropped", {}, self._log.dropped if self._log is not None else 0
        met = self._engine.counters.meetings
        while met:
            yield "meeting_position", {}, met.popleft()
        yield "under_way", {}, len(self._engine.restorations)
        yield "writes_waiting", {}, storage_ops.writes_waiting(self._engine.context.tree)
        if self._planner.break_even_bytes_per_s is not None:
            yield "break_even_bytes_per_second", {}, self._planner.break_even_bytes_per_s

    def close(self) -> None:
        """Publishes a last time, writes what is left and ends the threads. Idempotent."""
        if self.metrics is not None:
            self.metrics.close()
        if self._log is not None:
            self._log.close()
        self._planner.close()
