"""Exported drafters on the Hub and as W&B artifacts."""

from __future__ import annotations

import os
from pathlib import Path


def check_repo(repo: str, *, dry_run: bool) -> None:
    """Refuses a malformed repository id, and an upload without a token, before anything is exported."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub: {repo!r} is not allowed: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"--push-to-hub: {repo!r} is not allowed; it must be OWNER/NAME")
    if not dry_run and get_token() is None:
        raise ValueError("--push-to-hub: no token of the Hub on this machine; log in with `hf auth login`, or add --dry-run")


def listing(folder: Path) -> list[tuple[str, int]]:
    """(name, bytes) of every file that would go."""
    return [(path.name, path.stat().st_size) for path in sorted(folder.iterdir()) if path.is_file()]


def push(folder: Path, repo: str, *, dry_run: bool) -> None:
    """Upload the folder as a model repository; with `dry_run` print what would go, and the card."""
    if dry_run:
        print(f"dry run: {repo} would receive")
        for name, size in listing(folder):
            print(f"  {size:>12,}  {name}")
        print((folder / "README.md").read_text(encoding="utf-8"))
        return
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo, repo_type="model", exist_ok=True)
    info = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="draftsmith export")
    print(f"pushed to {info.commit_url}")


def log_artifact(folder: Path, name: str, *, project: str, mode: str) -> None:
    """Log the folder as a W&B artifact of type model, in the recipe's project and mode; offline where there is no login.

    An offline run and its copy of the files wait for `wandb sync` below ./wandb, or WANDB_DIR.
    """
    import wandb

    from ..train.log import wandb_mode

    mode = wandb_mode(mode, print)
    os.environ.setdefault("WANDB_DATA_DIR", str(Path(os.environ.get("WANDB_DIR", ".")).resolve() / "wandb"))
    run = wandb.init(project=project, job_type="export", mode=mode)
    artifact = wandb.Artifact(name, type="model")
    artifact.add_dir(str(folder))
    run.log_artifact(artifact)
    run.finish()
    print(f"W&B artifact {name} logged ({mode})")
