"""What a measurement ran on: hardware, threads, versions, dtype, git commit. A figure without these means little."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "numpy", "safetensors")
_VENDOR_NOISE = ("(R)", "(TM)", "CPU", "Processor")


def hardware_name(device: str | torch.device = "cpu") -> str:
    """Name of the device as its vendor gives it, with the logical core count for a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {usable_cores()} cores"


def usable_cores() -> int:
    """Logical cores this process may use (its affinity, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for key in ("model name", "Hardware", "CPU implementer"):
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key and value.strip():
                return " ".join(_strip_noise(value).split())
    return platform.processor() or platform.machine()


def _strip_noise(name: str) -> str:
    for noise in _VENDOR_NOISE:
        name = name.replace(noise, " ")
    return name


def cpu_features() -> list[str]:
    """The instruction sets that decide the speed of low-precision decoding here (empty off Linux/x86)."""
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return [flag for flag in wanted if flag in flags]


def memory_gib() -> float | None:
    """Physical memory in GiB, None where the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that holds this package, with `+dirty` when files differ; None outside a checkout."""
    folder = folder or Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None  # an installed package may lie inside somebody else's repository
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe(dtype: str, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The `environment` section of report.json: JSON-ready, no secrets, no paths."""
    device = torch.device(device)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    found: dict[str, Any] = {
        "hardware": hardware_name(device),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "memory_gib": memory_gib(),
        "cpu_features": cpu_features(),
        "load_average_at_start": None if load is None else round(load, 2),
        "versions": versions(),
        "dtype": dtype,
        "git_commit": git_commit(),
        "platform": platform.platform(terse=True),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return found
