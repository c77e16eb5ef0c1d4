"""Recipes: the shipped ones load; every mistake is one line with key, value and allowed range (cases.md, case 19)."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from draftsmith.recipes import load as loading
from draftsmith.recipes.check import check_recipe
from draftsmith.recipes.load import ConfigError
from draftsmith.recipes.schema import Recipe, differences, find_recipe, from_plain, load_recipe, to_plain

FOLDER = Path(loading.__file__).parent
SHIPPED = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def make(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make


def errors(*arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(*arguments)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


def misfits(path: str, *overrides: str) -> list[str]:
    loaded = load_recipe(path, overrides)
    with pytest.raises(ConfigError) as caught:
        check_recipe(loaded.value, loaded.given)
    return caught.value.lines


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_fit_their_target(path):
    loaded = load_recipe(str(path))
    assert loaded.given
    check_recipe(loaded.value, loaded.given)
    assert from_plain(to_plain(loaded.value)) == loaded.value
    header = path.read_text(encoding="utf-8").splitlines()[:4]
    assert all(line.startswith("# ") for line in header), "says what it trains, on what, how to run it, what it leaves"
    assert loaded.value.output == f"outputs/{path.stem}"


def test_quickstart_and_smoke_are_shipped():
    assert {"quickstart", "smoke"} <= {path.stem for path in SHIPPED}
    assert find_recipe("smoke") == FOLDER / "smoke.yaml"


def test_every_field_is_explained():
    def walk(cls):
        for entry in dataclasses.fields(cls):
            if entry.name == "kind":
                continue
            assert entry.metadata.get("help"), f"{cls.__name__}.{entry.name} has no help text"
            if isinstance(entry.default_factory, type) and dataclasses.is_dataclass(entry.default_factory):
                walk(entry.default_factory)

    walk(Recipe)


def test_case_19_faulty_values(write):
    path = write("output: o\ndrafter: {blok_size: 3, block_size: 0, rank: true}\ntrain: {lr: -1e-4, steps: '7'}\n")
    lines = errors(path)
    assert lines == [
        "drafter.blok_size: unknown key; did you mean drafter.block_size?",
        "drafter.block_size: 0 is not allowed; it must be an integer from 1 to 64",
        "drafter.rank: True is not allowed; it must be an integer from 0 to 4096",
        "train.lr: -0.0001 is not allowed; it must be a number above 0.0",
        "train.steps: '7' is not allowed; it must be an integer at least 1",
    ]


def test_case_19_values_that_must_run(write):
    path = write("output: o\ntrain: {lr: 1e-4}\n")
    assert load_recipe(path).value.train.lr == 1e-4
    for spelling in ("1e-4", "1E-4", "1.0e-4", "0.0001"):
        assert load_recipe(path, [f"train.lr={spelling}"]).value.train.lr == 1e-4
    assert load_recipe(path, ["train.lr=1e+0"]).value.train.lr == 1.0
    for override in ("objective.survival=0", "drafter.rank=0", "drafter.head=none"):
        loaded = load_recipe(path, [override])
        check_recipe(loaded.value, loaded.given)


def test_case_19_against_the_target(write):
    path = write("output: o\n")
    assert misfits(path, "drafter.mask_token_id=2")[0].startswith("drafter.mask_token_id: 2 is not allowed; it ends an answer")
    assert "from 0 to 49151" in misfits(path, "drafter.mask_token_id=49152")[0]
    assert "from 0 to 28" in misfits(path, "drafter.tap_layers=[1, 30]")[0]
    assert "from 0 to 28" in misfits(path, "drafter.tap_layers=[29]")[0]
    assert "ascending" in misfits(path, "drafter.tap_layers=[5, 1]")[0]
    assert "from 2 to 49152" in misfits(path, "drafter.draft_vocab_size=50000")[0]
    assert "at most 8192" in misfits(path, "data.max_length=8193")[0]
    assert "correction head" in misfits(path, "drafter.rank=0", "drafter.survival_with_head=true")[0]
    assert "from 1 to 7" in misfits(path, "eval.num_slots=8")[0]
    several = misfits(path, "drafter.mask_token_id=2", "drafter.tap_layers=[30]", "eval.num_slots=8")
    assert len(several) == 3, "all mistakes at once"
    good = load_recipe(path, ["drafter.mask_token_id=16", "drafter.tap_layers=[1, 28]"])
    check_recipe(good.value, good.given)


def test_unknown_keys(write):
    path = write("output: o\nlr: 3\nobjectiv: {tv: 1}\nzzz: 1\n")
    assert errors(path, ["train.zzz=1"]) == [
        "lr: unknown key; did you mean train.lr?",
        "objectiv: unknown key; did you mean objective?",
        "zzz: unknown key; the recipe has the keys output, seed, target, data, drafter, objective, train, eval",
        errors(path, ["train.zzz=1"])[3],
    ]
    assert errors(path, ["train.zzz=1"])[3].startswith("train.zzz: unknown key; train has the keys steps, ")


def test_missing_file_and_output(write, tmp_path):
    assert errors(write("seed: 1\n")) == ["output: missing; it must be text"]
    assert "quickstart" in errors("no-such-recipe")[0]
    assert errors(write("- a\n"))[0].endswith("this file holds a list")


def test_yaml_faults_name_the_line(write):
    path = write("output: o\ntrain:\n  lr: 1\n  lr: 2\n")
    assert errors(path) == [f"{path}: lr: given twice, in line 3 and in line 4"]
    path = write("output: [o\ntrain: 3\n")
    assert errors(path)[0].startswith(f"{path}: line 2, column 6: not valid YAML")
    assert "not text" in errors(write("output: o\n1: 2\n"))[0]


def test_overrides(write):
    path = write("output: o\ntrain: {steps: 5}\n")
    loaded = load_recipe(path, ["train.steps=9", "data.limit=null", "eval.concurrency=[1, 4]", "data.generation.top_k=3"])
    assert loaded.value.train.steps == 9
    assert loaded.value.data.limit is None
    assert loaded.value.eval.concurrency == (1, 4)
    assert loaded.value.data.generation.top_k == 3
    assert loaded.given == {"output", "train.steps", "data.limit", "eval.concurrency", "data.generation.top_k"}
    assert errors(path, ["train.steps"]) == ["train.steps: an override is written section.key=value"]
    assert errors(path, ["train.steps.x=1"]) == ["train.steps.x: steps holds a value, not keys"]
    assert "section" in errors(path, ["train=3"])[0]
    assert len(errors(path, ["nonsense", "train.steps=0"])) == 2, "override and value in one report"


def test_differences():
    old = {"a": {"b": 1, "c": [1, 2]}, "eval": {"x": 1}, "output": "o"}
    new = {"a": {"b": 2, "c": [1, 2]}, "eval": {"x": 2}, "output": "p"}
    assert differences(old, new, ignore=("eval", "output")) == ["a.b: 1 -> 2"]
    assert len(differences(old, new)) == 3


@dataclass(frozen=True, kw_only=True)
class Cat:
    kind: Literal["cat"] = "cat"
    lives: int = field(default=9, metadata={"ge": 1, "le": 9})


@dataclass(frozen=True, kw_only=True)
class Dog:
    kind: Literal["dog"] = "dog"
    weight: float = field(default=1.0, metadata={"gt": 0})

    def __post_init__(self) -> None:
        if self.weight > 100:
            raise ValueError(f"weight: {self.weight} is not allowed; it must be at most 100")


@dataclass(frozen=True, kw_only=True)
class Home:
    pet: Cat | Dog = field(default_factory=Cat)
    tags: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict, metadata={"ge": 0})
    mixed: str | tuple[str, ...] = "x"


def test_union_of_sections_is_chosen_by_kind():
    assert loading.build(Home, {"pet": {"lives": 3}}).value.pet == Cat(lives=3)
    assert loading.build(Home, {"pet": {"kind": "dog", "weight": 2}}).value.pet == Dog(weight=2.0)
    for values, expected in [
        ({"kind": "dgo"}, "pet.kind: 'dgo' is not allowed; it must be one of cat, dog; did you mean dog?"),
        ({"kind": "dog", "lives": 3}, "pet.lives: unknown key; pet has the keys kind, weight"),
        ({"kind": "dog", "weight": 101}, "pet.weight: 101.0 is not allowed; it must be at most 100"),
        ({"kind": "cat", "lives": 10}, "pet.lives: 10 is not allowed; it must be an integer from 1 to 9"),
    ]:
        with pytest.raises(ConfigError) as caught:
            loading.build(Home, {"pet": values})
        assert caught.value.lines == [expected]


def test_containers_are_checked_inside():
    home = loading.build(Home, {"tags": ["a"], "limits": {"x": 1}, "mixed": ["a", "b"]}).value
    assert home == Home(tags=("a",), limits={"x": 1}, mixed=("a", "b"))
    for values in ({"tags": "a"}, {"tags": [1]}, {"limits": {"x": -1}}, {"limits": {"x": True}}, {"mixed": 3}):
        with pytest.raises(ConfigError):
            loading.build(Home, values)


def test_numbers_are_strict():
    for bad in (True, "2", None, float("nan"), float("inf"), [1]):
        with pytest.raises(ConfigError):
            loading.build(Home, {"pet": {"kind": "dog", "weight": bad}})
    for bad in (True, 2.0, "2"):
        with pytest.raises(ConfigError):
            loading.build(Home, {"pet": {"lives": bad}})
