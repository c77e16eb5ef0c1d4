"""LoRA on a drafter (arXiv 2106.09685): W' = W + (alpha / rank) B A, with W frozen, and merged into W wherever it leaves.

A drafter with adapters is still a `DSpark`: every linear layer that is adapted is replaced by one that adds its update, so
training sees the same modules under the same names. What is exported, served or compared has the updates in its weights: the
files know no LoRA. Tensors of an adapted layer NAME: `NAME.weight` [out, in] frozen, `NAME.lora_a` [rank, in], `NAME.lora_b`
[out, rank] and the scalar `NAME.lora_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dspark import DSpark

PARTS = ("lora_a", "lora_b", "lora_scale")


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank update; starts as the layer it is made of, since B is 0."""

    lora_scale: Tensor

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        out_features, in_features = base.weight.shape
        # on the meta device: the weights are those of `base`, and no random number is drawn for them
        super().__init__(in_features, out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, in_features, dtype=base.weight.dtype, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(out_features, rank, dtype=base.weight.dtype, device=base.weight.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        # a buffer, so that a state dict says all that merging needs
        self.register_buffer("lora_scale", torch.tensor(alpha / rank, dtype=torch.float32, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        update = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + update * self.lora_scale.to(update.dtype)


def add_lora(drafter: DSpark, *, rank: int, alpha: float, targets: Sequence[str], full: Sequence[str] = ()) -> DSpark:
    """Freeze the drafter but for adapters on its linear layers called `targets`, and the modules called `full`; in place.

    targets: last parts of names, such as q_proj or fc. full: first parts of names, such as markov_head; a head that the drafter
    lacks is left out. The adapters' start is drawn from PyTorch's generator.

    Raises ValueError for a name that no linear layer has, and where a target lies in a module trained in full.
    """
    linear = {name: module for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name in linear if name.partition(".")[0] not in full})
    for target in targets:
        if target not in known:
            raise ValueError(
                f"drafter.lora_targets: {target!r} is not allowed; linear layers of the drafter: {', '.join(known)}"
            )
    if has_lora(drafter):
        raise ValueError("drafter.lora_rank: the drafter has adapters already")
    drafter.requires_grad_(False)
    for name in full:
        for parameter in getattr(drafter, name).parameters() if getattr(drafter, name, None) is not None else ():
            parameter.requires_grad_(True)
    for name, module in linear.items():
        if name.rpartition(".")[2] in targets and name.partition(".")[0] not in full:
            parent, _, child = name.rpartition(".")
            setattr(drafter.get_submodule(parent), child, LoraLinear(module, rank, alpha))
    return drafter


def has_lora(drafter: nn.Module) -> bool:
    """Whether any layer has an adapter."""
    return any(isinstance(module, LoraLinear) for module in drafter.modules())


def merge_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with every update added to its weight, under the names of a drafter without adapters.

    The sum is made in float32 and rounded once to the weight's dtype. Tensors without an adapter are handed on as they are.
    """
    merged = {name: value for name, value in tensors.items() if name.rpartition(".")[2] not in PARTS}
    for name in tensors:
        layer, _, part = name.rpartition(".")
        if part == "lora_a":
            weight = tensors[f"{layer}.weight"]
            update = tensors[f"{layer}.lora_b"].float() @ tensors[name].float() * tensors[f"{layer}.lora_scale"].float()
            merged[f"{layer}.weight"] = (weight.float() + update).to(weight.dtype)
    return merged


@torch.no_grad()
def merged(drafter: DSpark) -> DSpark:
    """The ordinary drafter that computes the same; the drafter itself where it has no adapter."""
    if not has_lora(drafter):
        return drafter
    with torch.random.fork_rng(devices=[]):  # building a drafter draws its start
        plain = DSpark(drafter.config)
    plain.load_state_dict(merge_state(drafter.state_dict()))
    weight = drafter.fc.weight
    return plain.to(weight.device, weight.dtype).train(drafter.training)
