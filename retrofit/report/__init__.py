"""The comparison report: run folder -> report.json -> report.md and report.html, from files alone.

runs.py        one run, and what is missing or wrong there; read.py: the folder as a whole
rates.py       each arm at each rate; compare.py: pairs, their differences and verdicts; noise.py: how pairs drift apart
attention.py   what the probes saw; trouble.py: where it started; cost.py: what an arm costs
results.py     the document, which schema.json describes; verdict.py: what may be said; limits.py: what may not
text.py        the page, of blocks.py, with pairs.py, losses.py, inside.py, setting.py, tables.py, definitions.py and
               words.py
overview.py    several studies in one table, which overview.schema.json describes
markdown.py    the page for a pull request
html.py        the page for a browser, with template.html; figures.py, plots.py, svg.py: its figures
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.report import overview, text
from retrofit.report.blocks import Page
from retrofit.report.html import to_html
from retrofit.report.markdown import MARK, to_markdown
from retrofit.report.results import SCHEMA, build_report

__all__ = ["build_report", "write_overview", "write_report"]


def write_report(
    run_dir: Path, force: bool = False, *, margin: float | None = None, folder: Path | None = None
) -> Path:
    """Writes report.json, report.md and report.html of a run folder, and returns the path of the last.

    The same files give the same bytes. Raises RetrofitError where the folder holds no run, and, unless
    `force`, where a file of one of these names is there that retrofit did not write.

    Args:
        margin: points of accuracy within which arms are practically equal; None for the recipe's.
        folder: where the report is written; None for the run folder itself.
    """
    folder = Path(folder or run_dir)
    _check_free(folder, force)
    document = build_report(Path(run_dir), margin)
    return _write(folder, text.page(document), document)


def write_overview(
    run_dirs: Sequence[Path], folder: Path | None = None, force: bool = False, *, margin: float | None = None
) -> str:
    """Compares several run folders, and returns the comparison as Markdown; with `folder`, written as a report there.

    Raises RetrofitError as `write_report` does.
    """
    places = [Path(run).resolve() for run in run_dirs]
    if twice := [str(run) for run, place in zip(run_dirs, places, strict=True) if places.count(place) > 1]:
        raise RetrofitError(f"{' and '.join(twice)} are the same folder; name each once")
    if folder is not None:
        if folder.resolve() in places:
            raise RetrofitError(f"{folder} is one of the run folders, whose own report lies there; name another -o")
        _check_free(folder, force)
    studies = zip(overview.names_of(run_dirs), run_dirs, strict=True)
    document = overview.overview({name: build_report(run, margin) for name, run in studies})
    page = overview.page(document)
    if folder is not None:
        _write(folder, page, document)
    return to_markdown(page)


def _check_free(folder: Path, force: bool) -> None:
    foreign = [path.name for path in _places(folder).values() if path.exists() and not _ours(path)]
    if foreign and not force:
        raise RetrofitError(
            f"{folder} holds {', '.join(foreign)}, which retrofit did not write; move them away, or add --force"
        )


def _write(folder: Path, page: Page, document: Mapping[str, Any]) -> Path:
    """The three forms of a report; all are made before the first is written."""
    texts = {
        "json": runfiles.dumps(document, indent=2) + "\n",
        "md": to_markdown(page),
        "html": to_html(page, document),
    }
    for suffix, content in texts.items():
        runfiles.write_text(_places(folder)[suffix], content)
    return _places(folder)["html"]


def _places(folder: Path) -> dict[str, Path]:
    return {suffix: folder / f"{runfiles.REPORT}.{suffix}" for suffix in ("json", "md", "html")}


def _ours(path: Path) -> bool:
    """Whether a report file carries the mark of one that retrofit wrote."""
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return MARK in content[:500]
        document = json.loads(content)
    except (OSError, ValueError):
        return False
    family = SCHEMA.partition("/")[0] + "/"
    return isinstance(document, dict) and str(document.get("schema")).startswith(family)
