"""Exactness of the verification rules by full enumeration of the shipped code, and its negative controls.

A chain has V = 3 tokens and G = 4 slots: 81 draft paths. For each path every pattern of passed and failed tests is run through
the rule itself (uniforms inside each cell), so that the output law is a finite sum in float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.runtime import multi, verify
from draftsmith.runtime.sampling import draw, probabilities

V, G = 3, 4
EXACT = 1e-12


class Tree:
    """Random p and q at every prefix of up to G tokens; q = m p + (1 - m) noise, on a reduced vocabulary where asked."""

    def __init__(self, seed: int, mixing: float, kind: str = "full") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.draft_ids = torch.tensor([2, 0]) if kind == "reduced" else None
        self.p: dict[tuple[int, ...], torch.Tensor] = {}
        self.q: dict[tuple[int, ...], torch.Tensor] = {}
        for depth in range(G + 1):
            for prefix in itertools.product(range(V), repeat=depth):
                law = _dirichlet(generator)
                noisy = mixing * law + (1 - mixing) * _dirichlet(generator)
                self.p[prefix] = law
                if self.draft_ids is not None:
                    noisy = noisy[self.draft_ids] / noisy[self.draft_ids].sum()
                self.q[prefix] = noisy

    def draft_law(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """q over target ids."""
        if self.kind == "onehot":
            return torch.eye(V, dtype=torch.float64)[int(self.q[prefix].argmax())]
        if self.draft_ids is None:
            return self.q[prefix]
        return torch.zeros(V, dtype=torch.float64).scatter(0, self.draft_ids, self.q[prefix])

    def chains(self):
        """(paths, weights, p [B,G+1,V], q [B,G,Vd] or None, tokens [B,G])"""
        paths = list(itertools.product(range(V), repeat=G))
        weights = torch.ones(len(paths), dtype=torch.float64)
        for row, path in enumerate(paths):
            for k in range(G):
                weights[row] *= self.draft_law(path[:k])[path[k]]
        p = torch.stack([torch.stack([self.p[path[:k]] for k in range(G + 1)]) for path in paths])
        q = torch.stack([torch.stack([self.q[path[:k]] for k in range(G)]) for path in paths])
        return paths, weights, p, None if self.kind == "onehot" else q, torch.tensor(paths)

    def joint(self) -> torch.Tensor:
        """Target law of G+1 tokens, [V]*(G+1)."""
        out = torch.ones((V,) * (G + 1), dtype=torch.float64)
        for path in itertools.product(range(V), repeat=G + 1):
            for k in range(G + 1):
                out[path] *= self.p[path[:k]][path[k]]
        return out


def _dirichlet(generator: torch.Generator, size: int = V) -> torch.Tensor:
    # Gamma(1/2) is half a squared normal.
    weights = torch.randn(size, generator=generator, dtype=torch.float64) ** 2
    return weights / weights.sum()


def thresholds_of(name, p, q, tokens, lengths, draft_ids):
    if name == "token":
        return verify.token_wise_thresholds(p, q, tokens, lengths, draft_ids)
    return verify.block_thresholds(p, q, tokens, lengths, draft_ids)[0]


def outcome(tree, rule, name, lengths=None, mean_only=False):
    """Joint law of the first G+1 tokens and the mean number of accepted drafts, by enumeration of `rule`."""
    paths, weights, p, q, tokens = tree.chains()
    if lengths is None:
        lengths = torch.full((len(paths),), G)
    thresholds = thresholds_of(name, p, q, tokens, lengths, tree.draft_ids)
    joint = torch.zeros((V,) * (G + 1), dtype=torch.float64)
    mean = 0.0
    for cell in itertools.product((True, False), repeat=G):
        passed = torch.tensor(cell)
        mass = weights * torch.where(passed, thresholds, 1 - thresholds).prod(-1)
        uniforms = torch.where(passed, thresholds / 2, (1 + thresholds) / 2)
        verdict = rule(p, q, tokens, lengths, uniforms, tree.draft_ids)
        mean += float((mass * verdict.accepted).sum())
        for row, path in enumerate(paths):
            if mass[row] > 0 and not mean_only:
                kept = path[: int(verdict.accepted[row])]
                for token in range(V):
                    _spread(tree, joint, kept + (token,), float(mass[row] * verdict.residual[row, token]))
    return joint, mean


def _spread(tree, joint, prefix, mass):
    if mass == 0.0:
        return
    if len(prefix) == G + 1:
        joint[prefix] += mass
        return
    for token in range(V):
        _spread(tree, joint, prefix + (token,), mass * float(tree.p[prefix][token]))


def deviation(tree, joint):
    return float((joint - tree.joint()).abs().max())


def product_sum(tree):
    """Sum over k of the sum over target paths of prod min(p, q): mean accepted drafts of the token-wise rule."""
    total = 0.0
    for depth in range(1, G + 1):
        for path in itertools.product(range(V), repeat=depth):
            value = 1.0
            for k in range(depth):
                value *= min(float(tree.p[path[:k]][path[k]]), float(tree.draft_law(path[:k])[path[k]]))
            total += value
    return total


@pytest.mark.parametrize("kind", ["full", "reduced", "onehot"])
@pytest.mark.parametrize("mixing", [0.3, 0.6, 0.9])
def test_exact_by_enumeration(kind, mixing):
    tree = Tree(1, mixing, kind)
    token, token_mean = outcome(tree, verify.token_wise, "token")
    block, block_mean = outcome(tree, verify.block, "block")
    assert deviation(tree, token) < EXACT
    assert deviation(tree, block) < EXACT
    assert token_mean == pytest.approx(product_sum(tree), abs=EXACT)
    assert block_mean >= token_mean - EXACT
    if kind == "onehot":  # one path only: nothing for the joint rule to gain
        assert block_mean == pytest.approx(token_mean, abs=EXACT)


def test_block_accepts_more():
    """Orientation of the methods notes: +7.6 / +9.5 / +2.3 % at mixing .3 / .6 / .9; random tables, so a wide band."""
    gains = []
    for mixing in (0.3, 0.6, 0.9):
        means = torch.zeros(2)
        for seed in range(3):
            tree = Tree(100 + seed, mixing)
            means += torch.tensor([outcome(tree, verify.RULES[name], name, None, True)[1] for name in ("token", "block")])
        gains.append(float(means[1] / means[0]) - 1)
    assert all(0.01 < gain < 0.2 for gain in gains), gains


def stop_lengths(tree, seen):
    """Draft length of each path: slot k is dropped where a fixed function of x_<k (plus `seen` more tokens) says so."""
    paths = tree.chains()[0]
    lengths = []
    for path in paths:
        length = 0
        while length < G and (sum(path[: length + seen]) + 2 * length) % 5 != 3:
            length += 1
        lengths.append(length)
    return torch.tensor(lengths)


@pytest.mark.parametrize("kind", ["full", "reduced", "onehot"])
@pytest.mark.parametrize("name", ["token", "block"])
def test_exact_under_a_stop_rule_on_earlier_tokens(kind, name):
    tree = Tree(3, 0.6, kind)
    lengths = stop_lengths(tree, 0)
    assert len(set(lengths.tolist())) > 2 or kind == "onehot"
    assert deviation(tree, outcome(tree, verify.RULES[name], name, lengths)[0]) < EXACT


@pytest.mark.parametrize("name", ["token", "block"])
def test_control_drop_rule_that_sees_its_own_token(name):
    tree = Tree(3, 0.6)
    assert deviation(tree, outcome(tree, verify.RULES[name], name, stop_lengths(tree, 1))[0]) > 0.01


def test_control_block_stopped_at_the_first_failure():
    def wrong(p, q, tokens, lengths, uniforms, draft_ids=None):
        thresholds, reach = verify.block_thresholds(p, q, tokens, lengths, draft_ids)
        accepted = verify.prefix_length(uniforms <= thresholds)
        return verify.Verdict(accepted, verify._residual(p, q, tokens, lengths, draft_ids, accepted, reach))

    tree = Tree(1, 0.6)
    assert deviation(tree, outcome(tree, wrong, "block")[0]) > 0.01


@pytest.mark.parametrize("name", ["token", "block"])
def test_control_redraw_from_p(name):
    def wrong(p, q, tokens, lengths, uniforms, draft_ids=None):
        verdict = verify.RULES[name](p, q, tokens, lengths, uniforms, draft_ids)
        return verify.Verdict(verdict.accepted, p[torch.arange(len(p)), verdict.accepted])

    tree = Tree(1, 0.3)
    assert deviation(tree, outcome(tree, wrong, name)[0]) > 0.01


@pytest.mark.parametrize("name", ["token", "block"])
def test_control_arg_max_drafts_tested_with_q(name):
    class Wrong(Tree):
        def chains(self):
            paths, _, p, q, tokens = super().chains()
            self.kind = "onehot"  # the drafts are the arg-max, the test still sees q
            weights = Tree.chains(self)[1]
            self.kind = "full"
            return paths, weights, p, q, tokens

    tree = Wrong(1, 0.6)
    assert deviation(tree, outcome(tree, verify.RULES[name], name)[0]) > 0.05


def test_control_one_hot_draft_tested_as_certain_but_left_in_the_residual():
    """The fault of one-hot drafts with q = 1 in the ratio and no q in the residual."""

    def wrong(p, q, tokens, lengths, uniforms, draft_ids=None):
        verdict = verify.token_wise(p, q, tokens, lengths, uniforms, draft_ids)
        return verify.Verdict(verdict.accepted, p[torch.arange(len(p)), verdict.accepted])

    tree = Tree(1, 0.6, "onehot")
    assert deviation(tree, outcome(tree, wrong, "token")[0]) > 0.01


def test_thresholds_against_the_formula_in_plain_python():
    tree = Tree(7, 0.3)
    paths, _, p, q, tokens = tree.chains()
    for length in (1, 3, G):
        h, reach = verify.block_thresholds(p, q, tokens, torch.full((len(paths),), length))
        for row, path in enumerate(paths):
            value = 1.0
            for i in range(1, length + 1):
                prefix, x = path[: i - 1], path[i - 1]
                value = min(1.0, value * float(tree.p[prefix][x] / tree.q[prefix][x]))
                z = (
                    sum(max(value * float(a) - float(b), 0.0) for a, b in zip(tree.p[path[:i]], tree.q[path[:i]]))
                    if i < G
                    else 0.0
                )
                expected = value if i == length else (1.0 if z + 1 - value == 0 else z / (z + 1 - value))
                assert float(h[row, i - 1]) == pytest.approx(expected, abs=1e-12)
                assert float(reach[row, i]) == pytest.approx(value, abs=1e-12)
        assert float(h[:, length:].abs().sum()) == 0.0


def two_token_mean(name):
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    tokens = torch.tensor(list(itertools.product(range(2), repeat=2)))
    weights = q[tokens].prod(-1)
    ps, qs, lengths = p.expand(4, 3, 2), q.expand(4, 2, 2), torch.full((4,), 2)
    thresholds = thresholds_of(name, ps, qs, tokens, lengths, None)
    mean = 0.0
    for cell in itertools.product((True, False), repeat=2):
        passed = torch.tensor(cell)
        mass = weights * torch.where(passed, thresholds, 1 - thresholds).prod(-1)
        uniforms = torch.where(passed, thresholds / 2, (1 + thresholds) / 2)
        mean += float((mass * verify.RULES[name](ps, qs, tokens, lengths, uniforms).accepted).sum())
    return mean


def test_known_values():
    assert two_token_mean("token") == pytest.approx(10 / 9, abs=1e-14)
    assert two_token_mean("block") == pytest.approx(11 / 9, abs=1e-14)


def one_slot_law(rule_name, admit):
    """Output law of one slot with p = (.7,.3), q = (.5,.5), where the draft x is admitted iff admit(x)."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    law = torch.zeros(2, dtype=torch.float64)
    for x in range(2):
        lengths = torch.tensor([int(admit(x))])
        args = (p.expand(1, 2, 2), q.expand(1, 1, 2), torch.tensor([[x]]), lengths)
        threshold = thresholds_of(rule_name, *args, None)
        for passed in (True, False):
            mass = float(q[x]) * float(threshold if passed else 1 - threshold)
            verdict = verify.RULES[rule_name](*args, threshold / 2 if passed else (1 + threshold) / 2)
            if int(verdict.accepted):
                law[x] += mass
            else:
                law += mass * verdict.residual[0]
    return law.tolist()


