"""The fused objective's passes: native code, compiled and plain tensor code agree; memory; what a term that is off costs."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fused import CONFIGS, OFF, make, results
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.losses import fused, memory, native, objective, rows
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.losses.passes import Passes
from draftsmith.losses.rows import Sums
from draftsmith.losses.terms import RowStats

needs_native = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")


def tables(dtype: torch.dtype, vocab: int, scale: float, draft: int | None = None) -> dict[str, Any]:
    g = torch.Generator().manual_seed(vocab)
    n, positions, width = 17, 6, draft or vocab
    z, t = ((torch.randn(r, w, generator=g) * scale).to(dtype) for r, w in ((n, width), (positions, vocab)))
    ids = None if draft is None else torch.randperm(vocab, generator=g)[:draft]
    columns = torch.randint(0, width, (n,), generator=g)
    columns[3] = -1  # an unreachable text token
    weights = {name: torch.randn(n, generator=g) for name in ("alpha", "kl", "log_q_label")}
    return {
        "z": z,
        "t": t,
        "ids": ids,
        "columns": columns,
        "weights": weights,
        "local": torch.randint(0, positions, (n,), generator=g),
    }


def run(passes: Passes, given: dict[str, Any], lse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    z, ids = given["z"].clone(), given["ids"]
    t = given["t"] if lse is None or ids is None else given["t"][:, ids].contiguous()
    law = passes.law(logits=t, p=torch.empty(len(t), z.shape[1]), draft_ids=ids, lse=lse, top=None)
    at, number = law.of_rows(given["local"]), torch.zeros(len(z))
    into = RowStats(alpha=number.clone(), log_q_label=number.clone(), log_p_label=number.clone(), correct=number.bool())
    sums = Sums.allocate(number)
    scale = rows.gradient_scale(given["weights"], mass=at.mass, columns=given["columns"])
    shared = {"law": at, "local": given["local"], "sums": sums, "into": into, "columns": given["columns"]}
    twice = z.clone()  # statistics first, the gradient in a second call, as for losses that are not linear
    passes.rows(z=twice, **shared, measure=True)
    passes.rows(z=twice, **shared, measure=False, weights=given["weights"], scale=scale)
    passes.rows(z=z, **shared, measure=True, weights=given["weights"], scale=scale)
    found = {n: getattr(law, n) for n in ("p", "lse", "mass", "cross")} | ({"top": law.top} if law.top is not None else {})
    return (
        found
        | {n: getattr(sums, n) for n in ("best", "highest", "below", "cross")}
        | {"lse_q": sums.lse(), "alpha": into.alpha, "dz": z.float(), "dz_in_two_calls": twice.float()}
    )


@needs_native
@pytest.mark.parametrize("scale", [0.3, 4.0, 200.0])
@pytest.mark.parametrize(("vocab", "draft"), [(7, None), (2048, None), (4999, None), (4999, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_passes_equal_tensor_code(dtype: torch.dtype, vocab: int, draft: int | None, scale: float) -> None:
    given = tables(dtype, vocab, scale, draft)
    mine, plain = (Passes({"kl"}, given["z"]) for _ in range(2))
    plain.native = False
    assert mine.native
    lse = None if draft is None else given["t"].float().logsumexp(-1)
    for one in (None, lse):
        got, want = run(mine, given, one), run(plain, given, one)
        assert got.keys() == want.keys()
        for name, value in want.items():
            tolerance = 1e-2 if dtype == torch.bfloat16 and name.startswith("dz") else 2e-5
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=2e-6 * max(1.0, scale), msg=lambda m, n=name: f"{n}: {m}"
            )


@needs_native
@pytest.mark.parametrize("first", [0.0, -500.0, 500.0])
def test_native_softmax_survives_a_largest_entry_far_from_the_first_block(first: float) -> None:
    given = tables(torch.float32, 5000, 1.0)
    given["z"][:, :2048] += first
    got, want = given["z"].double().logsumexp(-1), run(Passes({"kl"}, given["z"]), given)
    torch.testing.assert_close(want["lse_q"].double(), got, rtol=1e-6, atol=1e-5)
    assert torch.equal(want["best"], given["z"].argmax(-1))


@needs_native
def test_native_log_alpha_where_alpha_is_zero() -> None:
    """Rows of disjoint laws among ordinary ones: values and gradients of float64, none of them 0 or infinite."""
    batch = make(
        {**OFF, "nla": 1.0, "kl": 0.2}, vocab=300, blocks=9, slots=4, hidden=8, rank=3, positions=30, scale=1.5, full=True
    )
    with torch.no_grad():
        batch["hidden"][:4] *= 50.0
        batch["target_hidden"][:] *= 20.0
        batch["hidden"][4:] *= 0.1
    wide = {k: v.detach().double().requires_grad_(v.requires_grad) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in batch.items()}  # fmt: skip
    q = (batch["hidden"] @ batch["lm_head"].T + batch["correction"] @ batch["w2"].T).detach().softmax(-1)
    p = (batch["target_hidden"] @ batch["target_head"].T)[batch["target_index"]].softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    assert alpha.min() < 1e-30 and alpha.max() > 1e-2
    truth, quick = results(objective.objective, wide), results(fused.objective, batch)
    torch.testing.assert_close(quick[0].double(), truth[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(quick[2], truth[2]):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("js", "kl", "log_alpha", "renyi", "reverse_kl")])
def test_passes_compile_as_whole_graphs(names: tuple[str, ...]) -> None:
    """Without a graph break, and with the same values. (Which kernels come out is the backend's; here none is generated.)"""
    given = tables(torch.float32, 96, 2.0)
    compiled = [
        torch.compile(f, backend="aot_eager", dynamic=True, fullgraph=True)
        for f in (rows.law_rows, rows.statistics, rows.gradient)
    ]
    outcomes = []
    for law_rows, statistics, gradient in ((rows.law_rows, rows.statistics, rows.gradient), compiled):
        law = law_rows(logits=given["t"], ids=None, lse=None, dtype=torch.float32)
        logits = given["t"] if names else None
        shared = {"z": given["z"], "p": law["p"], "local": given["local"], "logits": logits, "lse": law["lse"][given["local"]]}
        sums = statistics(**shared, names=names)
        weights = {**given["weights"], **{n: given["weights"]["alpha"] for n in names if n != "kl"}}
        scale = rows.gradient_scale(weights, mass=law["mass"][given["local"]], columns=given["columns"])
        outcomes.append(
            {**law, **sums, "dz": gradient(**shared, sums=sums, weights=weights, scale=scale, columns=given["columns"])}
        )
    torch.testing.assert_close(outcomes[1], outcomes[0])


@pytest.mark.parametrize("draft", [None, 32_000])
@pytest.mark.parametrize("name", ["default", "ce", "nla", "js", "renyi", "reverse_kl", "lk", "e2e", "exact"])
def test_vocabulary_of_151936_with_peaked_and_disjoint_laws(name: str, draft: int | None) -> None:
    """float32 against float64 on the plain path: a one-hot p, near-uniform q, alpha below 1e-5."""
    batch = make(CONFIGS[name], vocab=151_936, draft=draft, blocks=2, slots=2, hidden=4, rank=2, positions=3, full=True)
    with torch.no_grad():
        batch["target_hidden"][0] *= 40.0  # one-hot
        batch["hidden"][0] *= 0.01
        batch["correction"][0] *= 0.01  # uniform
    wide = {
        k: v.detach().double().requires_grad_(v.requires_grad) if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    truth, quick = results(objective.objective, wide), results(fused.objective, batch)
    torch.testing.assert_close(quick[0].double(), truth[0], rtol=2e-5, atol=1e-6)
    for got, want in zip(quick[2], truth[2]):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-6)


class _Wide(TorchDispatchMode):
    """Counts operations that return at least `numel` elements, and matrix products."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.wide, self.products = numel, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        self.wide += any(
            torch.is_tensor(x) and x.numel() >= self.numel for x in (out if isinstance(out, (tuple, list)) else (out,))
        )
        return out


def cost(config: dict[str, Any]) -> tuple[int, int]:
    batch = make({**OFF, **config}, dtype=torch.float64, vocab=64, blocks=6, slots=3, positions=40, full=True)
    fused.objective(**batch)  # takes the working memory, once
    with _Wide(18 * 64) as seen:
        fused.objective(**batch)
    return seen.wide, seen.products


def test_terms_of_weight_zero_cost_nothing() -> None:
    tv = cost({"tv": 1.0})
    for term in ("kl", "reverse_kl", "js", "nla", "renyi"):
        assert cost({"tv": 1.0, term: 0.0}) == tv
        assert cost({"tv": 1.0, term: 0.5})[0] > tv[0], term
    assert cost({"tv": 1.0, "survival": 1.0}) == tv  # meets the rest in per-slot algebra only
    # the survival head alone: alpha, and no gradient of the logits or products to carry it
    assert cost({"survival": 1.0})[1] == 3 and tv[1] == 6


def test_terms_of_weight_zero_need_no_input_in_the_fused_path() -> None:
    batch = make({"survival": 0.0}) | {"survival_logits": None, "correction": None, "w2": None}
    loss, stats = fused.objective(**batch)
    assert torch.isfinite(loss) and "survival_error" not in stats.sums
    with pytest.raises(ValueError, match="survival_logits is None"):
        fused.objective(**{**batch, "cfg": ObjectiveConfig()})


@pytest.mark.parametrize(("name", "softcap"), [("default", None), ("everything", None), ("e2e", 5.0)])
def test_working_memory_follows_the_budget(name: str, softcap: float | None) -> None:
    batch = make(CONFIGS[name], vocab=512, blocks=64, slots=4, hidden=8, positions=80, full=True) | {"softcap": softcap}
    for budget in (200_000, 60_000):
        memory.release()
        fused.objective(**batch, chunk_bytes=budget)[0].backward()
        held = sum(room.flat.nbytes for room in memory._kept.rooms.values())
        assert budget / 4 < held <= budget + batch["w2"].nbytes, (budget, held)
    memory.release()


def test_rooms_are_reused_by_their_thread_and_given_back() -> None:
    memory.release()
    cpu = torch.device("cpu")
    room = memory.room("x", torch.float32, cpu)
    first = room.take(3 << 10, 1 << 10)
    assert memory.room("x", torch.float32, cpu).take(10, 20).data_ptr() == first.data_ptr()
    assert memory.room("x", torch.bfloat16, cpu) is not room
    seen: list[memory.Room] = []
    thread = threading.Thread(target=lambda: seen.append(memory.room("x", torch.float32, cpu)))
    thread.start()
    thread.join()
    assert seen[0] is not room
    assert first.fill_(1.0).sum() == 3 << 20 and first.is_contiguous() and first.data_ptr() % 4096 == 0
    memory.release()
    assert memory.room("x", torch.float32, cpu) is not room
    memory.release()


@pytest.mark.slow
def test_benchmark_workers_agree_on_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    from _worker import Worker, paired

    shape = {"hidden": 32, "vocab": 512, "rank": 4, "tokens": 40, "anchors": 8, "slots": 3, "precision": "fp32",
             "chunk_mib": 1, "objective": {}}  # fmt: skip
    names = ("products", "fused", "plain")
    workers = [Worker(n, [sys.executable, folder / "_objective_worker.py", n, json.dumps(shape)], 1) for n in names]
    for _ in range(3):
        found = {worker.name: worker.run() for worker in workers}
    for worker in workers:
        worker.close()
    assert found["fused"]["value"] == pytest.approx(found["plain"]["value"], rel=1e-5)
    assert len(paired(workers[1], workers[0])) == 2 and workers[1].first["peak"] > workers[1].first["rise"] >= 0
