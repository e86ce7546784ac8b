"""Small models made offline, random images, and the way to what lies beside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = Path(__file__).parents[2] / "shared"

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread only waits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not SHARED.is_dir():
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason=f"needs {SHARED}"))


def tiny_timm(name: str = "vit_tiny_patch16_224", **changes):
    """A timm ViT: 32x32 images, 17 tokens, 3 layers of 4 heads, 5 classes, in evaluation mode."""
    import timm
    import torch

    args = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(name, **{**args, **changes}).eval()


def tiny_relpos(**changes):
    """timm attention with an additive relative position bias."""
    return tiny_timm("vit_relpos_small_patch16_224", **changes)


def tiny_rope(**changes):
    """timm attention with RoPE."""
    return tiny_timm("eva02_tiny_patch14_224", **changes)


def tiny_hf(kind: str = "ViT", labels: int | None = 5, **changes):
    """A transformers model of 32x32 images: ViT, DeiT, Dinov2, Dinov2WithRegisters; labels=None has no head."""
    import torch
    import transformers

    args = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    args |= {"mlp_ratio": 2} if kind.startswith("Dinov2") else {"intermediate_size": 64}
    if labels is not None:
        args["num_labels"] = labels
    config = getattr(transformers, f"{kind}Config")(**{**args, **changes})
    suffix = "Model" if labels is None else "ForImageClassification"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, kind + suffix)(config).eval()


MAKERS: dict[str, Callable] = {
    "timm": tiny_timm,
    "relpos": tiny_relpos,
    "rope": tiny_rope,
    "ViT": tiny_hf,
    "DeiT": lambda **changes: tiny_hf("DeiT", **changes),
    "Dinov2": lambda **changes: tiny_hf("Dinov2", **changes),
    "Dinov2WithRegisters": lambda **changes: tiny_hf("Dinov2WithRegisters", **changes),
}


def sharpen(model, factor: float = 6.0):
    """Makes attention logits large and keys share much, as pretrained models' do; a fresh model's are near 0."""
    import torch

    from retrofit.models import sites_of

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in sites_of(model)[0]:
            module = site.module
            if getattr(module, "qkv", None) is not None:
                module.qkv.weight[: 2 * site.heads * site.head_dim] *= factor
                bias = getattr(module.qkv, "bias", None)
                if bias is not None:
                    own = slice(site.heads * site.head_dim, 2 * site.heads * site.head_dim)
                    bias[own] += torch.randn(bias[own].shape, generator=generator)
            else:
                module.q_proj.weight *= factor
                module.k_proj.weight *= factor
                if module.k_proj.bias is not None:
                    module.k_proj.bias += torch.randn(module.k_proj.bias.shape, generator=generator)
    return model


def outputs_of(model, images):
    """The tensor that a model of either library returns."""
    import torch

    with torch.no_grad():
        result = model(images)
    if isinstance(result, torch.Tensor):
        return result
    return result.logits if "logits" in result else result.last_hidden_state


def fill_cache(cache: Path, repository: str, folder: Path) -> None:
    """As the hub's client lays it out: blobs, a snapshot of links, and a ref."""
    root = cache / ("models--" + repository.replace("/", "--"))
    commit = "0123456789abcdef0123456789abcdef01234567"
    for part in ("blobs", f"snapshots/{commit}", "refs"):
        (root / part).mkdir(parents=True)
    (root / "refs/main").write_text(commit)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, root / "blobs" / f"{i:040x}")
        os.symlink(f"../../blobs/{i:040x}", root / "snapshots" / commit / file.name)


def fresh_process(code: str, *args: object, **env: str) -> str:
    """stdout of `code` in a new interpreter; `args` are its sys.argv[1:]."""
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.fixture
def images():
    import torch

    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(3))
