"""Our own folder: what comes back from it, who else can read it, and what damage it notices."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MAKERS, fresh_process, outputs_of, sharpen, tiny_hf, tiny_rope, tiny_timm
from safetensors.torch import load_file, save_file
from torch import nn

from retrofit.checkpoint import MANIFEST, WEIGHTS, file_hash, load, load_model, save, seal
from retrofit.errors import CheckpointError, ModelError, RetrofitError
from retrofit.models import family_of
from retrofit.qknorm import QKNorm
from retrofit.surgery import insert_qk_norm, remove_qk_norm, spec_of

LABELS = ["ant", "bee", "cat", "dog", "eel"]


def normed(kind: str, name: str | None, images: torch.Tensor):
    model = sharpen(MAKERS[kind]())
    if name:
        insert_qk_norm(model, QKNorm.preset(name, layers=(0, -1)), images, init="match")
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "_norm." in key and "attn" in key + "attention":
                    p.add_(torch.rand(p.shape, generator=torch.Generator().manual_seed(1)))
    family = family_of(model)
    family.set_labels(model, LABELS)
    figures = {
        "image_size": 32,
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "interpolation": "bilinear",
        "crop_pct": 0.5,
    }
    family.set_preprocess(model, replace(family.preprocess(model), **figures))
    return model


def test_a_fresh_process_gets_the_same_model(tmp_path: Path, images) -> None:
    """Bit for bit, with labels and preprocessing, for both libraries, with and without a norm."""
    cases = {}
    for kind in ("timm", "ViT"):
        for name in ("qwen3", "olmo2", "swinv2", "henry2020", None):
            model = normed(kind, name, images)
            folder = tmp_path / f"{kind}-{name}"
            save(model, folder, about={"base": "made here"})
            assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, WEIGHTS]
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # as in the other process
            cases[folder.name] = outputs_of(model, images)
            torch.set_num_threads(threads)
    torch.save({"images": images, **cases}, tmp_path / "cases.pt")
    code = """
import sys, torch, retrofit
from retrofit.models import family_of
torch.set_num_threads(1)
cases = torch.load(sys.argv[1] + "/cases.pt")
images = cases.pop("images")
state = torch.get_rng_state()
for name, wanted in cases.items():
    model = retrofit.load(sys.argv[1] + "/" + name)
    with torch.no_grad():
        result = model(images)
    result = result if isinstance(result, torch.Tensor) else result.logits
    family = family_of(model)
    p = family.preprocess(model)
    print(name, result.equal(wanted), any(m.training for m in model.modules()), *family.labels(model))
    assert (p.image_size, p.mean, p.std) == (32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), p
    assert (p.interpolation, p.crop_pct) == ("bilinear", 0.5), p
