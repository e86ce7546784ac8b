"""Sites and derived classes of both libraries, and load_model on every kind of source."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import socket
import time
from pathlib import Path

import pytest
import timm
import torch
from conftest import MAKERS, fill_cache, fresh_process, outputs_of, tiny_hf, tiny_rope, tiny_timm
from huggingface_hub import constants
from torch import nn

from retrofit.checkpoint import load_model
from retrofit.errors import ModelError
from retrofit.models import ATTENTION_CLASSES, FAMILIES, derive, evaluating, family_named, family_of, sites_of
from retrofit.models.derive import derived, original
from retrofit.norms import HeadNorm
from retrofit.qknorm import QKNorm
from retrofit.surgery import insert_qk_norm, survey

DERIVED = [
    pytest.param(kind, edit, id=f"{kind.path.rpartition('.')[2]}{edit.place}")
    for kind in ATTENTION_CLASSES
    for edit in (kind.edit, kind.after_rope)
    if edit is not None
]


def save_timm(model: nn.Module, folder: Path, **options) -> Path:
    from timm.models import save_for_hf

    save_for_hf(model, folder, model_args=model._model_args, safe_serialization=True, **options)
    return folder


@pytest.fixture
def timm_dir(tmp_path: Path) -> Path:
    return save_timm(tiny_timm(), tmp_path / "of_timm")


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "of_hf"
    tiny_hf().save_pretrained(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose names do not resolve, with an empty cache."""

    def unresolved(*_args, **_kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty_cache"))


# Sites.


@pytest.mark.parametrize(
    ("kind", "names", "rotated"),
    [
        ("timm", "blocks.{}.attn", False),
        ("relpos", "blocks.{}.attn", False),
        ("rope", "blocks.{}.attn", True),
        ("ViT", "vit.layers.{}.attention", False),
        ("DeiT", "deit.layers.{}.attention", False),
        ("Dinov2", "dinov2.encoder.layer.{}.attention", False),
        ("Dinov2WithRegisters", "dinov2_with_registers.encoder.layer.{}.attention", False),
    ],
)
def test_sites(kind: str, names: str, rotated: bool) -> None:
    model = MAKERS[kind]()
    sites, skipped = sites_of(model)
    assert [site.name for site in sites] == [names.format(i) for i in range(3)]
    assert skipped == []
    for site in sites:
        assert model.get_submodule(site.name) is site.module
        assert (site.heads, site.kv_heads, site.head_dim, site.rotated) == (4, 4, 8, rotated)
        assert site.scale == pytest.approx(8**-0.5)
        assert site.norms is None
        assert not site.native


def test_grouped_queries_and_head_dims_that_do_not_divide_the_width() -> None:
    from timm.layers.attention import Attention, AttentionRope

    grouped = nn.Sequential(AttentionRope(32, num_heads=4, num_kv_heads=2, attn_head_dim=6, qkv_fused=False))
    wide = nn.Sequential(Attention(32, num_heads=4, attn_head_dim=16))
    found = [sites_of(m)[0][0] for m in (grouped, wide)]
    assert [(s.heads, s.kv_heads, s.head_dim, s.rotated) for s in found] == [(4, 2, 6, True), (4, 4, 16, False)]


@pytest.mark.parametrize("kind", MAKERS)
def test_the_norm_gets_q_and_k_in_the_layout_of_the_site(kind: str, images) -> None:
    """Heads where the layout says H: marks q's and k's projections by head, and looks at what reaches the norm."""
    model = MAKERS[kind]()
    site = sites_of(model)[0][0]
    tokens = {"relpos": 16, "DeiT": 18, "Dinov2WithRegisters": 21}.get(kind, 17)
    seen = {}
    norms = [HeadNorm(QKNorm(), role, 4, 8) for role in "qk"]
    for norm in norms:
        norm.register_forward_pre_hook(lambda m, args: seen.update({m.role: args[0]}))
    site.place(*norms)
    hidden = {}
    site.module.register_forward_pre_hook(lambda _m, args: hidden.update(x=args[0]))
    outputs_of(model, images)
    module, x = site.module, hidden["x"]
    for part, role in enumerate("qk"):
        if getattr(module, "qkv", None) is not None:
            bias = getattr(module.qkv, "bias", None)
            weight = module.qkv.weight[part * 32 : (part + 1) * 32]
            bias = None if bias is None else bias[part * 32 : (part + 1) * 32]
        else:
            weight, bias = (getattr(getattr(module, f"{role}_proj"), name) for name in ("weight", "bias"))
        flat = nn.functional.linear(x, weight, bias)
        if getattr(module, "q_bias", None) is not None and role == "q":
            flat = flat + module.q_bias
        assert seen[role].shape == (6, 4, tokens, 8)
        for h in range(4):
            wanted = flat[..., h * 8 : (h + 1) * 8]
            torch.testing.assert_close(seen[role][:, h], wanted, rtol=1e-5, atol=1e-6)


def test_attention_that_is_not_known_is_named() -> None:
    import timm

    model = timm.create_model("swinv2_tiny_window8_256", img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 1, 1))
    sites, skipped = sites_of(model)
    assert sites == []
    assert len(skipped) == 4
    assert all("WindowAttention" in s.reason for s in skipped)


