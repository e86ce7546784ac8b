"""retrofit.pair: what is run, what is left alone, what is refused, and that the arms of a pair match."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_study import QK_NORM, SIZES, content, recipe, write_hf, write_images, write_timm

import retrofit
from retrofit import pair
from retrofit import study as rooms
from retrofit.checkpoint import load_model
from retrofit.cli import main
from retrofit.data import Images, eval_batches, open_splits
from retrofit.errors import ModelError, PairMismatch, RecipeError, RetrofitError
from retrofit.models import family_of
from retrofit.pair import check_matched, run_pair
from retrofit.qknorm import QKNorm
from retrofit.recipe import dump, load_recipe, parse
from retrofit.report import build_report
from retrofit.runfiles import RunKey, read_json, read_jsonl, write_json, write_text
from retrofit.surgery import insert_qk_norm

DETERMINISTIC = (
    "metrics.jsonl",
    "probes.jsonl",
    "predictions.npz",
    "final/retrofit.safetensors",
    "final/retrofit.json",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms, two seeds, two learning rates, in one go. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_pair(recipe(data, **GRID), folder, command=["retrofit", "pair", "it"])
    return folder


GRID: dict[str, Any] = {"seeds": [0, 1], "lr": [1e-3, 3e-3], "steps": 3}


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        p.relative_to(folder).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def same_runs(one: Path, other: Path, keys: list[Any]) -> None:
    for key in keys:
        for name in DETERMINISTIC:
            assert (one / key.folder / name).read_bytes() == (other / key.folder / name).read_bytes(), (key, name)


def test_the_recipe_alone_says_how_it_trains(whole: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate's configuration file or options say of the same things does not act beside it."""
    for name, value in (
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
    ):
        monkeypatch.setenv(name, value)
    study = recipe(data, **GRID)
    run_pair(study, whole.parent / "configured")
    same_runs(whole, whole.parent / "configured", study.plan())
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RetrofitError, match="DeepSpeed is not supported"):
        run_pair(study, whole.parent / "deep")


# What a study leaves


def test_the_folder_holds_what_runfiles_says(whole: Path, data: Path) -> None:
    study = recipe(data, **GRID)
    assert load_recipe(whole / "recipe.yaml") == study
    manifest = read_json(whole / "run.json")
    assert [(k["arm"], k["lr"], k["seed"]) for k in manifest["plan"]] == [(k.arm, k.lr, k.seed) for k in study.plan()]
    assert manifest["classes"] == ["class 0", "class 1", "class 2", "class 3"]
    assert {name: split["images"] for name, split in manifest["data"].items()} == SIZES
    assert manifest["data"]["test"]["sha256"] == open_splits(study.data).test.fingerprint()
    assert manifest["command"] == ["retrofit", "pair", "it"]
    assert torch.__version__.startswith(manifest["environment"]["torch"])
    expected = {f"{k.folder}/{n}" for k in study.plan() for n in (*DETERMINISTIC, "timings.jsonl", "result.json")}
    assert set(snapshot(whole)) == expected | {
        *("recipe.yaml", "run.json"),
        *("retrofit/insertion.json", "retrofit/norms.safetensors"),
    }


def test_pairs_saw_the_same_and_seeds_did_not(whole: Path, data: Path) -> None:
    plan = recipe(data, **GRID).plan()
    seen = {key: [(r["ids"], r["lr"]) for r in read_jsonl(whole / key.folder / "metrics.jsonl")] for key in plan}
    for key in plan:
        assert seen[key] == seen[replace(key, arm="baseline", folder=key.folder.replace("retrofit", "baseline"))]
    ids = {key.seed: [i for i, _ in rows] for key, rows in seen.items()}
    assert len(ids) == 2
    assert ids[0] != ids[1]


