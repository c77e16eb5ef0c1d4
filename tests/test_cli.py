"""The console script: every mistake is one line on stderr, exit code 2, before torch is imported or a folder is made."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from draftsmith.cli import app as cli
from draftsmith.cli import generate, pipeline
from draftsmith.recipes.load import ConfigError
from draftsmith.runtime.config import SamplingParams

PROBE = """
import sys
from draftsmith.cli.app import main
try:
    main(sys.argv[1:])
finally:
    print("torch" if "torch" in sys.modules else "light")
"""


def call(arguments, capsys):
    """(exit code, stdout, lines of stderr) of the console script, in this process."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err.splitlines()


@pytest.fixture
def recipe(tmp_path):
    """A recipe whose prompts are files in tmp_path."""
    lines = [json.dumps({"id": f"p{i}", "domain": "math", "turns": [f"What is {i} plus {i}?"]}) for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:2]) + "\n")
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines[2:]) + "\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output: {tmp_path / 'out'}\n"
        f"data: {{prompts: {tmp_path / 'train.jsonl'}}}\n"
        f"eval: {{prompts: {tmp_path / 'heldout.jsonl'}}}\n"
    )
    return path


def test_help_lists_the_commands(capsys):
    code, out, err = call(["--help"], capsys)
    assert code == 0 and not err
    for name in ("run", "data", "train", "export", "generate", "bench", "report"):
        assert f" {name} " in out


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["generate", "--help"], ["--version"]])
def test_help_loads_no_torch(arguments):
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "light", done.stderr


@pytest.mark.parametrize(
    "override, expected",
    [
        ("drafter.blok_size=3", "drafter.blok_size: unknown key; did you mean drafter.block_size?"),
        ("train.steps=many", "train.steps: 'many' is not allowed; it must be an integer at least 1"),
        ("drafter.mask_token_id=2", "drafter.mask_token_id: 2 is not allowed; it ends an answer"),
        (
            "drafter.tap_layers=[1, 30]",
            "drafter.tap_layers: [1, 30] is not allowed; it must be ascending layer ids from 0 to 28",
        ),
        ("target.revision=main", "target.revision: 'main', but 'smollm2-135m-instruct' is no Hub id"),
    ],
)
def test_bad_recipe_is_one_line_before_torch(recipe, tmp_path, override, expected):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "train", str(recipe), override], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout.split() == ["light"]
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {expected}")
    assert not (tmp_path / "out").exists(), "a refused recipe claims no folder"


def test_several_mistakes_are_several_lines(recipe, capsys):
    code, _, err = call(["run", recipe, "train.lr=0", "drafter.kind=x", "nonsense=1"], capsys)
    assert code == 2 and len(err) == 3 and all(line.startswith("error: ") for line in err)


def test_missing_recipe(capsys):
    code, _, err = call(["run", "nowhere.yaml"], capsys)
    assert code == 2 and len(err) == 1 and "no such recipe file" in err[0]


