"""Writes the modeling file of a Hugging Face export: one file that computes the model without this package.

Its norm is the source of norms.py and qknorm.py, of which only what a forward pass reaches is taken; its attention is
the installed library's forward with one line put in, as models/derive.py makes it. Nothing is written twice by hand.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeGuard

from torch import nn
from transformers import PreTrainedModel

from retrofit import norms, qknorm
from retrofit.models import sites_of
from retrofit.models.derive import original

PREFIX = "QKNorm"
VARIANT = "qknorm"
"""In the name of the weights' file. No stock class looks for it, so that none takes the weights and drops the norms."""


@dataclass(frozen=True)
class Wrapped:
    """The classes of a model that the modeling file builds on."""

    model: type
    config: type
    tower: type | None
    """The model without its head, where it is another class."""
    inside: str
    """Where the tower lies in the model, such as `vit`; empty where site names are the same in both."""
    subconfig: str
    """Which part of the configuration the tower takes, such as `vision_config`; empty for all of it."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Wrapped:
        own, config = type(model), type(model.config)
        if hasattr(model, "timm_model"):
            from transformers import TimmWrapperModel

            return cls(own, config, None if own is TimmWrapperModel else TimmWrapperModel, "", "")
        if "For" not in own.__name__:
            return cls(own, config, None, "", "")
        first = sites_of(model)[0][0].name
        for name, child in model.named_children():
            if isinstance(child, PreTrainedModel) and first.startswith(f"{name}."):
                parts = (k for k in config.sub_configs if isinstance(child.config, type(getattr(model.config, k))))
                part = "" if isinstance(child.config, config) else next(parts)
                return cls(own, config, type(child), name, part)
        return cls(own, config, None, "", "")

    @property
    def classifies(self) -> bool:
        return self.model.__name__.endswith("ForImageClassification")

    @property
    def model_type(self) -> str:
        return f"{VARIANT}_{self.config.model_type}"  # type: ignore[attr-defined]

    @property
    def module(self) -> str:
        """The modeling file's name without its suffix."""
        return f"modeling_{self.model_type}"

    @property
    def auto_map(self) -> dict[str, str]:
        """As config.json tells transformers' auto classes where to look."""
        names = {"AutoConfig": self.config, "AutoModel": self.tower or self.model}
        names |= {"AutoModelForImageClassification": self.model} if self.classifies else {}
        return {auto: f"{self.module}.{PREFIX}{cls.__name__}" for auto, cls in names.items()}


def describe_sites(model: nn.Module, inside: str = "") -> dict[str, dict[str, Any]]:
    """What building the norms takes, by the name of the attention module below `inside`."""
    found = {}
    for site in sites_of(model)[0]:
        if site.norms is not None:
            q, k = site.norms
            found[site.name.removeprefix(f"{inside}." if inside else "")] = {
                "heads": [q.heads, k.heads],
                "head_dim": q.head_dim,
                "layout": q.layout,
                "attention_scale": q.attention_scale,
                "shifted": [q.shift is not None, k.shift is not None],
            }
    return found


