"""Which strategy a launch asks for, whether it is the one that runs, and one update under each of them.

`one`: one process; `ddp`: replicas; `fsdp2`: sharded by PyTorch; `zero1`, `zero2`, `zero3`: sharded by DeepSpeed. A launcher
that is configured slightly wrong starts several independent trainings, or fewer processes than asked, without a word: so the
number of processes and the strategy are compared with what was asked for, and a difference stops the run.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..models.dspark import DSpark
from ..models.lora import merge_state, merged
from .config import TrainConfig
from .failure import follow_launcher
from .optim import build_optimizer

REPLICATED = ("one", "ddp")
PREPARATION = timedelta(hours=12)  # the first process lets the target answer while the others wait


def launched() -> str:
    """The strategy that the launcher's environment asks for."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return f"zero{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        version = os.environ.get("FSDP_VERSION", "1")
        return "fsdp2" if version == "2" else f"fsdp{version}"
    return "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "one"


def engaged(accelerator: Accelerator) -> str:
    """The strategy that Accelerate runs."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    if kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return "ddp" if accelerator.num_processes > 1 else "one"
    return kind.value.lower()


def build(cfg: TrainConfig, device: str, output: Path) -> Accelerator:
    """Accelerate under the launcher's strategy, on `device` (cpu or cuda...), compared with what was asked for.

    output: where trackers that write files write them.

    Raises ValueError for a strategy that we do not train under, and as `verify`.
    """
    follow_launcher()
    wanted, cpu = launched(), device == "cpu"
    sharded = wanted not in REPLICATED
    group: dict[str, Any] = {"timeout": timedelta(seconds=cfg.collective_timeout)}
    if cpu and sharded:
        if torch.cuda.is_available():
            raise ValueError(f"--device: cpu is not allowed with {wanted}, which takes the GPUs; hide them or use the GPUs")
        _shard_on_cpu(wanted)
        if wanted.startswith("zero"):
            group["backend"] = "gloo"  # without it Accelerate sees one process and DeepSpeed all of them
    # The loop changes no output of the drafter in place, which this one warns of.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    accelerator = Accelerator(
        cpu=cpu and not sharded,
        mixed_precision="no",  # the recipe's train.precision decides, in the step
        log_with=None if cfg.tracker == "none" else cfg.tracker,
        project_dir=str(output / "tensorboard") if cfg.tracker == "tensorboard" else None,
        step_scheduler_with_optimizer=False,  # a prepared scheduler would step once per process
        kwargs_handlers=[InitProcessGroupKwargs(**group)],
    )
    verify(cfg, accelerator)
    _load_whole(accelerator)
    return accelerator


def _load_whole(accelerator: Accelerator) -> None:
    """Let transformers load the target whole: under ZeRO-3 it would cut every model that it loads into empty shards."""
    if engaged(accelerator) == "zero3":
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def _shard_on_cpu(wanted: str) -> None:
    """What FSDP2 and DeepSpeed need where there is no GPU (the tests run them so)."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # would turn them into DDP
    if wanted.startswith("fsdp"):
        # Accelerate offers FSDP to accelerators only: the processes must look like theirs, on gloo.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

        def backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
            return "gloo", DistributedType.MULTI_GPU

        PartialState._prepare_backend = backend
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.ops

        warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated")  # DeepSpeed's own calls, several a step
        # shared-memory collectives are built with a compiler for minutes, and gloo does without
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def verify(cfg: TrainConfig, accelerator: Accelerator) -> None:
    """Compare processes and strategy with the recipe's and the launcher's.

    Raises ValueError that says how to fix the launch.
    """
    world, found = accelerator.num_processes, engaged(accelerator)
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    help_ = "`draftsmith path accelerate/NAME` prints a config file for accelerate launch --config_file"
    if cfg.expected_world_size not in (None, world):
        raise ValueError(
            f"train.expected_world_size: {cfg.expected_world_size}, but {world} process(es) run ({found}); {help_} "
            "(accelerate launch --cpu and distributed_type MULTI_CPU start one process)"
        )
    if asked != world or (dist.is_initialized() and dist.get_world_size() != world):
        raise ValueError(
            f"the launcher started {asked} processes, but this one trains in a group of {world} ({found}): they would train "
            f"independently of each other; {help_}"
        )
    if found not in (*REPLICATED, "fsdp2", "zero1", "zero2", "zero3"):
        raise ValueError(f"the launcher asks for {found}; allowed are one, ddp, fsdp2 (fsdp_version: 2), zero1, zero2, zero3")
    expected = cfg.expected_strategy or launched()
    if found != expected:
        source = "train.expected_strategy" if cfg.expected_strategy else "the launcher"
        raise ValueError(f"{source}: {expected}, but the run would be {found} on {world} process(es); {help_}")


