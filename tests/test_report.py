"""The report from files alone: numbers against the files themselves, damaged folders, wording, bytes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import scipy.stats
from made_run import CLASSES, LRS, SEEDS, folder_of, make_run

from retrofit.errors import RetrofitError
from retrofit.report import build_report, write_report
from retrofit.report.markdown import to_markdown
from retrofit.report.text import page

SCHEMA = json.loads((files("retrofit.report") / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def checked(folder: Path) -> dict[str, Any]:
    """The document of a folder, valid under the schema, with a page that never says nan."""
    document = build_report(folder)
    VALIDATOR.validate(json.loads(json.dumps(document, allow_nan=False)))
    text = to_markdown(page(document))
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
    shown = " ".join(_Page((made / "report.html").read_text(encoding="utf-8")).text.split())
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
    assert "3 of 3 runs of baseline diverged and count as chance" in document["verdict"]["sentences"][1]
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
    shown = _Page(write_report(folder).read_text(encoding="utf-8")).text
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


def test_a_half_swept_rate_cannot_win(tmp_path: Path) -> None:
    missing = [("baseline", LRS[0], s) for s in (1, 2)]
    document = checked(make_run(tmp_path / "run", missing=missing))
    assert {b["arm"]: b["lr"] for b in document["best_rates"]} == {"baseline": LRS[1], "retrofit": LRS[0]}


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
@pytest.mark.parametrize("value", [None, "text", -1, True, [], {}, [None], {"a": []}, 1e400])
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


def test_what_is_no_run_folder_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="not a folder"):
        build_report(tmp_path / "nowhere")
    with pytest.raises(RetrofitError, match="nothing to report on"):
        build_report(tmp_path)


# ---- the files ------------------------------------------------------------------------------------------


def test_made_twice_the_files_are_the_same_bytes(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(made, other, ignore=shutil.ignore_patterns("report.*"))
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nsvg.fonttype: path\n")
    code = "import sys; from pathlib import Path; from retrofit.report import write_report as w; w(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    subprocess.run([sys.executable, "-c", code, str(other)], check=True, env=environment)
    for name in ("report.json", "report.md", "report.html"):
        assert (other / name).read_bytes() == (made / name).read_bytes()


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json"])
def test_a_file_of_someone_else_is_not_overwritten(copy: Path, name: str) -> None:
    (copy / name).write_text("{}" if name.endswith("json") else "my notes")
    before = {p.name: p.read_bytes() for p in copy.glob("report.*")}
    with pytest.raises(RetrofitError, match=f"{name}, which retrofit did not write"):
        write_report(copy)
    assert {p.name: p.read_bytes() for p in copy.glob("report.*")} == before
    write_report(copy, force=True)
    assert (copy / name).read_bytes() != before[name]


class _Page(HTMLParser):
    """The visible text, the tags and the attributes of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._hidden = 0
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._hidden += tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "style"

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else f"{data} "


def test_the_page_needs_nothing_from_elsewhere(made: Path) -> None:
    content = (made / "report.html").read_text(encoding="utf-8")
    shown = _Page(content)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base"} & set(shown.tags)
    for name, value in shown.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith(("#", "data:image/png;base64,"))
    without_pictures = re.sub(r'href="data:image/png;base64,[\w+/=\s]*"', "", content)
    assert not re.search(r"https?:|//|@import|url\((?!#)|data:", re.sub(r"/\*.*?\*/", "", without_pictures))
    ids = [value for name, value in shown.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {v[1:] for n, v in shown.attributes if n == "href" and v.startswith("#")} | set(
        re.findall(r"url\(#([^)]*)\)", content)
    )
    assert used <= set(ids)
    figures = [value for name, value in shown.attributes if name == "aria-label"]
    assert any(label.startswith("Mean test accuracy. baseline at 0.001: 79") for label in figures)


def test_a_large_study_stays_under_two_megabytes(tmp_path: Path) -> None:
    arms, lrs = ["baseline", "a", "b"], [1e-5, 1e-4, 1e-3, 1e-2]
    folder = make_run(tmp_path / "run", arms=arms, lrs=lrs, seeds=range(3), layers=24, images=20)
    assert write_report(folder).stat().st_size < 2_000_000


def test_names_from_files_are_shown_and_do_nothing(copy: Path) -> None:
    hostile = "<script>alert(1)</script> | *x* `y` [z](w)"
    manifest = json.loads((copy / "run.json").read_text())
    manifest["environment"]["platform"] = hostile
    manifest["recipe"]["model"]["source"] = hostile
    (copy / "run.json").write_text(json.dumps(manifest))
    page_shown = _Page(write_report(copy).read_text(encoding="utf-8"))
    assert "script" not in page_shown.tags
    assert hostile in page_shown.text
    text = (copy / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\<", "")


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
