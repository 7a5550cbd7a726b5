"""The frame of every command that measures: its checks, the ways a run ends, its output.

A run that is stopped, or cannot go on, reports what it had measured before it ends so; and nothing
interrupts a report.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.console import (
    Table,
    check_target,
    envelope,
    print_statement,
    print_table,
    write_json,
    write_text,
)
from sgl_kvtier.console.environment import planner_build
from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.lab.experiment.argtypes import Options
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.lab.outside.server import end_on_signals, signals_handled
from sgl_kvtier.launch import missing_packages, paced_device


@dataclass
class Experiment:
    """One run of a command: what it does, and what follows from that.

    `sentence` is printed before the tables, with whether it is bad news; `behind` after them: where
    more is. `measured` says whether anything was; a failure before that writes nothing. `standing`
    are notes of every such result: they are in the result and on its page, and not printed.
    """

    args: Options
    schema: str
    measure: Callable[[], None]
    results: Callable[[], dict[str, Any]]
    tables: Callable[[dict[str, Any]], Sequence[Table]]
    page: Callable[[dict[str, Any]], str] | None = None
    sentence: Callable[[dict[str, Any]], tuple[str, bool]] | None = None
    behind: str = ""
    standing: Sequence[str] = ()
    notes: Callable[[], Sequence[str]] = lambda: ()
    measured: Callable[[], bool] = lambda: True
    sound: Callable[[dict[str, Any]], bool] = lambda _: True

    def run(self) -> int:
        """Measures and reports. The exit status: 0, 1 where the result is not sound, 130 after
        Ctrl-C. Raises BenchError when the run could not go on.
        """
        interrupted, failure = False, None
        with end_on_signals():
            if not self.args.url:  # that server's is not known here
                print(f"The planner runs as: {planner_build()}", file=sys.stderr)
            try:
                self.measure()
            except KeyboardInterrupt:
                interrupted = True
            except BenchError as error:
                if not self.measured():
                    raise
                failure = error
            with undisturbed():
                said = [*self.notes(), *early_end(interrupted, failure)]
                notes = [*self.standing, *said]
                found = {**self.results(), "interrupted": interrupted, "notes": notes}
                result = envelope(self.schema, ["kvtier", *sys.argv[1:]], found)
                self._report(result, said)
        if failure is not None:
            raise failure
        if interrupted:
            return 130
        return 0 if self.sound(result) else 1

    def _report(self, result: dict[str, Any], said: Sequence[str]) -> None:
        page = self.args.html
        shown = sys.stderr if "-" in (self.args.json, page) else sys.stdout
        if self.sentence is not None:
            print_statement(*self.sentence(result), shown)
        for table in self.tables(result):
            print_table(table, shown)
            print(file=shown)
        if self.behind:
            print(self.behind, file=shown)
        for note in said:
            print(note, file=shown)
        if self.args.json is not None:
            write_json(result, self.args.json)
        if page is not None and self.page is not None:
            write_text(self.page(result), page)
        for what, target in (("result", self.args.json), ("page", page)):
            if target not in (None, "-"):
                print(f"The {what} is in {target}", file=shown)


def check(args: Options, *, starts_servers: bool = True) -> None:
    """Checks a command before anything is done.

    Raises KVTierError where a result cannot be written, or a server cannot be started on this
    device. Libraries of SGLang's own backends that are in an environment of their own are found
    from here on.
    """
    peers.use_installed()
    paced = paced_device(args.device or "", args.dilation or 1.0)
    if paced is not None:
        paced.refuse_others(_server_words(args))
    for target in (args.json, args.html):
        if target is not None:
            check_target(target)
    if starts_servers and missing_packages():
        raise BenchError(
            f"SGLang is not installed for {sys.executable}. Install it with: {how_to_install('sglang')} "
            "(about 10 GB), or run scripts/compare, which does that in an environment of its own"
        )


def _server_words(args: Options) -> list[str]:
    """The options that say what a server is like, as arguments."""
    asked = {"dtype": args.dtype, "tp": args.tp, "page-size": args.page_size}
    asked["threads"] = args.threads
    return [*(f"--{name}={value}" for name, value in asked.items() if value), *args.server_arg]


@contextlib.contextmanager
def work_folder(wanted: Path | None, is_needed: Callable[[], bool]) -> Iterator[Path]:
    """The given folder, or a temporary one; signals end the block as Ctrl-C does.

    A temporary one is removed unless its logs are needed, or an error ends the block.
    """
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--folder {wanted}: {error.strerror}") from error
        with end_on_signals():
            yield wanted.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="kvtier-lab-"))
    failed = False
    try:
        with end_on_signals():
            yield folder
    except BenchError:
        failed = True
        raise
    finally:
        logs = list(folder.glob("**/server.log"))
        if logs and (failed or is_needed()):
            for storage in folder.glob("**/storage"):
                shutil.rmtree(storage, ignore_errors=True)
            print(f"The servers' logs are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def early_end(interrupted: bool, failure: BenchError | None) -> list[str]:
    """Notes of a result on a run that ended early, without the end of a server's log."""
    if interrupted:
        return ["Interrupted: figures are from what had been measured."]
    if failure is None:
        return []
    what = str(failure).splitlines()[0].split(" Last lines of ")[0].rstrip(".")
    return [f"Ended by a failure: {what}. Figures are from what had been measured."]


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Ctrl-C, SIGTERM and SIGHUP do nothing inside: the results of many minutes are being written."""
    return signals_handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
