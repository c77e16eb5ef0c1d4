"""Compile the kernels once per machine and load them.

The library has a plain C interface, so it needs no PyTorch headers and builds in seconds; its name carries a hash of the
sources, the flags and the CPU's features, so a new version or another machine in a shared home never loads a wrong one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = ("common.h", "linear.h", "attention.h", "model.h", "rows.h", "forward.cpp", "sampling.cpp", "verify.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off")


class KernelError(RuntimeError):
    """The kernels cannot be used here; the message says why in one line."""


def cache_folder() -> Path:
    """Where compiled kernels live: $DRAFTSMITH_CACHE/kernels, default ~/.cache/draftsmith/kernels."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith") / "kernels"


def cpu_flags() -> str:
    """Sorted feature flags of the first CPU as the kernel lists them ("" where it does not)."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return ""


def _compile(target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        raise KernelError("no C++ compiler found (install g++ to get them)")
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(Path(__file__).parent / name) for name in SOURCES if name.endswith(".cpp")]
    # compile beside the target and rename: processes racing here each install a complete library
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "kernels.so"
        try:
            result = subprocess.run(
                [*compiler.split(), *FLAGS, *sources, "-o", str(built)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelError(f"{compiler} did not run: {error}") from error
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or ["unknown error"]
            raise KernelError(f"{compiler} failed: {lines[0][:200]}")
        built.replace(target)


@cache
def library() -> ctypes.CDLL:
    """The loaded library (compiled on the first call on this machine). Raises KernelError."""
    if os.environ.get("DRAFTSMITH_KERNELS", "1") == "0":
        raise KernelError("switched off by DRAFTSMITH_KERNELS=0")
    flags = cpu_flags()
    if platform.machine() not in ("x86_64", "AMD64") or "avx512f" not in flags.split():
        raise KernelError("this CPU has no AVX-512")
    digest = hashlib.sha256("\n".join((*FLAGS, flags, os.environ.get("CXX", ""))).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    target = cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    try:
        if not target.exists():
            _compile(target)
        lib = ctypes.CDLL(str(target))
    except OSError as error:
        raise KernelError(f"cannot build or load {target}: {error}") from error
    _declare(lib)
    return lib


def _declare(lib: ctypes.CDLL) -> None:
    i64, ptr = ctypes.c_int64, ctypes.c_void_p
    for name, result, arguments in (
        ("ds_init", ctypes.c_int, [ctypes.c_int]),
        ("ds_packed_size", i64, [i64, i64, i64]),
        ("ds_pack", None, [i64, ptr, i64, i64, ptr, i64]),
        ("ds_linear", None, [i64, ptr, i64, ptr, ptr, i64, i64, ptr, i64, i64]),
        ("ds_model_new", ptr, [i64, ptr, ptr]),
        ("ds_model_free", None, [i64, ptr]),
        ("ds_forward", i64, [i64, ptr, ptr]),
        ("ds_read", ctypes.c_float, [ptr, i64, i64]),
        ("ds_law", None, [i64, ptr]),
        ("ds_draw", None, [ptr]),
        ("ds_chain", i64, [ptr]),
        ("ds_verify", i64, [ptr]),
        ("ds_greedy", None, [ptr, ptr, ptr, i64, i64, ptr, ptr]),
        ("ds_uniforms", None, [ptr, ptr, i64, i64, i64, ptr]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


class Features:
    """Bits of ds_init."""

    FLOAT32, BF16_DOT, BF16_TILES = 1, 2, 4


@cache
def features() -> int:
    """What this machine runs, as bits of `Features`; 0 when the library cannot be used (see `library` for why)."""
    try:
        return int(library().ds_init(1))
    except KernelError:
        return 0


def problem(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run in `dtype` on this machine, or None if they can (compiles them if needed)."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"no CPU kernels for {dtype}"
    try:
        library()
    except KernelError as error:
        return str(error)
    if dtype == torch.bfloat16 and not features() & (Features.BF16_DOT | Features.BF16_TILES):
        return "this CPU has no bf16 instructions"
    return None if features() & Features.FLOAT32 else "this CPU has no AVX-512"


def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels run in `dtype` on this machine."""
    return problem(dtype) is None
