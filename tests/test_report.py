"""The report from files alone: numbers against the files themselves, damaged folders, wording, bytes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import scipy.stats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_run import CLASSES, LRS, SEEDS, folder_of, make_run
from read_page import Shown

from retrofit import stats
from retrofit.errors import RetrofitError
from retrofit.report import build_report, write_overview, write_report
from retrofit.report.html import to_html
from retrofit.report.markdown import _escape, to_markdown
from retrofit.report.text import page
from retrofit.runfiles import encoded

SCHEMA = json.loads((files("retrofit.report") / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def checked(folder: Path) -> dict[str, Any]:
    """The document of a folder, valid under the schema, with a page that never says nan."""
    document = build_report(folder)
    VALIDATOR.validate(json.loads(json.dumps(document, allow_nan=False)))
    text = encoded(to_markdown(page(document))).decode()
    assert not re.search(r"\b(nan|None|inf)\b", text)
    return document


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run folder with its report; tests only read it."""
    folder = make_run(tmp_path_factory.mktemp("made") / "run")
    write_report(folder)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A run folder that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def result(folder: Path, arm: str, lr: float, seed: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / folder_of(arm, lr, seed) / "result.json").read_text())
    return content


def compared(document: dict[str, Any], kind: str, lr: float, arm: str = "retrofit") -> dict[str, Any]:
    (row,) = (c for c in document["comparisons"] if (c["kind"], c["lr"], c["arm"]) == (kind, lr, arm))
    found: dict[str, Any] = row
    return found


# ---- the document ---------------------------------------------------------------------------------------


def test_every_field_of_the_schema_is_described() -> None:
    VALIDATOR.check_schema(SCHEMA)

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for name, field in node.get("properties", {}).items():
                assert field.get("description"), f"{path}.{name} has no description"
            for name, child in node.items():
                walk(child, f"{path}.{name}")

    walk(SCHEMA, "report")


def test_the_written_json_is_the_document_and_valid(made: Path) -> None:
    written = json.loads((made / "report.json").read_text(encoding="utf-8"))
    assert written == checked(made)


def test_paired_differences_are_those_of_the_files(made: Path) -> None:
    document = checked(made)
    rows = {}
    for lr in LRS:
        a = np.array([result(made, "retrofit", lr, s)["test"]["accuracy"] for s in SEEDS])
        b = np.array([result(made, "baseline", lr, s)["test"]["accuracy"] for s in SEEDS])
        rows[lr] = scipy.stats.ttest_rel(a, b)
        c = compared(document, "same_rate", lr)
        assert c["seeds"] == list(SEEDS)
        assert c["accuracy"]["differences"] == pytest.approx(list(a - b))
        assert c["accuracy"]["mean"] == pytest.approx((a - b).mean())
        assert c["accuracy"]["p_alone"] == pytest.approx(rows[lr].pvalue)
        interval = rows[lr].confidence_interval()
        assert c["accuracy"]["interval_alone"] == pytest.approx([interval.low, interval.high])
        assert c["accuracy"]["sign_flip_floor"] == 0.25
        adjusted = rows[lr].confidence_interval(c["accuracy"]["level"])
        assert c["accuracy"]["interval"] == pytest.approx([adjusted.low, adjusted.high])
    # Both arms are best at the same rate, so that comparison is the same one and is counted once.
    by_p = sorted(LRS, key=lambda lr: rows[lr].pvalue)
    p_first = compared(document, "same_rate", by_p[0])["accuracy"]["p_holm"]
    assert p_first == pytest.approx(3 * rows[by_p[0]].pvalue)
    assert compared(document, "own_best", LRS[0])["accuracy"] == compared(document, "same_rate", LRS[0])["accuracy"]


def test_accuracy_and_loss_are_those_of_the_predictions(made: Path) -> None:
    for run in checked(made)["runs"]:
        with np.load(made / run["folder"] / "predictions.npz") as arrays:
            logits, labels = arrays["test_logits"].astype(float), arrays["test_labels"]
        assert run["test"]["accuracy"] == pytest.approx((logits.argmax(1) == labels).mean())
        log_p = logits - scipy.special.logsumexp(logits, axis=1, keepdims=True)
        assert run["test"]["loss"] == pytest.approx(-log_p[np.arange(len(labels)), labels].mean())


