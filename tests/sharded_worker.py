"""Program of the two-process test: a sharded target against a whole one, and training with it. Run by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from training import parts_of, rows_of, stage

from draftsmith.data.batch import collate
from draftsmith.models.config import TargetConfig
from draftsmith.models.target import load_target, self_test
from draftsmith.train.target import open_target

TAPS = (0, 1)


def check_states(folder: Path) -> None:
    """The same states, half the memory, and empty batches count as calls."""
    sharded = open_target(TargetConfig(name=str(folder), dtype="float32", placement="sharded"))
    whole = load_target(TargetConfig(name=str(folder), dtype="float32"))
    assert sharded.label == "float32, sharded over 2 ranks" and sharded.collective
    assert self_test(sharded, TAPS) < 1e-5
    assert 2 * sharded.local_bytes() == sum(4 * p.numel() for p in whole.layers.parameters())
    rank = dist.get_rank()
    requests = {f"{rank}-{n}": [3 + n + 2 * i for i in range(4 + 5 * n)] for n in range(3)} if rank == 0 else {}
    found, want = sharded.states(requests, TAPS), whole.states(requests, TAPS)
    assert list(found) == list(want)
    for key in want:
        scale = float(want[key].taps.abs().max())
        torch.testing.assert_close(found[key].taps / scale, want[key].taps / scale, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[key].last_hidden, want[key].last_hidden, rtol=0, atol=1e-5)
    assert (sharded.embedding_weight.data_ptr() == sharded.lm_head_weight.data_ptr()) == (folder.name == "tied")
    assert torch.equal(sharded.lm_head_weight, whole.lm_head_weight)
    with sharded.whole_layers(2):
        for ours, theirs in zip(list(sharded.layers)[-2:], list(whole.layers)[-2:], strict=True):
            assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert 2 * sharded.local_bytes() == sum(4 * p.numel() for p in whole.layers.parameters())


def check_sources(folder: Path, output: Path) -> None:
    """Online, hybrid and cached give both ranks the states of a whole target; ranks with unequal misses do not hang."""
    cfg = TargetConfig(name=str(folder), dtype="float32", placement="sharded")
    sharded, whole = open_target(cfg), load_target(TargetConfig(name=str(folder), dtype="float32"))
    rows, rank = rows_of(7), dist.get_rank()
    for features in ("online", "hybrid", "cached"):
        parts = parts_of(data=dict(features=features), train=dict(steps=8))
        setup = stage.build_setup(parts, sharded, rows, output / features, say=lambda text: None)
        for part in (rows[rank:2], rows[4 * rank : 4], rows[2 * rank : 3 + 2 * rank], rows[:2], rows[rank::2]):
            batch = collate(part, None, 4, anchor_share=0.5)
            found = setup.source.features(batch, part)
            want = whole.features(batch.input_ids, batch.attention_mask, TAPS)
            mask = batch.attention_mask if part else torch.zeros_like(batch.attention_mask)
            torch.testing.assert_close(found.last_hidden[mask], want.last_hidden[mask], rtol=0, atol=1e-4)
            torch.testing.assert_close(found.taps[mask], want.taps[mask], rtol=0, atol=1e-3)
        dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    output = Path(sys.argv[1])
    for name in ("untied", "tied"):
        check_states(output / name)
    check_sources(output / "untied", output / "run")
    dist.barrier()
    (output / f"done-{os.environ['RANK']}").write_text("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
