"""Token rows: ids as served, masks by what the target generates. Cases 1 and 2 of the design's list."""

import pytest
from tiny_chat import PLAIN, TAGGED, chat_tokenizer

from draftsmith.data.chat import (
    ChatFormat,
    DropReason,
    TokenRow,
    tokenise,
    tokenise_all,
    tokenise_each,
    tokenizer_hash,
    truncate,
)

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes ok"}]
TWO_TURNS = [*CHAT, {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]


def bits(row):
    assert isinstance(row, TokenRow), row
    return "".join("1" if flag else "0" for flag in row.loss_mask)


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_case_1_end_token_in_and_role_header_out(template):
    row = tokenise({"messages": CHAT}, chat_tokenizer(template), 64)
    words = chat_tokenizer().convert_ids_to_tokens(row.input_ids)
    assert words == ["user", "hi", "</s>", "assistant", "yes", "ok", "</s>"]
    assert bits(row) == "0000111"


def test_case_1_derived_mask_is_announced():
    said = []
    out = tokenise_all([{"messages": CHAT}] * 3, chat_tokenizer(), 64, say=said.append)
    assert [line for line in said if "no generation tags" in line] == said[:1]
    assert "prefix" in out.mask_source
    said.clear()
    tokenise_all([{"messages": CHAT}] * 3, chat_tokenizer(TAGGED), 64, say=said.append)
    assert said == ["supervised tokens marked by the generation tags of the template"]


def test_tags_that_mark_nothing_fall_back_to_the_prefix():
    template = PLAIN + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    said = []
    out = tokenise_all([{"messages": CHAT}], chat_tokenizer(template), 64, say=said.append)
    assert bits(out.rows[0]) == "0000111"
    assert "mark nothing" in said[0]


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_all_turns_or_the_last(template):
    tokenizer = chat_tokenizer(template)
    #      user hi </s> assistant yes ok </s> user w1 w2 </s> assistant w3 </s>
    assert bits(tokenise({"messages": TWO_TURNS}, tokenizer, 64)) == "00001110000011"
    assert bits(tokenise({"messages": TWO_TURNS}, tokenizer, 64, supervise="last")) == "00000000000011"


def test_what_the_generation_prompt_supplies_is_not_supervised():
    # The template puts "w0" (an empty thought) into the generation prompt and into its tagged span.
    template = TAGGED.replace("{{ m['content']", "{{ 'w0 ' + m['content']")
    template = template.replace("'assistant ' }}{% endif", "'assistant w0 ' }}{% endif")
    row = tokenise({"messages": CHAT}, chat_tokenizer(template), 64)
    assert len(row.input_ids) == 8
    assert bits(row) == "00000111"


def test_a_turn_that_the_template_rewrites_is_not_supervised():
    # Earlier answers lose their first word once they are history: they cannot be located, the last turn can.
    template = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ m['content'].split(' ')[1:] | join(' ') }}{% else %}{{ m['content'] }}{% endif %}{{ ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    row = tokenise({"messages": TWO_TURNS}, chat_tokenizer(template), 64)
    assert bits(row) == "0000000000011"


def test_filling_after_the_end_token_is_not_supervised():
    row = tokenise({"messages": CHAT}, chat_tokenizer(PLAIN.replace("' </s> '", "' </s> w9 '")), 64)
    assert bits(row) == "000001110"


def test_case_2_prompt_fills_the_window():
    long = {"messages": [{"role": "user", "content": "hi " * 200}, CHAT[1]]}
    assert tokenise(long, chat_tokenizer(), 64) is DropReason.PROMPT_FILLS_WINDOW
    out = tokenise_all([long, {"messages": CHAT}], chat_tokenizer(), 64)
    assert len(out.rows) == 1
    assert out.dropped == {DropReason.PROMPT_FILLS_WINDOW: 1}
    with pytest.raises(ValueError, match=r"max_length=64: all 2 rows were dropped \(2: the prompt fills max_length"):
        tokenise_all([long, long], chat_tokenizer(), 64)


def test_other_drop_reasons():
    tokenizer = chat_tokenizer()
    assert tokenise({"messages": CHAT[:1]}, tokenizer, 64) is DropReason.NO_SUPERVISED_TOKEN
    # max_length 5 leaves `yes` alone: no supervised token follows it
    assert tokenise({"messages": CHAT}, tokenizer, 5) is DropReason.ONE_SUPERVISED_TOKEN
    assert bits(tokenise({"messages": CHAT}, tokenizer, 6)) == "000011"


def test_generated_ids_are_taken_as_they_are():
    tokenizer = chat_tokenizer()
    chat = ChatFormat(tokenizer)
    prompt = chat.render(CHAT[:1], generation_prompt=True)
    answer = tokenizer.convert_tokens_to_ids(["<unk>", "ok", "</s>"])  # the text of <unk> would not give this id's word
    row = {"id": "a", "domain": "chat", "messages": CHAT, "prompt_ids": prompt, "answer_ids": answer}
    out = tokenise(row, chat, 64)
    assert out.input_ids == prompt + answer
    assert bits(out) == "0000111"


def test_earlier_turns_of_generated_rows():
    tokenizer = chat_tokenizer()
    prompt = ChatFormat(tokenizer).render(TWO_TURNS[:3], generation_prompt=True)
    answer = tokenizer.convert_tokens_to_ids(["w3", "</s>"])
    row = {"id": "a", "messages": TWO_TURNS, "prompt_ids": prompt, "answer_ids": answer, "earlier_spans": [[4, 7]]}
    assert bits(tokenise(row, tokenizer, 64)) == "00001110000011"
    assert bits(tokenise(row, tokenizer, 64, supervise="last")) == "00000000000011"


def test_prompt_ids_of_another_template_are_refused():
    tokenizer = chat_tokenizer()
    prompt = ChatFormat(tokenizer).render(CHAT[:1], generation_prompt=True)
    row = {"id": "a7", "messages": CHAT, "prompt_ids": [9, *prompt], "answer_ids": [6, 1]}
    with pytest.raises(ValueError, match="'a7'.*chat template at token 0"):
        tokenise(row, tokenizer, 64)


def test_truncation_cuts_both_alike():
    assert truncate([1, 2, 3], [False, True, True], 2) == ([1, 2], [False, True])
    with pytest.raises(AssertionError):
        truncate([1, 2, 3], [True], 2)


def test_base_model_without_template():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    row = tokenise({"messages": CHAT}, tokenizer, 64)
    assert tokenizer.convert_ids_to_tokens(row.input_ids) == ["hi", "yes", "ok", "</s>"]
    assert bits(row) == "0111"
    with pytest.raises(ValueError, match="one turn"):
        tokenise({"messages": TWO_TURNS}, tokenizer, 64)


def test_hashes_notice_template_arguments_and_vocabulary():
    plain = chat_tokenizer()
    assert ChatFormat(plain).template_hash != ChatFormat(plain, template_args={"enable_thinking": False}).template_hash
    assert ChatFormat(plain).template_hash != ChatFormat(chat_tokenizer(TAGGED)).template_hash
    before = tokenizer_hash(plain)
    plain(["hi", "hi yes"], padding=False, truncation=True, max_length=1)
    assert tokenizer_hash(plain) == before == tokenizer_hash(chat_tokenizer())
    plain.add_tokens(["new"])
    assert tokenizer_hash(plain) != before


@pytest.mark.target
def test_embedded_target_end_token_supervised_and_newline_not():
    from transformers import AutoTokenizer

    from draftsmith.models.config import TargetConfig
    from draftsmith.models.target import resolve_target

    tokenizer = AutoTokenizer.from_pretrained(resolve_target(TargetConfig()))
    row = tokenise({"messages": TWO_TURNS}, tokenizer, 128)
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert row.input_ids == tokenizer(text)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(row.input_ids)
    shown = [token if flag else "." for token, flag in zip(tokens, row.loss_mask, strict=True)]
    runs = "".join(shown).strip(".").split(".")
    assert [run for run in runs if run] == ["yesĠok<|im_end|>", "w3<|im_end|>"]


# Earlier answers lose their thought once they are history; the tags go around what is left of them.
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'assistant ' }}{% generation %}"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split(' ')[1:] | join(' ') }}{% endif %}{{ ' </s> ' }}"
    "{% endgeneration %}{% else %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


