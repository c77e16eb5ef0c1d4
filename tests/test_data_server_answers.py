"""Regeneration through a server: the runtime's rows token for token, under faults, with and without token ids, resumable."""

import json
import random
from dataclasses import replace

import pytest
from http_serving import FaultyProxy, tiny_server
from tiny_chat import chat_target

from draftsmith.data.chat import ChatFormat, DropReason, tokenise
from draftsmith.data.config import DataConfig, GenerationConfig
from draftsmith.data.openai_client import OpenAIClient, Reply, ServerError
from draftsmith.data.regenerate import regenerate
from draftsmith.data.server_answers import ServerGenerator
from draftsmith.data.source import Prompt
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.engine import Request

PROMPTS = [
    *(Prompt(f"p{i}", "chat", (f"w{i} hi w{2 * i}",)) for i in range(9)),
    Prompt("two", "math", ("hi", "w1 w2", "ok"), system="w5"),
    Prompt("three", "math", ("w7", "yes")),
]
CONFIG = DataConfig(max_length=64, generation=GenerationConfig(max_new_tokens=12, batch_size=4, seed=3))
GREEDY = replace(CONFIG, generation=replace(CONFIG.generation, temperature=0.0))


@pytest.fixture(scope="module")
def target():
    return chat_target()


@pytest.fixture(scope="module")
def server(target):
    with tiny_server(target, slots=4) as found:
        yield found


def generator(target, url, *, logprobs=False, **settings):
    settings = {"model": "tiny", "concurrency": 3, "timeout": 0.5, "backoff": 0.01, "retries": 40, **settings}
    return ServerGenerator(OpenAIClient(url, **settings), ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids), logprobs)


def run(target, folder, config=CONFIG, prompts=PROMPTS, **options):
    said = []
    by = {"answered_by": {"by": "server", "model": "tiny"}} if "engine" in options else {}
    answers = regenerate(prompts, config, target, folder, name="tiny", progress=False, say=said.append, **by, **options)
    return answers, said


@pytest.mark.parametrize("config", [GREEDY, CONFIG], ids=["greedy", "sampled"])
def test_the_server_gives_the_runtimes_rows(target, server, tmp_path, config):
    ours = run(target, tmp_path / "ours", config)[0].rows
    theirs = run(target, tmp_path / "theirs", config, engine=generator(target, server.url, timeout=30))[0].rows
    assert theirs == ours
    assert all(tokenise(row, target.tokenizer, 64).num_supervised >= 2 for row in theirs if len(row["answer_ids"]) > 1)


def test_nothing_is_lost_or_doubled_when_the_server_misbehaves(target, server, tmp_path):
    numbers = random.Random(5)

    def plan(number, body):
        return numbers.choice(["429", "500", "hang", "cut", "short"]) if numbers.random() < 0.4 else None

    ours = run(target, tmp_path / "ours")[0].rows
    with FaultyProxy(server.url, plan, hang_s=1.5) as proxy:
        answers, said = run(target, tmp_path / "theirs", engine=generator(target, proxy.url, timeout=1.0))
        assert proxy.most <= 3
    assert answers.rows == ours and answers.generated == len(PROMPTS)
    assert "repetitions (" in said[-1]
    lines = (tmp_path / "theirs" / "answers.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == sorted(prompt.id for prompt in PROMPTS)


def test_without_token_ids_the_text_is_tokenised_again(target, server, tmp_path):
    ours = run(target, tmp_path / "ours", GREEDY)[0].rows
    with FaultyProxy(server.url, lambda number, body: "no ids") as proxy:
        answers, said = run(target, tmp_path / "theirs", GREEDY, engine=generator(target, proxy.url, timeout=30))
    unknown = target.tokenizer.unk_token_id
    stable = [row for row in ours if unknown not in row["answer_ids"]]
    assert answers.rows == stable and "came as text and were tokenised again" in said[-1]


def test_text_that_does_not_tokenise_back_is_dropped_with_its_reason_and_not_asked_again(target, tmp_path):
    class Scripted:  # the client's part only: what a server without ids answered
        concurrency = 1
        asked = 0

        def map(self, requests, *, logprobs):
            for index, (key, _, _) in enumerate(requests):
                self.asked += 1
                yield index, Reply(text={"p0": "hi  yes", "p1": "hi yes"}[key], finish_reason="stop", completion_tokens=3)

    client, prompts = Scripted(), PROMPTS[:2]
    engine = ServerGenerator(client, ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids))
    answers, said = run(target, tmp_path / "a", prompts=prompts, engine=engine)
    assert [row["id"] for row in answers.rows] == ["p1"] and answers.rows[0]["answer_ids"] == [5, 6, 1]
    assert answers.skipped == {DropReason.NOT_RETOKENISED: 1} and "1 answers could not be used" in said[-1]
    (dropped,) = (tmp_path / "a" / "dropped.jsonl").read_text().splitlines()
    assert json.loads(dropped)["id"] == "p0" and "tokenise back" in json.loads(dropped)["reason"]
    again, said = run(target, tmp_path / "a", prompts=prompts, engine=engine)
    assert client.asked == 2 and again.rows == answers.rows and again.skipped == answers.skipped
    assert "all 1 reused" in said[-1]


