"""retrofit.tables: what the command line says in words, no more than the numbers carry."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from retrofit.shock import Shock
from retrofit.tables import print_probe, reading, shock_lines

ROW = {
    "site": "blocks.0.attn",
    "q_rms": 1.234,
    "k_rms": 2.345,
    "key_common_share": 0.567,
    "logit_absmax": 45.67,
    "logit_bound": None,
    "entropy_share": 0.789,
    "peaked_rows": 0.0123,
}


def document(*largest: float, skipped: Any = ()) -> dict[str, Any]:
    layers = [{**copy.deepcopy(ROW), "site": f"blocks.{i}.attn", "logit_absmax": v} for i, v in enumerate(largest)]
    return {"model": "nano", "data": "[bold]x", "images": 8, "layers": layers, "skipped": list(skipped)}


@pytest.mark.parametrize(
    ("largest", "words"),
    [
        (99.9, "within what trains well"),
        (100.0, "Kimi K2 caps logits at 100"),
        (1000.0, "loss suffers"),
        (9999.9, "loss suffers"),
        (10000.0, "diverged"),
    ],
)
def test_the_largest_logit_of_all_layers_is_read_against_published_bands(largest: float, words: str) -> None:
    first = reading(document(3.0, largest, 7.0))[0]
    assert first.startswith(f"Largest |logit|: {largest:.1f} in blocks.1.attn: ")
    assert words in first


def test_low_entropy_is_not_called_a_fault_and_skipped_modules_are_named() -> None:
    lines = reading(document(3.0, skipped=[{"name": "pool", "reason": "it has one query"}]))
    assert any("no fault" in line for line in lines)
    assert lines[-1] == "pool: it has one query"


def test_the_table_shows_every_layer_in_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document(45.67, 7.0)
    shown["layers"][1]["logit_bound"] = 8.0
    print_probe(shown)
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines())
    (first,) = [line for line in out.splitlines() if "blocks.0.attn" in line and "Largest" not in line]
    assert [word for word in first.replace("│", " ").split() if word != "blocks.0.attn"] == [
        "1.23",
        "2.35",
        "57%",
        "45.7",
        "none",
        "79%",
        "1.2%",
    ]
    (second,) = [line for line in out.splitlines() if "blocks.1.attn" in line]
    assert "8.0" in second
    assert "nano on 8 images of" in out


def test_a_shock_is_told_with_what_was_measured() -> None:
    whole = Shock(cosine_class=0.98765, cosine_patch=0.5, kl=0.1, top1_agreement=0.25, images=12)
    part = Shock(cosine_class=None, cosine_patch=0.5, kl=None, top1_agreement=None, images=12)
    nothing = Shock(None, None, None, None, 3)
    lines = list(shock_lines({"ones": whole, "match": part, "other": nothing}))
    start = "start {}, before any training, {} held-out images: "
    assert lines == [
        start.format("ones", 12) + "cosine of class tokens 0.988, of patch tokens 0.500, same top class 0.250",
        start.format("match", 12) + "of patch tokens 0.500",
        start.format("other", 3) + "not measurable",
    ]
