"""Attention classes with one line put in: the installed source plus the norm, as a subclass.

The source is read from the installed library. Where a line that an edit leans on does not stand there exactly once,
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
_WRITTEN_FOR = {"timm": "1.0.31", "transformers": "5.24"}
"""The versions whose source the tables of attention classes were written from."""


@dataclass(frozen=True)
class Edit:
    """Where in a class's source q and k are normed. Lines are named by how they begin."""

    after: str | None = None
    """The norm goes right after this line."""
    before: str | None = None
    """Or right before this one."""
    instead: str | None = None
    """Or in its place, where one line makes q and scales it; named whole."""
    drop: str | None = None
    """This line is left out: the library's own use of its slots, where the norm moves elsewhere."""
    q: str = "q"
    k: str = "k"
    line: str | None = None
    """What goes in, where q and k do not lie as [..., tokens, channels] under names of their own."""
    method: str = "forward"
    """The method that computes attention."""
    also: Edit | None = None
    """A second edit of the class: of another branch, of another method, or of a later use of q as it was."""
    place: str = ""
    """Tells two edits of one class apart in the subclass's name."""

    @property
    def norm(self) -> str:
        """The line that goes in."""
        return self.line or f"{self.q}, {self.k} = self.q_norm({self.q}), self.k_norm({self.k})"

    @property
    def whole(self) -> tuple[Edit, ...]:
        """This edit and what comes with it."""
        return (self, *(self.also.whole if self.also is not None else ()))


def original(cls: type) -> type:
    """The library's own class behind one of ours; any other class is itself."""
    return cls.__mro__[1] if cls.__module__ == __name__ and cls.__name__.startswith(_PREFIX) else cls


def derived(path: str, edit: Edit) -> type:
    """The subclass of the class at `path` with the edit made. Raises ModelError where the installed source differs."""
    module_name, _, class_name = path.rpartition(".")
    base: type = getattr(importlib.import_module(module_name), class_name)
    return _derived(path, edit, tuple(getattr(base, one.method, None) for one in edit.whole))


@functools.cache
def _derived(path: str, edit: Edit, functions: tuple[Any, ...]) -> type:
    """`functions` are the methods as they stand now, so that one that is replaced later is read anew."""
    module_name, _, class_name = path.rpartition(".")
    module = importlib.import_module(module_name)
    base: type = getattr(module, class_name)
    sources: dict[str, list[str]] = {}
    for one, function in zip(edit.whole, functions, strict=True):
        if one.method not in sources:
            sources[one.method] = _source(base, one.method, function)
        _make(sources[one.method], one, base)
    name = _name(path, edit)
    namespace: dict[str, Any] = {}
    for method, lines in sources.items():
        source = "\n".join(lines) + "\n"
        filename = f"<{name}.{method}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
        exec(compile(source, filename, "exec"), module.__dict__, namespace)
    methods = {method: namespace[method] for method in sources}
    return type(name, (base,), {**methods, "__module__": __name__, "__qualname__": name})


def unexpected(cls: type, what: str) -> ModelError:
    """That the installed library's class is not the one that its line in the table was written for."""
    library = cls.__module__.partition(".")[0]
    version = getattr(sys.modules[library], "__version__", "unknown")
    return ModelError(
        f"{cls.__name__} of {library} {version} is not laid out as expected ({what}), so that QK-Norm cannot be put in "
        f"safely; it can with {library} {_WRITTEN_FOR[library]}"
    )


def check_slots(cls: type) -> None:
    """Raises ModelError unless the class calls its slots, q_norm and k_norm, once each."""
    for slot, calls in _slots(cls, cls.forward).items():  # type: ignore[attr-defined]
        if calls != 1:
            raise unexpected(cls, f"its forward calls {slot} {calls} times")


@functools.cache
def _slots(cls: type, forward: Any) -> dict[str, int]:
    source = "\n".join(_source(cls, "forward", forward))
    return {slot: source.count(f"self.{slot}(") for slot in ("q_norm", "k_norm")}


def _source(base: type, method: str, function: Any) -> list[str]:
    """The lines of a method. Raises ModelError where they do not stand in the class's own module."""
    if function is None:
        return []
    function = inspect.unwrap(function)
    own = getattr(function, "__globals__", None) is vars(sys.modules[base.__module__])
    try:
        source = inspect.getsource(function) if own else None
    except (OSError, TypeError):
        source = None
    if source is None:
        raise unexpected(base, f"its {method} has been replaced, or its source cannot be read")
    return textwrap.dedent(source).splitlines()


def _make(lines: list[str], edit: Edit, base: type) -> None:
    """Makes one edit in the lines of a method."""

    def find(beginning: str, *, whole: bool = False) -> int:
        stripped = [line.strip() for line in lines]
        at = [i for i, line in enumerate(stripped) if (line == beginning if whole else line.startswith(beginning))]
        if len(at) != 1 or any("super()" in line for line in lines):
            raise unexpected(base, f"{beginning!r} stands {len(at)} times in its {edit.method}")
        return at[0]

    if edit.drop is not None:
        del lines[find(edit.drop)]
    beginning = edit.after or edit.before or edit.instead
    assert beginning is not None, "an edit needs a line to stand at"
    at = find(beginning, whole=edit.instead is not None)
    neighbour = lines[at]
    norm = neighbour[: len(neighbour) - len(neighbour.lstrip())] + edit.norm
    if edit.instead is not None:
        lines[at] = norm
    else:
        lines.insert(at + 1 if edit.after is not None else at, norm)


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
