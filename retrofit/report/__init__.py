"""The comparison report: run folder -> report.json -> report.md and report.html, from files alone.

read.py        what is in the folder, and what is missing or wrong there
compare.py     pairs, their differences and verdicts; attention.py: what the probes saw; trouble.py: where it started
results.py     the document, which schema.json describes; verdict.py: what may be said
text.py        the page, made once of blocks.py, with tables.py, definitions.py and words.py
markdown.py    the page for a pull request
html.py        the page for a browser, with template.html; figures.py, plots.py, svg.py: its figures
"""

from __future__ import annotations

import json
from pathlib import Path

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.report.html import to_html
from retrofit.report.markdown import MARK, to_markdown
from retrofit.report.results import SCHEMA, build_report
from retrofit.report.text import page

__all__ = ["build_report", "write_report"]


def write_report(run_dir: Path, force: bool = False) -> Path:
    """Writes report.json, report.md and report.html into a run folder, and returns the path of the last.

    The same files give the same bytes. Raises RetrofitError where the folder holds no run, and, unless
    `force`, where a file of one of these names is there that retrofit did not write.
    """
    places = {suffix: Path(run_dir) / f"{runfiles.REPORT}.{suffix}" for suffix in ("json", "md", "html")}
    foreign = [path.name for path in places.values() if path.exists() and not _ours(path)]
    if foreign and not force:
        raise RetrofitError(
            f"{run_dir} holds {', '.join(foreign)}, which retrofit did not write; move them away, or add --force"
        )
    document = build_report(Path(run_dir))
    content = page(document)
    texts = {
        "json": runfiles.dumps(document, indent=2) + "\n",
        "md": to_markdown(content),
        "html": to_html(content, document),
    }
    for suffix, text in texts.items():
        runfiles.write_text(places[suffix], text)
    return places["html"]


def _ours(path: Path) -> bool:
    """Whether a report file carries the mark of one that retrofit wrote."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return MARK in text[:500]
        content = json.loads(text)
    except (OSError, ValueError):
        return False
    family = SCHEMA.rpartition("/")[0]
    return isinstance(content, dict) and str(content.get("schema")).startswith(family)
