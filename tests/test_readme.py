"""Every command and every line of Python in README.md runs, or is run by CI as make."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

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


def test_every_shell_line_is_make_or_retrofit() -> None:
    assert {words[0] for words in commands()} == {"make", "retrofit"}


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "nano-qknorm/retrofit.json").is_file()


def test_what_it_points_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_recipes_of_the_table_are_the_shipped_ones() -> None:
    named = set(re.findall(r"^\| `(\w+)`", README, re.MULTILINE))
    assert named == {p.stem for p in (ROOT / "recipes").glob("*.yaml")}
