"""Exports to timm, transformers and ONNX: what their own loaders make of them, and that none makes a third thing."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fresh_process, outputs_of, tiny_rope, tiny_timm
from PIL import Image
from safetensors.torch import load_file, save_file
from zoo import CLASSIFIERS

from retrofit import QKNorm, insert_qk_norm, load
from retrofit.checkpoint import MANIFEST, file_hash, seal
from retrofit.data import eval_batches, open_images
from retrofit.errors import CheckpointError, RetrofitError
from retrofit.export import proof, to_hf, verify
from retrofit.export.folder import write_export
from retrofit.export.modeling import modeling_source
from retrofit.export.to_hf import image_processor, in_transformers
from retrofit.export.to_timm import native_settings, native_timm
from retrofit.models.preprocess import Preprocess
from retrofit.qknorm import PRESETS

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import exports

SOME = [
    ("timm_vit", "vit22b", "timm"),
    ("timm_dinov3", "vit22b", "timm"),
    ("timm_vit", "qwen3", "timm"),
    ("hf_vit", "qwen3", "timm"),
    ("timm_vit", "olmo2", "hf"),
    ("timm_dinov3", "llama4", "hf"),
    ("hf_vit", "qwen3", "hf"),
    ("hf_dinov3", "henry2020", "hf"),
    ("hf_clip", "vit22b", "hf"),
    ("timm_swin", "qwen3", "hf"),
    ("timm_vit", "qwen3", "onnx"),
]


SHARDED = "hf_deit-qwen3-hf"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports without a proof, by name. Not to be changed."""
    root = tmp_path_factory.mktemp("targets")
    written = [exports.write_one(root, *one) for one in SOME]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_hf, "_SHARD", "20KB")
        written.append(exports.write_one(root, *SHARDED.split("-")))
    return {folder.name: folder for folder in written}


def test_every_loader_gives_the_same_or_refuses(folders: dict[str, Path]) -> None:
    rows = exports.table(list(folders.values()), processes=[exports.LOADERS])
    assert [row["folder"] for row in rows if not exports.sound(row)] == []
    by_name = {row["folder"]: row for row in rows}
    for name, loaders in {
        "timm_vit-vit22b-timm": ["timm", "transformers", "transformers_class", "transformers_trusting", proof.FEATURES],
        "timm_vit-qwen3-timm": ["retrofit"],
        "hf_vit-qwen3-timm": ["retrofit"],
        "hf_vit-qwen3-hf": ["transformers_trusting", proof.FEATURES],
        "timm_vit-qwen3-onnx": ["onnxruntime"],
    }.items():
        row = by_name[name]
        assert [key for key in (*exports.LOADERS, "retrofit") if row[key] is not None] == loaders, name


@pytest.mark.slow
@pytest.mark.parametrize("to", exports.TARGETS)
def test_the_table_over_more_architectures(to: str, tmp_path: Path) -> None:
    """One process a loader over all folders."""
    words = ["timm_vit", "timm_eva02", "hf_dinov2", "hf_beit", "hf_siglip"]
    written = exports.write(tmp_path, words, [to], exports.PRESETS)
    rows = exports.table(written)
    assert len(rows) == 4 * (len([n for n in CLASSIFIERS if any(w in n for w in words)]))
    assert [row["folder"] for row in rows if not exports.sound(row)] == []


