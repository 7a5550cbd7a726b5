"""A live progress bar on a terminal, with `rich` (extra [bench])."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from sgl_kvtier.console.progress import Progress, format_duration


def live_progress(state: Progress, file: TextIO) -> AbstractContextManager[None] | None:
    """A bar on `file` while its block runs; None if the terminal cannot move its cursor."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    return None if console.is_dumb_terminal else _shown(state, console)


@contextmanager
def _shown(state: Progress, console: Console) -> Iterator[None]:
    # On a narrow terminal only the note is cut; counts and times matter more. stdout is not
    # redirected: the caller's output must reach stdout, not the bar's stderr.
    bar = RichProgress(
        _Cell(state, lambda s: s.label, "bold"),
        BarColumn(bar_width=24 if console.width >= 90 else 8),
        _Cell(state, lambda s: s.count()),
        _Cell(state, lambda s: format_duration(s.elapsed_s)),
        _Cell(state, _left, "cyan"),
        _Cell(state, lambda s: s.note, "dim", table_column=Column(ratio=1, no_wrap=True)),
        console=console,
        redirect_stdout=False,
        expand=True,
    )
    state.say_by(lambda message: bar.console.print(Text(message)))
    with bar:
        bar.add_task(state.label, total=None)
        try:
            yield
        finally:
            bar.refresh()


class _Cell(ProgressColumn):
    """One text of the live display, read from the state whenever it is drawn."""

    def __init__(
        self,
        state: Progress,
        text: Callable[[Progress], str],
        style: str = "",
        table_column: Column | None = None,
    ) -> None:
        super().__init__(table_column or Column(no_wrap=True))
        self._state, self._text, self._style = state, text, style

    def render(self, task: Task) -> Text:
        task.total, task.completed = self._state.total, self._state.done
        return Text(self._text(self._state), style=self._style, overflow="ellipsis", no_wrap=True)


def _left(state: Progress) -> str:
    return "" if state.left_s is None else f"~{format_duration(state.left_s)} left"
