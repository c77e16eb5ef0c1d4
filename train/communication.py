"""How long a step waits for other processes.

Counted: the loop's own all-reduces (denominators, loss) and, under DDP, the gradients' all-reduce as far as nothing hides it:
from the moment the last bucket is handed over, when no gradient is left to compute, until backward returns. Under FSDP2 and
DeepSpeed the gradients' communication is inside the drafter's time.
"""

# no `from __future__ import annotations`: DDP compares the types of the hook, which that would turn into text
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from .metrics import Clock


class GradientWait:
    """Splits a backward pass under DDP into the drafter's time and the exposed wait for the all-reduce."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock, self.last = clock, None
        self.active = isinstance(model, DistributedDataParallel) and model.process_group.size() > 1
        if self.active:
            model.register_comm_hook(self, _reduce)

    def mark(self) -> None:
        """After backward: what came since the last mark is the drafter's, but for the wait."""
        if self.last is not None:
            self.clock.mark("drafter", at=self.last)
            self.clock.mark("communication")
            self.last = None
        else:
            self.clock.mark("drafter")


def _reduce(wait: GradientWait, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own mean over ranks; the last call of a backward pass leaves its time."""
    wait.last = wait.clock.stamp()
    return allreduce_hook(torch.distributed.group.WORLD, bucket)
