"""What a source holds: `nano`, `hf/ID`, `hf/ID:CONFIG`, a folder of images or parquet files, FILE.parquet."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retrofit.data.images import Column, Files, Images, Ints
from retrofit.errors import DataError, nearest
from retrofit.models.hub import work_offline_without_network

log = logging.getLogger(__name__)

SOURCES = "nano, hf/ID, a folder of images (one folder a class) or of parquet files, FILE.parquet"
ROLES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
IMAGE_COLUMNS = ("image", "img", "picture", "photo")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "category")
ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
UNLABELLED: tuple[str, ...] = ("",)
"""The classes of images that have no labels."""


@dataclass(frozen=True)
class Split:
    """A split that is not read yet. Two of the same origin are equal."""

    origin: str
    open: Callable[[], Images] = field(compare=False)


def open_source(source: str) -> dict[str, Split]:
    """The splits of a source, by their names there. Raises DataError that says what a source can be."""
    if source == "nano":
        return _folder(Path(str(files("retrofit"))) / "assets" / "fashion_mnist")
    if source.startswith("hf/"):
        return _hub(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file() and path.suffix == ".parquet":
        return {"train": Split(str(path.resolve()), partial(_parquet, [path]))}
    if path.exists():
        raise DataError(f"{source} is not a parquet file; images come from: {SOURCES}")
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    there = [p.name for p in missing.parent.iterdir()] if missing.parent.is_dir() else []
    raise DataError(f"{missing} is missing (images come from: {SOURCES}){nearest(missing.name, [*there, 'nano'])}")


def natural(name: str) -> tuple[list[int | str], str]:
    """Sorting key that puts "2" before "10"."""
    return [int(part) if i % 2 else part.lower() for i, part in enumerate(re.split(r"([0-9]+)", name))], name


# Folders


def _visible(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folders and the files in a folder, without hidden ones, such as .ipynb_checkpoints."""
    try:
        entries = sorted(folder.iterdir(), key=lambda p: natural(p.name))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}") from None
    entries = [p for p in entries if not p.name.startswith(".")]
    return [p for p in entries if p.is_dir()], [p for p in entries if p.is_file()]


def _folder(root: Path) -> dict[str, Split]:
    """Parquet files named after their splits, or split folders of class folders, or class folders."""
    folders, loose = _visible(root)
    shards: dict[str, list[Path]] = {}
    for path in loose:
        if path.suffix == ".parquet":
            shards.setdefault(re.split(r"[-_.]?[0-9]", path.stem)[0], []).append(path)
    if shards:
        return {name: Split(str(p[0].resolve()), partial(_parquet, p)) for name, p in shards.items()}
    aliases = {alias for names in ROLES.values() for alias in names}
    found = {p.name.lower() for p in folders} & aliases
    if found.intersection(ROLES["train"]) or (found and len(found) == len(folders)):
        return {p.name: Split(str(p.resolve()), partial(_image_folder, p)) for p in folders}
    return {"train": Split(str(root.resolve()), partial(_image_folder, root))}


def _image_folder(root: Path) -> Images:
    """One class a folder, with whatever lies below it; without folders, images without labels."""
    folders, loose = _visible(root)
    skipped = loose if folders else []
    paths: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders or [root]):
        below = list(_below(folder))
        found = [p for p in below if p.suffix.lower() in ENDINGS]
        skipped += [p for p in below if p.suffix.lower() not in ENDINGS]
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise DataError(f"{root} holds no images ({' '.join(ENDINGS)})")
    for label in sorted({*range(len(folders))} - {*labels}):
        log.warning("%s holds no images; it is kept as a class", folders[label])
    if skipped:
        log.warning("%d files in %s are no images of a class, such as %s", len(skipped), root, skipped[0])
    ids = [_text(p.relative_to(root)) for p in paths]
    classes = tuple(_text(p.relative_to(root)) for p in folders) or UNLABELLED
    return Images(ids, np.array(labels, np.int64), classes, Files(paths), np.arange(len(paths)))


def _text(path: Path) -> str:
    """A name as text, where bytes that are none (an old disk's Latin-1) become escapes."""
    return os.fsencode(path.as_posix()).decode(errors="backslashreplace")


def _below(folder: Path) -> Iterator[Path]:
    folders, loose = _visible(folder)
    yield from loose
    for inner in folders:
        yield from _below(inner)


# Tables


