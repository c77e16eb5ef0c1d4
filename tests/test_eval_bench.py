"""The measurement end to end on a tiny target: cells, costs, losslessness, restart, and what each refuses."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from tiny_chat import chat_target

from draftsmith.eval import bench as cells
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.cost import measure_costs, nearest_cost, verify_curve
from draftsmith.eval.lossless import check_greedy, check_sampling, first_difference, logit_gap
from draftsmith.eval.prompts import EvalPrompt, load_eval_prompts, take
from draftsmith.eval.report import read_report
from draftsmith.eval.stage import Serving, bench
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.engine import Engine

GAMMA = 3
SMALL = {
    "prompts_per_domain": 4, "max_new_tokens": 20, "cost_tokens": 8, "cost_prompts": 2, "cost_repeats": 1,
    "sampling_prompts": 1, "sampling_seeds": 40, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a tiny target, an untrained drafter of it, and a prompt file of two domains."""
    folder = tmp_path_factory.mktemp("bench")
    target = chat_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    cfg = DSparkConfig(num_layers=1, block_size=GAMMA, rank=4, tap_layers=(0,), num_taps=1)
    torch.manual_seed(1)
    drafter = DSpark(native.build_config(target.config, cfg, mask_token_id=0, target_name="tiny"))
    native.save(
        folder / "drafter",
        drafter,
        FrozenHeads.build(target.embedding_weight, target.lm_head_weight, None),
        dtype=torch.float32,
    )
    rows = [
        {"id": f"{domain}-{i}", "domain": domain, "turns": [f"hi w{i} w{(7 * i + len(domain)) % 40} ok"]}
        for domain in ("code", "rewrite") for i in range(8)
    ]  # fmt: skip
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(place, **changes):
    return EvalConfig(prompts=str(place / "prompts.jsonl"), **(SMALL | changes))


@pytest.fixture(scope="module")
def serving(place):
    return Serving.open(
        TargetConfig(name=str(place / "target"), dtype="float32"), place / "drafter", config(place), "float32", "cpu"
    )


@pytest.fixture(scope="module")
def prompts(place, serving):
    return load_eval_prompts(config(place), serving.target.tokenizer, max_prompt=64)


def run(place, output, **changes):
    stream = io.StringIO()
    target = TargetConfig(name=str(place / "target"), dtype="float32")
    log = place / "train.jsonl"
    log.write_text(json.dumps({"step": 1, "loss/total": 2.0, "accept/alpha_1": 0.1, "val/accept/tau_expected": 1.2}))
    html = bench(
        target, place / "drafter", config(place, **changes), output, recipe={"seed": 0}, train_log=log,
        console=Console(file=stream, width=200),
    )  # fmt: skip
    return html, stream.getvalue()


def test_stage_writes_a_whole_report_and_reuses_what_it_measured(place, tmp_path):
    html, first = run(place, tmp_path)
    report = read_report(tmp_path / "report.json")
    assert html == tmp_path / "report.html" and html.is_file()
    assert {(c["domain"], c["temperature"]) for c in report["cells"]} == {
        (d, t) for d in ("code", "rewrite") for t in (0.0, 1.0)
    }
    for cell in report["cells"]:
        assert cell["units"] == 4 and cell["gamma"] == GAMMA
        low, high = cell["speedup_interval"]
        assert 0 < low <= cell["speedup"] <= high
        assert sum(cell["time_split"].values()) == pytest.approx(1.0)
        assert all(value > 0 for value in cell["time_split"].values())
        assert 1.0 <= cell["tau"] <= GAMMA + 1 and cell["predicted_speedup"] > 0
        rates = cell["speculative_tokens_per_second"] / cell["plain_tokens_per_second"]
        assert rates == pytest.approx(cell["speedup"])
    assert report["lossless"]["greedy_prompts"] == 8 and report["lossless"]["greedy_mismatches"] == 0
    assert report["lossless"]["verdict"] is True and report["lossless"]["sampling_p_value"] > 0.001
    assert report["training"]["series"]["loss/total"] == [[1, 2.0]]
    assert "lossless" in first and str(html) in first.replace("\n", "")
    _, second = run(place, tmp_path)
    again = read_report(tmp_path / "report.json")
    assert again["cells"] == report["cells"] and again["cost"] == report["cost"]
    assert again["environment"]["reused_parts"] >= 7 and ": measuring" not in second
    # one killed cell is measured again, the rest stays
    (tmp_path / "measurements" / "cell-code-t0-c1-x0.json").write_text('{"fingerp')
    assert run(place, tmp_path)[1].count(": measuring") == 1
    # another setting is another measurement
    assert run(place, tmp_path, max_new_tokens=16)[1].count(": measuring") >= 7


@pytest.mark.parametrize("kind", ["ngram", "suffix", "layerskip", "int8"])
def test_every_proposer_can_be_measured(place, tmp_path, kind):
    from draftsmith.runtime.config import ProposerConfig

    run(
        place, tmp_path, proposer=ProposerConfig(kind=kind, num_slots=3), temperatures=(0.0,), prompts_per_domain=2,
        max_new_tokens=8, sampling_prompts=0,
    )  # fmt: skip
    report = read_report(tmp_path / "report.json")
    assert report["lossless"]["verdict"] is True and report["settings"]["proposer"]["kind"] == kind
    assert {cell["domain"] for cell in report["cells"]} == {"code", "rewrite"}


