"""Serving through transformers' own modules with our static cache: every family without fused blocks.

transformers dispatches attention by name. While our forward runs, the name is set to a function that stores the new
keys and values in our cache and attends over it with absolute-position masks, so ragged rows, sliding windows and
rollback work as in the fused decoders, and no family needs code of its own. What a family's attention needs beyond
that (learned position biases, several head sizes) is refused, and at construction the result is compared with the
family's own forward, so an unsupported family is a clear error instead of wrong text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .attention import Span, attend
from .cache import KVCache
from .decoder import Decoder, DecoderOutput, pick_last
from .weights import max_positions

NAME = "draftsmith_static_cache"


class _Shared:
    """What the attention function needs of the forward in progress (one at a time; the decoder is not re-entrant)."""

    span: Span | None = None
    shapes: dict[int, tuple[int, int, int]] | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B,nh,W,hd], key/value [B,nkv,W,hd] -> ([B,W,nh,hd], None)."""
    if kwargs.get("position_bias") is not None:
        raise ValueError("attention with position_bias is not supported")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError("attention modules without layer_idx are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _Shared.shapes is not None:
        _Shared.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
    if _Shared.span is None:
        return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    keys, values = _Shared.span.append(layer, key.transpose(1, 2), value.transpose(1, 2))
    out = attend(query, keys, values, _Shared.span.mask(sliding_window), scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _installed(model: nn.Module, span: Span | None) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = NAME
        _Shared.span = span
        yield
    finally:
        _Shared.span = None
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


class ModuleDecoder(Decoder):
    """Any transformers decoder-only LM that uses the attention interface and one kind of attention cache."""

    backend = "torch"

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, tap_layers: tuple[int, ...] = ()):
        parameter = model.get_output_embeddings().weight
        if parameter.dtype != dtype:
            raise ValueError(
                f"dtype: {dtype}: this target's family is served from its own modules, load it in that dtype "
                f"(it is {parameter.dtype})"
            )
        config = model.config.get_text_config()
        super().__init__(
            vocab_size=parameter.shape[0],
            hidden_size=parameter.shape[1],
            num_layers=config.num_hidden_layers,
            max_positions=max_positions(config),
            tap_layers=tap_layers,
            device=parameter.device,
            dtype=dtype,
        )
        self.model, self.base, self.head = model, model.get_decoder(), model.get_output_embeddings()
        lists = [m for m in self.base.children() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers]
        if tap_layers and not lists:
            raise ValueError(f"tap_layers: model_type {config.model_type!r} has no list of layers to read features from")
        self.blocks = lists[0] if lists else nn.ModuleList()
        self._kv_heads, self._head_dim, self._value_dim = self._probe()
        self._check()

    def _refuse(self, reason: str) -> ValueError:
        from .weights import FUSED_FAMILIES

        return ValueError(
            f"target: model_type {self.model.config.model_type!r} cannot be served: {reason} "
            f"(fused families: {', '.join(FUSED_FAMILIES)})"
        )

    @torch.inference_mode()
    def _probe(self) -> tuple[int, int, int]:
        _Shared.shapes = {}
        try:
            with _installed(self.model, None):
                self.base(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False)
            shapes = _Shared.shapes
        except Exception as error:
            raise self._refuse(str(error)) from error
        finally:
            _Shared.shapes = None
        if sorted(shapes) != list(range(self.num_layers)):
            raise self._refuse("not every layer goes through transformers' attention interface")
        if len(set(shapes.values())) != 1:
            raise self._refuse("its layers have caches of different shapes")
        return shapes[0]

    @torch.inference_mode()
    def _check(self) -> None:
        """The served logits must be the family's own (chunked 5 + 3 tokens against one forward of 8)."""
        tokens = torch.arange(8, device=self.device)[None] % self.vocab_size
        want = self.model(input_ids=tokens, use_cache=False).logits.float()
        cache = self.new_cache(2, 8)
        parts = [self.forward(tokens[:, :5], cache, [1], [0]).logits, self.forward(tokens[:, 5:], cache, [1], [5]).logits]
        got = torch.cat(parts, dim=1).float()
        tolerance = (1e-3 if self.dtype == torch.float32 else 0.1) * max(1.0, want.abs().max().item())
        if not (got - want).abs().max().item() <= tolerance:
            raise self._refuse("its logits over our cache differ from its own forward")

    def new_cache(self, slots: int, max_context: int) -> KVCache:
        """See Decoder.new_cache."""
        self.check_context(max_context)
        return KVCache.allocate(
            layers=self.num_layers,
            slots=slots,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            value_dim=self._value_dim,
            max_context=max_context,
            dtype=self.dtype,
            device=self.device,
        )

    def _forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        rows: list[int] | Tensor,
        starts: Tensor,
        logits: str,
        last: Tensor | None,
        taps: bool,
        bound: int | None,
        widths: Sequence[int] | None,
    ) -> DecoderOutput:
        span = Span.build(cache, rows, starts, tokens.shape[1], bound)
        tapped: dict[int, Tensor] = {}
        hooks = [self.blocks[i].register_forward_hook(_keep(tapped, i)) for i in (self.tap_layers if taps else ())]
        if logits == "last":  # cut before the head, so that only B rows of logits exist; the family scales them itself
            hooks.append(self.head.register_forward_pre_hook(lambda _module, args: (pick_last(args[0], last),)))
        positions = span.positions.clamp(max=self.max_positions - 1)
        module = self.base if logits == "none" else self.model
        try:
            with _installed(self.model, span):
                out = module(input_ids=tokens.to(self.device), position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        tap = torch.cat([tapped[i] for i in self.tap_layers], dim=-1) if taps and self.tap_layers else None
        return DecoderOutput(None if logits == "none" else out.logits, tap)


def _keep(tapped: dict[int, Tensor], index: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
        tapped[index] = output[0] if isinstance(output, tuple) else output

    return hook
