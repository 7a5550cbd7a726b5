"""Scenes of trouble for a serving machine, one after the other: what `kvtier bench restore-fuzz
--scene` plays.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.console import Column, Table, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import OURS, Setup
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.clock import OwnClock
from sgl_kvtier.lab.stress.server.log import FuzzLog
from sgl_kvtier.lab.stress.server.routes import detach_and_attach, hostile_requests
from sgl_kvtier.lab.stress.server.run import Asked, FuzzOptions
from sgl_kvtier.lab.stress.server.server import AHEAD, FuzzServer
from sgl_kvtier.lab.stress.server.stage import GBPS, Scene, Stage, check_store
from sgl_kvtier.lab.stress.trouble import Finding, halted

_CROWD = Chaos(kinds=("abort", "disconnect"), give_up=1.0, longest_s=1.0, start=("auto", GBPS))
_RESTORING = Chaos(
    kinds=("abort", "disconnect", "hint"), give_up=1.0, longest_s=1.0, start=("both", GBPS / 4)
)
_CROWD_CLIENTS = 240
_RESTORING_CLIENTS = 12
_STOPS_S = (1, 2, 5, 10, 20)
_RESTARTS = 50
_JUMPS_S = (3600, -3600, 0, 90_000, 0)
_TIGHT_HOST = 0.15
_MANY_CLIENTS = 32


@dataclass(frozen=True)
class Played:
    """A scene, its description, and the server it needs: its own host pool size, another clock, the
    signals that end it.
    """

    about: str
    scene: Scene
    host_ratio: float | None = None
    own_clock: bool = False
    signals: Sequence[signal.Signals] = (signal.SIGKILL,)

    @property
    def needs(self) -> tuple[object, ...]:
        """Scenes for which this is equal share one server."""
        return self.host_ratio, self.own_clock, self.signals


async def storm(stage: Stage) -> str:
    """All requests are given up, over HTTP and by hanging up.

    First there are more clients than can run, so most requests wait. Then there are few, whose
    prefixes are being restored: while device memory is short, none is.
    """
    given_up = 0
    for chaos, clients in ((_CROWD, _CROWD_CLIENTS), (_RESTORING, _RESTORING_CLIENTS)):
        begun = len(stage.log.attempts)
        async with stage.load(chaos, clients):
            await stage.wait(30 if chaos is _RESTORING else 60)
        given_up += sum(
            one.fate != "answered" and not one.complete for one in stage.log.attempts[begun:]
        )
    return f"{given_up} given up in {90 * stage.scale:g} s"


async def stop(stage: Stage) -> str:
    """SIGSTOP to the scheduler while it computes, reads and writes, then SIGCONT."""
    stops = 0
    async with stage.load():
        for seconds in _STOPS_S:
            await stage.pause()
            schedulers = stage.server.schedulers()
            with halted(schedulers):
                stops += len(schedulers)
                await stage.wait(seconds)
        await stage.pause()
    if not stops:
        stage.log.find(Finding.SCENE, "stop: there was no scheduler process to stop")
    return f"{stops} stops of {_STOPS_S[0] * stage.scale:g} to {_STOPS_S[-1] * stage.scale:g} s"


async def slow_disk(stage: Stage) -> str:
    """The store's device becomes 100 times slower and fast again, three times; the server is not
    told.
    """
    async with stage.load(), stage.client() as client:
        for _ in range(3):
            await stage.pause()
            await client.set_state({"kvtier.throttle.read_gbps": GBPS / 100})
            await stage.wait(10)
            await client.set_state({"kvtier.throttle.read_gbps": GBPS})
        await stage.pause()
    return f"3 times {10 * stage.scale:g} s at {GBPS / 100:g} Gbit/s"


async def clock(stage: Stage) -> str:
    """The time of day jumps by an hour, back, and by a day. Clocks that count seconds from the
    start are left alone.
    """
    assert stage.clock is not None, "its server has one"
    async with stage.load():
        for offset in _JUMPS_S:
            await stage.pause()
            stage.clock.move(offset)
            await stage.wait(8)
    return f"jumps to {', '.join(f'{offset:+d}' for offset in _JUMPS_S)} s"


async def full_host(stage: Stage) -> str:
    """Many long prompts at a time, in a host pool that holds few of them. Write-back, reads and
    restorations want it at once.
    """
    for mode in ("auto", "both"):
        async with stage.load(
            Chaos(kinds=("abort", "disconnect", "hint", "flush"), start=(mode, GBPS)), _MANY_CLIENTS
        ):
            await stage.wait(30)
    return f"{_MANY_CLIENTS} clients for 2 times {30 * stage.scale:g} s"


async def restarts(stage: Stage) -> str:
    """The server is ended under load, by SIGTERM and SIGKILL in turns, and started again on its
    store.
    """
    count, before = max(2, round(_RESTARTS * stage.scale)), Counter(stage.log.events)
    async with stage.load() as run:
        for number in range(count):
            await stage.pause()
            await run.restart()
            if not stage.server.alive:
                break
            pages = await _metric(stage, "kvtier:store_pages")
            if not pages:
                stage.log.find(
                    Finding.SCENE, f"restarts: start {number + 1} found no page in its store"
                )
        await stage.pause()
    done = Counter(stage.log.events) - before
    return f"{done['kill']} by SIGKILL, {done['terminate']} by SIGTERM"


async def routes(stage: Stage) -> str:
    """Requests that no sane client sends, to the routes of this package and to those of SGLang that
    reach it. Then the store is detached and attached again.
    """
    async with stage.load():
        sent = await hostile_requests(stage, 30 * stage.scale)
    await detach_and_attach(stage)
    return f"{sent} requests"


SCENES: Mapping[str, Played] = {
    "storm": Played(
        "every request is given up, about a hundred a second for 60 s, then 30 s more while "
        "prefixes are restored",
        storm,
    ),
    "stop": Played("the scheduler is stopped for 1, 2, 5, 10 and 20 s", stop),
    "slow-disk": Played("the device is 100 times slower for 10 s, three times", slow_disk),
    "routes": Played("hostile requests over HTTP for 30 s", routes),
    "clock": Played(
        "the time of day jumps by an hour and a day, and back (needs a C compiler)",
        clock,
        own_clock=True,
    ),
    "full-host": Played(
        "32 clients and a host pool for few prompts, for 60 s", full_host, host_ratio=_TIGHT_HOST
    ),
    "restarts": Played(
        "50 restarts under load, by SIGTERM and SIGKILL",
        restarts,
        signals=(signal.SIGTERM, signal.SIGKILL),
    ),
}
"""Every scene, with its full amount. Those that need no server of their own share one."""


def parse_scenes(text: str) -> tuple[str, ...]:
    """Scenes from a command line, in the order they are played. Raises BenchError on an unknown
    one.
    """
    wanted = (
        list(SCENES)
        if text == "all"
        else [word.strip() for word in text.split(",") if word.strip()]
    )
    unknown = [name for name in wanted if name not in SCENES]
    if unknown or not wanted:
        raise BenchError(
            f"--scene: no scene named {', '.join(unknown) or text!r}. There are: all, "
            f"{', '.join(SCENES)}"
        )
    return tuple(name for name in SCENES if name in wanted)


def play(
    names: Sequence[str],
    options: FuzzOptions,
    scale: float,
    setup: Setup,
    sessions: Sequence[Sequence[Asked]],
    log: FuzzLog,
    folder: Path,
    played: list[dict[str, Any]],
) -> None:
    """Plays the scenes, each on a server as it needs it; their outcomes are added to `played` one
    by one. Behind each server its store is checked. Raises BenchError when a server does not start.
    """

    async def on_one_server(group: Sequence[str], place: Path) -> None:
        first = SCENES[group[0]]
        own = OwnClock(place) if first.own_clock else None
        ratio = setup.host_ratio if first.host_ratio is None else first.host_ratio
        policy: dict[str, Any] = AHEAD if options.ahead else {}
        sections = {"policy": policy, "lab": {"throttle": {"read_gbps": GBPS}}}
        env, its = own.env if own else None, replace(setup, host_ratio=ratio)
        server = FuzzServer(OURS, its, place, log, sections, env, first.signals)
        try:
            shown.describe(f"{group[0]}: the server starts")
            server.start()
            stage = Stage(options, scale, server, sessions, log, own)
            await stage.open()
            for name in group:
                shown.describe(f"{name}, {len(log.findings)} findings")
                played.append(await stage.play(name, SCENES[name].scene))
                shown.advance()
        finally:
            server.stop()

    with progress("scenes", len(names), "scenes") as shown:
        for _needs, group in itertools.groupby(names, key=lambda name: SCENES[name].needs):
            place = folder / f"played-{len(played)}"
            shutil.rmtree(place / "storage", ignore_errors=True)
            asyncio.run(on_one_server(list(group), place))
            checked = check_store(place / "storage", log)
            for one in played[-1:]:
                one["store"] = checked


def scenes_table(played: Sequence[Mapping[str, Any]]) -> Table:
    """One row per scene."""
    columns = (
        Column("scene", "Scene"),
        Column("amount", "Amount"),
        Column("requests", "Requests", decimals=0),
        Column("given_up", "Given up", decimals=0),
        Column("restored", "Restored", decimals=0),
        Column("after", "Restored after it"),
        Column("found", "Findings", decimals=0),
    )
    rows = [
        {
            **one,
            "after": f"{one['restored_after']} of {one['asked_after']}",
            "found": len(one["findings"]),
        }
        for one in played
    ]
    return Table("Scenes", columns, rows)


async def _metric(stage: Stage, name: str) -> float:
    """A metric that is published a moment after the start."""
    for _ in range(20):
        async with stage.client() as client:
            value = (await client.metrics()).total(name)
        if value:
            return value
        await asyncio.sleep(0.5)
    return 0.0