def test_a_second_save_and_load_is_exact_and_features_come_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """In a process that cannot import this package."""
    code = """
import sys, torch, json
sys.modules["retrofit"] = None
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification
torch.set_num_threads(1)
out = Path(sys.argv[1])
for folder in map(Path, sys.argv[2:]):
    facts = json.loads((folder / "retrofit.json").read_text())
    images = load_file(folder / "fixture.safetensors")["images"]
    auto = AutoModelForImageClassification if facts["classifies"] else AutoModel
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    again = out / folder.name
    model.save_pretrained(again, max_shard_size="20KB")
    assert list(again.glob("*.index*json")) and len(list(again.glob("*.safetensors"))) > 1
    other = auto.from_pretrained(again, trust_remote_code=True).eval()
    with torch.no_grad():
        one, two = model(images, output_hidden_states=True), other(images)
        assert all(torch.equal(a, b) for a, b in zip(one.to_tuple()[:1], two.to_tuple()[:1])), folder
        body = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
        tokens = body(images).last_hidden_state
    last = one.hidden_states[-1]
    norms = sum(name.endswith("q_norm") for name, _ in body.named_modules())
    assert norms == len(facts["sites"]) and tokens.ndim == 3, folder
    if "timm" not in folder.name:
        body.save_pretrained(out / "body")
        with torch.no_grad():
            back = AutoModel.from_pretrained(out / "body", trust_remote_code=True).eval()(images)
            assert torch.equal(back.last_hidden_state, tokens), folder
            model.set_attn_implementation("eager")
            eager = model(images, output_attentions=True)
        torch.testing.assert_close(eager[0], one[0], rtol=1e-4, atol=1e-5)
        assert len(eager.attentions) == len(facts["sites"])
    AutoImageProcessor.from_pretrained(folder)
    print(folder.name, [model.config.id2label[i] for i in sorted(model.config.id2label)][:2])
"""
    chosen = [
        folders[f"{name}-hf"] for name in ("timm_vit-olmo2", "hf_vit-qwen3", "hf_dinov3-henry2020", "hf_clip-vit22b")
    ]
    said = fresh_process(code, tmp_path, *chosen, HF_MODULES_CACHE=str(tmp_path / "modules"))
    lines = [line for line in said.splitlines() if line.endswith("]")]
    assert lines[1] == "hf_vit-qwen3-hf ['ant', 'bee']"
    assert len(lines) == 4


def test_a_large_model_is_written_in_shards(folders: dict[str, Path]) -> None:
    """Above 5 GB; here above 20 kB. Whether they are found is the table's matter."""
    folder = folders[SHARDED]
    written = {p.name for p in folder.glob("model*.safetensors")} | {"model.safetensors.index.qknorm.json"}
    assert len(written) > 3
    assert written < json.loads((folder / MANIFEST).read_text())["files"].keys()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_modeling_file_stands_alone_and_is_short(name: str) -> None:
    for preset in ("qwen3", "swinv2"):
        model = CLASSIFIERS[name]()
        insert_qk_norm(model, QKNorm.preset(preset), init="ones")
        source = modeling_source(in_transformers(model))
        assert len(source.splitlines()) < 300
        imported = {n.module or "" for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
        imported |= {a.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import) for a in n.names}
        roots = {module.split(".")[0] for module in imported}
        assert roots <= {"__future__", "math", "dataclasses", "typing", "collections", "torch", "transformers", "timm"}
        assert max(len(line) for line in source.splitlines()) <= 120
        assert "RetrofitError" not in source


def test_the_norm_of_the_modeling_file_is_the_projects_own(tmp_path: Path) -> None:
    """The very same numbers for every formula, layout and part, from the generated class."""
    from retrofit.norms import HeadNorm

    model = CLASSIFIERS["hf_vit"]()
    insert_qk_norm(model, QKNorm(), init="ones")
    space: dict[str, Any] = {"__name__": "generated"}
    source = modeling_source(model).partition("class QKNormViTAttention")[0]
    module = type(sys)("generated")
    sys.modules["generated"] = module
    try:
        exec(compile(source, "generated", "exec"), module.__dict__)
    finally:
        del sys.modules["generated"]
    space = module.__dict__
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    for make in PRESETS.values():
        spec = make()
        told = {name: getattr(spec, name) for name in space["QKNorm"].__dataclass_fields__}
        for layout, laid in (("BHND", x), ("BNHD", x.transpose(1, 2)), ("(BH)ND", x.flatten(0, 1))):
            common: dict[str, Any] = {"layout": layout, "scale_init": 2.0, "attention_scale": 0.5, "shifted": True}
            for role in ("q", "k"):
                ours = HeadNorm(spec, role, 4, 8, **common)
                with torch.no_grad():
                    for p in ours.parameters():
                        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
                theirs = space["HeadNorm"](space["QKNorm"](**told), role, 4, 8, **common)
                theirs.load_state_dict(ours.state_dict())
                assert torch.equal(theirs(laid), ours(laid))


