"""Prompts from files in every shape and kind; broken lines named; duplicates and overlap."""

import json

import pytest

from draftsmith.data.config import DataConfig, DoctorConfig, GenerationConfig, SourceConfig
from draftsmith.data.reading import hub_rows
from draftsmith.data.source import (
    Prompt,
    check_overlap,
    deduplicate,
    load_prompts,
    mixture,
    overlap,
    prompts_hash,
    read_prompts,
    select,
    select_prompts,
    to_prompt,
)

MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "turns", "system", "replies"),
    [
        ({"turns": ["one", "two"], "system": "be short"}, ("one", "two"), "be short", ()),
        ({"messages": MESSAGES}, ("one", "two"), "be short", ("1",)),
        ({"prompt": MESSAGES[1:2]}, ("one",), None, ()),
        (
            {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}]},
            ("one",),
            None,
            ("1",),
        ),
        ({"conversations": MESSAGES}, ("one", "two"), "be short", ("1",)),
        ({"prompt": "one", "completion": "1"}, ("one",), None, ("1",)),
        ({"instruction": "add", "input": "1 2", "output": "3"}, ("add\n\n1 2",), None, ("3",)),
        ({"instruction": "sing", "input": "", "output": ""}, ("sing",), None, ()),
    ],
)
def test_shapes(row, turns, system, replies):
    prompt = to_prompt(row)
    assert (prompt.turns, prompt.system, prompt.replies) == (turns, system, replies)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"body": "x"}, "no known schema in the keys body; one of them must be messages, .* or text"),
        ({"turns": []}, "no known schema"),
        ({"turns": ["ok", ""]}, r"turns\[1\]: '' is not allowed; it must be a text that is not empty"),
        ({"prompt": 7}, "prompt: 7 is not allowed; it must be a text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "two user messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "without a user"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            r"messages\[0\]\.role: 'robot' is not allowed; it must be one of system, user, assistant, tool",
        ),
    ],
)
def test_rows_that_are_no_prompt(row, reason):
    with pytest.raises(ValueError, match=reason):
        to_prompt(row)


