"""Features online, hybrid and cached: equal losses, budgets with evictions, a full disk; what a recipe's data takes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import log_of, parts_of, rows_of, setup_of, tiny_target, train

from draftsmith.cli.app import main
from draftsmith.cli.plan_data import make
from draftsmith.data.batch import collate
from draftsmith.data.features import estimate_bytes
from draftsmith.losses.reduce import denominators
from draftsmith.recipes.schema import load_recipe
from draftsmith.train import checkpoint, feature_cache, features
from draftsmith.train.features import Schedule
from draftsmith.train.metrics import Clock
from draftsmith.train.step import StepContext

KIB = 1 / 2**20  # in GiB


def losses(folder: Path) -> list[float]:
    return [line["loss/total"] for line in log_of(folder)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduced", [None, 40])
@pytest.mark.parametrize("mode", ["hybrid", "cached"])
def test_offline_and_online_give_equal_losses_on_one_batch(tmp_path, mode, reduced, packed):
    rows, found = rows_of(6), {}
    for name in ("online", mode):
        parts = parts_of(data=dict(features=name), drafter=dict(draft_vocab_size=reduced))
        setup = setup_of(parts, rows, tmp_path / name)
        torch.nn.init.normal_(setup.drafter.markov_head.markov_w2.weight, generator=torch.Generator().manual_seed(1))
        context = StepContext(parts.train, parts.objective, setup, setup.heads, torch.device("cpu"))
        chosen = [rows[i] for i in (4, 0, 3)]
        batch = collate(chosen, None, 4, torch.Generator().manual_seed(0), anchor_share=0.5, packed=packed)
        totals = denominators(parts.objective, batch.valid.flatten(0, 1))
        first, _ = context.loss(setup.drafter, batch, chosen, totals, Clock())
        again, _ = context.loss(setup.drafter, batch, chosen, totals, Clock())  # hybrid: now from the store
        found[name] = [float(first.detach()), float(again.detach())]
        if name != "online":
            assert setup.source.store.stats.hits == (6 if name == "cached" else 3)
    assert found[mode] == pytest.approx(found["online"], rel=1e-5)


def test_hybrid_fills_in_the_first_epoch_and_reads_in_the_next(tmp_path):
    rows = rows_of(8)
    runs = {}
    for mode in ("online", "hybrid"):
        parts = parts_of(data=dict(features=mode), train=dict(steps=12))  # 3 epochs of 4 micro-batches
        setup = runs[mode] = setup_of(parts, rows, tmp_path / mode)
        train(parts, setup, tmp_path / mode)
    stats = runs["hybrid"].source.store.stats
    assert (stats.misses, stats.hits, stats.evicted) == (8, 16, 0)
    assert losses(tmp_path / "hybrid") == pytest.approx(losses(tmp_path / "online"), rel=1e-5)


def test_a_run_whose_cache_hits_its_budget_goes_on_with_evictions_and_equal_losses(tmp_path):
    rows = rows_of(24)
    parts = {
        mode: parts_of(data=dict(features=mode, cache_gib=None if mode == "online" else 80 * KIB), train=dict(steps=36))
        for mode in ("online", "hybrid", "cached")
    }
    stats = {}
    for mode, part in parts.items():
        setup = setup_of(part, rows, tmp_path / mode)
        train(part, setup, tmp_path / mode)
        if mode != "online":
            stats[mode] = setup.source.store.stats
            held = sum(path.stat().st_size for path in (tmp_path / mode / "features").glob("*.safetensors"))
            assert 0 < held <= 80 * 1024 < estimate_bytes(rows, setup.source.store.manifest)
            assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "online"), rel=1e-5)
    assert stats["hybrid"].evicted > 0 and stats["hybrid"].hits > 0 and stats["hybrid"].misses > 24
    assert stats["cached"].hits > 0


def test_a_resumed_hybrid_run_finds_what_it_had(tmp_path):
    rows = rows_of(8)
    first = parts_of(data=dict(features="hybrid"), train=dict(steps=12))
    train(first, setup_of(first, rows, tmp_path / "a"), tmp_path / "a")
    setup = setup_of(first, rows, tmp_path / "a")
    assert sum(i in setup.source.store for i in range(8)) == 8
    setup.source.begin(8)
    assert setup.source.schedule.position == pytest.approx(2.0)


def test_the_run_says_where_states_come_from_may_change(tmp_path):
    rows = rows_of(6)
    parts = parts_of(data=dict(features="hybrid"), train=dict(steps=2, checkpoint_every=1))
    train(parts, setup_of(parts, rows, tmp_path), tmp_path)
    from training import PROMPTS, stage

    assert stage.is_trained(tmp_path, parts_of(data=dict(features="online"), train=dict(steps=2, checkpoint_every=1)), PROMPTS)
    assert not stage.is_trained(
        tmp_path, parts_of(data=dict(features="online", max_length=99), train=dict(steps=2, checkpoint_every=1)), PROMPTS
    )


def test_what_another_setting_made_is_refused_by_name(tmp_path):
    rows = rows_of(4)
    setup_of(parts_of(data=dict(features="cached")), rows, tmp_path)
    for changed, field in (
        (dict(data=dict(features="cached", max_length=99)), "max_length"),
        (dict(data=dict(features="cached", cache_storage="int8")), "storage"),
        (dict(data=dict(features="cached"), drafter=dict(tap_layers=(0,))), "tap_layers"),
        (dict(data=dict(features="cached"), drafter=dict(draft_vocab_size=40)), "lse"),
    ):
        with pytest.raises(ValueError, match=rf"features were made under other settings \({field}: "):
            setup_of(parts_of(**changed), rows, tmp_path)


# ---- what is still needed -------------------------------------------------------------------------------------------


def test_reads_to_come():
    schedule = Schedule(total=3.5, step=0.25, evaluations=4, position=1.25)
    assert schedule.training(None) == 2.5 and schedule.training(0) == 2.5 and schedule.training(1) == 1.5
    schedule.position = 3.4
    assert schedule.training(3) == 0 and schedule.validation() == pytest.approx(4 * 0.1 / 3.5)


def test_schedule_of_a_recipe():
    rows = rows_of(10)
    cfg = parts_of(train=dict(steps=20, rows=2, accumulation=3, eval_every=5)).train
    found = feature_cache.schedule_of(cfg, rows, world=2)
    assert found.step == pytest.approx(0.4) and found.total == pytest.approx(24.0) and found.evaluations == 5
    target = tiny_target()
    assert 0 < feature_cache.attention_share(target) < 1
    tokens = sum(len(row.input_ids) for row in rows)
    packed = parts_of(train=dict(packing="packed", tokens_per_batch=50)).train
    assert feature_cache.epochs_per_micro_batch(packed, rows, 1) == pytest.approx(50 / tokens)


def test_the_schedule_counts_the_accumulation_that_global_rows_gives(tmp_path):
    # with the recipe's own accumulation of 1 the run would end within the first epoch, and nothing would be worth keeping
    parts = parts_of(data=dict(features="hybrid"), train=dict(steps=3, rows=2, global_rows=8))
    setup = setup_of(parts, rows_of(8), tmp_path)
    assert setup.source.schedule.total == pytest.approx(3.0)
    train(parts, setup, tmp_path)
    assert (setup.source.store.stats.misses, setup.source.store.stats.hits) == (8, 16)
    recipe = load_recipe("smoke", ["data.limit=12", "train.steps=30", "train.rows=4", "train.global_rows=8"]).value
    assert make(recipe, speed=1000.0).epochs == pytest.approx(20.0)


def test_a_copy_to_the_cpu_is_waited_for():
    # a device's states for a batch that a thread prepares on the CPU: read before they have arrived, they would be garbage
    asked = []
    states = SimpleNamespace(to=lambda device, non_blocking: asked.append((device.type, non_blocking)))
    for name in ("cpu", "cuda"):
        features._moved(states, torch.device(name))
    assert asked == [("cpu", False), ("cuda", True)]


# ---- full disk ------------------------------------------------------------------------------------------------------

RUN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from training import parts_of, rows_of, setup_of, train
parts = parts_of(data=dict(features="hybrid"), train=dict(steps=24, checkpoint_every=1, async_checkpoints=False))
setup = setup_of(parts, rows_of(24), Path({folder!r}))
setup.source.store.shard_bytes = 1
train(parts, setup, Path({folder!r}))
"""


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_its_last_checkpoint_intact(tmp_path):
    folder = tmp_path / "run"
    (folder / "features").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder / "features")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        code = RUN.format(tests=str(Path(__file__).parent), folder=str(folder))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    finally:
        subprocess.run(["umount", str(folder / "features")], check=True)
    assert done.returncode != 0
    assert "cannot be written, the disk is full" in done.stderr and "the last checkpoint is intact" in done.stderr
    saved = checkpoint.list_checkpoints(folder / "checkpoints")
    assert saved and not (folder / "drafter").exists()
    step = int(saved[-1].name.removeprefix("step-"))
    parts = parts_of(data=dict(features="online"), train=dict(steps=24, checkpoint_every=1, async_checkpoints=False))
    train(parts, setup_of(parts, rows_of(24), folder), folder)  # goes on from there
    plain = tmp_path / "plain"
    train(parts, setup_of(parts, rows_of(24), plain), plain)
    assert step < 24 and losses(folder)[-1] == pytest.approx(losses(plain)[-1], rel=1e-5)
    assert [line["step"] for line in log_of(folder)] == list(range(1, 25))