@pytest.mark.parametrize("name", ["token", "block"])
def test_forbidden_rule_gives_85_15_and_no_other_does(name):
    # A global arg-max admits the draft only where it will survive surely: here x = 0, whose p/q is above 1.
    assert one_slot_law(name, lambda x: x == 0) == pytest.approx([0.85, 0.15], abs=1e-14)
    for allowed in (True, False):
        assert one_slot_law(name, lambda x, allowed=allowed: allowed) == pytest.approx([0.7, 0.3], abs=1e-14)


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "reduced", "onehot"])
def test_dead_slots_never_matter(name, kind):
    tree = Tree(11, 0.5, kind)
    _, _, p, q, tokens = tree.chains()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, G + 1, (len(tokens),), generator=generator)
    uniforms = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
    clean = verify.RULES[name](p, q, tokens, lengths, uniforms, tree.draft_ids)
    dead = torch.arange(G) >= lengths[:, None]
    poisoned = None if q is None else q.masked_fill(dead[..., None], float("nan"))
    for padding in (0, 1, -1):
        dirty = verify.RULES[name](p, poisoned, tokens.masked_fill(dead, padding), lengths, uniforms, tree.draft_ids)
        assert torch.equal(clean.accepted, dirty.accepted)
        assert torch.equal(clean.residual, dirty.residual)
    # Padding ids end the chain even where lengths says otherwise.
    full = torch.full_like(lengths, G)
    padded = verify.RULES[name](p, q, tokens.masked_fill(dead, -1), full, uniforms, tree.draft_ids)
    assert torch.equal(clean.accepted, padded.accepted)
    assert torch.equal(clean.residual, padded.residual)


