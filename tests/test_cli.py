"""The command line: exit codes, one clear line for a user's mistake, JSON alone on stdout, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from made_run import make_run
from tiny_study import content, write_hf, write_images, write_timm

import retrofit
from retrofit import cli
from retrofit.checkpoint import seal
from retrofit.cli import main
from retrofit.export import folder, verify
from retrofit.runfiles import read_json, read_jsonl

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Proofs in this process, no network, and the signal handlers as they were."""
    monkeypatch.setattr(folder, "prove_in_fresh_process", verify)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, a model of either library and a recipe. Not to be changed."""
    root = tmp_path_factory.mktemp("cli")
    write_images(root / "data")
    write_timm(root / "model", num_classes=4)
    write_hf(root / "hf")
    document = content(root / "data", steps=2)
    document["model"] = f"timm:{root / 'model'}"
    (root / "study.yaml").write_text(yaml.safe_dump(document))
    (root / "thesis").mkdir()
    (root / "thesis" / "thesis.tex").write_text("years")
    (root / "folder" / "cat").mkdir(parents=True)
    (root / "folder" / "cat" / "notes.png").write_text("no image")
    (root / "text.parquet").write_text("no parquet")
    (root / "list.yaml").write_text("- a\n")
    return root


@pytest.fixture(scope="module")
def paired(place: Path) -> Path:
    """A finished study. Not to be changed."""
    out = place / "paired"
    assert main(["pair", str(place / "study.yaml"), "-o", str(out)]) == 0
    return out


# Plain paths


def test_pair_trains_and_ends_with_the_report(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    # Overrides may stand before and after the options.
    words = ["train.seeds=[1]", "-o", str(out), "train.lr=[1e-4]", "arms.retrofit.qk_norm.gain=shared"]
    assert main(["pair", str(place / "study.yaml"), *words]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert "step/s" in said.err
    assert "step/s" not in said.out
    assert (out / "baseline" / "lr0.0001-s1" / "result.json").is_file()
    assert read_json(out / "run.json")["recipe"]["arms"]["retrofit"]["qk_norm"]["gain"] == "shared"
    assert all((out / f"report.{kind}").is_file() for kind in ("html", "md", "json"))
    assert main(["pair", str(place / "study.yaml"), *words]) == 0  # finds everything there
    assert "step/s" not in capsys.readouterr().err


def test_without_an_output_the_run_is_named_after_the_recipe(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pair", str(place / "study.yaml"), "arms={baseline: {}}"]) == 0
    assert (tmp_path / "runs" / "study" / "report.html").is_file()


def test_a_dry_run_trains_nothing(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pair", str(place / "study.yaml"), "--dry-run", "-o", str(tmp_path / "run"), "train.seeds=[3]"]) == 0
    assert "2 runs of 2 steps:\n  baseline/lr0.001-s3\n  retrofit/lr0.001-s3" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_shard_is_a_part(place: Path, tmp_path: Path) -> None:
    words = ["pair", str(place / "study.yaml"), "-o", str(tmp_path / "run"), "train.seeds=[0,1]"]
    assert main([*words, "--shard", "2/2"]) == 0
    assert not (tmp_path / "run" / "baseline" / "lr0.001-s0").exists()
    assert (tmp_path / "run" / "baseline" / "lr0.001-s1" / "result.json").is_file()


def test_a_report_is_made_again_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", images=50, steps=20)
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"report: {run / 'report.html'}"
    assert len(said) > 1  # what was found
    first = (run / "report.html").read_bytes()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_bytes() == first
    (run / "report.md").write_text("mine")
    assert main(["report", str(run)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (run / "report.md").read_text() == "mine"
    assert main(["report", str(run), "--force"]) == 0
    assert (run / "report.md").read_text() != "mine"


def test_report_checks_for_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"images": 300, "steps": 5, "lrs": [0.001], "layers": 1}
    level = {("baseline", 0.001): 0.8, ("retrofit", 0.001): 0.8}
    good = make_run(tmp_path / "good", accuracy=level, diverged=[("baseline", 0.001, 0)], **small)
    worse = make_run(tmp_path / "worse", accuracy={**level, ("retrofit", 0.001): 0.4}, **small)
    diverged = make_run(tmp_path / "diverged", accuracy=level, diverged=[("retrofit", 0.001, 0)], **small)
    assert main(["report", "--check", str(good)]) == 0
    assert main(["report", str(worse)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["report", "--check", str(worse)]) == 3
    assert "retrofit at 0.001 is worse in test accuracy" in capsys.readouterr().err
    assert (worse / "report.html").is_file()
    assert main(["report", "--check", str(diverged)]) == 3
    assert "retrofit at 0.001 diverged in 1 of 3 runs" in capsys.readouterr().err
    assert main(["report", "--check", str(good), str(diverged)]) == 3
    assert main(["report", "--check", str(tmp_path)]) == 2


def test_report_compares_several_run_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name, images=20, steps=5, lrs=[0.001], layers=1) for name in ("one", "two")]
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "all")]) == 0
    said = capsys.readouterr().out
    assert "| one | retrofit |" in said
    assert "| two | retrofit |" in said
    assert all((folder / "report.html").is_file() for folder in (*runs, tmp_path / "all"))
    assert read_json(tmp_path / "all" / "report.json")["schema"].startswith("qknorm-retrofit/overview/")
    assert main(["report", *map(str, runs), "-o", str(runs[0])]) == 2
    assert "is one of the run folders" in capsys.readouterr().err
    assert main(["report", str(runs[0]), "-o", str(tmp_path / "elsewhere"), "--margin", "2"]) == 0
    assert read_json(tmp_path / "elsewhere" / "report.json")["study"]["margin"] == {"points": 2.0, "set_by": "option"}
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(runs[0]), "--margin", "0"])
    assert "is not a number of points above 0" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["timm:{}/model", "hf:{}/hf"])
def test_probe_prints_one_json_document_and_nothing_else(
    place: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    model = model.format(place)
    assert main(["probe", model, "--data", str(place / "data"), "--images", "6", "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (document["model"], document["images"], document["qk_norm"]["sites"]) == (model, 6, 2)
    assert document["qk_norm"]["skipped"] == []
    assert len(document["layers"]) == 2
    for row in document["layers"]:
        assert row["logit_absmax"] > 0
        assert 0 < row["entropy_share"] <= 1


def test_probe_prints_a_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"timm:{place}/model", "--data", str(place / "data"), "--images", "6"]) == 0
    out = capsys.readouterr().out
    assert "blocks.1.attn" in out
    assert "Largest |logit|: " in out


def test_apply_writes_a_model_that_verifies(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["apply", f"timm:{place}/model", "gain=per_head", "-o", str(out), "--data", str(place / "data")]
    assert main([*words, "--images", "16", "eps=1e-5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 attention layers now have RMSNorm over each head, gain per head, eps 1e-05")
    assert "start fit, before any training, 4 held-out images: " in said
    manifest = read_json(out / "retrofit.json")
    assert (manifest["qk_norm"]["eps"], manifest["qk_norm"]["gain"]) == (1e-5, "per_head")
    assert (manifest["about"]["calibration_images"], manifest["about"]["init"]) == (12, "fit")
    assert len(retrofit.load(out).blocks) == 2
    assert main(["verify", str(out)]) == 0
    assert "differ by" in capsys.readouterr().out
    assert main([*words, "--preset", "vit22b", "--init", "ones"]) == 0  # over what it wrote itself
    assert read_json(out / "retrofit.json")["qk_norm"]["norm"] == "layernorm"


def test_export_and_verify_say_yes_and_no(paired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(paired), "-o", str(out), "--arm", "retrofit", "--seed", "0", "--lr", "0.001"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"exported to {out}"
    assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    manifest = read_json(out / "retrofit.json")
    manifest["qk_norm"]["norm"] = "layernorm"
    for again, words in ((False, "retrofit.json has been changed since it was written"), (True, "differ by")):
        if again:
            manifest["seal"] = seal(manifest)
        (out / "retrofit.json").write_text(json.dumps(manifest))
        assert main(["verify", str(out)]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert words in said.err
        assert ("has been changed" in said.err) != again


def test_a_study_can_begin_from_a_folder_that_retrofit_wrote(place: Path, paired: Path, tmp_path: Path) -> None:
    trained = paired / "baseline" / "lr0.001-s0" / "final"
    words = ["pair", str(place / "study.yaml"), f"model={trained}", "data.image_size=null"]
    assert main([*words, "-o", str(tmp_path / "run")]) == 0


# A user's mistakes

MISTAKES = {
    "an unknown recipe": ("pair nanno", "no recipe nanno; did you mean nano? (shipped: "),
    "a missing recipe file": ("pair {}/none.yaml", "no recipe at {}/none.yaml; shipped recipes: "),
    "a recipe that is a list": ("pair {}/list.yaml", "holds no keys"),
    "a bad override": ("pair {}/study.yaml train.lrs=1 -o {}/new", "train.lrs: unknown key; did you mean lr?"),
    "an override without a value": ("pair {}/study.yaml lr -o {}/new", "'lr' is not a setting; write key=value"),
    "a wrong value": ("pair {}/study.yaml train.seeds=x -o {}/new", "train.seeds.0: "),
    "a run folder of somebody else": ("pair {}/study.yaml -o {}/thesis", "--force"),
    "a run folder that is a file": ("pair {}/study.yaml -o {}/study.yaml", "is a file; name a folder"),
    "missing data": ("pair {}/study.yaml data.source={}/dta -o {}/new", "dta is missing"),
    "a study of other things": ("pair {}/study.yaml train.steps=9 -o {}/paired", "train.steps (2 there, 9 now)"),
    "an unknown timm model": ("probe timm/vit_tny_patch16_224", "did you mean vit_tiny_patch16_224"),
    "an unknown hub model": ("probe hf/nobody/nothing", "hub"),
    "no model at all": ("probe vit", "a model is `nano`, `timm/NAME`, `hf/ID`"),
    "a missing model folder": ("probe timm:{}/none", "there is no folder"),
    "a folder without a model": ("probe {}/data", "is no model"),
    "a timm folder taken for one of transformers": (
        "probe hf:{}/model",
        "{}/model is a timm model; name it timm:{}/model",
    ),
    "a transformers folder taken for one of timm": ("probe timm:{}/hf", "use hf:DIR"),
    "a model folder named plainly": ("probe {}/model", "it looks like a timm folder: timm:{}/model"),
    "missing images": ("probe timm:{}/model --data {}/none", "none is missing (images come from: "),
    "a file that is no image": ("probe timm:{}/model --data {}/folder", "notes.png cannot be read as an image"),
    "a file that is no parquet": ("probe timm:{}/model --data {}/text.parquet", "cannot be read as parquet"),
    "a bad preset": ("apply timm:{}/model -o {}/new --preset qwen", "unknown preset 'qwen'; did you mean qwen3?"),
    "a bad field": ("apply timm:{}/model -o {}/new gian=shared", "gian: unknown key; did you mean gain?"),
    "a bad value of a field": ("apply timm:{}/model -o {}/new gain=all", "gain: Input should be 'shared'"),
    "a setting without a value": ("apply timm:{}/model gain -o {}/new", "'gain' is not a setting; write key=value"),
    "an output of somebody else": ("apply timm:{}/model -o {}/thesis", "holds files that retrofit did not write"),
    "no run folder to report": ("report {}/none", "none"),
    "a run folder that is something else": ("report {}/thesis", "thesis"),
    "a report into a file": ("report {}/paired -o {}/study.yaml", "study.yaml cannot be written: File exists"),
    "a report below a file": ("report {}/paired -o {}/study.yaml/new", "cannot be written: Not a directory"),
    "a name that is too long": ("report {}/paired -o {}/" + 300 * "n", "cannot be written: File name too long"),
    "a run folder twice": ("report {}/paired {}/paired/.", "{}/paired and {}/paired are the same folder"),
    "no run folder to export": ("export {}/none -o {}/new", "neither a run folder"),
    "an arm that is not there": ("export {}/paired -o {}/new --arm retofit", "(arms: baseline, retrofit)"),
    "a seed that is not there": ("export {}/paired -o {}/new --seed 8", "there are: lr 0.001 seed 0"),
    "nothing to verify": ("verify {}/none", "there is no such file or folder"),
    "something else to verify": ("verify {}/hf", "it looks like a transformers folder: hf:{}/hf"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(
    place: Path, paired: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    words, expected = (text.replace("{}", str(place)) for text in MISTAKES[mistake])
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("retrofit: ")
    assert expected in line
    assert "Traceback" not in line
    assert not (place / "new").exists()
    assert [p.name for p in (place / "thesis").iterdir()] == ["thesis.tex"]


def test_all_faults_of_a_recipe_come_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pair", str(place / "study.yaml"), "train.lrs=1", "data.hflip=7", "epochs"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "retrofit:"
    assert sorted(re.match(r"  (\S+)", line)[1] for line in lines) == ["'epochs'", "data.hflip:", "train.lrs:"]


def test_a_foreign_output_is_refused_before_the_work(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrofit.checkpoint.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["apply", "nano", "-o", str(place / "thesis")]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "COMMAND"),
        ("par nano", "invalid choice: 'par'"),
        ("pair", "RECIPE"),
        ("pair nano --shard 3/2", "'3/2' is not I/N"),
        ("pair nano --shard 0/2", "is not I/N"),
        ("pair nano --sharp 1/2", "unrecognized arguments: --sharp"),
        ("probe nano --images 0", "not a whole number from 1 on"),
        ("probe nano --images few", "few"),
        ("probe nano key=value", "unrecognized arguments: key=value"),
        ("apply nano", "-o"),
        ("apply nano -o x --init fast", "invalid choice: 'fast'"),
        ("export run -o x --to onxx", "invalid choice: 'onxx'"),
    ],
)
def test_a_command_that_cannot_be_read_is_exit_2(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: retrofit")
    assert expected in said.err.splitlines()[-1]


def test_a_terminal_that_lacks_a_letter_gets_an_escape(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", images=20, steps=5, lrs=[0.001], layers=1, recipe={"data": {"source": "für"}})
    command = [sys.executable, "-m", "retrofit", "report", str(made)]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"f\xfcr" in done.stdout


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--version"], *([name, "--help"] for name in ("probe", "apply", "pair", "verify"))):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert f"retrofit {retrofit.__version__}" in capsys.readouterr().out


# What is no mistake of the user's


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("retrofit.report.write_report", broken)
    with pytest.raises(ZeroDivisionError):
        main(["report", "anywhere"])


def test_a_reader_that_leaves_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_report", closed)
    monkeypatch.setattr(sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115 (closed by what is tested)
    assert main(["report", "anywhere"]) == 0


def test_interrupted_and_terminated_runs_are_saved(place: Path, tmp_path: Path) -> None:
    """In real processes, both at once: 130 and 143, no traceback, and what was trained is saved."""
    running = {}
    for sent in (signal.SIGINT, signal.SIGTERM):
        words = ["pair", str(place / "study.yaml"), "-o", str(tmp_path / sent.name), "train.steps=1000000"]
        code = f"import sys; from retrofit.cli import main; sys.exit(main({words!r}))"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running[sent] = subprocess.Popen([sys.executable, "-c", code], env=env, **pipes)
    try:
        for sent, process in running.items():
            rows = tmp_path / sent.name / "retrofit" / "lr0.001-s0" / "metrics.jsonl"
            until = time.monotonic() + 120
            while not (rows.is_file() and rows.stat().st_size):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(sent)
        for sent, process in running.items():
            _, said = process.communicate(timeout=60)
            assert process.returncode == 128 + sent
            assert "what was trained is saved, and the same command goes on from there" in said
            assert "Traceback" not in said
            run = tmp_path / sent.name
            assert read_jsonl(run / "retrofit" / "lr0.001-s0" / "metrics.jsonl")[0]["step"] == 0
            assert (run / "retrofit" / "insertion.json").is_file()
            assert not list(run.rglob("result.json"))
            assert [len(list((run / arm).rglob("last/*.pt"))) for arm in ("baseline", "retrofit")] == [1, 1]
            assert not list(run.rglob(".*"))
    finally:
        for process in running.values():
            process.kill()


def test_an_interrupt_is_130_in_process_too(
    place: Path, paired: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same command then goes on from there."""
    run = Path(shutil.copytree(paired, tmp_path / "run"))
    lost = run / "retrofit" / "lr0.001-s0"
    before = (lost / "metrics.jsonl").read_bytes()
    (lost / "result.json").unlink()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    words = ["pair", str(place / "study.yaml"), "-o", str(run)]
    with monkeypatch.context() as patch:
        patch.setattr("retrofit.train.ArmRun.step", interrupted)
        assert main(words) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("retrofit: interrupted; what was saved is kept")
    assert main(words) == 0
    assert (lost / "metrics.jsonl").read_bytes() == before
