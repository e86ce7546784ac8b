"""Makes run folders as `retrofit pair` writes them, without training: numbers with a known finding.

The finding: at rates up to the baseline's best one both arms are level; above it the baseline loses accuracy
and its largest logit runs away, while the norm holds its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ARMS = ("baseline", "retrofit")
LRS = (0.001, 0.003, 0.01)
SEEDS = (0, 1, 2)
CLASSES = 10
ACCURACY = {
    ("baseline", 0.001): 0.80,
    ("baseline", 0.003): 0.73,
    ("baseline", 0.01): 0.40,
    ("retrofit", 0.001): 0.80,
    ("retrofit", 0.003): 0.77,
    ("retrofit", 0.01): 0.58,
}
"""Mean test accuracy; pairs share most of their noise."""
LOGIT = {("baseline", 0.001): 28.0, ("baseline", 0.003): 56.0, ("baseline", 0.01): 309.0}
"""Largest logit at the end; it begins at 20. The norm's stays at 8."""
QK_NORM = {"norm": "rms", "axis": "head", "gain": "per_head", "bias": False, "eps": 1e-6, "scale": "fixed"}
Key = tuple[str, float, int]


def make_run(
    folder: Path,
    *,
    arms: Sequence[str] = ARMS,
    lrs: Sequence[float] = LRS,
    seeds: Sequence[int] = SEEDS,
    steps: int = 200,
    images: int = 500,
    layers: int = 6,
    diverged: Collection[Key] = (),
    missing: Collection[Key] = (),
    unfinished: Collection[Key] = (),
    accuracy: Mapping[tuple[str, float], float] = ACCURACY,
    spread: float = 0.01,
    aa: Sequence[float] = (),
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a run folder and returns it.

    `diverged`, `missing` (nothing on disk) and `unfinished` (no result.json) name runs as (arm, lr, seed).
    `spread`: standard deviation of the seeds' accuracies; that of a pair's difference is half of it.
    `aa`: learning rates at which the baseline has a twin. `recipe`: changes to the recipe of run.json.
    """
    plan = [(arm, lr, seed) for seed in seeds for lr in lrs for arm in (*arms, *(["aa"] if lr in aa else []))]
    manifest = _manifest(arms, lrs, seeds, plan, images)
    manifest["recipe"] |= {"aa": list(aa), **(recipe or {})}
    _json(folder / "run.json", manifest)
    for arm in arms:
        if arm != "baseline":
            _json(folder / arm / "insertion.json", _insertion(arm, layers))
    for key in plan:
        if key not in missing:
            mean = accuracy.get(("baseline" if key[0] == "aa" else key[0], key[1]), 0.75)
            _run(
                folder / folder_of(*key),
                key,
                steps,
                images,
                layers,
                mean,
                spread,
                key in diverged,
                key not in unfinished,
            )
    return folder


def folder_of(arm: str, lr: float, seed: int) -> str:
    return f"{arm}/lr{lr:g}-s{seed}"


def _manifest(
    arms: Sequence[str], lrs: Sequence[float], seeds: Sequence[int], plan: Sequence[Key], images: int
) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "created": "2030-01-02T03:04:05+00:00",
        "command": ["retrofit", "pair", "made"],
        "recipe": {
            "model": {"source": "nano", "model_args": {}, "pretrained": True},
            "data": {"source": "nano", "calibration_images": 128, "crop_scale": [0.35, 1.0]},
            "arms": {a: {"qk_norm": None if a == "baseline" else QK_NORM, "init": "match"} for a in arms},
            "train": {
                "steps": 200,
                "batch_size": 64,
                "lr": list(lrs),
                "seeds": list(seeds),
                "precision": ["bf16"],
            },
            "unmatched": [],
            "margin": 0.5,
        },
        "plan": [
            {"arm": a, "lr": lr, "seed": s, "precision": "bf16", "folder": folder_of(a, lr, s)} for a, lr, s in plan
        ],
        "classes": [f"class {k}" for k in range(CLASSES)],
        "data": {
            name: {"images": n, "sha256": f"{i:064x}"}
            for i, (name, n) in enumerate({"train": 4000, "validation": images, "test": images}.items(), start=10)
        },
        "environment": {
            "python": "3.11.7",
            "torch": "2.9.0",
            "timm": "1.0.31",
            "transformers": "5.24.0",
            "accelerate": "1.15.0",
            "retrofit": "0.1.0",
            "platform": "Linux x86_64",
            "device": "cpu",
            "cpu": "a processor",
            "cpu_threads": 2,
        },
    }


def _insertion(arm: str, layers: int) -> dict[str, Any]:
    def shock(patch: float, kl: float, agreement: float) -> dict[str, Any]:
        return {
            "cosine_tokens": {"class": None, "patch": patch},
            "kl": kl,
            "top1_agreement": agreement,
            "images": 64,
        }

    return {
        "arm": arm,
        "formula": "RMSNorm over each head, gain per head, eps 1e-06, before RoPE",
        "qk_norm": QK_NORM,
        "init": "match",
        "sites": layers,
        "skipped": [{"name": "pool.attn", "reason": "attention pooling has one query"}],
        "calibration_images": 128,
        "held_out_images": 64,
        "layers": [
            {
                "site": f"blocks.{i}.attn",
                "gain_q": [1.0, 1.1, 0.9, 1.2],
                "gain_k": [1.0, 1.1, 0.9, 1.2],
                "kl_ones": 0.5 * 0.9**i,
                "kl_match": 0.03 * 0.9**i,
                "kl_match_per_head": None,
                "kl": 0.03 * 0.9**i,
                "shifted": True,
                "shift_share": 0.9 * 0.85**i,
                "key_norm_cv_before": 0.4,
                "key_norm_cv_after": 0.15,
                "logit_absmax_before": 20.0 * 0.85**i,
                "logit_bound": 8.0 + i / 10,
            }
            for i in range(layers)
        ],
        "remarks": [],
        "shock": {"ones": shock(0.41, 0.92, 0.55), "match": shock(0.953, 0.04, 0.94)},
    }


def _run(
    place: Path,
    key: Key,
    steps: int,
    images: int,
    layers: int,
    mean: float,
    spread: float,
    diverged: bool,
    whole: bool,
) -> None:
    arm, lr, seed = key
    shared = np.random.default_rng([seed, round(1e6 * lr)])  # the same for both arms of a pair
    own = np.random.default_rng([seed, round(1e6 * lr), sum(arm.encode())])
    offset = spread * (0.93 * shared.standard_normal() + 0.35 * own.standard_normal())
    target = min(max(mean + offset, 0.0), 1.0)
    end = 0.6 * steps if diverged else steps
    ids = [f"{h:08x}" for h in shared.integers(0, 2**32, steps)]
    rows = [s for s in range(steps) if s <= end]
    noise = 0.06 * shared.standard_normal(steps) + 0.01 * own.standard_normal(steps)
    loss = [math.log(CLASSES) * (1 - target * min(1.0, 2.2 * s / steps)) + noise[s] for s in rows]
    if steps > 150 and arm in ("baseline", "aa") and lr == max(LRS):
        loss[150:151] = [loss[150] + 2.0] if len(loss) > 150 else []
    norms = 1.0 + 0.1 * own.random(len(rows))
    metrics: list[dict[str, Any]] = [
        {"step": s, "epoch": s // 62, "lr": lr, "loss": v, "grad_norm": g, "ids": ids[s]}
        for s, v, g in zip(rows, loss, norms, strict=True)
    ]
    if diverged:
        metrics[-1]["loss"] = None
    _lines(place / "metrics.jsonl", metrics)
    pace = 0.050 if arm == "baseline" else 0.053
    _lines(place / "timings.jsonl", [{"step": s, "seconds": pace * (1 + 0.1 * own.random())} for s in rows])
    probed = [s for s in np.linspace(0, steps, 11).astype(int).tolist() if s <= end]
    _lines(place / "probes.jsonl", [_probe(arm, lr, s, steps, layers) for s in probed])
    if not whole:
        return
    result: dict[str, Any] = {
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "precision": "bf16",
        "status": "diverged" if diverged else "finished",
        "diverged_at": rows[-1] if diverged else None,
        "steps": len(rows),
        "epochs": len(rows) / 62,
        "batch_size": 64,
        "classes": CLASSES,
        "parameters": 1_200_000 + (900 if arm not in ("baseline", "aa") else 0),
        "parameters_added": 900 if arm not in ("baseline", "aa") else 0,
        "validation": None,
        "test": None,
        "train_loss": None if diverged else float(np.mean(loss[-steps // 10 :])),
        "attention": "unfused",
        "device": "cpu",
        "seconds": 12.5,
        "memory_bytes": 90_000_000 if arm == "baseline" else 120_000_000,
        "memory_source": "tensors",
    }
    if not diverged:
        arrays: dict[str, Any] = {}
        for split in ("validation", "test"):
            labels = shared.integers(0, CLASSES, images)
            logits = own.normal(0, 1, (images, CLASSES)).astype(np.float32)
            right = own.permutation(images) < round(target * images)
            logits[np.arange(images), np.where(right, labels, (labels + 1) % CLASSES)] = 6.0
            shown = logits.argmax(axis=1)
            likelihood = logits[np.arange(images), labels] - np.log(np.exp(logits.astype(float)).sum(axis=1))
            result[split] = {
                "accuracy": float(np.mean(shown == labels)),
                "loss": float(-likelihood.mean()),
                "images": images,
            }
            arrays |= {
                f"{split}_ids": np.arange(images),
                f"{split}_labels": labels,
                f"{split}_logits": logits,
            }
        np.savez(place / "predictions.npz", **arrays)
    _json(place / "result.json", result)


def _probe(arm: str, lr: float, step: int, steps: int, layers: int) -> dict[str, Any]:
    share = step / steps
    rows = []
    for i in range(layers):
        if arm in ("baseline", "aa"):
            start, end = 20.0, LOGIT.get(("baseline", lr), 20.0)
            largest, bound = start * (end / start) ** share * 0.85**i, None
        else:
            largest, bound = 7.5 * 0.95**i, 8.0 + i / 10
        rows.append(
            {
                "site": f"blocks.{i}.attn",
                "heads": 4,
                "q_rms": (1.4 + 2 * share if bound is None else 1.1) * 0.97**i,
                "k_rms": (1.2 + share if bound is None else 1.0) * 0.97**i,
                "q_cv": 0.2,
                "k_cv": 0.3,
                "key_common_share": 0.6,
                "logit_max": largest,
                "logit_absmax": largest,
                "logit_spread": largest / 4,
                "entropy": 3.0 - share,
                "entropy_share": 0.72 - 0.25 * share * (arm == "baseline") - 0.02 * i,
                "entropy_share_min_head": 0.4,
                "peaked_rows": 0.01,
                "logit_bound": bound,
            }
        )
    return {"step": step, "layers": rows}


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, allow_nan=False))


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
