"""Training in two processes, on CPUs by gloo, against the same in one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_hf
from tiny_study import content, write_images

import retrofit
from retrofit.cli import main
from retrofit.data import open_splits, share
from retrofit.pair import run_pair
from retrofit.recipe import load_recipe, parse
from retrofit.runfiles import RunKey, read_json, read_jsonl

ARMS = ("baseline", "retrofit")


def started(*command: object) -> list[subprocess.Popen[str]]:
    """The command in two processes, as torchrun starts them on one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    both |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**both, "RANK": rank, "LOCAL_RANK": rank},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]


def launched(*command: object) -> list[subprocess.CompletedProcess[str]]:
    done = []
    for process in started(*command):
        out, error = process.communicate(timeout=240)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return done


def studies(folder: Path) -> dict[str, dict[str, Any]]:
    """Every study's recipe, by name."""
    data = write_images(folder / "data")
    tiny_hf("Dinov2", image_size=16, num_hidden_layers=2).save_pretrained(folder / "dinov2")

    def study(**train: Any) -> dict[str, Any]:
        return content(data, **train)

    odd = write_images(folder / "nine", {"train": 40, "validation": 9, "test": 9})
    dropping = study(steps=4)
    dropping["model"] = {"source": dropping["model"], "model_args": {"proj_drop_rate": 0.5}}
    idle = {**study(steps=4), "model": f"hf:{folder / 'dinov2'}"}  # its mask token has no part in the logits
    erased = study(steps=8, mixup=0.8, cutmix=1.0, label_smoothing=0.1, accumulate=2, ema=0.9, layer_decay=0.8)
    erased["data"]["random_erasing"] = 0.5
    return {
        "plain": study(steps=50),
        "mixed": erased,
        "parts": study(steps=8, accumulate=3, batch_size=9),
        "frozen": study(steps=4, freeze="attention_only", grad_checkpointing=True, schedule="linear"),
        "nine": {**content(odd, steps=2), "evaluate": 5},
        "few": {**content(odd, steps=2), "evaluate": 2},
        "idle": idle,
        "sharded": {
            **study(steps=6, accumulate=2, mixup=0.8, probe_batch=True, optimizer_args={"fused": False}),
            "sharded": True,
        },
        "dropping": dropping,
        "again": dropping,
        "small": study(steps=2, batch_size=2),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Every study in one process and in two."""
    folder = tmp_path_factory.mktemp("processes")
    one, two = folder / "one", folder / "two"
    two.mkdir()
    documents = studies(folder)
    (folder / "studies.json").write_text(json.dumps(documents))
    for name, document in documents.items():
        if name not in ("dropping", "again", "small"):
            run_pair(parse({k: v for k, v in document.items() if k not in ("evaluate", "sharded")}), one / name)
    for done in launched(ROOT / "tests" / "two_processes.py", folder / "studies.json", two):
        assert done.returncode == 0, done.stderr[-3000:]
    return one, two


def place(folder: Path, arm: str) -> Path:
    return folder / RunKey.of(arm, 1e-3, 0, "fp32").folder


@pytest.mark.parametrize("name", ["plain", "mixed", "parts", "frozen", "nine", "few", "idle", "sharded"])
def test_two_processes_are_one(both: tuple[Path, Path], name: str) -> None:
    one, two = (folder / name for folder in both)
    for arm in ARMS:
        rows, others = (read_jsonl(place(f, arm) / "metrics.jsonl") for f in (one, two))
        assert len(rows) > 1
        for key in ("step", "epoch", "lr", "ids", "pixels"):
            assert [row[key] for row in rows] == [row[key] for row in others]
        assert [row["loss"] for row in others] == pytest.approx([row["loss"] for row in rows], abs=1e-5)
        assert [row["grad_norm"] for row in others] == pytest.approx([row["grad_norm"] for row in rows], rel=1e-4)
        probes, seen = (read_jsonl(place(f, arm) / "probes.jsonl") for f in (one, two))
        assert [row["step"] for row in probes] == [row["step"] for row in seen]
        for before, after in zip(probes, seen, strict=True):
            for layer, other in zip(before["layers"], after["layers"], strict=True):
                assert other["logit_max"] == pytest.approx(layer["logit_max"], abs=1e-3)
        arrays, computed = (np.load(place(f, arm) / "predictions.npz") for f in (one, two))
        for key in arrays:
            if key.endswith("logits"):
                np.testing.assert_allclose(computed[key], arrays[key], atol=1e-3)
            else:
                assert computed[key].tolist() == arrays[key].tolist()
        results = [read_json(place(f, arm) / "result.json") for f in (one, two)]
        assert [result["processes"] for result in results] == [1, 2]
        assert [result["test"]["images"] for result in results] == [len(arrays["test_ids"])] * 2
        weights, trained = (retrofit.load(place(f, arm) / "final").state_dict() for f in (one, two))
        assert weights.keys() == trained.keys()
        for key, value in weights.items():
            if (
                "qkv.bias" not in key and "k_proj.bias" not in key
            ):  # softmax is blind to them: Adam divides noise by noise
                torch.testing.assert_close(trained[key], value, atol=1e-4, rtol=1e-3)


def test_every_image_is_evaluated_once(both: tuple[Path, Path]) -> None:
    """9 images by 5 and by 2 a process: the last batch leaves one process less, or nothing."""
    for name in ("nine", "few"):
        test = open_splits(load_recipe(both[1] / name / "recipe.yaml").data).test
        ids = np.load(place(both[1] / name, "retrofit") / "predictions.npz")["test_ids"].tolist()
        assert ids == test.ids
        assert len(set(ids)) == 9


def test_only_the_main_process_writes(both: tuple[Path, Path]) -> None:
    trained = ("plain", "mixed", "parts", "frozen", "nine", "few", "idle", "sharded", "dropping", "again")
    assert not (both[1] / "others").exists()
    assert {p.name for p in both[1].iterdir()} == {*trained, "small.0", "small.1"}


def test_dropout_is_drawn_anew_in_each_process_and_again_the_same(both: tuple[Path, Path]) -> None:
    for arm in ARMS:
        one, again = (place(both[1] / name, arm) / "metrics.jsonl" for name in ("dropping", "again"))
        assert one.read_bytes() == again.read_bytes()


def test_a_batch_too_small_to_share_is_refused_by_every_process(both: tuple[Path, Path]) -> None:
    for rank in (0, 1):
        said = (both[1] / f"small.{rank}").read_text()
        assert said.startswith("train.batch_size: of a batch of 2 images some of 2 processes would get none; take 4")


def test_shares_are_whole_disjoint_and_even() -> None:
    for n in range(1, 40):
        for processes in range(1, 6):
            shares = [share(np.arange(n), (i, processes)).tolist() for i in range(processes)]
            assert sorted(row for rows in shares for row in rows) == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 3
    assert share(np.arange(7), (0, 1)).tolist() == list(range(7))


@pytest.mark.slow
def test_the_command_line_in_two_processes_speaks_once(tmp_path: Path) -> None:
    document = content(write_images(tmp_path / "data"), steps=2)
    (tmp_path / "r.yaml").write_text(json.dumps(document))
    first, other = launched("-m", "retrofit", "pair", tmp_path / "r.yaml", "-o", tmp_path / "run")
    assert (first.returncode, other.returncode) == (0, 0), first.stderr[-2000:] + other.stderr[-2000:]
    assert f"report: {tmp_path / 'run' / 'report.html'}" in first.stdout
    assert (other.stdout, other.stderr) == ("", "")
    assert read_json(place(tmp_path / "run", "retrofit") / "result.json")["processes"] == 2


def test_a_mistake_is_told_by_the_main_process_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, words in (("1", ""), ("0", "retrofit: no recipe nanno; did you mean nano?")):
        monkeypatch.setenv("RANK", rank)
        assert main(["pair", "nanno"]) == 2
        assert capsys.readouterr().err.startswith(words)
    monkeypatch.setenv("RANK", "1")
    assert main(["pair", "nanno"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_and_the_same_command_goes_on(tmp_path: Path) -> None:
    document = content(write_images(tmp_path / "data"), steps=150)
    (tmp_path / "r.yaml").write_text(json.dumps(document))
    command = ("-m", "retrofit", "pair", tmp_path / "r.yaml", "-o", tmp_path / "run")
    metrics = place(tmp_path / "run", "retrofit") / "metrics.jsonl"
    both = started(*command)
    while not (metrics.is_file() and len(read_jsonl(metrics)) > 9):
        assert all(process.poll() is None for process in both)
        time.sleep(0.05)
    both[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [143, 143], said
    assert not (metrics.parent / "result.json").exists()
    for done in launched(*command):
        assert done.returncode == 0, done.stderr[-2000:]
    run_pair(parse(document), tmp_path / "whole")
    for arm in ARMS:
        rows, others = (read_jsonl(place(tmp_path / name, arm) / "metrics.jsonl") for name in ("run", "whole"))
        assert [row["step"] for row in rows] == list(range(150))
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], abs=1e-5)
        assert read_json(place(tmp_path / "run", arm) / "result.json")["resumed_at"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [["accelerate.commands.launch"], ["torch.distributed.run", "--nproc_per_node", "2"]]
)
def test_what_users_launch(tmp_path: Path, launcher: list[str]) -> None:
    """`accelerate launch` trains on a CPU in one process, torchrun in as many as it is told."""
    document = content(write_images(tmp_path / "data"), steps=2)
    (tmp_path / "r.yaml").write_text(json.dumps(document))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *launcher,
            "-m",
            "retrofit",
            "pair",
            str(tmp_path / "r.yaml"),
            "-o",
            str(tmp_path / "o"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = read_json(place(tmp_path / "o", "retrofit") / "result.json")
    assert result["processes"] == (2 if "--nproc_per_node" in launcher else 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fsdp_is_the_same_training(tmp_path: Path, precision: str) -> None:
    """In one process, which shards nothing away, under FSDP2: losses, predictions and saved weights as without it."""
    document = content(write_images(tmp_path / "data"), steps=6, precision=precision)
    (tmp_path / "r.yaml").write_text(json.dumps(document))
    fsdp = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    for name, options in (("plain", []), ("fsdp", fsdp)):
        command = ["--num_processes", "1", *options, "-m", "retrofit", "pair", str(tmp_path / "r.yaml")]
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.launch", *command, "-o", str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    folder = RunKey.of("retrofit", 1e-3, 0, precision).folder
    plain, sharded = (read_jsonl(tmp_path / name / folder / "metrics.jsonl") for name in ("plain", "fsdp"))
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert [row["loss"] for row in sharded] == pytest.approx([row["loss"] for row in plain], abs=tolerance)
    assert [row["grad_norm"] for row in sharded] == pytest.approx([row["grad_norm"] for row in plain], rel=0.1)
    weights = retrofit.load(tmp_path / "fsdp" / folder / "final").state_dict()
    assert weights.keys() == retrofit.load(tmp_path / "plain" / folder / "final").state_dict().keys()
