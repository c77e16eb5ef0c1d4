"""Prompts from files in every shape and kind; broken lines named; duplicates and overlap."""

import json

import pytest

from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.source import (
    Prompt,
    check_overlap,
    deduplicate,
    load_prompts,
    prompts_hash,
    read_prompts,
    select,
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
        ({"text": "x"}, "no known schema"),
        ({"turns": []}, "no known schema"),
        ({"turns": ["ok", ""]}, "turn must be a text"),
        ({"prompt": 7}, "prompt must be a text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "two user messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "without a user"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'"),
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
