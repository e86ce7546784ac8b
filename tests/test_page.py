"""The files of a report: their bytes, what the page needs, and how a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_run import LRS, make_run
from read_page import BROWSER, Shown, look, picture

from retrofit.errors import RetrofitError
from retrofit.report import write_overview, write_report

DESKTOP, PHONE = 1280, 390
WITH_BROWSER = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium or chrome")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run folder with its report; tests only read it."""
    folder = make_run(tmp_path_factory.mktemp("made") / "run", aa=LRS[:1])
    write_report(folder)
    return folder


def test_made_twice_the_files_are_the_same_bytes(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(made, other, ignore=shutil.ignore_patterns("report.*"))
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nsvg.fonttype: path\n")
    code = "import sys; from pathlib import Path; from retrofit.report import write_report as w; w(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    subprocess.run([sys.executable, "-c", code, str(other)], check=True, env=environment)
    for name in ("report.json", "report.md", "report.html"):
        assert (other / name).read_bytes() == (made / name).read_bytes()


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json"])
def test_a_file_of_someone_else_is_not_overwritten(tmp_path: Path, name: str) -> None:
    copy = make_run(tmp_path / "run", lrs=LRS[:1], seeds=[0], steps=5, images=20, layers=1)
    write_report(copy)
    (copy / name).write_text("{}" if name.endswith("json") else "my notes")
    before = {p.name: p.read_bytes() for p in copy.glob("report.*")}
    with pytest.raises(RetrofitError, match=f"{name}, which retrofit did not write"):
        write_report(copy)
    assert {p.name: p.read_bytes() for p in copy.glob("report.*")} == before
    write_report(copy, force=True)
    assert (copy / name).read_bytes() != before[name]


def test_the_page_needs_nothing_from_elsewhere(made: Path) -> None:
    content = (made / "report.html").read_text(encoding="utf-8")
    shown = Shown(content)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base"} & set(shown.tags)
    for name, value in shown.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith(("#", "data:image/png;base64,"))
    without_pictures = re.sub(r'href="data:image/png;base64,[\w+/=\s]*"', "", content)
    assert not re.search(r"https?:|//|@import|url\((?!#)|data:", re.sub(r"/\*.*?\*/", "", without_pictures))
    ids = [value for name, value in shown.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {v[1:] for n, v in shown.attributes if n == "href" and v.startswith("#")} | set(
        re.findall(r"url\(#([^)]*)\)", content)
    )
    assert used <= set(ids)
    figures = [value for name, value in shown.attributes if name == "aria-label"]
    assert any(label.startswith("Mean test accuracy. baseline at 0.001: 79") for label in figures)


def test_a_large_study_stays_under_two_megabytes(tmp_path: Path) -> None:
    arms, lrs = ["baseline", "a", "b"], [1e-5, 1e-4, 1e-3, 1e-2]
    folder = make_run(tmp_path / "run", arms=arms, lrs=lrs, seeds=range(3), layers=24, images=20)
    assert write_report(folder).stat().st_size < 2_000_000


def test_names_from_files_are_shown_and_do_nothing(tmp_path: Path) -> None:
    copy = make_run(tmp_path / "run", lrs=LRS[:1], layers=1)
    hostile = "<script>alert(1)</script> | *x* `y` [z](w)"
    manifest = json.loads((copy / "run.json").read_text())
    manifest["environment"]["platform"] = hostile
    manifest["recipe"]["model"]["source"] = hostile
    (copy / "run.json").write_text(json.dumps(manifest))
    page_shown = Shown(write_report(copy).read_text(encoding="utf-8"))
    assert "script" not in page_shown.tags
    assert hostile in page_shown.text
    text = (copy / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\<", "")


def test_the_page_is_readable_without_seeing_it(made: Path) -> None:
    """Structure that a screen reader goes by, and no figure or table without words."""
    content = (made / "report.html").read_text(encoding="utf-8")
    shown = Shown(content)
    assert '<html lang="en">' in content
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in content
    assert shown.tags.count("h1") == 1
    assert shown.tags.index("h1") < shown.tags.index("h2")
    figures = content.count("<figure>")
    assert figures == len(re.findall(r'<div class="panels" role="img" aria-label="[^"]{20,}">', content)) >= 9
    assert content.count("<table ") == len(re.findall(r'<table aria-label="[^"]+">', content))
    assert content.count('<th scope="col"') == content.count("<th ")
    assert "prefers-color-scheme: dark" in content
    assert "@media print" in content
    # Arms differ in mark and dash too, so that colour is never the only difference.
    legend = re.findall(r'aria-hidden="true">(.)</span>', content)
    assert len(set(legend)) == 2


def test_text_and_marks_stand_out_from_the_page_in_light_and_dark(made: Path) -> None:
    """Contrast by WCAG 2: 4.5 for text, 3 for marks."""
    content = (made / "report.html").read_text(encoding="utf-8")

    def luminance(colour: str) -> float:
        channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    themes = re.findall(r":root \{(.*?)\}", content, re.DOTALL)
    assert len(themes) == 3  # light, dark, print
    for theme in themes:
        colours = dict(
            re.findall(
                r"--([\w-]+): (#[0-9a-f]{6})", re.sub(r"#([0-9a-f])([0-9a-f])([0-9a-f])(?=;)", r"#\1\1\2\2\3\3", theme)
            )
        )
        paper = luminance(colours["paper"])
        for name, colour in colours.items():
            least = {"ink": 4.5, "muted": 4.5}.get(name, 3.0 if name == "arm-0" or name == "arm-1" else 1.0)
            low, high = sorted((luminance(colour), paper))
            assert (high + 0.05) / (low + 0.05) >= least, (name, colour)


def _folders(place: Path) -> dict[str, Path]:
    """Studies in every state that a reader may meet."""
    everything = [(a, lr, s) for a in ("baseline", "retrofit") for lr in LRS for s in range(3)]
    many = ["baseline", "qwen3", "gemma3", "olmo2", "a-name-of-an-arm-that-is-rather-long"]
    folders = {
        "diverged": make_run(
            place / "diverged", layers=2, aa=LRS, diverged=[("baseline", LRS[2], 0), ("retrofit", LRS[2], 1)]
        ),
        "nothing": make_run(place / "nothing", layers=2, diverged=everything),
        "pair": make_run(place / "pair", layers=1, seeds=[0], lrs=LRS[:1], steps=5),
        "half": make_run(place / "half", layers=2, missing=everything[:5], unfinished=everything[5:8]),
        "many": make_run(place / "many", arms=many, lrs=[1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3], layers=3, images=50),
        "damaged": make_run(place / "damaged", layers=2, lrs=LRS[:2]),
    }
    (folders["damaged"] / "run.json").write_text("{")
    return folders


@WITH_BROWSER
def test_a_browser_shows_the_page_whole_on_a_laptop_and_on_a_phone(made: Path) -> None:
    content = (made / "report.html").read_text(encoding="utf-8")
    for seen, width in zip(look(made / "report.html", (DESKTOP, PHONE)), (DESKTOP, PHONE), strict=True):
        assert seen.width == width
        assert seen.overflowing == []
        assert seen.blank == []
        assert seen.drawings == content.count("<svg") > 20
        assert seen.tables == content.count("<table") > 10
        drawn = picture(made / "report.html", width, 3000)
        assert drawn.shape == (3000, width, 3)
        background = drawn[0, 0]
        for band in np.split(drawn, 6):
            assert (band != background).any(axis=2).mean() > 0.01, "a blank stretch of the page"


@pytest.mark.slow
@WITH_BROWSER
def test_a_browser_shows_studies_in_every_state(tmp_path: Path) -> None:
    folders = _folders(tmp_path)
    pages = {name: write_report(folder) for name, folder in folders.items()}
    write_overview(list(folders.values()), tmp_path / "all")
    for name, path in {**pages, "all": tmp_path / "all" / "report.html"}.items():
        for seen in look(path, (DESKTOP, PHONE)):
            assert (name, seen.overflowing, seen.blank) == (name, [], [])
