"""Every model of the installed libraries is supported, or refused for a reason that is true."""

from __future__ import annotations

from collections import Counter

import pytest
import timm
import torch

from retrofit.models import TimmFamily, TransformersFamily
from retrofit.registry import Entry, registered
from retrofit.surgery import survey

REASONS = (
    "it has no attention with q and k",
    "QK-Norm of its own",
    "cosine attention already",
    "channel attention",
    "linear attention",
    "outlook attention",
    "an attention pool",
    "not known here",
    "packed form",
    "it does not build with its defaults",
)


def check(entry: Entry) -> None:
    if entry.supported:
        assert entry.sites > 0
        assert not entry.reason or entry.reason.startswith("left out: ")
    else:
        assert entry.sites == 0
        assert any(reason in entry.reason for reason in REASONS), entry


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet18", "no attention with q and k"),
        ("swinv2_tiny_window8_256", "cosine"),
        ("edgenext_xx_small", "channel attention"),
        ("efficientvit_b0", "linear attention"),
        ("resnet50_clip", "an attention pool; pools=True norms it too"),
        ("vit_base_patch16_sapiens2", "QK-Norm of its own in 12 of 12"),
    ],
)
def test_refused_for_the_right_reason(name: str, reason: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert reason in (survey(model).refusal or "")


def test_transformers_sweep() -> None:
    entries = list(registered(["transformers"]))
    assert {e.name for e in entries} == {name for name, _ in TransformersFamily().registered()}
    for entry in entries:
        check(entry)
    supported = {e.name for e in entries if e.supported}
    wanted = "vit deit dinov2 dinov2_with_registers dinov3_vit clip siglip siglip2 beit data2vec-vision vit_mae vit_msn"
    wanted += (
        " ijepa aimv2_vision_model videomae eomt yolos dpt swin segformer hiera pvt pvt_v2 vitdet mobilevit cvt levit"
    )
    wanted += " timesformer sam_vision_model internvl_vision vjepa2 eomt_dinov3 glpn donut-swin"
    wanted += " chinese_clip_vision_model idefics3_vision smolvlm_vision lw_detr_vit rf_detr_dinov2 maskformer-swin"
    wanted += " vitpose_backbone tipsv2_vision_model"
    assert set(wanted.split()) <= supported
    assert len(supported) >= 50


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_timm_sweep() -> None:
    entries = list(registered(["timm"]))
    assert [e.name for e in entries] == [name for name, _ in TimmFamily().registered()]
    for entry in entries:
        check(entry)
        assert "does not build" not in entry.reason, entry
    if timm.__version__ == "1.0.31":
        native = [e for e in entries if "QK-Norm of its own" in e.reason]
        assert len(native) == 12
        assert Counter(e.supported for e in entries)[True] == 616
        assert not [e for e in entries if "not known here" in e.reason]
