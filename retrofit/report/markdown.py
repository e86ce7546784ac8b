"""The page as Markdown, for a pull request. Figures, drawn only in report.html, are told in words."""

from __future__ import annotations

import re

from retrofit.report.blocks import LIMITS, Block, Figure, Listing, Page, Points, Prose, Table

MARK = "<!-- written by `retrofit report` from the files of its folder; a new report takes its place -->"


def to_markdown(page: Page) -> str:
    parts = [MARK, f"# {_escape(page.title)}", _escape(page.subtitle), f"## {_escape(page.headline)}"]
    parts += [_escape(s) for s in page.sentences]
    parts += [f"**{LIMITS}**", _block(Points(page.limits))] if page.limits else []
    for section in page.sections:
        parts += [f"## {_escape(section.title)}", *map(_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Prose):
        return _escape(block.text)
    if isinstance(block, Points):
        return "\n".join(f"- {_escape(item)}" for item in block.items)
    if isinstance(block, Figure):
        return f"*Figure, in report.html: {_escape(block.caption)}* {_escape(block.alt)}"
    if isinstance(block, Listing):
        fence = "`" * max(3, 1 + max((len(run) for line in block.lines for run in re.findall("`+", line)), default=0))
        return "\n".join([f"**{_escape(block.caption)}**", "", fence, *block.lines, fence])
    return _table(block)


def _table(table: Table) -> str:
    rule = "|".join(" :-- " if i < table.words else " --: " for i in range(len(table.columns)))
    head, *rows = ("| " + " | ".join(map(_escape, row)) + " |" for row in (table.columns, *table.rows))
    return "\n".join([f"**{_escape(table.caption)}**", "", head, f"|{rule}|", *rows])


def _escape(text: str) -> str:
    """Plain text as Markdown shows it unchanged. `_` within a word and backticks around code may stay."""
    text = re.sub(r"([\\|*<>\[\]&~])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"^([#+=-])", r"\\\1", re.sub(r"^([0-9]+)([.)])(?!\S)", r"\1\\\2", text))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
