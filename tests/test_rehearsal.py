"""retrofit.rehearsal: what a dry run says against what then happens, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import QK_NORM, content, recipe, write_images, write_timm

from retrofit.errors import RetrofitError
from retrofit.pair import run_pair
from retrofit.recipe import Recipe, dump, parse
from retrofit.rehearsal import rehearse
from retrofit.runfiles import read_json, read_jsonl
from retrofit.train import ArmRun, loop


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grid": {"seeds": [0, 1], "lr": [1e-3, 3e-3], "steps": None, "epochs": 0.7},
    "layers": {"layer_decay": 0.7, "weight_decay": 0.1, "ema": 0.9, "accumulate": 2, "mixup": 0.5},
    "frozen": {"freeze": "attention_only", "optimizer": "muon"},
    "precisions": {"precision": ["fp32", "bf16"], "grad_checkpointing": True},
}


@pytest.mark.parametrize("case", list(CASES))
def test_steps_and_groups_are_those_that_then_train(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    study = recipe(data, **CASES[case])
    before = torch.get_rng_state(), {p.name for p in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    said = rehearse(study)
    assert torch.equal(before[0], torch.get_rng_state())
    assert {p.name for p in tmp_path.iterdir()} == before[1], "a dry run writes nothing"
    assert said.startswith(dump(study))
    assert "images: train 40, validation 12, test 20\nclasses: 4\n" in said
    arms: list[ArmRun] = []
    start = ArmRun.start
    monkeypatch.setattr(loop.ArmRun, "start", lambda *given: arms.append(start(*given)) or arms[-1])
    run_pair(study, tmp_path / "run")
    plan = study.plan()
    assert said.endswith("\n".join(f"  {key.folder}" for key in plan))
    for key in plan:
        rows = read_jsonl(tmp_path / "run" / key.folder / "metrics.jsonl")
        assert f"{len(plan)} runs of {len(rows)} steps:" in said
    for arm in arms:
        result = read_json(tmp_path / "run" / arm.key.folder / "result.json")
        total = f"  {arm.key.arm}: {result['parameters']:,} parameters"
        if result["parameters_added"]:
            total += f", of which {result['parameters_added']:,} in 2 QK-Norms: "
        block = said.partition(total)[2]
        assert block, total
        lines = block.split("\n")[1:]
        groups = arm.optimizer.param_groups
        for line, group in zip(lines, groups, strict=False):
            found = re.fullmatch(
                r" {4}(.+?) +(\d+) tensors +([\d,]+) parameters   lr x (\S+)   weight decay (\S+)", line
            )
            assert found, line
            assert found[1] == group["name"]
            assert int(found[2]) == len(group["params"])
            assert int(found[3].replace(",", "")) == sum(p.numel() for p in group["params"])
            assert float(found[4]) == pytest.approx(group["lr_scale"], rel=1e-3)
            assert float(found[5]) == group["weight_decay"]
        assert not lines[len(groups)].startswith("    ")


def test_the_estimate_says_how_it_was_made_and_comes_near(data: Path, tmp_path: Path) -> None:
    study = recipe(data, steps=6)
    said = rehearse(study)
    assert re.search(
        r"estimate: .+, \d+ MiB with 2 runs side by side\. Measured now on cpu: 3 steps on random pixels, one real "
        r"batch \(\S+ s\), a probe, an evaluation; memory is tensors, without the kernels' workspace\.",
        said,
    )
    run_pair(study, tmp_path / "run")
    for arm in ("baseline", "retrofit"):
        result = read_json(tmp_path / "run" / arm / "lr0.001-s0" / "result.json")
        told = re.search(rf"a step of {arm} in fp32: (\S+) s, (\d+) MiB at most", said)
        assert told
        assert float(told[1]) > 0
        assert abs(int(told[2]) - result["memory_bytes"] / 2**20) < 1


def wrong(data: Path, **changes: Any) -> Recipe:
    document = content(data)
    for path, value in changes.items():
        section, key = path.split("__")
        if section == "qk_norm":
            document["arms"]["retrofit"]["qk_norm"] = {**QK_NORM, key: value}
        else:
            document[section][key] = value
    return parse(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm__layers": [0, 7]}, r"layers=\[7\] are not there: it has 2 attention layers"),
        ({"train__optimizer": "adamx"}, r"train\.optimizer: adamx cannot be used"),
        ({"train__optimizer_args": {"beta": 1}}, r"train\.optimizer_args: adamw does not take them"),
        ({"data__auto_augment": "randy"}, r"data\.auto_augment: timm has no policy randy"),
        ({"train__compile": "inducter"}, r"train\.compile: torch has no backend inducter"),
        ({"train__drop_path": 0.1, "data__image_size": 16}, None),
        ({"train__precision": "fp16"}, r"train\.precision: fp16 needs a GPU"),
        ({"data__source": "nowhere"}, "nowhere"),
    ],
)
def test_what_would_fail_is_told(data: Path, changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        rehearse(wrong(data, **changes))
        return
    if "fp16" in message and torch.cuda.is_available():
        pytest.skip("a GPU has fp16")
    with pytest.raises(RetrofitError, match=message):
        rehearse(wrong(data, **changes))


def test_a_head_for_the_same_labels_is_rehearsed_too(data: Path, tmp_path: Path) -> None:
    document = {**content(data), "model": f"timm:{write_timm(tmp_path / 'four', num_classes=4)}"}
    assert "classes: 4" in rehearse(parse(document))