def test_broken_line_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n{"prompt": "c"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl:3: broken JSON line"):
        read_prompts(str(path))
    path.write_text('{"prompt": "a"}\n{"nothing": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl:2: no known schema"):
        read_prompts(str(path))
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: not UTF-8"):
        read_prompts(str(path))
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl:1: a row must be an object"):
        read_prompts(str(path))


def test_line_separators_inside_a_text_are_kept(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_prompts(str(path))[0].turns == ("a\u2028b\x85c",)


def test_empty_and_missing(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no prompt in it"):
        load_prompts(DataConfig(prompts=str(empty)))
    with pytest.raises(ValueError, match="no such file"):
        load_prompts(DataConfig(prompts=str(tmp_path / "gone.jsonl")))
    with pytest.raises(ValueError, match="holds no file"):
        (tmp_path / "folder").mkdir()
        load_prompts(DataConfig(prompts=str(tmp_path / "folder")))
    with pytest.raises(ValueError, match=r"'\.txt' is not known"):
        (tmp_path / "a.txt").write_text("x")
        load_prompts(DataConfig(prompts=str(tmp_path / "a.txt")))


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    from datasets import Dataset

    rows = [{"id": f"p{i}", "domain": "code", "prompt": f"text, {i}\nline"} for i in range(5)]
    table = Dataset.from_list(rows)
    write(tmp_path / "p.jsonl", rows)
    (tmp_path / "p.json").write_text(json.dumps(rows), encoding="utf-8")
    table.to_parquet(str(tmp_path / "p.parquet"))
    table.to_csv(str(tmp_path / "p.csv"))
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    write(tmp_path / "folder" / "a.jsonl", rows[:2])
    Dataset.from_list(rows[2:]).to_parquet(str(tmp_path / "folder" / "sub" / "b.parquet"))
    want = [Prompt(f"p{i}", "code", (f"text, {i}\nline",)) for i in range(5)]
    for name in ("p.jsonl", "p.json", "p.parquet", "p.csv", "saved", "folder"):
        assert read_prompts(str(tmp_path / name)) == want, name


def test_nested_messages_in_parquet(tmp_path):
    from datasets import Dataset

    Dataset.from_list([{"messages": MESSAGES}, {"messages": MESSAGES[1:2]}]).to_parquet(str(tmp_path / "m.parquet"))
    first, second = read_prompts(str(tmp_path / "m.parquet"))
    assert (first.turns, first.system) == (("one", "two"), "be short")
    assert (second.turns, second.system) == (("one",), None)


def test_broken_parquet_is_one_line(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read as parquet"):
        read_prompts(str(tmp_path / "x.parquet"))


def test_duplicates_ids_and_caps(tmp_path):
    rows = [
        {"id": "a", "domain": "code", "turns": ["x"]},
        {"id": "b", "domain": "code", "turns": ["x"]},
        {"id": "a", "domain": "math", "turns": ["y"]},
        {"domain": "math", "turns": ["z"]},
    ]
    said = []
    found = load_prompts(DataConfig(prompts=write(tmp_path / "p.jsonl", rows), system="s"), say=said.append)
    assert [(p.id, p.turns, p.system) for p in found[:2]] == [("a", ("x",), "s"), ("a~2", ("y",), "s")]
    assert found[2].id.startswith("math-")
    assert said == ["prompts: 3 of 4 (1 duplicates removed); code 1, math 2"]
    assert len(deduplicate([Prompt("a", "c", ("x",)), Prompt("b", "c", ("x",), system="t")])) == 2


def test_limit_is_spread_over_domains():
    prompts = [Prompt(f"c{i}", "code", (f"c{i}",)) for i in range(6)] + [Prompt(f"m{i}", "math", (f"m{i}",)) for i in range(3)]
    assert [p.id for p in select(prompts, limit=4, per_domain={})] == ["c0", "c1", "m0", "m1"]
    assert [p.id for p in select(prompts, limit=None, per_domain={"code": 1, "*": 2})] == ["c0", "m0", "m1"]
    assert [p.id for p in select(prompts, limit=None, per_domain={"math": 0, "code": 1})] == ["c0"]


def test_overlap_is_refused_whatever_case_and_punctuation():
    heldout = [Prompt("h", "code", ("Write a loop, please!",))]
    check_overlap([Prompt("t", "code", ("Write two loops, please!",))], heldout)
    for turns in [("write  a LOOP please",), ("Write a loop, please!", "and another")]:
        with pytest.raises(ValueError, match=r"1 training prompts are also held-out prompts \(t = h\)"):
            check_overlap([Prompt("t", "code", turns)], heldout)


def test_hash_sees_order_text_and_system():
    a, b = Prompt("a", "c", ("x",)), Prompt("b", "c", ("y",))
    hashes = {prompts_hash(p) for p in ([a, b], [b, a], [a], [Prompt("a", "c", ("x",), system="s"), b])}
    assert len(hashes) == 4
    assert prompts_hash([a, b]) == prompts_hash([Prompt("a", "other domain", ("x",)), b])


@pytest.mark.parametrize(
    ("key", "build"),
    [
        ("temperature=-1", lambda: GenerationConfig(temperature=-1.0)),
        ("top_p=0", lambda: GenerationConfig(top_p=0.0)),
        ("greedy_share=1.5", lambda: GenerationConfig(greedy_share=1.5)),
        ("max_length=2", lambda: DataConfig(max_length=2)),
        ("limit=0", lambda: DataConfig(limit=0)),
        (r"per_domain\.code=-1", lambda: DataConfig(per_domain={"code": -1})),
        (r"prompts=\(\)", lambda: DataConfig(prompts=())),
    ],
)
def test_bad_settings_name_key_and_value(key, build):
    with pytest.raises(ValueError, match=key + ".*: "):
        build()


# ---- streams, mixtures, near duplicates -----------------------------------------------------------------------------


def numbered(path, name, count, **more):
    return write(path, [{"id": f"{name}{i}", "prompt": f"{name} asks question {i} of {name}", **more} for i in range(count)])


def test_streaming_reads_no_more_than_its_cap(tmp_path):
    from datasets import Dataset

    rows = [{"id": f"p{i}", "prompt": f"text {i}"} for i in range(9)]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "p.parquet"))
    write(tmp_path / "p.jsonl", rows[:4]), (tmp_path / "p.jsonl").open("a").write("broken {\n")
    for name in ("p.parquet", "p.jsonl"):  # the broken line lies behind the cap
        assert [p.id for p in load_prompts(DataConfig(prompts=str(tmp_path / name), streaming=4))] == ["p0", "p1", "p2", "p3"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"bad\.parquet: cannot be read as parquet"):
        load_prompts(DataConfig(prompts=str(tmp_path / "bad.parquet"), streaming=4))


def test_hub_rows_of_a_data_set_repository(tmp_path):
    """The loader of the Hub reads a folder as well; whole and streamed it gives the same rows, and a stream has no slices."""
    write(tmp_path / "train.jsonl", [{"prompt": f"text {i}"} for i in range(3)])
    source = SourceConfig(source=str(tmp_path))
    whole, stream = (list(hub_rows(source, "train", streaming=flag)) for flag in (False, True))
    assert whole == stream and [row.place for row in whole] == [f"{tmp_path}: row {n}" for n in (1, 2, 3)]
    assert len(list(hub_rows(source, "train[:2]", streaming=False))) == 2
    with pytest.raises(ValueError, match=r"split='train\[:2\]': a stream has no slices"):
        list(hub_rows(source, "train[:2]", streaming=True))
    with pytest.raises(ValueError, match="not readable from the Hub"):
        list(hub_rows(source, "nosuch", streaming=False))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "a", "wieght": 1}, r"prompts\[0\]\.wieght: unknown key; an entry has the keys source, weight"),
        ({"source": "a", "weight": 0}, r"prompts\[0\]\.weight: 0 is not allowed; it must be a number above 0"),
        ({"source": "a", "cap": 1.5}, r"prompts\[0\]\.cap: 1.5 is not allowed; it must be an integer, at least 1"),
        ({"source": "a", "domain": " "}, r"prompts\[0\]\.domain: ' ' is not allowed; it must be a text"),
        ({"weight": 1}, r"prompts\[0\]\.source: missing"),
    ],
)
def test_wrong_entries_name_key_value_and_range(entry, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(prompts=(entry,))


def test_weights_for_some_sources_only_are_refused():
    with pytest.raises(ValueError, match=r"prompts\[1\]\.weight: missing; either every source has a weight or none"):
        DataConfig(prompts=({"source": "a", "weight": 1}, "b"))


def test_mixture_keeps_the_weights_and_its_prefixes_too(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", "alpha", 90, domain="code"), numbered(tmp_path / "b.jsonl", "beta", 20)
    config = dict(prompts=({"source": a, "weight": 3}, {"source": b, "weight": 1.0, "domain": "chat"}), near_duplicates=None)
    found = select_prompts(DataConfig(**config))
    assert found.used == [60, 20] and {p.domain for p in found.prompts} == {"code", "chat"}
    for size in (8, 40):
        assert sum(p.id.startswith("alpha") for p in found.prompts[:size]) == 3 * size // 4
    assert select_prompts(DataConfig(**config, limit=40)).used == [30, 10]
    assert found.line().endswith("chat 20, code 60; sources 60, 20")


def test_mixture_sizes_are_the_largest_that_fit():
    parts = [[Prompt(f"{n}-{i}", "d", (str(i),)) for i in range(size)] for n, size in enumerate((10, 100, 7))]
    sizes = lambda weights, limit=None: [len(part) for part in mixture(parts, weights, limit)]  # noqa: E731
    assert sizes([1, 1, 1]) == [7, 7, 7]
    assert sizes([1, 8, 0.5]) == [10, 80, 5]
    assert sizes([1, 1, 1], 20) == [7, 7, 6]
    assert sizes([1, 1, 1], 2) == [1, 1, 0]


def test_caps_and_domains_of_sources(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", "alpha", 9), numbered(tmp_path / "b.jsonl", "beta", 9, category="math")
    found = select_prompts(DataConfig(prompts=({"source": a, "cap": 4, "domain": "chat"}, {"source": b, "domain": "chat"})))
    assert found.used == [4, 9] and [p.domain for p in found.prompts] == ["chat"] * 4 + ["math"] * 9


def test_shuffle_is_a_seeded_order(tmp_path):
    path = numbered(tmp_path / "a.jsonl", "alpha", 30)
    orders = [[p.id for p in load_prompts(DataConfig(prompts=path, shuffle=seed))] for seed in (None, 0, 0, 1)]
    assert orders[0] == [f"alpha{i}" for i in range(30)] and orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3 and all(sorted(order) == sorted(orders[0]) for order in orders)
    capped = load_prompts(DataConfig(prompts={"source": path, "cap": 5}, shuffle=0))
    assert [p.id for p in capped] == orders[1][:5]


LONG = "please explain to a young child in plain words how the moon moves the sea twice a day and what it does to ships"


def test_near_duplicates_are_left_out_and_counted(tmp_path):
    rows = [{"id": "a", "prompt": LONG}, {"id": "b", "prompt": f"{LONG.upper()}!!"}, {"id": "c", "prompt": LONG, "system": "s"}]
    path = write(tmp_path / "p.jsonl", rows)
    found = select_prompts(DataConfig(prompts=path))
    assert [p.id for p in found.prompts] == ["a", "c"], "another system prompt makes another conversation"
    assert found.near == [("b", "a", 1.0)] and found.equal == 0
    assert "(0 duplicates and 1 near duplicates removed)" in found.line()
    assert len(load_prompts(DataConfig(prompts=path, near_duplicates=None))) == 3


def test_ids_stay_unique_whatever_the_source_calls_them():
    prompts = [Prompt(name, "d", (str(n),)) for n, name in enumerate(("a", "a", "a~2", "a"))]
    assert [p.id for p in deduplicate(prompts)] == ["a", "a~2", "a~2~2", "a~3"]


def test_near_overlap_names_the_pair_and_the_text():
    heldout = [Prompt("h", "chat", (LONG,)), Prompt("other", "chat", ("how many legs has a spider that lost two",))]
    near = [Prompt("t", "chat", (LONG.replace("young child", "pupil"),)), Prompt("u", "chat", ("why is the sky blue",))]
    inside = [
        Prompt("v", "chat", (f"I am a teacher of geography in a small town. {LONG}. Use four pictures and two examples.",))
    ]
    check_overlap(near + inside, heldout)
    assert overlap(near + inside, heldout, near=0.6) == [("t", "h"), ("v", "h")]
    with pytest.raises(
        ValueError, match=r"2 training prompts are also held-out prompts \(t ~ h, v ~ h\).*'please explain to a pupil"
    ):
        check_overlap(near + inside, heldout, near=0.6)
    both = [Prompt("w", "chat", (LONG,)), *near]
    with pytest.raises(ValueError, match=r"\(w = h, t ~ h\)"):
        check_overlap(both, heldout, near=DoctorConfig().max_overlap)


def test_tools_are_part_of_what_a_prompt_is():
    tool = {"type": "function", "function": {"name": "f"}}
    plain, offered = Prompt("a", "c", ("x",)), Prompt("a", "c", ("x",), tools=(tool,))
    assert prompts_hash([plain]) != prompts_hash([offered]) and len(deduplicate([plain, offered])) == 2
