"""retrofit.export: which run is meant, what is written, and that `verify` says no to everything that was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import yaml
from made_run import folder_of, make_run
from tiny_study import content, write_images

import retrofit
from retrofit.checkpoint import file_hash, fingerprint, seal
from retrofit.errors import CheckpointError, RetrofitError
from retrofit.export import Proof, export_model, export_run, folder, runs, verify
from retrofit.pair import run_pair
from retrofit.recipe import parse
from retrofit.runfiles import read_json


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained study, with QK-Norm whose eps can be felt. Not to be changed."""
    root = tmp_path_factory.mktemp("export")
    document = content(write_images(root / "data"), steps=3, lr=3e-3)
    document["arms"]["retrofit"]["qk_norm"] = {"preset": "qwen3", "gain": "per_head", "eps": 1e-2}
    run_pair(parse(document), root / "run")
    return root / "run"


def base_of(run: Path) -> str:
    """The checkpoint that `tiny_study` lays beside the images."""
    return f"timm:{run.parent / 'data-checkpoint'}"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """What `retrofit export` makes of it, proved by a fresh process. Not to be changed."""
    findings = export_run(run, run.parent / "exported")
    assert any("outputs on 4 images differ by" in line for line in findings)
    return run.parent / "exported"


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves in this process, which takes no seconds."""
    monkeypatch.setattr(folder, "prove_in_fresh_process", verify)


# What is written


def test_an_export_is_the_model_with_labels_preprocessing_and_proof(run: Path, exported: Path) -> None:
    assert sorted(p.name for p in exported.iterdir()) == [
        "README.md",
        "fixture.safetensors",
        "retrofit.json",
        "retrofit.safetensors",
    ]
    ours, trained = retrofit.load(exported), retrofit.load(run / "retrofit" / "lr0.003-s0" / "final")
    assert not ours.training
    for name, value in trained.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(ours(images), trained(images))
        fixture = safetensors.torch.load_file(exported / "fixture.safetensors")
        torch.testing.assert_close(trained(fixture["images"]), fixture["outputs"])
    manifest = read_json(exported / "retrofit.json")
    assert manifest["labels"] == ["class 0", "class 1", "class 2", "class 3"]
    assert manifest["preprocess"]["image_size"] == 16
    assert manifest["qk_norm"]["eps"] == 1e-2
    assert manifest["sites"] == ["blocks.0.attn", "blocks.1.attn"]
    result = read_json(run / "retrofit" / "lr0.003-s0" / "result.json")
    about = manifest["about"]
    assert (about["arm"], about["lr"], about["seed"], about["test"]) == ("retrofit", 0.003, 0, result["test"])
    assert (about["base"], about["init"]) == (base_of(run), "match")
    assert about["shock"] == read_json(run / "retrofit" / "insertion.json")["shock"]


def test_the_card_says_what_is_known(run: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    result = read_json(run / "retrofit" / "lr0.003-s0" / "result.json")
    front, _, body = card.removeprefix("---\n").partition("---\n\n")
    assert yaml.safe_load(front) == {
        "library_name": "retrofit",
        "pipeline_tag": "image-classification",
        "tags": ["qk-norm"],
    }
    assert body.startswith("# data-checkpoint with QK-Norm\n")  # what a base is called, not where it lay
    assert str(run.parent) not in body
    assert "epochs" not in body  # the recipe names steps
    assert f"timm {timm.__version__}" in body
    assert "arm retrofit, learning rate 0.003, seed 0, fp32, 3 steps" in card
    assert f"- test: accuracy {100 * result['test']['accuracy']:.2f} %" in card
    assert "one run, so that no spread is known from it" in card
    assert "eps 0.01" in card
    assert "16 x 16" in card
    assert "not fine-tuned" not in card


@pytest.mark.usefixtures("here")
def test_the_baseline_is_exported_as_what_it_is(run: Path, tmp_path: Path) -> None:
    findings = export_run(run, tmp_path / "out", arm="baseline")
    assert "no QK-Norm, as written" in findings
    assert read_json(tmp_path / "out" / "retrofit.json")["qk_norm"] is None
    assert "\n# data-checkpoint, fine-tuned\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.usefixtures("here")
def test_a_folder_that_retrofit_wrote_can_be_exported_again(exported: Path, tmp_path: Path) -> None:
    export_run(exported, tmp_path / "out")
    assert (tmp_path / "out" / "retrofit.safetensors").read_bytes() == (exported / "retrofit.safetensors").read_bytes()
    one, other = (read_json(p / "retrofit.json") for p in (tmp_path / "out", exported))
    assert one["about"] == other["about"]
    export_run(exported, tmp_path / "out")  # over what it wrote itself


@pytest.mark.usefixtures("here")
def test_files_of_somebody_else_are_not_overwritten(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    with pytest.raises(RetrofitError, match=r"did not write.*--force"):
        export_run(exported, out)
    assert [p.name for p in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "mine"
    export_run(exported, out, force=True)
    assert verify(out).ok


def test_what_is_exported_is_never_replaced(run: Path, exported: Path, tmp_path: Path) -> None:
    """A graph, or weights in another dtype, in the place of what they were made of could not be turned back."""
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    (tmp_path / "link").symlink_to(copy)
    for source, out in (
        (copy, copy),
        (copy, tmp_path / "link"),
        (tmp_path / "link", copy),
        (run, run / "retrofit" / "lr0.003-s0" / "final"),
        (run, run / "baseline" / "lr0.003-s0" / "final"),
    ):
        with pytest.raises(RetrofitError, match=r"belongs to .*, which is exported; name a folder of its own"):
            export_run(source, out, force=True)


def test_a_folder_in_the_way_is_refused_before_the_model_is_loaded(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    monkeypatch.setattr(runs, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(RetrofitError, match="did not write"):
        export_run(exported, tmp_path)


def test_an_export_that_does_not_hold_is_an_error(exported: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(folder, "prove_in_fresh_process", lambda _: Proof(False, ["outputs differ"]))
    with pytest.raises(CheckpointError, match="is not sound: outputs differ"):
        export_model(retrofit.load(exported), tmp_path / "out", about={})


# verify

CHANGED = "has been changed since it was written"


def test_what_was_written_verifies(exported: Path) -> None:
    proof = verify(exported)
    assert proof.ok
    assert proof.findings[0] == "3 files are those that were written"
    assert proof.findings[1].startswith("2 attention layers with QK-Norm (RMSNorm")


Tamper = Callable[[Path, bool], None]
"""Changes a folder, and makes the manifest's seal anew where told to."""


