"""Reads a report's page: as HTML, and as a browser shows it at a given width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
_MEASURE = """
function measured(frame) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth, found = [], blank = [];
  const shown = (node) => { const r = node.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
  const name = (node) => node.tagName + " " + (node.textContent || "").trim().slice(0, 40);
  if (page.documentElement.scrollWidth > width) found.push("the page, " + page.documentElement.scrollWidth);
  for (const node of page.body.querySelectorAll("*")) {
    if (node.closest(".scroll, pre, svg")) continue;
    const r = node.getBoundingClientRect();
    if (r.width && (r.right > width + 1 || r.left < -1)) found.push(name(node));
  }
  for (const drawing of page.querySelectorAll("svg")) {
    const panel = drawing.getBoundingClientRect();
    if (!shown(drawing) || drawing.querySelectorAll("path, use, image, text").length < 5) blank.push(name(drawing));
    for (const text of drawing.querySelectorAll("text")) {
      const r = text.getBoundingClientRect();
      if (r.left < panel.left - 2 || r.right > panel.right + 2 || r.top < panel.top - 2 || r.bottom > panel.bottom + 2)
        found.push("in a drawing: " + name(text));
    }
    for (const image of drawing.querySelectorAll("image")) if (!shown(image)) blank.push("an image");
  }
  for (const node of page.querySelectorAll("h1, .verdict, .limits, section, table, figure, figcaption, .legend"))
    if (!shown(node) || !node.textContent.trim()) blank.push(name(node));
  return {width, height: page.documentElement.scrollHeight, overflowing: found, blank,
    drawings: page.querySelectorAll("svg").length, tables: page.querySelectorAll("table").length};
}
addEventListener("load", () => {
  const all = [...document.querySelectorAll("iframe")].map(measured);
  document.body.innerHTML = "<pre id=measured></pre>";
  document.getElementById("measured").textContent = JSON.stringify(all);
});
"""


@dataclass(frozen=True)
class Seen:
    """A page at one width, in CSS pixels."""

    width: int
    height: int
    overflowing: list[str]
    """What reaches out of the page, or out of its drawing."""
    blank: list[str]
    drawings: int
    tables: int


def look(path: Path, widths: tuple[int, ...]) -> list[Seen]:
    """The page as the browser lays it out at each width."""
    content = html.escape(path.read_text(encoding="utf-8"), quote=True)
    frames = "".join(f'<iframe style="width:{w}px;height:800px;border:0" srcdoc="{content}"></iframe>' for w in widths)
    with tempfile.TemporaryDirectory() as place:
        around = Path(place) / "around.html"
        around.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}<script>{_MEASURE}</script></body>")
        dom = _browse(place, "--dump-dom", str(around))
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return [Seen(**seen) for seen in json.loads(html.unescape(found[1]))]


def picture(path: Path, width: int, height: int) -> Any:
    """The top of the page as an image [height, width, 3]."""
    import numpy as np
    from PIL import Image

    with tempfile.TemporaryDirectory() as place:
        around, shot = Path(place) / "around.html", Path(place) / "shot.png"
        frame = f'<iframe style="width:{width}px;height:{height}px;border:0" src="file://{path.resolve()}"></iframe>'
        around.write_text(f'<!doctype html><body style="margin:0">{frame}</body>')
        _browse(place, f"--window-size={width},{height}", f"--screenshot={shot}", str(around))
        return np.asarray(Image.open(shot).convert("RGB"))


def _browse(place: str, *options: str) -> str:
    assert BROWSER is not None
    *options, target = options
    command = [BROWSER, *_OPTIONS, f"--user-data-dir={place}/profile", *options, f"file://{target}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Shown(HTMLParser):
    """The visible text, the tags and the attributes of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._hidden = 0
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._hidden += tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "style"

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else f"{data} "