@pytest.mark.parametrize("name", ["token", "block"])
def test_no_slots_and_zero_lengths_draw_from_p(name):
    p = torch.softmax(torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)), -1)
    none = verify.RULES[name](
        p[:, :1], p[:, :0], torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0)
    )
    zero = verify.RULES[name](
        p, p[:, :3], torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.full((2, 3), 0.1)
    )
    for verdict in (none, zero):
        assert verdict.accepted.tolist() == [0, 0]
        assert torch.equal(verdict.residual, p[:, 0])


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("certain", [True, False])
def test_temperature_zero_rows_equal_the_greedy_rule(name, certain):
    """One-hot p inside a batch: the same accepted length and next token as `greedy`, whatever the uniforms."""
    generator = torch.Generator().manual_seed(5)
    batch, vocab, zero = 500, 6, torch.zeros(500)
    logits = torch.randn(batch, G + 1, vocab, generator=generator)
    args = (zero, torch.zeros(batch, dtype=torch.int64), torch.ones(batch))
    p = probabilities(logits, *args)
    draft_logits = logits[:, :G] + torch.randn(batch, G, vocab, generator=generator)
    q = probabilities(draft_logits, *args)
    tokens = q.argmax(-1)
    lengths = torch.randint(0, G + 1, (batch,), generator=generator)
    accepted, following = verify.greedy(logits.argmax(-1), tokens, lengths)
    assert 0.3 < float(accepted.float().mean()) < G - 1
    uniforms = torch.rand(batch, G, generator=generator).clamp(1e-6, 1 - 1e-6)
    verdict = verify.RULES[name](p, None if certain else q, tokens, lengths, uniforms)
    assert torch.equal(verdict.accepted, accepted)
    assert torch.equal(draw(verdict.residual, torch.full((batch,), 0.5)), following)