def test_cells_of_several_concurrencies_and_contexts(place, tmp_path):
    run(
        place, tmp_path, concurrency=(1, 2), contexts=(0, 40), temperatures=(0.0,), prompts_per_domain=2, max_new_tokens=8,
        sampling_prompts=0, num_slots=2,
    )  # fmt: skip
    report = read_report(tmp_path / "report.json")
    assert {(c["concurrency"], c["context_setting"]) for c in report["cells"]} == {(1, 0), (1, 40), (2, 0), (2, 40)}
    assert all(abs(c["context"] - 40) <= 1 for c in report["cells"] if c["context_setting"] == 40)
    assert {c["units"] for c in report["cells"] if c["concurrency"] == 2} == {4}
    assert all(len(c["acceptance_per_slot"]) <= 2 for c in report["cells"])
    assert len(report["cost"]["points"]) == 4 and report["lossless"]["sampling_p_value"] is None


def test_measured_figures_follow_from_the_raw_records(serving, prompts):
    engines = serving.engines(1, 120)
    groups = take(prompts["code"], 4, 1)
    records = cells.measure_cell(*engines, groups, SamplingParams(max_new_tokens=20), repeats=2)
    assert [r["first"] for r in records] == [
        "plain",
        "speculative",
        "plain",
        "speculative",
        "speculative",
        "plain",
        "speculative",
        "plain",
    ]
    cell = cells.summarise_cell(cells.OperatingPoint("code", 0.0, 1), records, gamma=GAMMA)
    flat = [cycle for r in records for cycle in r["speculative"]["cycles"][0]]
    assert cell["tau"] == pytest.approx(sum(c[2] for c in flat) / len(flat))
    first = records[0]
    assert first["plain"]["token_ids"] == first["speculative"]["token_ids"]
    assert first["plain"]["tokens"] == [len(first["plain"]["token_ids"][0])]
    assert first["plain"]["steps"] == first["plain"]["tokens"][0] - 1  # the first token comes from the prefill
    parts = sum(first["speculative"][f"{p}_s"] for p in ("prefill", "draft", "head", "verify", "rest"))
    assert parts <= first["speculative"]["seconds"] <= 1.5 * parts + 0.02
    assert cell["predicted_speedup"] is None


def test_prediction_is_exact_when_costs_come_from_the_same_clock():
    """Invented times that obey the equation: prediction and measurement must agree to rounding."""
    cost = {"gamma": 3, "c_block": 0.4, "c_step": 0.05, "v": 1.2, "overhead": 0.1, "plain_overhead": 0.02}
    step, cycle = 0.01 * 1.02, 0.01 * (0.4 + 3 * 0.05 + 1.2 + 0.1)
    records = []
    for unit, accepted in enumerate(([3, 2, 1], [3, 3, 0], [1, 2, 3])):
        cycles = [(3, a, a + 1) for a in accepted]
        tokens = 1 + sum(c[2] for c in cycles)
        shared = {"unit": unit, "repeat": 0, "ids": [f"p{unit}"], "prompt_tokens": [10]}
        plain = side(0.03, (tokens - 1) * step, tokens - 1, tokens, [(0, 0, 1)] * (tokens - 1))
        records.append(shared | {"plain": plain, "speculative": side(0.04, 3 * cycle, 3, tokens, cycles)})
    cell = cells.summarise_cell(cells.OperatingPoint("code", 0.0, 1), records, gamma=3, cost=cost)
    assert cell["tau"] == pytest.approx(3.0)
    assert cell["predicted_decode_speedup"] == pytest.approx(cell["decode_speedup"])
    assert cell["predicted_speedup"] == pytest.approx(cell["speedup"])
    assert cell["predicted_speedup_bare"] == pytest.approx(3.0 / 1.75)
    assert cell["speedup"] < cell["decode_speedup"]


def side(prefill, decode, steps, tokens, cycles):
    parts = {f"{part}_s": decode / 4 for part in ("draft", "head", "verify", "rest")}
    return parts | {
        "seconds": prefill + decode, "prefill_s": prefill, "steps": steps, "tokens": [tokens], "cycles": [cycles],
        "reached_per_slot": [3, 2, 1], "accepted_per_slot": [2, 1, 1],
    }  # fmt: skip


def test_costs_and_verify_curve(serving, prompts):
    cost = measure_costs(
        *serving.engines(1, 120), take(prompts["code"], 2, 1), SamplingParams(max_new_tokens=20), tokens=12, repeats=2
    )
    assert cost["gamma"] == GAMMA and cost["runs"] == 4
    assert all(cost[key] > 0 for key in ("c_block", "c_step", "v", "overhead", "plain_overhead", "target_pass_ms"))
    curve = verify_curve(serving.decoder, batch=2, context=50, widths=(2, 4), repeats=3)
    assert [point["tokens"] for point in curve] == [1, 2, 4] and curve[0]["v"] == 1.0
    with pytest.raises(ValueError, match="context: got 255"):
        verify_curve(serving.decoder, batch=1, context=255, widths=(4,))