def test_a_model_of_neither_library() -> None:
    with pytest.raises(ModelError, match="neither a timm nor a transformers"):
        family_of(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"jax.*transformers, timm"):
        family_named("jax")
    assert [family_named(f.library) for f in FAMILIES] == list(FAMILIES)


# Derived classes.


def place_identities(model: nn.Module) -> None:
    for site in sites_of(model)[0]:
        site.place(*(HeadNorm(QKNorm(), role, site.heads, site.head_dim) for role in "qk"))
        site.module.q_norm, site.module.k_norm = nn.Identity(), nn.Identity()


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_derived_forward_is_the_original_plus_the_norm(kind: str, attention: str, images) -> None:
    model = MAKERS[kind]()
    model.set_attn_implementation(attention)
    before = outputs_of(model, images)
    classes = [type(site.module) for site in sites_of(model)[0]]
    place_identities(model)
    assert all(type(site.module) is not c for site, c in zip(sites_of(model)[0], classes, strict=True))
    assert [original(type(site.module)) for site in sites_of(model)[0]] == classes
    assert all(isinstance(site.module, c) for site, c in zip(sites_of(model)[0], classes, strict=True))
    assert torch.equal(outputs_of(model, images), before)
    for site in sites_of(model)[0]:
        site.module.k_norm = nn.Threshold(-1e9, 0.0, inplace=False)
        site.module.q_norm = nn.Hardtanh(-1e-6, 1e-6)  # uniform attention
    assert not torch.equal(outputs_of(model, images), before)


@pytest.mark.parametrize(("kind", "edit"), DERIVED)
def test_derived_source_differs_by_the_norm_alone(kind, edit) -> None:
    cls = derived(kind.path, edit)
    assert cls is derived(kind.path, edit)
    assert getattr(derive, cls.__name__) is cls  # as unpickling finds it
    for method in {one.method for one in edit.whole}:
        base, ours = (
            [line.strip() for line in inspect.getsource(getattr(c, method)).splitlines()] for c in (original(cls), cls)
        )
        for one in edit.whole:
            if one.method == method:
                at = ours.index(one.norm)
                assert (one.after is None) or ours[at - 1].startswith(one.after)
                assert (one.before is None) or ours[at + 1].startswith(one.before)
                ours[at : at + 1] = [] if one.instead is None else [one.instead]
        dropped = [one.drop for one in edit.whole if one.drop is not None]
        assert ours == [line for line in base if not any(line.startswith(d) for d in dropped)]


def test_derived_instances_copy_and_pickle(images) -> None:
    model = tiny_hf()
    for site in sites_of(model)[0]:
        site.place(*(HeadNorm(QKNorm(), role, 4, 8) for role in "qk"))
    before = outputs_of(model, images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(sites_of(other)[0][0].module) is type(sites_of(model)[0][0].module)
        assert sites_of(other)[0][0].module is not sites_of(model)[0][0].module
        assert torch.equal(outputs_of(other, images), before)


def test_derived_instances_unpickle_in_a_fresh_process(tmp_path: Path, images) -> None:
    model = tiny_hf("DeiT")
    for site in sites_of(model)[0]:
        site.place(*(HeadNorm(QKNorm(), role, 4, 8) for role in "qk"))
    torch.save((model, images, outputs_of(model, images)), tmp_path / "pickled.pt")
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "model, images, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "print(float((model(images).logits - wanted).abs().max()), type(model.deit.layers[0].attention).__name__)"
    )
    difference, name = fresh_process(code, tmp_path / "pickled.pt").split()
    assert float(difference) < 1e-6
    assert name.startswith("Normed_")
    assert name.endswith("DeiTAttention")


