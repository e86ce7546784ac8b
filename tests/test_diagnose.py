"""Did the trouble start in attention? Made runs with known causes, and files in any state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from made_run import ARMS, make_run

from retrofit.diagnose import Answer, Diagnosis, Event, Reason, Trained, diagnose
from retrofit.report import build_report
from retrofit.report.markdown import to_markdown
from retrofit.report.text import page
from retrofit.report.trouble import findings
from retrofit.runfiles import RunKey, dumps

STEPS, EVERY, LAYERS = 200, 20, 4
LOW, HIGH = 0.001, 0.01
Series = Callable[[int], float | None]


def ramp(start: float, end: float, begins: int = 0, ends: int = STEPS) -> Series:
    """Grows geometrically from step `begins` to `ends`."""
    return lambda step: start * (end / start) ** float(np.clip((step - begins) / (ends - begins), 0, 1))


class Made:
    """One run's files: a quiet run, until a test changes a figure."""

    def __init__(self, lr: float, seed: int = 0, arm: str = "baseline") -> None:
        self.key = RunKey.of(arm, lr, seed, "bf16")
        batch = np.random.default_rng(seed)  # the same noise at every rate: the same batches
        steps = np.arange(STEPS)
        self.loss = 0.8 + 1.5 * np.exp(-steps / 50) + 0.1 * batch.standard_normal(STEPS)
        self.grad_norm = 1.0 + 0.1 * batch.random(STEPS)
        self.layers: dict[int, dict[str, Series]] = {}
        self.whole: dict[str, Series] = {}
        self.validation: float | None = 0.9 + 0.01 * seed
        self.diverged_at: int | None = None

    def layer(self, index: int, **figures: Series) -> Made:
        self.layers.setdefault(index, {}).update(figures)
        return self

    def worse_from(self, step: int, by: float) -> Made:
        """Training loss grows worse over 40 steps, validation with it."""
        self.loss += by * np.clip((np.arange(STEPS) - step) / 40, 0, 1)
        self.validation = (self.validation or 0) + by
        return self

    def diverges(self, at: int, rises_from: int | None = None) -> Made:
        if rises_from is not None:
            self.loss[rises_from:] += np.linspace(0.5, 20, STEPS - rises_from)
        self.diverged_at, self.validation = at, None
        return self

    def write(self, run_dir: Path, without: str | None = None) -> Trained:
        place = run_dir / self.key.folder
        place.mkdir(parents=True, exist_ok=True)
        end = STEPS if self.diverged_at is None else self.diverged_at + 1
        rows: list[dict[str, Any]] = [
            {
                "step": s,
                "epoch": 0,
                "lr": self.key.lr * min((s + 1) / 20, 1 - max(s - 20, 0) / STEPS),
                "loss": None if s == self.diverged_at else self.loss[s],
                "grad_norm": self.grad_norm[s],
                "ids": f"{self.key.seed}-{s}",
            }
            for s in range(end)
        ]
        probed = [s for s in range(0, STEPS + 1, EVERY) if s < end or self.diverged_at is None]
        files = {
            "metrics.jsonl": "".join(dumps(row) + "\n" for row in rows),
            "probes.jsonl": "".join(dumps(self._probe(s)) + "\n" for s in probed),
            "result.json": dumps(
                {
                    "status": "finished" if self.diverged_at is None else "diverged",
                    "diverged_at": self.diverged_at,
                    "validation": None if self.validation is None else {"accuracy": 0.7, "loss": self.validation},
                }
            ),
        }
        for name, content in files.items():
            if name != without:
                (place / name).write_text(content)
        return Trained.read(run_dir, self.key)

    def _probe(self, step: int) -> dict[str, Any]:
        quiet: dict[str, float | None] = {
            "logit_absmax": 10.0,
            "entropy_share": 0.8,
            "q_rms": 1.0,
            "k_rms": 1.0,
            "grad_norm": 0.2,
            "update_ratio": 0.5 * self.key.lr if step else None,
            "logit_bound": None,
        }
        layers = [
            {"site": f"blocks.{i}.attn", **quiet, **{k: f(step) for k, f in self.layers.get(i, {}).items()}}
            for i in range(LAYERS)
        ]
        whole = {"lr": self.key.lr, "loss_scale": None, **{k: f(step) for k, f in self.whole.items()}}
        return {"step": step, "loss": 1.0, "autocast": "bf16", **whole, "layers": layers}


def judged(folder: Path, *made: Made, best: float = LOW) -> list[Diagnosis]:
    """The diagnoses of runs, beside a quiet one at the best rate for each seed, checked in form."""
    quiet = {r.key.seed: Made(best, r.key.seed, r.key.arm) for r in made if r.key.lr != best}
    runs = [r.write(folder) for r in [*quiet.values(), *made]]
    return checked(runs, best)


