"""retrofit.data, on made images: what a source may be, what is refused, that batches hang on keys alone."""

from __future__ import annotations

import gzip
import io
import logging
import os
import pickle
import random
from collections.abc import Iterable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform

from retrofit.data import (
    Batch,
    Images,
    eval_batches,
    keyed_rng,
    keyed_seed,
    open_images,
    open_splits,
    steps_per_epoch,
    train_batches,
)
from retrofit.data.images import Files
from retrofit.errors import DataError
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import Data

SHARED = Path(__file__).parents[2] / "shared" / "data"
PREPROCESS = Preprocess(16, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3), "bilinear", 0.875)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def picture(i: int, side: int = 20) -> Image.Image:
    pixels = np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def folder(root: Path, classes: dict[str, int]) -> Path:
    for name, n in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            (root / name / f"{i}.png").write_bytes(encoded(picture(keyed_seed(name, i))))
    return root


def parquet(path: Path, labels: list[Any], features: Any = None, image: str = "image", label: str = "label") -> Path:
    rows = [{"bytes": encoded(picture(i)), "path": None} for i in range(len(labels))]
    table = pa.table({image: rows, label: labels}, schema=features and features.arrow_schema)
    pq.write_table(table, path)
    return path


def only(path: Path, content: bytes, name: str = "x.png") -> Images:
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(content)
    return open_images(str(path))


def same(a: Iterable[Batch], b: Iterable[Batch]) -> None:
    pairs = list(zip(a, b, strict=True))
    assert pairs
    for one, other in pairs:
        assert one.ids == other.ids
        assert one.epoch == other.epoch
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.labels, other.labels)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return open_images(str(folder(tmp_path_factory.mktemp("images"), {"a": 6, "b": 4, "c": 1})))


# The embedded data set


def test_nano_is_balanced_disjoint_and_named() -> None:
    splits = open_splits(Data())
    assert [len(s) for s in (splits.train, splits.validation, splits.test)] == [4000, 1000, 2000]
    assert splits.classes[:2] == ("T-shirt/top", "Trouser")
    assert len({*splits.train.ids, *splits.validation.ids, *splits.test.ids}) == 7000
    for split in (splits.train, splits.validation, splits.test):
        assert len(set(np.bincount(split.labels))) == 1
        assert split.image(0).mode == "RGB"
        assert split.image(0).size == (28, 28)


def test_nano_opens_with_datasets(tmp_path: Path) -> None:
    root = Path(str(files("retrofit"))) / "assets" / "fashion_mnist"
    opened = datasets.Dataset.from_parquet(str(root / "validation.parquet"), cache_dir=str(tmp_path))
    assert opened.features["label"].names[9] == "Ankle boot"
    assert isinstance(opened[0]["image"], Image.Image)
    assert sum(p.stat().st_size for p in root.glob("*.parquet")) <= 4e6


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the images beside the checkout")
def test_nano_holds_the_original_pixels() -> None:
    def original(name: str, offset: int) -> np.ndarray[Any, Any]:
        packed = (SHARED / "fashion_mnist" / f"{name}-ubyte.gz").read_bytes()
        return np.frombuffer(gzip.decompress(packed), np.uint8, offset=offset)

    originals, labels = (
        original("train-images-idx3", 16).reshape(-1, 28, 28),
        original("train-labels-idx1", 8),
    )
    validation = open_splits(Data()).validation
    for i in range(0, 1000, 97):
        row = int(validation.ids[i].removeprefix("train/"))
        assert np.array_equal(np.asarray(validation.image(i))[..., 0], originals[row])
        assert validation.labels[i] == labels[row]


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the images beside the checkout")
def test_splits_from_files_of_their_own() -> None:
    cifar = SHARED / "cifar10"
    data = Data(
        source=str(cifar / "train.parquet"),
        test=str(cifar / "test.parquet"),
        train_images=100,
        test_images=50,
    )
    splits = open_splits(data)
    assert [len(s) for s in (splits.train, splits.validation, splits.test)] == [100, 5000, 50]
    assert splits.classes[0] == "airplane"
    assert set(np.bincount(splits.train.labels)) == {10}
    assert not {*splits.train.ids} & {*splits.validation.ids}
    assert [len(s) for s in vars(open_splits(Data(source=str(cifar)))).values()] == [45000, 5000, 10000]


