"""What tasks and the process that gave them out tell each other through a folder: how far they are, and to stop.

Executors carry arguments and results only, and Ctrl-C reaches the workers of some of them and not of others. A folder
that both sides see, the store's or a temporary one, is enough: tasks write how many iterations they have done, and stop
where a file asks them to. On machines that don't see the folder, tasks run on as if nobody watched.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 0.3  # between two looks
PREFIX = "watch-"
STOP = "stop"


@dataclass
class Watch:
    """A task's side, called after each of its iterations.

    :param folder: what both sides see.
    :param task: its number.
    """

    folder: Path
    task: int
    _next: float = field(default=0.0, init=False)

    @property
    def told_to_stop(self) -> bool:
        return (self.folder / STOP).exists()

    def __call__(self, iteration: int) -> None:
        """:raises KeyboardInterrupt: if told to stop."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + SECONDS
        with contextlib.suppress(OSError):  # nobody can see it here
            if self.folder.exists():
                (self.folder / str(self.task)).write_text(str(iteration))
        if self.told_to_stop:
            raise KeyboardInterrupt


class Watched:
    """The side of the process that gave the tasks out.

    :param store: the folder of a store, or ``None`` for a temporary folder.
    """

    def __init__(self, store: Path | None):
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=store))

    def iterations(self, task: int) -> int:
        """How many a task has done, as far as is known."""
        try:
            return int((self.folder / str(task)).read_text())
        except (OSError, ValueError):  # not begun, not seen from there, or being written
            return 0

    def stop(self) -> None:
        """Ask all tasks to stop."""
        with contextlib.suppress(OSError):
            (self.folder / STOP).touch()

    def close(self) -> None:
        """Take the folder away, when no task is left that could look."""
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep(store: Path) -> None:
    """Take away what broken-off runs left in a store."""
    for left in store.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