# timm


def normed(spec: QKNorm, build: Callable[[], Any] = tiny_timm) -> Any:
    """With a shift, a gain and a scale that can be felt."""
    model = build()
    insert_qk_norm(model, spec, init="ones")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_norm." in name or "k_norm." in name:
                p.add_(torch.rand(p.shape, generator=torch.Generator().manual_seed(2)))
    return model


@pytest.mark.parametrize(
    ("spec", "build"),
    [
        (QKNorm.preset("timm"), tiny_timm),
        (QKNorm.preset("vit22b"), tiny_timm),
        (QKNorm(norm="layernorm", gain="none"), tiny_timm),
        (QKNorm(norm="layernorm", zero_centered=True), tiny_timm),
        (QKNorm(norm="layernorm", bias=True, scale="learned", scale_init=0.5), tiny_timm),
        (QKNorm.preset("timm"), tiny_rope),
        (QKNorm(eps=1e-6), lambda: tiny_timm(norm_layer="rmsnorm")),
        (QKNorm.preset("timm"), CLASSIFIERS["timm_parallel_things"]),
        (QKNorm.preset("timm"), CLASSIFIERS["timm_siglip"]),
        (QKNorm.preset("timm"), CLASSIFIERS["hf_timm_wrapper"]),
    ],
)
def test_timm_computes_what_it_can_express(spec: QKNorm, build: Callable[[], Any], images: torch.Tensor) -> None:
    model = normed(spec, build)
    native, obstacles = native_timm(model)
    assert obstacles == []
    assert native is not None
    assert not any("retrofit" in type(m).__module__ for m in native.modules())
    torch.testing.assert_close(outputs_of(native, images), outputs_of(model, images), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (QKNorm(), "norm=rms"),
        (QKNorm(norm="layernorm", eps=1e-5), "eps=1e-05: timm's own norm here has 1e-06"),
        (QKNorm(norm="layernorm", gain="per_head"), "gain=per_head"),
        (QKNorm(norm="layernorm", axis="projection", gain="per_head"), "axis=projection"),
        (QKNorm(norm="layernorm", layers=(0,)), "timm norms all blocks"),
        (QKNorm(norm="layernorm", scale="learned_per_head", scale_init=1.0), "scale=learned_per_head"),
        (QKNorm.preset("henry2020"), "norm=l2"),
    ],
)
def test_what_timm_cannot_express_is_named(spec: QKNorm, words: str) -> None:
    model = normed(spec)
    native, obstacles = native_timm(model)
    assert native is None
    assert words in "; ".join(obstacles)
    assert native_settings(model) == "--preset timm eps=1e-06"


def test_more_that_timm_cannot_express() -> None:
    after = normed(QKNorm(norm="layernorm", position="after_rope"), tiny_rope)
    assert "position=after_rope: timm norms before RoPE" in native_timm(after)[1]
    unbiased = normed(QKNorm.preset("timm"), lambda: tiny_timm(qkv_bias=False))
    assert "no bias of its own to fold it into" in native_timm(unbiased)[1][0]
    assert "model of transformers" in native_timm(normed(QKNorm(), CLASSIFIERS["hf_vit"]))[1][0]
    assert native_settings(normed(QKNorm(), CLASSIFIERS["hf_vit"])) is None


def test_the_line_that_says_how_to_load_what_timm_refuses(tmp_path: Path, images: torch.Tensor) -> None:
    model = normed(QKNorm())
    findings = write_export(model, tmp_path / "out", about={}, images=images, to="timm")
    assert findings[0].startswith("timm cannot express this model: norm=rms")
    assert findings[0].endswith("native would be: --preset timm eps=1e-06")
    assert findings[1] == f'timm refuses the folder; retrofit.load("{tmp_path / "out"}") loads it'
    assert torch.equal(outputs_of(load(tmp_path / "out"), images), outputs_of(model, images))