def modeling_source(model: PreTrainedModel) -> str:
    """The modeling file of a retrofitted model of transformers, or of timm in its wrapper."""
    wrapped = Wrapped.of(model)
    normed = {type(s.module): original(type(s.module)) for s in sites_of(model)[0] if s.norms is not None}
    attention = {cls: base for cls, base in normed.items() if cls is not base}
    bases = {wrapped.config, wrapped.model, *([wrapped.tower] if wrapped.tower else [])}
    imports: dict[str, set[str]] = {}
    for cls in (*bases, *attention.values()):
        imports.setdefault(cls.__module__, set()).add(cls.__name__)
    forwards = {base: _forward(cls) for cls, base in attention.items()}
    for base, text in forwards.items():
        imports[base.__module__] |= _foreign(text, sys.modules[base.__module__])
    parts = [
        "\n".join(
            [
                _HEADER.format(model=wrapped.model.__name__, auto=list(wrapped.auto_map)[-1]),
                "",
                "from __future__ import annotations",
                "",
                "import math",
                "from dataclasses import dataclass",
                "from typing import Any, Literal",
                "",
                "import torch",
                "from torch import Tensor, nn",
                *(_from(module, names - _HAD) for module, names in sorted(imports.items())),
            ]
        ),
        *_reached([qknorm, norms], "HeadNorm"),
        *(_attention(base, text) for base, text in sorted(forwards.items(), key=lambda item: item[0].__name__)),
        _PLACE.format(classes=", ".join(f"{b.__name__}: {PREFIX}{b.__name__}" for b in attention.values())),
        _CONFIG.format(p=PREFIX, config=wrapped.config.__name__, model_type=json.dumps(wrapped.model_type)),
        _MIXIN.format(variant=json.dumps(VARIANT)),
        _model(wrapped, wrapped.model, wrapped.inside, ""),
        *([_model(wrapped, wrapped.tower, "", wrapped.subconfig)] if wrapped.tower else []),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


_HAD = {"torch", "nn", "Tensor", "math", "dataclass", "Any", "Literal"}

_HEADER = '''"""{model} with QK-Norm.

    model = {auto}.from_pretrained(DIR, trust_remote_code=True)

The norm is the one that the model was trained with; an attention's forward, if any stands below, is its library's own
(Apache-2.0) with one line put in. The weights' file has a name that stock classes do not look for, so that none of them
takes the weights and leaves the norm out. Written by retrofit (qknorm-retrofit).
"""'''

_PLACE = '''
NORMED = {{{classes}}}
"""The attention with the line that norms q and k, for a class that has no place for norms of its own."""


def place_norms(model: nn.Module, config: Any, inside: str) -> None:
    """Gives the attention modules that the configuration names their norms, whose weights are then loaded."""
    formula = QKNorm(**config.qk_norm["formula"])
    for name, facts in config.qk_norm["sites"].items():
        module = model.get_submodule(f"{{inside}}.{{name}}" if inside else name)
        common = {{key: facts[key] for key in ("head_dim", "layout", "attention_scale")}} | {{"scale_init": 1.0}}
        q, k = ((heads, shifted) for heads, shifted in zip(facts["heads"], facts["shifted"]))
        module.__class__ = NORMED.get(type(module), type(module))
        module.q_norm = HeadNorm(formula, "q", q[0], shifted=q[1], **common)
        module.k_norm = HeadNorm(formula, "k", k[0], shifted=k[1], **common)
'''

_CONFIG = '''
class {p}{config}({config}):
    """`qk_norm` holds the norm's formula and, by name, the attention modules that have it."""

    model_type = {model_type}
    qk_norm: Any = None
'''

_MIXIN = '''
class OwnFile:
    """Keeps the weights in a file of their own name, each under the name that it has in the model."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(*args, **kwargs | {{"variant": kwargs.get("variant") or {variant}}})

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        own = {{"variant": kwargs.get("variant") or {variant}, "save_original_format": False}}
        super().save_pretrained(*args, **kwargs | own)
'''


def _model(wrapped: Wrapped, cls: type, inside: str, subconfig: str) -> str:
    config = f"config.{subconfig}" if subconfig else "config"
    lines = [
        f"class {PREFIX}{cls.__name__}(OwnFile, {cls.__name__}):",
        f"    config_class = {PREFIX}{wrapped.config.__name__}",
        *([f"    base_model_prefix = {json.dumps(wrapped.inside)}"] if subconfig else []),
        "",
        f"    def __init__(self, config: {PREFIX}{wrapped.config.__name__}) -> None:",
        f"        super().__init__({config})",
        *(["        self.config = config"] if subconfig else []),
        f"        place_norms(self, config, {json.dumps(inside)})",
    ]
    return "\n".join(lines)


def _attention(base: type, forward: str) -> str:
    body = textwrap.indent(forward, "    ")
    return f'class {PREFIX}{base.__name__}({base.__name__}):\n    """{base.__name__} with q and k normed."""\n\n{body}'


def _forward(cls: type) -> str:
    """The forward of a derived class, as source without its type annotations' need for imports."""
    return textwrap.dedent(inspect.getsource(cls.forward))  # type: ignore[attr-defined]


def _foreign(text: str, module: ModuleType) -> set[str]:
    """The names of its module that a function uses. Annotations are not evaluated."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return {n for n in _names(tree) if n in vars(module) and not hasattr(builtins, n)}


def _from(module: str, names: Iterable[str]) -> str:
    line = f"from {module} import {', '.join(sorted(names))}"
    if len(line) <= 120:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"


def _names(tree: ast.AST) -> Iterator[str]:
    """Names that are read, and attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def _reached(modules: list[ModuleType], root: str) -> list[str]:
    """The top-level definitions of `modules` that `root` needs, as source; of a class only the methods needed."""
    sources = [inspect.getsource(module) for module in modules]
    trees = [ast.parse(source) for source in sources]
    top = {name: node for tree in trees for node in tree.body for name in _defined(node)}
    methods = {m.name: m for n in top.values() if isinstance(n, ast.ClassDef) for m in n.body if _is_method(m)}
    wanted, found = [root], set()
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        node = methods.get(name) or top.get(name)
        if isinstance(node, ast.ClassDef):
            parts = [part for part in node.body if not _is_method(part)]
            wanted += [n for part in (*node.bases, *parts) for n in _names(part)]
            wanted += [m.name for m in node.body if _is_method(m) and m.name in ("__init__", "forward")]
        elif node is not None:
            wanted += _names(node)
    nodes = [methods.get(name) or top.get(name) for name in sorted(found)]
    used = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    read = {a.attr for n in used for a in ast.walk(n) if isinstance(a, ast.Attribute)}
    taken = []
    for source, tree in zip(sources, trees, strict=True):
        for node in tree.body:
            if any(name in found for name in _defined(node)):
                dropped = _unneeded(node, found, read) if isinstance(node, ast.ClassDef) else []
                taken.append((isinstance(node, ast.ClassDef | ast.FunctionDef), _segment(source, node, dropped)))
    constants = "\n".join(text for defines, text in taken if not defines)
    return [constants, *(text for defines, text in taken if defines)]


def _unneeded(node: ast.ClassDef, found: set[str], read: set[str]) -> list[ast.stmt]:
    """The methods of a class that nothing reaches, and of a plain record the fields that nothing reads."""
    gone: list[ast.stmt] = [m for m in node.body if _is_method(m) and m.name not in found]
    if node.decorator_list:
        fields = [i for i, n in enumerate(node.body) if isinstance(n, ast.AnnAssign)]
        for i in fields:
            target = node.body[i].target  # type: ignore[attr-defined]
            if target.id not in read:
                gone += [n for n in node.body[i : i + 2] if n is node.body[i] or isinstance(n, ast.Expr)]
    return gone


def _is_method(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _segment(source: str, node: ast.stmt, dropped: list[Any]) -> str:
    """The lines of a definition, decorators included, without those of `dropped`."""

    def lines(n: Any) -> range:
        return range(min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]), n.end_lineno + 1)

    text = source.splitlines()
    gone_args: set[int] = set()
    if isinstance(node, ast.ClassDef) and isinstance(end := node.body[0].end_lineno, int):
        listed = text[node.lineno - 1 : end - 1]
        if "    Args:" in listed:  # the constructor tells its parameters itself
            gone_args = set(range(node.lineno + listed.index("    Args:") - 1, end))
    after = {n.end_lineno + 1 for n in dropped if n.end_lineno < len(text) and not text[n.end_lineno].strip()}
    gone = after.union(gone_args, *map(lines, dropped))
    if isinstance(node, ast.ClassDef) and not any(_is_method(n) and n not in dropped for n in node.body):
        said = node.body[0]  # of a class that is left without methods the docstring speaks of them
        text[said.lineno - 1] = text[said.lineno - 1].partition(". ")[0] + '."""'
        gone |= set(lines(said)[1:])
    return "\n".join(text[i - 1] for i in lines(node) if i not in gone and i <= len(text)).rstrip()
