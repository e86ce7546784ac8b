"""What a step may do beside the plain one: mixing, erasing, averaging, parts of a batch, checkpoints, compiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_hf
from tiny_study import content, write_hf, write_images
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import ZOO

import retrofit
from retrofit.data import Batch, eval_batches, keyed_seed, mixed, open_splits, share, train_batches
from retrofit.errors import ModelError, RecipeError, RetrofitError
from retrofit.models import family_of
from retrofit.models.preprocess import Preprocess
from retrofit.pair import run_pair
from retrofit.recipe import Data, Train, parse
from retrofit.runfiles import RunKey, read_json, read_jsonl
from retrofit.train import ArmRun

PREPROCESS = Preprocess(16, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3), "bilinear", 0.875)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def run(data: Path, folder: Path, dropout: bool = False, arms: Any = None, hf: bool = False, **train: Any) -> Path:
    """Runs a tiny study to its end; with `dropout` and drop path in the model."""
    document = content(data, **train)
    document["arms"] = arms or document["arms"]
    if hf:
        document["model"] = f"hf:{write_hf(folder.parent / 'hf-checkpoint')}"
    if dropout:
        more = {"hidden_dropout_prob": 0.2} if hf else {"drop_path_rate": 0.3, "proj_drop_rate": 0.2}
        document["model"] = {"source": document["model"], "model_args": more}
    run_pair(parse(document), folder)
    return folder


def place(folder: Path, arm: str) -> Path:
    return folder / RunKey.of(arm, 1e-3, 0, "fp32").folder


def column(folder: Path, arm: str, key: str) -> list[Any]:
    return [row[key] for row in read_jsonl(place(folder, arm) / "metrics.jsonl")]


def same_numbers(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Losses, gradient norms and final weights of both arms within a tolerance; what was given to them equal."""
    for arm in ("baseline", "retrofit"):
        for key in ("ids", "lr", "step", "epoch"):
            assert column(one, arm, key) == column(other, arm, key)
        assert column(one, arm, "loss") == pytest.approx(column(other, arm, "loss"), abs=tolerance)
        assert column(one, arm, "grad_norm") == pytest.approx(column(other, arm, "grad_norm"), rel=10 * tolerance)
        weights, others = (retrofit.load(place(f, arm) / "final").state_dict() for f in (one, other))
        for name, value in weights.items():
            if "qkv.bias" not in name:  # softmax is blind to the keys' bias: Adam divides noise by noise there
                torch.testing.assert_close(value, others[name], atol=10 * tolerance, rtol=1e-3, msg=name)


def same_bytes(one: Path, other: Path) -> None:
    for arm in ("baseline", "retrofit"):
        for name in ("metrics.jsonl", "predictions.npz", "final/retrofit.safetensors"):
            assert (place(one, arm) / name).read_bytes() == (place(other, arm) / name).read_bytes(), (arm, name)


# Mixing


def batch_of(n: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (n,), generator=generator)
    return Batch(torch.randn(n, 3, 16, 16, generator=generator), labels, [f"{i}" for i in range(n)], 0)


def soft(labels: Tensor, lam: float, classes: int = 5) -> Tensor:
    """Each image's label and that of the one opposite, in the proportion of the images."""
    one = torch.eye(classes)[labels]
    return lam * one + (1 - lam) * one.flip(0)


def test_mixup_is_the_papers_formula_with_a_draw_keyed_by_seed_and_step() -> None:
    train, batch, lams = Train(mixup=0.8), batch_of(6), set()
    for step in range(20):
        found = mixed(batch, train, 5, seed=3, step=step)
        rng = np.random.RandomState(keyed_seed("mix", 3, step) % 2**32)
        rng.rand()  # whether to mix at all
        lam = float(rng.beta(0.8, 0.8))
        torch.testing.assert_close(found.pixels, lam * batch.pixels + (1 - lam) * batch.pixels.flip(0))
        torch.testing.assert_close(found.labels, soft(batch.labels, lam))
        assert found.ids == batch.ids
        lams.add(lam)
    assert len(lams) == 20
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    assert not torch.equal(mixed(batch, train, 5, 3, 1).pixels, mixed(batch, train, 5, 4, 1).pixels)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_cutmix_pastes_a_rectangle_and_counts_its_area() -> None:
    batch = batch_of(6)
    for step in range(10):
        found = mixed(batch, Train(cutmix=1.0), 5, seed=0, step=step)
        pasted = (found.pixels != batch.pixels).any(1)
        assert torch.equal(found.pixels, torch.where(pasted[:, None], batch.pixels.flip(0), batch.pixels))
        rows, columns = pasted[0].any(1), pasted[0].any(0)
        assert torch.equal(pasted[0], rows[:, None] & columns)
        torch.testing.assert_close(found.labels, soft(batch.labels, 1 - float(pasted[0].float().mean())))


