"""retrofit.tables: what the command line says in words, no more than the numbers carry."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from retrofit.shock import Shock
from retrofit.tables import flags, print_probe, reading, shock_lines

ROW = {
    "site": "blocks.0.attn",
    "q_rms": 1.234,
    "k_rms": 2.345,
    "key_common_share": 0.567,
    "logit_absmax": 45.67,
    "logit_bound": None,
    "entropy_share": 0.789,
    "low_entropy_heads": 0.0,
}
QK_NORM = {
    "formula": "RMSNorm over each head",
    "sites": 2,
    "skipped": [],
    "left_out": "",
    "refusal": None,
    "largest_bound": 12.345,
}


def document(*largest: float, **norm: Any) -> dict[str, Any]:
    layers = [{**copy.deepcopy(ROW), "site": f"blocks.{i}.attn", "logit_absmax": v} for i, v in enumerate(largest)]
    return {"model": "nano", "data": "[bold]x", "images": 8, "layers": layers, "qk_norm": {**QK_NORM, **norm}}


@pytest.mark.parametrize(
    ("largest", "words", "flag"),
    [
        (99.9, "no published trouble starts there", ""),
        (100.1, "Kimi K2 caps logits at 100", "watch"),
        (1000.1, "loss suffers", "warn"),
        (9999.9, "loss suffers", "warn"),
        (10000.1, "diverged", "fail"),
    ],
)
def test_the_largest_logit_of_all_layers_is_read_against_published_bands(largest: float, words: str, flag: str) -> None:
    shown = document(3.0, largest, 7.0)
    first = reading(shown)[0]
    assert first.startswith(f"Largest |logit|: {largest:.4g} in blocks.1.attn: ")
    assert words in first
    assert [flags(row) for row in shown["layers"]] == ["", flag, ""]


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_is_said_to(lost: float) -> None:
    shown = document(3.0, lost, 7.0)
    first, second, *_ = reading(shown)
    assert first.startswith("In 1 of 3 layers logits are not finite (first: blocks.1.attn): the model has diverged")
    assert second.startswith("Largest |logit|: 7 in blocks.2.attn")
    assert [flags(row) for row in shown["layers"]] == ["", "not finite", ""]
    assert not any(line.startswith("Largest") for line in reading(document(lost, lost)))


def test_low_entropy_is_not_called_a_fault() -> None:
    shown = document(3.0, 4.0)
    assert not any("entropy" in line for line in reading(shown))
    shown["layers"][1]["low_entropy_heads"] = 0.25
    (line,) = [line for line in reading(shown) if "entropy" in line]
    assert "1 of 2 layers" in line
    assert "blocks.1.attn" in line
    assert "no fault" in line
    assert flags(shown["layers"][1]) == "low entropy"


def test_a_common_part_of_the_keys_is_told_where_it_is_most_of_them() -> None:
    shown = document(3.0, 4.0)
    assert any("2 of 2 layers most key energy" in line for line in reading(shown))
    for row in shown["layers"]:
        row["key_common_share"] = 0.4
    assert not any("key energy" in line for line in reading(shown))


def test_it_says_what_qk_norm_would_do_or_why_not() -> None:
    assert "2 attention layers" in reading(document(3.0))[-1]
    assert "under 12.35" in reading(document(3.0))[-1]
    assert reading(document(3.0, left_out="1 x pool"))[-1] == "Left out: 1 x pool."
    assert reading(document(3.0, refusal="it has it"))[-1] == "QK-Norm cannot go in: it has it."


def test_the_table_shows_every_layer_in_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document(45.67, 7.0)
    shown["layers"][1]["logit_bound"] = 8.0
    print_probe(shown)
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines())
    (first,) = [line for line in out.splitlines() if "blocks.0.attn" in line and "│" in line]
    words = [word for word in first.replace("│", " ").split() if word != "blocks.0.attn"]
    assert words == ["1.23", "2.35", "57%", "45.67", "none", "79%"]
    (second,) = [line for line in out.splitlines() if "blocks.1.attn" in line and "│" in line]
    assert "8" in second
    assert "nano on 8 images of" in out


def test_a_shock_is_told_with_what_was_measured() -> None:
    whole = Shock(cosine_class=0.98765, cosine_patch=0.5, kl=0.1, top1_agreement=0.25, images=12)
    part = Shock(cosine_class=None, cosine_patch=0.5, kl=None, top1_agreement=None, images=12)
    nothing = Shock(None, None, None, None, 3)
    lines = list(shock_lines({"ones": whole, "match": part, "other": nothing}))
    start = "start {}, before any training, {} held-out images: "
    assert lines == [
        start.format("ones", 12) + "cosine of class tokens 0.988, cosine of patch tokens 0.500, same top class 0.250",
        start.format("match", 12) + "cosine of patch tokens 0.500",
        start.format("other", 3) + "not measurable",
    ]