# Folders


def test_classes_are_sorted_naturally_and_hidden_folders_are_none(tmp_path: Path) -> None:
    folder(tmp_path, {"10": 3, "2": 3, "1": 3, ".ipynb_checkpoints": 2})
    assert open_images(str(tmp_path)).classes == ("1", "2", "10")


def test_split_folders_share_the_ids_of_train(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 3, "b": 3, "c": 3})
    folder(tmp_path / "val", {"c": 1, "b": 2})
    folder(tmp_path / "test", {"b": 1, "c": 1, "a": 1})
    splits = open_splits(Data(source=str(tmp_path)))
    assert splits.validation.classes == splits.test.classes == splits.classes == ("a", "b", "c")
    assert dict(zip(splits.validation.ids, splits.validation.labels, strict=True)) == {
        "b/0.png": 1,
        "b/1.png": 1,
        "c/0.png": 2,
    }


def test_names_that_are_no_text_are_told_apart(tmp_path: Path) -> None:
    """An old disk's Latin-1, say: what is said of such an image can be written to any file."""
    for name in (b"caf\xe9", b"caf\xe8", b"tea"):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        try:
            path.mkdir()
        except OSError:
            pytest.skip("this file system takes only text for names")
        for i in range(4):
            (path / f"{i}.png").write_bytes(encoded(picture(i)))
    splits = open_splits(Data(source=str(tmp_path)))
    assert splits.classes == (r"caf\xe8", r"caf\xe9", "tea")
    batch = next(eval_batches(splits.train, PREPROCESS, 4))
    assert batch.ids[0].startswith(r"caf\xe8/")
    assert len(batch.fingerprint["ids"]) == 16


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    """Whatever is trained on it is right on every image."""
    folder(tmp_path, {"a": 20})
    with pytest.raises(DataError, match="are of one class, a; training needs"):
        open_splits(Data(source=str(tmp_path)))
    assert len(open_images(str(tmp_path))) == 20


def test_an_empty_class_folder_shifts_no_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path, {"a": 10, "b": 0, "c": 10})
    images = open_images(str(tmp_path))
    assert images.classes == ("a", "b", "c")
    assert set(images.labels) == {0, 2}
    assert "b holds no images" in caplog.text


def test_a_class_that_train_lacks_is_named(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 3, "b": 3})
    folder(tmp_path / "test", {"a": 3, "zebra": 3})
    with pytest.raises(DataError, match="test split has classes that train lacks: zebra"):
        open_splits(Data(source=str(tmp_path)))


def test_a_split_without_class_folders_is_refused(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 3, "b": 3})
    folder(tmp_path, {"validation": 3})
    with pytest.raises(DataError, match=r"validation has no labels.*one folder a class"):
        open_splits(Data(source=str(tmp_path)))


def test_images_without_labels_are_fine_for_a_probe(tmp_path: Path) -> None:
    folder(tmp_path, {"flat": 5})
    images = open_images(str(tmp_path / "flat"), 3)
    assert images.classes == ("",)
    assert len(images) == 3
    with pytest.raises(DataError, match="one folder a class"):
        open_splits(Data(source=str(tmp_path / "flat")))


def test_other_files_are_skipped_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path, {"a": 2, "b": 2})
    for name in ("a/notes.txt", "b/Thumbs.db", "loose.png"):
        (tmp_path / name).write_bytes(b"no image")
    with caplog.at_level(logging.WARNING):
        assert len(open_images(str(tmp_path))) == 4
    assert len(caplog.records) == 1
    assert "3 files" in caplog.text
    assert "loose.png" in caplog.text


