"""Regeneration killed by SIGKILL at random moments: nothing lost, nothing doubled, greedy rows as of an uninterrupted run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from http_serving import tiny_server
from regenerate_worker import PROMPTS, answer
from tiny_chat import chat_target

from draftsmith.data.regenerate import read_answers

KILLS = 10


@pytest.fixture(scope="module")
def worker():
    tests = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(tests / "regenerate_worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield process
    process.stdin.close()
    assert process.wait(20) == 0


def start(worker, **job) -> int:
    worker.stdin.write(json.dumps(job) + "\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())["pid"]


def ended(worker) -> int:
    return json.loads(worker.stdout.readline())["status"]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_and_go_on(worker, folder: Path, seed: int, **job) -> list[dict]:
    """Ten times: run, and kill at a random moment once at least one more row is there; then run to the end."""
    numbers, path = random.Random(seed), folder / "answers.jsonl"
    folder.mkdir()
    (folder / "manifest.json.tmp").write_text("{")  # as of a kill while the manifest was written
    before = rows_before = 0
    for _ in range(KILLS):
        pid = start(worker, folder=str(folder), **job)
        deadline = time.monotonic() + 60
        while size(path) <= before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(numbers.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        assert ended(worker) == signal.SIGKILL, "the run was over before it was killed"
        before = size(path)
        rows = read_answers(path)  # a torn last line is the only damage there may be
        assert rows_before < len(rows) < len(PROMPTS)
        rows_before = len(rows)
        if numbers.random() < 0.5:  # a machine that stopped may have lost some of the last row
            with path.open("rb+") as file:
                file.truncate(before - numbers.randrange(1, 40))
            before, rows_before = size(path), len(read_answers(path))
    pid = start(worker, folder=str(folder), **job)
    assert ended(worker) == 0
    return read_answers(path)


@pytest.mark.parametrize(("temperature", "drafter"), [(0.0, False), (1.0, False), (0.0, True), (1.0, True)])
def test_killed_ten_times(worker, tmp_path, temperature, drafter):
    whole = answer(str(tmp_path / "whole"), temperature)
    rows = kill_and_go_on(worker, tmp_path / "killed", seed=3, temperature=temperature, drafter=drafter)
    assert sorted(row["index"] for row in rows) == list(range(len(PROMPTS)))
    assert {row["id"] for row in rows} == {row["id"] for row in whole}
    if temperature == 0.0 or not drafter:  # sampled with a drafter, the text depends on what was drafted; its law does not
        assert sorted(rows, key=lambda row: row["index"]) == whole


def test_killed_ten_times_behind_a_server(worker, tmp_path):
    whole = answer(str(tmp_path / "whole"), 1.0)
    target = chat_target()
    with tiny_server(target, slots=4) as server:
        rows = kill_and_go_on(worker, tmp_path / "killed", seed=4, temperature=1.0, server=server.url)
        assert server.loop.counts.finished["cancelled"] > 0  # what the killed runs had in flight
    assert sorted(rows, key=lambda row: row["index"]) == whole
