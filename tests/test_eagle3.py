"""EAGLE-3 drafters: every layout reads as the same drafter, its frame is the published one, and decoding stays lossless."""

from __future__ import annotations

import pytest
import torch
from eagle3 import IDS, TAPS, flat_config, heads, speculators_config, tensors, tiny_eagle3, write
from serving import decoder, plain, prompts, requests

from draftsmith.models.export.eagle3 import load_eagle3, read_eagle3_config
from draftsmith.models.export.importers import read
from draftsmith.models.target import Target
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.eagle3 import Eagle3Proposer
from draftsmith.runtime.engine import Engine
from draftsmith.runtime.proposers import ProposerSource, draft_slots, tap_layers
from draftsmith.runtime.schedule import FixedLength
from tiny import tiny_model


def chain(drafter, rope, text, taps, count, forced=None):
    """Greedy drafts after `text` (its last token the anchor), or logits along the `forced` ones, anew from the definition.

    taps [len(text) - 1, n*H]: entry t = (token t + 1, state t); each further entry is (the last draft, the last output).
    """
    cfg, group = drafter.cfg, drafter.cfg.shape.num_heads // drafter.cfg.shape.num_kv_heads
    tokens, states, found, laws = list(text[1:]), drafter.fuse(taps), [], []
    for _ in range(count):
        places = torch.arange(len(tokens))
        x, embeds = states, drafter.embed_tokens(torch.tensor(tokens))
        for i, layer in enumerate(drafter.layers):
            inputs, residual = layer.inputs(embeds if i == 0 else None, x)
            query, key, value = layer.self_attn.project(inputs, rope(places))
            scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(group, 1)) * cfg.shape.head_dim**-0.5
            scores = scores.masked_fill(places[:, None] < places, -torch.inf)
            out = torch.einsum("hts,shd->thd", scores.softmax(-1), value.repeat_interleave(group, 1))
            x = layer.finish(out, residual)
        state, logits = drafter.outputs(x[-1])
        best = int(logits.argmax())
        found.append(best if drafter.draft_ids is None else int(drafter.draft_ids[best]))
        laws.append(logits)
        tokens.append(found[-1] if forced is None else forced[len(found) - 1])
        states = torch.cat((states, state[None]))
    return found, torch.stack(laws)


