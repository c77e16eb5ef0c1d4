"""What the wheel will hold: a folder missing from the list works in the editable install and is missing from the wheel."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_PACKAGED = {"tests", "benchmarks", "docs", "build", "dist", "outputs", "wandb"}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_code_folder_is_listed():
    folders = {
        path.parent.relative_to(ROOT)
        for path in ROOT.rglob("*.py")
        if not any(part in NOT_PACKAGED or part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])
    }
    expected = {".".join(["draftsmith", *folder.parts]) for folder in folders}
    assert set(project()["tool"]["setuptools"]["packages"]) == expected
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), folder


def test_root_holds_one_module():
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    assert not (ROOT / "draftsmith").exists()


def test_every_data_file_is_shipped():
    patterns = project()["tool"]["setuptools"]["package-data"]
    places = ("runtime.kernels", "losses")
    files = ((".yaml", "recipes"), (".jsonl", "data.prompts"), (".html", "eval"), *((".cpp", place) for place in places))
    for suffix, package in files:
        folder = ROOT / package.replace(".", "/")
        shipped = {path for pattern in patterns[f"draftsmith.{package}"] for path in folder.glob(pattern)}
        assert set(folder.rglob(f"*{suffix}")) <= shipped, package


def test_constraints_cover_the_dependencies():
    def names(lines):
        return {line.split(";")[0].split("[")[0].strip().lower().replace("_", "-") for line in lines}

    config = project()["project"]
    wanted = [*config["dependencies"], *config["optional-dependencies"]["dev"]]
    wanted = names(entry.split(">=")[0] for entry in wanted) - {"torch"}  # chosen by the Makefile
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = names(line.split("==")[0] for line in lines if "==" in line)
    assert wanted <= pinned, wanted - pinned


def test_package_is_light_and_known():
    code = (
        "import draftsmith, sys; assert draftsmith.__version__; assert 'torch' not in sys.modules\n"
        "import importlib.util as u; assert not any(u.find_spec(n) for n in ('models', 'losses', 'runtime', 'recipes'))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=ROOT.parent)
