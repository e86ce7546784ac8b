"""Attention classes with one line put in: the installed forward plus the norm, as a subclass.

The forward is read from the installed library. Where a line that an edit leans on does not stand there exactly once,
the class is refused: the library is then not the one that the edit was written for. The subclasses pickle by name:
importing one from here makes it again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from retrofit.errors import ModelError

_PREFIX = "Normed"


@dataclass(frozen=True)
class Edit:
    """Where in a class's forward q and k are normed. Lines are named by how they begin."""

    after: str | None = None
    """The norm goes right after this line."""
    before: str | None = None
    """Or right before this one."""
    drop: str | None = None
    """This line is left out: the library's own use of its slots, where the norm moves elsewhere."""
    q: str = "q"
    k: str = "k"
    place: str = ""
    """Tells two edits of one class apart in the subclass's name."""


def original(cls: type) -> type:
    """The library's own class behind one of ours; any other class is itself."""
    return cls.__mro__[1] if cls.__module__ == __name__ and cls.__name__.startswith(_PREFIX) else cls


@functools.cache
def derived(path: str, edit: Edit) -> type:
    """The subclass of the class at `path` with the edit made. Raises ModelError where the installed source differs."""
    module_name, _, class_name = path.rpartition(".")
    module = importlib.import_module(module_name)
    base: type = getattr(module, class_name)
    lines = textwrap.dedent(inspect.getsource(_forward(base))).splitlines()

    def find(beginning: str) -> int:
        at = [i for i, line in enumerate(lines) if line.strip().startswith(beginning)]
        if len(at) != 1 or any("super()" in line for line in lines):
            library = module_name.partition(".")[0]
            version = getattr(sys.modules[library], "__version__", "unknown")
            raise ModelError(
                f"{class_name} of {library} {version} is not laid out as expected ({beginning!r} stands {len(at)} "
                f"times in its forward), so that QK-Norm cannot be put in safely; install another version of {library}"
            )
        return at[0]

    if edit.drop is not None:
        del lines[find(edit.drop)]
    at = find(edit.after) + 1 if edit.after is not None else find(edit.before or "")
    neighbour = lines[at - 1 if edit.after is not None else at]
    indent = neighbour[: len(neighbour) - len(neighbour.lstrip())]
    lines.insert(at, f"{indent}{edit.q}, {edit.k} = self.q_norm({edit.q}), self.k_norm({edit.k})")
    source = "\n".join(lines) + "\n"
    filename = f"<{path}.forward with QK-Norm>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), module.__dict__, namespace)
    name = _name(path, edit)
    return type(name, (base,), {"forward": namespace["forward"], "__module__": __name__, "__qualname__": name})


def _forward(base: type) -> Any:
    return inspect.unwrap(base.__dict__["forward"])


def _name(path: str, edit: Edit) -> str:
    return f"{_PREFIX}{edit.place}_{path.replace('.', '__')}"


def __getattr__(name: str) -> type:
    """Makes a subclass again when it is unpickled in a new process."""
    if name.startswith(_PREFIX):
        from retrofit.models import ATTENTION_CLASSES

        for kind in ATTENTION_CLASSES:
            for edit in (kind.edit, kind.after_rope):
                if edit is not None and name == _name(kind.path, edit):
                    return derived(kind.path, edit)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
