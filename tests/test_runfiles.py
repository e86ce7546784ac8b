"""retrofit.runfiles: strict JSON, writes that are whole or absent, and whose files may be replaced."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.runfiles import (
    JsonLines,
    RunKey,
    check_free,
    claim,
    dumps,
    publishing,
    read_json,
    read_jsonl,
    write_bytes,
    write_json,
    write_text,
)

MARK = "mark.json"


def strict(text: str) -> Any:
    """What a reader that knows no NaN makes of it."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def files(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


# Names


def test_a_run_lies_in_a_folder_named_by_arm_rate_and_seed() -> None:
    assert RunKey.of("retrofit", 1e-4, 2, "bf16").folder == "retrofit/lr0.0001-s2"
    assert RunKey.of("baseline", 3e-5, 0, "bf16").folder == "baseline/lr3e-05-s0"
    assert RunKey.of("a", 1.0, 0, "fp32", name_precision=True).folder == "a/lr1-s0-fp32"


# JSON


@dataclass
class Inner:
    worst: float = math.inf


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    numbers: tuple[float, ...] = (1.0, math.nan)
    place: Path = Path("a/b")


def test_what_is_not_finite_is_null_at_any_depth() -> None:
    value = {
        "float": math.nan,
        "list": [1, [-math.inf, {"deep": math.inf}]],
        "tuple": (math.nan, 2.5),
        "array": np.array([[1.0, np.nan], [np.inf, -2.0]], np.float32),
        "scalar": np.float32("nan"),
        "whole": np.int64(3),
        "truth": np.bool_(True),
        "empty": np.array([]),
        "dataclass": Outer(),
        3: "a key",
    }
    assert strict(dumps(value)) == {
        "float": None,
        "list": [1, [None, {"deep": None}]],
        "tuple": [None, 2.5],
        "array": [[1.0, None], [None, -2.0]],
        "scalar": None,
        "whole": 3,
        "truth": True,
        "empty": [],
        "dataclass": {"inner": {"worst": None}, "numbers": [1.0, None], "place": "a/b"},
        "3": "a key",
    }


def test_what_json_cannot_hold_is_an_error_and_not_a_guess() -> None:
    with pytest.raises(TypeError):
        dumps({"a": object()})


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4))


def nulled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: nulled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [nulled(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(VALUES)
def test_everything_else_comes_back(value: Any) -> None:
    assert strict(dumps(value)) == nulled(value)
    assert strict(dumps(value, indent=2)) == nulled(value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"a": ')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name, word in (("torn.json", "cannot be read"), ("bytes.json", "cannot be read"), ("none.json", "missing")):
        with pytest.raises(RetrofitError, match=f"{name}.*{word}"):
            read_json(tmp_path / name)


# Rows


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text(), max_size=3), max_size=5))
@example([{"a": "\u2028 \x85"}, {"b": 1}])  # line ends of Unicode that are none in JSON
def test_rows_come_back_whatever_letters_they_hold(tmp_path_factory: Any, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    log = JsonLines(path)
    for row in rows:
        log.write(row)
    assert read_jsonl(path) == rows  # each is there at once, before the file is closed
    log.close()


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step"', "nul", "[3]", "\x00\x00", "\ud7ff{"])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n' + torn)
    assert read_jsonl(path) == [{"step": 0}, {"step": 1}]


def test_names_that_are_no_text_come_back(tmp_path: Path) -> None:
    """The system gives names of files that are no UTF-8 as lone surrogates, which UTF-8 cannot hold."""
    name = os.fsdecode(b"caf\xe9")
    runfiles.write_json(tmp_path / "a.json", {"name": name})
    assert runfiles.read_json(tmp_path / "a.json") == {"name": name}
    rows = JsonLines(tmp_path / "a.jsonl")
    rows.write({"name": name})
    rows.close()
    assert read_jsonl(tmp_path / "a.jsonl") == [{"name": name}]


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e31, math.nan, math.inf, True, "1", None])
def test_what_cannot_be_reckoned_with_is_no_number(value: Any) -> None:
    assert runfiles.number(value) is None
    assert runfiles.count(value) is None


def test_a_torn_letter_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"name": "\xc3')
    assert read_jsonl(path) == [{"step": 0}]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_a_run_begun_again_begins_its_rows_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "metrics.jsonl"
    for step in (1, 2):
        log = JsonLines(path)
        log.write({"step": step})
        log.close()
    assert read_jsonl(path) == [{"step": 2}]


# Writes that are whole or absent


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_cut_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "deep" / "result.json"
    write_json(path, {"a": 1})

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(OSError, match="no space"):
            write_json(path, {"a": 2})
    assert files(tmp_path) == {"deep/result.json": '{\n  "a": 1\n}\n'}
    write_json(path, {"a": 3})
    assert read_json(path) == {"a": 3}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_nothing_is_written_of_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert not list(tmp_path.iterdir())