def test_the_best_rate_is_chosen_on_validation_alone(copy: Path) -> None:
    for seed in SEEDS:  # on test the highest rate would win, on validation the middle one
        for lr, validation, test in ((LRS[1], 0.9, 0.2), (LRS[2], 0.3, 0.95)):
            path = copy / folder_of("retrofit", lr, seed) / "result.json"
            content = json.loads(path.read_text())
            content["validation"]["accuracy"], content["test"]["accuracy"] = validation, test
            path.write_text(json.dumps(content))
    document = checked(copy)
    best = {b["arm"]: b["lr"] for b in document["best_rates"]}
    assert best == {"baseline": LRS[0], "retrofit": LRS[1]}
    own = compared(document, "own_best", LRS[1])
    assert own["baseline_lr"] == LRS[0]
    assert own["means"]["arm"]["accuracy"] == pytest.approx(0.2)
    assert any("says 0.9500 test accuracy" in f["reason"] for f in document["faults"])  # edited by hand


def test_lr_sensitivity_is_that_of_the_files(made: Path) -> None:
    first = [
        json.loads((made / folder_of("baseline", lr, s) / "metrics.jsonl").open().readline())
        for lr in LRS
        for s in SEEDS
    ]
    cap = min(math.log(CLASSES), float(np.median([row["loss"] for row in first])))
    rows = checked(made)["lr_sensitivity"]
    for row in rows:
        assert row["initial_loss"] == pytest.approx(cap)
        by_hand = []
        for seed in SEEDS:
            loss = [min(result(made, row["arm"], lr, seed)["validation"]["loss"], cap) for lr in LRS]
            by_hand.append(np.mean(loss) - min(loss))
        assert row["by_seed"] == pytest.approx(by_hand)
    apart = np.subtract(rows[1]["by_seed"], rows[0]["by_seed"])
    assert rows[1]["difference"]["mean"] == pytest.approx(apart.mean())
    assert rows[1]["difference"]["interval"] == pytest.approx(
        list(scipy.stats.ttest_1samp(apart, 0).confidence_interval())
    )


def test_attention_and_cost_are_those_of_the_files(made: Path) -> None:
    document = checked(made)
    place = made / folder_of("baseline", LRS[2], 1)
    probes = [json.loads(line) for line in (place / "probes.jsonl").read_text().splitlines()]
    (layer,) = (
        x for x in document["layers"] if (x["arm"], x["lr"], x["site"]) == ("baseline", LRS[2], "blocks.2.attn")
    )
    assert layer["logit_absmax_before"] == probes[0]["layers"][2]["logit_absmax"]
    assert layer["logit_absmax_after"] == probes[-1]["layers"][2]["logit_absmax"]
    assert layer["entropy_share_after"] == pytest.approx(probes[-1]["layers"][2]["entropy_share"])
    ratios = []
    for lr in LRS:
        for seed in SEEDS:
            a, b = (
                [json.loads(t)["seconds"] for t in (made / folder_of(x, lr, seed) / "timings.jsonl").open()]
                for x in ("retrofit", "baseline")
            )
            ratios.append(np.median(a) / np.median(b))
    (cost,) = (c for c in document["cost"] if c["arm"] == "retrofit")
    assert cost["time_ratio"] == pytest.approx(np.median(ratios))
    assert cost["parameters_added"] == 900


def test_cost_has_throughput_and_memory(made: Path) -> None:
    base, arm = checked(made)["cost"]
    seconds = []
    for lr in LRS:
        for seed in SEEDS:
            rows = (made / folder_of("baseline", lr, seed) / "timings.jsonl").read_text().splitlines()
            seconds.append(np.median([json.loads(row)["seconds"] for row in rows]))
    assert base["images_per_second"] == pytest.approx(np.median(64 / np.array(seconds)))
    assert (base["memory_bytes"], arm["memory_bytes"]) == (90_000_000, 120_000_000)
    text = (made / "report.md").read_text(encoding="utf-8")
    assert "| 85.8 MiB |" in text
    assert "counted tensor by tensor" in text


def test_outcomes_tell_the_share_that_diverged(tmp_path: Path) -> None:
    gone = [("baseline", LRS[2], s) for s in (0, 1)]
    rows = checked(make_run(tmp_path / "run", diverged=gone, layers=2))["outcomes"]
    assert {(r["arm"], r["lr"]): (r["diverged"], r["runs"]) for r in rows if r["diverged"]} == {
        ("baseline", LRS[2]): (2, 3)
    }
    (row,) = (r for r in rows if r["diverged"])
    assert row["diverged_share"] == pytest.approx(2 / 3)


def test_images_are_compared_one_by_one(made: Path) -> None:
    c = compared(checked(made), "own_best", LRS[0])["images"]
    by_seed = []
    for pair in c["pairs"]:
        right = []
        for arm in ("retrofit", "baseline"):
            with np.load(made / folder_of(arm, LRS[0], pair["seed"]) / "predictions.npz") as arrays:
                right.append(arrays["test_logits"].argmax(1) == arrays["test_labels"])
        assert pair["arm_only"] == np.sum(right[0] & ~right[1])
        split = pair["arm_only"] + pair["baseline_only"]
        assert pair["p"] == pytest.approx(scipy.stats.binomtest(pair["arm_only"], split).pvalue)
        by_seed.append(right[0].astype(float) - right[1])
    assert [pair["seed"] for pair in c["pairs"]] == list(SEEDS)
    assert c["interval"] == pytest.approx(list(stats.pigeonhole_interval(by_seed)))  # type: ignore[arg-type]


