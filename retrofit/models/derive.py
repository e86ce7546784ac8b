"""Attention classes with one line put in: the installed forward plus the norm, as a subclass.

The forward is read from the installed library, and the line goes in after the one that makes k. Where that line is not
found exactly once the class is refused: the library is then not the one that this was written for. The subclasses
pickle by name: importing one from here makes it again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from retrofit.errors import ModelError

if TYPE_CHECKING:
    from retrofit.models.site import AttentionClass

_PREFIX = "Normed_"


def derived(kind: AttentionClass) -> type:
    """The subclass for one attention class. Raises ModelError where the installed source does not fit."""
    assert kind.after is not None
    return _derived(kind.path, kind.after, kind.q, kind.k)


def original(cls: type) -> type:
    """The library's own class behind one of ours; any other class is itself."""
    return cls.__mro__[1] if cls.__module__ == __name__ and cls.__name__.startswith(_PREFIX) else cls


@functools.cache
def _derived(path: str, after: str, q: str, k: str) -> type:
    module_name, _, class_name = path.rpartition(".")
    module = importlib.import_module(module_name)
    base: type = getattr(module, class_name)
    lines = textwrap.dedent(inspect.getsource(base.__dict__["forward"])).splitlines()
    at = [i for i, line in enumerate(lines) if line.strip().startswith(after)]
    library = module_name.partition(".")[0]
    version = getattr(sys.modules[library], "__version__", "unknown")
    if len(at) != 1 or any("super()" in line for line in lines):
        raise ModelError(
            f"{class_name} of {library} {version} is not laid out as expected ({after!r} stands {len(at)} times in its "
            f"forward), so that QK-Norm cannot be put in safely; install another version of {library}"
        )
    indent = lines[at[0]][: len(lines[at[0]]) - len(lines[at[0]].lstrip())]
    lines.insert(at[0] + 1, f"{indent}{q}, {k} = self.q_norm({q}), self.k_norm({k})")
    source = "\n".join(lines) + "\n"
    filename = f"<{path}.forward with QK-Norm>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), module.__dict__, namespace)
    name = _PREFIX + path.replace(".", "__")
    return type(name, (base,), {"forward": namespace["forward"], "__module__": __name__, "__qualname__": name})


def __getattr__(name: str) -> type:
    """Makes a subclass again when it is unpickled in a new process."""
    if name.startswith(_PREFIX):
        from retrofit.models import ATTENTION_CLASSES

        for kind in ATTENTION_CLASSES:
            if kind.after is not None and name == _PREFIX + kind.path.replace(".", "__"):
                return derived(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