def test_no_other_name_is_made_up() -> None:
    for name in ("Normed_os__system", "anything"):
        with pytest.raises(AttributeError):
            getattr(derive, name)


@pytest.mark.parametrize("change", ["twice", "gone"])
def test_a_source_that_does_not_fit_is_refused(change: str, monkeypatch: pytest.MonkeyPatch, images) -> None:
    import transformers

    real = inspect.getsource

    def other_version(obj):
        source = real(obj)
        line = next(line for line in source.splitlines() if "key_states = self.k_proj" in line)
        return source.replace(line, f"{line}\n{line}" if change == "twice" else line.replace("key_states", "k"))

    monkeypatch.setattr(inspect, "getsource", other_version)
    derive._derived.cache_clear()
    model = tiny_hf()
    modules, keys = list(model.named_modules()), list(model.state_dict())
    try:
        with pytest.raises(ModelError, match=f"ViTAttention of transformers {transformers.__version__}"):
            insert_qk_norm(model, QKNorm(), init="ones")
    finally:
        derive._derived.cache_clear()
    assert list(model.named_modules()) == modules
    assert list(model.state_dict()) == keys


def test_slots_that_the_installed_forward_does_not_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that are created and never applied would pass for a retrofit."""
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda obj: real(obj).replace("self.q_norm(q)", "q"))
    derive._slots.cache_clear()
    model = tiny_timm()
    try:
        with pytest.raises(ModelError, match=f"Attention of timm {timm.__version__} .* calls q_norm 0 times"):
            insert_qk_norm(model, QKNorm(), init="ones")
    finally:
        derive._slots.cache_clear()
    assert not any("_norm." in key for key in model.state_dict())


@pytest.mark.parametrize("make", [tiny_timm, tiny_hf])
def test_a_class_whose_forward_was_replaced_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its globals are another module's; and what was derived before it was replaced must not come back."""
    before = make()
    insert_qk_norm(before, QKNorm(), init="ones")
    model = make()
    cls = type(sites_of(model)[0][0].module)
    own = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    with pytest.raises(ModelError, match="its forward has been replaced"):
        insert_qk_norm(model, QKNorm(), init="ones")
    assert not any("_norm." in key for key in model.state_dict())


@pytest.mark.parametrize(("make", "attribute"), [(tiny_timm, "num_heads"), (tiny_hf, "num_attention_heads")])
def test_a_class_without_the_attributes_of_its_line_is_refused(make, attribute: str) -> None:
    model = make()
    delattr(sites_of(model)[0][0].module, attribute)
    found = survey(model)
    assert found.refusal is not None
    assert re.search(rf"Attention of (timm|transformers) [0-9.]+ .*has no attribute '{attribute}'", found.refusal)
    with pytest.raises(ModelError, match=attribute):
        insert_qk_norm(model, QKNorm(), init="ones")


# load_model.


def test_nano() -> None:
    model = load_model("nano")
    preprocess = family_of(model).preprocess(model)
    assert outputs_of(model, torch.zeros(1, 3, 28, 28)).shape == (1, 10)
    assert preprocess.image_size == 28
    assert len(family_of(model).labels(model)) == 10
    assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_folders(library: str, timm_dir: Path, hf_dir: Path, images) -> None:
    folder, made = {"timm": (timm_dir, tiny_timm()), "hf": (hf_dir, tiny_hf())}[library]
    model = load_model(f"{library}:{folder}")
    assert type(model) is type(made)
    assert torch.equal(outputs_of(model, images), outputs_of(made, images))
    assert not any(m.training for m in model.modules())


