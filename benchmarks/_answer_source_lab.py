"""The sources of answers that answer_source.py compares, made equal in prompts and tokens, and their training runs.

Rows of all sources are `TokenRow`s of one answer; a row of each source has the same id, prompt and number of answer tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from _objectives_lab import Lab, Record, Sizes, one_answer

from draftsmith.data import doctor
from draftsmith.data.chat import ChatFormat, Tokenised, TokenRow, tokenise_all
from draftsmith.data.checks import check_probe
from draftsmith.data.config import DataConfig
from draftsmith.data.features import rows_hash
from draftsmith.data.findings import Subject
from draftsmith.data.manifest import target_identity
from draftsmith.data.prompts.passages import passages
from draftsmith.data.regenerate import read_answers, regenerate
from draftsmith.data.schema import Prompt, to_prompt
from draftsmith.data.source import check_overlap
from draftsmith.losses.config import ObjectiveConfig
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.engine import Engine
from draftsmith.runtime.variants import default_layers, skip_layers
from draftsmith.train import stage
from draftsmith.train.prompts import heldout_prompts

TARGET, WEAKER, TRUNCATED, PROSE = "target", "weaker", "truncated", "prose"
TRUNCATION = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
LEFT_OUT = 0.1  # share of the target's layers that the weaker model lacks
SHORTEST = 8  # answer tokens: a prompt with a shorter answer in some source is left out of all


def cut(row: TokenRow, tokens: int) -> TokenRow:
    """A row of one answer with the first `tokens` of it."""
    end = row.loss_mask.index(True) + tokens
    return dataclasses.replace(row, input_ids=row.input_ids[:end], loss_mask=row.loss_mask[:end])


def equal_answers(sources: Mapping[str, Sequence[TokenRow]], shortest: int = SHORTEST) -> dict[str, list[TokenRow]]:
    """The prompts that every source answered with `shortest` tokens at least, each answer cut to the shortest of its prompt.

    The length of another source's answer is independent of what the target says next, so the cut leaves the law of each
    remaining token of the target as it was. Order of the first source. Raises ValueError for a prompt that two sources
    rendered differently, and when no prompt is left.
    """
    by_id = {name: {row.id: row for row in rows if one_answer(row)} for name, rows in sources.items()}
    first = next(iter(by_id.values()))
    out: dict[str, list[TokenRow]] = {name: [] for name in sources}
    for key, row in first.items():
        found = {name: rows[key] for name, rows in by_id.items() if key in rows}
        start = row.loss_mask.index(True)
        for name, other in found.items():
            if other.loss_mask.index(True) != start or other.input_ids[:start] != row.input_ids[:start]:
                raise ValueError(f"prompt {key!r}: {name!r} answered other token ids than {next(iter(by_id))!r}")
        tokens = min(other.num_supervised for other in found.values())
        if len(found) == len(by_id) and tokens >= shortest:
            for name, other in found.items():
                out[name].append(cut(other, tokens))
    if not next(iter(out.values())):
        raise ValueError(f"answers: no prompt has {shortest} answer tokens in each of {', '.join(sources)}")
    return out


def prose_rows(rows: Sequence[TokenRow], prompts: Sequence[Prompt], texts: Sequence[str], encode: Callable[[str], list[int]],
               end: int) -> list[TokenRow]:  # fmt: skip
    """In place of each row's answer the next of `texts` and the end token; never a text that the prompt itself shows."""
    out, place = [], 0
    for row, prompt in zip(rows, prompts, strict=True):
        while texts[place % len(texts)] in prompt.turns[0]:
            place += 1
        answer, head = [*encode(texts[place % len(texts)]), end], row.input_ids[: row.loss_mask.index(True)]
        place += 1
        mask = [False] * len(head) + [True] * len(answer)
        out.append(TokenRow(row.id, row.domain, head + answer, mask))
    return out