def test_a_missing_source_names_what_is_near_and_what_would_work(tmp_path: Path) -> None:
    folder(tmp_path / "flowers", {"a": 1})
    with pytest.raises(DataError, match=r"flowrs is missing.*nano, hf/ID, a folder.*parquet.*did you mean flowers\?"):
        open_images(str(tmp_path / "flowrs" / "train.parquet"))
    with pytest.raises(DataError, match="did you mean nano"):
        open_images("nanno")
    (tmp_path / "list.csv").write_text("a,b")
    with pytest.raises(DataError, match="not a parquet file"):
        open_images(str(tmp_path / "list.csv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        open_images(str(tmp_path / "empty"))


# Splits


def test_missing_splits_are_carved_evenly_and_do_not_overlap(tmp_path: Path) -> None:
    root = str(folder(tmp_path / "all", {"a": 60, "b": 40, "c": 2}))
    splits = open_splits(Data(source=root))
    parts = [set(s.ids) for s in (splits.train, splits.validation, splits.test)]
    assert [len(p) for p in parts] == [82, 10, 10]
    assert len(set.union(*parts)) == 102
    assert np.bincount(splits.validation.labels).tolist() == [6, 4]
    assert np.bincount(splits.train.labels)[2] == 2
    other = folder(tmp_path / "other", {"a": 1})
    named = open_splits(Data(source=root, test=str(other), train_images=20))
    assert named.validation.ids == splits.validation.ids
    assert len(named.train) == 20


def test_a_named_split_is_used_once(tmp_path: Path) -> None:
    for split in ("train", "validation", "held"):
        folder(tmp_path / split, {"a": 10, "b": 10})
    root = str(tmp_path)
    splits = open_splits(Data(source=root, test="validation"))
    assert [len(s) for s in (splits.train, splits.validation, splits.test)] == [18, 2, 20]
    with pytest.raises(DataError, match=r"data.train and data.test are the same images"):
        open_splits(Data(source=root, test="train"))
    with pytest.raises(DataError, match=r"no split hold; did you mean held\? \(splits: held, train, validation\)"):
        open_splits(Data(source=root, test="hold"))
    with pytest.raises(DataError, match="too few"):
        open_splits(Data(source=str(folder(tmp_path / "two", {"a": 1, "b": 1}))))


def test_a_training_split_from_elsewhere_leaves_the_source_aside(tmp_path: Path) -> None:
    splits = open_splits(Data(train=str(folder(tmp_path, {"a": 20, "b": 20}))))
    assert splits.classes == ("a", "b")
    assert len(splits.test) == 4


# Tables


def test_labels_of_every_kind(tmp_path: Path) -> None:
    features = datasets.Features(img=datasets.Image(), fine_label=datasets.ClassLabel(names=["x", "y", "z"]))
    named = open_images(str(parquet(tmp_path / "n.parquet", [2, 0, 2], features, "img", "fine_label")))
    assert (named.classes, named.labels.tolist()) == (("x", "y", "z"), [2, 0, 2])
    numbers = open_images(str(parquet(tmp_path / "i.parquet", [10, 2, 10])))
    assert (numbers.classes, numbers.labels.tolist()) == (("2", "10"), [1, 0, 1])
    texts = open_images(str(parquet(tmp_path / "s.parquet", ["b", "a", "b"], image="scan", label="category")))
    assert (texts.classes, texts.labels.tolist()) == (("a", "b"), [1, 0, 1])
    none = open_images(str(parquet(tmp_path / "u.parquet", [1, 2, 3], label="id")))
    assert none.classes == ("",)


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["x", "y"]))
    with pytest.raises(DataError, match="-1 to -1 for 2 classes"):
        open_images(str(parquet(tmp_path / "a.parquet", [-1, -1], features)))
    with pytest.raises(DataError, match="one an image"):
        open_images(str(parquet(tmp_path / "b.parquet", [1, None])))
    with pytest.raises(DataError, match="holds no images"):
        open_images(str(parquet(tmp_path / "c.parquet", [], features)))
    pq.write_table(pa.table({"pixels": [1], "label": [0]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"needs a column of encoded images.*pixels \(int64\)"):
        open_images(str(tmp_path / "d.parquet"))
    (tmp_path / "e.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"e.parquet cannot be read as parquet"):
        open_images(str(tmp_path / "e.parquet"))
    with pytest.raises(DataError, match="no train split"):
        open_images(str(tmp_path))


def test_a_folder_of_shards(tmp_path: Path) -> None:
    parquet(tmp_path / "train-00000-of-00002.parquet", [0, 1] * 5)
    parquet(tmp_path / "train-00001-of-00002.parquet", [0, 1] * 5)
    parquet(tmp_path / "val.parquet", [1])
    splits = open_splits(Data(source=str(tmp_path)))
    assert [len(s) for s in (splits.train, splits.validation, splits.test)] == [18, 1, 2]
    assert splits.validation.labels.tolist() == [1]


def test_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["x", "y"]))
    png = tmp_path / "1.png"
    png.write_bytes(encoded(picture(1)))
    rows = {"image": [encoded(picture(0)), str(png)] * 10, "label": [0, 1] * 10}
    asked: list[tuple[str, str | None]] = []

    def load_dataset(name: str, config: str | None) -> datasets.DatasetDict:
        asked.append((name, config))
        if name == "gone":
            raise ConnectionError("Couldn't reach the Hub\nlong story")
        return datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features=features))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = open_splits(Data(source="hf/owner/name:config"))
    assert asked == [("owner/name", "config")]
    assert splits.classes == ("x", "y")
    images = open_images("hf/owner/name")
    assert images.ids[1] == "00001"
    assert np.array_equal(np.asarray(images.image(1)), np.asarray(picture(1)))
    with pytest.raises(DataError, match=r"hf/gone cannot be loaded: Couldn't reach the Hub\. .*HF_HUB_OFFLINE=1"):
        open_images("hf/gone")


