#!/usr/bin/env bash
# Training on a GPU in at most 8 minutes: DDP of one process, torch.compile, flex attention, bfloat16, packed rows, the
# target's forward on a side stream. Prints throughput, MFU, the split of a step and peak memory, and compares the losses of
# one batch in float32 on the GPU with those on the CPU.
#
#   bash benchmarks/gpu_train.sh                   on a GPU
#   bash benchmarks/gpu_train.sh --device cpu      the same program on a tiny model, as a smoke test (1 minute)
#
# PYTHON chooses the interpreter; other arguments go to benchmarks/gpu_train.py (--help).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
case " $* " in
  *" --device cpu "*) export ACCELERATE_USE_CPU=true ;;
  *) command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader ;;
esac
exec timeout 480 "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 1 benchmarks/gpu_train.py "$@"
