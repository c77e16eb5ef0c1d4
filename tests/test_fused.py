"""The fused objective against the plain one: value, gradient, metrics; and against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.losses import fused, objective
from draftsmith.losses.config import ObjectiveConfig

LEAVES = ("hidden", "correction", "w2", "survival_logits")
OFF = {"kl": 0.0, "tv": 0.0, "survival": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    **{
        t: {**OFF, t: 1.0}
        for t in ("ce", "kl", "reverse_kl", "js", "tv", "l1", "nla", "lk", "renyi", "e2e", "exact", "survival")
    },
    "half_reach": {"slot_weighting": "half_reach"},
    "dpace": {**OFF, "ce": 1.0, "slot_weighting": "dpace"},
    "dpace_alpha": {"slot_weighting": "dpace_alpha", "renyi": 0.5},
    "auf": {"slot_weighting": "auf", "ce": 0.1},
    "reach_survival": {"reach_weighted_survival": True, "decay": 0.0},
    "everything": dict.fromkeys(("ce", "reverse_kl", "js", "l1", "nla", "lk", "renyi", "e2e", "exact"), 0.3),
}


def make(
    config: dict[str, Any], *, dtype: torch.dtype = torch.float32, vocab: int = 40, draft: int | None = None, blocks: int = 7,
    slots: int = 4, hidden: int = 8, rank: int = 3, positions: int = 12, scale: float = 1.0, seed: int = 0, full: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `objective` with blocks of every length (whole blocks if `full`), in no order of position."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *s: (torch.randn(*s, generator=g, dtype=torch.float64) * scale).to(dtype)  # noqa: E731
    ids = None if draft is None else torch.randperm(vocab, generator=g)[:draft]
    head = rand(vocab, hidden)
    lengths = torch.randint(0, slots + 1, (blocks, 1), generator=g)
    lengths[0] = slots
    anchors = torch.randint(0, positions - slots + 1, (blocks, 1), generator=g)
    return {
        "cfg": ObjectiveConfig(**config), "hidden": rand(blocks, slots, hidden).requires_grad_(),
        "correction": rand(blocks, slots, rank).requires_grad_(),
        "w2": rand(draft or vocab, rank).requires_grad_(), "survival_logits": rand(blocks, slots).requires_grad_(),
        "lm_head": head if ids is None else head[ids], "target_head": head, "target_hidden": rand(positions, hidden),
        "target_index": anchors + torch.arange(slots), "labels": torch.randint(0, vocab, (blocks, slots), generator=g),
        "valid": torch.arange(slots) < (slots if full else lengths) * torch.ones(blocks, 1), "draft_ids": ids,
    }  # fmt: skip


def results(f: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    loss, stats = f(**batch)
    grads = torch.autograd.grad(loss, [batch[n] for n in LEAVES], allow_unused=True) if loss.requires_grad else [None] * 4
    return loss, stats, [torch.zeros_like(batch[n]) if x is None else x for n, x in zip(LEAVES, grads)]


def assert_same(batch: dict[str, Any], *, rtol: float, atol: float, chunk_bytes: int = 256 << 20) -> None:
    plain, quick = results(objective.objective, batch), results(fused.objective, {**batch, "chunk_bytes": chunk_bytes})
    torch.testing.assert_close(quick[0], plain[0], rtol=rtol, atol=atol)
    for name, got, want in zip(LEAVES, quick[2], plain[2]):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
    assert plain[1].sums.keys() == quick[1].sums.keys()
    for key, value in plain[1].sums.items():
        torch.testing.assert_close(
            quick[1].sums[key], value, rtol=max(rtol, 1e-5), atol=max(atol, 1e-5), msg=lambda m, key=key: f"{key}: {m}"
        )
        torch.testing.assert_close(quick[1].counts[key], plain[1].counts[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [1, 4000, 256 << 20])
@pytest.mark.parametrize("draft", [None, 20])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_plain_path_in_float64(name: str, draft: int | None, chunk_bytes: int) -> None:
    assert_same(make(CONFIGS[name], dtype=torch.float64, draft=draft), rtol=1e-11, atol=1e-13, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("draft", [None, 192])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_plain_path_in_float32(name: str, draft: int | None) -> None:
    batch = make(CONFIGS[name], vocab=320, draft=draft, hidden=16, blocks=20, positions=30, scale=0.7)
    assert_same(batch, rtol=1e-5, atol=1e-5, chunk_bytes=30_000)


@pytest.mark.parametrize("name", ["default", "nla", "e2e", "exact", "everything"])
def test_bfloat16_is_as_close_to_float32_as_its_rounding(name: str) -> None:
    """bf16 inputs: no further from the float64 result on the same numbers than the plain bf16 path is (twice, for slack)."""
    batch = make(CONFIGS[name], dtype=torch.bfloat16, vocab=256, hidden=32, blocks=24, positions=30, scale=0.4)
    exact = {
        k: v.detach().double().requires_grad_(v.requires_grad) if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    truth, plain, quick = (
        results(objective.objective, exact),
        results(objective.objective, batch),
        results(fused.objective, batch),
    )
    assert quick[0].dtype == torch.float32
    torch.testing.assert_close(quick[0].double(), truth[0], rtol=2e-3, atol=2e-3)
    for name_, a, b, t in zip(LEAVES, plain[2], quick[2], truth[2]):
        assert b.dtype == torch.bfloat16
        error, bound = (b.double() - t).norm(), 2 * (a.double() - t).norm() + 0.01 * t.norm()
        assert error <= bound, (name_, error, bound)


@pytest.mark.parametrize("draft", [None, 5])
@pytest.mark.parametrize(
    "name", [n for n in CONFIGS if n not in ("lk", "everything", "half_reach", "dpace", "dpace_alpha", "auf", "survival")]
)
def test_gradcheck(name: str, draft: int | None) -> None:
    """Against finite differences; weightings and labels that are detached by design are compared with autograd above."""
    config = {**CONFIGS[name], "survival": 0.0} if name != "reach_survival" else {**OFF, "tv": 1.0, "decay": 0.0}
    batch = make(config, dtype=torch.float64, vocab=9, draft=draft, blocks=2, slots=3, hidden=3, rank=2, positions=5, seed=4)

    def loss(hidden: torch.Tensor, correction: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return fused.objective(**{**batch, "hidden": hidden, "correction": correction, "w2": w2})[0]

    assert torch.autograd.gradcheck(loss, [batch[n] for n in LEAVES[:3]], eps=1e-6, atol=1e-7)


def test_gradcheck_survival() -> None:
    batch = make({**OFF, "survival": 1.0}, dtype=torch.float64, vocab=9, blocks=2, slots=3, hidden=3, rank=2, positions=5)
    assert torch.autograd.gradcheck(lambda s: fused.objective(**{**batch, "survival_logits": s})[0], [batch["survival_logits"]])


@pytest.mark.parametrize("path", [objective.objective, fused.objective])
@pytest.mark.parametrize("name", ["default", "everything", "half_reach"])
def test_masked_slots_may_hold_anything_and_count_nothing(name: str, path: Any) -> None:
    batch = make(CONFIGS[name], dtype=torch.float64, draft=20)
    clean, dirty, masked = results(path, batch), dict(batch), ~batch["valid"]
    for key, junk in (
        ("hidden", torch.nan),
        ("correction", torch.inf),
        ("survival_logits", -torch.inf),
        ("labels", -100),
        ("target_index", 10**9),
    ):
        value = batch[key].detach().clone()
        value[masked] = junk
        dirty[key] = value.requires_grad_(batch[key].requires_grad)
    found = results(path, dirty)
    assert torch.equal(found[0], clean[0])
    for got, want in zip(found[2], clean[2]):
        assert torch.equal(got, want)
    for got in (found[2][0], found[2][1], found[2][3]):
        assert (got[masked] == 0).all() and not got[masked].isnan().any()
    assert torch.equal(found[1].flat(), clean[1].flat())


@pytest.mark.parametrize("name", ["default", "nla", "renyi", "js", "e2e", "exact", "lk", "ce"])
def test_disjoint_one_hot_laws(name: str) -> None:
    """alpha underflows to 0 at every slot: values and gradients are those of float64, finite, no NaN."""
    batch = make(CONFIGS[name], vocab=64, hidden=8, scale=6.0, seed=2)
    assert objective.objective(**batch)[1].means()["alpha"][0] < 0.2
    wide = {
        k: v.detach().double().requires_grad_(v.requires_grad) if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    truth, quick = results(objective.objective, wide), results(fused.objective, batch)
    torch.testing.assert_close(quick[0].double(), truth[0], rtol=1e-4, atol=1e-5)
    for got, want in zip(quick[2], truth[2]):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softcap", [3.0, 30.0])
def test_softcap(softcap: float) -> None:
    batch = make(CONFIGS["everything"], dtype=torch.float64, draft=20) | {"softcap": softcap}
    assert_same(batch, rtol=1e-11, atol=1e-13, chunk_bytes=4000)
    assert not torch.isclose(results(fused.objective, batch)[0], results(fused.objective, batch | {"softcap": None})[0])


@pytest.mark.parametrize("name", ["default", "everything"])
@pytest.mark.parametrize("path", [objective.objective, fused.objective])
def test_given_normaliser_replaces_the_full_target_product(path: Any, name: str) -> None:
    batch = make(CONFIGS[name], dtype=torch.float64, draft=20)
    logits = batch["target_hidden"] @ batch["target_head"].T
    short = {**batch, "target_lse": logits.logsumexp(-1), "target_top": logits.argmax(-1)}
    want = results(path, batch)
    for given in (short, {**short, "target_head": batch["target_head"][batch["draft_ids"]]}):
        got = results(path, given)
        torch.testing.assert_close(got[0], want[0])
        for one, other in zip(got[2], want[2]):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(got[1].flat(), want[1].flat())
    without = path(**{**short, "target_top": None})[1]
    assert "agree" not in without.sums and "alpha" in without.sums


def test_without_correction_head_without_gradient_and_without_a_valid_slot() -> None:
    batch = make({"survival": 0.0}) | {"correction": None, "w2": None, "survival_logits": None}
    plain, quick = objective.objective(**batch), fused.objective(**batch)
    torch.testing.assert_close(quick[0], plain[0])
    torch.testing.assert_close(*(torch.autograd.grad(x[0], batch["hidden"])[0] for x in (quick, plain)))
    with torch.no_grad():
        loss, stats = fused.objective(**batch)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain[0].detach())
    torch.testing.assert_close(stats.flat(), plain[1].flat())
    for f in (objective.objective, fused.objective):
        loss, stats = f(**make({}) | {"valid": torch.zeros(7, 4, dtype=torch.bool)})
        assert loss.item() == 0 and stats.counts["alpha"].sum() == 0


def test_shared_denominators_and_upstream_gradient() -> None:
    batch = make(CONFIGS["e2e"], dtype=torch.float64) | {"denominators": torch.tensor([50.0, 20.0, 50.0])}
    assert_same(batch, rtol=1e-11, atol=1e-13)
    loss, _ = fused.objective(**batch)
    (once,) = torch.autograd.grad(loss, batch["hidden"], retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, batch["hidden"])
    torch.testing.assert_close(thrice, 3 * once)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x):
                self.numel = max(self.numel, x.numel())
        return out


def test_no_tensor_over_all_slots_and_the_vocabulary() -> None:
    batch = make(CONFIGS["everything"], vocab=512, blocks=64, slots=4, hidden=8, positions=80, full=True)
    every = 64 * 4 * 512
    with _Largest() as seen:
        objective.objective(**batch)[0].backward()
    assert seen.numel >= every  # the plain path does make one: the probe sees it
    with _Largest() as seen:
        fused.objective(**batch, chunk_bytes=every // 2)[0].backward()
    assert seen.numel <= every // 8


def test_frozen_head_gets_no_gradient_and_the_target_is_multiplied_once_a_position() -> None:
    batch = make({}, vocab=128, blocks=30, positions=20, full=True)
    batch["lm_head"] = batch["target_head"] = batch["target_head"].clone().requires_grad_()
    products: list[tuple[int, ...]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.out:
                products.append((*args[0].shape, args[1].shape[1]))
            assert func is not torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    with Products():
        loss, _ = fused.objective(**batch)
        products.append((0, 0, 0))
        loss.backward()  # recomputes nothing: no product follows the mark
    assert batch["lm_head"].grad is None and batch["hidden"].grad is not None
    covered = len(batch["target_index"].unique())
    # target, draft logits, gradients of w2, of the correction states and of the hidden states
    assert products == [(covered, 8, 128), (120, 8, 128), (128, 120, 3), (120, 128, 3), (120, 128, 8), (0, 0, 0)]


def test_row_maximum_in_stripes_is_the_first_arg_max() -> None:
    from draftsmith.losses.rows import row_max

    x = torch.randint(0, 50, (40, 256)).float()  # ties everywhere
    for table in (x, x[:, :100].contiguous(), x[:, :64].contiguous()):
        highest, best = row_max(table)
        assert torch.equal(highest, table.amax(-1))
        assert torch.equal(best, (table == highest[:, None]).int().argmax(-1))