@pytest.mark.parametrize("supervise", ["all", "last"])
def test_a_tagged_turn_that_the_template_rewrote_is_not_supervised(supervise):
    # user hi </s> assistant ok </s> user w1 w2 </s> assistant w3 </s>: `yes` is gone, so `ok` was never said here
    row = tokenise({"messages": TWO_TURNS}, chat_tokenizer(FORGETFUL), 64, supervise=supervise)
    assert bits(row) == "0000000000011"


def test_generation_prompt_is_clipped_from_the_tags_of_a_turn_beside_a_rewritten_one():
    template = FORGETFUL.replace("{% generation %}", "{% generation %}{{ 'w0 ' }}").replace(
        "'assistant ' }}{% endif %}", "'assistant w0 ' }}{% endif %}"
    )
    row = tokenise({"messages": TWO_TURNS}, chat_tokenizer(template), 64)
    words = chat_tokenizer().convert_ids_to_tokens(row.input_ids)
    assert words[-4:] == ["assistant", "w0", "w3", "</s>"] and bits(row).endswith("0011")


def test_tags_that_miss_the_answer_drop_the_row_with_its_own_reason():
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{% generation %}{{ 'user ' + m['content'] + ' </s> ' }}"
        "{% endgeneration %}{% else %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    assert tokenise({"messages": CHAT}, chat_tokenizer(template), 64) is DropReason.TAGS_ELSEWHERE


