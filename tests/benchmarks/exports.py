"""What every loader makes of every export: python tests/benchmarks/exports.py [WORD ...] [--to timm hf onnx]

Small models with random weights of at least 12 architectures, four formulas, three targets. For each: the largest
difference of an output, relative to the largest where that exceeds 1, after a reload in a fresh process that cannot
import this package (one process a loader over all folders); what leaving the norm out would change; and whether stock
loaders compute the same or refuse. There is no third thing: the exit status is 1 if there is.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from animal import awake
from safetensors.torch import load_file
from zoo import CLASSIFIERS

from retrofit import QKNorm, insert_qk_norm, load, remove_qk_norm
from retrofit.export.folder import write_export
from retrofit.export.proof import FEATURES, FIXTURE, TOLERANCES, reloaded
from retrofit.models import family_of
from retrofit.runfiles import read_json

PRESETS = ("qwen3", "vit22b", "henry2020", "olmo2")
TARGETS = ("timm", "hf", "onnx")
FELT = 1e-2
"""The least that leaving the norm out must change, a thousand times what is allowed to differ."""
LABELS = ["ant", "bee", "cat", "dog", "eel"]
LOADERS = ("timm", "timm_file", "transformers", "transformers_class", "transformers_trusting", FEATURES, "onnxruntime")


def retrofitted(build: Callable[[], Any], preset: str) -> Any:
    """A model whose attention is sharp and whose norms differ from their start, so that leaving one out is felt."""
    model = awake(build())
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim in (2, 4) and p.std() > 0:  # random weights are made small, and attention uniform by that
                p.mul_(1.5 / (p.std() * p[0].numel() ** 0.5))
    family, images = family_of(model), torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    insert_qk_norm(model, QKNorm.preset(preset), images, init="match")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_norm." in name or "k_norm." in name:
                p.add_(0.3 * torch.rand(p.shape, generator=generator) * p.abs().mean().clamp_min(0.1))
    if family.head(model) is not None:
        family.set_labels(model, LABELS[: getattr(model, "num_labels", len(LABELS))])
    return model


def table(folders: list[Path], processes: Sequence[Sequence[str]] = tuple((x,) for x in LOADERS)) -> list[Any]:
    """A row a folder: what each loader makes of it, `None` where it refuses. processes: the loaders of each."""
    rows = {folder: {"folder": folder.name, **_facts(folder)} for folder in folders}
    code = {path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.py")}
    for one in (one for loaders in processes for one in reloaded(folders, loaders, code)):
        row = rows[Path(one["folder"])]
        row[one["loader"]] = one.get("difference")
        named = "refused" in one or not row["labels"] or one["loader"] == FEATURES or one["labels"] == row["labels"]
        row["right"] &= named and one.get("norms", row["norms"]) == row["norms"]
    for folder, row in rows.items():
        row["retrofit"] = _ours(folder) if row["loader"] == "retrofit" else None
    return list(rows.values())


def sound(row: dict[str, Any]) -> bool:
    """Whether the loaders that the folder is for compute the same, and every other computes the same or refuses."""
    told = [row[loader] for loader in (*LOADERS, "retrofit") if row[loader] is not None]
    home = {"timm": "timm", "transformers": "transformers_trusting", "onnxruntime": "onnxruntime"}
    whole = row["loader"] != "transformers" or row[FEATURES] is not None
    return (
        whole
        and row["right"]
        and row[home.get(row["loader"], "retrofit")] is not None
        and max(told) <= TOLERANCES["float32"]
    )


def _facts(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / "retrofit.json")
    sites = len(manifest["sites"])
    facts = {
        "felt": manifest["about"]["felt"],
        "loader": manifest["loader"],
        "labels": manifest["labels"],
        "norms": sites,
    }
    return {**facts, "right": True}


def _ours(folder: Path) -> float:
    fixture = load_file(folder / FIXTURE)
    out = _outputs(load(folder), fixture["images"])
    return float((out - fixture["outputs"]).abs().max() / fixture["outputs"].abs().max().clamp_min(1))


def _outputs(model: Any, images: torch.Tensor) -> torch.Tensor:
    family = family_of(model)
    with torch.no_grad():
        out = family.logits(model, images)
        out = family.features(model, images) if out is None else out
    assert out is not None
    return out


def write(root: Path, words: list[str], targets: Sequence[Any], presets: Sequence[str]) -> list[Path]:
    """Exports every architecture whose name holds one of `words`, in every preset to every target."""
    folders = []
    for name in CLASSIFIERS:
        for preset in presets if not words or any(w in name for w in words) else ():
            for to in targets:
                folders.append(write_one(root, name, preset, to))
                print(folders[-1].name, file=sys.stderr)
    return folders


def write_one(root: Path, name: str, preset: str, to: Any) -> Path:
    folder = root / f"{name}-{preset}-{to}"
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    model = retrofitted(CLASSIFIERS[name], preset)
    write_export(model, folder, about={"base": name, "felt": felt(model, images)}, images=images, to=to)
    return folder


def felt(model: Any, images: torch.Tensor) -> float:
    """What leaving the norm out would change, measured as the differences are. A table where that is little proves
    nothing."""
    with_norm = _outputs(model, images)
    bare = copy.deepcopy(model)
    remove_qk_norm(bare)
    return float((_outputs(bare, images) - with_norm).abs().max() / with_norm.abs().max().clamp_min(1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of architectures; all where there is none")
    parser.add_argument("--to", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folders = write(Path(root).resolve(), args.words, args.to, args.presets)
        rows = table(folders)
    print("| architecture-preset-target | for | without the norm | " + " | ".join((*LOADERS, "retrofit.load")) + " |")
    print("|---|---|---|" + "---|" * (len(LOADERS) + 1))
    for row in rows:
        said = (row[loader] for loader in (*LOADERS, "retrofit"))
        cells = ["refuses" if value is None else f"{value:.1e}" for value in said]
        print(
            f"| {row['folder']}{'' if sound(row) else ' WRONG'} | {row['loader']} | {row['felt']:.1e} | "
            + " | ".join(cells)
            + " |"
        )
    wrong = [row["folder"] for row in rows if not sound(row)]
    print(f"\n{len(rows)} folders; a third thing or a difference above 1e-5: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