def edit(change: Callable[[dict[str, Any]], Any]) -> Tamper:
    def apply(place: Path, sealed: bool) -> None:
        manifest = json.loads((place / "retrofit.json").read_text())
        change(manifest)
        if sealed:
            manifest["seal"] = seal(manifest)
        (place / "retrofit.json").write_text(json.dumps(manifest))

    return apply


def flip(name: str) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        content = bytearray((place / name).read_bytes())
        content[-1] ^= 1
        (place / name).write_bytes(content)

    return apply


def rewrite(name: str, key: str) -> Tamper:
    """Changes a tensor, and the hash with it."""

    def apply(place: Path, sealed: bool) -> None:
        tensors = safetensors.torch.load_file(place / name)
        tensors[key] = tensors[key] * 1.01 + 0.01
        safetensors.torch.save_file(tensors, place / name, metadata={"format": "pt"})
        known = {key: fingerprint({key: tensors[key]})} if name == "retrofit.safetensors" else {}
        edit(lambda m: (m["files"].update({name: file_hash(place / name)}), m["tensors"].update(known)))(place, sealed)

    return apply


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (flip("retrofit.safetensors"), "retrofit.safetensors is not the file that was written: its hash differs"),
        (flip("fixture.safetensors"), "fixture.safetensors is not the file that was written: its hash differs"),
        (flip("README.md"), "README.md is not the file that was written: its hash differs"),
        (lambda place: (place / "retrofit.safetensors").unlink(), "retrofit.safetensors is missing"),
    ],
)
def test_a_file_that_was_changed_does_not_verify(copied: Path, tamper: Callable[[Path], None], words: str) -> None:
    tamper(copied)
    assert verify(copied) == Proof(False, [words])