def test_names_without_weights() -> None:
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
    one, two, other = (
        load_model("timm/vit_tiny_patch16_224", pretrained=False, model_args=args, num_classes=3, seed=seed)
        for seed in (7, 7, 8)
    )
    assert one.num_classes == 3
    assert family_of(one).preprocess(one).image_size == 32  # not the 224 of the name
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not torch.equal(one.blocks[0].attn.qkv.weight, other.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_the_new_head_follows_from_the_seed_alone(library: str, timm_dir: Path, hf_dir: Path) -> None:
    source = {"timm": f"timm:{timm_dir}", "hf": f"hf:{hf_dir}"}[library]

    def head(seed: int) -> torch.Tensor:
        model = load_model(source, num_classes=7, seed=seed)
        layer = family_of(model).head(model)
        assert not layer.bias.any()
        assert outputs_of(model, torch.zeros(1, 3, 32, 32)).shape == (1, 7)
        return layer.weight.detach()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = head(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(head(0), first)
    assert not torch.equal(head(1), first)
    assert float(first.std()) == pytest.approx(0.02, rel=0.2)


def test_the_head_of_both_libraries_is_the_same(timm_dir: Path, hf_dir: Path) -> None:
    one, two = load_model(f"timm:{timm_dir}", num_classes=7), load_model(f"hf:{hf_dir}", num_classes=7)
    assert torch.equal(one.head.weight, two.classifier.weight)


def test_loading_leaves_the_random_state(timm_dir: Path, hf_dir: Path) -> None:
    state = torch.get_rng_state()
    for source in ("nano", f"timm:{timm_dir}", f"hf:{hf_dir}"):
        load_model(source)
        load_model(source, num_classes=3, pretrained=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_backbone_gets_a_head_or_none(tmp_path: Path, images) -> None:
    tiny_hf("Dinov2", labels=None).save_pretrained(tmp_path / "backbone")
    bare = load_model(f"hf:{tmp_path / 'backbone'}")
    assert family_of(bare).head(bare) is None
    assert family_of(bare).logits(bare, images) is None
    headed = load_model(f"hf:{tmp_path / 'backbone'}", num_classes=4)
    assert outputs_of(headed, images).shape == (6, 4)
    save_timm(tiny_timm(num_classes=0), tmp_path / "timm_backbone")
    bare = load_model(f"timm:{tmp_path / 'timm_backbone'}")
    assert family_of(bare).logits(bare, images) is None
    assert outputs_of(load_model(f"timm:{tmp_path / 'timm_backbone'}", num_classes=4), images).shape == (6, 4)


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_half_checkpoints_become_float32_unless_a_dtype_is_named(library: str, tmp_path: Path) -> None:
    if library == "timm":
        save_timm(tiny_timm().half(), tmp_path / "half")
    else:
        tiny_hf().half().save_pretrained(tmp_path / "half")
    source = f"{library}:{tmp_path / 'half'}"

    def dtypes(**kwargs) -> set[torch.dtype]:
        return {p.dtype for p in load_model(source, **kwargs).parameters()}

    assert dtypes() == dtypes(num_classes=3) == {torch.float32}
    assert dtypes(dtype=torch.bfloat16, num_classes=3) == {torch.bfloat16}
    assert dtypes(dtype=torch.float16) == {torch.float16}


def test_prefixes_of_compiled_and_parallel_models(tmp_path: Path, timm_dir: Path, images) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(timm_dir / "model.safetensors")
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."):
        save_file(
            {prefix + k: v for k, v in weights.items()}, timm_dir / "model.safetensors", metadata={"format": "pt"}
        )
        model = load_model(f"timm:{timm_dir}")
        assert torch.equal(outputs_of(model, images), outputs_of(tiny_timm(), images)), prefix


# load_model from a filled cache.


def test_a_filled_cache_needs_no_network(tmp_path: Path) -> None:
    """hf/ID, and timm/NAME whose weights lie under the repository that timm names."""
    import timm

    cache = tmp_path / "hub"
    hf = tiny_hf()
    hf.save_pretrained(tmp_path / "hf")
    fill_cache(cache, "some-org/tiny-vit", tmp_path / "hf")
    small = timm.create_model("test_vit")
    save_timm(small, tmp_path / "timm")
    fill_cache(cache, "timm/test_vit.r160_in1k", tmp_path / "timm")
    code = (
        "import torch, retrofit\n"
        "hf, named = retrofit.load_model('hf/some-org/tiny-vit'), retrofit.load_model('timm/test_vit.r160_in1k')\n"
        "print(float(hf.classifier.weight.sum()), float(named.head.weight.sum()))\n"
        "for wrong in ('hf/some-org/tny-vit', 'timm/vit_tiny_patch16_224'):\n"
        "    try: retrofit.load_model(wrong)\n"
        "    except retrofit.RetrofitError as error: print(str(error))"
    )
    out = fresh_process(code, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache)).splitlines()
    sums = [float(layer.weight.detach().sum()) for layer in (hf.classifier, small.head)]
    assert [float(x) for x in out[0].split()] == pytest.approx(sums, abs=1e-5)
    assert "did you mean hf/some-org/tiny-vit" in out[1]
    assert "HF_HUB_OFFLINE=1" in out[2]
    assert "timm:DIR or hf:DIR" in out[2]
    assert len(out) == 3


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("source", ["hf/google/vit-base-patch16-224", "timm/vit_tiny_patch16_224.augreg_in21k"])
def test_no_network_is_one_clear_line_at_once(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model(source)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert message.count(source) == 1
    assert "\n" not in message
    assert "cannot be reached" in message
    assert "timm:DIR or hf:DIR" in message
    assert "HF_HUB_OFFLINE=1" in message


def test_unknown_timm_names_and_tags() -> None:
    with pytest.raises(ModelError, match=r"timm has no model vit_tny_patch16_224; did you mean vit_tiny_patch16_224"):
        load_model("timm/vit_tny_patch16_224")
    with pytest.raises(ModelError, match=r"no weights vit_tiny_patch16_224.nope.*augreg_in21k, augreg_in21k_ft_in1k"):
        load_model("timm/vit_tiny_patch16_224.nope")
    with pytest.raises(ModelError, match="xp_224"):
        load_model("timm/vit_base_patch16_xp_224")  # registered without weights: never random ones instead


# load_model on what it cannot take.


def test_a_wrong_source_says_what_is_right(tmp_path: Path, timm_dir: Path, hf_dir: Path) -> None:
    def message(source: str) -> str:
        with pytest.raises(ModelError) as caught:
            load_model(source)
        assert source in str(caught.value)
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert "hf:DIR" in message(f"timm:{hf_dir}")
    assert f"timm:{timm_dir}" in message(f"hf:{timm_dir}")
    assert f"timm:{timm_dir}" in message(str(timm_dir))
    assert f"hf:{hf_dir}" in message(str(hf_dir))
    assert "config.json" in message(f"timm:{tmp_path / 'empty'}")
    assert "config.json" in message(f"hf:{tmp_path / 'empty'}")
    assert "no folder" in message(f"timm:{tmp_path / 'missing'}")
    assert "hf:DIR" in message(f"hf:{tmp_path / 'missing'}") or "config.json" in message(f"hf:{tmp_path / 'missing'}")
    assert "no such file or folder" in message(str(tmp_path / "missing"))
    for source in ("vit_tiny_patch16_224", "timm:", "torchvision/vit_b_16"):
        assert "`timm/NAME`" in message(source)


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_folders_without_weights_or_with_damaged_ones(library: str, timm_dir: Path, hf_dir: Path) -> None:
    folder = {"timm": timm_dir, "hf": hf_dir}[library]
    (folder / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="damaged") as caught:
        load_model(f"{library}:{folder}")
    assert str(caught.value).count(str(folder)) == 1
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=str(folder)):
        load_model(f"{library}:{folder}")


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_lacking_weights_are_never_random(library: str, timm_dir: Path, hf_dir: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = {"timm": timm_dir, "hf": hf_dir}[library]
    weights = load_file(folder / "model.safetensors")
    gone = next(name for name in weights if "fc1.weight" in name or "intermediate.dense.weight" in name)
    save_file({k: v for k, v in weights.items() if k != gone}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"fc1\.weight"):
        load_model(f"{library}:{folder}")


class Payload:
    """Unpickles by running a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("library", ["timm", "hf"])
@pytest.mark.parametrize("written", ["torch", "pickle"])
def test_a_pickle_runs_nothing(library: str, written: str, tmp_path: Path, timm_dir: Path, hf_dir: Path) -> None:
    folder = {"timm": timm_dir, "hf": hf_dir}[library]
    (folder / "model.safetensors").unlink()
    payload, evidence = {"head.weight": Payload(f"touch {tmp_path / 'ran'}")}, tmp_path / "ran"
    if written == "torch":
        torch.save(payload, folder / "pytorch_model.bin")
        torch.load(folder / "pytorch_model.bin", weights_only=False)
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(payload))
        pickle.loads(pickle.dumps(payload))
    assert evidence.exists()  # the payload works
    evidence.unlink()
    with pytest.raises(ModelError):
        load_model(f"{library}:{folder}")
    assert not evidence.exists()


def test_a_modeling_file_runs_nothing(tmp_path: Path, hf_dir: Path) -> None:
    config = json.loads((hf_dir / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModel": "mine.MyModel"}}
    (hf_dir / "config.json").write_text(json.dumps(config))
    (hf_dir / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="hf:"):
        load_model(f"hf:{hf_dir}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_a_normed_checkpoint_in_a_stock_layout_is_refused(library: str, tmp_path: Path) -> None:
    from retrofit.surgery import insert_qk_norm

    model = {"timm": tiny_timm, "hf": tiny_hf}[library]()
    insert_qk_norm(model, QKNorm(), init="ones")
    if library == "timm":
        save_timm(model, tmp_path / "normed")
    else:
        model.save_pretrained(tmp_path / "normed")
    with pytest.raises(ModelError, match=r"[qk]_norm"):
        load_model(f"{library}:{tmp_path / 'normed'}")


# Running them.


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_another_image_size(library: str, timm_dir: Path, hf_dir: Path) -> None:
    source = {"timm": f"timm:{timm_dir}", "hf": f"hf:{hf_dir}"}[library]
    model = load_model(source, image_size=48)
    family = family_of(model)
    assert family.preprocess(model).image_size == 48
    assert family.token_count(model) == 37
    with torch.no_grad():
        assert family.logits(model, torch.zeros(2, 3, 48, 48)).shape == (2, 5)
        assert family.tokens(model, torch.zeros(2, 3, 48, 48)).shape == (2, 37, 32)
        family.forward(model, torch.zeros(2, 3, 48, 48))


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("timm", 1), ("rope", 1), ("relpos", 0), ("ViT", 1), ("DeiT", 2), ("Dinov2", 1), ("Dinov2WithRegisters", 5)],
)
def test_tokens_and_their_prefix(kind: str, prefix: int, images) -> None:
    model = MAKERS[kind]()
    family = family_of(model)
    with torch.no_grad():
        tokens, logits = family.tokens(model, images), family.logits(model, images)
        assert torch.equal(logits, outputs_of(model, images))
        assert family.prefix_tokens(model) == prefix
        assert tokens.shape == (6, 16 + prefix, 32)
        assert family.token_count(model) == 16 + prefix
        # Patch tokens depend on where an image differs; prefix tokens stand first: compare with the model's own head.
        if kind == "ViT":
            torch.testing.assert_close(model.classifier(tokens[:, 0]), logits)
        if kind in ("timm", "Dinov2"):
            pooled = tokens[:, 0] if kind == "timm" else torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)
            torch.testing.assert_close((model.head if kind == "timm" else model.classifier)(pooled), logits)


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_preprocessing_is_the_checkpoints(library: str, timm_dir: Path, hf_dir: Path) -> None:
    if library == "timm":
        config = json.loads((timm_dir / "config.json").read_text())
        config["pretrained_cfg"] |= {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.5}
        config["pretrained_cfg"] |= {"interpolation": "bilinear", "input_size": [3, 32, 32]}
        (timm_dir / "config.json").write_text(json.dumps(config))
    else:
        config = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2, "do_center_crop": True}
        config |= {"size": {"shortest_edge": 64}, "crop_size": {"height": 32, "width": 32}}
        (hf_dir / "preprocessor_config.json").write_text(json.dumps(config))
    model = load_model({"timm": f"timm:{timm_dir}", "hf": f"hf:{hf_dir}"}[library])
    found = family_of(model).preprocess(model)
    assert (found.image_size, found.mean, found.std) == (32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (found.interpolation, found.crop_pct) == ("bilinear", 0.5)


def test_evaluating_puts_every_mode_back() -> None:
    model = tiny_timm().train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]

    def broken() -> None:
        with evaluating(model):
            assert not any(m.training for m in model.modules())
            assert not torch.is_grad_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert [m.training for m in model.modules()] == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["timm", "ViT"])
def test_unfused_attention_computes_the_same(kind: str, images) -> None:
    model = MAKERS[kind]()
    before = outputs_of(model, images)
    family_of(model).unfuse(model)
    if kind == "timm":
        assert not any(getattr(m, "fused_attn", False) for m in model.modules())
    else:
        assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(outputs_of(model, images), before, rtol=1e-5, atol=1e-5)


def test_rope_models_report_their_rotation() -> None:
    assert all(site.rotated for site in sites_of(tiny_rope())[0])
