"""The images of one split: kept encoded, and decoded one at a time to upright RGB."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from retrofit.data.keyed import keyed_seed
from retrofit.errors import DataError

Ints = npt.NDArray[np.int64]


class Encoded(Protocol):
    """Encoded images by row."""

    def read(self, row: int) -> bytes: ...

    def name(self, row: int) -> str:
        """Where a person finds it."""
        ...


@dataclass(frozen=True)
class Files:
    paths: list[Path]

    def read(self, row: int) -> bytes:
        return self.paths[row].read_bytes()

    def name(self, row: int) -> str:
        return str(self.paths[row])


@dataclass(frozen=True)
class Column:
    """Bytes, or struct{bytes, path} as `datasets` writes it, where bytes may be null and path a file."""

    column: pa.ChunkedArray
    origin: str

    def read(self, row: int) -> bytes:
        value = self.column[row].as_py()
        if isinstance(value, dict):
            path = value.get("path")
            value = value["bytes"]
            if value is None and path and os.path.isfile(path):
                return Path(path).read_bytes()
        if value is None:
            raise ValueError("it has no bytes")
        return bytes(value)

    def name(self, row: int) -> str:
        return f"{self.origin}, row {row}"


@dataclass(frozen=True, eq=False)
class Images:
    """The labelled images of one split."""

    ids: list[str] = field(repr=False)
    """Unique in the split, and the same on every machine: the path inside the source, or the row."""
    labels: Ints = field(repr=False)
    """[len]: index into `classes`."""
    classes: tuple[str, ...]
    _encoded: Encoded = field(repr=False)
    _rows: Ints = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, i: int) -> Image.Image:
        """Image i: RGB, upright, transparency on white. Raises DataError that names an unreadable one."""
        encoded = self._read(i)
        try:
            return _decoded(encoded)
        except Exception as error:  # Pillow lets through whatever a damaged file makes its decoders raise
            raise self._unreadable(i, error) from None

    def subset(self, indices: Iterable[int]) -> Images:
        chosen = np.fromiter(indices, np.int64)
        ids = [self.ids[i] for i in chosen]
        return replace(self, ids=ids, labels=self.labels[chosen], _rows=self._rows[chosen])

    def take(self, n: int | None, key: str) -> Images:
        """n images, evenly over the classes, chosen by the key alone, in ascending order. None: all."""
        if n is None or n >= len(self):
            return self
        shuffled, rank, _ = ranked(self.labels, key)
        return self.subset(np.sort(shuffled[np.argsort(rank, kind="stable")[:n]]))

    def fingerprint(self) -> str:
        """sha256 over classes, ids, labels and encoded bytes."""
        digest = hashlib.sha256(json.dumps([self.classes, self.ids, self.labels.tolist()]).encode())
        for i in range(len(self)):
            encoded = self._read(i)
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        return digest.hexdigest()

    def _read(self, i: int) -> bytes:
        try:
            return self._encoded.read(int(self._rows[i]))
        except (OSError, ValueError) as error:
            raise self._unreadable(i, error) from None

    def _unreadable(self, i: int, error: Exception) -> DataError:
        where = self._encoded.name(int(self._rows[i]))
        why = "its kind is none that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
        return DataError(f"{where} cannot be read as an image: {why or type(error).__name__}")


def ranked(labels: Ints, key: str) -> tuple[Ints, Ints, Ints]:
    """[len] each: the indices in keyed disorder, the rank of each in its class, the size of its class."""
    shuffled = np.random.default_rng(keyed_seed("choose", key)).permutation(len(labels))
    found = labels[shuffled]
    counts = np.bincount(found)
    starts = np.cumsum(counts) - counts
    rank = np.empty(len(labels), np.int64)
    rank[np.argsort(found, kind="stable")] = np.arange(len(labels)) - np.repeat(starts, counts)
    return shuffled, rank, counts[found]


def _decoded(encoded: bytes) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(encoded))
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip at 255
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; store 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")
