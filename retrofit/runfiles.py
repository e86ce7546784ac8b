"""The one place for the names in a run folder, for strict JSON and for writes that are whole or absent.

    RUN/recipe.yaml                     fully resolved
    RUN/run.json                        the plan, the data's fingerprints, the environment, the command
    RUN/report.html report.md report.json
    RUN/<arm>/insertion.json            what surgery did: calibration and insertion shock (arms with QK-Norm)
    RUN/<arm>/norms.safetensors         the norms as they went in, which every run of the arm starts from
    RUN/<arm>/lr<LR:g>-s<SEED>/         one training run; "-<precision>" follows where a plan has several
        metrics.jsonl                   a row a step, deterministic: no clock, no memory
        timings.jsonl                   what the clock said: a step's seconds, and its share of the wait for the batch
        probes.jsonl                    a row a probed step
        predictions.npz                 logits, labels and ids of validation and test
        result.json                     written last: a run that has it is finished
        final/                          weights, loadable with retrofit.load
        without-ema/                    the weights that final/ is the moving average of, where the recipe keeps one
        last/                           what an unfinished run goes on from
        failure.json                    the fault that ended it; gone once the run is started again

JSON here is strict: what is not finite is written as null, since NaN is not JSON.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from retrofit.errors import RetrofitError

RECIPE = "recipe.yaml"
MANIFEST = "run.json"
REPORT = "report"
INSERTION = "insertion.json"
NORMS = "norms.safetensors"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
PROBES = "probes.jsonl"
PREDICTIONS = "predictions.npz"
RESULT = "result.json"
FINAL = "final"
WITHOUT_EMA = "without-ema"
LAST = "last"
FAILURE = "failure.json"
OTHERS = (RECIPE, MANIFEST, "report.html", "report.md", "report.json", "tensorboard", "wandb", "export")
"""What lies, or may lie, beside the arms."""
_LARGEST = 1e30
"""Numbers beyond it are as good as infinite: their squares and sums must stay finite."""

BASELINE = "baseline"
"""The arm that every other is compared with."""
AA = "aa"
"""The baseline's twin: the same run from weights that differ by a millionth. It shows what chance does."""


@dataclass(frozen=True, order=True)
class RunKey:
    """One training run of a plan. `folder` is where it lies below the run folder."""

    arm: str
    lr: float
    seed: int
    precision: str
    folder: str

    @classmethod
    def of(cls, arm: str, lr: float, seed: int, precision: str, *, name_precision: bool = False) -> RunKey:
        """The key with its folder; `name_precision` where the plan has more than one."""
        suffix = f"-{precision}" if name_precision else ""
        return cls(arm, lr, seed, precision, f"{arm}/lr{lr:g}-s{seed}{suffix}")


def plain(value: Any) -> Any:
    """`value` as strict JSON can hold it: dataclasses as mappings, arrays as lists, non-finite numbers as None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the block ends well: written beside it, synced, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file, naming(path):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
        sync(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError of a write, which names no file, the name of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or os.fspath(path)
        raise


def sync(folder: Path) -> None:
    """Makes what was renamed in a folder last beyond a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `path` whole or not at all."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, encoded(text))


def encoded(text: str) -> bytes:
    """UTF-8; what it cannot hold, such as a byte of a name that is no text, as the escape that JSON has for it."""
    return text.encode(errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    write_text(path, dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Raises RetrofitError with the file's name where it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RetrofitError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise RetrofitError(f"{path} cannot be read: {error}") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; none where it is missing. A torn last line, as a killed run leaves it, is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def number(value: Any) -> float | None:
    """`value` where it is a number that can be reckoned with, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None


def count(value: Any) -> int | None:
    """`value` where it is a whole number from 0 that 64 bits hold, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def table(value: Any) -> Mapping[str, Any]:
    """`value` where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def text(value: Any) -> str | None:
    """A string or a finite number on one line, None where `value` is neither."""
    shown = value if isinstance(value, str | int) else number(value)
    return None if shown is None else " ".join(encoded(str(shown)).decode().split())


def items(value: Any) -> list[Any]:
    """`value` where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


class JsonLines:
    """A .jsonl file being written, a row a call; from its beginning, or from where a checkpoint says.

    Without a path rows go nowhere.
    """

    def __init__(self, path: Path | None, at: int = 0) -> None:
        """at: bytes to keep; rows after them are of steps that are done again."""
        self.path, self._file = path, None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self._file.truncate(at)

    def write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None and self.path is not None:
            with naming(self.path):
                self._file.write(encoded(dumps(row)) + b"\n")
                self._file.flush()

    def synced(self) -> int:
        """Brings all rows to the disk, and says how many bytes they are."""
        if self._file is None or self.path is None:
            return 0
        with naming(self.path):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds `folder` for this process, so that no two write one run.

    Raises RetrofitError where another process holds it, unless `wait`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise RetrofitError(
                    f"another process is training {folder}; wait for it, or give each a part of the plan: --shard I/N"
                ) from None
            if not _is_still(path, file):
                continue  # its holder has removed it in between: what we hold bars nobody
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_still(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def sweep(folder: Path) -> None:
    """Removes what a killed process was still writing in a folder that this one has locked."""
    for path in folder.glob(".*.????????"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def claim(folder: Path, marker: str, force: bool = False) -> None:
    """Makes `folder` ready to be written. Raises RetrofitError where `check_free` does, or where it cannot be made."""
    check_free(folder, marker, force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RetrofitError(f"{folder} cannot be made: {error.strerror or error}") from None


def check_free(folder: Path, marker: str, force: bool = False) -> None:
    """Raises RetrofitError unless `folder` may be written: new, empty, or ours (it holds `marker`); or `force`."""
    if folder.exists() and not folder.is_dir():
        raise RetrofitError(f"{folder} is a file; name a folder to write to")
    ours = re.compile(rf"\.lock|\.{re.escape(marker)}\..*")  # of another part of the plan that begins right now
    foreign = folder.is_dir() and not all(ours.fullmatch(path.name) for path in folder.iterdir())
    if foreign and not force and not (folder / marker).is_file():
        raise RetrofitError(
            f"{folder} holds files that retrofit did not write; name a new folder, or add --force to write here"
        )


@contextmanager
def publishing(folder: Path, marker: str, owned: Collection[str] = (), force: bool = False) -> Iterator[Path]:
    """A scratch folder whose files move into `folder` when the block ends well, and vanish when it does not.

    `owned` names the files there that retrofit wrote earlier: they are replaced, and removed where no longer written.
    Any other file of the same name raises RetrofitError before anything has moved, unless `force`.
    `marker` leaves first and arrives last, so that a folder cut off in between does not pass for a whole one.
    """
    claim(folder, marker, force)
    try:
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise RetrofitError(f"{folder.parent} cannot be written to: {error.strerror or error}") from None
    try:
        yield scratch
        written = sorted(p.name for p in scratch.iterdir())
        foreign = [n for n in written if (folder / n).exists() and n not in owned and n != marker and not force]
        if foreign:
            raise RetrofitError(
                f"{folder} holds {', '.join(foreign)}, which retrofit did not write; move them away, or add --force"
            )
        for name in (marker, *(n for n in owned if Path(n).name == n)):  # a name that leads elsewhere is not ours
            (folder / name).unlink(missing_ok=True)
        for name in sorted(written, key=lambda n: n == marker):
            os.chmod(scratch / name, 0o666 & ~_umask())
            os.replace(scratch / name, folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
