"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` when the block ends without an error.

    An older `folder` moves aside whole and is then removed: deleting it in place could be cut short and leave half of it under
    the final name. After an error the older one stands as it was.
    """
    temporary, outdated = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    for leftover in (temporary, outdated):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(outdated)
    try:
        temporary.replace(folder)
    except OSError:
        if outdated.exists():
            outdated.rename(folder)
        raise
    shutil.rmtree(outdated, ignore_errors=True)