def test_a_diverged_run_is_right_on_a_share_of_each_image(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", lrs=LRS[:1], layers=1, diverged=[("baseline", LRS[0], 1)])
    c = compared(checked(folder), "same_rate", LRS[0])
    assert [pair["seed"] for pair in c["images"]["pairs"]] == [0, 2]
    low, high = c["images"]["interval"]
    assert low < c["accuracy"]["mean"] < high


def test_losses_are_compared_on_the_same_batch(made: Path) -> None:
    rows = checked(made)["loss_differences"]
    (row,) = (r for r in rows if r["lr"] == LRS[1])
    by_seed = []
    for seed in SEEDS:
        arm, base = (
            [json.loads(x)["loss"] for x in (made / folder_of(a, LRS[1], seed) / "metrics.jsonl").open()]
            for a in ("retrofit", "baseline")
        )
        by_seed.append(np.subtract(arm, base))
    binned = np.array(by_seed)[:, :200].reshape(3, -1, row["steps_per_point"]).mean(2)
    assert row["mean"] == pytest.approx(list(binned.mean(0)))
    assert row["low"] == pytest.approx(list(binned.min(0)))
    assert row["high"] == pytest.approx(list(binned.max(0)))
    assert row["last_tenth"] == pytest.approx(np.array(by_seed)[:, -20:].mean())


def test_spikes_are_told_by_both_rules_where_a_run_is_long_enough(made: Path, tmp_path: Path) -> None:
    assert "No run is long enough for OLMo 2's rule" in (made / "report.md").read_text(encoding="utf-8")
    folder = make_run(tmp_path / "run", lrs=LRS[2:], seeds=[0], layers=1, steps=1500, images=50)
    path = folder / folder_of("retrofit", LRS[2], 0) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1400]["loss"] += 5
    path.write_text("\n".join(map(json.dumps, rows)))
    document = checked(folder)
    (run,) = (r for r in document["runs"] if r["arm"] == "retrofit")
    assert run["spike_score"] == run["spike_score_olmo2"] == pytest.approx(1 / 1500)
    assert [c["spikes_olmo2"] for c in document["curves"]] == [[], [1400]]
    assert "By OLMo 2's: retrofit at 0.01 has 1 in 1 run." in to_markdown(page(document))


# ---- the noise floor ------------------------------------------------------------------------------------


