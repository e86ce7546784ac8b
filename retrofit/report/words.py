"""Numbers as the report writes them, everywhere alike. What is missing is a dash."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "–"
_MINUS = "\N{MINUS SIGN}"


def rate(lr: float) -> str:
    """A learning rate as it stands in a folder's name."""
    return f"{lr:g}"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands set apart."""
    if value is None:
        return NONE
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", _MINUS)
    text = f"{value:.{digits}g}"
    mantissa, e, exponent = text.partition("e")
    return mantissa.replace("-", _MINUS) + e + exponent


def fixed(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}".replace("-", _MINUS)


def signed(value: float | None, digits: int = 3) -> str:
    if value is None:
        return NONE
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", _MINUS)


def accuracy(share: float | None) -> str:
    return NONE if share is None else f"{fixed(100 * share, 1)} %"


def points(share: float | None) -> str:
    """A difference of accuracies in percentage points, as a table holds it."""
    return NONE if share is None else signed(100 * share, 1)


def difference(share: float | None, sign: bool = True) -> str:
    """A difference of accuracies, as a sentence says it."""
    if share is None:
        return NONE
    return f"{points(share) if sign else f'{100 * share:.1f}'} points"


def interval(bounds: Sequence[float] | None, scale: float = 100.0, digits: int = 1) -> str:
    if not bounds:
        return NONE
    return f"{signed(scale * bounds[0], digits)} to {signed(scale * bounds[1], digits)}"


def band(level: float) -> str:
    return f"{100 * level:.4g} %"


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def joined(parts: Sequence[str], by: str) -> str:
    return by.join(p for p in parts if p)


def listed(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
