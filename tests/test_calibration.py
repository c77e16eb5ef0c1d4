"""Survival calibration: known distortions are undone, metrics equal hand values, files and warnings do what they say."""

import json
import warnings

import numpy as np
import pytest
import torch

from draftsmith.eval import calibration_fit as fits
from draftsmith.eval.calibration_fit import FITS, Observations, choose, cross_validate, predict
from draftsmith.runtime.calibration import FILE, Calibration, Entry, Setting
from draftsmith.runtime.config import SamplingParams

SETTING = Setting(1.0, 0, 1.0, "block")
N, G = 50_000, 3


def world(conditional=None, prefix=None, *, n=N, slots=G, seed=0, prompts=200):
    """Cycles whose accepted count follows a known law of the logits z ~ N(.5, 1.5): `conditional(k, z)` gives each slot's own
    probability, or `prefix(s)` the survival as a function of the raw product s."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0.5, 1.5, (n, slots)).astype(np.float32)
    if conditional is not None:
        truth = np.stack([conditional(k, z[:, k].astype(np.float64)) for k in range(slots)], axis=1).cumprod(axis=1)
    else:
        truth = prefix(fits.sigmoid(z.astype(np.float64)).cumprod(axis=1))
    accepted = (rng.random((n, 1)) < truth).sum(axis=1)  # truth falls over the slots: one uniform gives a prefix
    every = np.arange(n)
    return Observations(z, accepted, np.full(n, slots), every % 2, every % prompts, ("code", "math")), truth


def hand(logits, accepted, observed):
    n = len(accepted)
    return Observations(
        np.array(logits, dtype=np.float32), np.array(accepted), np.array(observed), np.zeros(n, int), np.arange(n), ("all",)
    )


def test_sts_recovers_temperatures():
    temperatures = (2.0, 0.5, 3.0)
    obs, _ = world(lambda k, z: fits.sigmoid(z / temperatures[k]))
    entry = fits.fit_sts(obs, SETTING)
    assert [1 / a for a in entry.slope] == pytest.approx(temperatures, rel=0.15) and not any(entry.offset)
    assert max(fits.slot_eces(obs, predict(Entry.identity(SETTING, G), obs.logits))) > 0.05
    assert max(fits.slot_eces(obs, predict(entry, obs.logits))) < 0.01


def test_platt_recovers_slope_and_offset_from_reached_slots():
    slope, offset = (0.6, 1.5, 0.8), (-1.0, 0.5, 1.0)
    obs, _ = world(lambda k, z: fits.sigmoid(slope[k] * z + offset[k]))
    entry = fits.fit_platt(obs, SETTING)
    assert entry.slope == pytest.approx(slope, rel=0.06) and entry.offset == pytest.approx(offset, abs=0.06)
    assert max(fits.slot_eces(obs, predict(Entry.identity(SETTING, G), obs.logits))) > 0.08
    assert max(fits.slot_eces(obs, predict(entry, obs.logits))) < 0.01
    # a temperature alone cannot: sigmoid(0) stays .5
    assert max(fits.slot_eces(obs, predict(fits.fit_sts(obs, SETTING), obs.logits))) > 0.02


def test_isotonic_recovers_a_bend_no_logit_scaling_has():
    obs, truth = world(prefix=lambda s: 0.1 * s + 0.9 * s**3)
    entry = fits.fit_isotonic(obs, SETTING)
    found = predict(entry, obs.logits)
    assert max(fits.slot_eces(obs, predict(Entry.identity(SETTING, G), obs.logits))) > 0.08
    assert max(fits.slot_eces(obs, found)) < 0.01
    assert np.abs(found - truth).mean() < 0.01


@pytest.mark.parametrize("kind", ["none", "sts", "platt", "isotonic"])
def test_order_is_kept_and_products_fall(kind):
    obs, _ = world(lambda k, z: fits.sigmoid(0.7 * z - 0.3 * k), n=4000)
    entry = FITS[kind](obs, SETTING)
    survival = predict(entry, obs.logits)
    assert survival.dtype == np.float32 and survival.min() >= 0 and survival.max() <= 1
    assert (np.diff(survival, axis=1) <= 0).all()
    by_logit = survival[np.argsort(obs.logits[:, 0]), 0]
    assert (np.diff(by_logit) >= -1e-7).all(), "a higher logit never gets a lower survival"


def test_apply_equals_the_formulas():
    obs, _ = world(lambda k, z: fits.sigmoid(0.7 * z - 0.3), n=3000)
    entries = [FITS[kind](obs, Setting(t, 0, 1.0, "block")) for kind, t in (("platt", 0.0), ("isotonic", 0.7), ("none", 1.0))]
    calibration = Calibration(G, entries)
    z = torch.from_numpy(obs.logits[:60])
    temperature = torch.tensor([0.0, 0.3, 0.36, 0.8, 0.9, 2.0]).repeat(10)
    nearest = [0, 0, 1, 1, 2, 2] * 10
    found = calibration.apply(z, temperature)
    assert found.dtype == torch.float32 and found.shape == (60, G)
    raw = fits.sigmoid(obs.logits[:60].astype(np.float64))
    for i, e in enumerate(nearest):
        entry = entries[e]
        if entry.kind == "platt":
            wanted = np.cumprod(fits.sigmoid(np.array(entry.slope) * obs.logits[i] + np.array(entry.offset)))
        else:
            wanted = np.cumprod(raw[i])
        if entry.kind == "isotonic":
            wanted = np.minimum.accumulate([np.interp(s, *zip(*entry.knots[k])) for k, s in enumerate(wanted)])
        assert found[i].numpy() == pytest.approx(wanted, abs=2e-4 if entry.kind == "isotonic" else 1e-6)
    # fewer slots than the block, and other rows, change nothing
    assert torch.equal(calibration.apply(z[:5, :2], temperature[:5]), found[:5, :2])
    assert torch.equal(calibration.apply(z[3:4], temperature[3:4]), found[3:4])


def test_identity_maps_beside_isotonic_keep_other_rows_exact():
    obs, _ = world(lambda k, z: fits.sigmoid(z), n=500)
    none = Entry.identity(Setting(0.0, 0, 1.0, "block"), G)
    both = Calibration(G, [none, fits.fit_isotonic(obs, SETTING)])
    z = torch.from_numpy(obs.logits)
    alone = Calibration(G, [none]).apply(z, torch.zeros(len(z)))
    assert torch.allclose(both.apply(z, torch.zeros(len(z))), alone, atol=1e-7)
    assert torch.allclose(alone, torch.sigmoid(z).cumprod(1), atol=1e-7)


def test_file_round_trip(tmp_path):
    obs, _ = world(lambda k, z: fits.sigmoid(0.7 * z), n=800)
    entries = [FITS[kind](obs, Setting(t, 5, 0.9, "token")) for kind, t in (("sts", 0.5), ("isotonic", 1.0))]
    made = Calibration(G, entries, {"target": "tiny"})
    assert Calibration.load(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"block_size": G}))
    assert made.save(tmp_path) == tmp_path / FILE
    read = Calibration.load(tmp_path)
    assert read.entries == made.entries and read.block_size == G and read.provenance == {"target": "tiny"}
    z, t = torch.from_numpy(obs.logits), torch.ones(len(obs))
    assert torch.equal(read.apply(z, t), made.apply(z, t))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_file_of_another_block_size_and_broken_files_are_refused(tmp_path):
    Calibration(G, [Entry.identity(SETTING, G)]).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 7}))
    with pytest.raises(ValueError, match="block_size: 3 is not this drafter's 7"):
        Calibration.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"block_size": G}))
    good = json.loads((tmp_path / FILE).read_text())
    broken = [
        ("{", "calibration.json"),
        (json.dumps({**good, "schema": 9}), "schema: got 9, allowed: 1"),
        (json.dumps({**good, "entries": []}), "entries: got none"),
        (json.dumps({**good, "entries": [{"kind": "none"}]}), "broken calibration"),
        (json.dumps({**good, "entries": [{**good["entries"][0], "kind": "magic"}]}), "kind: got 'magic'"),
        (json.dumps({**good, "entries": [{**good["entries"][0], "slope": [1, -1, 1]}]}), "allowed: above 0"),
        (json.dumps({**good, "entries": good["entries"] * 2}), "allowed: each once"),
    ]
    for text, expected in broken:
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ValueError, match=expected) as caught:
            Calibration.load(tmp_path)
        assert "\n" not in str(caught.value)


def test_warning_under_other_settings():
    greedy = Entry.identity(Setting.of(SamplingParams(temperature=0.0, top_k=50), "block"), G)
    hot = Entry.identity(Setting.of(SamplingParams(temperature=1.0, top_p=0.9), "block"), G)
    calibration = Calibration(G, [greedy, hot])
    assert calibration.check(SamplingParams(temperature=0.0, top_p=0.5), "token") is None, (
        "greedy: rule and truncation are idle"
    )
    assert calibration.check(SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_new_tokens=9), "block") is None
    for sampling, rule in (
        (SamplingParams(temperature=0.7, top_p=0.9), "block"),
        (SamplingParams(temperature=1.0), "block"),
        (SamplingParams(temperature=1.0, top_p=0.9, top_k=20), "block"),
        (SamplingParams(temperature=1.0, top_p=0.9), "token"),
    ):
        assert calibration.check(sampling, rule)
    assert calibration.check(SamplingParams(temperature=0.7, top_k=20), "token") == (
        "survival was calibrated for T=0; T=1, top-p 0.9, block rule, and is used at T=0.7, top-k 20, token rule: draft "
        "lengths may be badly chosen (the output stays exact); run `draftsmith calibrate` with these settings"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            calibration.warn(SamplingParams(temperature=0.7), "block")
            calibration.warn(SamplingParams(temperature=0.0), "block")
    assert len(caught) == 1 and "T=0.7, block rule" in str(caught[0].message)


def test_metrics_against_hand_values():
    prediction, label = np.array([0.12, 0.14, 0.62, 0.64, 0.97]), np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    # bins of width .05: {.12, .14} mean .13 against .5; {.62, .64} mean .63 against .5; {.97} against 1
    assert fits.ece(prediction, label) == pytest.approx((2 * 0.37 + 2 * 0.13 + 0.03) / 5)
    assert fits.ece(np.array([0.2, 0.8]), np.array([0.0, 1.0]), bins=1) == pytest.approx(0.0)
    assert fits.brier(prediction, label) == pytest.approx((0.12**2 + 0.86**2 + 0.38**2 + 0.64**2 + 0.03**2) / 5)
    # pairs (accepted, rejected): .14>.12, .62>.12, .97>both, .14<.64, .62<.64 -> 4 of 6
    assert fits.auroc(prediction, label) == pytest.approx(4 / 6)
    assert fits.auroc(np.array([0.5, 0.5]), np.array([0.0, 1.0])) == 0.5
    assert np.isnan(fits.auroc(prediction, np.ones(5))) and np.isnan(fits.ece(prediction[:0], label[:0]))
    assert fits.reliability(prediction, label, bins=2) == [[0.13, 0.5, 2], pytest.approx([2.23 / 3, 2 / 3, 3])]
    assert fits.bin_of(np.array([0.0, 0.05, 1.0])).tolist() == [0, 1, 19]


def test_floor_is_the_error_of_a_perfect_prediction():
    rng = np.random.default_rng(0)
    prediction = rng.random(2000)
    floor, high = fits.ece_floor(prediction, rng=rng)
    perfect = [fits.ece(prediction, (rng.random(2000) < prediction).astype(float)) for _ in range(100)]
    assert floor == pytest.approx(np.mean(perfect), rel=0.1) and floor < high
    assert fits.ece_floor(np.array([0.0, 1.0]), rng=rng) == (0.0, 0.0)


def test_cut_slots_are_neither_reached_nor_rejected():
    # raw logits 0: each conditional .5. Row 0: all known, 1 accepted. Row 1: cut after slot 1, which was accepted.
    # Row 2: nothing accepted. Row 3: cut after slot 2, both accepted.
    obs = hand(np.zeros((4, 3)), accepted=[1, 1, 0, 2], observed=[3, 1, 3, 2])
    assert obs.known(2).tolist() == [True, False, True, True] and obs.known(3).tolist() == [True, False, True, False]
    assert obs.reached(2).tolist() == [True, False, False, True] and not obs.reached(3).any()
    rows = fits.judge(obs, predict(Entry.identity(SETTING, 3), obs.logits))
    pooled = [row for row in rows if row["domain"] == "all"][:3]
    assert [row["observations"] for row in pooled] == [4, 3, 2] and [row["accepted"] for row in pooled] == [3, 1, 0]
    assert [row["ece"] for row in pooled] == pytest.approx([0.75 - 0.5, 1 / 3 - 0.25, 0.125])
    assert pooled[2]["auroc"] is None
    # what stands in a cut slot must not matter to any fit
    other = hand([[0, 0, 0], [0, 9, -9], [0, 0, 0], [0, 0, 9]], accepted=[1, 1, 0, 2], observed=[3, 1, 3, 2])
    for fit in FITS.values():
        assert fit(obs, SETTING) == fit(other, SETTING)


def test_slots_that_nobody_reached_fall_back_to_something_harmless():
    obs = hand(np.ones((6, 3)), accepted=[0, 0, 1, 0, 1, 0], observed=[3, 3, 1, 3, 1, 3])
    for fit in FITS.values():
        survival = predict(fit(obs, SETTING), obs.logits)
        assert np.isfinite(survival).all()
    inverted, _ = world(lambda k, z: fits.sigmoid(-z), n=2000)
    entry = fits.fit_platt(inverted, SETTING)
    assert min(entry.slope) == fits.LEAST_SLOPE, "an inverted logit is ignored, never turned round"
    survival = predict(entry, inverted.logits)
    assert survival[:, 0].mean() == pytest.approx(inverted.label(1).mean(), abs=0.02)


def test_choice_is_cross_validated_by_prompt_and_prefers_the_simple():
    straight, _ = world(lambda k, z: fits.sigmoid(z), n=6000)
    errors = cross_validate(straight, SETTING, ("none", "sts", "platt", "isotonic"), folds=3)
    assert max(np.mean(values) for values in errors.values()) < 0.025, "nothing to undo: every kind leaves it as it is"
    shifted, _ = world(lambda k, z: fits.sigmoid(0.8 * z - 1.0), n=6000)
    errors = cross_validate(shifted, SETTING, ("none", "sts", "platt"), folds=3)
    assert choose(errors) == "platt" and errors["platt"][0] < errors["none"][0] / 3
    assert choose({"isotonic": [0.0102], "platt": [0.0109], "none": [0.2]}) == "platt"
    with pytest.raises(ValueError, match=r"eval.calibration.folds: got 1 fitted prompts"):
        cross_validate(straight.take(straight.prompt == 0), SETTING, ("none",), folds=3)


def test_isotonic_gives_no_certainty_out_of_a_handful():
    obs, _ = world(lambda k, z: fits.sigmoid(z), n=3020)
    entry = fits.fit_isotonic(obs, SETTING)
    assert all(0 < y < 1 for slot in entry.knots for _, y in slot)
    assert all(len(slot) <= 2 * (3020 // fits.GROUP) for slot in entry.knots)
    few = hand(np.zeros((3, 3)), accepted=[1, 0, 0], observed=[3, 3, 3])
    assert fits.fit_isotonic(few, SETTING).knots[0] == ((0.5, pytest.approx(1 / 3)),)
