"""Feature cache: right rows back, honest about what it was made of (case 20), within its budget, torn shards made again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.data.chat import TokenRow
from draftsmith.data.feature_store import FeatureStore
from draftsmith.data.features import RowFeatures, compress, estimate_bytes, expand, feature_manifest, row_bytes

ROWS = [TokenRow(f"r{i}", "chat", list(range(i, i + 5 + 3 * i)), [False] * 3 + [True] * (2 + 3 * i)) for i in range(7)]
SETTINGS = {
    "target": {"name": "tiny", "revision": "v1", "dtype": "float32", "weights": "abc"},
    "template": "t1",
    "tokenizer": "k1",
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


def opened(folder, rows=ROWS, shard_bytes=SMALL, max_bytes=None, rank=0, world=1, attention=0.0, **changed) -> FeatureStore:
    manifest = feature_manifest(rows, **{**SETTINGS, **changed})
    return FeatureStore(folder, rows, manifest, max_bytes=max_bytes, rank=rank, world=world, attention=attention,
                        shard_bytes=shard_bytes)  # fmt: skip


def filled(folder, rows=ROWS, **options) -> FeatureStore:
    store = opened(folder, rows, **options)
    for index, row in enumerate(rows):
        store.put(index, features(row))
    store.flush()
    return store


def held(store) -> list[int]:
    return [index for index in range(len(store.rows)) if index in store]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_comes_back(tmp_path, dtype):
    first = filled(tmp_path / "f", dtype=dtype)
    assert len(list((tmp_path / "f").glob("*.safetensors"))) > 1
    for store in (first, opened(tmp_path / "f", dtype=dtype)):
        for index in (6, 0, 3, 3):
            got, want = store.read(index), features(ROWS[index])
            assert got.taps.dtype == got.last_hidden.dtype == getattr(torch, dtype)
            assert torch.equal(got.taps, want.taps.to(got.taps.dtype))
            assert torch.equal(got.last_hidden, want.last_hidden.to(got.taps.dtype))
            assert torch.equal(got.lse, want.lse) and torch.equal(got.top.long(), want.top)
        assert store.stats.hits == 4 and store.stats.misses == 0


def test_a_row_is_the_same_before_and_after_its_shard_is_written(tmp_path):
    store = opened(tmp_path / "f", dtype="bfloat16", storage="int8", shard_bytes=10**9)
    noise = torch.randn(len(ROWS[2].input_ids), 12, generator=torch.Generator().manual_seed(0))
    store.put(2, RowFeatures(noise[:, :8], noise[:, 8:], noise[:, 0], noise[:, 0].long()))
    before = store.read(2)
    store.flush()
    after = store.read(2)
    assert torch.equal(before.taps, after.taps) and torch.equal(before.last_hidden, after.last_hidden)
    assert before.taps.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("template", {"template": "t2"}),
        ("tokenizer", {"tokenizer": "k2"}),
        ("max_length", {"max_length": 32}),
        ("tap_layers", {"tap_layers": (1, 2)}),
        ("target.revision", {"target": {**SETTINGS["target"], "revision": "v2"}}),
        ("target.weights", {"target": {**SETTINGS["target"], "weights": "abd"}}),
        ("target.name", {"target": {**SETTINGS["target"], "name": "other"}}),
        ("target.dtype", {"target": {**SETTINGS["target"], "dtype": "bfloat16"}}),
        ("dtype", {"dtype": "bfloat16"}),
        ("storage", {"storage": "fp8"}),
        ("lse", {"lse": False}),
        ("rows.sha256", {"rows": [ROWS[1], ROWS[0], *ROWS[2:]]}),
    ],
)
def test_case_20_refusal_names_the_field(tmp_path, field, changed):
    filled(tmp_path / "f")
    before = sorted(path.name for path in (tmp_path / "f").iterdir())
    with pytest.raises(ValueError) as caught:
        opened(tmp_path / "f", **changed)
    named = [part.split(":")[0] for part in str(caught.value).split("(", 1)[1].split("; ")]
    assert named == [field]
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == before


def test_mask_change_is_noticed(tmp_path):
    filled(tmp_path / "f")
    other = [TokenRow("r0", "chat", ROWS[0].input_ids, [True] * 5), *ROWS[1:]]
    with pytest.raises(ValueError, match=r"rows\.sha256"):
        opened(tmp_path / "f", other)


def test_the_manifest_is_written_first(tmp_path):
    opened(tmp_path / "f")
    assert json.loads((tmp_path / "f" / "manifest.json").read_text())["template"] == "t1"
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "shard-0-000000.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="no manifest"):
        opened(tmp_path / "g")


# ---- torn shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "flipped", "side file lost", "side file broken", "gone"])
def test_a_torn_shard_is_missing_and_made_again(tmp_path, how):
    filled(tmp_path / "f")
    shard = sorted((tmp_path / "f").glob("*.safetensors"))[0]
    content = shard.read_bytes()
    if how == "cut":
        shard.write_bytes(content[:-20])
    elif how == "flipped":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "gone":
        shard.unlink()
    else:
        side = shard.with_suffix(".json")
        side.unlink() if how == "side file lost" else side.write_text('{"rows": [0')
    store = opened(tmp_path / "f")
    lost = [index for index in range(7) if store.read(index) is None]
    assert lost and lost[0] == 0 and 6 not in lost
    for index in lost:
        store.put(index, features(ROWS[index]))
    store.flush()
    for again in (store, opened(tmp_path / "f")):
        assert held(again) == list(range(7))
        assert torch.equal(again.read(0).lse, features(ROWS[0]).lse)


def test_a_stopped_fill_goes_on(tmp_path):
    store = opened(tmp_path / "f")
    for index in range(5):
        store.put(index, features(ROWS[index]))
    del store  # killed: what waited for a full shard is lost, nothing else
    (tmp_path / "f" / "shard-0-000009.77.tmp").write_bytes(b"half")
    again = opened(tmp_path / "f")
    there = held(again)
    assert there and set(there) < {0, 1, 2, 3, 4}
    for index in range(7):
        again.put(index, features(ROWS[index]))
    again.flush()
    assert held(opened(tmp_path / "f")) == list(range(7))
    assert torch.equal(again.read(0).taps, features(ROWS[0]).taps) and torch.equal(again.read(6).taps, features(ROWS[6]).taps)


# ---- budget ---------------------------------------------------------------------------------------------------------


def equal_rows(count, length=20):
    return [TokenRow(f"e{i}", "chat", [i] * length, [True] * length) for i in range(count)]


def on_disk(folder) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_size_is_known_before_anything_is_written(tmp_path):
    manifest = feature_manifest(ROWS, **SETTINGS)
    size, tokens = estimate_bytes(ROWS, manifest), sum(len(row.input_ids) for row in ROWS)
    assert size == tokens * (3 * 4 * 4 + 4 + 4)
    filled(tmp_path / "f")
    assert size <= on_disk(tmp_path / "f") < size + 7000  # names and shapes in the shards' headers
    assert row_bytes(10, manifest | {"storage": "fp8"}) == 10 * (2 * (4 + 4) + 4 * 4 + 8)


def test_going_round_keeps_what_is_there(tmp_path):
    """Least recently used would have replaced every shard before its next use."""
    rows = equal_rows(40, length=100)
    size = row_bytes(100, feature_manifest(rows, **SETTINGS))
    store = opened(tmp_path / "f", rows, max_bytes=20 * (size + 1000), shard_bytes=1)
    reads = dict.fromkeys(range(40), 3)
    store.left = lambda index: reads[index]
    hits = []
    for _ in range(3):
        before = store.stats.hits
        for index in range(40):
            reads[index] -= 1
            if store.read(index) is None:
                store.put(index, features(rows[index]))
        hits.append(store.stats.hits - before)
        assert on_disk(tmp_path / "f") <= 20 * (size + 1000)
    assert hits[0] == 0 and hits[1] >= 18 and hits[2] >= 18
    assert store.stats.evicted == 0


def test_long_rows_are_worth_more_and_evict_short_ones(tmp_path):
    rows = [TokenRow(f"v{i}", "chat", [i] * n, [True] * n) for i, n in enumerate([10] * 12 + [60] * 2)]
    manifest = feature_manifest(rows, **SETTINGS)
    budget = 2 * (row_bytes(60, manifest) + 900)
    store = filled(tmp_path / "f", rows, max_bytes=budget, shard_bytes=1, attention=0.01)
    assert {12, 13} <= set(held(store)) and store.stats.evicted > 0
    assert on_disk(tmp_path / "f") <= budget
    assert torch.equal(store.read(13).taps, features(rows[13]).taps)


def test_rows_that_are_not_needed_again_make_room_and_are_not_kept(tmp_path):
    rows = equal_rows(20, length=100)
    size = row_bytes(100, feature_manifest(rows, **SETTINGS)) + 1000
    store = opened(tmp_path / "f", rows, max_bytes=10 * size, shard_bytes=1)
    reads = dict.fromkeys(range(20), 2)
    store.left = lambda index: reads[index]
    for index in range(20):
        store.put(index, features(rows[index]))
    first = held(store)
    assert 0 < len(first) < 15
    reads |= dict.fromkeys(first, 0)  # used up
    for index in range(20):
        store.put(index, features(rows[index]))
    assert set(range(20)) - set(first) <= set(held(store)) and store.stats.evicted > 0


def test_a_smaller_budget_gives_back(tmp_path):
    whole = filled(tmp_path / "f", shard_bytes=1)
    assert held(whole) == list(range(7))
    less = opened(tmp_path / "f", shard_bytes=1, max_bytes=on_disk(tmp_path / "f") // 2)
    assert 0 < len(held(less)) < 7 and on_disk(tmp_path / "f") <= less.budget


def test_ranks_share_a_folder_and_its_budget(tmp_path):
    rows = equal_rows(12, length=100)
    size = row_bytes(100, feature_manifest(rows, **SETTINGS)) + 1000
    one, two = (opened(tmp_path / "f", rows, rank=r, world=2, max_bytes=8 * size, shard_bytes=1) for r in (0, 1))
    for index in range(12):
        (one, two)[index % 2].put(index, features(rows[index]))
    assert one.stats.bytes <= 4 * size and two.stats.bytes <= 4 * size
    theirs = [index for index in range(1, 12, 2) if index in two]
    assert theirs and all(torch.equal(one.read(index).taps, features(rows[index]).taps) for index in theirs)
    before = one.stats.bytes
    two._evict(next(iter(name for name, shard in two._shards.items() if shard.own and shard.rows == [theirs[0]])))
    one._open.clear()
    assert one.read(theirs[0]) is None and one.stats.bytes == before, "gone is a miss, not an error"
    alone = opened(tmp_path / "f", rows, max_bytes=8 * size, shard_bytes=1)
    assert alone.stats.bytes == on_disk(tmp_path / "f"), "with fewer ranks the shards of the others are ours"


def test_another_ranks_shard_that_is_not_whole_here_is_left_alone(tmp_path):
    # a network disk shows the side file before all of the shard
    filled(tmp_path / "f", rank=1, world=2)
    shard = sorted((tmp_path / "f").glob("shard-1-*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-20])
    other = opened(tmp_path / "f", rank=0, world=2)
    assert other.read(0) is None and other.stats.torn == 0 and shard.with_suffix(".json").is_file()
    shard.write_bytes(content)
    assert torch.equal(other.read(0).taps, features(ROWS[0]).taps)


# ---- storage in 8 bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("storage", "error"), [("int8", 0.02), ("fp8", 0.04)])
def test_8_bits_with_a_scale_a_vector(tmp_path, storage, error):
    values = torch.randn(50, 3 * 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 50)[:, None]
    packed, scale = compress(values, 64, storage)
    assert packed.dtype.itemsize == 1 and scale.shape == (50, 3)
    back = expand(packed, scale, torch.float32)
    parts = lambda x: x.unflatten(-1, (3, 64))  # noqa: E731
    relative = (parts(back) - parts(values)).norm(dim=-1) / parts(values).norm(dim=-1)
    assert float(relative.max()) < error
    assert torch.equal(expand(*compress(torch.zeros(2, 64), 64, storage), torch.float32), torch.zeros(2, 64))
    store = filled(tmp_path / "f", storage=storage)
    got, want = opened(tmp_path / "f", storage=storage).read(6), features(ROWS[6])
    torch.testing.assert_close(got.taps, want.taps, rtol=0.07, atol=0.3)
    assert torch.equal(got.lse, want.lse) and torch.equal(store.read(6).taps, got.taps)
    assert torch.equal(got.last_hidden, want.last_hidden), "what the law is made from keeps its format"


def test_values_that_are_not_finite_are_refused(tmp_path):
    broken = features(ROWS[0])
    broken.taps[0, 0] = float("nan")
    with pytest.raises(ValueError, match="'r0': taps .* not finite"):
        opened(tmp_path / "f").put(0, broken)


# ---- full disk ------------------------------------------------------------------------------------------------------

FULL = """
import sys, resource, signal
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_data_features import features, opened, ROWS
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = opened(Path({folder!r}), shard_bytes=1)
store.put(0, features(ROWS[0]))
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
try:
    for index in range(1, 7):
        store.put(index, features(ROWS[index]))
except RuntimeError as error:
    print("REFUSED", error)
"""


def run_full(folder: Path, limit: int) -> str:
    code = FULL.format(tests=str(Path(__file__).parent), folder=str(folder), limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def check_refusal(folder: Path, said: str) -> None:
    assert "the disk is full" in said and "data.cache_gib" in said and "data.features to online" in said
    assert not list(folder.glob("*.tmp")), "what was half written is removed"
    again = opened(folder)
    assert 0 in again and torch.equal(again.read(0).taps, features(ROWS[0]).taps)


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_a_clear_error(tmp_path):
    check_refusal(tmp_path / "f", run_full(tmp_path / "f", limit=900))


@pytest.mark.slow
def test_a_full_tmpfs_is_a_clear_error(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(place)], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        check_refusal(place / "f", run_full(place / "f", limit=0))
    finally:
        subprocess.run(["umount", str(place)], check=True)
