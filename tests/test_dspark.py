"""DSpark: what a block may see, and that training and serving compute the same drafter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from drafters import DRAFT_IDS, MASK, slot_logits, tiny_drafter

from draftsmith.models.config import DSparkConfig, default_tap_layers
from draftsmith.models.dspark import attach_check, trainable_table
from draftsmith.models.export import native
from draftsmith.models.init import init_from_target
from draftsmith.models.masks import block_attention, context_mask
from draftsmith.models.target import Target
from draftsmith.runtime.config import SamplingParams
from draftsmith.runtime.decoder import Decoder
from draftsmith.runtime.dspark import DSparkProposer
from draftsmith.runtime.sampling import SamplingBatch
from tiny import tiny_model

HEADS = ("vanilla", "gated", "rnn", "none")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, MASK, shape, generator=torch.Generator().manual_seed(seed))


# ---- what a block may see ----------------------------------------------------------------------------------------


def test_overlapping_blocks_see_target_states_before_their_own_anchor_only():
    drafter, heads = tiny_drafter(block_size=4)
    taps, anchors, previous = noise(1, 20, 128), torch.tensor([[10, 12]]), words(1, 2, 4)

    def run(changed_from: int | None) -> torch.Tensor:
        seen = taps.clone()
        if changed_from is not None:
            seen[:, changed_from:] += noise(1, 20 - changed_from, 128, seed=5)
        return drafter.unroll(taps=seen, anchors=anchors, previous_tokens=previous, embedding=heads.embedding).hidden

    before = run(None)
    assert torch.equal(run(12), before)
    moved = run(10)
    assert torch.equal(moved[:, 0], before[:, 0])
    assert (moved[:, 1] - before[:, 1]).abs().amax(-1).min() > 1e-3
    assert (run(9)[:, 0] - before[:, 0]).abs().amax(-1).min() > 1e-3


def test_the_gradient_of_a_block_reaches_exactly_the_states_before_its_anchor():
    drafter, heads = tiny_drafter(block_size=4)
    taps = noise(1, 20, 128).requires_grad_()
    out = drafter.unroll(taps=taps, anchors=torch.tensor([[10, 12]]), previous_tokens=words(1, 2, 4), embedding=heads.embedding)
    for block, anchor in ((0, 10), (1, 12)):
        grad = torch.autograd.grad(out.hidden[0, block].sum(), taps, retain_graph=True)[0][0].abs().amax(-1)
        assert torch.all(grad[:anchor] > 0) and torch.all(grad[anchor:] == 0)


def test_inputs_of_one_block_do_not_reach_another(monkeypatch):
    drafter, heads = tiny_drafter(block_size=4)
    arguments = dict(
        taps=noise(1, 20, 128), anchors=torch.tensor([[10, 12]]), previous_tokens=words(1, 2, 4), embedding=heads.embedding
    )
    before, plain = drafter.unroll(**arguments).hidden, type(drafter).block_inputs

    def disturbed(self, tokens, embedding):
        states = plain(self, tokens, embedding).clone()
        states[:, 0, 1:] += noise(3, 64, seed=7)
        return states

    monkeypatch.setattr(type(drafter), "block_inputs", disturbed)
    after = drafter.unroll(**arguments).hidden
    assert torch.equal(after[:, 1], before[:, 1])
    assert (after[:, 0] - before[:, 0]).abs().amax(-1).min() > 1e-3


def test_within_a_block_every_slot_sees_every_slot():
    drafter, heads = tiny_drafter(block_size=4)
    states = drafter.block_inputs(torch.tensor([[7]]), heads.embedding).detach()
    assert torch.equal(states[0, 0, 0], heads.embedding[7])
    assert torch.equal(states[0, 0, 1:], heads.embedding[MASK].expand(3, -1))
    states.requires_grad_()
    drafter.block_inputs = lambda tokens, embedding: states
    out = drafter.unroll(
        taps=noise(1, 9, 128), anchors=torch.tensor([[5]]), previous_tokens=words(1, 1, 4), embedding=heads.embedding
    )
    for slot in range(4):
        grad = torch.autograd.grad(out.hidden[0, 0, slot].sum(), states, retain_graph=True)[0][0, 0]
        assert torch.all(grad.abs().amax(-1) > 0)


def test_other_rows_padding_and_other_anchors_change_nothing():
    drafter, heads = tiny_drafter()
    taps, anchors, previous = noise(3, 24, 128), torch.tensor([[3, 9], [6, 15], [0, 0]]), words(3, 2, 5)
    together = drafter.unroll(taps=taps, anchors=anchors, previous_tokens=previous, embedding=heads.embedding)
    for row, length in enumerate((14, 20, 5)):
        for block in range(2):
            alone = drafter.unroll(
                taps=taps[row : row + 1, :length], anchors=anchors[row : row + 1, block : block + 1],
                previous_tokens=previous[row : row + 1, block : block + 1], embedding=heads.embedding,
            )  # fmt: skip
            torch.testing.assert_close(alone.hidden[0, 0], together.hidden[row, block], rtol=0, atol=1e-5)
            torch.testing.assert_close(alone.survival_logits[0, 0], together.survival_logits[row, block], rtol=0, atol=1e-5)


def test_block_attention_equals_one_dense_attention():
    rows, context, blocks, slots, heads, kv_heads, size = 2, 13, 3, 4, 6, 2, 8
    anchors = torch.tensor([[0, 4, 9], [2, 5, 13]])
    query = noise(rows, blocks, slots, heads, size, seed=1)
    key_c, value_c = noise(rows, context, kv_heads, size, seed=2), noise(rows, context, kv_heads, size, seed=3)
    key_b, value_b = noise(rows, blocks, slots, kv_heads, size, seed=4), noise(rows, blocks, slots, kv_heads, size, seed=5)
    found = block_attention(query, (key_c, value_c), (key_b, value_b), context_mask(anchors, context))

    dense = torch.zeros(rows, blocks * slots, context + blocks * slots, dtype=torch.bool)
    for row in range(rows):
        for block in range(blocks):
            own = slice(block * slots, (block + 1) * slots)
            dense[row, own, : anchors[row, block]] = True
            dense[row, own, context + own.start : context + own.stop] = True
    key = torch.cat((key_c, key_b.flatten(1, 2)), 1).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
    value = torch.cat((value_c, value_b.flatten(1, 2)), 1).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
    want = F.scaled_dot_product_attention(query.flatten(1, 2).transpose(1, 2), key, value, attn_mask=dense[:, None])
    torch.testing.assert_close(found.flatten(1, 2), want.transpose(1, 2), rtol=0, atol=1e-5)


def test_the_draft_layer_is_the_qwen3_layer_of_transformers():
    # With no context in sight a block is a bidirectional sequence of its own: transformers' Qwen3 layer must agree.
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    drafter, heads = tiny_drafter(num_layers=1, rank=0)
    names = Qwen3Config().to_dict().keys()
    config = Qwen3Config(**{k: v for k, v in drafter.config.items() if k in names}, attn_implementation="eager")
    layer = Qwen3DecoderLayer(config, 0).eval()
    layer.load_state_dict(drafter.layers[0].state_dict())
    anchor = 6
    states = drafter.block_inputs(torch.tensor([[9]]), heads.embedding)[0]
    cos_sin = Qwen3RotaryEmbedding(config)(states, torch.arange(anchor, anchor + 5)[None])
    want = layer(states, position_embeddings=cos_sin, attention_mask=torch.zeros(1, 1, 5, 5))
    want = drafter.norm(want[0] if isinstance(want, tuple) else want)
    hidden = drafter.layers[0]
    context = torch.zeros(1, 0, 2, 16)
    rope = drafter.rope(torch.tensor([[anchor]])[..., None] + torch.arange(5))
    normed = hidden.input_layernorm(states[None])
    out = block_attention(
        hidden.self_attn.query(normed, rope), (context, context), hidden.self_attn.key_value(normed, rope),
        torch.zeros(1, 1, 0, dtype=torch.bool),
    )  # fmt: skip
    x = states[None] + hidden.self_attn.o_proj(out.flatten(-2))
    x = x + hidden.mlp(hidden.post_attention_layernorm(x))
    torch.testing.assert_close(drafter.norm(x)[0], want, rtol=0, atol=1e-5)


# ---- training equals serving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lengths", [(11,), (3, 1, 17, 9)], ids=["single", "ragged"])
def test_the_served_chain_is_the_trained_one(head: str, reduced: bool, temperature: float, lengths: tuple[int, ...]):
    drafter, heads = tiny_drafter(head=head, reduced=reduced)
    slots = len(lengths)
    proposer = DSparkProposer(drafter, heads, slots=slots + 1, max_context=40, with_survival=True)
    rows = list(range(slots)) if slots == 1 else [4, 0, 3, 1]
    taps = [noise(n, 128, seed=30 + n) for n in lengths]
    anchors = words(slots, seed=3)
    with torch.no_grad():
        for row, own in zip(rows, taps, strict=True):
            # The slot held another text before, and a verification with rejected drafts follows the prompt.
            proposer.begin(row, [5] * 20, noise(20, 128, seed=90))
            half = len(own) // 2
            proposer.begin(row, [5] * half, own[:half])
            rest = torch.cat((own[half:], noise(4, 128, seed=91)))
            proposer.commit([row], torch.tensor([half]), [[5] * (len(own) - half)], rest[None])
        batch = SamplingBatch.build([SamplingParams(temperature=temperature, seed=i) for i in range(slots)], list(lengths))
        proposal = proposer.propose(rows, anchors, batch, 5)
        for i, length in enumerate(lengths):
            previous = torch.cat((anchors[i : i + 1], proposal.tokens[i, :-1]))[None, None]
            out = drafter.unroll(
                taps=taps[i][None], anchors=torch.tensor([[length]]), previous_tokens=previous, embedding=heads.embedding
            )
            logits = slot_logits(drafter, heads, out)[0, 0]
            ids = heads.draft_ids if reduced else torch.arange(97)
            column = torch.searchsorted(ids, proposal.tokens[i])
            assert torch.equal(ids[column], proposal.tokens[i])
            if temperature:
                torch.testing.assert_close(proposal.probs[i], logits.softmax(-1), rtol=0, atol=1e-5)
            else:
                assert proposal.probs is None and torch.equal(column, logits.argmax(-1))
            survival = torch.sigmoid(out.survival_logits[0, 0]).cumprod(-1)
            torch.testing.assert_close(proposal.survival[i], survival, rtol=0, atol=1e-5)
    assert proposal.lengths.tolist() == [5] * slots


def test_the_chain_depends_on_the_token_drafted_before():
    # Otherwise the comparison above would hold for a head that is switched off.
    for head in HEADS:
        drafter, heads = tiny_drafter(head=head)
        arguments = dict(taps=noise(1, 9, 128), anchors=torch.tensor([[8]]), embedding=heads.embedding)
        first, second = words(1, 1, 5), words(1, 1, 5)
        second[..., 2] = (second[..., 2] + 1) % 90 + 3
        a, b = (slot_logits(drafter, heads, drafter.unroll(**arguments, previous_tokens=p)) for p in (first, second))
        changed = (a - b).abs().amax(-1)[0, 0] > 1e-4
        after = head == "rnn"  # its state carries on
        assert changed.tolist() == [False, False, head != "none", after, after], head


def test_fewer_slots_are_a_shorter_block_or_the_first_of_a_whole_one():
    drafter, heads = tiny_drafter()
    taps, anchor = noise(9, 128), torch.tensor([7])
    params = SamplingParams(temperature=0.8, top_k=4, seed=3)
    batch = SamplingBatch.build([params], [9])

    def draft(slots: int, whole: bool):
        proposer = DSparkProposer(drafter, heads, slots=1, max_context=40, whole_block=whole)
        proposer.begin(0, [5] * 9, taps)
        return proposer.propose([0], anchor, batch, slots)

    full, cut, short = draft(5, True), draft(2, True), draft(2, False)
    assert torch.equal(full.tokens[:, :2], cut.tokens) and torch.equal(full.probs[:, :2], cut.probs)
    assert torch.equal(draft(5, False).probs, full.probs)
    assert ((full.probs > 0).sum(-1) == 4).all()
    assert (full.probs.gather(-1, full.tokens[..., None]) > 0).all()
    assert not torch.equal(short.probs, cut.probs)
    drafter.block_size = 2
    assert torch.equal(draft(2, True).probs, short.probs)


def test_survival_depends_on_the_token_before_and_never_on_its_own():
    drafter, heads = tiny_drafter(head="vanilla")
    hidden = noise(1, 5, 64)
    previous = words(1, 5)
    base = drafter.head_states(hidden, previous).survival_logits
    for slot in range(5):
        changed = previous.clone()
        changed[0, slot] = (changed[0, slot] + 11) % 90 + 3
        moved = (drafter.head_states(hidden, changed).survival_logits - base).abs()[0] > 1e-5
        # previous[k] is x_{k-1}, the input of slot k; it is slot k-1's own token, which must not move slot k-1.
        assert moved.tolist() == [k == slot for k in range(5)]


def test_without_a_head_survival_reads_the_hidden_state_alone():
    for changes in (dict(rank=0), dict(head="none"), dict(survival_with_head=False)):
        drafter, _ = tiny_drafter(**changes)
        hidden = noise(1, 5, 64)
        a, b = (drafter.head_states(hidden, words(1, 5, seed=s)).survival_logits for s in (1, 2))
        assert torch.equal(a, b) and a.shape == (1, 5)
        assert drafter.config["confidence_head_with_markov"] is False


# ---- the tap frame --------------------------------------------------------------------------------------------------


def test_features_are_the_outputs_of_the_tapped_layers_in_training_and_serving():
    model = tiny_model(num_hidden_layers=4)
    target, ids = Target(model, None, "tiny"), words(2, 12)
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda m, a, out, i=i: seen.update({i: out[0] if isinstance(out, tuple) else out}))
        for i, layer in enumerate(model.model.layers)
    ]
    hidden_states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    for layer in range(4):
        found = target.features(ids, None, (layer,))
        torch.testing.assert_close(found.taps, seen[layer], rtol=0, atol=1e-5)
        decoder = Decoder.from_target(model, dtype=torch.float32, tap_layers=(layer,), backend="torch")
        served = decoder.forward(ids, decoder.new_cache(2, 32), [0, 1], [0, 0], taps=True)
        torch.testing.assert_close(served.taps, found.taps, rtol=0, atol=1e-4)
        if layer < 3:
            torch.testing.assert_close(found.taps, hidden_states[layer + 1], rtol=0, atol=1e-5)
    # The last entry of transformers is another thing: the final norm is in it.
    torch.testing.assert_close(target.features(ids, None, ()).last_hidden, hidden_states[-1], rtol=0, atol=1e-5)
    assert not torch.allclose(seen[3], hidden_states[-1], atol=1e-2)
    both = target.features(ids, None, (0, 2)).taps
    assert torch.equal(both, torch.cat((seen[0], seen[2]), -1))


def test_padded_rows_have_the_features_of_the_row_alone():
    target, ids = Target(tiny_model(), None, "tiny"), words(2, 12)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    padded = target.features(ids, mask, (0, 1))
    alone = target.features(ids[:1, :7], None, (0, 1))
    torch.testing.assert_close(padded.taps[:1, :7], alone.taps, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.last_hidden[:1, :7], alone.last_hidden, rtol=0, atol=1e-5)


@pytest.mark.parametrize("taps", [(3,), (4,), (-1,), (1, 0), (1, 1), ()])
def test_taps_outside_the_frame_are_refused(taps: tuple[int, ...]):
    model = tiny_model(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"drafter.tap_layers.*\[0, 2\]"):
        native.build_config(model.config, DSparkConfig(tap_layers=taps), mask_token_id=MASK, target_name="tiny")


def test_default_taps():
    assert default_tap_layers(36, 5) == (1, 9, 17, 25, 33)
    for layers in range(2, 40):
        for count in (1, 3, 5, 16):
            native.check_taps(default_tap_layers(layers, count), layers)


# ---- fitting the target -----------------------------------------------------------------------------------------


def test_start_from_the_target_copies_its_last_layers_and_passes_the_deepest_tap_through():
    model = tiny_model()
    drafter, heads = tiny_drafter(model)
    init_from_target(drafter, model.model.layers, model.model.norm, heads.embedding)
    for ours, theirs in zip(drafter.layers, model.model.layers[1:], strict=True):
        assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        assert torch.equal(ours.input_layernorm.weight, theirs.input_layernorm.weight)
    assert torch.equal(drafter.norm.weight, model.model.norm.weight)
    assert (drafter.fc.weight[:, 64:].diagonal() > 0.5).all()
    rows = drafter.markov_head.markov_w1.weight[1:]  # the pad row of the embedding is zero
    torch.testing.assert_close(rows.pow(2).mean(-1), torch.ones(96), rtol=1e-4, atol=1e-4)


def test_a_drafter_of_another_target_is_refused():
    drafter, heads = tiny_drafter()
    attach_check(drafter, heads)
    other = tiny_model(hidden_size=32)
    from draftsmith.models.draft import FrozenHeads

    with pytest.raises(ValueError, match="vocabulary 97 and hidden size 64"):
        attach_check(drafter, FrozenHeads.build(other.get_input_embeddings().weight, other.lm_head.weight, None))
    with pytest.raises(ValueError, match="draft vocabulary"):
        attach_check(drafter, FrozenHeads.build(heads.embedding, heads.lm_head, DRAFT_IDS))


def test_the_trainable_table_counts_every_parameter_and_nothing_of_the_target():
    drafter, _ = tiny_drafter()
    table = dict(trainable_table(drafter))
    assert table["target"] == 0
    assert sum(table.values()) == sum(p.numel() for p in drafter.parameters())
    assert table["fc"] == 128 * 64 and table["markov_head"] == 2 * 97 * 8
