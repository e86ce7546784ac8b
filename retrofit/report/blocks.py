"""What a report is made of, before it is Markdown or HTML. Text here is plain: each form escapes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Prose:
    text: str


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """So many columns from the left hold words and are set flush left; the others hold numbers."""


@dataclass(frozen=True)
class Figure:
    """A figure of figures.py, by its name there."""

    name: str
    caption: str
    alt: str
    """What it shows, in words and numbers, for those who do not see it."""


@dataclass(frozen=True)
class Listing:
    caption: str
    lines: tuple[str, ...]


Block: TypeAlias = Prose | Points | Table | Figure | Listing


@dataclass(frozen=True)
class Section:
    slug: str
    title: str
    blocks: tuple[Block, ...]


LIMITS = "What these numbers cannot show"


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    headline: str
    sentences: tuple[str, ...]
    limits: tuple[str, ...]
    """Shown under the heading LIMITS."""
    sections: tuple[Section, ...]
    provisional: bool = False
    """Whether the verdict stands on so few pairs that it may not last."""