class Watched(Eagle3Proposer):
    """Compares every draft with the definition, on taps computed by transformers."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.texts, self.compared = {}, 0

    def begin(self, row, prompt, taps, start=0):
        self.texts[row] = list(prompt)
        super().begin(row, prompt, taps, start)

    def propose(self, rows, anchors, sampling, max_slots):
        proposal = super().propose(rows, anchors, sampling, max_slots)
        for i, row in enumerate(rows):
            text = self.texts[row]
            if len(text) == int(sampling.positions[i]):
                text.append(int(anchors[i]))
            hidden = tiny_model()(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
            # the last layer's output stands behind the final norm there
            raw = torch.cat([hidden[layer + 1][0, :-1] for layer in self.tap_layers], dim=-1)
            drafts = proposal.tokens[i].tolist()
            best, logits = chain(self.drafter, self.rope, text, raw, len(drafts), drafts)
            if proposal.probs is None:
                assert drafts == best
            else:
                torch.testing.assert_close(proposal.probs[i], logits.softmax(-1), rtol=1e-4, atol=1e-6)
            self.compared += 1
        return proposal

    def commit(self, rows, starts, tokens, taps):
        super().commit(rows, starts, tokens, taps)
        for row, start, committed in zip(rows, starts.tolist(), tokens, strict=True):
            if len(self.texts[row]) == start:
                self.texts[row].append(self.rows_anchor(row))
            self.texts[row] += committed

    def rows_anchor(self, row):
        return self._rows[row].tokens[0]


@pytest.mark.parametrize("reuse", [False, True])
def test_drafts_are_those_of_the_definition(reuse, tmp_path):
    """Over prompts, joins, accepted and rejected drafts, cycles without a draft, and slots taken over with a shared prefix."""
    drafter, rope = load_eagle3(
        write(tmp_path, speculators_config(eagle_aux_hidden_state_layer_ids=[1, 2]), with_taps(tensors(), 2)),
        **heads(tiny_model()),
    )  # fmt: skip
    proposer = Watched(drafter, rope, slots=2, max_context=128, num_slots=3)
    engine = Engine(
        decoder((0, 1)), proposer=proposer, slots=2, max_context=128, scheduler=Sometimes(), reuse_prefix=reuse
    )  # fmt: skip
    texts = prompts(4)
    engine.run(requests([*texts, *texts[:2]], max_new_tokens=7))
    engine.run(requests(texts[:2], max_new_tokens=4, temperature=1.0))
    assert proposer.compared > 15 and engine.stats.proposer_failures == 0
    assert not reuse or engine.stats.reused_tokens > 0


class Sometimes(FixedLength):
    """Every third cycle goes without a draft."""

    def __init__(self):
        super().__init__(3)
        self.count = 0

    def plan(self, view):
        self.count += 1
        self.gamma = 0 if self.count % 3 == 0 else 3
        return super().plan(view)


def with_taps(found, count):
    return {**found, "fc.weight": found["fc.weight"][:, : 64 * count].contiguous()}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("slots", [1, 3])
def test_greedy_text_is_the_targets(rule, slots):
    drafter, rope = tiny_eagle3()
    engine = Engine(
        decoder(TAPS), proposer=Eagle3Proposer(drafter, rope, slots=slots, max_context=128), slots=slots, max_context=128,
        rule=rule,
    )  # fmt: skip
    texts = prompts(5)
    found = engine.run(requests(texts, max_new_tokens=14))
    assert [c.token_ids for c in found] == [plain(text, 14) for text in texts]
    assert engine.stats.drafted_tokens > 0 and engine.stats.proposer_failures == 0


def test_a_drafter_that_knows_the_target_is_accepted():
    """A target whose next token is a function of the last one, and a drafter that looks the token's embedding up in the
    target's head: in any other frame it would know another token, and nothing would be accepted."""
    model = tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        for layer in model.model.layers:  # what comes in goes out: the logits depend on the last token alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
    drafter, rope = tiny_eagle3(model)
    drafter.draft_ids = None
    drafter.lm_head = model.lm_head
    with torch.no_grad():
        first = drafter.layers[0]
        for norm in (first.input_layernorm, first.hidden_norm, drafter.norm):
            norm.weight.fill_(1.0)
        drafter.fc.weight.zero_()
        first.mlp.down_proj.weight.zero_()
        first.self_attn = Reads(first.self_attn)
    whole = drafter.outputs
    drafter.outputs = lambda x: (torch.zeros_like(x), whole(x)[1])  # nothing of the token before stays in the state
    served = Decoder.from_target(model, dtype=torch.float32, tap_layers=TAPS, backend="torch")
    proposer = Eagle3Proposer(drafter, rope, slots=1, max_context=64, num_slots=4)
    engine = Engine(served, proposer=proposer, slots=1, max_context=64)
    engine.run(requests(prompts(2), max_new_tokens=16))
    assert engine.stats.accepted_per_slot == engine.stats.reached_per_slot and engine.stats.accepted_per_slot[3] > 3


