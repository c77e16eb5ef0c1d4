"""Shared fixtures. Threads are set before torch starts its pools; nothing here reaches a network."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """One thread per xdist worker: more only compete for the same cores."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The embedded target in float32, converted on the first use on this machine; do not change it."""
    from draftsmith.models.config import TargetConfig
    from draftsmith.models.target import load_target

    return load_target(TargetConfig(dtype="float32"))
