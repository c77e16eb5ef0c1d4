"""Verification of one drafted chain per row: how many drafts stand, and the law of the token after them.

Pure functions of tensors, with the uniforms passed in: the exactness tests enumerate this very code. Rules (methods: Leviathan
et al., ICML 2023, and Chen et al., arXiv 2302.01318, for `token_wise`; Sun et al., arXiv 2403.10444, for `block`). Both emit
exactly the target's law p whatever q is, as long as x_k was drawn from the q_k that is passed in (one-hot where q is None), and
as long as the length of row b was decided without looking at the token whose slot it drops.

Shapes: B rows, G draft slots, V target vocabulary, Vd draft vocabulary. Slot k = 0..G-1 holds the draft for the position whose
target law is p[:, k]; p[:, G] is the bonus law. Slots at or after lengths[b] are ignored whatever they hold; so is
everything from the first negative token on (padding). Computed in the dtype of p (float32 in serving). Nothing waits for the
device.

float32 on a CPU runs in native code where it can be built (kernels/verify.cpp), with the same results up to rounding; the
PyTorch code here defines what it computes, and serves float64, accelerators and machines without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import sampling as native
from .sampling import draw

# Where p and q agree to rounding, (p - q)+ is noise: below this mass the next token is drawn from p.
RESIDUAL_FLOOR = 1e-8


class Verdict(NamedTuple):
    """accepted int64 [B]: leading drafts that stand. residual [B,V]: normalised law of the token after them."""

    accepted: Tensor
    residual: Tensor


def prefix_length(flags: Tensor) -> Tensor:
    """Length of the run of true values at the front: bool [...,G] -> int64 [...].

    This is the accepted length of per-slot tests; its mean (plus 1 for the bonus or correction) is tau, which neither the sum
    nor the product of the per-slot averages is.
    """
    return flags.to(torch.int64).cumprod(-1).sum(-1)


def greedy(argmax: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Verification at temperature 0: drafts stand while they equal the target's arg-max.

    argmax int64 [B,G+1], tokens int64 [B,G], lengths int64 [B]. Returns accepted int64 [B] and the next token int64 [B].
    """
    assert argmax.shape[1] == tokens.shape[1] + 1, (argmax.shape, tokens.shape)
    if native.usable(argmax, tokens, lengths, dtypes=(torch.int64,)):
        return native.greedy(argmax, tokens, lengths)
    accepted = prefix_length((argmax[:, :-1] == tokens) & _alive(tokens, lengths))
    return accepted, argmax.gather(1, accepted[:, None]).squeeze(1)


def token_wise(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    uniforms: Tensor,
    draft_ids: Tensor | None = None,
) -> Verdict:
    """Accept x_k with min(1, p_k(x_k) / q_k(x_k)) up to the first failure; then (p - q)+, or p after the last draft.

    p [B,G+1,V]; q [B,G,Vd] or None (the drafts were certain); tokens int64 [B,G] in target ids; lengths int64 [B];
    uniforms [B,G] in (0,1); draft_ids int64 [Vd]: target id of each column of q (None: Vd = V).
    """
    _check(p, q, tokens, lengths, draft_ids)
    if native.usable(p, q, uniforms):
        return _native_verdict(False, p, q, tokens, lengths, uniforms, draft_ids)
    lengths = _valid_lengths(tokens, lengths)
    thresholds = token_wise_thresholds(p, q, tokens, lengths, draft_ids)
    accepted = prefix_length(uniforms <= thresholds)
    return Verdict(accepted, _residual(p, q, tokens, lengths, draft_ids, accepted, None))


def block(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    uniforms: Tensor,
    draft_ids: Tensor | None = None,
) -> Verdict:
    """Block verification: keep the LARGEST i with u_i <= h_i (0 where none passes), never below `token_wise` in the mean.

    Arguments as in `token_wise`. With P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)) and
    Z_i = sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+ : h_i = Z_i / (Z_i + 1 - P_i) before the last draft (0/0 = 1), h = P at the last.
    The next token follows (P_i p_{i+1} - q_{i+1})+ normalised, or p after the last draft.
    """
    _check(p, q, tokens, lengths, draft_ids)
    if native.usable(p, q, uniforms):
        return _native_verdict(True, p, q, tokens, lengths, uniforms, draft_ids)
    lengths = _valid_lengths(tokens, lengths)
    thresholds, reach = block_thresholds(p, q, tokens, lengths, draft_ids)
    slots = torch.arange(1, tokens.shape[1] + 1, device=p.device)
    # Not the first failure: a later slot that passes overrides the earlier ones that did not.
    accepted = torch.where(uniforms <= thresholds, slots, 0).amax(-1) if len(slots) else torch.zeros_like(lengths)
    return Verdict(accepted, _residual(p, q, tokens, lengths, draft_ids, accepted, reach))


