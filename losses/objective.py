"""The objective, written plainly: materialises the logits of every slot and leaves the gradient to autograd.

This is the reference that `fused.py` is tested against, and fast enough for tiny models. Shapes: A anchors
(blocks), G slots of a block, H hidden size, r rank of the correction head, V and Vd target and draft
vocabulary, P text positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import acceptance as acc
from . import divergence as div
from .config import ObjectiveConfig
from .inputs import Inputs, reduction_dtype, target_rows
from .reduce import unpack
from .terms import ObjectiveStats, RowStats, finish, needed


def objective(
    *,
    cfg: ObjectiveConfig,
    hidden: Tensor,
    lm_head: Tensor,
    target_hidden: Tensor,
    target_index: Tensor,
    target_head: Tensor,
    labels: Tensor,
    valid: Tensor,
    correction: Tensor | None = None,
    w2: Tensor | None = None,
    draft_ids: Tensor | None = None,
    survival_logits: Tensor | None = None,
    softcap: float | None = None,
    chunk_bytes: int = 512 << 20,
    denominators: Tensor | None = None,
    target_lse: Tensor | None = None,
    target_top: Tensor | None = None,
) -> tuple[Tensor, ObjectiveStats]:
    """Loss of a batch of blocks, and its metrics.

    Draft logits of slot k: z_k = cap(lm_head h_k) + w2 u_k; target law of slot k: p_k = softmax over the full
    vocabulary of cap(target_head t), t the target's state at the position before the slot's token.

    Args:
        cfg: which terms, with what weights.
        hidden: [A, G, H] block states of the drafter after its final norm.
        lm_head: [Vd, H] frozen rows of the head over the draft vocabulary; gets no gradient.
        target_hidden: [P, H] the target's states after its final norm, one row per text position.
        target_index: int64 [A, G], row of `target_hidden` that teaches slot k (position anchor + k, k from 0).
        target_head: [V, H] the target's full head, frozen; with `target_lse` its [Vd, H] draft rows do as well.
        labels: int64 [A, G] text tokens (target ids) at anchor + k + 1. valid: bool [A, G], prefix-closed.
            Masked slots may hold anything, NaN included, in every other argument.
        correction, w2: [A, G, r] and [Vd, r] of the sequential correction head, or None.
        draft_ids: int64 [Vd], distinct target ids of the draft vocabulary, or None if it is the full one.
        survival_logits: [A, G], needed if `cfg.survival` > 0.
        softcap: cap(x) = c tanh(x / c) on the head's products, as in Gemma; None for no cap.
        chunk_bytes: memory budget of the logits of one chunk (fused only).
        denominators: float32 [3] of `reduce.denominators` summed over all micro-batches and ranks; None for
            this call's own. The losses of all calls that share them add up to the global mean.
        target_lse: float32 [P] log-normaliser of the target's full softmax; with a reduced draft vocabulary only
            the draft rows of the head are then multiplied. target_top: int64 [P] the target's arg-max token,
            without which `target_lse` leaves the `agree` metrics out.

    Returns:
        The loss, a float32 scalar (float64 for float64 inputs), and `ObjectiveStats`.

    Raises:
        ValueError: shapes that do not fit, an active survival term without logits, target_lse without draft_ids.
    """
    del chunk_bytes
    batch = Inputs(
        cfg=cfg, hidden=hidden, lm_head=lm_head, target_hidden=target_hidden, target_index=target_index,
        target_head=target_head, labels=labels, valid=valid, correction=correction, w2=w2, draft_ids=draft_ids,
        survival_logits=survival_logits, target_lse=target_lse, target_top=target_top,
    )  # fmt: skip
    return finish(cfg, rows=_all_rows(batch, softcap), valid=valid, survival_logits=survival_logits, totals=denominators)


def _all_rows(batch: Inputs, softcap: float | None) -> RowStats:
    """Statistics of every slot, [A, G]; only valid slots are computed."""
    dtype = reduction_dtype(batch.hidden)
    log_q = torch.log_softmax(_draft_logits(batch, softcap).to(dtype), dim=-1)
    with torch.no_grad():
        law = _target_law(batch, softcap, dtype)
    rows = _row_stats(batch.cfg, log_q=log_q, law=law, draft_ids=batch.draft_ids, labels=batch.labels[batch.valid])
    return RowStats(**{name: None if v is None else unpack(v, batch.valid) for name, v in vars(rows).items()})


def _capped(x: Tensor, softcap: float | None) -> Tensor:
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _draft_logits(batch: Inputs, softcap: float | None) -> Tensor:
    logits = _capped(batch.hidden[batch.valid] @ batch.lm_head.detach().T, softcap)
    if batch.correction is None or batch.w2 is None:
        return logits
    return logits + batch.correction[batch.valid] @ batch.w2.T


def _target_law(batch: Inputs, softcap: float | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """log p over the draft vocabulary, log p of the text token, arg-max token, of every valid slot."""
    index, labels = batch.target_index[batch.valid], batch.labels[batch.valid]
    states = batch.target_hidden[index]
    if batch.target_lse is None:
        log_p = torch.log_softmax(_capped(states @ batch.target_head.T, softcap).to(dtype), dim=-1)
        label, top = log_p.gather(-1, labels[:, None]).squeeze(-1), log_p.argmax(-1)
        return (log_p if batch.draft_ids is None else log_p[:, batch.draft_ids]), label, top
    logits = _capped(states @ target_rows(batch).T, softcap).to(dtype)
    log_p = logits - batch.target_lse[index].to(dtype)[:, None]
    column = batch.columns[labels]
    # Outside the draft vocabulary log p(y) is unknown and multiplies q(y) = 0.
    label = torch.where(column >= 0, log_p.gather(-1, column.clamp(min=0)[:, None]).squeeze(-1), 0.0)
    return log_p, label, None if batch.target_top is None else batch.target_top[index]


def _row_stats(
    cfg: ObjectiveConfig, *, log_q: Tensor, law: tuple[Tensor, Tensor, Tensor | None], draft_ids: Tensor | None, labels: Tensor
) -> RowStats:
    log_p, log_p_label, top = law
    column, best = labels, log_q.argmax(-1)
    if draft_ids is not None:
        column = (draft_ids[None] == labels[:, None]).int().argmax(-1)
        column = torch.where(draft_ids[column] == labels, column, -1)
        best = draft_ids[best]
    picked = log_q.gather(-1, column.clamp(min=0)[:, None]).squeeze(-1)
    rows = RowStats(
        alpha=acc.acceptance(log_p=log_p, log_q=log_q),
        log_q_label=torch.where(column >= 0, picked, -torch.inf),
        log_p_label=log_p_label,
        correct=best == labels,
        agree=None if top is None else best == top,
    )
    want, laws = needed(cfg), {"log_p": log_p, "log_q": log_q}
    rows.kl = div.forward_kl(**laws) if "kl" in want else None
    rows.reverse_kl = div.reverse_kl(**laws) if "reverse_kl" in want else None
    rows.js = div.jensen_shannon(**laws) if "js" in want else None
    rows.renyi = div.renyi_half(**laws) if "renyi" in want else None
    rows.log_alpha = acc.log_acceptance(**laws) if "log_alpha" in want else None
    return rows
