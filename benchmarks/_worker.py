"""Processes that benchmarks time in turn: one contender each, so that peaks of memory do not mix. Standard library only.

A worker prepares its inputs, prints one line of JSON, then runs once for each line it reads and answers with seconds and bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the start or the last `reset`) of this process in bytes; 0 where unknown."""
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) << 10


def reset() -> bool:
    """Start VmHWM anew; False where the system does not allow it (then it covers the process's whole life)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def available() -> int:
    """Bytes of memory that a new process could use; 0 where unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    except (OSError, StopIteration):
        return 0


def serve(run: Callable[[], Any], **ready: Any) -> None:
    """The worker's side: `run` once for every line read. Answers seconds, the rise of memory over what was held before the run
    (`rise`) and the process's highest so far (`peak`)."""
    print(json.dumps(ready), flush=True)
    highest = memory("VmHWM")
    for _ in sys.stdin:
        before = memory("VmRSS")
        reset()
        start = time.perf_counter()
        shown = run()
        seconds = time.perf_counter() - start
        top = memory("VmHWM")
        highest = max(highest, top)
        print(json.dumps({"seconds": seconds, "rise": max(0, top - before), "peak": highest, "value": shown}), flush=True)


class Worker:
    """The other side. `first` holds the answer of its first run; later ones only add to `seconds`."""

    def __init__(self, name: str, command: list[str | Path], threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        # speculators compiles parts of its step: on a CPU without its kernels that changes no value and takes minutes
        env["TORCHDYNAMO_DISABLE"] = "1"
        self.name, self.seconds = name, list[float]()
        self.first: dict[str, Any] | None = None
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name}: ended with code {self.process.wait()}")

    def run(self) -> dict[str, Any]:
        """Once more."""
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        found = self._answer()
        if self.first is None:
            self.first = found
        else:
            self.seconds.append(found["seconds"])
        return found

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def paired(numerator: Worker, denominator: Worker) -> list[float]:
    """Ratios of the seconds of runs that followed each other."""
    return [a / b for a, b in zip(numerator.seconds, denominator.seconds)]