# Decoding


def test_damaged_images_are_named(tmp_path: Path) -> None:
    jpeg = encoded(picture(0, 200), "JPEG")
    for name, content in (("cut.jpg", jpeg[: len(jpeg) // 2]), ("text.png", b"hello"), ("none.gif", b"")):
        images = only(tmp_path / name.split(".")[0], content, name)
        with pytest.raises(DataError, match=f"{name} cannot be read as an image: [^<>]*$"):
            images.image(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_one_clear_line_through_workers_too(tmp_path: Path, workers: int) -> None:
    images = only(tmp_path, b"hello")
    with pytest.raises(DataError, match=r"x\.png cannot be read as an image") as caught:
        list(eval_batches(images, PREPROCESS, 4, workers))
    assert "Traceback" not in str(caught.value)


def test_a_vanished_file_is_named(tmp_path: Path) -> None:
    images = only(tmp_path, b"hello")
    (tmp_path / "x.png").unlink()
    for read in (lambda: images.image(0), images.fingerprint):
        with pytest.raises(DataError, match=r"x\.png cannot be read"):
            read()


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    image = only(tmp_path, encoded(Image.fromarray(np.tile(ramp, (4, 1))))).image(0)
    assert np.array_equal(np.asarray(image)[0, :, 0], np.arange(256))


def test_floating_point_is_refused(tmp_path: Path) -> None:
    images = only(tmp_path, encoded(Image.new("F", (4, 4), 0.5), "TIFF"), "x.tiff")
    with pytest.raises(DataError, match="no fixed range"):
        images.image(0)


def test_transparency_is_white(tmp_path: Path) -> None:
    rgba = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    rgba.putpixel((1, 1), (0, 0, 0, 255))
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 0, 0, 0])
    palette.putpixel((1, 1), 1)
    contents = {
        "rgba": encoded(rgba),
        "la": encoded(rgba.convert("LA")),
        "p": encoded(palette, transparency=0),
        "pbytes": encoded(palette, transparency=b"\x00\xff"),
        "l": encoded(rgba.convert("RGBA").getchannel("A").point(lambda v: v // 255), transparency=0),
    }
    for name, content in contents.items():
        image = only(tmp_path / name, content).image(0)
        assert image.mode == "RGB"
        assert image.getpixel((0, 0)) == (255, 255, 255), name
        assert np.asarray(image)[1, 1].max() <= 1, name


def test_other_modes_become_rgb(tmp_path: Path) -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    cases = {
        "cmyk": encoded(red.convert("CMYK"), "JPEG", quality=95),
        "palette": encoded(red.quantize(4)),
        "grey": encoded(Image.new("L", (8, 8), 77)),
        "bit": encoded(Image.new("1", (8, 8), 1)),
    }
    found = {k: only(tmp_path / k, v, "x.jpg").image(0) for k, v in cases.items()}
    assert all(image.mode == "RGB" for image in found.values())
    assert np.abs(np.asarray(found["cmyk"]).astype(int) - np.asarray(red)).max() < 8
    assert [found[k].getpixel((0, 0)) for k in ("palette", "grey", "bit")] == [
        (255, 0, 0),
        (77,) * 3,
        (255,) * 3,
    ]


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert only(tmp_path, encoded(Image.new("RGB", (30, 10)), "JPEG", exif=exif), "x.jpg").image(0).size == (
        10,
        30,
    )


# Images


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 70))
def test_take_is_as_even_as_the_classes_allow(labels: list[int], n: int) -> None:
    rows = np.arange(len(labels))
    images = Images([str(i) for i in rows], np.array(labels), tuple("abcde"), Files([]), rows)
    taken = images.take(n, "key")
    assert len(taken) == min(n, len(labels))
    assert taken.ids == sorted(set(taken.ids), key=int)
    had, got = np.bincount(labels, minlength=5), np.bincount(taken.labels, minlength=5)
    short = got[got < had]
    assert short.size == 0 or got.max() - short.min() <= 1
    assert images.take(n, "key").ids == taken.ids
    assert images.take(None, "key") is images


def test_fingerprint_sees_ids_labels_and_bytes(images: Images, tmp_path: Path) -> None:
    prints = {images.fingerprint(), images.subset([1, 0]).fingerprint(), images.subset([0, 1]).fingerprint()}
    folder(tmp_path, {"a": 6, "b": 4, "c": 1})
    assert open_images(str(tmp_path)).fingerprint() == images.fingerprint()
    (tmp_path / "a" / "0.png").write_bytes(encoded(picture(99)))
    prints.add(open_images(str(tmp_path)).fingerprint())
    assert len(prints) == 4
    assert pickle.loads(pickle.dumps(images)).fingerprint() == images.fingerprint()


# Batches


def stream(images: Images, steps: int, first: int = 0, workers: int = 0, size: int = 4, **data: Any) -> list[Batch]:
    options: Any = {"seed": 3, "batch_size": size, "steps": steps, "first_step": first, "workers": workers}
    return list(train_batches(images, PREPROCESS, Data(**data), **options))


def states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def test_evaluation_sees_every_image_once_as_timm_would_show_it(images: Images) -> None:
    batches = list(eval_batches(images, PREPROCESS, 4))
    assert [i for b in batches for i in b.ids] == images.ids
    assert torch.cat([b.labels for b in batches]).tolist() == images.labels.tolist()
    assert batches[0].pixels.dtype == torch.float32
    transform = create_transform(16, mean=PREPROCESS.mean, std=PREPROCESS.std, interpolation="bilinear", crop_pct=0.875)
    wanted = torch.stack([transform(images.image(i)) for i in range(len(images))])
    torch.testing.assert_close(torch.cat([b.pixels for b in batches]), wanted, rtol=0, atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(batch_size=st.integers(1, 13), first=st.integers(0, 12))
def test_resuming_gives_the_tail_of_the_whole_stream(images: Images, batch_size: int, first: int) -> None:
    whole = stream(images, 14, size=batch_size)
    same(whole[first:], stream(images, 14, first, size=batch_size))


@settings(max_examples=25, deadline=None)
@given(batch_size=st.integers(1, 13))
def test_an_epoch_is_a_permutation(images: Images, batch_size: int) -> None:
    per = steps_per_epoch(len(images), batch_size)
    batches = stream(images, 2 * per, size=batch_size)
    for epoch in (0, 1):
        ids = [i for b in batches[epoch * per : (epoch + 1) * per] for i in b.ids]
        assert len(ids) == len(set(ids)) == per * min(batch_size, len(images))
    assert [b.epoch for b in batches] == [0] * per + [1] * per
    assert [b.ids for b in batches[:per]] != [b.ids for b in batches[per:]]


@pytest.mark.parametrize("policy", [None, "rand-m9-mstd0.5", "augmix-m3-w2"])
def test_workers_change_nothing(images: Images, policy: str | None) -> None:
    data: Any = {"auto_augment": policy, "color_jitter": 0.3}
    before = states()
    with_workers: list[Batch] = []
    options: Any = {"seed": 3, "batch_size": 4, "steps": 5, "first_step": 1, "workers": 2}
    for batch in train_batches(images, PREPROCESS, Data(**data), **options):
        assert states() == before
        with_workers.append(batch)
    same(with_workers, stream(images, 5, 1, **data))
    assert states() == before


def test_augmentation_hangs_on_seed_epoch_and_index_alone(images: Images) -> None:
    def by_id(batches: list[Batch]) -> dict[tuple[int, str], torch.Tensor]:
        return {(b.epoch, i): p for b in batches for i, p in zip(b.ids, b.pixels, strict=True)}

    fours = by_id(stream(images, 4))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    all_of_them = by_id(stream(images, 2, size=11))
    assert all(torch.equal(pixels, all_of_them[key]) for key, pixels in fours.items())
    assert not torch.equal(all_of_them[0, "a/0.png"], all_of_them[1, "a/0.png"])
    one_image = images.subset([0] * 8)
    assert len({p.numpy().tobytes() for p in stream(one_image, 1, size=8)[0].pixels}) > 4


def test_an_unknown_policy_is_a_users_mistake(images: Images) -> None:
    for policy in ("magic", "rand-zz5"):
        with pytest.raises(DataError, match=f"no policy {policy}"):
            stream(images, 1, auto_augment=policy)


def test_steps_per_epoch() -> None:
    assert [steps_per_epoch(n, 4) for n in (1, 4, 7, 8)] == [1, 1, 1, 2]


# Keys


def test_seeds_are_stable_and_tell_keys_apart() -> None:
    assert keyed_seed("order", 0, 1) == 8556750900509299915  # else old runs cannot be continued
    assert len({keyed_seed(*k) for k in (("a", 1), ("a", "1"), ("a", 1, 1), ("a", 11))}) == 4
    assert keyed_seed("a", np.int64(1)) == keyed_seed("a", 1)  # type: ignore[arg-type]


def test_keyed_rng_puts_everything_back_also_after_an_error() -> None:
    before = states()
    with keyed_rng("dropout", 0, 1):
        first = random.random(), np.random.rand(), torch.rand(1).item()
    with suppress(KeyError), keyed_rng("dropout", 0, 1):
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
        raise KeyError
    assert states() == before
    with keyed_rng("dropout", 0, 2):
        assert random.random() != first[0]


def test_keyed_rng_covers_cuda_once_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state=lambda: "state",
        manual_seed=lambda seed: calls.append(seed),
        set_rng_state=lambda state: calls.append(state),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    with keyed_rng("x"):
        assert calls == [keyed_seed("x")]
    assert calls[1:] == ["state"]
