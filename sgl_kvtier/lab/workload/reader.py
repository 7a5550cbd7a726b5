"""What all readers of trace files have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.lab.workload.catalogue import Origin, name_of
from sgl_kvtier.lab.workload.lines import BadRecord
from sgl_kvtier.lab.workload.session import Event, Session

Found = list[tuple[int, list[Session] | BadRecord]]
"""Sessions, or why there are none, each with the number of its first record."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a reader is made with. `left_out` counts what it leaves out, by what it is;
    `block_tokens` is what --block-tokens says.
    """

    path: Path
    origin: Origin
    left_out: Counter[str] = field(default_factory=Counter)
    block_tokens: int | None = None


class Reader:
    """Records of one file to sessions. A method for each format takes the number of a record and
    the record, and returns its sessions. It raises BadRecord.
    """

    def __init__(self, setting: Setting) -> None:
        self.path = setting.path
        self.stem = name_of(setting.path)
        self.origin = setting.origin
        self.left_out = setting.left_out

    def kept(self) -> Iterator[tuple[int, Callable[[], Session]]]:
        """Sessions of several records, which the end of the file completes: the number of the
        first record, and what makes the session or raises BadRecord.
        """
        return iter(())

    def rest(self) -> Found:
        """The sessions of `kept`, in the order of their first records."""
        found: Found = []
        for number, make in self.kept():
            try:
                found.append((number, [make()]))
            except BadRecord as error:
                found.append((number, error))
        return found

    def session(self, name: str, events: Iterable[Event], **more: Any) -> Session:
        """A session of this file's source and licence."""
        about = {"source": self.origin.source, "licence": self.origin.licence}
        return Session(session_id=name, events=tuple(events), **{**about, **more})
