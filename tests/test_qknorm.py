"""The description of a formula, and its presets against what was published."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest
from conftest import fresh_process

from retrofit.errors import RetrofitError
from retrofit.qknorm import PRESETS, QKNorm

PUBLISHED = {
    # name: norm, axis, gain, bias, zero_centered, eps, position, scale, scale_init, scale_max
    "qwen3": ("rms", "head", "shared", False, False, 1e-6, "before_rope", "fixed", None, None),
    "gemma3": ("rms", "head", "shared", False, True, 1e-6, "before_rope", "fixed", None, None),
    "vit22b": ("layernorm", "head", "shared", False, False, 1e-6, "before_rope", "fixed", None, None),
    "henry2020": ("l2", "head", "none", False, False, 1e-12, "before_rope", "learned", None, None),
    "olmo2": ("rms", "projection", "per_head", False, False, 1e-6, "before_rope", "fixed", None, None),
    "chameleon": ("layernorm", "head", "per_head", True, False, 1e-5, "before_rope", "fixed", None, None),
    "llama4": ("rms", "head", "none", False, False, 1e-5, "after_rope", "fixed", None, None),
    "swinv2": ("l2", "head", "none", False, False, 1e-12, "before_rope", "learned_per_head", 10.0, 100.0),
    "sd3": ("rms", "head", "shared", False, False, 1e-6, "before_rope", "fixed", None, None),
    "timm": ("layernorm", "head", "shared", True, False, 1e-6, "before_rope", "fixed", None, None),
}


def test_every_preset_is_checked() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_is_as_published(name: str) -> None:
    spec = QKNorm.preset(name)
    assert tuple(asdict(spec).values()) == (*PUBLISHED[name], None, False)  # all layers, no pools
    assert PRESETS[name].__doc__
    assert "Source:" in PRESETS[name].__doc__


def test_defaults_are_qwen3() -> None:
    assert QKNorm() == QKNorm.preset("qwen3") == QKNorm.preset("sd3") != QKNorm.preset("gemma3")


def test_changes_go_over_the_preset() -> None:
    spec = QKNorm.preset("qwen3", gain="per_head", layers=[0, -1])
    assert (spec.gain, spec.layers, spec.norm) == ("per_head", (0, -1), "rms")
    assert QKNorm.preset("qwen3").gain == "shared"


def test_replace_checks_again() -> None:
    assert replace(QKNorm(), norm="l2").norm == "l2"
    with pytest.raises(RetrofitError, match="bias"):
        replace(QKNorm.preset("timm"), gain="none")


def test_frozen_hashable_picklable() -> None:
    spec = QKNorm.preset("swinv2", layers=[1])
    with pytest.raises(FrozenInstanceError):
        spec.eps = 1.0  # type: ignore[misc]
    assert {spec: 1}[pickle.loads(pickle.dumps(spec))] == 1
    assert QKNorm(**asdict(spec)) == spec


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"norm": "rmsnorm"}, "rms, layernorm, l2"),
        ({"axis": "token"}, "head, projection"),
        ({"gain": "per-head"}, "shared, per_head, none"),
        ({"position": "after"}, "before_rope, after_rope"),
        ({"scale": "log"}, "fixed, learned, learned_per_head"),
        ({"norm": ["rms"]}, "rms, layernorm, l2"),
        ({"gain": "none", "bias": True}, "need a gain"),
        ({"gain": "none", "zero_centered": True}, "need a gain"),
        ({"scale_init": 10.0}, "scale=learned"),
        ({"scale_max": 10.0}, "scale=learned"),
        ({"scale": "learned", "scale_init": 0.0}, "positive"),
        ({"scale": "learned", "scale_init": -1.0}, "positive"),
        ({"scale": "learned", "scale_max": float("inf")}, "positive"),
        ({"scale": "learned", "scale_init": "ten"}, "positive"),
        ({"scale": "learned", "scale_init": 20.0, "scale_max": 10.0}, "above"),
        ({"eps": 0.0}, "eps"),
        ({"eps": -1e-6}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"eps": "1e-6"}, "eps"),
        ({"layers": []}, "nothing"),
        ({"layers": 3}, "list of whole numbers"),
        ({"layers": 1.5}, "list of whole numbers"),
        ({"layers": "012"}, "list of whole numbers"),
        ({"layers": [0.5]}, "list of whole numbers"),
        ({"layers": [True]}, "list of whole numbers"),
    ],
)
def test_what_contradicts_itself_is_refused(wrong: dict, says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        QKNorm(**wrong)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(RetrofitError, match=r"did you mean qwen3.*presets: .*henry2020"):
        QKNorm.preset("qwen")
    with pytest.raises(RetrofitError, match=r"did you mean zero_centered.*fields: .*scale_max"):
        QKNorm.preset("qwen3", zero_centred=True)


def test_describe_tells_presets_apart() -> None:
    said = {name: QKNorm.preset(name).describe() for name in PRESETS}
    assert said["qwen3"] == said["sd3"]
    assert len(set(said.values())) == len(said) - 1
    assert "\n" not in "".join(said.values())


def test_no_torch() -> None:
    code = "import sys, retrofit; retrofit.QKNorm.preset('olmo2').describe(); print([m for m in sys.modules])"
    loaded = fresh_process(code)
    assert "retrofit" in loaded
    assert not any(f"'{name}'" in loaded for name in ("torch", "timm", "transformers", "numpy"))


def test_fields_are_the_contract() -> None:
    wanted = "norm axis gain bias zero_centered eps position scale scale_init scale_max layers pools"
    assert [f.name for f in fields(QKNorm)] == wanted.split()
