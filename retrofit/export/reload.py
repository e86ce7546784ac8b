"""Loads exported folders as their users do, in a process of its own in which this package cannot be imported.

Run as a script, with one argument: a JSON mapping of `folders`, `loaders`, `code`, the sha256 of every modeling file
that may run, and `out`, a folder for what is found.
Writes there tried.json: for every folder and loader a mapping with `outputs` (a file), `labels` and `norms`, or with
`refused`, the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

sys.modules["retrofit"] = None  # type: ignore[assignment]  # what is proven here is that it is not needed

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

Loaded = tuple[torch.Tensor, list[str], int]
"""What a model says of the images, its class names, and how many of its attention modules have a norm."""


def timm(folder: Path, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return _said(model, facts, images, model.pretrained_cfg.get("label_names"))


def timm_file(folder: Path, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    """timm's own architecture, with the folder's weights as a checkpoint."""
    import timm

    told = facts["model"]
    (weights,) = folder.glob("[!f]*.safetensors")
    model = timm.create_model(
        told["architecture"], num_classes=told["num_classes"], checkpoint_path=str(weights), **told["model_args"]
    )
    return _said(model, facts, images, None)


def transformers(folder: Path, facts: dict[str, Any], images: torch.Tensor, **trust: bool) -> Loaded:
    from transformers import AutoModel, AutoModelForImageClassification

    auto = AutoModelForImageClassification if facts["classifies"] else AutoModel
    return _said_by_transformers(auto.from_pretrained(folder, **trust), facts, images)


def transformers_trusting(folder: Path, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    return transformers(folder, facts, images, trust_remote_code=True)


def transformers_features(folder: Path, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    """The model without its head."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    return _said_by_transformers(model, {**facts, "classifies": False}, images)


def transformers_class(folder: Path, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    """The library's own class, by name."""
    import transformers

    wrapper = "TimmWrapperForImageClassification" if facts["classifies"] else "TimmWrapperModel"
    cls = getattr(transformers, facts["model"].get("class", wrapper))
    return _said_by_transformers(cls.from_pretrained(folder), facts, images)


def onnxruntime(folder: Path, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    import onnx
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    dtype = {"tensor(float16)": torch.float16}.get(given.type, torch.float32)
    whole, ones = (
        [torch.from_numpy(session.run(None, {given.name: part.to(dtype).numpy()})[0]) for part in images.split(size)]
        for size in (len(images), 1)  # the batch is dynamic
    )
    torch.testing.assert_close(torch.cat(ones), whole[0], rtol=1e-3, atol=1e-4)
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    scopes = {p.value for node in nodes for p in node.metadata_props if p.key.endswith("name_scopes")}
    normed = {part for scope in scopes for part in scope.split("'") if part.endswith("q_norm")}
    labels = session.get_modelmeta().custom_metadata_map.get("labels", "[]")
    return whole[0].float(), json.loads(labels), len(normed)


def _said_by_transformers(model: Any, facts: dict[str, Any], images: torch.Tensor) -> Loaded:
    names = getattr(model.config, "id2label", None) or {}
    labels = [names[key] for key in sorted(names, key=int)]
    return _said(model, facts, images, labels if facts["classifies"] else None)


def _said(model: Any, facts: dict[str, Any], images: torch.Tensor, labels: Any) -> Loaded:
    dtype = getattr(torch, facts["dtype"])
    model = model.to(dtype).eval()
    images = images.to(dtype)
    with torch.no_grad():
        if hasattr(model, "forward_features"):
            out = model(images) if facts["classifies"] else model.forward_features(images)
        else:
            out = model(pixel_values=images, **facts["call"])
            out = out.logits if facts["classifies"] else out.last_hidden_state
    slots = [m for name, m in model.named_modules() if name.endswith("q_norm")]
    return out.float(), list(labels or []), sum(not isinstance(m, torch.nn.Identity) for m in slots)


def _try(loader: str, folder: Path, out: Path) -> dict[str, Any]:
    facts = json.loads((folder / "retrofit.json").read_text(encoding="utf-8"))
    images = load_file(folder / "fixture.safetensors")["images"]
    try:
        outputs, labels, norms = globals()[loader](folder, facts, images)
    except Exception as error:  # whatever a loader raises is a refusal
        reason = " ".join(str(error).split())[:200]
        return {"loader": loader, "folder": str(folder), "refused": f"{type(error).__name__}: {reason}"}
    save_file({"outputs": outputs.contiguous()}, out)
    return {"loader": loader, "folder": str(folder), "outputs": str(out), "labels": labels, "norms": norms}


def _run_only(known: Collection[str], folder: Path) -> None:
    """Ends the process before code runs that lies in `folder`, where transformers copies what a model brings along.

    Which of the many ways to code a configuration takes does not matter here.
    """

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event != "exec" or not isinstance(args[0], CodeType):
            return
        path = Path(args[0].co_filename)
        if path.is_relative_to(folder) and (text := path.read_bytes()) and sha256(text).hexdigest() not in known:
            sys.exit(f"{path.name} is not code that retrofit writes, and is not run")

    sys.addaudithook(watch)


def main(job: dict[str, Any]) -> None:
    _run_only(job["code"], Path(job["out"]))
    pairs = [(loader, Path(folder)) for folder in job["folders"] for loader in job["loaders"]]
    tried = [_try(*pair, Path(job["out"]) / f"{i}.safetensors") for i, pair in enumerate(pairs)]
    Path(job["out"], "tried.json").write_text(json.dumps(tried), encoding="utf-8")  # libraries print to stdout


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