# What is written


@pytest.mark.parametrize("to", ["retrofit", "timm", "hf", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_same_model_gives_the_same_bytes_without_shared_tensors(to: Any, tmp_path: Path, images: Any) -> None:
    for name in ("one", "two"):
        model = normed(QKNorm.preset("timm"))
        with torch.no_grad():
            model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
        write_export(model, tmp_path / name, about={"base": "x"}, images=images, to=to)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
        if name.endswith(".safetensors"):
            with (tmp_path / "one" / name).open("rb") as file:
                assert b'"format":"pt"' in file.read(8192)


@pytest.mark.parametrize("to", ["retrofit", "timm", "hf"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_that_is_asked_for_holds_for_norms_too(to: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = normed(QKNorm.preset("timm")).to(dtype)
    write_export(model, tmp_path / "out", about={}, images=torch.randn(2, 3, 32, 32), to=to)
    (weights,) = (p for p in (tmp_path / "out").glob("*.safetensors") if p.name != "fixture.safetensors")
    assert {t.dtype for t in load_file(weights).values()} == {dtype}


def test_the_image_processor_does_what_ours_does(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    preprocess = Preprocess(20, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 0.8)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processor(preprocess)))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    for i, size in enumerate([(40, 30), (30, 40), (25, 25)]):
        smooth = np.random.default_rng(i).integers(0, 255, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(smooth).resize(size, Image.Resampling.BICUBIC).save(tmp_path / f"{i}.png")
    ours = next(eval_batches(open_images(str(tmp_path)), preprocess, 3)).pixels
    theirs = [processor(Image.open(tmp_path / f"{i}.png").convert("RGB"), return_tensors="pt") for i in range(3)]
    theirs = torch.cat([t["pixel_values"] for t in theirs])
    assert theirs.shape == ours.shape
    assert (theirs - ours).abs().mean() < 0.02  # one resizes with Pillow, the other with tensors


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = normed(QKNorm())
    with pytest.raises(RetrofitError, match="to='tflite' is not one of retrofit, timm, hf, onnx"):
        write_export(model, tmp_path / "out", about={}, to="tflite")  # type: ignore[arg-type]
    with pytest.raises(RetrofitError, match="no bfloat16 arithmetic"):
        write_export(model.bfloat16(), tmp_path / "out", about={}, to="onnx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        RetrofitError, match=r'needs onnx, onnxscript, onnxruntime: pip install "qknorm-retrofit\[onnx\]"'
    ):
        write_export(model, tmp_path / "out", about={}, to="onnx")
    assert not (tmp_path / "out").exists()


def test_an_export_for_others_says_so_to_our_own_loader(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"is an export for transformers; its README.md says how"):
        load(folders["hf_vit-qwen3-hf"])
    card = (folders["hf_vit-qwen3-hf"] / "README.md").read_text()
    assert 'AutoModelForImageClassification.from_pretrained("this folder", trust_remote_code=True)' in card
    assert "## Limits" in card
    assert (
        'timm.create_model("local-dir:this folder", pretrained=True)'
        in (folders["timm_vit-vit22b-timm"] / "README.md").read_text()
    )
    assert "onnxruntime" in (folders["timm_vit-qwen3-onnx"] / "README.md").read_text()


def test_what_the_cards_say_works(folders: dict[str, Path], tmp_path: Path) -> None:
    """Their code, line by line, in a process that cannot import this package."""
    Image.new("L", (40, 30), 120).save(tmp_path / "image.jpg")
    code = """
import os, re, sys
from pathlib import Path
sys.modules["retrofit"] = None
import torch
torch.set_num_threads(1)
os.chdir(sys.argv[1])
for folder in sys.argv[2:]:
    (text,) = re.findall("```python\\n(.*?)```", Path(folder, "README.md").read_text(), re.DOTALL)
    space = {"images": torch.zeros(3, 3, 32, 32).numpy()}
    exec(text.replace("this folder", folder).replace("model.onnx", folder + "/model.onnx"), space)
    print("shape", *space.get("logits", space.get("features")).shape)
"""
    chosen = [folders[name] for name in (HF, TIMM, ONNX, "hf_dinov3-henry2020-hf", "timm_swin-qwen3-hf")]
    said = fresh_process(code, tmp_path, *chosen, HF_MODULES_CACHE=str(tmp_path / "modules")).splitlines()
    assert [line for line in said if line.startswith("shape")] == [
        "shape 1 2",
        "shape 1 5",
        "shape 3 5",
        "shape 1 18 32",
        "shape 1 5",
    ]
    assert {line for line in said if line in exports.LABELS}  # which class, by its name


# verify


def sealed(folder: Path) -> None:
    """Makes hashes and seal anew, as somebody would who wants a change to pass."""
    manifest = json.loads((folder / "retrofit.json").read_text())
    manifest["files"] = {name: file_hash(folder / name) for name in manifest["files"]}
    (folder / "retrofit.json").write_text(json.dumps({**manifest, "seal": seal(manifest)}))


def in_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def in_weights(folder: Path) -> None:
    (path,) = (p for p in folder.glob("*.safetensors") if p.name != "fixture.safetensors")
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("q_norm.weight"))
    save_file({**tensors, name: tensors[name] * 1.05}, path, {"format": "pt"})


def in_code(folder: Path) -> None:
    (path,) = folder.glob("*.py")
    path.write_text(path.read_text() + f"\nimport os\nos.mkdir({str(folder / 'ran')!r})\n")


def in_graph(folder: Path) -> None:
    import onnx

    model = onnx.load(folder / "model.onnx")
    tensor = next(t for t in model.graph.initializer if t.name.endswith("norm1.weight"))
    values = onnx.numpy_helper.to_array(tensor) * 1.05
    tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))
    onnx.save(model, folder / "model.onnx")


HF, TIMM, ONNX = "hf_vit-qwen3-hf", "timm_vit-vit22b-timm", "timm_vit-qwen3-onnx"
TAMPERED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "weights": (HF, in_weights, "differ by"),
    "eps": (HF, in_config(lambda c: c["qk_norm"]["formula"].update(eps=0.1)), "differ by"),
    "formula": (HF, in_config(lambda c: c["qk_norm"]["formula"].update(norm="layernorm")), "differ by"),
    "a site": (HF, in_config(lambda c: c["qk_norm"]["sites"].popitem()), "finds 1 attention layers"),
    "labels": (HF, in_config(lambda c: c["id2label"].update({"0": "yak"})), "other class names"),
    "stock type": (HF, in_config(lambda c: c.update(model_type="vit")), "does not name qknorm_vit"),
    "code of another": (HF, in_config(lambda c: c["auto_map"].update(AutoModel="a/b--c.D")), "and its own classes"),
    "code": (HF, in_code, "is not what retrofit writes"),
    "timm's weights": (TIMM, in_weights, "differ by"),
    "timm's labels": (TIMM, in_config(lambda c: c["label_names"].reverse()), "other class names"),
    "timm's arguments": (TIMM, in_config(lambda c: c["model_args"].update(qk_norm=False)), "cannot load"),
    "the graph": (ONNX, in_graph, "differ by"),
}


_QUICK = {"code", "code of another", "stock type"}
"""Those that are known before anything is loaded."""


@pytest.mark.parametrize("case", TAMPERED)
def test_what_was_tampered_with_does_not_verify(folders: dict[str, Path], case: str, tmp_path: Path) -> None:
    name, tamper, _ = TAMPERED[case]
    copy = Path(shutil.copytree(folders[name], tmp_path / "copy"))
    tamper(copy)
    found = verify(copy)
    assert not found.ok
    assert "is not the file that was written: its hash differs" in found.findings[0]
    assert not (copy / "ran").exists()


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in _QUICK else [pytest.mark.slow]) for c in TAMPERED])
def test_nor_where_hashes_and_seal_were_made_anew(folders: dict[str, Path], case: str, tmp_path: Path) -> None:
    name, tamper, words = TAMPERED[case]
    copy = Path(shutil.copytree(folders[name], tmp_path / "copy"))
    tamper(copy)
    sealed(copy)
    found = verify(copy)
    assert not found.ok
    assert any(word in found.findings[0] for word in words.split("|")), found
    assert not (copy / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{a}-{p}-{t}" for a, p, t in SOME])
def test_what_was_written_verifies(folders: dict[str, Path], name: str) -> None:
    found = verify(folders[name])
    assert found.ok, found
    assert "files are those that were written" in found.findings[0]


EVIL = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import ViTConfig as C, ViTForImageClassification as M
"""
LEADING: dict[str, tuple[str, str, Callable[[Path], dict[str, Any]]]] = {
    "a folder that stock loaders refuse": ("timm_vit-qwen3-timm", "evil.py", lambda _: {"auto_map": _classes("evil")}),
    "a folder below": (HF, "below/evil.py", lambda _: {"auto_map": _classes("below/evil")}),
    "a folder elsewhere": (HF, "../evil/evil.py", lambda f: {"auto_map": _classes(f"{f.parent / 'evil'}--evil")}),
    "beside a graph": (ONNX, "../evil/evil.py", lambda f: {"auto_map": _classes(f"{f.parent / 'evil'}--evil")}),
    "another config": (HF, "other/evil.py", lambda _: {"configuration_files": ["config.4.0.0.json"]}),
}


def _classes(module: str) -> dict[str, str]:
    return {"AutoConfig": f"{module}.C", "AutoModel": f"{module}.M", "AutoModelForImageClassification": f"{module}.M"}


@pytest.mark.parametrize("case", LEADING)
def test_verify_runs_no_code_wherever_it_is_led(folders: dict[str, Path], case: str, tmp_path: Path) -> None:
    """A seal is no secret: whoever hands out a folder can make it."""
    name, where, change = LEADING[case]
    copy = Path(shutil.copytree(folders[name], tmp_path / "copy"))
    (copy / where).parent.mkdir(exist_ok=True)
    (copy / where).write_text(EVIL.format(ran=str(tmp_path / "ran")))
    config = copy / "config.json"
    told = json.loads(config.read_text()) if config.is_file() else {}
    config.write_text(json.dumps(told | {"model_type": told.get("model_type", "evil")} | change(copy)))
    sealed(copy)
    found = verify(copy)
    assert not found.ok
    assert "does not name" in found.findings[0]
    assert not (tmp_path / "ran").exists()


def test_the_process_that_loads_ends_before_it_runs_other_code(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whichever way of a configuration led to it."""
    copy = Path(shutil.copytree(folders[HF], tmp_path / "copy"))
    in_code(copy)
    (path,) = copy.glob("*.py")
    with pytest.raises(CheckpointError, match=f"{path.name} is not code that retrofit writes, and is not run"):
        proof.reloaded([copy], ["transformers_trusting"], [modeling_source(CLASSIFIERS["hf_vit"]())])
    assert not (copy / "ran").exists()


def test_what_a_loader_must_refuse_and_takes_is_no_proof(folders: dict[str, Path], monkeypatch: Any) -> None:
    def taken(_: Any, loaders: list[str], code: Any) -> list[dict[str, Any]]:
        good = {"difference": 0.0, "labels": ["ant", "bee"], "norms": 2, "folder": "there"}
        return [{"loader": loader, **good} for loader in loaders]

    monkeypatch.setattr(proof, "reloaded", taken)
    found = verify(folders[HF])
    assert not found.ok
    assert found.findings == ["timm loads there, and leaves out the norm"]