# ---- draftsmith plan data -------------------------------------------------------------------------------------------


def test_plan_data_is_known_before_anything_is_written(tmp_path, capsys):
    output, file = tmp_path / "out", tmp_path / "plan.json"
    keys = ["data.limit=12", "data.generation.max_new_tokens=20", f"output={output}", "train.steps=30", "train.rows=4"]
    main_(["plan", "data", "smoke", *keys, "--tokens-per-second", "1000", "--json", str(file)])
    said = capsys.readouterr().out
    assert not output.exists(), "nothing is written"
    plan = json.loads(file.read_text())
    width = 576 * (2 + 1) * 2 + 8  # two taps and the last state in bfloat16, the law of the reduced vocabulary
    assert plan["rows"] == 12 and plan["bytes_per_token"] == width and plan["cache_bytes"] == plan["tokens"] * width
    assert 200 < plan["supervised"] <= 12 * 20 and plan["epochs"] == pytest.approx(10.0)
    assert plan["seconds"]["cached"] == pytest.approx(plan["tokens"] / 1000)
    assert plan["seconds"]["online"] == pytest.approx(10 * plan["tokens"] / 1000)
    for word in ("online", "hybrid", "cached", "bytes a token", "free", "answers", "tokens/s"):
        assert word in said
    half = make(load_recipe("smoke", [*keys, f"data.cache_gib={plan['cache_bytes'] / 2**31}"]).value, speed=1000.0)
    assert half.passes["hybrid"] == pytest.approx(1 + 9 / 2, rel=1e-3)
    eight = make(load_recipe("smoke", [*keys, "data.cache_storage=fp8"]).value, speed=1000.0)
    assert eight.bytes_per_token == (576 + 4) * 2 + 576 * 2 + 8


def test_plan_data_refuses_what_is_no_speed(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "data", "smoke", "--tokens-per-second", "0"])
    assert "--tokens-per-second: got 0, allowed: above 0" in capsys.readouterr().err


def main_(arguments: list[str]) -> None:
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code, stop.code