@pytest.mark.parametrize(
    ("reply", "ids"),
    [
        (Reply(text="hi yes", finish_reason="stop", completion_tokens=3), [5, 6, 1]),
        (Reply(text="hi yes", finish_reason="stop", completion_tokens=2), [5, 6, 1]),  # a count without the end token
        (Reply(text="hi yes", finish_reason="stop", completion_tokens=None), [5, 6, 1]),
        (Reply(text="hi yes", finish_reason="stop", completion_tokens=5), "dropped"),
        (Reply(text="hi what", finish_reason="stop", completion_tokens=3), "dropped"),  # a word that the tokenizer lacks
        (Reply(text="", finish_reason="stop", completion_tokens=1), [1]),
        (Reply(token_ids=[5, 6, 1], finish_reason="stop"), [5, 6, 1]),
        (Reply(token_ids=[5, 6], finish_reason="stop"), [5, 6, 1]),  # ids without the end token
        (Reply(token_ids=[5, 6, 7, 5], finish_reason="length"), [5, 6, 7, 5]),
        (Reply(token_ids=[5, 6], finish_reason="length"), "failed"),  # the server's context ended
        (Reply(token_ids=[5, 1, 7], finish_reason="stop"), "failed"),
        (Reply(token_ids=[5, 6, 7, 5, 5], finish_reason="length"), "failed"),
        (Reply(token_ids=[5, 1], prompt_ids=[9], finish_reason="stop"), "failed"),
    ],
)
def test_what_becomes_of_a_reply(target, reply, ids):
    engine = ServerGenerator(None, ChatFormat(target.tokenizer, eos_ids=target.eos_token_ids))
    done = engine._completed(Request("x", [2, 3], SamplingParams(max_new_tokens=4)), reply)
    assert (done.token_ids or done.finish_reason) == ids


def test_logprobs_are_kept_where_asked_for(target, server, tmp_path):
    rows = run(target, tmp_path / "a", engine=generator(target, server.url, logprobs=True, timeout=30))[0].rows
    assert all(len(row["answer_logprobs"]) == len(row["answer_ids"]) for row in rows)
    assert "answer_logprobs" not in run(target, tmp_path / "b")[0].rows[0]


def test_a_failed_answer_is_asked_for_again_by_the_next_run(target, server, tmp_path):
    ours = run(target, tmp_path / "ours")[0].rows
    broken = {"on": True}

    def plan(number, body):
        first_of_three = target.tokenizer.convert_tokens_to_ids(["user", "w7", "</s>", "assistant"])
        return "500" if broken["on"] and body["prompt"] == first_of_three else None

    with FaultyProxy(server.url, plan) as proxy:
        engine = generator(target, proxy.url, retries=1, timeout=30)
        with pytest.raises(RuntimeError, match="1 answers failed, the others are written.*three: .*injected 500"):
            run(target, tmp_path / "a", engine=engine)
        broken["on"] = False
        answers, _ = run(target, tmp_path / "a", engine=engine)
    assert answers.rows == ours and answers.reused == len(PROMPTS) - 1


def test_a_server_that_is_gone_ends_the_run(target, server, tmp_path):
    many = [Prompt(f"q{i}", "chat", (f"w{i}",)) for i in range(40)]
    with FaultyProxy(server.url, lambda number, body: "500" if number > 10 else None) as proxy:
        with pytest.raises(ServerError, match="8 requests in a row failed"):
            run(target, tmp_path / "a", prompts=many, engine=generator(target, proxy.url, retries=0, timeout=30))
        assert len(proxy.seen) < 30
    answers, _ = run(target, tmp_path / "a", prompts=many, engine=generator(target, server.url, timeout=30))
    assert [row["id"] for row in answers.rows] == [prompt.id for prompt in many] and answers.reused >= 8


def test_who_began_goes_on_and_finished_rows_serve_everybody(target, server, tmp_path):
    with FaultyProxy(server.url, lambda number, body: "500" if number > 3 else None) as proxy, pytest.raises(RuntimeError):
        run(target, tmp_path / "a", engine=generator(target, proxy.url, retries=0, timeout=30))
    with pytest.raises(ValueError, match='begun by {"by": "server", "model": "tiny"}, to be continued by {"by": "runtime"}'):
        run(target, tmp_path / "a")
    finished = run(target, tmp_path / "a", engine=generator(target, server.url, timeout=30))[0].rows
    assert run(target, tmp_path / "a")[0].rows == finished  # as training asks for them
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["answered_by"] == {"by": "server", "model": "tiny"} and manifest["generation"]["temperature"] == 1.0


def test_all_sampling_settings_are_written_into_the_request(target, server, tmp_path):
    with FaultyProxy(server.url, lambda number, body: None) as proxy:
        run(target, tmp_path / "a", prompts=PROMPTS[:1], engine=generator(target, proxy.url, timeout=30))
    (body,) = proxy.seen
    assert body["temperature"] == 1.0 and body["top_p"] == 1.0 and body["top_k"] == -1 and body["min_p"] == 0.0
    assert body["repetition_penalty"] == 1.0 and body["max_tokens"] == 12 and body["return_token_ids"] is True
    assert body["prompt"] == ChatFormat(target.tokenizer).render(
        [{"role": "user", "content": PROMPTS[0].turns[0]}], generation_prompt=True
    )
