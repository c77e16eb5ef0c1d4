"""The calibration stage on a tiny target: rollouts are the served ones, the stage restarts, the file reaches the runtime."""

import dataclasses
import io
import json
import warnings

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_chat import chat_target

from draftsmith.cli import app as cli
from draftsmith.cli import pipeline
from draftsmith.eval import calibrate as stage
from draftsmith.eval.calibrate import Recorder, calibrate, observe, read_rollouts, split_prompts, write_rollouts
from draftsmith.eval.config import CalibrateConfig, EvalConfig
from draftsmith.eval.prompts import calibration_ids, load_eval_prompts, read_heldout
from draftsmith.eval.stage import Serving, fingerprint, sampling_of
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native
from draftsmith.recipes.schema import load_recipe, to_plain
from draftsmith.runtime.calibration import Calibration, Entry, Setting
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request

GAMMA, DOMAINS = 3, ("code", "rewrite")


def make_drafter(target, folder, **changes):
    cfg = DSparkConfig(**(dict(num_layers=1, block_size=GAMMA, rank=4, tap_layers=(0,), num_taps=1) | changes))
    torch.manual_seed(1)
    drafter = DSpark(native.build_config(target.config, cfg, mask_token_id=0, target_name="tiny"))
    if drafter.confidence_head is not None:  # starts at zero: give it something to say
        torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.5)
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, None)
    return native.save(folder, drafter, heads, dtype=torch.float32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a tiny target, an untrained drafter of it, and a prompt file of two domains."""
    folder = tmp_path_factory.mktemp("calibrate")
    target = chat_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    make_drafter(target, folder / "drafter")
    rows = [
        {"id": f"{domain}-{i}", "domain": domain, "turns": [f"hi w{i} w{(7 * i + len(domain)) % 40} ok"]}
        for domain in DOMAINS for i in range(12)
    ]  # fmt: skip
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(place, **changes):
    calibration = CalibrateConfig(**(dict(max_new_tokens=12, slots=4, folds=2) | changes.pop("calibration", {})))
    return EvalConfig(prompts=str(place / "prompts.jsonl"), dtype="float32", calibration=calibration, **changes)


def run(place, output, drafter="drafter", **changes):
    stream = io.StringIO()
    target = TargetConfig(name=str(place / "target"), dtype="float32")
    html = calibrate(target, place / drafter, config(place, **changes), output, console=Console(file=stream, width=160))
    return html, json.loads((output / "calibration" / "report.json").read_text()), stream.getvalue()


def test_stage_fits_stores_reports_and_restarts(place, tmp_path):
    html, report, first = run(place, tmp_path)
    folder = tmp_path / "calibration"
    assert html == folder / "report.html" and html.read_text().count("data:image/svg+xml") == 2
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert [(e["temperature"], e["rule"]) for e in report["entries"]] == [(0.0, "block"), (1.0, "block")]
    assert report["prompts"] == {part: dict.fromkeys(DOMAINS, n) for part, n in (("fit", 5), ("evaluation", 7))}
    for entry in report["entries"]:
        assert set(entry["cross_validation"]) == set(entry["all_kinds"]) == {"none", "sts", "platt", "isotonic"}
        assert entry["kind"] in entry["all_kinds"] and entry["after"]["ece"] == entry["all_kinds"][entry["kind"]]["ece"]
        assert entry["before"]["ece"] == entry["all_kinds"]["none"]["ece"]
        rows = entry["after"]["metrics"]
        assert [(r["domain"], r["slot"]) for r in rows] == [(d, k) for d in ("all", *DOMAINS) for k in (1, 2, 3)]
        for slot in range(GAMMA):
            every, *parts = (row for row in rows if row["slot"] == slot + 1)
            assert every["observations"] == sum(p["observations"] for p in parts) == entry["evaluation"]["known_per_slot"][slot]
        assert 8 <= entry["fit"]["prompts"] <= 10 and 11 <= entry["evaluation"]["prompts"] <= 14  # some answers are one token
    loaded = Calibration.load(place / "drafter")
    assert [e.kind for e in loaded.entries] == [e["kind"] for e in report["entries"]] and loaded.block_size == GAMMA
    assert "chance" in first and "goal" in first and str(folder) in first.replace("\n", "")
    _, again, second = run(place, tmp_path)
    assert again["entries"] == report["entries"] and again["environment"]["reused_parts"] == 4 and "row-cycles in" not in second
    # a torn file and another setting are rolled out anew
    (folder / "rollouts-t0-fit.npz").write_bytes(b"PK\x03\x04 torn")
    assert run(place, tmp_path, top_k=5)[1]["environment"]["reused_parts"] == 1, "what is left: greedy, which has no top-k"


@pytest.fixture(scope="module")
def serving(place):
    return Serving.open(
        TargetConfig(name=str(place / "target"), dtype="float32"), place / "drafter", config(place), "float32", "cpu"
    )


def engine(serving, slots=3, record=True):
    drafter, heads = native.load(
        serving.drafter_folder, embedding=serving.target.embedding_weight, lm_head=serving.target.lm_head_weight
    )
    proposer = DSparkProposer(drafter, heads, slots=slots, max_context=96, with_survival=True)
    return Engine(
        serving.decoder, proposer=Recorder(proposer) if record else proposer, slots=slots, max_context=96, rule="block",
        eos_ids=serving.target.eos_token_ids,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recording_changes_nothing_and_does_not_depend_on_the_batch(place, serving, temperature):
    cfg = config(place)
    prompts = load_eval_prompts(cfg, serving.target.tokenizer, max_prompt=64)
    sampling = dataclasses.replace(sampling_of(cfg, temperature), max_new_tokens=14)
    requests = [
        Request(p.id, p.prompt_ids, dataclasses.replace(sampling, seed=i))
        for i, p in enumerate(prompts["code"] + prompts["rewrite"])
    ]
    recording, plain = engine(serving), engine(serving, record=False)
    answers = recording.run(requests)
    assert [c.token_ids for c in answers] == [c.token_ids for c in plain.run(requests)]
    ends = frozenset(serving.target.eos_token_ids)
    cycles = [recording.proposer.observations(r, c, ends) for r, c in zip(requests, answers, strict=True)]
    assert not recording.proposer.seen, "every proposal belongs to a cycle of a completion"
    drafted = [[record for record in c.cycles if record.proposed] for c in answers]
    assert [len(own) for own in cycles] == [len(own) for own in drafted]
    for own, records in zip(cycles, drafted, strict=True):
        for (logits, accepted, observed), record in zip(own, records, strict=True):
            assert len(logits) <= GAMMA and observed <= record.proposed and accepted == min(record.accepted, observed)
    # one row at a time: the same observations
    wide = stage.roll_out(engine(serving), prompts, sampling, seed=5)
    single = stage.roll_out(engine(serving, slots=1), prompts, sampling, seed=5)
    assert len(wide) > 40 and wide.domains == tuple(prompts)
    for name in stage.ARRAYS:
        assert np.allclose(getattr(wide, name), getattr(single, name), atol=1e-4), name


def test_the_engine_warns_under_settings_that_were_not_fitted(place, serving):
    """Where a scheduler reads survivals; once for each setting, and not where nothing reads them."""
    from draftsmith.runtime.schedule import FixedLength, Threshold

    fitted = Calibration(GAMMA, [Entry.identity(Setting(0.0, 0, 1.0, "block"), GAMMA)])
    served = engine(serving, record=False)
    served.proposer.calibration = fitted
    prompt = load_eval_prompts(config(place), serving.target.tokenizer, max_prompt=64)["code"][0].prompt_ids
    hot, greedy = (SamplingParams(temperature=t, max_new_tokens=4) for t in (0.7, 0.0))
    served.scheduler = FixedLength(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served.run([Request("a", prompt, hot)])
        served.scheduler = Threshold(0.1)
        served.run([Request("a", prompt, greedy)])
    with pytest.warns(UserWarning, match="calibrated for T=0, and is used at T=0.7, block rule") as caught:
        served.run([Request("a", prompt, hot), Request("b", prompt, hot), Request("c", prompt, greedy)])
    assert len(caught) == 1


def test_end_tokens_cut_by_the_draft_and_not_by_the_outcome():
    ends = frozenset({2})
    assert observe([5, 6, 7], 3, 1, ends) == (1, 3), "rejected at slot 2: slots 1..3 are known"
    assert observe([5, 6, 7], 2, 2, ends) == (2, 2), "slot 3 lay behind the request's room"
    assert observe([5, 2, 7], 3, 3, ends) == (2, 2), "the accepted end token cuts slot 3"
    assert observe([5, 2, 7], 3, 0, ends) == (0, 2), "and a rejected one leaves it out as well"
    assert observe([5, 6, 2], 2, 1, ends) == (1, 2), "an end token that was not verified does not matter"


def test_stored_rollouts_need_their_fingerprint(tmp_path):
    rng = np.random.default_rng(0)
    obs = stage.Observations(
        rng.normal(size=(5, 3)).astype(np.float32), *(rng.integers(0, 3, 5) for _ in range(4)), domains=("a", "b", "c")
    )
    path = tmp_path / "x.npz"
    assert read_rollouts(path, "k", obs.domains) is None
    write_rollouts(path, "k", obs)
    assert read_rollouts(path, "other", obs.domains) is None
    read = read_rollouts(path, "k", obs.domains)
    assert all(np.array_equal(getattr(read, name), getattr(obs, name)) for name in stage.ARRAYS)


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_builtin_prompts_split_without_a_shared_text():
    found = read_heldout(EvalConfig())
    for domain, own in found.items():
        fitted = calibration_ids(own, 0.4)
        assert abs(len(fitted) - 0.4 * len(own)) <= 3, domain
        assert calibration_ids(own[::-1], 0.4) == fitted, "the order does not matter"
        assert calibration_ids(own, 0.2) < fitted, "a smaller share is a part of a larger one"
    passages = [
        {
            max(p.turns[-1].split("\n"), key=len)
            for p in found["rewrite"]
            if (p.id in calibration_ids(found["rewrite"], 0.4)) is side
        }
        for side in (True, False)
    ]
    assert not passages[0] & passages[1]


def test_measurements_take_evaluation_prompts_first(place, serving):
    for seed in (0, 7):
        cfg = config(place, seed=seed)
        prompts = load_eval_prompts(cfg, serving.target.tokenizer, max_prompt=64)
        split = split_prompts(prompts, cfg)
        for domain in DOMAINS:
            order = [p.id for p in prompts[domain]]
            assert order[:7] == [p.id for p in split.parts["evaluation"][domain]]
            assert order[7:] == [p.id for p in split.parts["fit"][domain]]
    capped = split_prompts(prompts, config(place, seed=7, calibration={"prompts_per_domain": 5}))
    assert capped.counts() == {part: dict.fromkeys(DOMAINS, n) for part, n in (("fit", 2), ("evaluation", 3))}


def test_only_the_share_changes_a_measurement(place):
    environment = {"hardware": "h", "threads": 1, "dtype": "float32", "versions": {}}
    target = TargetConfig(name=str(place / "target"))
    keys = [
        fingerprint(target, place / "drafter", config(place, calibration=changes), environment, None)
        for changes in ({}, {"slots": 9, "folds": 3}, {"share": 0.2})
    ]
    assert keys[0] == keys[1] != keys[2]


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_before_a_model_loads(place, tmp_path):
    target = chat_target()
    make_drafter(target, tmp_path / "headless", survival_head=False)
    nowhere = TargetConfig(name=str(tmp_path / "no-target"))
    with pytest.raises(ValueError, match=r"drafter.survival_head: False leaves nothing to calibrate"):
        calibrate(nowhere, tmp_path / "headless", config(place), tmp_path)
    with pytest.raises(ValueError, match=r"eval.domains: got 'poetry'"):
        calibrate(nowhere, place / "drafter", config(place, domains=("poetry",)), tmp_path)
    assert not (tmp_path / "calibration").exists()


def test_too_few_prompts_for_two_parts(place, serving, tmp_path):
    rows = [{"id": f"c{i}", "domain": "code", "turns": [f"hi w{i}"]} for i in range(3)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = dataclasses.replace(config(place), prompts=str(tmp_path / "few.jsonl"))
    prompts = load_eval_prompts(cfg, serving.target.tokenizer, max_prompt=64)
    with pytest.raises(
        ValueError, match=r"eval.calibration.share: 0.4 leaves 1 of 3 prompts of domain 'code' for the fit part"
    ):
        split_prompts(prompts, cfg)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"kinds": ()}, "eval.calibration.kinds: got an empty list"),
        ({"kinds": ("sts", "sts")}, "eval.calibration.kinds: got"),
        ({"temperatures": (1.0, 1.0)}, "eval.calibration.temperatures: got"),
        ({"share": 1.0}, "eval.calibration.share: got 1.0"),
    ],
)
def test_settings_are_checked(changes, expected):
    with pytest.raises(ValueError, match=expected):
        CalibrateConfig(**changes)


def test_command_line_from_a_run_to_an_export_that_keeps_the_calibration(place, tmp_path, capsys):
    output = tmp_path / "out"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output: {output}\ntarget: {{name: {place / 'target'}, dtype: float32}}\ndata: {{max_length: 128}}\n"
        f"eval: {{prompts: {place / 'prompts.jsonl'}, temperatures: [0.0], domains: [code],\n"
        "  calibration: {max_new_tokens: 8, slots: 4, folds: 2, kinds: [none, platt]}}\n"
    )

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([*map(str, arguments)])
        return caught.value.code, capsys.readouterr()

    code, (_, err) = call("calibrate", recipe)
    assert code == 2 and "holds no run of this recipe yet; train it first" in err
    pipeline.claim_folder(output, to_plain(load_recipe(str(recipe)).value))
    make_drafter(chat_target(), output / "drafter")
    (output / "drafter" / "draftsmith.json").write_text("{}")
    code, (out, _) = call("calibrate", recipe, "--device", "cpu")
    assert code == 0 and "goal" in out and (output / "calibration" / "report.html").is_file()
    code, (out, _) = call("export", recipe, "--dtype", "float32")
    assert code == 0
    assert Calibration.load(output / "export-float32").entries == Calibration.load(output / "drafter").entries
    code, (_, err) = call("calibrate", recipe, "eval.calibration.kinds=[magic]", "eval.calibration.share=1.5")
    assert code == 2 and "eval.calibration.kinds: ['magic'] is not allowed" in err
    assert "eval.calibration.share: 1.5 is not allowed" in err and len(err.splitlines()) == 2