def test_insertion_says_what_surgery_did(whole: Path, data: Path) -> None:
    """Against an insertion made here, on the same images."""
    study = recipe(data, **GRID)
    record = read_json(whole / "retrofit" / "insertion.json")
    model = load_model(study.model.source, image_size=16)
    splits, preprocess = open_splits(study.data), family_of(model).preprocess(model)

    def pixels(images: Images) -> torch.Tensor:
        return next(eval_batches(images, preprocess, 100)).pixels

    insertion = insert_qk_norm(
        model,
        QKNorm.preset("qwen3", gain="per_head"),
        images=pixels(splits.train.take(16, "calibration")),
        held_out=pixels(splits.validation.take(8, "held out")),
        init="match",
    )
    assert (record["arm"], record["init"], record["sites"], record["skipped"]) == ("retrofit", "match", 2, [])
    assert (record["calibration_images"], record["held_out_images"]) == (16, 8)
    assert record["qk_norm"]["gain"] == "per_head"
    assert record["formula"] == "RMSNorm over each head, gain per head, eps 1e-06, before RoPE"
    assert [layer["site"] for layer in record["layers"]] == insertion.sites
    for layer, expected in zip(record["layers"], insertion.layers, strict=True):
        assert layer["gain_q"] == pytest.approx(expected.gain_q, rel=1e-5)
        assert layer["logit_bound"] == pytest.approx(expected.logit_bound, rel=1e-5)
    assert set(record["shock"]) == {"ones", "match"}
    for init, shock in record["shock"].items():
        assert shock["images"] == 8
        assert shock["cosine_tokens"]["patch"] == pytest.approx(insertion.shock[init].cosine_patch, abs=1e-5)


def test_norms_begin_as_they_were_calibrated_and_heads_hang_on_the_seed(data: Path, tmp_path: Path) -> None:
    source = write_timm(tmp_path / "model")
    study = recipe(data, f"model=timm:{source}", seeds=[0, 1], lr=1e-30, steps=1)  # a rate that changes nothing
    run_pair(study, tmp_path / "run")
    gains = [layer["gain_q"] for layer in read_json(tmp_path / "run" / "retrofit" / "insertion.json")["layers"]]
    heads = {}
    for key in study.plan():
        model = retrofit.load(tmp_path / "run" / key.folder / "final")
        heads[key.arm, key.seed] = model.head.weight
        if key.arm == "retrofit":
            weights = [block.attn.q_norm.weight.view(2, -1).square().mean(-1).sqrt() for block in model.blocks]
            assert [w.tolist() for w in weights] == [pytest.approx(gain, rel=1e-5) for gain in gains]
        assert model.pretrained_cfg["label_names"] == ["class 0", "class 1", "class 2", "class 3"]
    assert heads["baseline", 0].shape == (4, 32)
    assert torch.equal(heads["baseline", 0], heads["retrofit", 0])
    assert torch.equal(heads["baseline", 1], heads["retrofit", 1])
    assert not torch.equal(heads["baseline", 0], heads["baseline", 1])


def test_a_head_for_the_same_labels_is_kept(data: Path, tmp_path: Path) -> None:
    labels = {i: f"class {i}" for i in range(4)}
    for name, given, kept in (("same", labels, True), ("other", {i: f"kind {i}" for i in range(4)}, False)):
        source = write_hf(tmp_path / name, given)
        study = recipe(data, f"model=hf:{source}", "arms={baseline: {}}", seeds=[0, 1], lr=1e-30, steps=1)
        run_pair(study, tmp_path / f"run-{name}")
        original = load_model(f"hf:{source}").classifier.weight
        heads = [retrofit.load(tmp_path / f"run-{name}" / k.folder / "final").classifier.weight for k in study.plan()]
        assert [torch.equal(head, original) for head in heads] == [kept, kept]
        assert torch.equal(*heads) == kept


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_local_folders_of_both_libraries_train(data: Path, tmp_path: Path, library: str) -> None:
    source = {"timm": write_timm, "hf": write_hf}[library](tmp_path / "model")
    study = recipe(data, f"model={library}:{source}", steps=6, lr=3e-3)
    run_pair(study, tmp_path / "run")
    for key in study.plan():
        result = read_json(tmp_path / "run" / key.folder / "result.json")
        assert result["status"] == "finished"
        assert (result["parameters_added"] > 0) == (key.arm == "retrofit")
        assert result["test"]["images"] == SIZES["test"]
    base = load_model(f"{library}:{source}", 4).state_dict()
    normed = retrofit.load(tmp_path / "run" / study.plan()[1].folder / "final").state_dict()
    extra = set(normed) - set(base)
    assert set(base) <= set(normed)
    assert all(".q_norm." in name or ".k_norm." in name for name in extra)
    added = sum(normed[name].numel() for name in extra)
    assert read_json(tmp_path / "run" / study.plan()[1].folder / "result.json")["parameters_added"] == added


