"""Models from and to disk: pretrained checkpoints of both libraries, and retrofitted ones in a folder of our own.

A folder written here holds retrofit.safetensors and retrofit.json, names that no other library looks for, so that none
can take it for a model without QK-Norm. Nothing that is loaded runs code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import retrofit
from retrofit.errors import CheckpointError, ModelError, RetrofitError
from retrofit.models import family_named, family_of, sites_of, unwrapped
from retrofit.models.family import Request
from retrofit.models.preprocess import Preprocess
from retrofit.qknorm import QKNorm
from retrofit.runfiles import plain, publishing, read_json, write_json
from retrofit.surgery import insert_blank, spec_of

MANIFEST = "retrofit.json"
WEIGHTS = "retrofit.safetensors"
FORMAT = 1
_SOURCES = "a model is `nano`, `timm/NAME`, `hf/ID`, `timm:DIR`, `hf:DIR`, or DIR, a folder that retrofit wrote"


def load_model(
    source: str,
    num_classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    image_size: int | None = None,
    seed: int = 0,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = True,
) -> nn.Module:
    """A pretrained model as its own library makes it, in evaluation mode.

    Args:
        source: `nano` | `timm/NAME` | `hf/ID` | `timm:DIR` | `hf:DIR` | `DIR` (a folder that retrofit wrote).
        num_classes: replaces the classification head by one of this size; None keeps the checkpoint's.
        dtype: of the weights. float32 unless named, whatever the checkpoint is stored in.
        image_size: side of the input in pixels; the library resamples position embeddings. None: the checkpoint's.
        seed: the new head's weights follow from it alone (and all weights, where not `pretrained`).
        model_args: passed to timm.create_model, or set on the configuration of a transformers model.

    Raises ModelError, with what would work. The global random state stays as it is.
    """
    for name, value in (("num_classes", num_classes), ("image_size", image_size)):
        if value is not None and not (type(value) is int and value > 0):
            raise ModelError(f"{name}={value!r} must be a whole number from 1 on, or None")
    if not isinstance(source, str) or not isinstance(dtype, torch.dtype):
        raise ModelError(f"{_SOURCES}; dtype is one of torch's, such as torch.float32")
    kind, _, name = source.partition("/") if source.startswith(("timm/", "hf/")) else source.partition(":")
    if source == "nano":
        library, name, local = "timm", str(files("retrofit.assets") / "nano"), True
    elif kind in ("timm", "hf") and name:
        library, local = {"timm": "timm", "hf": "transformers"}[kind], not source.startswith(f"{kind}/")
    elif (Path(source) / MANIFEST).is_file():
        if model_args or not pretrained or image_size is not None:
            raise ModelError(f"{source} is a folder that retrofit wrote; its structure and image size are fixed")
        model = load(source)
        library = family_of(model).library
        return _finished(model, num_classes, dtype, seed)
    else:
        raise ModelError(f"{source} is no model{_hint(Path(source))}; {_SOURCES}")
    request = Request(
        source=source,
        name=name,
        local=local,
        classifier=num_classes is not None,
        image_size=image_size,
        model_args=model_args or {},
        pretrained=pretrained,
        seed=seed,
    )
    return _finished(family_named(library).load(request), num_classes, dtype, seed)


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    about: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    owned: Collection[str] = (),
    force: bool = False,
) -> None:
    """Writes a model, retrofitted or not, so that `load` gives the same one back in another process.

    Args:
        about: anything that JSON can hold about where the model comes from.
        weights: the state dict, where the model's own is sharded over processes.
        owned: names of further files in the folder that may be replaced.

    Raises RetrofitError for a folder that holds files of somebody else, unless `force`.
    """
    with saving(Path(folder), owned=owned, force=force) as scratch:
        write_model(model, scratch, about=about, weights=weights)


def saving(folder: Path, owned: Collection[str] = (), force: bool = False) -> AbstractContextManager[Path]:
    """A scratch folder that becomes `folder` when the block ends well. What an earlier save wrote there is replaced."""
    earlier = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    ours = {str(name) for name in earlier.get("files", {})} if isinstance(earlier, dict) else set()
    return publishing(folder, MANIFEST, owned={*ours, *owned}, force=force)


def write_model(
    model: nn.Module,
    folder: Path,
    *,
    about: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    **more: Any,
) -> None:
    """retrofit.safetensors and retrofit.json, which tells `more` too."""
    tensors = plain_tensors(weights or unwrapped(model).state_dict())
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    prints = {name: fingerprint({name: tensor}) for name, tensor in tensors.items()}
    write_manifest(model, folder, about=about, tensors=prints, **more)


def plain_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as safetensors takes it: on the CPU, contiguous, none sharing memory with another."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def write_manifest(model: nn.Module, folder: Path, *, about: Mapping[str, Any] | None, **more: Any) -> None:
    """retrofit.json, which says what the model is and lists every file that lies in `folder` by its hash.

    Args:
        more: what else it shall tell.
    """
    model = unwrapped(model)
    family, spec = family_of(model), spec_of(model)
    manifest = {
        "format": FORMAT,
        "loader": "retrofit",
        "library": family.library,
        "model": family.config(model),
        "qk_norm": None if spec is None else asdict(spec),
        "sites": [site.name for site in sites_of(model)[0] if site.norms is not None],
        "preprocess": family.preprocess(model),
        "labels": family.labels(model),
        "versions": versions(),
        "about": about or {},
        **more,
        "files": {p.name: file_hash(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST},
    }
    write_json(folder / MANIFEST, {**manifest, "seal": seal(manifest)})


def seal(manifest: Mapping[str, Any]) -> str:
    """sha256 of all that a manifest says, by which a changed one is known."""
    said = {key: value for key, value in plain(manifest).items() if key != "seal"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def load(folder: str | Path) -> nn.Module:
    """The model that `save` wrote, with its norms, in evaluation mode and the dtype it was saved in.

    Raises CheckpointError for a folder that is not whole, or whose files are not those that were written.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest["seal"] != seal(manifest):
        raise CheckpointError(f"{folder / MANIFEST} has been changed since it was written")
    if manifest["loader"] != "retrofit":
        raise CheckpointError(f"{folder} is an export for {manifest['loader']}; its README.md says how to load it")
    for name in manifest["files"]:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not whole: {name} is missing")
    tensors = _weights(folder, manifest["tensors"])
    try:
        family, model = family_named(manifest["library"]), blank(manifest)
        placed = [site.name for site in sites_of(model)[0] if site.norms is not None]
        if placed != manifest["sites"]:
            raise CheckpointError(f"{folder}: the norms belong at other places than this version puts them")
        model.load_state_dict(tensors, strict=True, assign=True)
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:  # also of what a state dict leaves out, such as RoPE's frequencies
            model.to(*dtypes)
        family.set_labels(model, manifest["labels"])
        family.set_preprocess(model, Preprocess(**manifest["preprocess"]))
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        written, here = manifest.get("versions"), versions()
        raise CheckpointError(
            f"{folder} does not fit together: {reason} (written with {written}, here {here})"
        ) from error
    _warn_of_versions(folder, manifest)
    result: nn.Module = model.eval()
    return result