class SourceLab(Lab):
    """A Lab that trains on the answers of one source; `of` gives that of another, with the same held-out prompts and texts.

    The drafter's vocabulary is chosen from the rows that it is trained on, as the trainer does. rows: by source.
    """

    def __init__(
        self, folder: Path, sizes: Sizes, target: str, data: Path | None, say: Callable[[str], None], sources: Sequence[str]
    ) -> None:
        self.sources, self.source = list(sources), TARGET
        self.rows: dict[str, list[TokenRow]] = {}
        self.layers: tuple[int, ...] = ()
        super().__init__(folder, sizes, target, data, say)
        self.coverage = self._coverage()

    def of(self, source: str) -> SourceLab:
        """The lab of another source; features are computed at the first time and kept."""
        if source == self.source:
            return self
        twin = copy.copy(self)
        twin.source, rows = source, self.rows[source]
        parts = self.parts(ObjectiveConfig(), self.sizes.steps, 0)
        twin.rows_hash = rows_hash(rows)
        twin.setup = stage.build_setup(parts, self.target, rows, self.folder / source, say=self.say)
        twin.validation = twin.setup.validation
        twin.coverage = twin._coverage()
        return twin

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _rows(self, data: Path | None) -> list[TokenRow]:
        """The target's rows; makes those of all sources."""
        own = [row for row in super()._rows(data) if one_answer(row)]
        prompts = self._asked((data or self.folder) / "answers" / "answers.jsonl", own)
        makers = {WEAKER: self._weaker, TRUNCATED: self._truncated, PROSE: self._prose}
        found = {TARGET: own} | {name: makers[name](own, prompts) for name in self.sources if name != TARGET}
        self.rows = equal_answers(found)
        tokens = sum(row.num_supervised for row in self.rows[TARGET])
        self.say(f"{len(self.rows[TARGET])} of {len(own)} prompts in every source, {tokens} answer tokens in each")
        return self.rows[TARGET]

    def _asked(self, path: Path, own: Sequence[TokenRow]) -> list[Prompt]:
        """The prompts of the target's rows. Raises ValueError where one is too close to a held-out one."""
        by_id = {row["id"]: row for row in read_answers(path)}
        prompts = [to_prompt({**by_id[row.id], "messages": by_id[row.id]["messages"][:-1]}) for row in own]
        check_overlap(prompts, heldout_prompts("builtin"), near=DataConfig().doctor.max_overlap)
        return prompts

    def _answers(self, prompts: Sequence[Prompt], config: DataConfig, name: str, **answering: Any) -> list[TokenRow]:
        """Rows of `regenerate` under the folder of a source."""
        self.say(f"{name}: {len(prompts)} answers")
        answers = regenerate(
            prompts, config, self.target, self.folder / name / "answers", name=self.target_cfg.name, say=self.say,
            progress=False, **answering,
        )  # fmt: skip
        chat = ChatFormat(self.target.tokenizer, eos_ids=self.target.eos_token_ids)
        return tokenise_all(answers.rows, chat, config.max_length, say=self.say).rows

    def config(self, **generation: Any) -> DataConfig:
        """The data section of a source."""
        data = self.parts(ObjectiveConfig(), self.sizes.steps, 0).data
        return dataclasses.replace(data, generation=dataclasses.replace(data.generation, **generation))

    def _weaker(self, own: Sequence[TokenRow], prompts: Sequence[Prompt]) -> list[TokenRow]:
        """The target without the tenth of its layers that changes its input least, sampled at temperature 1, untruncated."""
        text = torch.tensor([own[0].input_ids])
        self.layers = default_layers(self.target.model, text, max(1, round(LEFT_OUT * self.target.num_layers)))

        def engine() -> Engine:
            decoder = Decoder.from_target(skip_layers(self.target.model, self.layers), dtype=torch.bfloat16)
            slots, room = self.sizes.slots, self.sizes.max_length
            return Engine(decoder, slots=slots, max_context=room, eos_ids=self.target.eos_token_ids)

        by = {"by": "other model", "layers": list(self.layers)}
        return self._answers(prompts, self.config(), WEAKER, engine=engine, answered_by=by)

    def _truncated(self, own: Sequence[TokenRow], prompts: Sequence[Prompt]) -> list[TokenRow]:
        """The target at T=0.7, top-p 0.8, top-k 20."""
        return self._answers(prompts, self.config(**TRUNCATION), TRUNCATED)

    def _prose(self, own: Sequence[TokenRow], prompts: Sequence[Prompt]) -> list[TokenRow]:
        """Hand-written passages of the built-in rewriting prompts, at prompts that do not show them."""

        def encode(text: str) -> list[int]:
            return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])

        rows = prose_rows(own, prompts, [text for _, text in passages()], encode, self.target.eos_token_ids[0])
        return [cut(row, min(row.num_supervised, self.sizes.answer)) for row in rows]

    # ---- what the doctor says ---------------------------------------------------------------------------------------

    def examine(self, said: str) -> Record:
        """The doctor's probe of this source's rows: what it measures, and the refusal or None.

        said: the settings that the rows claim, "own" (as they were made) or "target" (temperature 1, untruncated).
        """
        truncated = said == "own" and self.source == TRUNCATED
        config, rows = self.config(**(TRUNCATION if truncated else {})), self.rows[self.source]
        source = [{"id": row.id, "temperature": config.generation.temperature} for row in rows]
        identity = target_identity(self.target, name=self.target_cfg.name, revision=None)
        subject = Subject(
            config=config, chat=ChatFormat(self.target.tokenizer, eos_ids=self.target.eos_token_ids), source=source,
            tokenised=Tokenised(rows), vocab_size=self.target.vocab_size, target=identity,
        )  # fmt: skip
        found = doctor.probe_rows(subject, self.target, config.doctor.probe_rows)
        assert found is not None
        refusals = [finding.reason for finding in check_probe(subject, found)]
        plain = {key: value for key, value in found.plain().items() if key in ("distance", "excess", "z", "sampled_tokens")}
        return {**plain, "refused": refusals[0] if refusals else None}

    def _coverage(self) -> float:
        """Share of the tokens of the held-out texts that this source's draft vocabulary holds."""
        ids = self.setup.heads.draft_ids
        assert ids is not None
        known = set(ids.tolist())
        tokens = chain.from_iterable(
            (token for token, flag in zip(row.input_ids, row.loss_mask, strict=True) if flag) for row in self.texts
        )
        flags = [token in known for token in tokens]
        return sum(flags) / max(len(flags), 1)
