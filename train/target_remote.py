"""The frozen target behind a server: vLLM or SGLang compute the hidden states, this process holds the heads only.

What is asked of the server (docs/features.md has the commands):
- vllm: POST /v1/completions with `prompt` = token ids, max_tokens 1, return_token_ids; its hidden-state connector answers with
  kv_transfer_params.hidden_states_path, a safetensors file on a folder both sides see, with `hidden_states` [T, n+1, H] (the
  tapped layers in order, then the last layer before the final norm) and `token_ids` [T]. `PATH.lock`, where it exists, is held
  by the writer until the file is whole. Both files are removed when they are read.
- sglang: POST /generate with input_ids, max_new_tokens 1 and return_hidden_states; meta_info.hidden_states[0] is the prompt's,
  [T, (n+1) * H]: the tapped layers and then the last state after the final norm, joined. Stock SGLang returns the last state
  alone, which is refused with a word on it.
Answers are matched to requests by connection and checked against the token ids they carry: their order is of no account.

The local copy of the decoder layers stays on disk, for the self-test and the drafter's start.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..data.openai_client import OpenAIClient, ServerError
from ..models.config import TargetConfig
from ..models.facts import check_target, read_config, resolve_target
from ..models.target import Target, TargetFeatures, load_model, load_tokenizer

CONCURRENCY = 32


class RemoteTarget(Target):
    """A target whose states come from the server of `cfg`; embedding, norm and LM head are here, the layers on disk."""

    by_request = True

    def __init__(self, model: Any, tokenizer: Any, folder: str, cfg: TargetConfig, client: OpenAIClient, device: Any) -> None:
        super().__init__(model, tokenizer, folder)
        self.cfg, self.client = cfg, client
        self.describe(cfg)
        self._pool = ThreadPoolExecutor(client.concurrency, thread_name_prefix="states")
        self._device = torch.device(device)
        self._heads: dict[int, Tensor] = {}  # on the device, by the address of the weight here: a tied one once

    def _there(self, weight: Tensor) -> Tensor:
        key = weight.data_ptr()
        if key not in self._heads:
            self._heads[key] = weight.detach().to(self._device)
        return self._heads[key]

    @property
    def dtype(self) -> torch.dtype:
        """As in Target; asked for with every request, so nothing is copied for it."""
        return super().embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the states are handed over."""
        return self._device

    @property
    def embedding_weight(self) -> Tensor:
        """As in Target."""
        return self._there(super().embedding_weight)

    @property
    def lm_head_weight(self) -> Tensor:
        """As in Target."""
        return self._there(super().lm_head_weight)

    def states(self, requests: Mapping[str, Sequence[int]], tap_layers: tuple[int, ...]) -> dict[str, TargetFeatures]:
        """As in Target, from the server. Raises RuntimeError naming the request that failed or came back as another."""
        self.check_taps(tap_layers)
        jobs = {key: self._pool.submit(self._ask, key, list(tokens), tap_layers) for key, tokens in requests.items()}
        return {key: job.result() for key, job in jobs.items()}

    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        tap_layers: tuple[int, ...],
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """As in Target, for rows that are not packed."""
        assert position_ids is None
        lengths = [input_ids.shape[1]] * len(input_ids) if attention_mask is None else attention_mask.sum(1).tolist()
        rows = {str(i): ids[:length] for i, (ids, length) in enumerate(zip(input_ids.tolist(), lengths, strict=True))}
        found = self.states(rows, tap_layers)
        shape = (*input_ids.shape, self.hidden_size)
        taps = torch.zeros(*shape[:2], len(tap_layers) * self.hidden_size, dtype=self.dtype, device=self.device)
        last_hidden = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for row, length in enumerate(lengths):
            taps[row, :length], last_hidden[row, :length] = found[str(row)].taps, found[str(row)].last_hidden
        return TargetFeatures(taps, last_hidden)

    @torch.no_grad()
    def plain(self, tokens: Sequence[int]) -> Tensor:
        """As in Target: the layers are read from disk one after another."""
        ids = torch.tensor([list(tokens)])
        found = self.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
        return torch.stack([state[0] for state in found.hidden_states])

    @contextmanager
    def whole_layers(self, count: int) -> Iterator[None]:
        """See Target."""
        from accelerate.utils import align_module_device

        with contextlib.ExitStack() as stack:
            for layer in list(self.layers)[-count:]:
                for module in layer.modules():
                    stack.enter_context(align_module_device(module, "cpu"))
            yield

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """As in Target."""
        return super().logits(last_hidden.cpu()).to(last_hidden.device)

    # ---- one request ----------------------------------------------------------------------------------------------

    def _ask(self, key: str, tokens: list[int], tap_layers: tuple[int, ...]) -> TargetFeatures:
        try:
            read = self._vllm if self.cfg.server_kind == "vllm" else self._sglang
            states = read(key, tokens, len(tap_layers))
        except (ServerError, KeyError, TypeError, OSError, SafetensorError) as error:
            raise RuntimeError(f"target.server: no hidden states for row {key!r}: {error}") from error
        states = states.to(self.device, self.dtype)
        return TargetFeatures(states[:, :-1].flatten(1), states[:, -1])

    def _vllm(self, key: str, tokens: list[int], taps: int) -> Tensor:
        """[T, n+1, H]."""
        body = {"model": self.client.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        answer = self.client.post("/v1/completions", body, key=key)
        where = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if where is None:
            raise ServerError("the answer has no kv_transfer_params.hidden_states_path: start vLLM with extract_hidden_states")
        found = _read_and_remove(Path(where))
        self._same(key, found["token_ids"].tolist(), tokens)
        states = found["hidden_states"]
        if tuple(states.shape) != (len(tokens), taps + 1, self.hidden_size):
            raise ServerError(
                f"it sent states of shape {tuple(states.shape)}, not {(len(tokens), taps + 1, self.hidden_size)}: the server's "
                "eagle_aux_hidden_state_layer_ids must be the tapped layers plus 1 and the number of layers"
            )
        norm = self.final_norm
        if norm is None:
            raise ServerError("the target's final norm is not known, so vLLM's last state cannot be used")
        states[:, -1] = _normed(norm, states[:, -1], self.dtype)
        return states

    def _sglang(self, key: str, tokens: list[int], taps: int) -> Tensor:
        """[T, n+1, H]."""
        body = {
            "input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_hidden_states": True,
            "rid": key,
        }  # fmt: skip
        answer = self.client.post("/generate", body, key=key)
        said = answer["meta_info"]
        if "prompt_token_ids" in said:
            self._same(key, said["prompt_token_ids"], tokens)
        states = torch.tensor(said["hidden_states"][0], dtype=torch.float32)
        width = states.shape[-1] // self.hidden_size
        if tuple(states.shape) != (len(tokens), (taps + 1) * self.hidden_size):
            lacks = "; stock SGLang returns the last state only, so it serves no taps" if width == 1 else ""
            raise ServerError(
                f"it sent states of shape {tuple(states.shape)}, not {(len(tokens), (taps + 1) * self.hidden_size)}{lacks}. A "
                "prefix cache cuts states off: start it with --disable-radix-cache"
            )
        return states.unflatten(-1, (taps + 1, self.hidden_size))

    def _same(self, key: str, found: list[int], asked: list[int]) -> None:
        if found != asked:
            raise RuntimeError(f"target.server: the states of row {key!r} are those of other tokens ({found[:4]}..., not "
                               f"{asked[:4]}...)")  # fmt: skip


def _read_and_remove(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that its writer may still hold locked; removes it and its lock file."""
    lock = Path(f"{path}.lock")
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # sleeps until the writer is done
            found = load_file(path)
    else:
        found = load_file(path)
    for part in (lock, path):
        with contextlib.suppress(OSError):
            part.unlink()
    return found


@torch.no_grad()
def _normed(norm: nn.Module, states: Tensor, dtype: torch.dtype) -> Tensor:
    weight = next(norm.parameters(), None)
    return norm(states.to(dtype) if weight is None else states.to(weight)).to(states)


def load_remote(cfg: TargetConfig, device: str | torch.device = "cpu") -> RemoteTarget:
    """The target of `cfg` behind `cfg.server`: its heads in memory, its layers left on disk where they are.

    Raises ValueError when the checkpoint cannot be read, or the server does not serve one model.
    """
    assert cfg.server is not None
    client = OpenAIClient(cfg.server, concurrency=CONCURRENCY)
    hf_config = read_config(cfg)
    check_target(hf_config)
    if cfg.server_kind == "vllm":
        try:
            client.choose_model()
        except ServerError as error:
            raise ValueError(f"target.server: {error}") from error
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(hf_config)
    layers = next(name for name, module in model.named_modules() if module is Target.find_layers(model))
    parent = layers.rpartition(".")[0]
    places = {f"{parent}.{name}": "cpu" for name, _ in model.get_submodule(parent).named_children()} | {layers: "disk"}
    places |= {name: "cpu" for name, _ in model.named_children() if not layers.startswith(f"{name}.")}
    # safetensors checkpoints are read in place; the folder takes what has to be converted, for as long as this process lives
    offload = tempfile.mkdtemp(prefix="draftsmith-layers-")
    atexit.register(shutil.rmtree, offload, ignore_errors=True)
    with _quiet():
        model = load_model(cfg, device_map=places, offload_folder=offload)
    return RemoteTarget(model, load_tokenizer(cfg), resolve_target(cfg), cfg, client, device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remark that layers stay on disk: that is the point."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