def blank(manifest: Mapping[str, Any]) -> Any:
    """The model that a manifest describes, norms included, with weights to be loaded.

    Raises RetrofitError, or ValueError where the library cannot build it.
    """
    family = family_named(manifest["library"])
    try:
        model = family.build(manifest["model"])
    except RetrofitError:
        raise
    except Exception as error:  # whatever a library's constructor raises at arguments that it does not take
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{manifest['library']} cannot build its model, {reason}") from error
    if manifest["qk_norm"] is not None:
        insert_blank(model, QKNorm(**manifest["qk_norm"]))
    return model


def _weights(folder: Path, written: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of retrofit.safetensors. Raises CheckpointError with the names of those that were not written."""
    changed = f"{folder / WEIGHTS} is not the file that was written"
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{changed}, and cannot be read: {error}") from error
    found = {name: fingerprint({name: tensor}) for name, tensor in tensors.items()}
    wrong: dict[str, list[str]] = {}
    for name in sorted({*found, *written}):
        if found.get(name) != written.get(name):
            part = "norms" if name.split(".")[-2:-1] in (["q_norm"], ["k_norm"]) else "base"
            what = "missing" if name not in found else "added" if name not in written else "other values"
            wrong.setdefault(part, []).append(f"{name} ({what})")
    if wrong:
        told = (
            f"{len(names)} of the {part}: {', '.join(names[:3])}{', …' if names[3:] else ''}"
            for part, names in wrong.items()
        )
        raise CheckpointError(f"{changed}: tensors differ, {'; '.join(told)}")
    return tensors


def _warn_of_versions(folder: Path, manifest: Mapping[str, Any]) -> None:
    """A folder that another version of its library wrote may compute something else; only a proof can tell."""
    library = "transformers" if manifest["library"] == "timm_wrapper" else manifest["library"]
    here, there = versions(), manifest.get("versions")
    then = there.get(library) if isinstance(there, dict) else None
    if then is not None and then != here[library]:
        warnings.warn(
            f"{folder} was written with {library} {then}, and this is {here[library]}: "
            f"`retrofit verify {folder}` tells whether it computes the same",
            stacklevel=3,
        )


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """sha256 over the names, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """retrofit.json, checked for what every reader needs. Raises CheckpointError."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}{_hint(folder)}; name a folder that retrofit wrote")
    try:
        manifest = read_json(folder / MANIFEST)
    except RetrofitError as error:
        raise CheckpointError(str(error)) from None
    needed = {"seal", "format", "loader", "library", "model", "qk_norm", "sites", "preprocess", "labels", "files"}
    whole = isinstance(manifest, dict) and needed <= manifest.keys()
    listed = whole and isinstance(manifest["files"], dict) and isinstance(manifest["labels"], list)
    if not (listed and all(isinstance(label, str) for label in manifest["labels"])):
        raise CheckpointError(f"{folder / MANIFEST} is not what retrofit writes")
    ours = manifest["loader"] == "retrofit"
    if ours and not (WEIGHTS in manifest["files"] and isinstance(manifest.get("tensors"), dict)):
        raise CheckpointError(f"{folder / MANIFEST} does not name {WEIGHTS} and its tensors")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest['format']}; this version reads {FORMAT}")
    return dict(manifest)


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    names = ("torch", "timm", "transformers", "accelerate")
    return {"retrofit": retrofit.__version__, **{name: importlib.metadata.version(name) for name in names}}


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _finished(model: nn.Module, num_classes: int | None, dtype: torch.dtype, seed: int) -> nn.Module:
    if num_classes is not None:
        family_of(model).new_head(model, num_classes, seed)
    return model.to(dtype).eval()


def _hint(path: Path) -> str:
    """What kind of model folder `path` seems to be, in words that follow a message."""
    if not path.is_dir():
        return "" if path.exists() else " (there is no such file or folder)"
    try:
        config = read_json(path / "config.json")
    except RetrofitError:
        return ""
    if isinstance(config, dict) and "architecture" in config:
        return f" (it looks like a timm folder: timm:{path})"
    if isinstance(config, dict) and "model_type" in config:
        return f" (it looks like a transformers folder: hf:{path})"
    return ""