assert state.equal(torch.get_rng_state())
"""
    lines = fresh_process(code, tmp_path).splitlines()
    assert lines == [f"{name} True False {' '.join(LABELS)}" for name in cases]
    assert len(lines) == 10


@pytest.mark.parametrize("kind", ["rope", "relpos", "DeiT", "Dinov2", "Dinov2WithRegisters"])
def test_every_family_comes_back(kind: str, tmp_path: Path, images) -> None:
    model = normed(kind, "chameleon", images)
    save(model, tmp_path / "saved")
    other = load(tmp_path / "saved")
    assert outputs_of(other, images).equal(outputs_of(model, images))
    assert list(other.state_dict()) == list(model.state_dict())
    assert spec_of(other) == spec_of(model)
    save(other, tmp_path / "again")
    for name in (WEIGHTS, MANIFEST):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    remove_qk_norm(other)
    assert outputs_of(other, images).equal(outputs_of(sharpen(MAKERS[kind]()), images))


@pytest.mark.parametrize("kind", ["timm", "rope", "ViT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_models_come_back_in_their_dtype(kind: str, dtype: torch.dtype, tmp_path: Path, images) -> None:
    model = normed(kind, "qwen3", images).to(dtype)
    save(model, tmp_path / "half")
    other = load(tmp_path / "half")
    assert {p.dtype for p in other.parameters()} == {dtype}
    assert outputs_of(other, images.to(dtype)).equal(outputs_of(model, images.to(dtype)))
    assert {p.dtype for p in load_model(str(tmp_path / "half")).parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_load_model_takes_our_folder(kind: str, tmp_path: Path, images) -> None:
    model = normed(kind, "qwen3", images)
    save(model, tmp_path / "ours")
    assert outputs_of(load_model(str(tmp_path / "ours")), images).equal(outputs_of(model, images))
    headed = load_model(str(tmp_path / "ours"), num_classes=3)
    assert outputs_of(headed, images).shape == (6, 3)
    assert spec_of(headed) == spec_of(model)
    assert family_of(headed).labels(headed) == ()
    for more in ({"image_size": 48}, {"pretrained": False}, {"model_args": {"depth": 2}}):
        with pytest.raises(ModelError, match="folder that retrofit wrote"):
            load_model(str(tmp_path / "ours"), **more)


def test_models_with_shared_and_non_contiguous_weights(tmp_path: Path, images) -> None:
    model = tiny_timm()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
        model.head.weight = torch.nn.Parameter(model.head.weight.t().contiguous().t())
    assert not model.head.weight.is_contiguous()
    save(model, tmp_path / "tied")
    other = load(tmp_path / "tied")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    torch.testing.assert_close(outputs_of(other, images), outputs_of(model, images))


def test_a_backbone_without_a_head(tmp_path: Path, images) -> None:
    for name, model in (("timm", tiny_timm(num_classes=0)), ("hf", tiny_hf("Dinov2", labels=None))):
        insert_qk_norm(model, QKNorm(), images, "match")
        save(model, tmp_path / name)
        assert outputs_of(load(tmp_path / name), images).equal(outputs_of(model, images))


# What other libraries make of it.


def test_stock_loaders_refuse_loudly(tmp_path: Path, images) -> None:
    import timm
    from transformers import AutoModel, AutoModelForImageClassification

    for kind in ("timm", "ViT"):
        save(normed(kind, "qwen3", images), tmp_path / kind)
        for loader in (AutoModel, AutoModelForImageClassification):
            with pytest.raises(ValueError, match="model_type"):
                loader.from_pretrained(tmp_path / kind)
        with pytest.raises((OSError, ValueError, RuntimeError, AssertionError)):
            timm.create_model(f"local-dir:{tmp_path / kind}", pretrained=True)
        with pytest.raises(RuntimeError, match="k_norm"):
            timm.create_model(
                "vit_tiny_patch16_224",
                img_size=32,
                patch_size=8,
                embed_dim=32,
                depth=3,
                num_heads=4,
                num_classes=5,
                checkpoint_path=str(tmp_path / kind / WEIGHTS),
            )


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_transformers_finds_no_weights_even_when_told_the_structure(kind: str, tmp_path: Path, images) -> None:
    """Under transformers' own name it would take them, and leave the norm out in silence."""
    model = normed(kind, "qwen3", images)
    save(model, tmp_path / "ours")
    bare = type(MAKERS[kind]())
    for more in ({}, {"use_safetensors": True}, {"use_safetensors": False}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(OSError, match="no file named"):
            bare.from_pretrained(tmp_path / "ours", config=model.config, **more)
    save_file(load_file(tmp_path / "ours" / WEIGHTS), tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    taken = bare.from_pretrained(tmp_path / "ours", config=model.config).eval()
    assert not outputs_of(taken, images).allclose(outputs_of(model, images))


def test_a_stock_folder_is_not_ours(tmp_path: Path) -> None:
    tiny_hf().save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=f"has no {MANIFEST}.*hf:{tmp_path / 'hf'}"):
        load(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=f"has no {MANIFEST}"):
        load(tmp_path / "missing")


# Damage.


@pytest.fixture
def saved(tmp_path: Path, images) -> Path:
    save(normed("timm", "qwen3", images), tmp_path / "saved")
    return tmp_path / "saved"


def damaged(folder: Path, match: str | None = None) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_one_flipped_bit_is_noticed(saved: Path) -> None:
    content = bytearray((saved / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (saved / WEIGHTS).write_bytes(content)
    damaged(
        saved, f"{WEIGHTS} is not the file that was written: tensors differ, 1 of the (base|norms): .* .other values"
    )


def test_files_cut_off_or_gone(saved: Path) -> None:
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[:-100])
    damaged(saved, WEIGHTS)
    (saved / WEIGHTS).unlink()
    damaged(saved, f"{WEIGHTS} is missing")
    (saved / WEIGHTS).write_bytes(content)
    load(saved)
    (saved / MANIFEST).write_text((saved / MANIFEST).read_text()[:-40])
    damaged(saved, MANIFEST)
    (saved / MANIFEST).unlink()
    damaged(saved, MANIFEST)


def rewritten(folder: Path, sealed: bool, **changes) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest = {k: v for k, v in {**manifest, **changes}.items() if v is not ...}
    if sealed:
        manifest["seal"] = seal(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


CHANGED = "has been changed since it was written"
SEALED = pytest.mark.parametrize("sealed", [False, True], ids=["", "sealed"])
"""The seal tells a change by hand; what somebody sealed again must still be found by what it says."""


@SEALED
@pytest.mark.parametrize(
    "key", ["format", "loader", "library", "model", "qk_norm", "sites", "preprocess", "labels", "files"]
)
@pytest.mark.parametrize("value", [..., 5, "x", {"x": 5}, [5]], ids=["gone", "number", "text", "mapping", "list"])
def test_a_changed_manifest_is_noticed(saved: Path, key: str, value, sealed: bool) -> None:
    rewritten(saved, sealed, **{key: value})
    deeper = "is not what retrofit writes|does not name|has format|other places|does not fit together|no library known"
    deeper += "|is an export for"
    damaged(saved, deeper if sealed else f"{CHANGED}|is not what retrofit writes|does not name|has format")


@SEALED
def test_a_manifest_that_tells_another_formula_or_structure(saved: Path, sealed: bool) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    for key, value, words in (
        ("qk_norm", None, "other places"),
        ("qk_norm", {**manifest["qk_norm"], "gain": "none"}, "does not fit together"),
        ("qk_norm", {**manifest["qk_norm"], "norm": "other"}, "norm='other'"),
        ("qk_norm", {**manifest["qk_norm"], "layers": [0, 1]}, "other places"),
        ("sites", manifest["sites"][:1], "other places"),
        ("library", "transformers", "does not fit together"),
        ("model", {**manifest["model"], "architecture": "vit_none"}, "does not fit together"),
        ("model", {**manifest["model"], "num_classes": 4}, "does not fit together"),
        ("model", {**manifest["model"], "architecture": None}, "does not fit together: timm cannot build its model"),
        ("model", {**manifest["model"], "model_args": {"num_heads": 5}}, "does not fit together: timm cannot build"),
    ):
        rewritten(saved, sealed, **{key: value})
        damaged(saved, words if sealed else CHANGED)
        rewritten(saved, sealed, **{key: manifest[key]})
    for key, value, words in (("format", 2, "has format 2; this version reads 1"), ("files", {}, "does not name")):
        rewritten(saved, sealed, **{key: value})
        damaged(saved, words)
        rewritten(saved, sealed, **{key: manifest[key]})
    load(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": LABELS[::-1]},
        {"about": {"base": "another"}},
        {"versions": {}},
        {"more": 1},
        {"about": ...},
        {"seal": "0" * 64},
        {"seal": None},
    ],
    ids=["labels", "about", "versions", "more", "less", "seal", "no seal"],
)
def test_what_no_deeper_check_can_know_is_told_by_the_seal(saved: Path, changes) -> None:
    rewritten(saved, False, **changes)
    damaged(saved, rf"{MANIFEST} {CHANGED}$")
    rewritten(saved, True)
    load(saved)


def test_a_seal_holds_whatever_is_told_of_a_model(tmp_path: Path) -> None:
    """JSON changes tuples, keys and what is not finite; the order of keys and the indent say nothing."""
    about = {
        "base": "Käfer \u2028",
        "tuple": (1, 2.5),
        "worst": float("inf"),
        3: tmp_path,
        "tiny": 1e-300,
        "none": None,
    }
    save(tiny_timm(), tmp_path / "saved", about=about)
    load(tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / MANIFEST).read_text())
    (tmp_path / "saved" / MANIFEST).write_text(json.dumps(dict(reversed(manifest.items()))))
    load(tmp_path / "saved")


def test_weights_that_lack_a_norm_are_noticed_even_with_a_right_hash(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    gone = next(k for k in tensors if k.endswith("q_norm.weight"))
    save_file({k: v for k, v in tensors.items() if k != gone}, saved / WEIGHTS)
    rewritten(saved, True, files={WEIGHTS: file_hash(saved / WEIGHTS)})
    damaged(saved, gone)
    written = json.loads((saved / MANIFEST).read_text())["tensors"]
    rewritten(saved, True, tensors={k: v for k, v in written.items() if k != gone})
    damaged(saved, gone)


def test_what_is_wrong_with_the_weights_is_explained(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors["blocks.0.attn.q_norm.weight"] += 1
    tensors["norm.bias"] += 1
    tensors["more"] = tensors.pop("head.bias")
    save_file(tensors, saved / WEIGHTS)
    norms = r"1 of the norms: blocks.0.attn.q_norm.weight \(other values\)"
    base = r"3 of the base: head.bias \(missing\), more \(added\), norm.bias \(other values\)"
    damaged(saved, f"{norms}; {base}|{base}; {norms}")


def test_another_version_of_the_library_is_told_of(saved: Path) -> None:
    load(saved)  # without a warning
    versions = json.loads((saved / MANIFEST).read_text())["versions"]
    rewritten(saved, True, versions={**versions, "transformers": "4.0"})
    load(saved)  # another library's version is of no importance
    rewritten(saved, True, versions={**versions, "timm": "0.9"})
    with pytest.warns(UserWarning, match="written with timm 0.9, and this is .*retrofit verify"):
        load(saved)


# Where it writes.


def test_a_foreign_folder_is_left_alone_without_force(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    (folder / WEIGHTS).write_bytes(b"their weights")
    with pytest.raises(RetrofitError, match="did not write"):
        save(tiny_timm(), folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted([WEIGHTS, "thesis.txt"])
    assert (folder / WEIGHTS).read_bytes() == b"their weights"
    save(tiny_timm(), folder, force=True)
    load(folder)
    assert (folder / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(RetrofitError, match="is a file"):
        save(tiny_timm(), tmp_path / "file", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "theirs"]  # no scratch folder is left behind


def test_our_own_folder_is_replaced_and_foreign_files_in_it_stay(saved: Path, tmp_path: Path, images) -> None:
    (saved / "notes.txt").write_text("mine")
    (tmp_path / "outside.txt").write_text("mine")
    (saved / "sub").mkdir()
    (saved / "sub" / "inside.txt").write_text("mine")
    manifest = json.loads((saved / MANIFEST).read_text())
    outside = {"../outside.txt": "0", "sub/inside.txt": "0", str(tmp_path / "outside.txt"): "0"}
    rewritten(saved, True, files={**manifest["files"], **outside})
    model = normed("timm", "olmo2", images)
    save(model, saved)
    assert outputs_of(load(saved), images).equal(outputs_of(model, images))
    for kept in (saved / "notes.txt", tmp_path / "outside.txt", saved / "sub" / "inside.txt"):
        assert kept.read_text() == "mine", kept


def test_a_model_that_cannot_be_saved_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        save(torch.nn.Linear(2, 2), tmp_path / "none")
    odd = tiny_timm(norm_layer=torch.nn.LayerNorm)
    with pytest.raises(ModelError, match="arguments that a file cannot hold"):
        save(odd, tmp_path / "odd")
    assert not any(p.is_file() for p in tmp_path.rglob("*"))
    assert not any(p.name.startswith(".") for p in tmp_path.iterdir())


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            save(tiny_rope(), tmp_path / f"{umask:o}")
        finally:
            os.umask(before)
        for file in (tmp_path / f"{umask:o}").iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == mode, file


def test_the_manifest_is_strict_json_and_names_every_file(saved: Path) -> None:
    def refuse(text: str):
        raise AssertionError(text)

    manifest = json.loads((saved / MANIFEST).read_text(), parse_constant=refuse)
    assert manifest["files"].keys() == {WEIGHTS}
    assert manifest["labels"] == LABELS
    assert manifest["sites"] == ["blocks.0.attn", "blocks.2.attn"]
    assert manifest["qk_norm"]["layers"] == [0, -1]
    assert not any(str(saved.parent) in line for line in (saved / MANIFEST).read_text().splitlines())
    with (saved / WEIGHTS).open("rb") as file:
        assert b'"format":"pt"' in file.read(4096)


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel], ids=["compiled", "parallel"]
)
def test_a_wrapped_model_is_saved_as_what_it_wraps(wrap, tmp_path: Path, images) -> None:
    model = tiny_timm()
    insert_qk_norm(model, QKNorm(gain="per_head"), init="ones")
    save(wrap(model), tmp_path / "saved")
    assert torch.equal(outputs_of(load(tmp_path / "saved"), images), outputs_of(model, images))
