"""The loss functions, slot weights, reductions and metrics, against formulas written out independently in float64."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch

from draftsmith.losses import acceptance as acc
from draftsmith.losses import divergence as div
from draftsmith.losses import weighting
from draftsmith.losses.config import TERMS, ObjectiveConfig
from draftsmith.losses.objective import objective
from draftsmith.losses.reduce import clean_rows, denominators, unpack

F64 = torch.float64


def laws(rows: int, vocab: int, scale: float = 2.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, vocab, generator=g, dtype=F64) * scale for _ in range(2))  # type: ignore[return-value]


def gradient(name: str, p_logits: torch.Tensor, q_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = q_logits.clone().requires_grad_()
    kwargs = {"log_p": p_logits.log_softmax(-1), "log_q": z.log_softmax(-1)}
    table = {
        "kl": div.forward_kl, "reverse_kl": div.reverse_kl, "js": div.jensen_shannon, "tv": div.total_variation,
        "l1": div.l1, "renyi": div.renyi_half, "nla": lambda **k: -acc.log_acceptance(**k),
    }  # fmt: skip
    value = table[name](**kwargs)
    return value.detach(), torch.autograd.grad(value.sum(), z)[0]


VALUES = {
    "kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "js": lambda p, q: 0.5 * ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)),
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(-1),
    "l1": lambda p, q: (p - q).abs().sum(-1),
    "renyi": lambda p, q: -2 * (p * q).sqrt().sum(-1).log(),
    "nla": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
}


def tv_gradient(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    below = (q <= p).to(q)
    return -q * (below - (q * below).sum(-1, keepdim=True))


def projected(q: torch.Tensor, by_q: torch.Tensor) -> torch.Tensor:
    """The softmax chain rule: q (g - sum q g) for dL/dq = g."""
    return q * (by_q - (q * by_q).sum(-1, keepdim=True))


GRADIENTS = {
    "kl": lambda p, q: q - p,
    "reverse_kl": lambda p, q: q * ((q / p).log() - (q * (q / p).log()).sum(-1, keepdim=True)),
    "js": lambda p, q: projected(q, 0.5 * (2 * q / (p + q)).log()),
    "tv": tv_gradient,
    "l1": lambda p, q: 2 * tv_gradient(p, q),
    "renyi": lambda p, q: q - (p * q).sqrt() / (p * q).sqrt().sum(-1, keepdim=True),
    "nla": lambda p, q: tv_gradient(p, q) / torch.minimum(p, q).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_divergence_value_and_gradient_match_the_formula(name: str) -> None:
    p_logits, q_logits = laws(7, 13)
    value, grad = gradient(name, p_logits, q_logits)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    torch.testing.assert_close(value, VALUES[name](p, q), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad, GRADIENTS[name](p, q), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", list(VALUES))
def test_divergence_is_zero_with_zero_gradient_at_q_equal_p(name: str) -> None:
    p_logits, _ = laws(3, 9)
    value, grad = gradient(name, p_logits, p_logits)
    assert value.abs().max() < 1e-12
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", ["kl", "js", "tv", "l1", "renyi", "nla"])
def test_one_hot_target_given_as_minus_infinity(name: str) -> None:
    _, q_logits = laws(4, 6)
    p_logits = torch.full_like(q_logits, -math.inf)
    p_logits[:, 2] = 0.0
    value, grad = gradient(name, p_logits, q_logits)
    q = q_logits.softmax(-1)[:, 2]
    want = {
        "kl": -q.log(), "tv": 1 - q, "l1": 2 * (1 - q), "renyi": -q.log(), "nla": -q.log(),
        "js": 0.5 * (math.log(2) - (1 + q).log() + q * (2 * q / (1 + q)).log() + (1 - q) * math.log(2)),
    }[name]  # fmt: skip
    torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)
    assert torch.isfinite(grad).all()


def test_nla_is_cross_entropy_for_a_one_hot_target() -> None:
    _, q_logits = laws(4, 6)
    p_logits = torch.full_like(q_logits, -math.inf)
    p_logits[:, 2] = 0.0
    z = q_logits.clone().requires_grad_()
    ce = div.cross_entropy(log_q=z.log_softmax(-1), label=torch.full((4,), 2))
    value, grad = gradient("nla", p_logits, q_logits)
    torch.testing.assert_close(value, ce.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(ce.sum(), z)[0])


def test_nla_keeps_its_gradient_where_alpha_underflows_and_at_full_vocabulary() -> None:
    peaks = torch.zeros(2, 1, 50)
    peaks[0, 0, 3], peaks[1, 0, 40] = 300.0, 300.0  # disjoint: alpha = 0 in float32
    value, grad = gradient("nla", peaks[0], peaks[1])
    assert value.item() == pytest.approx(300 - math.log(50), rel=1e-5)  # min(p, q) is e^-300 in every column
    assert grad.norm() > 0.4
    assert gradient("tv", peaks[0], peaks[1])[1].norm() == 0
    vocab = 151_936  # near-uniform q: alpha = 6.6e-6, below the clamp that other code bases use
    p = torch.full((1, vocab), -1e4)
    p[0, 7] = 0.0
    value, grad = gradient("nla", p, torch.zeros(1, vocab))
    assert value.item() == pytest.approx(math.log(vocab), rel=1e-5)
    assert grad.norm().item() == pytest.approx(1.0, rel=1e-3)


def test_reduced_vocabulary_is_the_full_one_with_q_zero_outside() -> None:
    p_logits, z = laws(5, 12)
    ids = torch.tensor([1, 4, 5, 9, 11])
    log_p, log_q = p_logits.log_softmax(-1)[:, ids], z[:, ids].log_softmax(-1)
    p, q = p_logits.softmax(-1), torch.zeros(5, 12, dtype=F64)
    q[:, ids] = log_q.exp()
    torch.testing.assert_close(div.total_variation(log_p=log_p, log_q=log_q), 0.5 * (p - q).abs().sum(-1))
    mix = (p + q) / 2
    js = 0.5 * (p * (p / mix).log()).sum(-1) + 0.5 * torch.xlogy(q, q / mix).sum(-1)
    torch.testing.assert_close(div.jensen_shannon(log_p=log_p, log_q=log_q), js)
    mass = log_p.exp().sum(-1, keepdim=True)
    inside = log_p.exp() / mass
    kl = mass.squeeze(-1) * (inside * (inside.log() - log_q)).sum(-1)
    torch.testing.assert_close(div.forward_kl(log_p=log_p, log_q=log_q), kl)
    ce = div.cross_entropy(log_q=log_q, label=torch.tensor([0, -1, 2, -1, 4]))
    torch.testing.assert_close(ce, torch.stack([-log_q[0, 0], ce[1] * 0, -log_q[2, 2], ce[3] * 0, -log_q[4, 4]]))


def test_lk_hybrid_weighs_by_its_own_alpha_without_gradient() -> None:
    alpha = torch.tensor([0.0, 0.5, 0.9], dtype=F64, requires_grad=True)
    kl = torch.tensor([3.0, 1.0, 0.1], dtype=F64, requires_grad=True)
    loss = acc.lk_hybrid(kl=kl, alpha=alpha, eta=3.0)
    share = torch.exp(torch.tensor([0.0, -1.5, -2.7], dtype=F64))
    torch.testing.assert_close(loss, share * kl + (1 - share) * (1 - alpha))
    d_kl, d_alpha = torch.autograd.grad(loss.sum(), (kl, alpha))
    torch.testing.assert_close(d_kl, share)
    torch.testing.assert_close(d_alpha, share - 1)


def tree(vocab: int, gamma: int) -> tuple[dict[tuple[int, ...], torch.Tensor], dict[tuple[int, ...], torch.Tensor]]:
    """A target law and draft logits at every prefix."""
    g = torch.Generator().manual_seed(3)
    prefixes = [pre for k in range(gamma) for pre in itertools.product(range(vocab), repeat=k)]
    p = {pre: (2 * torch.randn(vocab, generator=g, dtype=F64)).softmax(-1) for pre in prefixes}
    z = {pre: (p[pre].log() + torch.randn(vocab, generator=g, dtype=F64)).requires_grad_() for pre in prefixes}
    return p, z


def test_exact_objective_equals_full_enumeration_in_value_and_gradient() -> None:
    vocab, gamma = 3, 4
    p, z = tree(vocab, gamma)
    q = {pre: logits.softmax(-1) for pre, logits in z.items()}
    # What serving does: draft x ~ q, accept slot by slot with min(1, p/q).
    accepted = torch.zeros((), dtype=F64)
    for path in itertools.product(range(vocab), repeat=gamma):
        drawn = torch.ones((), dtype=F64)
        for k in range(gamma):
            drawn = drawn * q[path[:k]][path[k]]
        kept = torch.ones((), dtype=F64)
        for k in range(gamma):
            kept = kept * (p[path[:k]][path[k]] / q[path[:k]][path[k]]).clamp(max=1.0)
            accepted = accepted + drawn * kept
    want = torch.autograd.grad(accepted, list(z.values()), retain_graph=True)
    # What the objective does: target paths y ~ p, W_{k-1} alpha_k.
    paths = list(itertools.product(range(vocab), repeat=gamma))
    alpha = torch.stack([torch.stack([torch.minimum(p[y[:k]], q[y[:k]]).sum() for k in range(gamma)]) for y in paths])
    log_p = torch.stack([torch.stack([p[y[:k]][y[k]].log() for k in range(gamma)]) for y in paths])
    log_q = torch.stack([torch.stack([q[y[:k]][y[k]].log() for k in range(gamma)]) for y in paths])
    a = acc.token_acceptance(log_p_label=log_p, log_q_label=log_q)
    rejected = acc.expected_rejection(alpha=alpha, a=a, valid=torch.ones_like(alpha))
    total = gamma * (1 - (log_p.sum(-1).exp() * rejected).sum())
    got = torch.autograd.grad(total, list(z.values()))
    assert total.item() == pytest.approx(accepted.item(), abs=1e-13)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    product = gamma * (1 - (log_p.sum(-1).exp() * acc.product_tv(alpha=alpha, valid=torch.ones_like(alpha))).sum())
    assert abs(product.item() - accepted.item()) > 1e-3  # prod alpha is another number


def test_products_stop_at_masked_slots_and_have_gradients_at_zero() -> None:
    valid = torch.tensor([[1.0, 1, 1], [1, 1, 0], [0, 0, 0]])
    alpha = (torch.tensor([[0.5, 0.4, 0.2], [0.8, 0.5, 0.9], [0.3, 0.3, 0.3]]) * valid).requires_grad_()
    loss = acc.product_tv(alpha=alpha, valid=valid)
    torch.testing.assert_close(loss, torch.tensor([(0.5 + 0.8 + 0.96) / 3, (0.2 + 0.6) / 3, 0.0]))
    zero = torch.tensor([[0.0, 0.5, 0.5]], requires_grad=True)
    (grad,) = torch.autograd.grad(acc.product_tv(alpha=zero, valid=torch.ones(1, 3)).sum(), zero)
    torch.testing.assert_close(grad, torch.tensor([[-(1 + 0.5 + 0.25) / 3, 0.0, 0.0]]))
    torch.testing.assert_close(acc.reach(torch.tensor([[0.5, 0.2, 0.9]])), torch.tensor([[1.0, 0.5, 0.1]]))
    assert acc.reach(torch.tensor([[0.5]])).tolist() == [[1.0]]


def test_slot_weights() -> None:
    decay = weighting.position_decay(num_slots=7, decay=4.0)
    assert decay[0] == 1 and decay[6].item() == pytest.approx(math.exp(-1.5))
    assert weighting.position_decay(num_slots=3, decay=0.0).tolist() == [1, 1, 1]
    valid = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    c = torch.tensor([[0.2, 0.6, 1.0], [0.4, 0.8, 0.5]])
    s = 0.5 * c + 0.5
    first = [s[0, 0], s[0, 0] * s[0, 1], s[0, 0] * s[0, 1] * s[0, 2]]
    second = [s[1, 0], s[1, 0] * s[1, 1]]
    want = torch.tensor([[sum(first), sum(first[1:]), first[2]], [sum(second), second[1], 0.0]]) / 3
    torch.testing.assert_close(weighting.dpace(confidence=c, valid=valid, beta=0.5), want)
    correct = torch.tensor([[True, False, True], [False, True, False]])
    assert weighting.until_first_failure(correct=correct, valid=valid).tolist() == [[1, 1, 0], [1, 0, 0]]
    shared = {"valid": valid, "alpha": c * valid, "a": c * valid, "q_label": c * valid, "correct": correct}
    half = weighting.slot_weights(ObjectiveConfig(slot_weighting="half_reach", decay=0), **shared)
    torch.testing.assert_close(half, torch.tensor([[1.0, 0.6, 0.56], [1.0, 0.7, 0.0]]))
    survival = weighting.survival_weights(ObjectiveConfig(reach_weighted_survival=True), valid=valid, a=c * valid)
    torch.testing.assert_close(survival, torch.tensor([[1.0, 0.2, 0.12], [1.0, 0.4, 0.0]]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kl": -1.0}, "objective.kl = -1.0: must be >= 0"),
        ({"tv": math.nan}, "objective.tv = nan"),
        ({"dpace_beta": 1.5}, r"objective.dpace_beta = 1.5: must be in \[0, 1\]"),
        ({"kl": 0, "tv": 0, "survival": 0}, "every weight is 0"),
        ({"slot_weighting": "dpace"}, "use dpace_alpha"),
    ],
)
def test_config_refuses(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**kwargs)  # type: ignore[arg-type]


def test_config_defaults_and_no_torch() -> None:
    cfg = ObjectiveConfig()
    assert cfg.active == ("kl", "tv", "survival") and [cfg.weight(t) for t in cfg.active] == [0.1, 1.8, 1.0]
    assert set(TERMS) <= set(vars(cfg))
    code = "import sys, draftsmith.losses.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def make_batch(seed: int = 0, **change: object) -> dict[str, object]:
    """A small batch over a full vocabulary of 11 with blocks of every length."""
    g = torch.Generator().manual_seed(seed)
    blocks, slots, hidden, rank, vocab, positions = 6, 4, 5, 3, 11, 9
    rand = lambda *s: torch.randn(*s, generator=g, dtype=F64)  # noqa: E731
    lengths = torch.tensor([4, 2, 0, 4, 1, 3])
    head = rand(vocab, hidden)
    return {
        "cfg": ObjectiveConfig(), "hidden": rand(blocks, slots, hidden).requires_grad_(), "lm_head": head, "target_head": head,
        "correction": rand(blocks, slots, rank).requires_grad_(), "w2": rand(vocab, rank).requires_grad_(),
        "target_hidden": rand(positions, hidden), "target_index": torch.randint(0, positions, (blocks, slots), generator=g),
        "labels": torch.randint(0, vocab, (blocks, slots), generator=g), "valid": torch.arange(slots) < lengths[:, None],
        "survival_logits": rand(blocks, slots).requires_grad_(), **change,
    }  # fmt: skip


def test_metrics_are_what_they_say() -> None:
    batch = make_batch()
    loss, stats = objective(**batch)  # type: ignore[arg-type]
    h, u, w2, head = batch["hidden"], batch["correction"], batch["w2"], batch["lm_head"]
    q = (h @ head.T + u @ w2.T).softmax(-1).detach()  # type: ignore[attr-defined,operator]
    p = (batch["target_hidden"] @ head.T).softmax(-1)[batch["target_index"]]  # type: ignore[operator,attr-defined,index]
    valid, labels = batch["valid"], batch["labels"]
    v = valid.double()  # type: ignore[attr-defined]
    alpha = torch.minimum(p, q).sum(-1) * v
    a = (q / p).clamp(max=1).gather(-1, labels[..., None]).squeeze(-1) * v  # type: ignore[index]
    reached = torch.cat([torch.ones(6, 1, dtype=F64), a[:, :-1].cumprod(-1)], -1) * v
    agree = (q.argmax(-1) == p.argmax(-1)) * v
    c = batch["survival_logits"].detach().sigmoid() * v  # type: ignore[attr-defined]
    decay = torch.exp(-torch.arange(4, dtype=F64) / 4) * v
    blocks, slots = 5, v.sum()
    means = stats.means()
    log_q = q.log().gather(-1, labels[..., None]).squeeze(-1)  # type: ignore[index]
    kl = (p * (p / q).log()).sum(-1)
    bce = -(alpha * c.clamp(min=1e-9).log() + (1 - alpha) * (1 - c).log())
    want = {
        "ce": (-log_q * decay).sum() / decay.sum(), "kl": (kl * decay).sum() / decay.sum(),
        "tv": ((1 - alpha) * decay).sum() / decay.sum(), "survival": (bce * decay).sum() / decay.sum(),
        "tau_expected": 1 + (reached * alpha).sum() / blocks, "tau_product": 1 + alpha.cumprod(-1).sum() / blocks,
        "greedy_chain": agree.cumprod(-1).sum() / blocks, "survival_error": (c - alpha).abs().sum() / slots,
        "survival_bias": (c - alpha).sum() / slots, "survival_brier": ((c - alpha) ** 2).sum() / slots,
        "survival_product_bias": (c.cumprod(-1) - alpha.cumprod(-1)).sum() / slots,
    }  # fmt: skip
    for name, value in want.items():
        assert means[name] == pytest.approx(value.item(), rel=1e-5), name
    assert means["alpha"] == pytest.approx((alpha.sum(0) / v.sum(0)).tolist(), rel=1e-5)
    assert means["conditional"] == pytest.approx(((reached * alpha).sum(0) / reached.sum(0)).tolist(), rel=1e-5)
    assert means["agree"] == pytest.approx((agree.sum(0) / v.sum(0)).tolist())
    assert loss.item() == pytest.approx(0.1 * means["kl"] + 1.8 * means["tv"] + means["survival"], rel=1e-6)


def test_tau_expected_is_the_exact_accepted_length_and_tau_product_is_not() -> None:
    """Text of every path, as often as p asks for (p in quarters): 1 + P(1 accepted) + P(2) + P(3) by enumeration."""
    heads, gamma = [(1, 3), (3, 1), (2, 2), (1, 3), (3, 1), (1, 3), (2, 2)], 3
    prefixes = [pre for k in range(gamma) for pre in itertools.product(range(2), repeat=k)]
    p = {pre: torch.tensor(quarters, dtype=F64) / 4 for pre, quarters in zip(prefixes, heads)}
    g = torch.Generator().manual_seed(5)
    z = {pre: torch.randn(2, generator=g, dtype=F64) for pre in prefixes}
    paths = [
        path
        for path in itertools.product(range(2), repeat=gamma)
        for _ in range(int(64 * math.prod(float(p[path[:k]][path[k]]) for k in range(gamma))))
    ]
    assert len(paths) == 64
    states = torch.stack([p[pre].log() for pre in prefixes])
    index = torch.tensor([[prefixes.index(path[:k]) for k in range(gamma)] for path in paths])
    eye = torch.eye(2, dtype=F64)
    stats = objective(
        cfg=ObjectiveConfig(survival=0.0), hidden=torch.stack([z[pre] for pre in prefixes])[index],
        lm_head=eye, target_head=eye, target_hidden=states, target_index=index,
        labels=torch.tensor(paths), valid=torch.ones(64, gamma, dtype=torch.bool),
    )[1].means()  # fmt: skip
    both = {pre: torch.minimum(p[pre], z[pre].softmax(-1)) for pre in prefixes}
    accepted = sum(
        math.prod(float(both[path[:i]][path[i]]) for i in range(k)) for k in range(1, gamma + 1)
        for path in itertools.product(range(2), repeat=k)
    )  # fmt: skip
    assert stats["tau_expected"] == pytest.approx(1 + accepted, abs=1e-6)
    assert abs(stats["tau_product"] - stats["tau_expected"]) > 1e-3  # type: ignore[operator]


def test_micro_batches_with_shared_denominators_add_up() -> None:
    batch = make_batch(cfg=ObjectiveConfig(e2e=0.5, exact=0.3, ce=0.1))
    loss, stats = objective(**batch)  # type: ignore[arg-type]
    names = ("hidden", "correction", "w2", "survival_logits")
    whole = torch.autograd.grad(loss, [batch[n] for n in names])  # type: ignore[misc]
    per_block = ("hidden", "correction", "target_index", "labels", "valid", "survival_logits")
    parts = [{k: v[s] if k in per_block else v for k, v in batch.items()} for s in (slice(0, 2), slice(2, 6))]  # type: ignore[index]
    total = sum(denominators(batch["cfg"], part["valid"]) for part in parts)  # type: ignore[arg-type]
    results = [objective(**part, denominators=total) for part in parts]  # type: ignore[arg-type]
    split = torch.autograd.grad(sum(r[0] for r in results), [batch[n] for n in names])  # type: ignore[misc,arg-type]
    assert sum(r[0].item() for r in results) == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(split, whole):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    added = results[0][1] + results[1][1]
    torch.testing.assert_close(added.flat(), stats.flat())
    torch.testing.assert_close(stats.from_flat(stats.flat() * 2).flat(), stats.flat() * 2)


def test_terms_of_weight_zero_need_no_input() -> None:
    batch = make_batch(cfg=ObjectiveConfig(survival=0.0), survival_logits=None, correction=None, w2=None)
    loss, stats = objective(**batch)  # type: ignore[arg-type]
    assert torch.isfinite(loss) and "survival" not in stats.sums and "survival_error" not in stats.sums
    with pytest.raises(ValueError, match="survival_logits is None"):
        objective(**{**batch, "cfg": ObjectiveConfig()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": torch.ones(6, 4)}, "valid has dtype"),
        ({"labels": torch.zeros(5, 4, dtype=torch.int64)}, "labels has shape"),
        ({"w2": None}, "together"),
        ({"target_lse": torch.zeros(9)}, "without draft_ids"),
        ({"draft_ids": torch.arange(3)}, "draft_ids has 3 entries"),
        ({"target_head": torch.zeros(12, 5)}, "target_head has 12 rows"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(**make_batch(**change))  # type: ignore[arg-type]


def test_reduce_helpers() -> None:
    valid = torch.tensor([[True, False], [True, True]])
    x = torch.tensor([[1.0, math.nan], [2.0, 3.0]], requires_grad=True)
    clean = clean_rows(x, valid)
    assert clean.tolist() == [[1, 0], [2, 3]]
    (grad,) = torch.autograd.grad((clean.square()).sum(), x)
    assert grad.tolist() == [[2, 0], [4, 6]]
    assert unpack(torch.tensor([5.0, 6.0, 7.0]), valid).tolist() == [[5, 0], [6, 7]]
    assert denominators(ObjectiveConfig(decay=0), valid).tolist() == [3, 2, 3]
    assert denominators(ObjectiveConfig(slot_weighting="auf"), valid)[0] == 3
