"""Whether the target wrote the answers: exact cases, made-up laws, and the real target with its own and with foreign text."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_chat import chat_tokenizer

from draftsmith.data import checks
from draftsmith.data.chat import ChatFormat, Tokenised, TokenRow, tokenise_each
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.findings import Subject
from draftsmith.data.probe import critical, distance, probe, spread, target_logits, transform, truncated
from draftsmith.data.source import Prompt

# ---- the target's word --------------------------------------------------------------------------------------------


def test_the_law_that_is_read_is_the_law_that_was_sampled():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = torch.softmax(logits, -1)[0]
    two = [float(p[0] / (p[0] + p[1])), float(p[1] / (p[0] + p[1])), 0.0, 0.0]
    assert truncated(logits, 1.0)[0].tolist() == pytest.approx(p.tolist())
    assert truncated(logits, 1.0, top_k=2)[0].tolist() == pytest.approx(two)
    assert truncated(logits, 1.0, top_p=float(p[0]) + 0.01)[0].tolist() == pytest.approx(two)
    assert truncated(logits, 0.5)[0].tolist() == pytest.approx(torch.softmax(2 * logits, -1)[0].tolist())


def test_transform_is_uniform_under_the_law_ties_included():
    law = torch.tensor([0.2, 0.3, 0.3, 0.2])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(law, 20000, replacement=True, generator=generator)
    values = transform(law.expand(20000, 4), tokens, generator)
    assert float(values[(tokens == 1) | (tokens == 2)].max()) <= 0.6 <= float(values[tokens == 0].min()) + 1e-6
    assert distance(values) < 0.015
    assert distance(torch.tensor([0.5])) == 0.5 and math.isnan(distance(torch.zeros(0)))


def nobody() -> Subject:
    """A subject without rows, for its limits."""
    chat = ChatFormat(chat_tokenizer())
    return Subject(config=DataConfig(), chat=chat, source=[], tokenised=Tokenised([]), vocab_size=50, target={})


def fake(count: int, seed: int, temperature: float, scale: float = 2.0) -> tuple[list[TokenRow], dict[str, torch.Tensor]]:
    """Rows sampled from random laws at a temperature (0: greedy), with the logits of their supervised tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, logits = [], {}
    for i in range(count):
        found = scale * torch.randn(200, 50, generator=generator)
        law = torch.softmax(found / (temperature or 1.0), -1)
        tokens = torch.multinomial(law, 1, generator=generator)[:, 0] if temperature else found.argmax(-1)
        rows.append(TokenRow(f"r{i}", "chat", [0, *tokens.tolist()], [False] + [True] * 200))
        logits[f"r{i}"] = found
    return rows, logits


@pytest.mark.parametrize(
    "made_at, said, refused",
    [
        (1.0, 1.0, False),
        (0.7, 0.7, False),
        (0.0, 0.0, False),
        (0.7, 1.0, True),
        (1.0, 0.7, True),
        (0.0, 1.0, True),
        (1.0, 0.0, True),
    ],  # fmt: skip
)
def test_probe_tells_temperatures_apart(made_at, said, refused):
    rows, logits = fake(4, 1, made_at)
    found = probe(rows, lambda row: logits[row.id], [said] * 4)
    subject = nobody()
    assert bool(list(checks.check_probe(subject, found))) == refused
    assert found.sampled_tokens + found.greedy_tokens == 800


def test_probe_finds_text_of_another_model_and_names_the_worst_row():
    rows, logits = fake(4, 2, 1.0)
    generator = torch.Generator().manual_seed(9)
    logits = {name: found + 1.5 * torch.randn(found.shape, generator=generator) for name, found in logits.items()}
    found = probe(rows, lambda row: logits[row.id], [1.0] * 4)
    subject = nobody()
    [finding] = checks.check_probe(subject, found)
    assert finding.level == "error" and "did not sample this text" in finding.reason and finding.rows[0].startswith("'r")
    assert found.z > 5 and found.excess > 0.2 and found.distance > critical(800)