def test_an_odd_batch_is_mixed_around_its_middle() -> None:
    batch = batch_of(7)
    found = mixed(batch, Train(mixup=1.0), 5, seed=0, step=0)
    assert torch.equal(found.pixels[3], batch.pixels[3])
    assert torch.equal(found.labels[3], torch.eye(5)[batch.labels[3]])
    changed = [i for i in range(7) if not torch.equal(found.pixels[i], batch.pixels[i])]
    assert changed == [0, 1, 2, 4, 5, 6]
    alone = batch_of(1)
    assert torch.equal(mixed(alone, Train(mixup=1.0), 5, 0, 0).pixels, alone.pixels)
    assert mixed(batch, Train(), 5, 0, 0) is batch
    unmixed = mixed(batch, Train(mixup=1.0, mixup_prob=0.0), 5, 0, 0)
    assert torch.equal(unmixed.pixels, batch.pixels)
    assert torch.equal(unmixed.labels, torch.eye(5)[batch.labels])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_process_mixes_its_share_as_the_whole_batch_is_mixed(n: int, processes: int) -> None:
    batch, train = batch_of(n), Train(mixup=0.8, cutmix=1.0)
    whole = mixed(batch, train, 5, seed=1, step=2)
    seen = []
    for i in range(processes):
        rows = share(np.arange(n), (i, processes))
        mine = replace(batch, pixels=batch.pixels[rows], labels=batch.labels[rows])
        found = mixed(mine, train, 5, seed=1, step=2)
        assert torch.equal(found.pixels, whole.pixels[rows])
        assert torch.equal(found.labels, whole.labels[rows])
        seen += rows.tolist()
    assert sorted(seen) == list(range(n))


