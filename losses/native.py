"""The row passes of the fused objective in native code (`native.cpp`), for float32 and bfloat16 logits on a CPU.

Compiled once per machine with the system's C++ compiler, into $DRAFTSMITH_CACHE/kernels (default ~/.cache/draftsmith/kernels).
Where there is no compiler, or with DRAFTSMITH_KERNELS=0, the same passes run as tensor code (`rows.py`).
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
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
# No -ffast-math: the exponential needs its additions in the order written.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
WIDE_VECTORS = "-mprefer-vector-width=512"
# The first finds torch's own OpenMP loaded and shares its threads: others would compete with those, which spin for a while
# after every product (measured: twice the time). The second has threads of its own.
THREADS = ("-fopenmp", "-fopenmp-simd")


def _fields(numbers: str, pointers: str) -> list[tuple[str, type]]:
    kinds: list[tuple[str, type]] = [(name, ctypes.c_int64) for name in numbers.split()]
    return kinds + [(name, ctypes.c_void_p) for name in pointers.split()]


class LawCall(ctypes.Structure):
    """Mirrors `struct Law` of native.cpp."""

    _fields_ = _fields("rows width vocab wide threads", "logits ids given p lse mass cross top")


class RowsCall(ctypes.Structure):
    """Mirrors `struct Rows` of native.cpp."""

    _fields_ = _fields(
        "rows vocab wide threads statistics",
        "z p local order column highest total cross alpha below best scale d_alpha d_kl d_label",
    )


def _cpu_features() -> str:
    """What -march=native may mean on this machine, so that a shared home never hands another's build on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, target: Path) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    wide = (WIDE_VECTORS,) if platform.machine() in ("x86_64", "AMD64") else ()
    # compile beside the target and rename: processes racing here each install a complete library
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "losses.so"
        for threads in THREADS:
            command = [*compiler.split(), *FLAGS, threads, *wide, str(SOURCE), "-o", str(built)]
            if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0:
                built.replace(target)
                return True
        return False


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, compiled on the first call on this machine; None where that is impossible or switched off."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if os.environ.get("DRAFTSMITH_KERNELS", "1") == "0" or not compiler:
        return None
    key = hashlib.sha256("\n".join((*FLAGS, *THREADS, compiler, _cpu_features())).encode() + SOURCE.read_bytes()).hexdigest()
    folder = Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith") / "kernels"
    target = folder / f"losses-{key[:16]}.so"
    try:
        if not target.exists() and not _compile(compiler, target):
            return None
        loaded = ctypes.CDLL(str(target))
    except (OSError, subprocess.TimeoutExpired):
        return None
    for name, kind in (("ds_law", LawCall), ("ds_rows", RowsCall)):
        function = getattr(loaded, name)
        function.restype, function.argtypes = None, [ctypes.POINTER(kind)]
    return loaded


def usable(logits: Tensor) -> bool:
    """Whether the native passes take logits of this dtype and device."""
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16) and library() is not None


def _at(x: Tensor | None) -> int | None:
    assert x is None or (x.is_contiguous() and x.device.type == "cpu")
    return None if x is None else x.data_ptr()


def law(
    *, logits: Tensor, ids: Tensor | None, given: Tensor | None, p: Tensor, lse: Tensor, mass: Tensor, cross: Tensor | None,
    top: Tensor | None,
) -> None:  # fmt: skip
    """p float32 [U, Vd] = softmax of `logits` [U, V] float32 or bf16, at the columns `ids` int64 [Vd] (None: all of them).

    given: float32 [U] log-normalisers, else they are found. Fills, float32 [U], lse, mass = sum p and cross = sum p t (None:
    not wanted), and top int64 [U], the arg-max (None: not wanted). `p` may share the memory of float32 `logits`.
    """
    loaded = library()
    assert loaded is not None and p.dtype == lse.dtype == torch.float32 and (ids is None or ids.dtype == torch.int64)
    wide, threads = int(logits.dtype == torch.float32), torch.get_num_threads()
    tensors = (logits, ids, given, p, lse, mass, cross, top)
    call = LawCall(len(logits), logits.shape[1], p.shape[1], wide, threads, *(_at(x) for x in tensors))
    loaded.ds_law(ctypes.byref(call))


def rows(
    *, z: Tensor, p: Tensor, local: Tensor, order: Tensor | None, column: Tensor, sums: tuple[Tensor | None, ...], best: Tensor,
    statistics: bool, scale: Tensor | None = None, weights: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Statistics of draft logits `z` [N, Vd] (float32 or bf16) against `p`, and with `scale` their gradient over `z`.

    local, column: int64 [N] row of `p`, and column of the text token or -1. order: int64 [N], in what order to work, or None.
    sums: float32 [N] each: largest logit, sum exp(z - largest), sum p z (None: not wanted), alpha, sum q 1[q <= p];
    best: int64 [N]. They are filled if `statistics`, else read. scale, weights: as for `rows.gradient`, float32 [N].
    """
    loaded = library()
    assert loaded is not None and p.dtype == torch.float32 and all(x is None or x.dtype == torch.float32 for x in sums)
    weights = {k: v.contiguous() for k, v in (weights or {}).items()}
    given = (scale, *(weights.get(name) for name in ("alpha", "kl", "log_q_label")))
    assert all(x is None or x.dtype == torch.float32 for x in given)
    wide, threads = int(z.dtype == torch.float32), torch.get_num_threads()
    tensors = (z, p, local, order, column, *sums, best, *given)
    call = RowsCall(len(z), z.shape[1], wide, threads, int(statistics), *(_at(x) for x in tensors))
    loaded.ds_rows(ctypes.byref(call))