def test_sources_of_the_mask_are_counted_and_drops_are_named():
    chat = ChatFormat(chat_tokenizer(TAGGED))
    prompt = chat.render(CHAT[:1], generation_prompt=True)
    rows = [
        {"id": "a", "messages": CHAT, "prompt_ids": prompt, "answer_ids": [6, 7, 1]},
        {"id": "b", "messages": CHAT},
        {"id": "c", "messages": CHAT},
        {"id": "d", "messages": CHAT[:1]},
        {"id": "e", "messages": CHAT, "prompt_ids": [9, *prompt], "answer_ids": [6, 1]},
        {"id": "f", "messages": CHAT, "prompt_ids": prompt, "answer_ids": None},
    ]
    out = tokenise_each(rows, chat, 64, keep_going=True)
    assert [row.id for row in out.rows] == ["a", "b", "c"]
    assert out.lost == [("d", DropReason.NO_SUPERVISED_TOKEN)] and out.dropped == {DropReason.NO_SUPERVISED_TOKEN: 1}
    assert [name for name, _ in out.broken] == ["e", "f"] and "chat template at token 0" in out.broken[0][1]
    assert out.mask_source == "the generation tags of the template (3 rows); the generated token ids (1 rows)"
    with pytest.raises(ValueError, match="'e'"):
        tokenise_each(rows, chat, 64)


def test_end_tokens_that_also_pad_stay_supervised_and_padding_does_not():
    from draftsmith.data.batch import collate

    tokenizer = chat_tokenizer(TAGGED)
    tokenizer.pad_token = tokenizer.eos_token
    long = tokenise({"messages": TWO_TURNS}, tokenizer, 64)
    short = tokenise({"messages": CHAT}, tokenizer, 64)
    batch = collate([long, short], 99, 3)
    assert bits(short) == "0000111" and short.input_ids[-1] == tokenizer.pad_token_id
    assert batch.lengths.tolist() == [14, 7] and batch.attention_mask.sum(1).tolist() == [14, 7]
    # row 1: anchors `yes` and `ok`; the end token is the last label, what follows it is none
    assert batch.anchors[1][batch.anchor_mask[1]].tolist() == [4, 5]
    assert batch.valid[1, :2].tolist() == [[True, True, False], [True, False, False]]
    assert batch.labels[1, 1, 0] == tokenizer.eos_token_id


@pytest.mark.parametrize("max_length", range(5, 14))
def test_ids_and_mask_are_cut_alike_at_every_length(max_length):
    whole = tokenise({"messages": TWO_TURNS}, chat_tokenizer(TAGGED), 64)
    row = tokenise({"messages": TWO_TURNS}, chat_tokenizer(TAGGED), max_length)
    if isinstance(row, DropReason):
        assert max_length < 6 and row is DropReason.ONE_SUPERVISED_TOKEN
        return
    assert row.input_ids == whole.input_ids[:max_length] and row.loss_mask == whole.loss_mask[:max_length]