def resolved(cfg: TrainConfig, world: int) -> TrainConfig:
    """The recipe's numbers for `world` processes: with global_rows, the accumulation that gives as many rows a step.

    Raises ValueError when the rows of one micro-batch over all processes do not divide it.
    """
    if cfg.global_rows is None:
        return cfg
    if cfg.packing == "packed":
        raise ValueError("train.global_rows: is not allowed with train.packing packed, where a step is counted in tokens")
    together = cfg.rows * world
    if cfg.global_rows % together:
        raise ValueError(
            f"train.global_rows: {cfg.global_rows} is not allowed; it must be a multiple of {together} "
            f"(train.rows {cfg.rows} on {world} process(es))"
        )
    return replace(cfg, accumulation=cfg.global_rows // together)


@contextmanager
def main_first(accelerator: Accelerator) -> Iterator[None]:
    """The first process goes ahead, as long as it takes; the others follow when it is through."""
    if accelerator.num_processes == 1:
        yield
        return
    patient = dist.new_group(backend="gloo", timeout=PREPARATION)
    if not accelerator.is_main_process:
        dist.barrier(patient)
    yield
    if accelerator.is_main_process:
        dist.barrier(patient)
    accelerator.wait_for_everyone()
    dist.destroy_process_group(patient)


class Engine:
    """The drafter and its optimiser, prepared; one backward pass and one update, whatever the strategy.

    drafter: the module that was given, its parameters sharded in place under fsdp2 and zero3; model: what to call instead.
    """

    def __init__(self, accelerator: Accelerator, drafter: DSpark, cfg: TrainConfig) -> None:
        self.accelerator, self.drafter, self.cfg = accelerator, drafter, cfg
        self.strategy = engaged(accelerator)
        self.deepspeed = self.strategy.startswith("zero")
        if self.deepspeed:
            settings = accelerator.state.deepspeed_plugin.deepspeed_config
            settings |= {
                "train_micro_batch_size_per_gpu": cfg.rows, "gradient_accumulation_steps": cfg.accumulation,
                "gradient_clipping": cfg.clip,
            }  # fmt: skip
            accelerator.gradient_accumulation_steps = cfg.accumulation
            if cfg.precision == "bf16":  # DeepSpeed switches an autocast around it off
                autocast = torch.autocast(accelerator.device.type, dtype=torch.bfloat16)
                drafter.forward = autocast(drafter.forward)  # type: ignore[method-assign]
        self.model, self.optimizer = accelerator.prepare(drafter, build_optimizer(drafter, cfg))
        _load_whole(accelerator)  # what prepare has undone
        if self.strategy == "zero3" and drafter.markov_head is not None:
            import deepspeed

            # forward hands this weight out itself: without a word DeepSpeed finds that out in some step, and stops
            deepspeed.zero.register_external_parameter(drafter, drafter.markov_head.markov_w2.weight)
        self.last = True

    @contextmanager
    def micro(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients are averaged over the processes after the last one."""
        self.last = last
        if last or self.deepspeed:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def backward(self, loss: Tensor) -> None:
        """Gradients of this micro-batch's share of the loss, averaged over the processes: multiply by their number before."""
        if self.deepspeed:
            self.model.set_gradient_accumulation_boundary(is_boundary=self.last)
            self.model.backward(loss, scale_wrt_gas=False)
        else:
            loss.backward()

    def update(self, rate: float) -> float:
        """Clip and step with learning rate `rate`. Returns the gradient's norm; nothing moves when it is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.deepspeed:
            self.model.step()  # skips by itself
            return float(self.model.get_global_grad_norm())
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.cfg.clip or math.inf))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def whole_state(self) -> dict[str, Tensor]:
        """The drafter's state dict on the CPU, unsharded: complete on the main process. All processes call it."""
        return whole_state(self.accelerator, self.drafter)

    def whole_drafter(self, state: dict[str, Tensor]) -> DSpark:
        """The trained drafter as one module on the main process, adapters merged; state: from whole_state."""
        if self.strategy not in ("fsdp2", "zero3"):
            return merged(self.drafter)
        copy = DSpark(self.drafter.config)
        copy.load_state_dict(merge_state(state))
        return copy.to(self.accelerator.device)


def whole_state(accelerator: Accelerator, drafter: nn.Module) -> dict[str, Tensor]:
    """A copy of the drafter's state dict on the CPU, unsharded: complete on the main process. All processes call it."""
    strategy = engaged(accelerator)
    if strategy == "fsdp2":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def copied() -> dict[str, Tensor]:
        if not accelerator.is_main_process:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in drafter.state_dict().items()}

    if strategy == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(drafter.parameters())):
            return copied()
    return copied()