def test_the_twin_stands_beside_the_arms_and_is_not_judged(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", aa=LRS[:2], layers=2, diverged=[("aa", LRS[1], 0)])
    document = checked(folder)
    assert [a["name"] for a in document["study"]["arms"]] == ["baseline", "retrofit"]
    assert {r["arm"] for r in document["runs"]} == {"baseline", "retrofit"}
    assert {c["arm"] for c in document["comparisons"]} == {"retrofit"}
    assert {b["arm"] for b in document["best_rates"]} == {"baseline", "retrofit"}
    assert document["study"]["runs_planned"] == document["study"]["runs_counted"] == 18 + 6
    assert [(row["lr"], row["pairs"]) for row in document["noise_floor"]] == [(LRS[0], 3), (LRS[1], 3)]
    by_hand = [
        result(folder, "aa", LRS[0], s)["test"]["accuracy"] - result(folder, "baseline", LRS[0], s)["test"]["accuracy"]
        for s in SEEDS
    ]
    assert document["noise_floor"][0]["accuracy"]["differences"] == pytest.approx(by_hand)
    assert document["noise_floor"][1]["accuracy"]["differences"][0] < -0.5  # diverged: at chance, and not left out
    assert document["verdict"]["objections"] == []  # a diverged twin is no fault of an arm
    told = document["verdict"]["sentences"][-1]
    assert told.startswith("Noise floor (A/A) at 0.001: baseline and its twin, the same run from weights that differ")
    assert f"by {100 * max(map(abs, by_hand)):.1f} points at most" in told
    assert {row["twin"] for row in document["loss_differences"]} == {False, True}
    text = (write_report(folder).parent / "report.md").read_text(encoding="utf-8")
    assert re.search(r"^\| A/A \| 0.001 \| noise floor \| 3 \|", text, re.MULTILINE)
    assert re.search(r"^\| A/A \| 0.003 \| 0 \| diverged", text, re.MULTILINE)


def test_a_twin_that_ends_exactly_alike_is_said_to(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", aa=LRS[:1], lrs=LRS[:1], layers=1)
    for seed in SEEDS:
        shutil.rmtree(folder / folder_of("aa", LRS[0], seed))
        place = Path(
            shutil.copytree(folder / folder_of("baseline", LRS[0], seed), folder / folder_of("aa", LRS[0], seed))
        )
        (place / "result.json").write_text((place / "result.json").read_text().replace('"baseline"', '"aa"'))
    told = checked(folder)["verdict"]["sentences"][-1]
    assert told.endswith("end exactly alike (3 pairs).")


def test_without_aa_nothing_is_said_of_it(made: Path) -> None:
    document = checked(made)
    assert document["noise_floor"] == document["twins"] == []
    assert "A/A" not in (made / "report.md").read_text(encoding="utf-8").split("## Definitions")[0]


# ---- what is said ---------------------------------------------------------------------------------------


def test_the_verdict_states_the_finding_and_no_more(made: Path) -> None:
    document = checked(made)
    verdict = document["verdict"]
    assert verdict["provisional"]
    assert verdict["headline"].startswith("Provisional, 3 pairs: against baseline at the best learning rates, retrofit")
    assert verdict["headline"].endswith("; nothing but nano on nano was tested")
    best, rates = verdict["sentences"]
    assert "undecided" in best
    change = 100 * compared(document, "same_rate", LRS[2])["accuracy"]["mean"]
    assert f"At learning rate 0.01, the highest tested, retrofit ends {change:.1f} points higher" in rates
    assert "baseline's largest attention logit rose from 20 to 309, retrofit's stayed within 7.5" in rates
    assert any("cannot fall below 0.25" in limit for limit in verdict["limits"])


def test_markdown_and_html_say_the_same(made: Path) -> None:
    document = checked(made)
    text = (made / "report.md").read_text(encoding="utf-8")
    shown = " ".join(Shown((made / "report.html").read_text(encoding="utf-8")).text.split())
    for sentence in [
        document["verdict"]["headline"],
        *document["verdict"]["sentences"],
        *document["verdict"]["limits"],
    ]:
        assert sentence in text
        assert sentence in shown
    for table_row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        if ":--" not in table_row:
            assert " ".join(table_row.replace("\\", "").split(" | ")) in shown


@pytest.mark.parametrize("seeds", [1, 2])
def test_under_three_pairs_nothing_is_decided(tmp_path: Path, seeds: int) -> None:
    verdict = checked(make_run(tmp_path / "run", seeds=range(seeds)))["verdict"]
    assert verdict["headline"].startswith(f"Undecided, {seeds} pair{'s' * (seeds > 1)}: ")
    assert {r["verdict"] for a in verdict["arms"] for r in a["at_same_rate"]} == {"undecided"}
    assert "fewer than three pairs decide nothing" in verdict["sentences"][1]


def test_six_pairs_are_not_provisional(tmp_path: Path) -> None:
    verdict = checked(make_run(tmp_path / "run", lrs=LRS[::2], seeds=range(6), layers=2))["verdict"]
    assert not verdict["provisional"]
    assert "Provisional" not in verdict["headline"]
    assert "better at 0.01" in verdict["headline"]


def test_arms_within_the_margin_are_practically_equal(tmp_path: Path) -> None:
    level = {("baseline", 0.001): 0.8, ("retrofit", 0.001): 0.8}
    folder = make_run(
        tmp_path / "run", lrs=[0.001], seeds=range(8), accuracy=level, spread=0.004, images=5000, layers=1
    )
    document = checked(folder)
    c = compared(document, "own_best", 0.001)["accuracy"]
    assert c["verdict"] == "practically equal"
    assert max(map(abs, c["equivalence_interval"])) < 0.005
    assert "retrofit is practically equal (" in document["verdict"]["headline"]
    assert "lies within ±0.5 points" in document["verdict"]["sentences"][0]
    assert document["study"]["margin"] == {"points": 0.5, "set_by": "recipe"}
    tight = build_report(folder, margin=0.01)
    assert compared(tight, "own_best", 0.001)["accuracy"]["verdict"] == "undecided"
    assert tight["study"]["margin"] == {"points": 0.01, "set_by": "option"}
    assert any("when the results could be seen" in limit for limit in tight["verdict"]["limits"])


def test_undecided_says_how_many_more_seeds_would_decide(made: Path) -> None:
    document = checked(made)
    c = compared(document, "own_best", LRS[0])["accuracy"]
    assert c["verdict"] == "undecided"
    assert f"about {c['more_pairs']} more seed" in document["verdict"]["sentences"][0]
    d, n = np.array(c["differences"]), 3 + c["more_pairs"]
    half = scipy.stats.t.ppf(0.5 + c["level"] / 2, n - 1) * d.std(ddof=1) / math.sqrt(n)
    assert half < abs(d.mean())
    assert any("would decide about every other time" in limit for limit in document["verdict"]["limits"])


def test_what_the_recipe_leaves_unmatched_stands_first(tmp_path: Path) -> None:
    arms = {"baseline": {}, "retrofit": {"qk_norm": {"norm": "rms"}, "init": "ones", "train": {"weight_decay": 0.1}}}
    folder = make_run(tmp_path / "run", layers=1, recipe={"unmatched": ["weight_decay"], "arms": arms})
    document = checked(folder)
    first = document["verdict"]["sentences"][0]
    assert first.startswith("The arms do not differ in the norm alone: the recipe leaves weight_decay unmatched")
    assert "retrofit has weight_decay 0.1" in first
    assert "| weight_decay | as the recipe | 0.1 |" in to_markdown(page(document))


def test_a_logit_above_its_bound_and_steps_that_were_not_finite_are_told(copy: Path) -> None:
    place = copy / folder_of("retrofit", LRS[0], 0)
    rows = [json.loads(line) for line in (place / "probes.jsonl").read_text().splitlines()]
    rows[3]["layers"][2]["logit_absmax"] = 9.0  # its bound is 8.2
    (place / "probes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    content = json.loads((place / "result.json").read_text()) | {"nonfinite_steps": 2}
    (place / "result.json").write_text(json.dumps(content))
    document = checked(copy)
    (fault,) = document["faults"]
    assert "has a logit of 9 in blocks.2.attn at step 60, above 8.2" in fault["reason"]
    assert "| finished, 2 steps not finite |" in to_markdown(page(document))


def test_a_fitted_start_shows_what_the_fit_did(copy: Path) -> None:
    path = copy / "retrofit" / "insertion.json"
    content = json.loads(path.read_text())
    content["init"] = "fit"
    content["shock"]["fit"] = {**content["shock"]["match"], "kl": 0.01}
    content["remarks"] = ["blocks.3.attn keeps most of the shock"]
    for i, layer in enumerate(content["layers"]):
        layer |= {"kl_ones": 0.5 + i, "kl": 0.005, "something_new": {"a": 1}}
    path.write_text(json.dumps(content))
    document = checked(copy)
    assert list(document["insertion"][0]["shock"]) == ["ones", "match", "fit"]
    text = to_markdown(page(document))
    assert "| retrofit | fit (trained here) |" in text
    assert "| 0.5 → 0.03 → 0.005 | 0.9 to 1.2; 0.9 to 1.2 |" in text
    assert "retrofit: blocks.3.attn keeps most of the shock" in text


@pytest.mark.parametrize(
    ("made_with", "objections"),
    [
        ({}, []),
        ({"diverged": [("baseline", LRS[1], 0)]}, []),
        ({"diverged": [("retrofit", LRS[1], 0)]}, ["retrofit at 0.003 diverged in 1 of 3 runs"]),
        (
            {"accuracy": {("baseline", LRS[0]): 0.8, ("retrofit", LRS[0]): 0.5}},
            ["retrofit at 0.001 is worse in test accuracy and loss"],
        ),
    ],
)
def test_objections_are_verdicts_of_worse_and_divergence_beside_the_baseline(
    tmp_path: Path, made_with: dict[str, Any], objections: list[str]
) -> None:
    found = checked(make_run(tmp_path / "run", lrs=LRS[:2], layers=1, **made_with))["verdict"]["objections"]
    assert found[: len(objections)] == objections
    assert bool(found) == bool(objections)


def test_several_studies_stand_in_one_table(tmp_path: Path) -> None:
    schema = json.loads((files("retrofit.report") / "overview.schema.json").read_text(encoding="utf-8"))
    level = {("baseline", LRS[0]): 0.8, ("retrofit", LRS[0]): 0.5}
    small: dict[str, Any] = {"lrs": LRS[:1], "layers": 1, "steps": 20}
    runs = [
        make_run(tmp_path / "a" / "run", **small),
        make_run(tmp_path / "b" / "run", accuracy=level, recipe={"margin": 1.0}, **small),
        make_run(tmp_path / "c" / "run", arms=["baseline"], missing=[("baseline", LRS[0], 0)], **small),
    ]
    text = write_overview(runs, tmp_path / "all")
    document = json.loads((tmp_path / "all" / "report.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)
    assert [s["name"] for s in document["studies"]] == ["a/run", "b/run", "c/run"]
    assert [(r["study"], r["arm"]) for r in document["rows"]] == [("a/run", "retrofit"), ("b/run", "retrofit")]
    own = compared(build_report(runs[1]), "own_best", LRS[0])
    assert document["rows"][1]["difference"] == own["accuracy"]["mean"]
    assert document["rows"][1]["verdict"] == own["accuracy"]["verdict"] == "worse"
    assert {"key": "margin", "values": ["0.5", "1", "0.5"]} in document["settings"]
    assert "arms.retrofit" in {s["key"] for s in document["settings"]}
    assert "| c/run | 2 of 3 | 1 |" in text
    first = (tmp_path / "all" / "report.html").read_bytes()
    write_overview(runs, tmp_path / "all")
    assert (tmp_path / "all" / "report.html").read_bytes() == first
    with pytest.raises(RetrofitError, match="nothing to report on"):
        write_overview([runs[0], tmp_path])


def test_a_worse_arm_is_called_worse(tmp_path: Path) -> None:
    accuracy = {("baseline", 0.001): 0.8, ("retrofit", 0.001): 0.5}
    verdict = checked(make_run(tmp_path / "run", lrs=[0.001], accuracy=accuracy))["verdict"]
    assert "at the best learning rates, retrofit is worse (−29" in verdict["headline"]
    assert "No higher learning rate" in verdict["sentences"][1]


def test_a_diverged_run_counts_as_chance(tmp_path: Path) -> None:
    document = checked(make_run(tmp_path / "run", diverged=[("baseline", LRS[2], s) for s in SEEDS]))
    c = compared(document, "same_rate", LRS[2])
    assert c["means"]["baseline"] == pytest.approx({"accuracy": 1 / CLASSES, "loss": math.log(CLASSES)})
    assert c["diverged"] == {"arm": 0, "baseline": 3}
    assert document["verdict"]["sentences"][2] == "Diverged, and counted as chance: 3 of 3 runs of baseline at 0.01."
    assert all(r["test"] is None for r in document["runs"] if r["status"] == "diverged")


def test_all_diverged_is_undecided(tmp_path: Path) -> None:
    everything = [(a, lr, s) for a in ("baseline", "retrofit") for lr in LRS for s in SEEDS]
    folder = make_run(tmp_path / "run", diverged=everything)
    document = checked(folder)
    assert {c["accuracy"]["verdict"] for c in document["comparisons"]} == {"undecided"}
    assert write_report(folder).is_file()


def test_one_arm_is_a_training_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", arms=["baseline"])
    document = checked(folder)
    assert document["comparisons"] == document["insertion"] == []
    assert "right on 7" in document["verdict"]["sentences"][1]
    shown = Shown(write_report(folder).read_text(encoding="utf-8")).text
    assert "Paired differences" not in shown


def test_three_arms_are_each_compared_with_the_baseline(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", arms=["retrofit", "baseline", "other"], layers=2)
    document = checked(folder)
    assert [a["name"] for a in document["study"]["arms"]] == ["baseline", "retrofit", "other"]
    assert {c["arm"] for c in document["comparisons"]} == {"retrofit", "other"}
    # Holm's family holds both arms: three rates each, and other's own best where it differs.
    assert max(c["accuracy"]["level"] for c in document["comparisons"]) > 1 - 0.05 / 3
    assert write_report(folder).is_file()


# ---- folders as they are found --------------------------------------------------------------------------


def test_missing_and_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    gone, cut = ("retrofit", LRS[2], 2), ("baseline", LRS[1], 0)
    document = checked(make_run(tmp_path / "run", missing=[gone], unfinished=[cut]))
    told = {f["path"]: f["reason"] for f in document["faults"]}
    assert "has not begun" in told[folder_of(*gone)]
    assert "stopped after 200 steps" in told[folder_of(*cut)]
    assert compared(document, "same_rate", LRS[2])["seeds"] == [0, 1]
    assert compared(document, "same_rate", LRS[1])["seeds"] == [1, 2]
    assert document["study"]["runs_counted"] == document["study"]["runs_planned"] - 2
    assert any("2 of 18 planned runs have no result" in limit for limit in document["verdict"]["limits"])


def test_rates_are_judged_on_the_seeds_that_all_of_them_have(tmp_path: Path) -> None:
    """Or the baseline would lose its best rate with one of its runs, and the arm be called better."""
    document = checked(make_run(tmp_path / "run", missing=[("baseline", LRS[0], s) for s in (1, 2)]))
    assert {b["arm"]: b["lr"] for b in document["best_rates"]} == {"baseline": LRS[0], "retrofit": LRS[0]}
    assert {b["arm"]: b["seeds"] for b in document["best_rates"]} == {"baseline": [0], "retrofit": [0, 1, 2]}
    own = compared(document, "own_best", LRS[0])
    assert (own["pairs"], own["accuracy"]["verdict"]) == (1, "undecided")


def test_rates_without_a_seed_in_common_are_judged_where_most_is_known(tmp_path: Path) -> None:
    gone = [("baseline", LRS[0], 0), ("baseline", LRS[1], 1), ("baseline", LRS[1], 2), ("baseline", LRS[2], 2)]
    document = checked(make_run(tmp_path / "run", missing=gone))
    best = document["best_rates"][0]
    assert (best["lr"], best["seeds"]) == (LRS[0], [1, 2])


def test_a_pair_that_saw_other_batches_is_left_out(copy: Path) -> None:
    path = copy / folder_of("retrofit", LRS[0], 1) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[7]["ids"] = "other"
    path.write_text("\n".join(map(json.dumps, rows)))
    document = checked(copy)
    assert compared(document, "same_rate", LRS[0])["seeds"] == [0, 2]
    assert any("saw other batches" in f["reason"] for f in document["faults"])


def test_without_run_json_the_runs_on_disk_are_reported(copy: Path) -> None:
    before = checked(copy)
    (copy / "run.json").unlink()
    after = checked(copy)
    assert {r["folder"] for r in after["runs"]} == {r["folder"] for r in before["runs"]}
    assert compared(after, "same_rate", LRS[2]) == compared(before, "same_rate", LRS[2])
    assert after["faults"][0] == {"path": "run.json", "reason": "is missing"}


def test_a_run_that_lies_in_the_folder_of_another_is_left_out(copy: Path) -> None:
    """A seed copied to the place of another would count twice."""
    for arm in ("baseline", "retrofit"):
        place = copy / folder_of(arm, LRS[0], 1)
        shutil.rmtree(place)
        shutil.copytree(copy / folder_of(arm, LRS[0], 0), place)
    document = checked(copy)
    assert compared(document, "same_rate", LRS[0])["seeds"] == [0, 2]
    assert {"path": f"{folder_of('retrofit', LRS[0], 1)}/result.json"} in [
        {"path": f["path"]} for f in document["faults"]
    ]
    (copy / "run.json").unlink()  # and without a plan to hold them against
    document = checked(copy)
    assert compared(document, "same_rate", LRS[0])["seeds"] == [0, 2]
    told = [f["reason"] for f in document["faults"] if f["path"] == folder_of("retrofit", LRS[0], 1)]
    assert told == ["names retrofit at learning rate 0.001 with seed 0 a second time; this one is left out"]


def test_markdown_shows_words_as_they_are() -> None:
    """Names of classes, folders and sites may hold whatever Markdown would take for its own."""
    for words in ("&lt;b&gt; ~~x~~ <i>", "# a *b*", "- c", "+ d", "1. e", "2) f", "=== g", "a_b _c_"):
        shown = _escape(words)
        assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", shown) == words
        bare = re.sub(r"\\.", "x", shown)
        assert not re.search(r"[&<>~*]|^[#+=-]|^[0-9]+[.)] |(?<!\w)_|_(?!\w)", bare)


GARBAGE = [b"", b"{", b"null", b"[1, 2]", b'{"a": NaN}', b"\x00\xff\xfe", b'{"status": "finished"}\n', None]


@pytest.mark.parametrize("content", GARBAGE)
@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "retrofit/insertion.json",
        *(
            f"{folder_of('retrofit', LRS[1], 1)}/{f}"
            for f in ("result.json", "metrics.jsonl", "timings.jsonl", "probes.jsonl", "predictions.npz")
        ),
    ],
)
def test_damaged_files_are_named_and_the_rest_is_reported(small: Path, name: str, content: bytes | None) -> None:
    """`content` None: the file is missing."""
    path = small / name
    before = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        document = checked(small)
        assert compared(document, "same_rate", LRS[0])["pairs"] == 3
        assert any(name.startswith(f["path"]) for f in document["faults"])
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("tiny") / "run", lrs=LRS[:1], seeds=[0], steps=5, images=20, layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("small") / "run", lrs=LRS[:2], steps=20, images=50, layers=2)


@pytest.mark.parametrize(
    "name", ["run.json", "retrofit/insertion.json", folder_of("retrofit", LRS[0], 0) + "/result.json"]
)
@pytest.mark.parametrize("value", [None, "text", "\ud800", -1, True, [], {}, [None], {"a": []}, 1e400, 10**400])
def test_values_of_the_wrong_kind_do_no_harm(tiny: Path, name: str, value: Any) -> None:
    """Every top-level value of a file in turn, and every value one level below."""
    path = tiny / name
    before = path.read_text()
    content = json.loads(before)
    places = [(k,) for k in content] + [(k, j) for k, v in content.items() if isinstance(v, dict) for j in v]
    try:
        changed = json.loads(before)
        for place in places:
            inner = changed
            for key in place[:-1]:
                inner = inner[key] if isinstance(inner.get(key), dict) else {}
            kept = inner.get(place[-1])
            inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            checked(tiny)
            inner[place[-1]] = kept
    finally:
        path.write_text(before)


ODD = [
    None,
    "",
    "text",
    "\ud800",
    -1,
    0,
    1e308,
    1 << 70,
    10**400,
    0.5,
    True,
    [],
    {},
    [None],
    [[1]],
    {"a": []},
    {"": None},
]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_files_edited_by_hand_do_no_harm(tiny: Path, data: st.DataObject) -> None:
    """One value anywhere in a file is another, or gone."""
    place = folder_of(data.draw(st.sampled_from(["baseline", "retrofit"])), LRS[0], 0)
    names = ["run.json", "retrofit/insertion.json", f"{place}/result.json"]
    names += [f"{place}/{name}.jsonl" for name in ("metrics", "probes", "timings")]
    path = tiny / data.draw(st.sampled_from(names))
    before = path.read_text()
    documents = [json.loads(line) for line in before.splitlines()] if path.suffix == ".jsonl" else [json.loads(before)]
    node: Any = documents
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans())):
            break
        node = node[key]
    if data.draw(st.booleans()):
        node[key] = data.draw(st.sampled_from(ODD))
    else:
        del node[key]
    try:
        path.write_text("\n".join(map(json.dumps, documents)))
        checked(tiny)
    finally:
        path.write_text(before)


@pytest.mark.parametrize("value", [1e308, -1e300, 10**400])
def test_numbers_beyond_all_measure_are_drawn(small: Path, tmp_path: Path, value: float) -> None:
    copy = Path(shutil.copytree(small, tmp_path / "run"))
    place = copy / folder_of("retrofit", LRS[1], 1)
    for name in ("metrics", "probes", "timings"):
        rows = [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]
        rows[4] |= {"loss": value, "grad_norm": value, "seconds": value}
        for layer in rows[4].get("layers", []):
            layer |= dict.fromkeys(("logit_absmax", "entropy_share", "q_rms", "k_rms", "logit_bound"), value)
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    content = json.loads((place / "result.json").read_text())
    content["test"]["loss"] = content["validation"]["loss"] = value
    (place / "result.json").write_text(json.dumps(content))
    document = checked(copy)
    assert "<svg" in to_html(page(document), document)


def test_what_is_no_run_folder_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="not a folder"):
        build_report(tmp_path / "nowhere")
    with pytest.raises(RetrofitError, match="nothing to report on"):
        build_report(tmp_path)


