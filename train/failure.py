"""Stopping: on SIGTERM after a save, on an exception at once and with its cause printed first, and at the end of all work."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist
from accelerate import Accelerator

PR_SET_PDEATHSIG = 1
TEARDOWN_SECONDS = 20.0  # after a failure, for closing files and trackers


class Stopped(SystemExit):
    """SIGTERM arrived: the run was saved after `step` steps and can be resumed. Uncaught, the process exits with code 0."""

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step

    def __str__(self) -> str:
        return f"stopped by SIGTERM and saved after step {self.step}; the same command goes on from there"


def follow_launcher() -> None:
    """Under a launcher, get a SIGTERM when it dies (Linux): it would otherwise leave processes behind that train on."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


class StopSignal:
    """Remembers a SIGTERM instead of dying of it. Inside a thread other than the main one it never triggers."""

    def __init__(self) -> None:
        self.requested = False
        self._before: object = None
        self._mine = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopSignal:
        if self._mine:
            self._before = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._mine:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@contextmanager
def guard(accelerator: Accelerator, *, brief: bool = False) -> Iterator[None]:
    """An exception of one process of several is printed with its traceback before anything else can hang or fail.

    brief: a ValueError is a user's mistake and takes one line (set-up); inside the steps it may be anybody's.

    It is also handed to torchrun, whose summary then names the cause, and a process that cannot be torn down ends by itself.
    """
    try:
        yield
    except Exception as error:
        if accelerator.num_processes > 1 and not getattr(error, "_reported", False):
            _report(accelerator.process_index, error, brief=brief)
            ending = threading.Timer(TEARDOWN_SECONDS, os._exit, (1,))
            ending.daemon = True
            ending.start()
        raise


def _report(rank: int, error: Exception, *, brief: bool) -> None:
    error._reported = True  # type: ignore[attr-defined]
    sys.stdout.flush()
    text = f"error: {error}\n" if brief and isinstance(error, ValueError) else traceback.format_exc()
    sys.stderr.write(f"process {rank} failed:\n{text}")
    sys.stderr.flush()
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        ErrorHandler().record_exception(error)


@contextmanager
def whole_job(accelerator: Accelerator) -> Iterator[None]:
    """Around everything that several processes do together: a failure of this one ends it, without waiting for the others.

    An interpreter that shuts down in order may wait for a collective that never comes; then the launcher would not notice.
    """
    try:
        with guard(accelerator, brief=True):
            yield
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ValueError) else 1)


def finish(accelerator: Accelerator) -> None:
    """End this process with code 0 when all have come here; with one process it returns.

    Processes of a group sometimes abort while the interpreter shuts down, after all work is done: they do not get that far.
    """
    if accelerator.num_processes == 1:
        return
    with contextlib.suppress(RuntimeError):  # another one may be through the barrier and gone already: all work is done
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