def checked(runs: list[Trained], best: float = LOW) -> list[Diagnosis]:
    found = diagnose(runs, {(r.key.precision, r.key.arm): best for r in runs})
    told = findings(found, ARMS)
    json.dumps(json.loads(dumps(told)), allow_nan=False)
    for row in told:
        assert not re.search(r"\b(nan|None|inf)\b", row["sentence"]), row["sentence"]
        assert f"Started in attention: {row['answer']}." in row["sentence"]
    return found


def one(found: list[Diagnosis], event: str) -> Diagnosis:
    (d,) = found
    assert d.event == event
    return d


# ---- known causes ---------------------------------------------------------------------------------------


def test_a_quiet_study_has_no_events(tmp_path: Path) -> None:
    assert judged(tmp_path, Made(HIGH)) == []


def test_a_head_that_learns_too_fast_is_not_attention(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(50, 1.0)
    run.grad_norm[40:] *= 6
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason) == ("no", "no logit moved")
    assert [m.figure for m in d.moved] == ["gradient norm"]
    assert d.excess == pytest.approx(1.0)


def test_a_planted_blow_up_before_the_loss_is_attention_and_names_its_layer(tmp_path: Path) -> None:
    run = Made(HIGH).layer(2, logit_absmax=ramp(10, 30_000, begins=20, ends=140)).diverges(160, rises_from=110)
    d = one(judged(tmp_path, run), "divergence")
    assert (d.answer, d.reason, d.step) == ("yes", "logits first", 160)
    assert d.onset is not None
    assert 105 <= d.onset <= 115
    first = d.moved[0]
    assert (first.figure, first.sites, first.after, first.by) == ("largest logit", ("blocks.2.attn",), 20, 40)
    (row,) = findings([d], ARMS)
    assert "blocks.2.attn" in row["sentence"]
    assert "above 10 000, where every run of Wortsman et al. diverged" in row["sentence"]


@pytest.mark.parametrize("end", [10.0, 40.0])
def test_slow_degradation_is_attention_only_where_logits_rise(tmp_path: Path, end: float) -> None:
    """Far below every published band, and without a spike."""
    run = Made(HIGH).worse_from(100, 0.5).layer(1, logit_absmax=ramp(10, end))
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason) == (("yes", "logits first") if end > 10 else ("no", "no logit moved"))
    assert d.onset == pytest.approx(110, abs=10)
    assert "below every published mark" in findings([d], ARMS)[0]["sentence"] or end == 10


def test_a_bad_batch_is_not_attention(tmp_path: Path) -> None:
    run = Made(HIGH)
    run.loss[150] += 3
    run.grad_norm[151] += 8
    d = one(judged(tmp_path, run), "loss spike")
    assert (d.answer, d.reason, d.step, d.onset) == ("no", "no logit moved", 150, 150)
    assert d.phase == "decay"


def test_a_batch_that_spikes_at_the_best_rate_too_is_not_attention(tmp_path: Path) -> None:
    runs = [Made(lr) for lr in (LOW, HIGH)]
    for run in runs:
        run.loss[150] += 3
    runs[1].layer(0, logit_absmax=ramp(10, 100))
    calm, risen = checked([run.write(tmp_path) for run in runs])
    assert (calm.answer, calm.reason) == ("no", "no logit moved")
    assert (risen.answer, risen.reason) == ("no", "same batch")


def test_a_spike_after_logits_rose_is_attention(tmp_path: Path) -> None:
    run = Made(HIGH).layer(0, logit_absmax=ramp(10, 100, ends=140))
    run.grad_norm[150] += 9
    d = one(judged(tmp_path, run), "gradient spike")
    assert (d.answer, d.reason) == ("yes", "logits first")


@pytest.mark.parametrize("logit", [10.0, 500.0])
def test_an_overflow_of_half_precision_is_told(tmp_path: Path, logit: float) -> None:
    """The loss scale falls from step 60 on; logits rise after it, or not at all."""
    run = Made(HIGH).layer(3, logit_absmax=ramp(10, logit, begins=100)).diverges(150, rises_from=140)
    run.whole = {"loss_scale": ramp(65536, 16, begins=60, ends=140)}
    quiet = Made(LOW)
    quiet.whole = {"loss_scale": lambda step: 65536.0}
    d = one(checked([quiet.write(tmp_path), run.write(tmp_path)]), "divergence")
    assert (d.answer, d.reason) == ("no", "overflow first")
    assert "loss scale of half precision fell first, between steps 60 and 80" in findings([d], ARMS)[0]["sentence"]


