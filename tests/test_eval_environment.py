"""The environment section: true to this machine, JSON-ready, and silent about paths and users."""

import json
import subprocess

import torch

from draftsmith.eval import environment


def test_describe_is_json_ready_and_true(monkeypatch):
    found = environment.describe("bfloat16")
    assert json.loads(json.dumps(found)) == found
    assert found["threads"] == torch.get_num_threads() and found["dtype"] == "bfloat16" and found["device"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
    assert found["cores"] >= 1 and found["hardware"].endswith(f"{found['cores']} cores")
    assert "draftsmith" in found["versions"] and "/" not in found["platform"]


def test_cpu_name_drops_trademark_noise():
    assert (
        " ".join(environment._strip_noise("Intel(R) Xeon(R) Platinum 8581C CPU @ 2.10GHz").split())
        == "Intel Xeon Platinum 8581C @ 2.10GHz"
    )


def test_git_commit_marks_changes_and_is_none_outside_a_checkout(tmp_path):
    assert environment.git_commit(tmp_path) is None

    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    assert environment.git_commit(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    clean = environment.git_commit(tmp_path)
    assert clean is not None and len(clean) == 12
    (tmp_path / "a").write_text("2")
    assert environment.git_commit(tmp_path) == clean + "+dirty"
