"""`draftsmith bench --server` over loopback against our own servers, and the engines' /metrics as they print them."""

import io
import json

import pytest
import torch
from http_serving import FaultyProxy, tiny_engine, tiny_server
from rich.console import Console
from test_cli import call
from tiny_chat import chat_target

from draftsmith.eval import server_metrics as metrics
from draftsmith.eval.config import EvalConfig, GridConfig
from draftsmith.eval.plan_report import plan_cells, read_measurements
from draftsmith.eval.report import read_report
from draftsmith.eval.server_bench import run_server_bench
from draftsmith.models.config import DSparkConfig, TargetConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.engine import Engine, Request

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a\\"b"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a\\"b"} 20.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} 360.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 30.0
vllm:generation_tokens_total{engine="0"} 214.0
vllm:request_success_total{finished_reason="stop"} 1.0
vllm:request_success_total{finished_reason="length"} 3.0
no sample
"""
SGLANG = """sglang:generation_tokens_total{model_name="m"} 105.0
sglang:num_requests_total{model_name="m"} 5.0
sglang:spec_verify_calls_total{model_name="m"} 40.0
sglang:spec_accept_length{model_name="m"} 3.25
"""
GAMMA = 3


def test_vllm_counters_become_tau_and_acceptance():
    counted = metrics.difference(metrics.read(VLLM), metrics.Snapshot("vllm"))
    assert counted["drafts"] == 120 and counted["requests"] == 4 and counted["generation_tokens"] == 214
    assert counted["accepted_per_position"] == [60, 30, 0]
    found = metrics.figures(counted)
    assert found["tau"] == pytest.approx(1 + 90 / 120) and found["draft_length_mean"] == 3.0 and found["cycles"] == 120
    assert found["acceptance_per_slot"] == [0.5, 0.5, 0.0] and found["reached_per_slot"] == [120, 60, 30]
    rare = metrics.figures(counted | {"generation_tokens": 4 + 90 + 360})  # 240 further steps that held no draft
    assert rare["cycles"] == 360 and rare["tau"] == 1.25 and rare["tau_drafted"] == 1.75 and rare["draft_length_mean"] == 1.0
    later = metrics.read(VLLM.replace(" 100.0", " 110.0").replace(' position="0"} 60.0', ' position="0"} 60.0'))
    assert metrics.difference(later, metrics.read(VLLM))["drafts"] == 10
    both = metrics.add([counted, metrics.difference(later, metrics.read(VLLM))])
    assert both["drafts"] == 130 and both["accepted_per_position"] == [60, 30, 0]


def test_a_server_started_anew_is_noticed():
    with pytest.raises(RuntimeError, match="drafts went from 120 to 0: it was started anew"):
        metrics.difference(metrics.Snapshot("vllm", drafts=0.0), metrics.read(VLLM))


def test_sglang_counts_verifications_or_shows_a_gauge():
    counted = metrics.difference(metrics.read(SGLANG), metrics.Snapshot("sglang"))
    found = metrics.figures(counted)
    assert found["tau"] == pytest.approx((105 - 5) / 40) and found["tau_source"] == "counters"
    assert found["acceptance_per_slot"] == [] and found["draft_length_mean"] is None
    older = "\n".join(line for line in SGLANG.splitlines() if "verify_calls" not in line)
    found = metrics.figures(metrics.difference(metrics.read(older), metrics.read(older)))
    assert found["tau"] == 3.25 and found["tau_source"] == "gauge"


def test_other_metrics_say_nothing():
    found = metrics.figures(metrics.difference(metrics.read("python_info 1.0\n"), metrics.read("")))
    assert found["tau"] is None and found["acceptance_per_slot"] == [] and found["cycles"] is None


# ---- over loopback ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the tiny target and a prompt file of two domains."""
    folder = tmp_path_factory.mktemp("server-bench")
    target = chat_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    rows = [
        {"id": f"{domain}-{i}", "domain": domain, "turns": [f"hi w{i} w{(7 * i + len(domain)) % 40} ok"]}
        for domain in ("code", "rewrite") for i in range(8)
    ]  # fmt: skip
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def speculative_engine(target, slots=4, max_context=128):
    cfg = DSparkConfig(num_layers=1, block_size=GAMMA, rank=4, tap_layers=(0,), num_taps=1)
    torch.manual_seed(1)
    drafter = DSpark(native.build_config(target.config, cfg, mask_token_id=0, target_name="tiny"))
    heads = FrozenHeads.build(target.embedding_weight, target.lm_head_weight, None)
    decoder = Decoder.from_target(target.model, dtype=torch.float32, backend="torch", tap_layers=(0,))
    proposer = DSparkProposer(drafter, heads, slots=slots, max_context=max_context)
    return Engine(
        decoder, proposer=proposer, slots=slots, max_context=max_context, eos_ids=target.eos_token_ids,
        tokenizer=target.tokenizer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def servers():
    """(plain, speculative)."""
    target = chat_target()
    with tiny_server(target) as plain, tiny_server(target, engine=speculative_engine(target)) as fast:
        yield plain, fast


def bench(place, output, *, grid=None, server_plain=None, ours=None, server, **changes):
    stream = io.StringIO()
    cfg = EvalConfig(
        **({"prompts": str(place / "prompts.jsonl"), "prompts_per_domain": 4, "max_new_tokens": 12} | changes),
        grid=grid or GridConfig(),
    )  # fmt: skip
    run_server_bench(
        TargetConfig(name=str(place / "target"), dtype="float32"), cfg, output, server=server, server_plain=server_plain,
        grid=grid is not None, ours=ours, timeout=20.0, recipe={"seed": 0}, console=Console(file=stream, width=200),
    )  # fmt: skip
    return read_report(output / "report.json"), stream.getvalue()


def test_two_servers_give_a_whole_report(place, servers, tmp_path):
    plain, fast = servers
    report, text = bench(place, tmp_path, server=fast.url, server_plain=plain.url)
    points = {(c["domain"], c["temperature"]) for c in report["cells"]}
    assert points == {(d, t) for d in ("code", "rewrite") for t in (0.0, 1.0)}
    for cell in report["cells"]:
        low, high = cell["speedup_interval"]
        assert 0 < low <= cell["speedup"] <= high and cell["units"] == 4 and cell["context"] > 3
        rates = cell["speculative_tokens_per_second"] / cell["plain_tokens_per_second"]
        assert rates == pytest.approx(cell["speedup"]) and cell["speculative_first_token_s"] > 0
        counted = cell["engine_counters"]
        assert cell["tau_drafted"] == pytest.approx(1 + counted["accepted_tokens"] / counted["drafts"])
        assert 1.0 <= cell["tau"] <= cell["tau_drafted"]
        assert 1.0 <= cell["tau"] <= GAMMA + 1 and len(cell["acceptance_per_slot"]) == GAMMA
        assert cell["speculative_foreign_tokens"] == 0 and cell["plain_foreign_tokens"] == 0
        assert cell["decode_speedup"] > 0 and cell["time_split"] is None and cell["predicted_speedup"] is None
    assert report["lossless"]["greedy_prompts"] == 8 and report["lossless"]["greedy_mismatches"] == 0
    assert report["servers"]["speculative"]["engine"] == "vllm" and report["warnings"] == []
    assert len(report["summary"]) == 2 and "differ in 0 of 8" in text
    html = (tmp_path / "report.html").read_text()
    assert "data:image/svg+xml" in html and "http" not in html.split("</style>")[1].replace("http-equiv", "")
    rows = plan_cells(read_measurements(tmp_path)["report"])
    assert len(rows) == 4 and all(row["missing"] == "costs" and row["tau"] for row in rows)


def test_counts_are_those_of_the_engine(place, servers, tmp_path):
    """The greedy cell's drafts and acceptance equal what the same engine does without a server."""
    report, _ = bench(place, tmp_path, server=servers[1].url, temperatures=(0.0,), domains=("code",))
    (cell,) = report["cells"]
    kept = json.loads((tmp_path / "records.json").read_text())[0]["records"]
    target = chat_target()
    engine = speculative_engine(target)
    drafts, steps, beyond, accepted = 0, 0, 0, [0] * GAMMA
    prompts = {f"code-{i}": f"user hi w{i} w{(7 * i + 4) % 40} ok </s> assistant" for i in range(8)}
    for record in kept:
        (name,) = record["ids"]
        ids = target.tokenizer(prompts[name])["input_ids"]
        (done,) = engine.run([Request(name, ids, SamplingParams(max_new_tokens=12))])
        assert done.token_ids == record["speculative"]["token_ids"][0]
        for cycle in done.cycles:
            drafts += cycle.proposed > 0
            steps += 1
            beyond += cycle.accepted + 1 - cycle.committed  # behind an end token
            for k in range(cycle.accepted):
                accepted[k] += 1
    assert cell["engine_counters"]["drafts"] == drafts > 8
    assert cell["cycles"] == max(drafts, steps - beyond)
    assert cell["engine_counters"]["accepted_per_position"] == accepted
    assert cell["reached_per_slot"] == [drafts, *accepted[:-1]]


def test_one_server_gives_rates_and_no_speedup(place, servers, tmp_path):
    report, _ = bench(place, tmp_path, server=servers[0].url, domains=("code",))
    assert all(cell["speedup"] is None and cell["speculative_tokens_per_second"] > 0 for cell in report["cells"])
    assert report["summary"] == [] and report["lossless"]["greedy_prompts"] == 0
    assert report["warnings"] == ["the engine counted no drafts: it serves without speculation"]


def test_the_grid_holds_the_load_and_shows_ours_beside(place, servers, tmp_path):
    plain, fast = servers
    grid = GridConfig(concurrency=(1, 2), contexts=(0, 40), temperatures=(0.0,), tokens=48, prompts=2)
    ours = {"domain": "mixed", "temperature": 0.0, "concurrency": 2, "context_setting": 40, "speedup": 1.5, "tau": 2.25}
    (tmp_path / "grid.json").write_text(json.dumps({"kind": "grid", "cells": [ours]}))
    report, text = bench(
        place, tmp_path / "server", grid=grid, server=fast.url, server_plain=plain.url, ours=tmp_path
    )  # fmt: skip
    assert [(c["context_setting"], c["concurrency"]) for c in report["cells"]] == [(0, 1), (0, 2), (40, 1), (40, 2)]
    assert [cell["ours"] is not None for cell in report["cells"]] == [False, False, False, True]
    assert report["cells"][3]["ours"]["tau"] == 2.25 and "ours:" in text and "1.50" in text
    assert report["cells"][2]["context"] == pytest.approx(40, abs=3)
    kept = json.loads((tmp_path / "server" / "records.json").read_text())
    for cell in kept:
        runs = [record[side] for record in cell["records"] for side in ("plain", "speculative")]
        assert len(runs) >= 6 and {n for run in runs for n in run["tokens"]} == {24}
        assert {reason for run in runs for reason in run["finish_reasons"]} == {"length"}
        assert {record["first"] for record in cell["records"]} == {"plain", "speculative"}
    html = (tmp_path / "server" / "report.html").read_text()
    assert "Heat map of the speedup" in html and "ours: tau" in html and "grid.json" in html


def test_a_server_without_metrics_is_measured_and_says_so(place, servers, tmp_path):
    class Bare(FaultyProxy):
        def forward(self, method, path, body):
            return (404, b"nothing", {}) if path == "/metrics" else super().forward(method, path, body)

    with Bare(servers[1].url, lambda number, body: None) as proxy:
        report, text = bench(place, tmp_path, server=proxy.url, temperatures=(0.0,), domains=("code",))
    (cell,) = report["cells"]
    assert cell["tau"] is None and cell["speculative_tokens_per_second"] > 0 and cell["acceptance_per_slot"] == []
    assert "no metrics" in report["warnings"][0] and "404" in text


def test_repeated_requests_are_reported(place, servers, tmp_path):
    with FaultyProxy(servers[1].url, lambda number, body: "429" if number == 3 else None) as proxy:
        report, _ = bench(place, tmp_path, server=proxy.url, temperatures=(0.0,), domains=("code",))
    assert report["warnings"] == ["speculative: 1 requests were repeated after a failure; their times hold the waiting"]


def test_another_target_behind_the_url_is_noticed(place, servers, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "target")
    words = list(tokenizer.get_vocab())
    other = tmp_path / "other"
    chat_target().model.save_pretrained(other)
    data = json.loads((place / "target" / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    data["model"]["vocab"] = {word: (i if i < 5 else 5 + (i + 7) % (len(words) - 5)) for word, i in vocabulary.items()}
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(data))
    cfg = EvalConfig(
        prompts=str(place / "prompts.jsonl"), prompts_per_domain=4, max_new_tokens=6, temperatures=(0.0,), domains=("code",)
    )  # fmt: skip
    run_server_bench(
        TargetConfig(name=str(other), dtype="float32"), cfg, tmp_path / "out", server=servers[0].url,
        console=Console(file=io.StringIO()),
    )  # fmt: skip
    assert "no texts of the recipe's tokenizer" in read_report(tmp_path / "out" / "report.json")["warnings"][-1]


def test_contexts_beyond_the_server_are_refused(place, servers, tmp_path):
    with pytest.raises(ValueError, match=r"eval.contexts: got 120, allowed: at most 115 \(the server has 128 positions, 13 of"):
        bench(place, tmp_path, server=servers[0].url, contexts=(120,))


@pytest.fixture
def recipe(place, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output: {tmp_path / 'out'}\ntarget: {{name: {place / 'target'}, dtype: float32}}\n"
        f"drafter: {{num_layers: 1, block_size: 3, tap_layers: [0], rank: 4}}\ndata: {{max_length: 64}}\n"
        f"eval: {{prompts: {place / 'prompts.jsonl'}, prompts_per_domain: 2, max_new_tokens: 6, temperatures: [0.0]}}\n"
    )
    return path


def test_the_command_writes_where_it_is_told(recipe, servers, tmp_path, capsys):
    from draftsmith.cli import app

    app.app(
        ["bench", str(recipe), "--server", servers[1].url, "--server-plain", servers[0].url, "--to", str(tmp_path / "to")],
        standalone_mode=False,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "plain: tiny at" in out and (tmp_path / "to" / "report.html").is_file()
    assert not (tmp_path / "out").exists()  # another command's folder


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--server-plain", "http://127.0.0.1:9"], "--server-plain: needs --server"),
        (["--server", "http://127.0.0.1:9", "--timeout", "0"], "--timeout: 0 is not allowed"),
        (["--server", "http://127.0.0.1:9"], "--to: not given, and there is no run"),
        (["--server", "nowhere", "--to", "x"], "server: 'nowhere' is not allowed"),
    ],
)
def test_mistakes_are_one_line(recipe, tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(["bench", recipe, *arguments], capsys)
    assert code == 2 and len(err) == 1 and expected in err[0]


def test_the_plain_engine_has_the_same_settings():
    """tiny_server and speculative_engine must differ in the proposer alone, or the comparison above compares nothing."""
    plain, fast = tiny_engine(), speculative_engine(chat_target())
    assert (plain.slots, plain.max_context, plain.eos_ids) == (fast.slots, fast.max_context, fast.eos_ids)
