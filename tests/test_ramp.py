"""The ramp: from the model as it was to the plain norm, to the last bit, through training, files and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MAKERS, outputs_of, sharpen, tiny_hf, tiny_timm
from test_norms import SPECS, B, D, H, N, randomised
from tiny_study import content, write_images
from torch import nn

from retrofit.checkpoint import load, save
from retrofit.cli import main
from retrofit.data import Batch
from retrofit.errors import RecipeError, RetrofitError
from retrofit.export import export_model
from retrofit.models import family_of, sites_of
from retrofit.norms import HeadNorm, end_ramp, logit_bound, ramp_of, set_ramp
from retrofit.pair import run_pair
from retrofit.qknorm import QKNorm
from retrofit.recipe import Recipe, parse
from retrofit.runfiles import read_jsonl
from retrofit.surgery import insert_qk_norm, remove_qk_norm
from retrofit.train import ArmRun

PER_HEAD = QKNorm(gain="per_head")


def norm_of(spec: QKNorm, role: str = "q", dtype: torch.dtype = torch.float64) -> HeadNorm:
    norm = HeadNorm(spec, role, H, D, attention_scale=0.5, scale_init=3.0, shifted=True, dtype=dtype)
    return randomised(norm, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_begins_with_the_identity_and_ends_with_the_norm_to_the_last_bit(dtype: torch.dtype) -> None:
    """Gains of any sign among them."""
    x = torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    for spec in SPECS:
        norm = norm_of(spec, dtype=dtype)
        plain = norm(x)
        norm.set_ramp(0.0)
        assert torch.equal(norm(x), x), spec
        norm.set_ramp(1.0)
        assert torch.equal(norm(x), plain), spec
        norm.ramping = True  # the ramp's own path, at its end
        torch.testing.assert_close(norm(x), plain, rtol=1e-6, atol=1e-6, msg=str(spec))
        norm.end_ramp()
        assert "alpha" not in norm.state_dict()


@pytest.mark.parametrize("alpha", [0.25, 0.7])
def test_what_is_in_between_in_float64(alpha: float) -> None:
    """(x - a c - a mean) * length^-a * gain^a + a bias, times (scale ratio)^a, in numpy, head by head."""
    x = torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = float(torch.tensor(alpha))  # as the buffer holds it
    for spec in SPECS:
        norm = norm_of(spec)
        with torch.no_grad():
            for name, p in norm.named_parameters():
                if name == "weight":
                    p.copy_(p.abs() + 0.1)
        norm.set_ramp(alpha)
        out = norm(x).detach().numpy()
        held = {name: p.detach().numpy() for name, p in norm.named_parameters()}

        def channels(values: np.ndarray) -> np.ndarray:
            return values.reshape(1, -1, 1, D)

        axes = (1, 3) if spec.axis == "projection" else (3,)
        y = x.numpy() - a * channels(held["shift"])
        if spec.norm == "l2":
            y = y / np.sqrt((y**2).sum(axes, keepdims=True)) ** a
        else:
            if spec.norm == "layernorm":
                y = y - a * y.mean(axes, keepdims=True)
            y = y / np.sqrt((y**2).mean(axes, keepdims=True) + spec.eps) ** a
        if "weight" in held:
            y = y * channels(held["weight"] + (1 if spec.zero_centered else 0)) ** a
        if "bias" in held:
            y = y + a * channels(held["bias"])
        if "scale" in held:
            scale = (
                held["scale"] if spec.scale_max is None else np.exp(np.minimum(held["scale"], np.log(spec.scale_max)))
            )
            y = y * (scale / 0.5).reshape(1, -1, 1, 1) ** a
        np.testing.assert_allclose(out, y, rtol=1e-9, atol=1e-12, err_msg=str(spec))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradients_stay_finite(alpha: float) -> None:
    for spec in SPECS[::7]:
        norm = norm_of(spec, dtype=torch.float32)
        if norm.weight is not None:
            norm.weight.data[0] = -1.0 if spec.zero_centered else 0.0  # a gain of zero
        norm.set_ramp(alpha)
        x = torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
        norm(x).square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in norm.parameters()), spec


@pytest.mark.parametrize("kind", ["timm", "relpos", "rope", "ViT", "Dinov2"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_model_begins_as_it_was_to_the_last_bit(kind: str, fused: bool, images) -> None:
    model = sharpen(MAKERS[kind]())
    if not fused:
        assert family_of(model).unfuse(model)
    before = outputs_of(model, images)
    insert_qk_norm(model, PER_HEAD, images, "match")
    after = outputs_of(model, images)
    assert not torch.equal(after, before)
    set_ramp(model, 0.0)
    assert ramp_of(model) == 0
    assert torch.equal(outputs_of(model, images), before)
    set_ramp(model, 0.5)
    half = outputs_of(model, images)
    assert not torch.equal(half, before)
    assert not torch.equal(half, after)
    set_ramp(model, 1.0)
    assert ramp_of(model) is None
    assert torch.equal(outputs_of(model, images), after)
    end_ramp(model)
    assert not any(name.endswith("alpha") for name in model.state_dict())
    remove_qk_norm(model)
    assert torch.equal(outputs_of(model, images), before)


def test_no_bound_holds_on_the_way() -> None:
    model = tiny_timm()
    insert_qk_norm(model, PER_HEAD, init="ones")
    pair = sites_of(model)[0][0].norms
    whole = logit_bound(*pair, rotated=False)
    set_ramp(model, 0.5)
    assert logit_bound(*pair, rotated=False) is None
    set_ramp(model, 1.0)
    assert logit_bound(*pair, rotated=False) == whole


def test_alpha_is_part_of_what_is_saved(tmp_path: Path, images) -> None:
    model = sharpen(tiny_timm())
    insert_qk_norm(model, PER_HEAD, images, "match")
    set_ramp(model, 0.4)
    save(model, tmp_path / "half")
    again = load(tmp_path / "half")
    assert ramp_of(again) == pytest.approx(0.4)
    assert torch.equal(outputs_of(again, images), outputs_of(model, images))
    half = model.state_dict()
    end_ramp(model)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    again.load_state_dict(whole)
    assert ramp_of(again) is None
    assert not any(name.endswith("alpha") for name in again.state_dict())
    model.load_state_dict(half)
    assert ramp_of(model) == pytest.approx(0.4)


def test_an_export_before_the_end_is_refused_or_finished(tmp_path: Path, images) -> None:
    model = sharpen(tiny_hf())
    insert_qk_norm(model, PER_HEAD, images, "match")
    whole = outputs_of(model, images)
    set_ramp(model, 0.25)
    with pytest.raises(RetrofitError, match=r"ramp is at 0\.25 of 1.*--finish-ramp"):
        export_model(model, tmp_path / "no", about={})
    assert not (tmp_path / "no").exists()
    save(model, tmp_path / "half")
    assert main(["export", str(tmp_path / "half"), "-o", str(tmp_path / "no")]) == 2
    assert main(["export", str(tmp_path / "half"), "-o", str(tmp_path / "whole"), "--finish-ramp"]) == 0
    exported = load(tmp_path / "whole")
    assert not any(name.endswith("alpha") for name in exported.state_dict())
    assert torch.equal(outputs_of(exported, images), whole)


def test_compiled_it_computes_the_same(images) -> None:
    model = sharpen(tiny_timm())
    insert_qk_norm(model, PER_HEAD, images, "match")
    set_ramp(model, 0.0)
    compiled = torch.compile(model, backend="aot_eager")
    for alpha in (0.0, 0.3, 0.6, 1.0):
        set_ramp(model, alpha)
        torch.testing.assert_close(outputs_of(compiled, images), outputs_of(model, images), rtol=1e-5, atol=1e-5)


# In training


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def study(data: Path, ramp: float = 0.5, **train: Any) -> Recipe:
    document = content(data, **{"steps": 6, "lr": 1e-3, "probe_every": 1, **train})
    document["arms"]["retrofit"] |= {"ramp": ramp}
    return parse(document)


def losses(run: Path, arm: str) -> list[float]:
    return [row["loss"] for row in read_jsonl(run / arm / "lr0.001-s0" / "metrics.jsonl")]


def test_training_begins_at_the_original_and_ends_with_the_plain_norm(data: Path, tmp_path: Path) -> None:
    run_pair(study(data), tmp_path / "ramped")
    run_pair(study(data, ramp=0.0), tmp_path / "at once")
    ramped, at_once = losses(tmp_path / "ramped", "retrofit"), losses(tmp_path / "at once", "retrofit")
    assert ramped[0] == losses(tmp_path / "ramped", "baseline")[0]
    assert ramped[0] != at_once[0]
    bounds = [
        [layer["logit_bound"] for layer in row["layers"]]
        for row in read_jsonl(tmp_path / "ramped" / "retrofit" / "lr0.001-s0" / "probes.jsonl")
    ]
    assert all(b is None for row in bounds[:3] for b in row)  # steps 0, 1 and 2 of 6, at a half
    assert all(b is not None for row in bounds[3:] for b in row)
    model = load(tmp_path / "ramped" / "retrofit" / "lr0.001-s0" / "final")
    assert ramp_of(model) is None
    assert not any(name.endswith("alpha") for name in model.state_dict())


@pytest.mark.parametrize(
    "more", [{"ema": 0.9}, {"grad_checkpointing": True}, {"accumulate": 2}, {"attention": "unfused"}]
)
def test_it_goes_with_the_trainers_features(more: dict[str, Any], data: Path, tmp_path: Path) -> None:
    run_pair(study(data, ramp=1.0, **more), tmp_path / "run")
    assert losses(tmp_path / "run", "retrofit")[0] == losses(tmp_path / "run", "baseline")[0]
    model = load(tmp_path / "run" / "retrofit" / "lr0.001-s0" / "final")
    assert not any(name.endswith("alpha") for name in model.state_dict())


def test_a_run_that_is_cut_off_on_the_way_goes_on_to_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = study(data, ramp=0.8, checkpoint_every=1, ema=0.9)
    run_pair(recipe, tmp_path / "whole")

    class Killed(BaseException):
        pass

    own = ArmRun.step

    def killing(self: ArmRun, step: int, batch: Batch, *args: Any, **more: Any) -> None:
        if step == 3 and self.key.arm == "retrofit":
            raise Killed
        own(self, step, batch, *args, **more)

    monkeypatch.setattr(ArmRun, "step", killing)
    with pytest.raises(Killed):
        run_pair(recipe, tmp_path / "run")
    monkeypatch.setattr(ArmRun, "step", own)
    run_pair(recipe, tmp_path / "run")
    for name in ("metrics.jsonl", "probes.jsonl", "final/retrofit.safetensors"):
        place = Path("retrofit") / "lr0.001-s0" / name
        assert (tmp_path / "run" / place).read_bytes() == (tmp_path / "whole" / place).read_bytes(), name


def test_a_ramp_needs_a_norm(data: Path) -> None:
    document = content(data)
    document["arms"]["baseline"] = {"ramp": 0.1}
    with pytest.raises(RecipeError, match=r"arms\.baseline\.ramp: there is no norm to come in"):
        parse(document)


def test_a_norm_without_parameters_ramps_too(images) -> None:
    model = nn.Sequential(sharpen(tiny_timm()))
    insert_qk_norm(model, QKNorm(gain="none"), init="ones")
    set_ramp(model, 0.5)
    assert ramp_of(model) == 0.5