def test_logits_that_overflow_half_precision_are_attention(tmp_path: Path) -> None:
    run = Made(HIGH).layer(3, logit_absmax=ramp(10, 1e5, ends=100)).diverges(150, rises_from=140)
    run.whole = {"loss_scale": ramp(65536, 16, begins=100, ends=140)}
    assert one(judged(tmp_path, run), "divergence").answer == "yes"


def test_logits_that_rise_after_the_loss_are_a_consequence(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(30, 1.0).layer(0, logit_absmax=ramp(10, 300, begins=120))
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason) == ("no", "loss first")
    assert "and only later the largest logit of blocks.0.attn rose" in findings([d], ARMS)[0]["sentence"]


def test_within_one_distance_of_probes_the_order_cannot_be_told(tmp_path: Path) -> None:
    run = Made(HIGH).layer(0, logit_absmax=ramp(10, 1000, begins=120, ends=180))
    run.worse_from(125, 1.0)
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason, d.probe_every) == ("cannot tell", "same interval", EVERY)
    assert "probes 20 steps apart cannot tell the order" in findings([d], ARMS)[0]["sentence"]


def test_logits_that_went_back_prove_nothing(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(130, 0.5).layer(0, logit_absmax=lambda step: 60.0 if 20 < step < 80 else 10.0)
    assert one(judged(tmp_path, run), "degradation").reason == "did not last"


def test_the_evidence_names_the_layers_that_the_answer_stands_on(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(130, 0.5).layer(0, logit_absmax=lambda step: 60.0 if 20 < step < 80 else 10.0)
    run.layer(3, logit_absmax=ramp(10, 40))
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.moved[0].sites) == ("yes", ("blocks.3.attn",))


def test_a_gradient_that_rose_before_the_logits_leaves_it_open(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(130, 0.5).layer(0, logit_absmax=ramp(10, 100, begins=60))
    run.grad_norm[20:] *= 5
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason) == ("cannot tell", "gradient first")


def test_gradients_of_attention_alone_leave_it_open(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(130, 0.5).layer(1, grad_norm=ramp(0.2, 2.0))
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason) == ("cannot tell", "attention gradients alone")


def test_low_entropy_alone_is_never_a_yes(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(130, 0.5).layer(1, entropy_share=ramp(0.8, 0.01))
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, [m.figure for m in d.moved]) == ("no", ["entropy"])


def test_an_arm_whose_norm_holds_its_logits(tmp_path: Path) -> None:
    run = Made(HIGH, arm="retrofit").worse_from(100, 0.5)
    for i in range(LAYERS):
        run.layer(i, logit_absmax=ramp(7.5, 7.9), logit_bound=lambda step: 8.0)
    quiet = Made(LOW, arm="retrofit")
    d = one(checked([quiet.write(tmp_path), run.write(tmp_path)]), "degradation")
    assert (d.answer, d.bound) == ("no", 8.0)
    assert "which the norm holds under 8" in findings([d], ARMS)[0]["sentence"]


def test_a_divergence_after_the_last_probe_leaves_it_open(tmp_path: Path) -> None:
    d = one(judged(tmp_path, Made(HIGH).diverges(59, rises_from=52)), "divergence")
    assert (d.answer, d.reason) == ("cannot tell", "no probe since")


def test_without_a_twin_logits_must_rise_further(tmp_path: Path) -> None:
    for end, answer in ((25.0, "no"), (400.0, "yes")):
        run = Made(LOW).layer(0, logit_absmax=ramp(10, end, ends=120)).diverges(190, rises_from=150)
        d = one(judged(tmp_path, run), "divergence")
        assert (d.answer, d.twin_lr) == (answer, None)


# ---- which rates end worse ------------------------------------------------------------------------------


def test_a_rate_within_the_spread_of_seeds_does_not_end_worse(tmp_path: Path) -> None:
    runs = [Made(lr, seed) for lr in (LOW, HIGH) for seed in range(3)]
    for run in runs:
        run.validation = 0.9 + 0.2 * run.key.seed + (0.1 if run.key.lr == HIGH else 0)
    assert checked([run.write(tmp_path) for run in runs]) == []
    for run in runs:
        run.validation = 0.9 + 0.02 * run.key.seed + (0.1 if run.key.lr == HIGH else 0)
    found = checked([run.write(tmp_path) for run in runs])
    assert [d.key.seed for d in found] == [0, 1, 2]
    assert {d.event for d in found} == {"degradation"}
    assert found[0].reason == "no logit moved"  # training loss does not show it, but no logit moved at all


def test_a_rate_below_the_best_one_is_no_event(tmp_path: Path) -> None:
    assert judged(tmp_path, Made(LOW).worse_from(0, 1.0), best=HIGH) == []


def test_seeds_that_agree_are_told_together(tmp_path: Path) -> None:
    runs = [Made(HIGH, seed).worse_from(100, 0.5).layer(1, logit_absmax=ramp(10, 40)) for seed in range(3)]
    runs[2].layers.clear()
    rows = findings(judged(tmp_path, *runs), ARMS)
    assert [(r["answer"], [x["seed"] for x in r["runs"]]) for r in rows] == [("yes", [0, 1]), ("no", [2])]
    assert "seeds 0 and 1, ends 0.500 nats" in rows[0]["sentence"]


# ---- files as they are found ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["probes.jsonl", "metrics.jsonl", "result.json"])
@pytest.mark.parametrize(
    "content", [None, "", "{", "null", "[1]", '{"step": 1e400}\n', '{"step": 0, "layers": [null, {"site": "a"}]}\n']
)
@pytest.mark.parametrize("lr", [LOW, HIGH])
def test_damaged_files_do_no_harm(tmp_path: Path, name: str, content: str | None, lr: float) -> None:
    runs = {
        LOW: Made(LOW),
        HIGH: Made(HIGH).layer(0, logit_absmax=ramp(10, 300, ends=100)).diverges(150, rises_from=140),
    }
    for run in runs.values():
        run.write(tmp_path)
    path = tmp_path / runs[lr].key.folder / name
    path.unlink() if content is None else path.write_text(content)
    found = checked([Trained.read(tmp_path, run.key) for run in runs.values()])
    if lr == HIGH and name == "probes.jsonl":
        assert (found[0].answer, found[0].reason) == ("cannot tell", "no probes")


def test_files_of_an_older_version_are_judged_by_what_they_have(tmp_path: Path) -> None:
    """Without loss scale, rate, gradient and update ratio in the probes."""
    made = [Made(LOW), Made(HIGH).worse_from(100, 0.5).layer(1, logit_absmax=ramp(10, 40))]
    for run in made:
        run.write(tmp_path)
        path = tmp_path / run.key.folder / "probes.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = ("site", "logit_absmax", "entropy_share", "q_rms", "k_rms")
        old = [{"step": r["step"], "layers": [{k: x[k] for k in kept} for x in r["layers"]]} for r in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in old))
    assert one(checked([Trained.read(tmp_path, run.key) for run in made]), "degradation").answer == "yes"