def test_the_loss_is_cross_entropy_with_the_mixed_and_smoothed_labels(data: Path, tmp_path: Path) -> None:
    train = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "steps": 3, "lr": 1e-30, "clip_grad": None}
    recipe = parse({**content(data, **train), "arms": {"baseline": {}}})
    run_pair(recipe, tmp_path / "run")
    model = retrofit.load_model(recipe.model.source, 4, image_size=16)
    splits = open_splits(recipe.data)
    preprocess = family_of(model).preprocess(model)
    batches = train_batches(splits.train, preprocess, recipe.data, seed=0, batch_size=8, steps=3)
    expected = []
    for step, batch in enumerate(batches):
        both = mixed(batch, recipe.train, 4, 0, step)
        targets = 0.9 * both.labels.double() + 0.1 / 4
        expected.append(-(targets * model(both.pixels).double().log_softmax(-1)).sum(-1).mean().item())
    rows = read_jsonl(tmp_path / "run" / "baseline" / "lr1e-30-s0" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx(expected, abs=1e-6)


def test_arms_see_the_same_mixed_images(data: Path, tmp_path: Path) -> None:
    more = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
    run(data, tmp_path / "run", dropout=True, arms={"baseline": {}, "retrofit": {}}, **more)
    for name in ("metrics.jsonl", "predictions.npz", "final/retrofit.safetensors"):
        one, other = (place(tmp_path / "run", arm) / name for arm in ("baseline", "retrofit"))
        assert one.read_bytes() == other.read_bytes()


# Erasing


def test_erasing_puts_noise_into_a_rectangle_keyed_by_the_image(data: Path) -> None:
    splits = open_splits(Data(source=str(data)))
    plain = Data(source=str(data), crop_scale=(1.0, 1.0))

    def batches(erasing: float, workers: int = 0, batch_size: int = 8) -> list[Batch]:
        given = replace(plain, random_erasing=erasing)
        return list(
            train_batches(
                splits.train, PREPROCESS, given, seed=0, batch_size=batch_size, steps=40 // batch_size, workers=workers
            )
        )

    before, after = (torch.cat([b.pixels for b in batches(p)]) for p in (0.0, 0.5))
    changed = (before != after).any(1)
    share_erased = changed.flatten(1).any(1).float().mean()
    assert 0.25 < share_erased < 0.75
    for mask in changed[changed.flatten(1).any(1)]:
        assert torch.equal(mask, mask.any(1)[:, None] & mask.any(0))
        assert 0.01 < mask.float().mean() < 0.4  # 2 to 33 percent, to whole pixels
    assert abs(after[changed[:, None].expand_as(after)].std() - 1) < 0.1
    assert torch.equal(after, torch.cat([b.pixels for b in batches(0.5, workers=2)]))
    assert torch.equal(after, torch.cat([b.pixels for b in batches(0.5, batch_size=10)]))
    assert torch.equal(before, torch.cat([b.pixels for b in batches(0.0)]))


def test_randaugment_is_timms_and_an_unknown_policy_is_refused(data: Path) -> None:
    splits = open_splits(Data(source=str(data)))

    def first(policy: str | None) -> Tensor:
        given = Data(source=str(data), auto_augment=policy)
        return next(train_batches(splits.train, PREPROCESS, given, seed=0, batch_size=40, steps=1)).pixels

    assert not torch.equal(first("rand-m9-mstd0.5"), first(None))
    assert torch.equal(first("rand-m9-mstd0.5"), first("rand-m9-mstd0.5"))


# Averages of the weights


def test_the_average_is_the_recursion_and_is_what_is_evaluated_and_saved(data: Path, tmp_path: Path) -> None:
    decay = 0.7
    run(data, tmp_path / "run", ema=decay, steps=4)
    run(data, tmp_path / "plain", steps=4)
    model = retrofit.load_model(content(data)["model"], 4, image_size=16)
    average = {name: value.double() for name, value in model.state_dict().items()}
    for steps in range(1, 5):  # a run cut off there has the same weights, since its rate does not fall
        run(data, tmp_path / f"{steps}", arms={"baseline": {}}, steps=steps, schedule="constant", warmup=0)
        weights = retrofit.load(place(tmp_path / f"{steps}", "baseline") / "final").state_dict()
        average = {name: decay * value + (1 - decay) * weights[name].double() for name, value in average.items()}
    run(data, tmp_path / "constant", arms={"baseline": {}}, ema=decay, steps=4, schedule="constant", warmup=0)
    final = retrofit.load(place(tmp_path / "constant", "baseline") / "final")
    for name, value in final.state_dict().items():
        torch.testing.assert_close(value.double(), average[name], atol=1e-6, rtol=1e-6, msg=name)
    for arm in ("baseline", "retrofit"):
        # The average changes no step, and the weights without it are those of a run without it.
        one, plain = (place(tmp_path / name, arm) for name in ("run", "plain"))
        assert (one / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
        result, other = read_json(one / "result.json"), read_json(plain / "result.json")
        assert result["without_ema"] == {split: other[split] for split in ("validation", "test")}
        assert "without_ema" not in other
        arrays, model = np.load(one / "predictions.npz"), retrofit.load(one / "final")
        test = open_splits(parse(content(data)).data).test
        with torch.no_grad():
            pixels = torch.cat([b.pixels for b in eval_batches(test, family_of(model).preprocess(model), 20)])
            logits = model(pixels)
        np.testing.assert_allclose(arrays["test_logits"], logits.numpy(), atol=1e-5)
        loss = F.cross_entropy(logits.double(), torch.from_numpy(arrays["test_labels"])).item()
        assert result["test"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert result["test"] != result["without_ema"]["test"]


# Drop path


def test_drop_path_comes_from_the_library(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "with", drop_path=0.5)
    run(data, tmp_path / "plain")
    given = {"source": content(data)["model"], "model_args": {"drop_path_rate": 0.5}}
    run_pair(parse({**content(data), "model": given}), tmp_path / "given")
    same_bytes(tmp_path / "with", tmp_path / "given")
    assert column(tmp_path / "with", "baseline", "loss") != column(tmp_path / "plain", "baseline", "loss")
    with pytest.raises(RecipeError, match=r"train\.drop_path: model\.model_args has drop_path_rate already"):
        parse({"model": given, "train": {"drop_path": 0.1}})
    with pytest.raises(RetrofitError, match=r"train\.drop_path: ViTForImageClassification has no drop path"):
        run(data, tmp_path / "hf", hf=True, drop_path=0.1)
    assert not (tmp_path / "hf").exists()


def test_drop_path_of_transformers(tmp_path: Path, data: Path) -> None:
    tiny_hf("Dinov2", image_size=16, num_hidden_layers=2).save_pretrained(tmp_path / "dinov2")
    document = {**content(data, drop_path=0.5), "model": f"hf:{tmp_path / 'dinov2'}"}
    run_pair(parse(document), tmp_path / "with")
    run_pair(parse({**document, "train": {**document["train"], "drop_path": 0.0}}), tmp_path / "without")
    assert column(tmp_path / "with", "retrofit", "loss") != column(tmp_path / "without", "retrofit", "loss")


# A batch in parts

PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unclipped sgd": {"clip_grad": None, "optimizer": "sgd"},
    "mixed": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
    "odd": {"batch_size": 7, "mixup": 0.8},
    "average": {"ema": 0.5, "layer_decay": 0.7},
}


@pytest.mark.parametrize(("case", "parts"), [*((case, 3) for case in PARTS), ("plain", 2), ("odd", 100)])
def test_a_batch_in_parts_is_the_whole_batch(data: Path, tmp_path: Path, case: str, parts: int) -> None:
    run(data, tmp_path / "whole", steps=6, **PARTS[case])
    run(data, tmp_path / "parts", steps=6, accumulate=parts, **PARTS[case])
    same_numbers(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("images", [1, 5])
def test_parts_of_fewer_images_than_a_batch(data: Path, tmp_path: Path, images: int) -> None:
    for name, parts in (("whole", 1), ("parts", 3)):
        document = content(data, accumulate=parts, steps=4, batch_size=8)
        document["data"] |= {"train_images": images, "calibration_images": images}
        run_pair(parse(document), tmp_path / name)
    same_numbers(tmp_path / "whole", tmp_path / "parts")


def test_the_gradient_of_a_batch_in_parts_is_that_of_its_mean_loss(tmp_path: Path) -> None:
    batch = batch_of(8)
    for parts in (1, 3, 4):
        model = ZOO["vit"].build()
        train = Train(accumulate=parts, clip_grad=None, optimizer="sgd", label_smoothing=0.2)
        arm = ArmRun.start(RunKey.of("baseline", 1e-3, 0, "fp32"), model, train, 4, tmp_path / str(parts))
        loss = arm._gradients(0, replace(batch, pixels=F.interpolate(batch.pixels, (32, 32))), train)
        alone = ZOO["vit"].build().double()
        logits = alone(F.interpolate(batch.pixels, (32, 32)).double())
        expected = F.cross_entropy(logits, batch.labels, label_smoothing=0.2)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-5)


# Memory and speed


@pytest.mark.parametrize("hf", [False, True])
def test_checkpointed_gradients_change_nothing_with_dropout_either(data: Path, tmp_path: Path, hf: bool) -> None:
    run(data, tmp_path / "plain", dropout=True, hf=hf)
    run(data, tmp_path / "again", dropout=True, hf=hf, grad_checkpointing=True)
    same_bytes(tmp_path / "plain", tmp_path / "again")


@pytest.mark.parametrize("name", ["vit", "hf_vit", "hf_dinov2", "hf_timm_wrapper", "eva02"])
def test_checkpointing_keeps_less_for_the_backward_pass(name: str) -> None:
    def kept(model: nn.Module) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ZOO[name].run(model)
        return sum(sizes)

    plain, checkpointed = ZOO[name].build().train(), ZOO[name].build().train()
    family_of(checkpointed).checkpoint_gradients(checkpointed)
    assert kept(checkpointed) < 0.5 * kept(plain)


def test_a_model_without_checkpointing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    convit = timm.create_model("convit_tiny", num_classes=3)
    with pytest.raises(ModelError, match="timm has no gradient checkpointing for ConVit"):
        family_of(convit).checkpoint_gradients(convit)
    model = tiny_hf()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match="transformers has no gradient checkpointing for ViT"):
        family_of(model).checkpoint_gradients(model)


@pytest.mark.parametrize(("backend", "hf"), [("eager", False), ("aot_eager", False), ("aot_eager", True)])
def test_compiled_arms_compute_the_same_and_are_probed(data: Path, tmp_path: Path, backend: str, hf: bool) -> None:
    run(data, tmp_path / "plain", dropout=not hf, hf=hf, steps=3)
    run(data, tmp_path / "compiled", dropout=not hf, hf=hf, steps=3, compile=backend)
    same_numbers(tmp_path / "plain", tmp_path / "compiled")
    for arm in ("baseline", "retrofit"):
        rows, others = (read_jsonl(place(tmp_path / n, arm) / "probes.jsonl") for n in ("plain", "compiled"))
        assert [row["step"] for row in rows] == [row["step"] for row in others]
        for one, other in zip(rows, others, strict=True):
            for layer, same in zip(one["layers"], other["layers"], strict=True):
                assert layer["logit_max"] == pytest.approx(same["logit_max"], rel=1e-3)


def test_a_backend_that_torch_lacks_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=r"train\.compile: torch has no backend inducter; it has: .*inductor"):
        run(data, tmp_path / "run", compile="inducter")
    assert parse({"train": {"compile": True}}).train.compile == "inductor"
    assert parse({"train": {"compile": False}}).train.compile is None
