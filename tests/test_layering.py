"""Who may import whom, read from the source with ast: nothing is imported here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("train", "models", "losses", "data", "runtime", "eval", "recipes", "cli")
# folder -> folders of ours that it may import from
MAY = {
    "losses": set(),
    "models": set(),
    "data": set(),
    "runtime": {"models"},
    "eval": {"runtime", "models", "data"},
    "train": {"runtime", "models", "data", "losses", "eval"},
    "recipes": set(),
    "cli": {"train", "models", "losses", "data", "runtime", "eval", "recipes"},
}
# single files that may do more, each for the reason given
MORE = {
    "data/regenerate.py": {"runtime", "models"},  # the target answers prompts in the runtime's engine
    "train/__main__.py": {"cli"},  # entry point: the same code as `draftsmith train`
    "recipes/schema.py": {"data", "eval", "losses", "models", "train"},  # their config.py only, see below
    "recipes/check.py": {"models"},  # models.facts: the target's config, without weights
}
ONLY = {
    "wandb": {"train/log.py", "cli/publish.py"}, "triton": {"losses/fused.py"}, "typer": {"cli/app.py"},
    "yaml": {"recipes/load.py"},
}  # fmt: skip


def sources():
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path, *, top_only: bool = False):
    """Dotted names of everything that a file imports, relative ones resolved to draftsmith.*."""
    package = ["draftsmith", *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set()
    if top_only:  # bodies of functions, and what only type checkers read
        for node in ast.walk(tree):
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if typing_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                skipped |= {id(inner) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{stem}.{alias.name}" for alias in node.names]
    return found


def folder_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "draftsmith" and len(parts) > 1 and parts[1] in FOLDERS else None


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path):
    relative = path.relative_to(ROOT).as_posix()
    own = relative.split("/")[0]
    allowed = {own} | MAY[own] | MORE.get(relative, set())
    wrong = [name for name in imports(path) if (folder := folder_of(name)) and folder not in allowed]
    assert not wrong, f"{relative} must not import {wrong}"
    bare = [name for name in imports(path) if name.split(".")[0] in FOLDERS]
    assert not bare, f"{relative} imports {bare} by its bare name"
    for package, files in ONLY.items():
        if any(name.split(".")[0] == package for name in imports(path)):
            assert relative in files, f"{package} belongs into {files}"


def test_rules_name_real_folders():
    assert set(MAY) == set(FOLDERS)
    for name in MORE:
        assert (ROOT / name).is_file(), name


def test_losses_know_only_torch():
    for path in (ROOT / "losses").rglob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] != "transformers", f"{path.name} imports {name}"


def test_configs_and_recipes_load_no_torch():
    heavy = {"torch", "transformers", "datasets", "accelerate", "deepspeed", "safetensors", "numpy"}
    light = [path for path in sources() if path.name == "config.py" or path.parent.name in ("recipes", "cli")]
    assert len(light) > 8
    for path in [*light, ROOT / "models" / "facts.py", ROOT / "models" / "embedded.py", ROOT / "__init__.py"]:
        found = {name.split(".")[0] for name in imports(path, top_only=True)} & heavy
        assert not found, f"{path.relative_to(ROOT)} imports {found} at the top"


def test_schema_takes_configs_only():
    ours = [name for name in imports(ROOT / "recipes" / "schema.py") if folder_of(name) not in (None, "recipes")]
    assert ours and all(name.split(".")[2] == "config" for name in ours), ours
    load = imports(ROOT / "recipes" / "load.py")
    assert not [name for name in load if name.startswith("draftsmith")]