def test_greedy_rule():
    argmax = torch.tensor([[5, 6, 7, 8]]).expand(4, -1)
    tokens = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 0, 7], [-1, 6, 7]])
    accepted, following = verify.greedy(argmax, tokens, torch.tensor([3, 2, 3, 3]))
    assert accepted.tolist() == [3, 2, 1, 0]
    assert following.tolist() == [8, 7, 6, 5]


@pytest.mark.parametrize("name", ["token", "block"])
def test_equal_laws_accept_everything_and_leave_no_noise_residual(name):
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(4, G + 1, 1000, generator=generator), -1)
    tokens = torch.randint(0, 1000, (4, G), generator=generator)
    lengths = torch.full((4,), G)
    verdict = verify.RULES[name](p, p[:, :G].clone(), tokens, lengths, torch.full((4, G), 0.999))
    assert verdict.accepted.tolist() == [G] * 4
    # Forced failure at slot 0: (p - q)+ has no mass, so the law is p and not 0/0.
    forced = verify._residual(p, p[:, :G].clone(), tokens, lengths, None, torch.zeros(4, dtype=torch.int64), None)
    assert torch.equal(forced, p[:, 0])


def test_a_draft_outside_the_draft_vocabulary_is_rejected_without_nan():
    p = torch.full((1, 2, 4), 0.25)
    q = torch.full((1, 1, 2), 0.5)
    for name in verify.RULES:
        verdict = verify.RULES[name](p, q, torch.tensor([[3]]), torch.tensor([1]), torch.tensor([[1e-6]]), torch.tensor([0, 1]))
        assert verdict.accepted.tolist() == [0]
        assert torch.allclose(verdict.residual, torch.tensor([[0.0, 0.0, 0.5, 0.5]]))


