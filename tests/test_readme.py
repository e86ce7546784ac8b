"""Every command and every line of Python in README.md runs, or is run by CI as make."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import transformers
from conftest import fill_cache, fresh_process
from timm.models import save_for_hf

from retrofit.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_shell_commands_run_in_the_order_they_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = [words for words in commands() if words[0] == "retrofit"]
    assert len(ran) >= 8
    for words in ran:
        assert main(words[1:]) == 0, " ".join(words)
    assert (tmp_path / "runs/short/report.html").is_file()
    assert (tmp_path / "runs/short/export/retrofit.json").is_file()


def test_accelerate_launches_it(tmp_path: Path) -> None:
    (words,) = [words for words in commands() if words[0] == "accelerate"]
    assert words[1] == "launch"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *words[2:]]
    subprocess.run(launch, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    assert (tmp_path / words[words.index("-o") + 1] / "report.html").is_file()


def test_make_commands_are_targets_with_recipes() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    used = [words for words in commands() if words[0] == "make"]
    used += [shlex.split(text) for text in re.findall(r"`(make [^`]+)`", README)]
    assert len(used) >= 4
    for _, target, *settings in used:
        assert target in targets
        for setting in settings:
            name = setting.removeprefix("MODEL=")
            assert (ROOT / "recipes" / f"{name}.yaml").is_file()


def test_every_shell_line_is_one_of_these() -> None:
    assert {words[0] for words in commands()} == {"make", "retrofit", "accelerate"}


def test_python_runs(tmp_path: Path) -> None:
    """With the checkpoints that it names in the hub's cache: their structure, of random weights."""
    small = timm.create_model("vit_tiny_patch16_224")
    save_for_hf(small, str(tmp_path / "timm"))
    fill_cache(tmp_path / "hub", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", tmp_path / "timm")
    base = transformers.ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    transformers.ViTModel(base).save_pretrained(tmp_path / "hf")
    fill_cache(tmp_path / "hub", "google/vit-base-patch16-224-in21k", tmp_path / "hf")
    code = f"import os; os.chdir({str(tmp_path)!r})\n" + "\n".join(blocks("python"))
    fresh_process(code, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub"))
    for folder in ("tiny-normed", "base-normed"):
        assert (tmp_path / folder / "retrofit.json").is_file()


def test_what_it_points_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_recipes_of_the_table_are_the_shipped_ones() -> None:
    section = README.partition("## Recipes")[2].partition("## ")[0]
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", section, re.MULTILINE)
    named = sorted(name for cell in cells for name in re.findall(r"\w+", cell))
    assert named == sorted(p.stem for p in (ROOT / "recipes").glob("*.yaml"))
