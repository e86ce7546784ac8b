"""From what a recipe says to labelled splits that agree on their classes and do not overlap."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrofit import recipe
from retrofit.data.images import Images, ranked
from retrofit.data.sources import ROLES, UNLABELLED, Split, natural, open_source
from retrofit.errors import DataError, nearest

LAYOUT = "DIR/cat/1.jpg or DIR/train/cat/1.jpg (one folder a class), or a parquet file with a column `label`"


@dataclass(frozen=True)
class Splits:
    """Three disjoint splits with the same classes."""

    train: Images
    validation: Images
    test: Images

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes


def open_images(source: str, n: int | None = None) -> Images:
    """At most n images of a source, evenly over its classes; of its training split where it has splits.

    Images without labels are of one class, "". Raises DataError.
    """
    return _pick(open_source(source), "train", source).open().take(n, "images")


def open_splits(data: recipe.Data) -> Splits:
    """The splits of a recipe. One that it does not name is the source's own, else a tenth of train.

    Raises DataError, among others where a split has a class that train lacks.
    """
    opened = {role: _labelled(split) for role, split in _chosen(data).items()}
    train, classes = opened["train"], opened["train"].classes
    if len(classes) < 2:
        raise DataError(f"all training images of {data.source} are of one class, {classes[0]}; training needs {LAYOUT}")
    tenth = max(1, len(train) // 10)
    for role in ("validation", "test"):
        if role in opened:
            opened[role] = _with_classes(opened[role], classes, role)
        else:
            opened[role], train = _divided(train, tenth, role)
    return Splits(
        train.take(data.train_images, "train"),
        opened["validation"].take(data.validation_images, "validation"),
        opened["test"].take(data.test_images, "test"),
    )


def _chosen(data: recipe.Data) -> dict[str, Split]:
    """What the recipe names for each role and, beside the source's training split, the source's own."""
    own = open_source(data.source)
    named = {"train": data.train, "validation": data.validation, "test": data.test}
    chosen = {role: _named(own, data.source, role, name) for role, name in named.items() if name is not None}
    if "train" not in chosen:
        chosen["train"] = _pick(own, "train", data.source)
    if chosen["train"] in own.values():
        for role in ("validation", "test"):
            split = _own(own, role)
            if role not in chosen and split is not None and split not in chosen.values():
                chosen[role] = split
    for split in chosen.values():
        same = [f"data.{role}" for role in ROLES if chosen.get(role) == split]
        if len(same) > 1:
            raise DataError(f"{' and '.join(same)} are the same images: {split.origin}")
    return chosen


def _own(splits: Mapping[str, Split], role: str) -> Split | None:
    return next((splits[name] for alias in ROLES[role] for name in splits if name.lower() == alias), None)


def _pick(splits: Mapping[str, Split], role: str, source: str) -> Split:
    """The split of that role, else the only one."""
    split = _own(splits, role) or (next(iter(splits.values())) if len(splits) == 1 else None)
    if split is None:
        raise DataError(f"{source} has no {role} split; data.{role} can name one of: {', '.join(splits)}")
    return split


def _named(own: Mapping[str, Split], source: str, role: str, name: str) -> Split:
    """What `data.train` and its like name: a split of the source, else a source of its own."""
    if name in own:
        return own[name]
    try:
        return _pick(open_source(name), role, name)
    except DataError as error:
        if os.sep in name or Path(name).suffix:
            raise
        splits = f"{nearest(name, own)} (splits: {', '.join(own)})"
        raise DataError(f"data.{role}: {source} has no split {name}{splits}; {error}") from None


def _labelled(split: Split) -> Images:
    images = split.open()
    if images.classes == UNLABELLED:
        raise DataError(f"{split.origin} has no labels; training needs {LAYOUT}")
    return images


def _with_classes(images: Images, classes: tuple[str, ...], role: str) -> Images:
    """The same images with train's class ids, matched by name."""
    position = {name: i for i, name in enumerate(classes)}
    labels = np.array([position.get(name, -1) for name in images.classes], np.int64)[images.labels]
    unknown = sorted({images.classes[i] for i in images.labels[labels < 0]}, key=natural)
    if unknown:
        raise DataError(f"the {role} split has classes that train lacks: {_few(unknown)}; train has {_few(classes)}")
    return replace(images, labels=labels, classes=classes)


def _few(names: tuple[str, ...] | list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _divided(images: Images, n: int, key: str) -> tuple[Images, Images]:
    """n images with the classes in proportion, and the rest, where a class of few images stays whole."""
    if n >= len(images):
        raise DataError(f"{len(images)} training images are too few to take {n} for data.{key}; name that split")
    shuffled, rank, count = ranked(images.labels, key)
    order = shuffled[np.argsort((rank + 0.5) / count, kind="stable")]
    return images.subset(np.sort(order[:n])), images.subset(np.sort(order[n:]))
