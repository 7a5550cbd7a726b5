"""Stand-ins for Mooncake's master and owner: they start nothing, and keep what they are told."""

from __future__ import annotations

from typing import Any, ClassVar


class FakeEngine:
    """A master and an owner as `remote.servers.Servers` starts them."""

    live = 0
    """How many were started and not stopped."""

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.master = "127.0.0.1:50051"

    def start_master(self) -> None:
        FakeEngine.live += 1

    def start_owner(self) -> None:
        pass

    def stop(self) -> None:
        FakeEngine.live -= 1


class FakeCluster(FakeEngine):
    """The same behind a link. `speeds` are those it was set to, of all of them."""

    speeds: ClassVar[list[float]] = []

    def __init__(self, segment_bytes: int, throttled: bool = True) -> None:
        super().__init__(segment_bytes)

    def speed(self, gbps: float) -> None:
        self.speeds.append(gbps)

    def __enter__(self) -> FakeCluster:
        self.start_master()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