def test_nearest_cost_prefers_concurrency_then_kind_then_context():
    points = [{"concurrency": c, "temperature": t, "context": x} for c in (1, 8) for t in (0.0, 1.0) for x in (100, 900)]
    assert nearest_cost(points, concurrency=8, context=850, temperature=0.7) == {
        "concurrency": 8,
        "temperature": 1.0,
        "context": 900,
    }
    assert nearest_cost([], concurrency=1, context=1, temperature=0.0) is None


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


class Tampered:
    """A decoder whose passes over several tokens favour one token: what a wrong verification pass looks like."""

    def __init__(self, inner, token):
        self.inner, self.token = inner, token

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, tokens, *args, **kwargs):
        out = self.inner.forward(tokens, *args, **kwargs)
        if kwargs.get("logits") == "all" and tokens.shape[1] > 1:
            logits = out.logits.clone()
            logits[:, 0, self.token] += 3.0
            out = dataclasses.replace(out, logits=logits)
        return out


def tampered_engine(serving, token):
    good = serving.engines(4, 120)[1]
    return Engine(Tampered(serving.decoder, token), proposer=good.proposer, slots=4, max_context=120, eos_ids=(1,))


def test_greedy_check_finds_a_wrong_verifier_and_passes_the_right_one(serving, prompts):
    groups = [prompts["code"][:4]]
    plain, speculative = serving.engines(4, 120)
    good = check_greedy(plain, speculative, groups, max_new_tokens=20)
    assert good.mismatches == 0 and good.prompts == 4 and good.dtype == "float32"
    bad = check_greedy(plain, tampered_engine(serving, 9), groups, max_new_tokens=20)
    assert bad.mismatches > 0
    assert all(d.gap > 0 and d.plain != d.speculative for d in bad.differences)


def test_sampling_check_finds_a_wrong_law_and_passes_the_right_one(serving, prompts):
    plain, speculative = serving.engines(4, 120)
    sampling = SamplingParams(temperature=1.0)
    good = check_sampling(plain, speculative, prompts["code"][:2], sampling, seeds=150)
    assert good["p_value"] > 0.002 and good["samples"] == 300
    bad = check_sampling(plain, tampered_engine(serving, 9), prompts["code"][:2], sampling, seeds=150)
    assert bad["p_value"] < 0.002
    with pytest.raises(ValueError, match="temperature"):
        check_sampling(plain, speculative, prompts["code"][:1], SamplingParams(), seeds=20)


def test_logit_gap_equals_the_models_own(serving, prompts):
    ids = prompts["rewrite"][0].prompt_ids
    logits = serving.target.model(input_ids=torch.tensor([ids])).logits[0, -1].topk(2).values
    assert logit_gap(serving.decoder, ids) == pytest.approx(float(logits[0] - logits[1]), abs=1e-4)


def test_prompts_are_rendered_with_the_template_and_fixed_by_the_seed(place, serving):
    tokenizer = serving.target.tokenizer
    first = load_eval_prompts(config(place), tokenizer, max_prompt=64)
    assert first == load_eval_prompts(config(place), tokenizer, max_prompt=64)
    assert first != load_eval_prompts(config(place, seed=1), tokenizer, max_prompt=64)
    prompt = first["code"][0]
    assert tokenizer.decode(prompt.prompt_ids).split()[0] == "user"
    assert tokenizer.decode(prompt.prompt_ids).split()[-1] == "assistant"
    assert list(load_eval_prompts(config(place, domains=("rewrite",)), tokenizer, max_prompt=64)) == ["rewrite"]
    for bad, message in (({"domains": ("poetry",)}, "poetry"), ({"prompts": "absent.jsonl"}, "absent")):
        with pytest.raises(ValueError, match=message):
            load_eval_prompts(dataclasses.replace(config(place), **bad), tokenizer, max_prompt=64)
    with pytest.raises(ValueError, match="fit 3 tokens"):
        load_eval_prompts(config(place), tokenizer, max_prompt=3)
    with pytest.raises(ValueError, match="eval.contexts: got 80"):
        load_eval_prompts(config(place), tokenizer, max_prompt=64, context=80)


def test_take_makes_whole_groups_and_enough_of_them():
    own = [EvalPrompt(str(i), "code", [1]) for i in range(20)]
    assert [len(g) for g in take(own, 5, 1)] == [1] * 5
    assert [len(g) for g in take(own, 2, 4)] == [4] * 4
    assert [len(g) for g in take(own, 16, 8)] == [8] * 2
    with pytest.raises(ValueError, match="eval.concurrency: got 16"):
        take(own, 4, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": ()}, "eval.temperatures"), ({"temperatures": (-0.5,)}, "eval.temperatures"),
        ({"concurrency": (0,)}, "eval.concurrency"), ({"concurrency": (2, 2)}, "each value once"),
        ({"contexts": (-1,)}, "eval.contexts"),
    ],
)  # fmt: skip
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**changes)
