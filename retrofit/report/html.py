"""The page as one HTML file that needs nothing else: styles and figures inside, no script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from retrofit.report import figures
from retrofit.report.blocks import LIMITS, Page
from retrofit.report.markdown import MARK


def to_html(page: Page, document: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("retrofit.report", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html").render(
        mark=Markup(MARK),
        page=page,
        limits=LIMITS,
        kind=lambda block: type(block).__name__,
        panels=lambda figure: figures.panels(figure.name, document),
        legend=lambda figure: figures.legend(figure.name, document),
        marks=figures.MARKS,
        classes=_classes,
        svg=Markup,  # drawn here, escaped by matplotlib
    )


def _classes(cell: str, words: bool) -> Markup:
    """The class attribute of a cell: words flush left, long text may wrap, decided verdicts stand out."""
    names = [
        name
        for name, holds in (
            ("w", words),
            ("long", words and len(cell) > 36),
            ("decided", cell in ("better", "worse", "practically equal")),
        )
        if holds
    ]
    return Markup(f' class="{" ".join(names)}"') if names else Markup("")
