"""Base checkpoints as they are found: kinds of file, names of timm and of transformers 4 and 5, prefixes, halves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import outputs_of, tiny_hf
from safetensors.torch import load_file, save_file
from tiny_study import write_hf, write_timm

from retrofit.checkpoint import load_model
from retrofit.errors import ModelError
from retrofit.models.weights import read_weights, without_prefixes

State = dict[str, torch.Tensor]


def sharded(folder: Path, state: State, kind: str) -> None:
    """Two shards and their index, as transformers writes them."""
    names, stem = list(state), "model" if kind == "safetensors" else "pytorch_model"
    parts = {f"{stem}-{i + 1:05}-of-00002.{kind}": names[i::2] for i in range(2)}
    for file, part in parts.items():
        tensors = {name: state[name].clone() for name in part}
        if kind == "safetensors":
            save_file(tensors, folder / file, {"format": "pt"})
        else:
            torch.save(tensors, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))


KINDS: dict[str, Callable[[Path, State], Any]] = {
    "safetensors": lambda folder, state: save_file(state, folder / "model.safetensors"),
    "bin": lambda folder, state: torch.save(state, folder / "pytorch_model.bin"),
    "pth": lambda folder, state: torch.save(state, folder / "checkpoint.pth"),
    "wrapped pth": lambda folder, state: torch.save({"epoch": 3, "state_dict": state}, folder / "last.pth.tar"),
    "ema": lambda folder, state: torch.save(
        {"state_dict": {k: v * 0 for k, v in state.items()}, "state_dict_ema": state}, folder / "best.pth"
    ),
    "shards": lambda folder, state: sharded(folder, state, "safetensors"),
    "shards of bin": lambda folder, state: sharded(folder, state, "bin"),
}


@pytest.fixture(scope="module", params=["timm", "hf"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    write = {"timm": write_timm, "hf": write_hf}[request.param]
    return request.param, write(tmp_path_factory.mktemp(request.param) / "base")


def rewritten(base: Path, folder: Path, kind: str, change: Callable[[State], State] = dict) -> Path:
    """The checkpoint again, its weights in a file of another kind."""
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    KINDS[kind](folder, change(load_file(base / "model.safetensors")))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_model(base: tuple[str, Path], kind: str, tmp_path: Path) -> None:
    library, folder = base
    model = load_model(f"{library}:{folder}")
    other = load_model(f"{library}:{rewritten(folder, tmp_path / 'other', kind)}")
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prefixes_go_and_halves_become_float32(
    base: tuple[str, Path], prefix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    library, folder = base

    def change(state: State) -> State:
        return {prefix + name: value.to(dtype) for name, value in state.items()}

    other = load_model(f"{library}:{rewritten(folder, tmp_path / 'other', 'pth', change)}")
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    model = load_model(f"{library}:{folder}")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.to(dtype).float()), name


def test_names_of_transformers_4_and_5_are_the_same_model(tmp_path: Path) -> None:
    model = tiny_hf()
    model.save_pretrained(tmp_path / "4", save_original_format=True)
    model.save_pretrained(tmp_path / "5", save_original_format=False)
    names = [set(load_file(tmp_path / version / "model.safetensors")) for version in ("4", "5")]
    assert "vit.encoder.layer.0.attention.attention.query.weight" in names[0]
    assert "vit.layers.0.attention.q_proj.weight" in names[1]
    images = torch.randn(2, 3, 32, 32)
    for version in ("4", "5"):
        assert torch.equal(outputs_of(load_model(f"hf:{tmp_path / version}"), images), outputs_of(model, images))


def test_a_prefix_is_taken_off_only_where_every_name_has_it() -> None:
    tensor = torch.zeros(1)

    def named(*names: str) -> list[str]:
        return list(without_prefixes(dict.fromkeys(names, tensor)))

    assert named("module.a", "module.module.b") == ["a", "module.b"]
    assert named("module.a", "b") == ["module.a", "b"]
    assert named("blocks.module.a", "blocks._orig_mod.b") == ["blocks.module.a", "blocks._orig_mod.b"]
    assert named("_orig_mod.module._orig_mod.a.module.b") == ["a.module.b"]
    assert named() == []


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "last.pt"])
def test_a_pickle_that_runs_code_runs_none(base: tuple[str, Path], name: str, tmp_path: Path) -> None:
    library, folder = base
    mark, bad = tmp_path / "ran", tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((folder / "config.json").read_text())
    torch.save({"head.weight": torch.zeros(1), "x": Evil(mark)}, bad / name)
    with pytest.raises(ModelError, match="holds more than plain tensors"):
        load_model(f"{library}:{bad}")
    assert not mark.exists()


@pytest.mark.parametrize("model_type", ["vit", "own_vit"])
def test_a_folder_with_a_modeling_file_runs_none_of_it(model_type: str, tmp_path: Path) -> None:
    folder, mark = write_hf(tmp_path / "hf"), tmp_path / "ran"
    code = (
        f"import os\nos.mkdir({str(mark)!r})\nfrom transformers import ViTConfig as C, ViTForImageClassification as M\n"
    )
    (folder / "modeling_own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "modeling_own.C", "AutoModel": "modeling_own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    if model_type == "vit":  # transformers' own class, then
        load_model(f"hf:{folder}")
    else:
        with pytest.raises(ModelError, match="custom code"):
            load_model(f"hf:{folder}")
    assert not mark.exists()


def test_what_is_missing_or_doubtful_is_said(base: tuple[str, Path], tmp_path: Path) -> None:
    library, folder = base
    place = rewritten(folder, tmp_path / "place", "shards")
    (place / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not whole: model-00002-of-00002.safetensors, which .* names, is missing"):
        load_model(f"{library}:{place}")
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(ModelError, match="not whole"):
        read_weights(place)
    (place / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="no index of weights"):
        read_weights(place)
    for path in place.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load_model(f"{library}:{place}")
    for name in ("a.pth", "b.pth"):
        torch.save({"x": torch.zeros(1)}, place / name)
    with pytest.raises(ModelError, match=r"several .pth files \(a.pth, b.pth\)"):
        read_weights(place)
    (place / "b.pth").unlink()
    torch.save([1, 2], place / "a.pth")
    with pytest.raises(ModelError, match="holds no state dict"):
        read_weights(place)