def test_metric_frame():
    """Acceptance rows 111, 011, 101, 110: mean accepted prefix 1.5 (2.5 with the bonus), not 1.734 and not 2.25."""
    flags = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    assert verify.prefix_length(flags).tolist() == [3, 0, 1, 2]
    assert float(verify.prefix_length(flags).float().mean()) == 1.5
    averages = flags.double().mean(0)
    assert float(averages.cumprod(0).sum()) == pytest.approx(1.734, abs=1e-3)
    assert float(averages.sum()) == 2.25


# Several candidates at one node.


def node_outcome(rule, p, q, count, distinct):
    """(output law, acceptance) over all ordered candidate sets drawn from q, with or without replacement."""
    sets = [c for c in itertools.product(range(len(p)), repeat=count) if not distinct or len(set(c)) == count]
    tokens = torch.tensor(sets)
    drawn = q[tokens]
    if distinct:
        drawn = drawn / (1 - (drawn.cumsum(-1) - drawn))
    ps, qs = p.expand(len(sets), -1), q.expand(len(sets), -1)
    thresholds = rule(ps, qs, tokens).thresholds
    law, left = torch.zeros_like(p), drawn.prod(-1)
    for child in range(count + 1):
        passed = (torch.arange(count) == child).expand(len(sets), -1)
        verdict = multi.verify_node(rule, ps, qs, tokens, torch.where(passed, thresholds / 2, (1 + thresholds) / 2))
        share = thresholds[:, child] if child < count else torch.ones_like(left)
        mass = left * share
        left = left - mass
        assert bool((verdict.chosen[mass > 0] == child).all())
        if child < count:
            law.index_add_(0, tokens[:, child], mass)
        else:
            law += (mass[:, None] * verdict.residual).sum(0)
            accepted = 1 - float(mass.sum())
    return law, accepted


@pytest.mark.parametrize("count", [2, 3])
def test_node_rules_are_exact_and_ordered(count):
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        p, q = _dirichlet(generator, 6), _dirichlet(generator, 6)
        single = float(torch.minimum(p, q).sum())
        acceptance = {}
        for name, rule in multi.NODE_RULES.items():
            law, acceptance[name] = node_outcome(rule, p, q, count, name == "without_replacement")
            assert float((law - p).abs().max()) < EXACT, name
        assert acceptance["without_replacement"] > acceptance["multi_round"] > single
        assert acceptance["k_seq"] > single


def test_control_distinct_candidates_tested_as_independent():
    generator = torch.Generator().manual_seed(2)
    worst = 0.0  # exact by accident where only one token has p > q, hence several laws
    for _ in range(3):
        p, q = _dirichlet(generator, 6), _dirichlet(generator, 6)
        worst = max(worst, float((node_outcome(multi.multi_round, p, q, 2, True)[0] - p).abs().max()))
    assert worst > 0.01


def test_one_candidate_is_the_token_wise_rule():
    generator = torch.Generator().manual_seed(4)
    p, q = _dirichlet(generator, 6)[None], _dirichlet(generator, 6)[None]
    for token in range(6):
        tokens, low = torch.tensor([[token]]), torch.tensor([[1e-9]])
        single = verify.token_wise(p[:, None].expand(1, 2, 6), q[:, None], tokens, torch.tensor([1]), 1 - low)
        if int(single.accepted) == 0:
            for rule in multi.NODE_RULES.values():
                verdict = multi.verify_node(rule, p, q, tokens, 1 - low)
                assert int(verdict.chosen) == 1
                assert torch.allclose(verdict.residual, single.residual, atol=1e-12)