def test_files_get_the_rights_that_the_user_wishes(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"1")
        with publishing(tmp_path / "out", MARK) as scratch:
            write_text(scratch / MARK, "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "out" / MARK).stat().st_mode & 0o777 == 0o640


# Whose folder it is


def test_a_folder_may_be_new_empty_or_ours(tmp_path: Path) -> None:
    claim(tmp_path / "new" / "deep", MARK)
    assert (tmp_path / "new" / "deep").is_dir()
    claim(tmp_path / "new" / "deep", MARK)
    (tmp_path / "new" / "deep" / MARK).write_text("{}")
    (tmp_path / "new" / "deep" / "more").write_text("")
    claim(tmp_path / "new" / "deep", MARK)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(RetrofitError, match=r"did not write.*--force"):
        claim(tmp_path, MARK)
    claim(tmp_path, MARK, force=True)
    for place in (tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "inside"):
        with pytest.raises(RetrofitError, match=r"is a file|cannot be made"):
            claim(place, MARK, force=True)
    assert files(tmp_path) == {"thesis.tex": "years"}


def test_asking_makes_nothing(tmp_path: Path) -> None:
    check_free(tmp_path / "new", MARK)
    assert not (tmp_path / "new").exists()


def publish(folder: Path, content: dict[str, str], **options: Any) -> None:
    with publishing(folder, MARK, **options) as scratch:
        for name, text in content.items():
            (scratch / name).write_text(text)


def test_what_we_wrote_is_replaced_and_what_is_no_longer_written_goes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, {MARK: "1", "weights": "1", "card": "1"})
    (out / "notes.txt").write_text("mine")
    publish(out, {MARK: "2", "weights": "2"}, owned={"weights", "card"})
    assert files(out) == {MARK: "2", "weights": "2", "notes.txt": "mine"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_of_somebody_else_in_our_folder_stops_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, {MARK: "1", "weights": "1"})
    (out / "card").write_text("mine")
    before = files(out)
    with pytest.raises(RetrofitError, match=r"card, which retrofit did not write.*--force"):
        publish(out, {MARK: "2", "weights": "2", "card": "2"}, owned={"weights"})
    assert files(out) == before
    publish(out, {MARK: "3", "weights": "3", "card": "3"}, owned={"weights"}, force=True)
    assert files(out) == {MARK: "3", "weights": "3", "card": "3"}


def test_a_failure_inside_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, {MARK: "1", "weights": "1"})
    with pytest.raises(TypeError), publishing(out, MARK, owned={"weights"}) as scratch:
        publish(scratch, {"weights": "2", "card": object()})  # type: ignore[dict-item]
    assert files(tmp_path) == {f"out/{MARK}": "1", "out/weights": "1"}


@pytest.mark.parametrize("failing", range(3))
def test_a_folder_cut_off_while_moving_has_no_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The marker leaves first and arrives last, so that no half-moved folder passes for a whole one."""
    out = tmp_path / "out"
    publish(out, {MARK: "1", "a": "1", "z": "1"})
    moves = 0
    replace = os.replace

    def interrupted(source: Any, target: Any) -> None:
        nonlocal moves
        if moves == failing:
            raise KeyboardInterrupt
        moves += 1
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish(out, {MARK: "2", "a": "2", "z": "2"}, owned={"a", "z"})
    assert files(tmp_path) == {f"out/{name}": "2" for name in ("a", "z")[:failing]}


def test_the_marker_leaves_before_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    names = [f"part-{i}" for i in range(20)]
    publish(out, {MARK: "1", **dict.fromkeys(names, "1")})
    gone: list[str] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **more: (gone.append(self.name), unlink(self, **more))[1])
    publish(out, {MARK: "2"}, owned=names)
    assert gone[0] == MARK
    assert sorted(gone[1:]) == sorted(names)
    assert files(out) == {MARK: "2"}


def test_a_parent_that_cannot_be_written_is_a_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rights are refused by hand, since root has them everywhere."""
    out = tmp_path / "out"
    publish(out, {MARK: "1"})
    asked: list[Path] = []

    def refuse(*_: Any, dir: Path, **__: Any) -> str:
        asked.append(Path(dir))
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", refuse)
        with pytest.raises(RetrofitError, match=rf"^{tmp_path} cannot be written to: Permission denied$"):
            publish(out, {MARK: "2"}, owned={MARK})
    assert asked == [tmp_path]
    assert files(tmp_path) == {f"out/{MARK}": "1"}


def test_names_that_lead_elsewhere_are_never_ours(tmp_path: Path) -> None:
    """What is owned comes from a manifest, which a stranger may have written."""
    out = tmp_path / "out"
    (tmp_path / "precious").write_text("mine")
    publish(out, {MARK: "1"})
    publish(out, {MARK: "2"}, owned={"../precious", str(tmp_path / "precious")})
    assert files(tmp_path) == {"precious": "mine", f"out/{MARK}": "2"}


def test_a_folder_is_locked_for_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    refused = pytest.raises(RetrofitError, match="another process is training")
    with runfiles.locked(folder), refused, runfiles.locked(folder):
        raise AssertionError("must not get here")
    with runfiles.locked(folder):
        pass
    assert list(folder.iterdir()) == []
