"""Tables and progress: with rich and tqdm where they are installed and somebody looks, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

QUIET_FOR = 2.0
"""Seconds from which progress is shown."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """Prints it; text to the left, numbers to the right. An empty row parts what stands above and below."""
    text = [not any(row[i][:1].isdigit() for row in rows if row) for i in range(len(header))]
    if sys.stdout.isatty():
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
            for name, is_text in zip(header, text, strict=True):
                drawn.add_column(name, justify="left" if is_text else "right", no_wrap=name != "")
            for row in rows:
                drawn.add_row(*row) if row else drawn.add_section()
            Console().print(drawn)
            return
    filled = [row for row in rows if row]
    widths = [max(map(len, column)) for column in zip(header, *filled, strict=True)]
    print(title)
    for row in (header, *filled):
        cells = (x.ljust(w) if t else x.rjust(w) for x, w, t in zip(row, widths, text, strict=True))
        print("  ".join(cells).rstrip())


@contextmanager
def progress(steps: int, name: str) -> Iterator[Callable[[], None]]:
    """Gives what to call after each step. Nothing is shown before :data:`QUIET_FOR` seconds, nor where stderr is no
    terminal."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(total=steps, desc=name, delay=QUIET_FOR, leave=False) as bar:
                yield lambda: bar.update() and None
            return
    yield lambda: None
