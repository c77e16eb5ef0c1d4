"""Two processes of a DDP backward pass, one of them late: who waits, and is the gradient DDP's own?"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from draftsmith.train.communication import GradientWait
from draftsmith.train.metrics import Clock


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gradients, times = [], {}
    for watched in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
        clock = Clock()
        wait = GradientWait(model, clock) if watched else None
        for _ in range(2):
            model.zero_grad()
            loss = model(torch.full((4, 8), 1.0 + rank)).square().sum()
            dist.barrier()
            clock.restart()
            time.sleep(0.5 * rank)
            loss.backward()
            if wait is not None:
                wait.mark()
        times = clock.report(steps=2)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    with_hook, plain = gradients[1], gradients[0]
    result = {"same": torch.equal(with_hook, plain), "times": times, "norm": float(plain.norm())}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])