def test_broken_prompt_line_is_named(recipe, tmp_path, capsys):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"turns": [\n')
    code, _, err = call(["train", recipe], capsys)
    assert code == 2 and len(err) == 1 and "train.jsonl:3" in err[0]
    assert not (tmp_path / "out").exists()


def test_empty_prompt_set(recipe, tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("")
    code, _, err = call(["data", "regenerate", recipe], capsys)
    assert code == 2 and len(err) == 1 and "train.jsonl" in err[0]


def test_heldout_prompts_are_not_trained_on(recipe, tmp_path, capsys):
    code, _, err = call(["train", recipe, f"eval.prompts={tmp_path / 'train.jsonl'}"], capsys)
    assert code == 2 and len(err) == 1 and "held-out" in err[0]


@pytest.mark.target
def test_every_row_truncated_away(recipe, tmp_path, capsys, smollm2):
    code, _, err = call(["train", recipe, "data.max_length=12"], capsys)
    assert code == 2 and len(err) == 1
    assert err[0].startswith("error: data.max_length: 12 is not allowed; the shortest prompt has ")
    assert not (tmp_path / "out").exists()


def test_folder_of_another_recipe(tmp_path):
    folder = tmp_path / "out"
    first = {"output": str(folder), "train": {"lr": 1, "steps": 2}, "eval": {"repeats": 1}}
    assert pipeline.check_folder(folder, first), "a folder that is not there is free"
    pipeline.claim_folder(folder, first)
    assert pipeline.check_folder(folder, {**first, "train": {"lr": 2, "steps": 2}}), "claimed, but nothing made yet"
    (folder / "train.jsonl").write_text("")
    assert not pipeline.check_folder(folder, first)
    assert not pipeline.check_folder(folder, {**first, "eval": {"repeats": 9}}), "another measurement may follow"
    with pytest.raises(ConfigError, match=r"belongs to another recipe \(train.lr: 1.0 -> 2.0\)"):
        pipeline.check_folder(folder, {**first, "train": {"lr": 2, "steps": 2}})


def test_a_lock_older_than_a_setting_stays_valid(tmp_path):
    folder = tmp_path / "out"
    plain = pipeline.to_plain(pipeline.from_plain({"output": str(folder)}))
    older = {**plain, "train": {key: value for key, value in plain["train"].items() if key != "clip"}}
    pipeline.claim_folder(folder, older)
    (folder / "train.jsonl").write_text("")
    assert not pipeline.check_folder(folder, plain), "the missing setting counts as its default"
    other = {**plain, "train": {**plain["train"], "clip": 0.5}}
    with pytest.raises(ConfigError, match="train.clip: 1.0 -> 0.5"):
        pipeline.check_folder(folder, other)
    watched = {**plain, "train": {**plain["train"], "tracker": "wandb"}}
    assert not pipeline.check_folder(folder, watched), "how a run is watched changes nothing of it"


def test_foreign_folder_is_refused(recipe, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    code, _, err = call(["train", recipe], capsys)
    assert code == 2 and len(err) == 1 and "was not made by a recipe" in err[0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("command", ["bench", "report", "export"])
def test_commands_after_training_need_a_run(recipe, tmp_path, capsys, command):
    code, _, err = call([command, recipe], capsys)
    assert code == 2 and len(err) == 1 and "holds no run of this recipe yet" in err[0]
    assert not (tmp_path / "out").exists()


def test_device_is_checked(capsys):
    with pytest.raises(ValueError, match="must be auto, cpu or cuda"):
        pipeline.pick_device("tpu")
    assert pipeline.pick_device("cpu") == "cpu"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--temperature", "-1"], "--temperature:"),
        (["--top-p", "0"], "--top-p:"),
        (["--max-new-tokens", "0"], "--max-new-tokens:"),
        (["--prompt", "hello"], "no exported drafter here"),
    ],
)
def test_generate_refuses(tmp_path, capsys, monkeypatch, arguments, expected):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "hello"))
    code, _, err = call(["generate", tmp_path, *arguments], capsys)
    assert code == 2 and len(err) == 1 and expected in err[0]


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_DEBUG", "1")
    with pytest.raises(ConfigError):
        cli.main(["run", "nowhere.yaml"])


def test_origins_of_tokens():
    def record(proposed, accepted, committed):
        return SimpleNamespace(proposed=proposed, accepted=accepted, committed=committed)

    drafted, corrected, bonus = generate.DRAFTED, generate.CORRECTED, generate.BONUS
    assert generate.origins([5], None) == [generate.PLAIN]
    assert generate.origins([5], record(0, 0, 1)) == [generate.PLAIN]
    assert generate.origins([5, 6, 7], record(4, 2, 3)) == [drafted, drafted, corrected]
    assert generate.origins([5], record(4, 0, 1)) == [corrected]
    assert generate.origins([5, 6, 7], record(2, 2, 3)) == [drafted, drafted, bonus]
    assert generate.origins([5, 2], record(4, 3, 2)) == [drafted, drafted], "an end token inside the block cuts the rest"


def test_stream_waits_for_whole_characters():
    pieces = []
    raw = [b"a", *[bytes([byte]) for byte in "é€".encode()], b"b"]
    stream = generate.TextStream(
        lambda tokens: b"".join(raw[token] for token in tokens).decode(errors="replace"), lambda text, _: pieces.append(text)
    )
    for token in range(len(raw)):
        stream.add(token, generate.PLAIN)
    stream.finish()
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "b"]


def test_sampling_settings_pass_through():
    assert generate.settings(temperature=0.5, top_k=3, seed=7) == SamplingParams(temperature=0.5, top_k=3, seed=7)


@pytest.mark.slow
@pytest.mark.target
def test_smoke_recipe_end_to_end_and_again(tmp_path):
    command = [sys.executable, "-m", "draftsmith.cli.app", "run", "smoke", f"output={tmp_path / 'out'}", "--device", "cpu"]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["schema"] == 1 and report["lossless"]["greedy_mismatches"] == 0
    chat = json.loads((tmp_path / "out" / "drafter" / "draftsmith.json").read_text())["chat"]
    assert chat["template_args"] == {} and chat["eos_ids"] == [2] and len(chat["template"]) == len(chat["tokenizer"]) == 64
    drafter = (tmp_path / "out" / "drafter" / "model.safetensors").stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "is valid, reused" in again.stdout
    assert (tmp_path / "out" / "drafter" / "model.safetensors").stat().st_mtime_ns == drafter