Rule = Callable[..., Verdict]
RULES: dict[str, Rule] = {"token": token_wise, "block": block}


def verify_and_draw(
    rule: str,
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    uniforms: Tensor,
    emit: Tensor,
    draft_ids: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A rule of `RULES` and the draw of the token after the accepted drafts: (accepted int64 [B], next int64 [B]).

    Arguments as in `token_wise`; emit [B] in (0,1) is the uniform of that draw. rows int64 [B]: which rows of p belong to the
    B drafts (None: p has B rows, in order), so that a part of a batch is verified without a copy of its laws. In native code
    the residual is never stored, and the block rule looks only at the slots that can decide.
    """
    assert rule in RULES, rule
    if native.usable(p, q, uniforms, emit):
        _check(p, q, tokens, lengths, draft_ids, rows)
        out = torch.empty(2, len(tokens), dtype=torch.int64)
        native.verify(
            rule == "block", p, q, tokens, lengths, draft_ids, uniforms=uniforms, emit=emit, rows=rows,
            accepted=out[0], following=out[1],
        )  # fmt: skip
        return out[0], out[1]
    verdict = RULES[rule](p if rows is None else p[rows], q, tokens, lengths, uniforms, draft_ids)
    return verdict.accepted, draw(verdict.residual, emit)


def _native_verdict(
    is_block: bool, p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, uniforms: Tensor, draft_ids: Tensor | None
) -> Verdict:
    verdict = Verdict(torch.empty_like(lengths), torch.empty(len(tokens), p.shape[-1], dtype=torch.float32))
    native.verify(
        is_block, p, q, tokens, lengths, draft_ids, uniforms=uniforms, accepted=verdict.accepted, residual=verdict.residual
    )
    return verdict


def token_wise_thresholds(
    p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, draft_ids: Tensor | None = None
) -> Tensor:
    """min(1, p/q) at the drafted tokens, 0 in dead slots: [B,G]. Arguments as in `token_wise`."""
    if native.usable(p, q):
        thresholds = torch.empty(tokens.shape, dtype=torch.float32)
        native.verify(False, p, q, tokens, lengths, draft_ids, thresholds=thresholds)
        return thresholds
    return _ratios(p, q, tokens, lengths, draft_ids)[0].clamp(max=1)


def block_thresholds(
    p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, draft_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(h_1..h_G [B,G], 0 in dead slots; P_0..P_G [B,G+1]) of the block rule. Arguments as in `token_wise`."""
    batch, num_slots = tokens.shape
    if native.usable(p, q):
        outputs = torch.empty(tokens.shape, dtype=torch.float32), torch.empty(batch, num_slots + 1, dtype=torch.float32)
        native.verify(True, p, q, tokens, lengths, draft_ids, thresholds=outputs[0], reach=outputs[1])
        return outputs
    ratios, at_token = _ratios(p, q, tokens, lengths, draft_ids)
    steps = [ratios.new_ones(batch)]
    for slot in range(num_slots):  # at most 16 steps on [B]: the running minimum has no closed form free of logarithms
        steps.append((steps[-1] * ratios[:, slot]).clamp(max=1))
    reach = torch.stack(steps, dim=1)
    # Z_i for i = 1..G-1 needs p and q of slot i (counted from 0); the last live slot has h = P instead.
    inner = _excess_mass(reach[:, 1:-1], p[:, 1:-1], None if q is None else q[:, 1:], at_token[:, 1:], draft_ids)
    inner = torch.cat([inner, inner.new_zeros(batch, min(1, num_slots))], dim=1)
    passed = reach[:, 1:]
    tiny = torch.finfo(p.dtype).tiny
    partial = torch.where(passed >= 1, torch.ones_like(inner), inner / (inner + (1 - passed)).clamp(min=tiny))
    slots = torch.arange(1, num_slots + 1, device=p.device)
    thresholds = torch.where(slots == lengths[:, None], passed, partial)
    return torch.where(slots <= lengths[:, None], thresholds, torch.zeros_like(thresholds)), reach


def _alive(tokens: Tensor, lengths: Tensor) -> Tensor:
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    return slots < lengths[:, None]


def _check(
    p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, draft_ids: Tensor | None, rows: Tensor | None = None
) -> None:
    batch, num_slots = tokens.shape
    vocab, laws = p.shape[-1], batch if rows is None else p.shape[0]
    assert p.shape == (laws, num_slots + 1, vocab) and lengths.shape == (batch,), (p.shape, tokens.shape, lengths.shape)
    assert rows is None or rows.shape == (batch,)
    if q is not None:
        columns = vocab if draft_ids is None else draft_ids.shape[0]
        assert q.shape == (batch, num_slots, columns) and q.dtype == p.dtype, (q.shape, q.dtype, p.shape, p.dtype)


def _valid_lengths(tokens: Tensor, lengths: Tensor) -> Tensor:
    # A negative id is padding, not a draft: the chain ends there, and the next token is drawn from p itself.
    return torch.minimum(lengths, prefix_length(tokens >= 0))


def _ratios(p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """p/q at the drafted tokens (0 in dead slots, finite), and p there: both [B,G]."""
    alive = _alive(tokens, lengths)
    index = tokens.clamp(min=0).unsqueeze(-1)
    p_x = p[:, :-1].gather(-1, index).squeeze(-1)
    if q is None:
        return torch.where(alive, p_x, torch.zeros_like(p_x)), p_x
    if draft_ids is None:
        q_x = q.gather(-1, index).squeeze(-1)
    else:
        columns = torch.arange(draft_ids.shape[0], device=p.device)
        column_of = torch.full((p.shape[-1],), -1, dtype=torch.int64, device=p.device).scatter(0, draft_ids, columns)
        column = column_of[index]
        q_x = torch.where(column >= 0, q.gather(-1, column.clamp(min=0)), 0).squeeze(-1)
    info = torch.finfo(p.dtype)
    ratio = (p_x / q_x.clamp(min=info.tiny)).clamp(max=info.max)
    # q(x) = 0 cannot have been drawn: a proposer that claims so gets a rejection and no division by zero.
    return torch.where(alive & (q_x > 0), ratio, torch.zeros_like(ratio)), p_x


def _excess_mass(scale: Tensor, p: Tensor, q: Tensor | None, p_x: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Z = sum_v (scale * p - q)+ : scale [B,K], p [B,K,V], q [B,K,Vd] or None (one-hot at the token p_x belongs to)."""
    if q is None:
        # A one-hot q must be one-hot here too: it takes all of p(x) and nothing else.
        return scale * (1 - p_x).clamp(min=0)
    if draft_ids is None:
        return (scale.unsqueeze(-1) * p).sub_(q).clamp_(min=0).sum(-1)
    on_support = p.gather(-1, draft_ids.expand(*p.shape[:-1], -1))
    outside = (1 - on_support.sum(-1)).clamp(min=0)
    return scale * outside + (scale.unsqueeze(-1) * on_support).sub_(q).clamp_(min=0).sum(-1)


def _residual(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    draft_ids: Tensor | None,
    accepted: Tensor,
    reach: Tensor | None,
) -> Tensor:
    """Law of the token after `accepted` drafts: (P p - q)+ normalised, or p after the last draft. P = 1 without reach."""
    rows = torch.arange(p.shape[0], device=p.device)
    law = p[rows, accepted]
    if tokens.shape[1] == 0:
        return law
    slot = accepted.clamp(max=tokens.shape[1] - 1)
    scaled = law if reach is None else law * reach[rows, accepted][:, None]
    if q is None:
        # (P p(x) - 1)+ = 0 at the draft, P p elsewhere.
        excess = scaled.scatter(1, tokens[rows, slot].clamp(min=0)[:, None], 0.0)
    else:
        draft = q[rows, slot]
        if draft_ids is not None:
            draft = torch.zeros_like(law).scatter(1, draft_ids.expand(draft.shape[0], -1), draft)
        excess = (scaled - draft).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    from_p = (accepted >= lengths)[:, None] | ~(mass > RESIDUAL_FLOOR)
    return torch.where(from_p, law, excess / mass.clamp(min=RESIDUAL_FLOOR))
