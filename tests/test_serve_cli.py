"""`draftsmith serve` as a process, and `draftsmith data regenerate --server` against it; mistakes before anything loads."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from http_serving import call
from test_cli import call as cli_call
from tiny_chat import chat_target

from draftsmith.models.config import DSparkConfig
from draftsmith.models.draft import FrozenHeads
from draftsmith.models.dspark import DSpark
from draftsmith.models.export import native


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target in Hugging Face's layout."""
    path = tmp_path_factory.mktemp("target")
    target = chat_target()
    target.model.config.max_position_embeddings = 1024  # the cost table is measured with some room
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def drafter(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    model = chat_target().model
    cfg = DSparkConfig(num_layers=1, block_size=3, tap_layers=(0,), rank=4)
    config = native.build_config(model.config, cfg, mask_token_id=0, target_name=str(folder))
    torch.manual_seed(0)
    heads = FrozenHeads.build(model.get_input_embeddings().weight, model.lm_head.weight, None)
    native.save(path, DSpark(config), heads, dtype=torch.float32, extra={})
    return path


class Served:
    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftsmith.cli.app", "serve", *map(str, arguments), "--port", "0", "--dtype", "float32"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __enter__(self):
        self.line = self.process.stdout.readline()
        assert self.line.startswith("serving "), self.process.communicate(timeout=20)
        self.url = next(word for word in self.line.split() if word.startswith("http")).removesuffix("/v1")
        return self

    def __exit__(self, *exception):
        self.process.send_signal(signal.SIGTERM)
        self.out, self.err = self.process.communicate(timeout=30)
        self.process.wait(1)


def recipe(path, folder, output):
    for name, words in (("train", range(20)), ("heldout", range(20, 26))):
        rows = [{"id": f"{name}{i}", "domain": "chat", "turns": [f"w{i} hi w{2 * i % 39}"]} for i in words]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = path / f"{output}.yaml"
    file.write_text(
        f"output: {path / output}\n"
        f"target: {{name: {folder}, dtype: float32}}\n"
        f"data: {{prompts: {path / 'train.jsonl'}, max_length: 64, generation: {{max_new_tokens: 16, seed: 2}}, "
        "doctor: {max_loop_share: 1.0}}\n"
        f"eval: {{prompts: {path / 'heldout.jsonl'}}}\n"
        "drafter: {num_layers: 1, block_size: 3, tap_layers: [0], rank: 4}\n"
    )
    return file


def rows(path):
    lines = (path / "answers" / "answers.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda row: row["index"])


def test_regenerate_through_the_command_equals_the_runtime(folder, drafter, tmp_path, capsys):
    cli_call(["data", "regenerate", recipe(tmp_path, folder, "ours")], capsys)
    with Served("--target", folder, "--model-name", "tiny", "--slots", "4") as server:
        assert "plain, 4 slots" in server.line
        code, out, err = cli_call(["data", "regenerate", recipe(tmp_path, folder, "served"), "--server", server.url], capsys)
        assert code == 0, err
    assert server.process.returncode == 0 and server.err == "" and "stopping" in server.out
    assert rows(tmp_path / "served") == rows(tmp_path / "ours")
    manifest = json.loads((tmp_path / "served" / "answers" / "manifest.json").read_text())
    assert manifest["answered_by"] == {"by": "server", "model": "tiny"}
    assert "20 generated" in out


def test_regenerate_with_a_drafter_gives_the_greedy_rows(folder, drafter, tmp_path, capsys):
    greedy = ["data.generation.temperature=0", "data.generation.batch_size=2"]
    cli_call(["data", "regenerate", recipe(tmp_path, folder, "ours"), *greedy], capsys)
    code, out, err = cli_call(
        ["data", "regenerate", recipe(tmp_path, folder, "drafted"), *greedy, "--with-drafter", drafter], capsys
    )
    assert code == 0, err
    assert rows(tmp_path / "drafted") == rows(tmp_path / "ours")
    assert (tmp_path / "drafted" / "costs.regenerate.json").is_file() and "costs: " in out


def test_serve_with_a_drafter_drafts(folder, drafter):
    with Served(drafter, "--slots", "2") as server:
        assert "drafts of up to 3, 2 slots" in server.line and f"serving {folder}" in server.line
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        assert call(server.url, "/v1/chat/completions", body)[0] == 200
        assert 'spec_decode_num_drafts_total{engine="0"' in call(server.url, "/metrics")[1]
    assert server.process.returncode == 0 and "no costs.json" in server.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve"], "--target"),
        (["serve", "--target", "x", "--dtype", "int8"], "--dtype"),
        (["serve", "--target", "x", "--slots", "0"], "--slots"),
        (["serve", "--target", "x", "--port", "70000"], "--port"),
        (["serve", "/nowhere"], "/nowhere"),
        (["serve", "--target", "x", "--proposer", "magic"], "proposer"),
        (["data", "regenerate", "smollm2-135m", "--model", "x"], "--model: needs --server"),
        (["data", "regenerate", "smollm2-135m", "--server", "localhost"], "server: 'localhost'"),
        (["data", "regenerate", "smollm2-135m", "--server", "http://h:1", "--concurrency", "0"], "concurrency: 0"),
        (["data", "regenerate", "smollm2-135m", "--server", "http://h:1", "--with-drafter", "d"], "--with-drafter"),
    ],
)
def test_mistakes_are_one_line(arguments, named, capsys):
    code, _, err = cli_call(arguments, capsys)
    assert code == 2 and len(err) == 1 and named in err[0]


def test_help_of_the_commands(capsys):
    for command, option in ((["serve"], "--slots"), (["data", "regenerate"], "--with-drafter")):
        code, out, _ = cli_call([*command, "--help"], capsys)
        assert code == 0 and option in out
