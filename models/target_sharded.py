"""The frozen target split over the data-parallel ranks with FSDP2: each rank holds 1/world of every decoder layer.

A layer is gathered when it runs and freed after it. The embedding and the LM head stay whole on every rank: the drafter's
frozen heads read them in every step, so they are loaded once and shared with those. Needs a process group (any launcher).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import TargetConfig
from .facts import check_target, read_config, resolve_target
from .target import Target, check_head, load_model, load_tokenizer, probe_texts

LOADING = timedelta(hours=12)


class ShardedTarget(Target):
    """A target whose decoder layers are split. `features`, `states`, `logits` as in Target; the first two are collective."""

    collective = True

    def __init__(self, model: Any, tokenizer: Any, folder: str, plain: dict[tuple[int, ...], Tensor]) -> None:
        """plain: hidden states of the self-test's texts by token ids, computed before the weights were split."""
        super().__init__(model, tokenizer, folder)
        self._plain = plain

    def plain(self, tokens: Sequence[int]) -> Tensor:
        """As in Target, for the self-test's texts only: computed once by the whole model on rank 0. Not collective."""
        return self._plain[tuple(tokens)]

    @contextmanager
    def whole_layers(self, count: int) -> Iterator[None]:
        """See Target. Collective."""
        layers: list[Any] = list(self.layers)[-count:]
        for layer in layers:
            layer.unshard()
        try:
            yield
        finally:
            for layer in layers:
                layer.reshard()

    def local_bytes(self) -> int:
        """Bytes of the decoder layers' weights that this rank holds while none of them runs."""
        parts: list[Any] = [p.to_local() if hasattr(p, "to_local") else p for p in self.layers.parameters()]
        return sum(part.numel() * part.element_size() for part in parts)


def load_sharded(cfg: TargetConfig, device: str | torch.device) -> ShardedTarget:
    """Loads the target of `cfg` split over all ranks. Collective.

    Rank 0 reads the checkpoint into host memory and sends every rank its parts, tensor by tensor; no other rank ever holds
    more than its share and one layer.

    Raises:
        ValueError: there is no process group, or as load_target.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "target.placement: 'sharded' needs a launch of several processes (accelerate launch -m draftsmith.train RECIPE); "
            "allowed in one process: replicated, remote"
        )
    device = torch.device(device)
    hf_config = read_config(cfg)
    check_target(hf_config)
    first = dist.get_rank() == 0
    texts = list(probe_texts(hf_config.get_text_config(decoder=True).vocab_size).values())
    whole, references = None, [torch.empty(0)] * len(texts)
    if first:
        whole = load_model(cfg).eval()
        reader = Target(whole, None, "")
        check_head(reader)
        references = [reader.plain(text) for text in texts]
    box: list[Any] = [references, None if whole is None else whole.generation_config]
    # The others wait while the first reads and runs the whole target, which may take longer than a step ever does.
    patient = dist.new_group(backend="gloo", timeout=LOADING)
    dist.broadcast_object_list(box, src=0, group=patient)
    dist.destroy_process_group(patient)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, cfg.dtype))
    model.tie_weights()  # init_empty_weights replaces the parameters one by one
    model.generation_config = box[1]
    _split(model, device)
    _send(whole, model, device)
    target = ShardedTarget(
        model, load_tokenizer(cfg), resolve_target(cfg), {tuple(k): v for k, v in zip(texts, box[0], strict=True)}
    )
    target.describe(cfg)
    target.label = f"{cfg.label} over {dist.get_world_size()} ranks"
    return target


def _split(model: Any, device: torch.device) -> None:
    """FSDP2 on every decoder layer and, as their common root, on the decoder, which then holds the norm; weights still meta."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.requires_grad_(False)
    decoder = model.get_decoder()
    layers = Target.find_layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    inner = {id(p) for p in layers.parameters()}
    fully_shard(decoder, mesh=mesh, ignored_params={p for p in decoder.parameters() if id(p) not in inner})


@torch.no_grad()
def _send(whole: Any, model: Any, device: torch.device) -> None:
    """Fill the split model from rank 0's whole one: split tensors by their parts, the others by broadcast."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    source = dict(whole.named_parameters(remove_duplicate=False)) if whole is not None else {}
    done: dict[int, torch.nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if id(parameter) not in done:
            shape, dtype = parameter.shape, parameter.dtype
            full = source[name].detach().to(device, dtype) if source else torch.empty(shape, dtype=dtype, device=device)
            if isinstance(parameter, DTensor):
                placed = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            else:
                dist.broadcast(full, src=0)
                placed = full
            done[id(parameter)] = torch.nn.Parameter(placed, requires_grad=False)
        setattr(module, leaf, done[id(parameter)])
    buffers = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in list(model.named_buffers()):
        full = buffers[name].to(device) if buffers else torch.empty_like(buffer, device=device)
        dist.broadcast(full, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, full)
