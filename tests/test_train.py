"""retrofit.train: one step against a hand-written loop, arms that do not touch each other, runs that diverge."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_hf, tiny_timm
from tiny_study import QK_NORM, TIMM_ARGS, content, write_images
from torch import Tensor, nn
from zoo import ZOO

import retrofit
from retrofit import evaluate
from retrofit.checkpoint import load_model
from retrofit.data import Batch, eval_batches, open_splits, train_batches
from retrofit.errors import RecipeError, RetrofitError
from retrofit.evaluate import score
from retrofit.models import family_of
from retrofit.pair import run_pair
from retrofit.probes import probe
from retrofit.qknorm import QKNorm
from retrofit.recipe import Recipe, Train, parse
from retrofit.runfiles import RunKey, read_json, read_jsonl
from retrofit.surgery import insert_qk_norm
from retrofit.train import ArmRun, Seen, Stop, attention_of, steps_of, train_lockstep
from retrofit.train import finish as training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def study(data: Path, arms: dict[str, Any] | None = None, dropout: bool = False, **train: Any) -> Recipe:
    document = content(data, **train)
    if arms is not None:
        document["arms"] = arms
    if dropout:
        more = {"drop_path_rate": 0.3, "proj_drop_rate": 0.2}
        document["model"] = {"source": document["model"], "model_args": more}
    return parse(document)


def states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()


THREE = {"baseline": {}, "twin": {}, "retrofit": {"qk_norm": QK_NORM, "init": "match"}}


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baseline, the same again, and a retrofitted arm, with dropout; the global random states watched."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    before = states()
    run_pair(study(data, THREE, dropout=True, steps=6, probe_every=4), folder)
    assert states() == before
    return folder


def place(run: Path, arm: str, lr: float = 1e-3, suffix: str = "") -> Path:
    return run / RunKey.of(arm, lr, 0, "fp32").folder.replace("-s0", f"-s0{suffix}")


def metrics(run: Path, arm: str, **more: Any) -> bytes:
    return (place(run, arm, **more) / "metrics.jsonl").read_bytes()


# The step


def rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """From a first step above 0 up to the peak, and on a cosine to just above 0."""
    rising = min(int(warmup * steps), steps - 1)
    if step < rising:
        return peak * (step + 1) / (rising + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def start(model: nn.Module, folder: Path, steps: int = 10, lr: float = 2e-3, **train: Any) -> ArmRun:
    return ArmRun.start(RunKey.of("baseline", lr, 0, "fp32"), model, Train(**train), steps, folder)


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0.1), (1, 1.0), (2, 1.0), (5, 1.0), (10, 0.0), (10, 0.3), (7, 0.5), (200, 0.1)]
)
def test_the_learning_rate_warms_up_from_above_0_and_ends_above_0(tmp_path: Path, steps: int, warmup: float) -> None:
    arm = start(tiny_timm(), tmp_path, steps, warmup=warmup)
    seen = []
    for step in range(steps):
        arm.schedule.step_update(step)
        assert len({group["lr"] for group in arm.optimizer.param_groups}) == 1
        seen.append(arm.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([rate(s, steps, 2e-3, warmup) for s in range(steps)], rel=1e-12)
    assert min(seen) > 0
    assert max(seen) == pytest.approx(2e-3, rel=1e-12)


def spared(name: str, value: Tensor) -> bool:
    return value.ndim < 2 or name in ("pos_embed", "cls_token")


def by_hand(model: nn.Module, recipe: Recipe, steps: int) -> Iterator[tuple[float, float]]:
    """AdamW as Loshchilov and Hutter write it, with smoothing and clipping, in plain torch: (loss, gradient norm)."""
    train, data = recipe.train, recipe.data
    splits, preprocess = open_splits(data), family_of(model).preprocess(model)
    values = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: torch.zeros_like(p) for name, p in values.items()}
    second = {name: torch.zeros_like(p) for name, p in values.items()}
    batches = train_batches(splits.train, preprocess, data, seed=0, batch_size=train.batch_size, steps=steps)
    model.train()
    for step, batch in enumerate(batches):
        logs = model(batch.pixels).log_softmax(-1)
        nll = -logs[torch.arange(len(logs)), batch.labels].mean()
        loss = (1 - train.label_smoothing) * nll - train.label_smoothing * logs.mean()
        gradients = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        factor = min(1.0, train.clip_grad / norm) if train.clip_grad else 1.0
        lr = rate(step, steps, train.lr[0], train.warmup)
        with torch.no_grad():
            for name, p in values.items():
                g = gradients[name] * factor
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                if not spared(name, p):
                    p *= 1 - lr * train.weight_decay
                corrected = second[name] / (1 - 0.999 ** (step + 1))
                p -= lr * first[name] / (1 - 0.9 ** (step + 1)) / (corrected.sqrt() + 1e-8)
        yield float(loss.detach()), norm


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("norm", [None, QK_NORM])
def test_training_is_adamw_as_written_by_hand(data: Path, tmp_path: Path, norm: Any, clip: float | None) -> None:
    arms = {"one": {"qk_norm": norm, "init": "ones"}}
    recipe = study(data, arms, steps=8, warmup=0.3, weight_decay=0.2, label_smoothing=0.1, clip_grad=clip)
    run_pair(recipe, tmp_path / "run")
    model = load_model(recipe.model.source, 4, image_size=16)
    if norm:
        insert_qk_norm(model, QKNorm.preset("qwen3", gain="per_head"), init="ones")
    expected = list(by_hand(model, recipe, 8))
    rows = read_jsonl(place(tmp_path / "run", "one") / "metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], abs=2e-6)
    # The logged norm is that of the gradient as it came, whether it is clipped afterwards or not.
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert max(norm for _, norm in expected) > 1.0
    assert [row["lr"] for row in rows] == pytest.approx([rate(s, 8, 1e-3, 0.3) for s in range(8)], rel=1e-12)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["epoch"] for row in rows] == [0] * 5 + [1] * 3
    final = retrofit.load(place(tmp_path / "run", "one") / "final").state_dict()
    for name, value in model.state_dict().items():
        ours, theirs = final[name], value
        if name.endswith("qkv.bias"):  # softmax is blind to the keys' bias, so that Adam divides noise by noise there
            ours, theirs = (torch.cat([v.chunk(3)[0], v.chunk(3)[2]]) for v in (ours, theirs))
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("bias", [False, True])
def test_weight_decay_spares_norms_gains_and_biases(tmp_path: Path, bias: bool) -> None:
    model = load_model("timm/test_vit", 4, image_size=16, model_args=TIMM_ARGS, pretrained=False)
    spec = QKNorm(norm="layernorm", bias=True) if bias else QKNorm(gain="per_head", scale="learned", scale_init=8.0)
    insert_qk_norm(model, spec, images=torch.randn(4, 3, 16, 16), init="match")
    names = {id(p): name for name, p in model.named_parameters()}
    arm = start(model, tmp_path, weight_decay=0.3)
    decay = {names[id(p)]: g["weight_decay"] for g in arm.optimizer.param_groups for p in g["params"]}
    assert decay == {name: 0.0 if spared(name, p) else 0.3 for name, p in model.named_parameters()}
    added = [name for name in decay if ".q_norm." in name or ".k_norm." in name]
    assert len(added) >= 6
    assert not any(decay[name] for name in added)
    assert sum(len(g["params"]) for g in arm.optimizer.param_groups) == len(names)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("ViT", ["cls_token"]),
        ("DeiT", ["cls_token", "distillation_token"]),
        ("Dinov2WithRegisters", ["cls_token", "mask_token", "register_tokens"]),
    ],
)
def test_weight_decay_spares_tokens_and_position_embeddings_of_transformers(
    tmp_path: Path, kind: str, tokens: list[str]
) -> None:
    model = tiny_hf(kind)
    names = {id(p): name for name, p in model.named_parameters()}
    arm = start(model, tmp_path, weight_decay=0.3)
    decay = {names[id(p)]: g["weight_decay"] for g in arm.optimizer.param_groups for p in g["params"]}
    assert decay.keys() == set(names.values())
    embeddings = f"{model.base_model_prefix}.embeddings"
    without = {f"{embeddings}.{name}" for name in (*tokens, "position_embeddings")}
    assert without == {name for name, p in model.named_parameters() if p.ndim >= 2 and not decay[name]}
    assert {decay[name] for name, p in model.named_parameters() if p.ndim < 2} == {0.0}
    projections = [name for name in decay if re.search(r"\b[qkv]_proj\.weight$", name)]
    assert len(projections) == 9
    for name in (*projections, f"{embeddings}.patch_embeddings.projection.weight", "classifier.weight"):
        assert decay[name] == 0.3, name


def test_an_optimizer_that_timm_lacks_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=r"train\.optimizer: adamx cannot be used"):
        start(tiny_timm(), tmp_path, optimizer="adamx")


# Arms do not touch each other


def test_two_arms_that_are_the_same_are_the_same_to_the_last_bit(run: Path) -> None:
    one, other = place(run, "baseline"), place(run, "twin")
    for name in ("metrics.jsonl", "probes.jsonl", "predictions.npz", "final/retrofit.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    results = [read_json(p / "result.json") for p in (one, other)]
    for result in results:
        result.pop("seconds"), result.pop("arm")
    assert results[0] == results[1]


@pytest.mark.parametrize("arm", ["baseline", "retrofit"])
def test_an_arm_alone_computes_what_it_does_beside_others(run: Path, data: Path, tmp_path: Path, arm: str) -> None:
    run_pair(study(data, {arm: THREE[arm]}, dropout=True, steps=6, probe_every=4), tmp_path / "alone")
    assert metrics(tmp_path / "alone", arm) == metrics(run, arm)
    assert metrics(run, arm) != metrics(run, {"baseline": "retrofit", "retrofit": "baseline"}[arm])


@pytest.mark.parametrize(("every", "batch"), [(1, False), (1000, False), (1, True)])
def test_probing_changes_nothing(run: Path, data: Path, tmp_path: Path, every: int, batch: bool) -> None:
    run_pair(study(data, THREE, dropout=True, steps=6, probe_every=every, probe_batch=batch), tmp_path / "run")
    for arm in THREE:
        assert metrics(tmp_path / "run", arm) == metrics(run, arm)
    probed = [row["step"] for row in read_jsonl(place(tmp_path / "run", "baseline") / "probes.jsonl")]
    assert probed == (list(range(7)) if every == 1 else [0, 6])


@pytest.mark.parametrize("more", [{}, {"grad_checkpointing": True}, {"accumulate": 2}])
def test_the_training_batch_is_probed_in_its_own_pass(tmp_path: Path, more: dict[str, Any]) -> None:
    model = tiny_timm()
    arm = start(model, tmp_path, probe_batch=True, **more)
    batch = Batch(torch.randn(6, 3, 32, 32), torch.zeros(6, dtype=torch.int64), list("abcdef"), 0)
    with probe(model) as seen, torch.no_grad():
        model(batch.pixels)
    arm.step(0, batch, Train(probe_batch=True, **more), arm.attention_now([torch.randn(2, 3, 32, 32)]))
    arm.step(1, batch, Train(probe_batch=True, **more))  # no probed step
    (row,) = read_jsonl(arm.folder / "probes.jsonl")
    for layer, wanted in zip(row["batch"], seen.rows(), strict=True):
        figures = {name: value for name, value in wanted.items() if isinstance(value, float)}
        assert {name: layer[name] for name in figures} == pytest.approx(figures, rel=1e-5)
    assert row["batch"][0]["q_rms"] != row["layers"][0]["q_rms"]


def test_the_training_batch_is_not_probed_in_a_compiled_step() -> None:
    with pytest.raises(RecipeError, match="probe_batch: attention is not read inside a compiled step"):
        parse({"train": {"probe_batch": True, "compile": "inductor"}})


def test_dropout_is_there_and_hangs_on_seed_and_step(run: Path, data: Path, tmp_path: Path) -> None:
    plain = study(data, {"baseline": {}}, steps=6)
    run_pair(plain, tmp_path / "plain")
    assert metrics(tmp_path / "plain", "baseline") != metrics(run, "baseline")
    model = load_model(
        "timm/test_vit", 4, image_size=16, model_args={**TIMM_ARGS, "proj_drop_rate": 0.5}, pretrained=False
    )
    splits, preprocess = open_splits(plain.data), family_of(model).preprocess(model)
    batch = next(train_batches(splits.train, preprocess, plain.data, seed=0, batch_size=8, steps=1))

    def loss(step: int, seed: int = 0) -> float:
        folder = tmp_path / f"{step}-{seed}"
        key = RunKey.of("baseline", 1e-30, seed, "fp32")  # a rate that changes nothing
        arm = ArmRun.start(key, model, Train(), 10, folder)
        arm.step(step, batch, Train())
        return arm.losses[0]

    assert loss(1) == loss(1)
    assert len({loss(1), loss(2), loss(1, seed=1)}) == 3


def test_each_precision_is_what_it_is_alone(data: Path, tmp_path: Path) -> None:
    """accelerate keeps one precision a process."""
    both = {"baseline": {}}
    run_pair(study(data, both, precision=["bf16", "fp32"]), tmp_path / "both")
    run_pair(study(data, both), tmp_path / "fp32")
    assert metrics(tmp_path / "both", "baseline", suffix="-fp32") == metrics(tmp_path / "fp32", "baseline")
    assert metrics(tmp_path / "both", "baseline", suffix="-bf16") != metrics(tmp_path / "fp32", "baseline")
    results = {
        p: read_json(place(tmp_path / "both", "baseline", suffix=f"-{p}") / "result.json") for p in ("bf16", "fp32")
    }
    assert {p: r["attention"] for p, r in results.items()} == {"bf16": "unfused", "fp32": "fused"}
    weights = retrofit.load(place(tmp_path / "both", "baseline", suffix="-bf16") / "final").parameters()
    assert {p.dtype for p in weights} == {torch.float32}


def test_attention_is_unfused_where_that_is_faster(tmp_path: Path) -> None:
    assert attention_of(Train(), "bf16", CPU) == "unfused"
    assert attention_of(Train(), "fp32", CPU) == "fused"
    assert attention_of(Train(), "bf16", torch.device("cuda")) == "fused"
    assert attention_of(Train(attention="fused"), "bf16", CPU) == "fused"
    assert attention_of(Train(attention="unfused"), "fp32", CPU) == "unfused"
    for attention, fused in (("unfused", False), ("fused", True)):
        model = load_model("timm/test_vit", 4, image_size=16, model_args=TIMM_ARGS, pretrained=False)
        start(model, tmp_path / attention, attention=attention)
        assert {block.attn.fused_attn for block in model.blocks} == {fused}


# What a run leaves


def test_probes_are_at_the_first_and_the_last_step(run: Path) -> None:
    for arm, bounded in (("baseline", False), ("retrofit", True)):
        rows = read_jsonl(place(run, arm) / "probes.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 6]  # every 4 steps, more often at first, and at the end
        for row in rows:
            assert [layer["site"] for layer in row["layers"]] == ["blocks.0.attn", "blocks.1.attn"]
            assert all((layer["logit_bound"] is not None) == bounded for layer in row["layers"])
            if bounded:
                assert all(layer["logit_absmax"] <= layer["logit_bound"] * 1.001 for layer in row["layers"])
    assert rows[0]["layers"] != rows[-1]["layers"]


def test_every_image_counts_once_and_the_files_agree(run: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = study(data)
    splits = open_splits(recipe.data)
    for arm in ("baseline", "retrofit"):
        model = retrofit.load(place(run, arm) / "final")
        arrays = np.load(place(run, arm) / "predictions.npz")
        result = read_json(place(run, arm) / "result.json")
        assert sorted(arrays) == sorted(f"{s}_{k}" for s in ("validation", "test") for k in ("ids", "labels", "logits"))
        for split, images in (("validation", splits.validation), ("test", splits.test)):
            assert arrays[f"{split}_ids"].tolist() == images.ids
            assert arrays[f"{split}_labels"].tolist() == images.labels.tolist()
            batches = eval_batches(images, family_of(model).preprocess(model), 1)
            with torch.no_grad():
                logits = torch.cat([model(b.pixels) for b in batches])
            np.testing.assert_allclose(arrays[f"{split}_logits"], logits.numpy(), atol=1e-5)
            assert result[split] == score(arrays[f"{split}_logits"], arrays[f"{split}_labels"])
            assert result[split]["images"] == len(images)


def test_an_odd_last_batch_counts_once_too(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = study(data, {"baseline": {}}, steps=1)
    run_pair(recipe, tmp_path / "whole")
    monkeypatch.setattr(evaluate, "_BATCH", 7)
    run_pair(recipe, tmp_path / "odd")
    whole, odd = (np.load(place(tmp_path / name, "baseline") / "predictions.npz") for name in ("whole", "odd"))
    assert odd["test_ids"].tolist() == whole["test_ids"].tolist()
    np.testing.assert_allclose(odd["test_logits"], whole["test_logits"], atol=1e-5)


def test_the_score_is_accuracy_and_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 30, (50, 7)).astype(np.float32), rng.integers(0, 7, 50)
    logits[0] = [1e4, -1e4, 0, 3, 3, 3, 3]  # would overflow in exp
    expected = nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(labels))
    right = sum(int(row.argmax() == label) for row, label in zip(logits, labels, strict=True))
    found = score(logits, labels)
    assert found == {"accuracy": right / 50, "loss": pytest.approx(float(expected), rel=1e-12), "images": 50}
    for bad in (np.nan, np.inf):
        logits[3, 2] = bad
        assert score(logits, labels)["loss"] is None


def test_fewer_images_than_a_batch_are_one_batch(data: Path, tmp_path: Path) -> None:
    document = content(data, batch_size=64)
    document["data"]["train_images"] = 5
    document["train"] |= {"steps": None, "epochs": 3}
    run_pair(parse(document), tmp_path / "run")
    rows = read_jsonl(place(tmp_path / "run", "baseline") / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert all(row["loss"] > 0 for row in rows)
    assert read_json(place(tmp_path / "run", "baseline") / "result.json")["epochs"] == 3.0


def test_steps_follow_from_epochs() -> None:
    assert steps_of(Train(epochs=3, batch_size=8), 40) == 15
    assert steps_of(Train(epochs=0.5, batch_size=8), 43) == 3
    assert steps_of(Train(epochs=0.001, batch_size=8), 40) == 1
    assert steps_of(Train(epochs=3, steps=7, batch_size=8), 40) == 7


# Runs that diverge


def test_a_run_that_diverges_is_a_result_and_the_others_go_on(data: Path, tmp_path: Path) -> None:
    run_pair(study(data, lr=[1e30, 1e-3], steps=5), tmp_path / "run")
    for arm in ("baseline", "retrofit"):
        lost = place(tmp_path / "run", arm, lr=1e30)
        result = json.loads((lost / "result.json").read_text(), parse_constant=pytest.fail)
        assert result["status"] == "diverged"
        rows = [json.loads(line, parse_constant=pytest.fail) for line in (lost / "metrics.jsonl").open()]
        assert 1 <= result["diverged_at"] == rows[-1]["step"] == len(rows) - 1 < 5
        assert rows[-1]["loss"] is None or rows[-1]["grad_norm"] is None
        assert (result["validation"], result["test"]) == (None, None)
        assert not (lost / "predictions.npz").exists()
        assert not (lost / "final").exists()
        for line in (lost / "probes.jsonl").open():
            json.loads(line, parse_constant=pytest.fail)
        assert read_json(place(tmp_path / "run", arm) / "result.json")["status"] == "finished"
        assert len(read_jsonl(place(tmp_path / "run", arm) / "metrics.jsonl")) == 5


def test_one_arm_lost_leaves_the_one_beside_it_as_it_was(data: Path, tmp_path: Path) -> None:
    recipe = study(data, steps=4)
    keys = recipe.plan()
    models = {}
    for key in keys:
        models[key] = (load_model(recipe.model.source, 4, image_size=16), 0)
    with torch.no_grad():
        models[keys[1]][0].head.bias[0] = math.nan
    splits, preprocess = open_splits(recipe.data), family_of(models[keys[0]][0]).preprocess(models[keys[0]][0])
    ticks: list[int] = []
    train_lockstep(
        recipe,
        models,
        splits,
        preprocess,
        [torch.randn(2, 3, 16, 16)],
        tmp_path / "run",
        lambda _, done: ticks.append(done),
        Seen(tmp_path, []),
        Stop(),
    )
    run_pair(study(data, {"baseline": {}}, steps=4), tmp_path / "alone")
    assert metrics(tmp_path / "run", "baseline") == metrics(tmp_path / "alone", "baseline")
    lost = read_json(place(tmp_path / "run", "retrofit") / "result.json")
    assert (lost["status"], lost["diverged_at"]) == ("diverged", 0)
    assert len(read_jsonl(place(tmp_path / "run", "retrofit") / "metrics.jsonl")) == 1
    assert sum(ticks) == 8  # the progress bar still comes to its end


@pytest.mark.parametrize("split", ["validation", "test"])
def test_weights_that_only_evaluation_shows_to_be_lost(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    predictions = training.predictions
    count = {"validation": 12, "test": 20}[split]

    def lost(*given: Any) -> Any:
        ids, labels, logits = predictions(*given)
        return ids, labels, logits * (np.nan if len(ids) == count else 1)

    monkeypatch.setattr(training, "predictions", lost)
    run_pair(study(data, {"baseline": {}}, steps=2), tmp_path / "run")
    result = read_json(place(tmp_path / "run", "baseline") / "result.json")
    assert (result["status"], result["diverged_at"]) == ("diverged", 2)
    assert not (place(tmp_path / "run", "baseline") / "final").exists()


def test_a_model_that_cannot_be_unfused_trains_fused(tmp_path: Path) -> None:
    model, key = ZOO["hf_data2vec"].build(), RunKey.of("baseline", 1e-3, 0, "bf16")
    assert ArmRun.start(key, model, Train(), 4, tmp_path).attention == "fused"
    with pytest.raises(RetrofitError, match="cannot be switched to unfused"):
        ArmRun.start(key, ZOO["hf_data2vec"].build(), Train(attention="unfused"), 4, tmp_path)