def _parquet(paths: Sequence[Path]) -> Images:
    """The images of one split, in one file or several."""
    origin = str(paths[0] if len(paths) == 1 else paths[0].parent)
    try:
        schema = pq.read_schema(paths[0])
        features = _features(schema)
        image, label = _columns(schema, features, origin)
        wanted = [name for name in (image, label) if name is not None]
        # In small pieces, since Arrow cannot read nested data of more than 2 GB at once.
        pieces = [piece for p in paths for piece in pq.ParquetFile(p).iter_batches(1024, columns=wanted)]
        table = pa.Table.from_batches(pieces, None if pieces else pa.schema([schema.field(n) for n in wanted]))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{origin} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    return _tabled(table, image, label, features, origin)


def _hub(source: str) -> dict[str, Split]:
    work_offline_without_network()
    from datasets import load_dataset  # only now, since it reads whether to work offline when it is imported

    name, _, config = source.removeprefix("hf/").partition(":")
    try:
        loaded = load_dataset(name, config or None)
    except Exception as error:  # the hub, the network, the cache and the builders each have kinds of their own
        cause = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"{source} cannot be loaded: {cause}. Without the hub, name a local folder or FILE.parquet "
            "instead; where the cache already holds it, set HF_HUB_OFFLINE=1"
        ) from None

    def read(split: str) -> Images:
        table, features = loaded[split].with_format("arrow")[:], loaded[split].features.to_dict()
        origin = f"{source}, split {split}"
        image, label = _columns(table.schema, features, origin)
        return _tabled(table, image, label, features, origin)

    return {split: Split(f"{source}, split {split}", partial(read, split)) for split in loaded}


def _features(schema: pa.Schema) -> dict[str, Any]:
    """The features that `datasets` wrote into the schema; none where another tool wrote the file."""
    try:
        return dict(json.loads(schema.metadata[b"huggingface"])["info"]["features"])
    except (TypeError, KeyError, ValueError):
        return {}


def _columns(schema: pa.Schema, features: dict[str, Any], origin: str) -> tuple[str, str | None]:
    """Names of the image column and of the label column, if there is one."""

    def encoded(kind: pa.DataType) -> bool:
        if pa.types.is_struct(kind):
            return "bytes" in (f.name for f in kind)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    images = [f.name for f in schema if encoded(f.type)]
    if not images:
        there = ", ".join(f"{f.name} ({f.type})" for f in schema)
        raise DataError(f"{origin} needs a column of encoded images, such as image: {{bytes, path}}; it has {there}")
    image = next((name for name in IMAGE_COLUMNS if name in images), images[0])
    declared = [n for n, f in features.items() if isinstance(f, dict) and f.get("_type") == "ClassLabel"]
    return image, next((name for name in (*LABEL_COLUMNS, *declared) if name in schema.names), None)


def _tabled(table: pa.Table, image: str, label: str | None, features: dict[str, Any], origin: str) -> Images:
    n = len(table)
    if n == 0:
        raise DataError(f"{origin} holds no images")
    labels, classes = np.zeros(n, np.int64), UNLABELLED
    if label is not None:
        labels, classes = _labels(table.column(label), features.get(label), origin)
    column = table.column(image)
    paths: list[str | None] = []
    if pa.types.is_struct(column.type) and "path" in (f.name for f in column.type):
        paths = pc.struct_field(column, "path").to_pylist()
    # An absolute path says where this machine's cache lies: no name for an image.
    named = len(set(paths)) == n and all(p and not os.path.isabs(p) for p in paths)
    ids = [str(p) if named else f"{i:05d}" for i, p in enumerate(paths or [None] * n)]
    return Images(ids, labels, classes, Column(column, origin), np.arange(n))


def _labels(column: pa.ChunkedArray, feature: Any, origin: str) -> tuple[Ints, tuple[str, ...]]:
    """[n] class ids, and class names: those the file declares, else the values in natural order."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if column.null_count or pa.types.is_floating(kind) or pa.types.is_nested(kind):
        raise DataError(f"{origin}: labels must be whole numbers or names, one an image; they are {column.type}")
    values = column.to_pylist()
    names = feature.get("names") if isinstance(feature, dict) else None
    if names and pa.types.is_integer(kind):
        labels = np.array(values, np.int64)
        if labels.min() < 0 or labels.max() >= len(names):
            found = f"{labels.min()} to {labels.max()} for {len(names)} classes"
            raise DataError(f"{origin}: labels are {found}; name a split that has labels")
        return labels, tuple(str(name) for name in names)
    texts = [str(value) for value in values]
    classes = tuple(sorted(set(texts), key=natural))
    position = {name: i for i, name in enumerate(classes)}
    return np.array([position[text] for text in texts], np.int64), classes