class Reads(torch.nn.Module):
    """Attention whose output is the first half of its input: the token's normed embedding."""

    def __init__(self, attention):
        super().__init__()
        self.project_in = attention

    def project(self, x, rope):
        query, key, value = self.project_in.project(x, rope)
        self.token = x[..., : x.shape[-1] // 2]
        return query, key, value

    def o_proj(self, attended):
        return self.token


def test_every_layout_is_the_same_drafter(tmp_path):
    weights = tensors()
    flat = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    model = tiny_model()
    folders = {
        "speculators": write(tmp_path / "a", speculators_config(), weights),
        "sglang": write(tmp_path / "b", flat_config(), flat),
        "vllm": write(
            tmp_path / "c", flat_config(eagle_config=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            {**flat, **embedding(model)},
        ),
    }  # fmt: skip
    loaded = {name: load_eagle3(folder, **heads(model)) for name, folder in folders.items()}
    taps, tokens = torch.randn(6, 3 * 64), list(range(10, 17))
    first, want = loaded["speculators"], chain(*loaded["speculators"], tokens, taps, 3)
    for name, (drafter, rope) in loaded.items():
        assert drafter.tap_layers == TAPS, name
        assert torch.equal(drafter.draft_ids, IDS)
        found = chain(drafter, rope, tokens, taps, 3)
        assert found[0] == want[0] and torch.equal(found[1], want[1])
    assert first[0].fc.weight.requires_grad is False


def embedding(model):
    return {"embed_tokens.weight": model.get_input_embeddings().weight.clone()}


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"num_layers": 2}],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_variant_decodes_losslessly(flags, kind, tmp_path):
    weights = tensors(reduced=False, qk_norm=kind == "qwen3", **flags)
    layers = flags.get("num_layers", 1)
    config = speculators_config(kind=kind, reduced=False, **{k: v for k, v in flags.items() if k != "num_layers"})
    config["transformer_layer_config"]["num_hidden_layers"] = layers
    folder = write(tmp_path, config, weights)
    source = ProposerSource(
        f"eagle3:model={folder},num_slots=3", target=Target(tiny_model(), None, "tiny"), dtype=torch.float32
    )  # fmt: skip
    engine = Engine(decoder(TAPS), proposer=source(slots=2, max_context=64), slots=2, max_context=64)
    texts = prompts(3)
    assert [c.token_ids for c in engine.run(requests(texts, max_new_tokens=8))] == [plain(text, 8) for text in texts]
    assert engine.stats.proposer_failures == 0 and source.num_slots == 3


def test_what_a_spec_says_before_anything_loads(tmp_path):
    folder = write(tmp_path, speculators_config(), tensors())
    assert tap_layers(f"eagle3:model={folder}", None) == TAPS
    assert draft_slots(f"eagle3:model={folder}", None) == 5
    assert draft_slots(f"eagle3:model={folder},num_slots=2", None) == 2
    with pytest.raises(ValueError, match=r"proposer.model: None is not allowed .* kind eagle3"):
        tap_layers("eagle3", None)


def test_default_taps_follow_from_the_target(tmp_path):
    """(2, L//2, L-3) counted from the embedding: layers 1, 14, 26 of 30."""
    config = flat_config(eagle_config=None)
    folder = write(tmp_path, config, tensors())
    assert read_eagle3_config(folder, num_target_layers=30)[0].tap_layers == (1, 14, 26)
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids is missing"):
        read_eagle3_config(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, w: c.pop("norm_before_residual"), "norm_before_residual is missing, and readers disagree"),
        (lambda c, w: w.pop("d2t"), "draft_vocab_size: 49 of 97, but there is no d2t"),
        (lambda c, w: w.pop("fc.weight"), r"1 tensors do not fit: fc.weight: missing"),
        (lambda c, w: w.update(extra=torch.ones(1)), r"extra: \(1,\), wanted nothing"),
        (lambda c, w: w.update(d2t=w["d2t"] * 0 - 1), "d2t must hold offsets to distinct ids from 0 to 96"),
        (lambda c, w: c["transformer_layer_config"].update(vocab_size=96), "vocab_size: 96, the target has 97"),
        (lambda c, w: c["transformer_layer_config"].update(model_type="gpt2"), "model_type: 'gpt2' is not supported"),
        (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), r"layers \[-1, 0, 1\] are not allowed"),
        (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), r"layers \[0, 1, 3\] are not allowed"),
        (lambda c, w: c.update(architectures=["X"], speculators_model_type="dspark"), "is not an EAGLE-3 drafter"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    config, weights = speculators_config(), tensors()
    change(config, weights)
    folder = write(tmp_path, config, weights)
    with pytest.raises(ValueError, match=message):
        load_eagle3(folder, **heads(tiny_model()), num_target_layers=3)


def test_import_says_how_it_is_served(tmp_path):
    with pytest.raises(ValueError, match=r"--proposer eagle3:model=FOLDER"):
        read(write(tmp_path, flat_config(), tensors()))
