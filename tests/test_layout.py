"""The layout of the code: which rooms there are, that imports point from later to earlier, what is not imported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import retrofit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "retrofit"

BASE = {"errors", "stats", "runfiles"}
TRUNK = ["qknorm", "recipe", "norms", "models", "tap", "probes", "calibrate", "shock", "surgery", "registry"]
TRUNK += ["checkpoint", "data", "evaluate", "train", "manifest", "study", "pair", "rehearsal"]
MAY: dict[str, set[str]] = {"errors": set(), "stats": {"errors"}, "runfiles": {"errors", "stats"}}
for _i, _room in enumerate(TRUNK):
    MAY[_room] = BASE | set(TRUNK[:_i])
MAY["diagnose"] = BASE
MAY["report"] = BASE | {"diagnose"}
MAY["export"] = MAY["data"] | {"data"}
MAY["tables"] = BASE | set(TRUNK)
MAY["assets"] = set()
MAY["arguments"] = BASE | {"qknorm"}
MAY["cli"] = {*MAY, "cli"}
MAY["__main__"] = {"cli"}
LIGHT = {"errors", "stats", "runfiles", "qknorm", "recipe", "diagnose", "report", "arguments", "cli", "__main__"}
"""Rooms that never import torch or a model library when they are imported."""
HEAVY = {"torch", "torchvision", "timm", "transformers", "accelerate"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_from_later_to_earlier(path: Path) -> None:
    room = room_of(path)
    if path == PACKAGE / "__init__.py":
        return
    inside = {n.split(".")[1] for n in imported(ast.parse(path.read_text())) if n.startswith("retrofit.")}
    inside -= {"__version__", room}
    assert inside <= MAY[room], f"{room} imports {sorted(inside - MAY[room])}"


def test_every_room_is_known_here() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms == set(MAY)


def at_import(tree: ast.AST) -> set[str]:
    """Names of libraries that are imported when the module is, outside functions and TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names |= at_import(node)
    return names


@pytest.mark.parametrize("room", sorted(LIGHT))
def test_light_rooms_name_no_heavy_library(room: str) -> None:
    for path in FILES:
        if room_of(path) == room:
            found = {name.split(".")[0] for name in at_import(ast.parse(path.read_text()))}
            assert not found & HEAVY, path


def test_what_stays_light_in_a_fresh_process(tmp_path: Path) -> None:
    """Imports, help and a user's mistakes come without torch."""
    (tmp_path / "bad.yaml").write_text("trian: 1")
    code = f"""
import contextlib, io, sys
def light(what):
    heavy = sorted({HEAVY!r} & set(sys.modules))
    assert not heavy, (what, heavy)
import retrofit
dir(retrofit), retrofit.__version__, retrofit.QKNorm.preset("qwen3"), retrofit.RetrofitError
light("retrofit")
for room in {sorted(LIGHT - {"__main__"})!r}:
    __import__("retrofit." + room)
    light(room)
from retrofit.cli import main
said = io.StringIO()
def run(*argv):
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(argv)
        except SystemExit as exit:
            code = exit.code
    light(argv)
    return code
assert run("--help") == 0 and run("pair", "--help") == 0 and run("--version") == 0
for wrong in ([], ["par"], ["pair"], ["pair", "nano", "--shard", "3/2"], ["pair", "nanno"], ["pair", "nano", "x"],
              ["pair", {str(tmp_path / "bad.yaml")!r}], ["probe", "nano", "--images", "0"],
              ["apply", "nano", "-o", "x", "--preset", "qwen"], ["apply", "nano", "-o", "x", "gian=shared"]):
    assert run(*wrong) == 2, wrong
assert "Traceback" not in said.getvalue()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_public_name_is_the_name_of_a_module() -> None:
    modules = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert not modules & set(retrofit.__all__)
    assert set(retrofit._HOMES) == set(retrofit.__all__) <= set(dir(retrofit))
    for name, home in retrofit._HOMES.items():
        assert getattr(retrofit, name) is getattr(import_module(home), name)
        assert getattr(retrofit, name) is getattr(retrofit, name)  # also on second use
    with pytest.raises(AttributeError, match="no attribute 'stat'"):
        retrofit.stat  # noqa: B018


def test_nothing_else_stands_at_the_top_level() -> None:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.splitlines()}
    allowed = {
        "retrofit",
        "recipes",
        "tests",
        "pyproject.toml",
        "Makefile",
        "README.md",
        "LICENSE",
        ".ci",
        ".gitignore",
    }
    assert top <= allowed, sorted(top - allowed)
    assert {"retrofit", "recipes", "tests", "pyproject.toml", "Makefile", "LICENSE"} <= top
    assert [line for line in listed.splitlines() if line.startswith(".ci/")] == [".ci/run"]


def test_files_stay_short() -> None:
    lines = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in FILES}
    assert not {name: n for name, n in lines.items() if n > 340}
    assert len((ROOT / "Makefile").read_text().splitlines()) < 70


def test_tests_and_code_name_no_place_of_one_machine() -> None:
    words = [os.sep + place + os.sep for place in ("work", "tmp", "home", "root")]
    texts = [p for folder in ("tests", "recipes") for p in sorted((ROOT / folder).glob("*.*")) if p.suffix != ".png"]
    assert {p.suffix for p in texts} >= {".py", ".yaml", ".md"}
    for path in [*FILES, *texts]:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in words if word in text], path