def test_values_that_are_missing_leave_it_open(tmp_path: Path) -> None:
    run = Made(HIGH).worse_from(100, 0.5)
    for i in range(LAYERS):
        run.layer(i, logit_absmax=lambda step: 10.0 if step < 40 else None)
    d = one(judged(tmp_path, run), "degradation")
    assert (d.answer, d.reason) == ("cannot tell", "no probe since")


def test_the_order_of_runs_changes_nothing(tmp_path: Path) -> None:
    made = [Made(HIGH, seed).worse_from(100, 0.5).layer(1, logit_absmax=ramp(10, 40)) for seed in range(3)]
    runs = [r.write(tmp_path) for r in [*made, *(Made(LOW, seed) for seed in range(3))]]
    assert findings(checked(runs), ARMS) == findings(checked(runs[::-1]), ARMS)


def test_importing_it_brings_no_torch() -> None:
    code = "import sys, retrofit.diagnose; print([m for m in ('torch', 'timm', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# ---- in the report --------------------------------------------------------------------------------------


def test_the_report_tells_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", diverged=[("baseline", 0.01, 1)], layers=3)
    document = build_report(folder)
    rows = [r for r in document["trouble"] if (r["arm"], r["lr"]) == ("baseline", 0.01)]
    assert rows[0]["event"] == "divergence"
    text = to_markdown(page(document))
    assert "## Did the trouble start in attention?" in text
    for row in rows[:3]:
        assert row["sentence"] in text
    assert text.index("## Attention, layer by layer") < text.index("## Did the trouble") < text.index("## Cost")


def test_the_schema_knows_every_event_answer_and_reason() -> None:
    schema = json.loads((files("retrofit.report") / "schema.json").read_text(encoding="utf-8"))
    row = schema["properties"]["trouble"]["items"]["properties"]
    for name, words in (("event", Event), ("answer", Answer), ("reason", Reason)):
        assert row[name]["enum"] == list(get_args(words))


def test_the_report_says_where_there_was_no_trouble(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", lrs=[0.001], layers=2)
    assert "no trouble to place" in to_markdown(page(build_report(folder)))