RUNS = st.sampled_from([(a, lr, s) for a in ("baseline", "retrofit", "aa") for lr in LRS[:2] for s in range(4)])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seeds=st.integers(1, 4),
    rates=st.integers(1, 2),
    aa=st.booleans(),
    diverged=st.sets(RUNS, max_size=8),
    missing=st.sets(RUNS, max_size=8),
    unfinished=st.sets(RUNS, max_size=4),
    level=st.sampled_from([0.0, 0.5, 1.0]),
    spread=st.sampled_from([0.0, 0.01]),
    margin=st.sampled_from([None, 0.01, 100.0]),
)
def test_whatever_a_study_came_to_there_is_a_sensible_report(
    seeds: int, rates: int, aa: bool, level: float, spread: float, margin: float | None, **runs: Any
) -> None:
    with tempfile.TemporaryDirectory() as place:
        lrs = LRS[:rates]
        folder = make_run(
            Path(place),
            lrs=lrs,
            seeds=range(seeds),
            aa=lrs if aa else (),
            accuracy={(arm, lr): level for arm in ("baseline", "retrofit") for lr in lrs},
            spread=spread,
            steps=6,
            images=20,
            layers=1,
            **runs,
        )
        document = build_report(folder, margin)
    VALIDATOR.validate(json.loads(json.dumps(document, allow_nan=False)))
    shown = to_markdown(page(document))
    assert not re.search(r"\b(nan|None|inf)\b", shown)
    verdict = document["verdict"]
    assert verdict["headline"]
    assert all(s.endswith(".") for s in verdict["sentences"] + verdict["limits"])
    for c in document["comparisons"]:
        if c["pairs"] < 3:
            assert c["accuracy"]["verdict"] == c["loss"]["verdict"] == "undecided"


def test_statistics_and_report_import_no_model_library() -> None:
    code = (
        "import sys, retrofit.stats, retrofit.report;"
        "print([m for m in ('torch', 'timm', 'transformers', 'yaml', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_definitions_of_the_probes_are_printed(made: Path) -> None:
    for name in ("report.md", "report.html"):
        text = (made / name).read_text(encoding="utf-8").replace("&#39;", "'").replace("\\", "")
        for words in (
            "the largest token's sqrt(mean over channels of x^2)",
            "rotations keep lengths",
            "detached tensors",
        ):
            assert words in text, (name, words)
