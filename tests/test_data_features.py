"""Feature cache: right rows back, honest about what it was made of (case 20), resumable."""

import pytest
import torch

from draftsmith.data.chat import TokenRow
from draftsmith.data.features import FeatureCache, RowFeatures, build, estimate_bytes, feature_manifest, shard_plan

ROWS = [TokenRow(f"r{i}", "chat", list(range(i, i + 5 + 3 * i)), [False] * 3 + [True] * (2 + 3 * i)) for i in range(7)]
SETTINGS = {
    "target": {"name": "tiny", "revision": "v1", "dtype": "float32", "weights": "abc"},
    "template": "t1",
    "max_length": 64,
    "tap_layers": (1, 3),
    "hidden_size": 4,
    "dtype": "float32",
    "lse": True,
}
SMALL = 1500  # bytes a shard: several shards


def features(row):
    ids = torch.tensor(row.input_ids, dtype=torch.float32)
    return RowFeatures(ids[:, None] + torch.arange(8) / 8, -ids[:, None] * torch.ones(4), ids * 0.1, ids.long() + 7)


class Model:
    def __init__(self):
        self.seen = []

    def __call__(self, rows):
        self.seen += [row.id for row in rows]
        return [features(row) for row in rows]


def make(folder, rows=ROWS, model=None, **changed):
    settings = {**SETTINGS, **changed}
    limit = settings.pop("max_bytes", None)
    manifest = feature_manifest(rows, **settings)
    options = {"shard_bytes": SMALL, "max_bytes": limit, "rows_per_call": 2, "say": lambda text: None}
    return build(folder, rows, manifest, model or Model(), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_comes_back(tmp_path, dtype):
    cache = make(tmp_path / "f", dtype=dtype)
    assert len(cache) == 7 and len(list((tmp_path / "f").glob("*.safetensors"))) > 1
    for index in (6, 0, 3, 3):
        got, want = cache.row(index), features(ROWS[index])
        assert got.taps.dtype == got.last_hidden.dtype == getattr(torch, dtype)
        assert torch.equal(got.taps, want.taps.to(got.taps.dtype))
        assert torch.equal(got.last_hidden, want.last_hidden.to(got.taps.dtype))
        assert torch.equal(got.lse, want.lse)
        assert torch.equal(got.top.long(), want.top)


def test_batches_are_padded_with_zeros(tmp_path):
    cache = make(tmp_path / "f")
    batch = cache.batch([4, 1])
    assert batch.taps.shape == (2, 17, 8) and batch.last_hidden.shape == (2, 17, 4) and batch.lse.shape == (2, 17)
    assert torch.equal(batch.top[1, :8], features(ROWS[1]).top) and not batch.top[1, 8:].any()
    assert torch.equal(batch.taps[1, :8], features(ROWS[1]).taps) and not batch.taps[1, 8:].any()
    assert cache.batch([], 9).taps.shape == (1, 9, 8)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("template", {"template": "t2"}),
        ("max_length", {"max_length": 32}),
        ("tap_layers", {"tap_layers": (1, 2)}),
        ("target.revision", {"target": {**SETTINGS["target"], "revision": "v2"}}),
        ("target.weights", {"target": {**SETTINGS["target"], "weights": "abd"}}),
        ("target.dtype", {"target": {**SETTINGS["target"], "dtype": "bfloat16"}}),
        ("dtype", {"dtype": "bfloat16"}),
        ("lse", {"lse": False}),
        ("rows.sha256", {"rows": [ROWS[1], ROWS[0], *ROWS[2:]]}),
    ],
)
def test_case_20_refusal_names_the_field(tmp_path, field, changed):
    make(tmp_path / "f")
    rows = changed.pop("rows", ROWS)
    model = Model()
    with pytest.raises(ValueError) as caught:
        make(tmp_path / "f", rows, model, **changed)
    named = [part.split(":")[0] for part in str(caught.value).split("(", 1)[1].split("; ")]
    assert named == [field]
    assert model.seen == []
    with pytest.raises(ValueError, match=field.replace(".", r"\.") + ": "):
        FeatureCache(tmp_path / "f", rows, feature_manifest(rows, **{**SETTINGS, **changed}))


def test_mask_change_is_noticed(tmp_path):
    make(tmp_path / "f")
    other = [TokenRow("r0", "chat", ROWS[0].input_ids, [True] * 5), *ROWS[1:]]
    with pytest.raises(ValueError, match=r"rows\.sha256"):
        make(tmp_path / "f", other)


def test_killed_build_goes_on_with_the_missing_shards(tmp_path):
    class Killed(Model):
        def __call__(self, rows):
            if len(self.seen) >= 5:
                raise KeyboardInterrupt
            return super().__call__(rows)

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "f", model=Killed())
    done = sorted((tmp_path / "f").glob("*.safetensors"))
    assert done
    with pytest.raises(ValueError, match="is missing, the build did not finish"):
        FeatureCache(tmp_path / "f", ROWS, feature_manifest(ROWS, **SETTINGS))
    again = Model()
    cache = make(tmp_path / "f", model=again)
    assert 0 < len(again.seen) < 7
    assert torch.equal(cache.row(0).taps, features(ROWS[0]).taps) and torch.equal(cache.row(6).taps, features(ROWS[6]).taps)
    third = Model()
    make(tmp_path / "f", model=third)
    assert third.seen == []


def test_torn_shard_is_made_again(tmp_path):
    make(tmp_path / "f")
    shard = sorted((tmp_path / "f").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-20])
    model = Model()
    cache = make(tmp_path / "f", model=model)
    assert "r0" in model.seen and "r6" not in model.seen
    assert torch.equal(cache.row(0).lse, features(ROWS[0]).lse)


def test_size_is_known_before_anything_is_written(tmp_path):
    size = estimate_bytes(ROWS, feature_manifest(ROWS, **SETTINGS))
    tokens = sum(len(row.input_ids) for row in ROWS)
    assert size == tokens * (3 * 4 * 4 + 4 + 4)
    with pytest.raises(ValueError, match="GiB, allowed"):
        make(tmp_path / "f", max_bytes=size - 1)
    assert not (tmp_path / "f").exists()
    make(tmp_path / "f", max_bytes=size)
    written = sum(path.stat().st_size for path in (tmp_path / "f").glob("*.safetensors"))
    assert size <= written < size + 5000


def test_shards_hold_consecutive_rows_within_the_limit():
    manifest = feature_manifest(ROWS, **SETTINGS)
    plan = shard_plan([5, 5, 40, 5, 5], manifest, 5 * 56 * 2)
    assert [list(part) for part in plan] == [[0, 1], [2], [3, 4]]
    assert shard_plan([], manifest) == []


def test_values_that_are_not_finite_are_refused(tmp_path):
    def broken(rows):
        out = [features(row) for row in rows]
        out[0].taps[0, 0] = float("nan")
        return out

    with pytest.raises(ValueError, match="'r0': taps .* not finite"):
        make(tmp_path / "f", model=broken)