@pytest.mark.parametrize("sealed", [False, True], ids=["", "sealed"])
@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (rewrite("retrofit.safetensors", "head.bias"), "differ by"),
        (rewrite("retrofit.safetensors", "blocks.0.attn.q_norm.weight"), "differ by"),
        (rewrite("fixture.safetensors", "outputs"), "differ by"),
        (edit(lambda m: m["qk_norm"].update(eps=1e-6)), "differ by"),
        (edit(lambda m: m["qk_norm"].update(norm="layernorm")), "differ by"),
        (edit(lambda m: m["qk_norm"].update(eps=-1)), "eps=-1"),
        (edit(lambda m: m["qk_norm"].update(gain="shared")), "does not fit together"),
        (edit(lambda m: m["qk_norm"].update(layers=[0])), "other places"),
        (edit(lambda m: m.update(qk_norm=None)), "other places"),
        (edit(lambda m: m.update(qk_norm="qwen3")), "does not fit together"),
        (edit(lambda m: m.update(sites=["blocks.0.attn"])), "other places"),
        (edit(lambda m: m.update(model=3)), "does not fit together"),
        (edit(lambda m: m["model"].update(num_classes=9)), "does not fit together"),
        (edit(lambda m: m.update(library="keras")), "no library known here"),
        (edit(lambda m: m["files"].pop("fixture.safetensors")), "no fixture.safetensors to prove"),
    ],
)
def test_a_manifest_that_was_changed_does_not_verify(copied: Path, tamper: Tamper, words: str, sealed: bool) -> None:
    """The seal tells a change by hand; what somebody sealed again is still found by what it says."""
    tamper(copied, sealed)
    proof = verify(copied)
    assert not proof.ok
    said = "\n".join(proof.findings)
    assert (CHANGED in said) != sealed
    if sealed:
        assert words in said
    else:
        with pytest.raises(CheckpointError, match=CHANGED):
            retrofit.load(copied)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["labels"].reverse(),
        lambda m: m["preprocess"].update(mean=[0.4, 0.4, 0.4]),
        lambda m: m["about"].update(base="timm/other"),
        lambda m: m["about"]["test"].update(accuracy=1.0),
        lambda m: m["versions"].update(torch="1.0"),
        lambda m: m.update(more=True),
        lambda m: m.update(seal="0" * 64),
        lambda m: m.update(seal=None),
    ],
    ids=["labels", "preprocess", "base", "accuracy", "versions", "more", "seal", "no seal"],
)
def test_what_changes_no_output_is_told_by_the_seal(copied: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(change)(copied, False)
    assert verify(copied) == Proof(False, [f"retrofit.json {CHANGED}"])
    with pytest.raises(CheckpointError, match=CHANGED):
        retrofit.load(copied)


def test_several_wrong_files_are_all_named(copied: Path) -> None:
    flip("retrofit.safetensors")(copied)
    (copied / "README.md").unlink()
    assert len(verify(copied).findings) == 2


@pytest.mark.parametrize("kind", ["absent", "empty", "torn", "old", "bare"])
def test_what_retrofit_did_not_write_is_a_users_mistake(exported: Path, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind != "absent":
        place.mkdir()
    if kind == "torn":
        (place / "retrofit.json").write_text('{"format": 1')
    if kind == "old":
        (place / "retrofit.json").write_text('{"format": 1}')
    if kind == "bare":
        shutil.copytree(exported, place, dirs_exist_ok=True)
        edit(lambda m: m.update(files={}))(place, True)
    with pytest.raises(RetrofitError, match="place"):
        verify(place)


# Which run is meant


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The folder of a made run that `export_run` takes."""
    taken: list[Path] = []
    monkeypatch.setattr(runs, "load", lambda path: taken.append(path))
    monkeypatch.setattr(runs, "export_model", lambda model, place, **given: [json.dumps(given["about"])])

    def choose(run_dir: Path, **given: Any) -> str:
        taken.clear()
        (about,) = export_run(run_dir, run_dir.parent / "out", **given)
        result = read_json(taken[0].parent / "result.json")
        for key in ("arm", "lr", "seed", "test", "validation"):
            assert json.loads(about)[key] == result[key]
        assert taken[0].name == "final"
        return taken[0].parent.relative_to(run_dir).as_posix()

    return choose


BEST = {("retrofit", 0.001): 0.70, ("retrofit", 0.003): 0.95, ("retrofit", 0.01): 0.5}


def test_by_default_the_first_retrofitted_arm_at_its_best_rate(tmp_path: Path, chosen: Callable[..., str]) -> None:
    run = make_run(tmp_path / "run", accuracy=BEST, images=50, steps=10)
    assert chosen(run) == "retrofit/lr0.003-s0"
    losses = {
        lr: [read_json(run / folder_of("retrofit", lr, s) / "result.json")["validation"]["loss"] for s in range(3)]
        for lr in (0.001, 0.003, 0.01)
    }
    assert min(losses, key=lambda lr: sum(losses[lr])) == 0.003
    assert chosen(run, seed=2) == "retrofit/lr0.003-s2"
    assert chosen(run, lr=0.01) == "retrofit/lr0.01-s0"
    assert chosen(run, arm="baseline", lr=0.001, seed=1) == "baseline/lr0.001-s1"


def test_a_rate_at_which_a_seed_was_lost_is_not_the_best_one(tmp_path: Path, chosen: Callable[..., str]) -> None:
    lost = {("retrofit", 0.003, 0), ("retrofit", 0.003, 1)}
    run = make_run(tmp_path / "run", accuracy=BEST, images=50, steps=10, diverged=lost)
    assert chosen(run) == "retrofit/lr0.001-s0"
    assert chosen(run, lr=0.003) == "retrofit/lr0.003-s2"


def test_one_arm_is_the_one_that_is_meant(tmp_path: Path, chosen: Callable[..., str]) -> None:
    run = make_run(tmp_path / "run", arms=["baseline"], lrs=[0.001], seeds=[4], images=50, steps=10)
    assert chosen(run) == "baseline/lr0.001-s4"


def test_what_is_not_there_lists_what_is(tmp_path: Path, chosen: Callable[..., str]) -> None:
    missing = {("baseline", lr, s) for lr in (0.001, 0.003) for s in (0, 1)}
    run = make_run(
        tmp_path / "run",
        lrs=[0.001, 0.003],
        seeds=[0, 1],
        images=50,
        steps=10,
        missing=missing,
        diverged={("retrofit", 0.003, 1)},
    )
    for given, words in (
        ({"arm": "retofit"}, r"there is no arm retofit; did you mean retrofit\? \(arms: baseline, retrofit\)"),
        ({"seed": 7}, r"no finished run with .* seed 7; there are: lr 0.001 seed 0, lr 0.003 seed 0, lr 0.001 seed 1$"),
        ({"lr": 0.1}, r"no finished run with lr 0.1 .*; there are: lr 0.001 seed 0"),
        ({"lr": 0.003, "seed": 1}, r"no finished run with lr 0.003 and seed 1; there are"),
        ({"arm": "baseline"}, r"no run of arm baseline in .* has finished: `retrofit pair` goes on with them"),
    ):
        with pytest.raises(RetrofitError, match=words):
            chosen(run, **given)
    with pytest.raises(RetrofitError, match=r"neither a run folder \(run.json\) nor a checkpoint"):
        chosen(tmp_path / "nowhere")


# What of a run is exported


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of two arms, which keep a moving average of their weights."""
    root = tmp_path_factory.mktemp("averaged")
    run_pair(parse(content(write_images(root / "data"), steps=3, lr=3e-3, seeds=[0, 1], ema=0.5)), root / "run")
    return root / "run"


@pytest.mark.usefixtures("here")
def test_the_average_or_what_it_is_the_average_of(averaged: Path, run: Path, tmp_path: Path) -> None:
    made = averaged / "retrofit" / "lr0.003-s0"
    weights = {name: (made / name / "retrofit.safetensors").read_bytes() for name in ("final", "without-ema")}
    assert weights["final"] != weights["without-ema"]
    result = read_json(made / "result.json")
    for ema, name in ((None, "final"), (True, "final"), (False, "without-ema")):
        out = tmp_path / str(ema)
        export_run(averaged, out, ema=ema)
        assert (out / "retrofit.safetensors").read_bytes() == weights[name]
        about = read_json(out / "retrofit.json")["about"]
        assert about["test"] == (result if name == "final" else result["without_ema"])["test"]
        assert ("moving average (decay 0.5)" in (out / "README.md").read_text()) == (ema is not False)
    with pytest.raises(RetrofitError, match=r"kept no average of its weights; a recipe asks for one by train.ema"):
        export_run(run, tmp_path / "none", ema=True)
    with pytest.raises(RetrofitError, match="holds one model"):
        export_run(tmp_path / "None", tmp_path / "none", ema=True)


@pytest.mark.usefixtures("here")
def test_the_card_tells_the_spread_over_seeds(averaged: Path, tmp_path: Path) -> None:
    export_run(averaged, tmp_path / "out")
    spread = read_json(tmp_path / "out" / "retrofit.json")["about"]["spread"]
    accuracy = {
        arm: [100 * read_json(averaged / arm / f"lr0.003-s{s}" / "result.json")["test"]["accuracy"] for s in (0, 1)]
        for arm in ("baseline", "retrofit")
    }
    assert spread["seeds"] == 2
    assert spread["mean"] == pytest.approx(sum(accuracy["retrofit"]) / 2)
    differences = [b - a for a, b in zip(*accuracy.values(), strict=True)]
    assert spread["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "against the original, fine-tuned alike, 2 pairs" in card
    assert "- recipe: " in card
    assert ", weights " in next(line for line in card.splitlines() if line.startswith("- base: "))
    export_run(averaged, tmp_path / "without", ema=False)
    spread = read_json(tmp_path / "without" / "retrofit.json")["about"]["spread"]
    one, two = (read_json(averaged / "retrofit" / f"lr0.003-s{s}" / "result.json")["without_ema"] for s in (0, 1))
    assert spread["mean"] == pytest.approx(50 * (one["test"]["accuracy"] + two["test"]["accuracy"]))


def test_no_dtype_but_three(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="dtype='int8' is not one of float32, float16, bfloat16"):
        export_run(exported, tmp_path / "out", dtype="int8")