def test_few_tokens_refuse_nobody():
    rows, logits = fake(1, 3, 0.0)
    short = [TokenRow("r0", "chat", rows[0].input_ids[:12], rows[0].loss_mask[:12])]
    found = probe(short, lambda row: logits[row.id][:11], [1.0])
    assert not list(checks.check_probe(nobody(), found))


def test_rows_are_spread_evenly():
    rows = [TokenRow(str(i), "chat", [1], [True]) for i in range(10)]
    assert [row.id for row in spread(rows, 2)] == ["2", "7"]
    assert len(spread(rows, 99)) == 10 and spread([], 3) == []


# ---- the real target ----------------------------------------------------------------------------------------------

PROSE = (
    "The harbour master had kept the same ledger since the war, and on wet evenings he would read from it aloud to "
    "whoever sat nearest the stove. Herring, coal, a crate of oranges that burst on the quay; the handwriting leaned "
    "more with each decade. Nobody interrupted him. When the new bridge opened, the ferries stopped and so did the "
    "entries, except for one line a year, on the anniversary, in green ink.",
    "Sourdough punishes impatience. My first loaf could have propped a door, my second had a cavern where the crumb "
    "belongs, and only after I stopped watching the clock and began poking the dough did anything edible come out of "
    "that oven. It should wobble like a full wineskin before you shape it; recipes never say so, bakers always do.",
    "Glaciers do not creep evenly. Meltwater reaches the bed through shafts, lifts the ice by a hand's breadth, and "
    "for a few hours in July the whole tongue slides twice as fast. Instruments frozen into the surface show it as a "
    "sawtooth: slack each morning, taut by four. Farmers downstream set their sluices by the same rhythm without ever "
    "having seen a graph.",
    "Counterpoint began as a rule of thumb for monks who wished to sing at once without quarrelling. Keep the voices "
    "apart, let them meet on a fifth, forbid the leap that startles sleepers in the choir. Two hundred years on, "
    "somebody noticed that the prohibitions, obeyed strictly, produced not peace but longing.",
)


@pytest.mark.slow
@pytest.mark.target
def test_real_target_knows_its_own_answers(smollm2, tmp_path):
    """Own answers pass, sampled and greedy; prose of others, and answers read at another temperature, do not."""
    from draftsmith.data.regenerate import regenerate

    topics = ("an old harbour", "baking bread", "a glacier", "music of monks", "a lost key", "bees", "the sea", "an exam")
    prompts = [Prompt(f"p{i}", "chat", (f"Write a short text about {topic}.",)) for i, topic in enumerate(topics)]
    config = DataConfig(max_length=200, generation=GenerationConfig(max_new_tokens=120, batch_size=8, greedy_share=0.3, seed=3))
    chat = ChatFormat(smollm2.tokenizer, eos_ids=smollm2.eos_token_ids)
    answers = regenerate(prompts, config, smollm2, tmp_path / "a", name="t", say=lambda text: None, progress=False)
    rows = tokenise_each(answers.rows, chat, 200).rows
    read = lambda row: target_logits(smollm2, row)  # noqa: E731
    temperatures = [row["temperature"] for row in answers.rows]
    assert 0.0 in temperatures and 1.0 in temperatures
    subject = nobody()
    own = probe(rows, read, temperatures)
    assert not list(checks.check_probe(subject, own)) and own.agreement > 0.98 and abs(own.z) < 4

    prose = [
        {"id": f"g{i}", "messages": [{"role": "user", "content": prompts[i].turns[0]}, {"role": "assistant", "content": text}]}
        for i, text in enumerate(PROSE)
    ]
    foreign = probe(tokenise_each(prose, chat, 200).rows, read, [1.0] * len(prose))
    [finding] = checks.check_probe(subject, foreign)
    assert "did not sample this text" in finding.reason and foreign.z > 6
    greedy = probe(tokenise_each(prose, chat, 200).rows, read, [0.0] * len(prose))
    [finding] = checks.check_probe(subject, greedy)
    assert "another model's text" in finding.reason and greedy.agreement < 0.7
    sampled = [row for row, temperature in zip(rows, temperatures, strict=True) if temperature]
    assert list(checks.check_probe(subject, probe(sampled, read, [0.7] * len(sampled)))), "temperature 1 read as of 0.7"