def test_no_test_image_is_looked_at_before_the_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration reads training images alone, shock and probes validation images alone."""
    study = recipe(data, steps=2)
    splits = open_splits(study.data)
    read: list[str] = []
    image, finish = Images.image, pair.train_lockstep
    monkeypatch.setattr(Images, "image", lambda self, i: (read.append(self.ids[i]), image(self, i))[1])
    before: dict[str, set[str]] = {}

    def lockstep(*given: Any) -> Any:
        before["training"] = set(read)
        return finish(*given)

    calibrated: list[set[str]] = []
    insert = rooms.insert_qk_norm

    def inserting(*given: Any, images: Any, held_out: Any, **more: Any) -> Any:
        read.clear()
        images = list(images)
        calibrated.append(set(read))
        read.clear()
        held_out = list(held_out)
        calibrated.append(set(read))
        return insert(*given, images=images, held_out=held_out, **more)

    monkeypatch.setattr(pair, "train_lockstep", lockstep)
    monkeypatch.setattr(rooms, "insert_qk_norm", inserting)
    run_pair(study, tmp_path / "run")
    assert calibrated[0] == set(splits.train.take(16, "calibration").ids) <= set(splits.train.ids)
    assert calibrated[1] == set(splits.validation.take(8, "held out").ids) <= set(splits.validation.ids)
    assert not before["training"] & set(splits.test.ids)
    assert set(splits.test.ids) <= set(read)  # at the end they are


# Run again


def test_run_again_nothing_is_trained_and_no_file_changes(
    run: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(run)
    monkeypatch.setattr(pair, "train_lockstep", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(rooms, "insert_qk_norm", lambda *_, **__: pytest.fail("calibrated again"))
    run_pair(recipe(data, **GRID), run, command=["retrofit", "pair", "again"])
    assert snapshot(run) == before  # run.json too, which tells how it was made


@pytest.mark.parametrize("damage", [False, True])
def test_an_arm_is_calibrated_once_in_a_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bool
) -> None:
    """Every part of a plan starts from the norms that were written first; damaged ones are made again."""
    study, run = recipe(data, steps=2, seeds=[0, 1]), tmp_path / "run"
    run_pair(study, run, shard=(1, 2))
    before = snapshot(run)
    norms = run / "retrofit" / "norms.safetensors"
    if damage:
        norms.write_bytes(norms.read_bytes()[:-1] + b"x")
    calibrated: list[str] = []
    insert = rooms.insert_qk_norm
    monkeypatch.setattr(rooms, "insert_qk_norm", lambda *a, **k: (calibrated.append("again"), insert(*a, **k))[1])
    run_pair(study, run, shard=(2, 2))
    assert calibrated == ["again"] * damage
    after = snapshot(run)
    for name in ("retrofit/norms.safetensors", "retrofit/insertion.json"):
        assert after[name][0] == before[name][0]


def test_a_shard_without_a_run_writes_nothing(data: Path, tmp_path: Path) -> None:
    run_pair(recipe(data), tmp_path / "run", shard=(2, 2))
    assert snapshot(tmp_path / "run") == {}
    run_pair(recipe(data), tmp_path / "run", shard=(1, 2))
    assert "run.json" in snapshot(tmp_path / "run")


@pytest.mark.parametrize("lost", [[0], [1], [2, 3, 5]])
def test_what_is_missing_is_run_to_the_same_bytes(run: Path, whole: Path, data: Path, lost: list[int]) -> None:
    plan = recipe(data, **GRID).plan()
    for i in lost:
        (run / plan[i].folder / "result.json").unlink()
        (run / plan[i].folder / "metrics.jsonl").write_text('{"step": 0, "epo')  # as a killed run leaves it
    before = snapshot(run)
    run_pair(recipe(data, **GRID), run)
    same_runs(run, whole, plan)
    kept = [key.folder for i, key in enumerate(plan) if i not in lost]
    after = snapshot(run)
    assert all(after[name] == state for name, state in before.items() if name.startswith(tuple(kept)))


def test_shards_part_the_plan_and_come_to_the_same(whole: Path, data: Path, tmp_path: Path) -> None:
    study = recipe(data, **GRID)
    plan = study.plan()
    for parts in (1, 3, 4, 9):
        shards = [pair._part(plan, (i + 1, parts)) for i in range(parts)]
        assert sorted(key for shard in shards for key in shard) == sorted(plan)
        assert shards[0][:2] == plan[:2]
        for shard in shards:  # pairs stay together
            assert {replace(k, arm="", folder="") for k in shard[::2]} == {
                replace(k, arm="", folder="") for k in shard[1::2]
            }
    run_pair(study, tmp_path / "run", shard=(2, 2))
    there = [key for key in plan if (tmp_path / "run" / key.folder / "result.json").is_file()]
    assert there == pair._part(plan, (2, 2))
    assert 0 < len(there) < len(plan)
    run_pair(study, tmp_path / "run", shard=(1, 2))
    same_runs(tmp_path / "run", whole, plan)


# What is refused


def test_another_recipe_is_refused_with_what_differs(run: Path, data: Path) -> None:
    before = snapshot(run)
    with pytest.raises(RecipeError, match=r"another recipe; take another -o") as caught:
        run_pair(recipe(data, "arms.retrofit.init=ones", "train.lr=[1e-3]", **GRID), run)
    words = str(caught.value).partition("Differing: ")[2]
    assert "arms.retrofit.init (match there, ones now)" in words
    assert "train.lr ([0.001, 0.003] there, [0.001] now)" in words
    assert words.count(" there, ") == 2
    assert snapshot(run) == before
    run_pair(recipe(data, "train.workers=1", **GRID), run)  # batches do not depend on it


def test_other_images_under_the_same_name_are_refused(data: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(data, tmp_path / "data"))
    study = recipe(source, "arms={baseline: {}}", steps=1)
    run_pair(study, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    write_images(tmp_path / "other", {"train": 1, "validation": 1, "test": 24})
    shutil.copy(tmp_path / "other" / "test.parquet", source / "test.parquet")
    with pytest.raises(RecipeError, match=r"other images: test has changed since; take another -o"):
        run_pair(study, tmp_path / "run")
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ids": "', '"ids": "x'),
        ('"pixels": "', '"pixels": "x'),
        ('"epoch": 0', '"epoch": 1'),
        ('"lr": 0.', '"lr": 9.'),
    ],
)
def test_arms_that_did_not_see_the_same_are_no_pair(run: Path, data: Path, old: str, new: str) -> None:
    other, key = recipe(data, **GRID).plan()[2:4]
    path = run / key.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[1]
    path.write_text(lines[0] + lines[1].replace(old, new) + lines[2])
    words = rf"^{other.folder} and {key.folder} differ in images, epoch or learning rate at step 1; remove both"
    with pytest.raises(PairMismatch, match=words):
        run_pair(recipe(data, **GRID), run)
    (run / key.folder / "result.json").unlink()  # unfinished: not compared
    check_matched(run, recipe(data, **GRID).plan())


@pytest.mark.parametrize("rows", [0, 2, 4, "torn", "gone"])
def test_a_finished_run_without_all_its_rows_is_no_pair(run: Path, data: Path, rows: int | str) -> None:
    """As a disk that was full or a file that was cut leaves it: what is not there cannot be said to match."""
    plan = recipe(data, **GRID).plan()
    path = run / plan[3].folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if rows == "gone":
        path.unlink()
    elif rows == "torn":
        path.write_text("".join(lines)[:-9])
    else:
        path.write_text("".join((lines + lines)[: int(rows)]))
    count = {"gone": 0, "torn": 2}.get(str(rows), rows)
    words = f"^{plan[3].folder} has {count} rows of metrics for 3 steps; remove it and run again$"
    with pytest.raises(PairMismatch, match=words):
        run_pair(recipe(data, **GRID), run)
    shutil.rmtree(path.parent)
    run_pair(recipe(data, **GRID), run)  # what the message says is enough


def arms_of(run: Path, **ids: tuple[str, int | None]) -> list[RunKey]:
    """A folder of finished runs of four steps: for each arm a letter a row, its batch, and where it diverged."""
    plan = [RunKey.of(arm, 1e-3, 0, "fp32") for arm in ids]
    for key, (letters, ended) in zip(plan, ids.values(), strict=True):
        rows = [{"step": i, "epoch": 0, "lr": 1e-3, "ids": letter} for i, letter in enumerate(letters)]
        write_text(run / key.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_json(run / key.folder / "result.json", {"steps": 4, "diverged_at": ended})
    return plan


@pytest.mark.parametrize(
    ("ended", "letters"), [(None, "abcd"), (4, "abcd"), (3, "abcd"), (2, "abc"), (0, "a")], ids=str
)
def test_a_run_that_diverged_matches_as_far_as_it_went(tmp_path: Path, ended: int | None, letters: str) -> None:
    """diverged_at is the last step that it took, or 4 where only evaluation showed it."""
    check_matched(tmp_path, arms_of(tmp_path, baseline=("abcd", None), retrofit=(letters, ended)))
    other = letters[:-1] + "x"
    with pytest.raises(PairMismatch, match=rf"^baseline/.* and retrofit/.* at step {len(letters) - 1}; remove both"):
        check_matched(tmp_path, arms_of(tmp_path, baseline=("abcd", None), retrofit=(other, ended)))
    for wrong in (letters[:-1], letters + "e"):
        with pytest.raises(PairMismatch, match=f"has {len(wrong)} rows of metrics for {len(letters)} steps"):
            check_matched(tmp_path, arms_of(tmp_path, baseline=("abcd", None), retrofit=(wrong, ended)))


@pytest.mark.parametrize(
    "result", [None, [], "text", {}, {"steps": "4"}, {"steps": 4, "diverged_at": "x"}, {"steps": -1}]
)
def test_a_result_edited_by_hand_is_a_users_mistake(tmp_path: Path, result: Any) -> None:
    plan = arms_of(tmp_path, baseline=("abcd", None), retrofit=("abc", None))
    write_json(tmp_path / plan[1].folder / "result.json", result)
    with pytest.raises(PairMismatch, match=r"retrofit/.* has 3 rows of metrics for . steps; remove it"):
        check_matched(tmp_path, plan)


def test_every_two_arms_are_compared_over_the_steps_that_both_took(tmp_path: Path) -> None:
    """A baseline that broke off early hides no difference between the arms beside it."""
    check_matched(tmp_path, arms_of(tmp_path, baseline=("ab", 1), one=("abcd", None), two=("abcd", None)))
    with pytest.raises(PairMismatch, match=r"^one/lr0\.001-s0 and two/lr0\.001-s0 differ .* at step 3; remove both"):
        check_matched(tmp_path, arms_of(tmp_path, baseline=("ab", 1), one=("abcd", None), two=("abcx", None)))


def test_a_folder_of_somebody_else_is_refused_before_anything(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years")
    absent = recipe(data, "model=timm/no_such_model")
    with pytest.raises(RetrofitError, match="did not write"):
        run_pair(absent, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_study_that_cannot_begin_leaves_no_folder(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="timm has no model no_such_model"):
        run_pair(recipe(data, "model=timm/no_such_model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_cpu_cannot_do_is_said_at_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RetrofitError, match="fp16 needs a GPU"):
            run_pair(recipe(data, precision=["fp32", "fp16"]), tmp_path / "out")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(RetrofitError, match="launch with --fsdp_version 2"):
            run_pair(recipe(data), tmp_path / "out")
        monkeypatch.setenv("FSDP_VERSION", "2")
        with pytest.raises(RetrofitError, match="FSDP needs GPUs"):
            run_pair(recipe(data), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Real checkpoints

SHARED = Path(__file__).parents[2] / "shared"


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the checkpoints and images beside the checkout")
@pytest.mark.parametrize("library", ["timm", "hf"])
def test_dinov2_in_both_layouts_keeps_its_attention_and_trains(tmp_path: Path, library: str) -> None:
    """Both layouts hold the same weights, so that the same study comes to the same."""
    cifar = SHARED / "data" / "cifar10"
    document = content(cifar / "train.parquet", steps=2, batch_size=4, lr=1e-4)
    document["model"] = f"{library}:{SHARED}/checkpoints/dinov2_small_{library}"
    document["data"] |= {
        "test": str(cifar / "test.parquet"),
        "image_size": 98,
        "train_images": 16,
        "validation_images": 8,
        "test_images": 8,
    }
    run_pair(parse(document), tmp_path / "run")
    for arm in ("baseline", "retrofit"):
        result = read_json(tmp_path / "run" / arm / "lr0.0001-s0" / "result.json")
        assert result["status"] == "finished"
        assert (result["classes"], result["test"]["images"]) == (10, 8)
        assert (result["parameters_added"] > 0) == (arm == "retrofit")
        logits = np.load(tmp_path / "run" / arm / "lr0.0001-s0" / "predictions.npz")["test_logits"]
        assert logits.shape == (8, 10)
    record = read_json(tmp_path / "run" / "retrofit" / "insertion.json")
    assert record["sites"] == 12
    assert record["qk_norm"]["gain"] == QK_NORM["gain"]
    shock = {init: s["cosine_tokens"]["patch"] for init, s in record["shock"].items()}
    assert shock["match"] > 0.9 > shock["ones"] + 0.1


def test_a_shard_without_a_pair_is_no_failure(data: Path, tmp_path: Path) -> None:
    assert not run_pair(recipe(data), tmp_path / "run", shard=(2, 2))
    assert not (tmp_path / "run").exists()


def test_a_rate_whose_update_overflows_is_a_divergence(data: Path, tmp_path: Path) -> None:
    assert run_pair(recipe(data, lr=1e30), tmp_path / "run")
    for arm in ("baseline", "retrofit"):
        result = read_json(tmp_path / "run" / arm / "lr1e+30-s0" / "result.json")
        assert result["status"] == "diverged"


def timeless(value: Any) -> Any:
    """A report without what the clock said and how it was called."""
    told = {"created", "command", "seconds", "seconds_per_step", "images_per_second", "time_ratio", "time_ratio_range"}
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in told}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def test_parts_that_train_at_the_same_time_report_as_one(whole: Path, data: Path, tmp_path: Path) -> None:
    """Each with another number of runs side by side, in one folder; the last to end reports on all."""
    study = recipe(data, **GRID)
    write_text(tmp_path / "study.yaml", dump(study))
    run = tmp_path / "run"
    parts = [
        multiprocessing.get_context("fork").Process(
            target=lambda *words: sys.exit(main(words)),
            args=("pair", str(tmp_path / "study.yaml"), "-o", str(run), "--shard", f"{i}/2", f"train.lockstep={n}"),
        )
        for i, n in ((1, 1), (2, "auto"))
    ]
    for part in parts:
        part.start()
    for part in parts:
        part.join(120)
    assert [part.exitcode for part in parts] == [0, 0]
    same_runs(run, whole, study.plan())
    expected, found = timeless(build_report(whole)), timeless(read_json(run / "report.json"))
    found["study"]["recipe"]["train"]["lockstep"] = "auto"  # a result does not depend on it
    assert found == expected
