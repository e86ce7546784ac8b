"""What the command line takes: its commands, their options, and the kinds of their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import retrofit
from retrofit.qknorm import PRESETS

Handler = Callable[[argparse.Namespace], int]

_SRC = "`nano`, hf/ID, a folder of images or a parquet file"
_MODEL = "`nano`, timm/NAME, hf/ID, timm:DIR, hf:DIR, or a folder that retrofit wrote"


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def points(text: str) -> float:
    try:
        points = float(text)
    except ValueError:
        points = 0.0
    if not 0 < points <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of points above 0 and up to 100")
    return points


def shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 2/8")
    return int(part), int(parts)


def parser(**handlers: Handler) -> argparse.ArgumentParser:
    """The whole command line. Its namespaces hold, as `handler`, the function that is given for their command."""
    parser = argparse.ArgumentParser(prog="retrofit", description=retrofit.__doc__)
    parser.add_argument("--version", action="version", version=f"retrofit {retrofit.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, words: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words)
        sub.set_defaults(handler=handlers[name])
        return sub

    def force(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--force", action="store_true", help="write over files that retrofit did not write")

    sub = command("models", "list every model of the installed libraries, and which can take QK-Norm")
    sub.add_argument("--json", action="store_true", help="one JSON document instead of a table")

    sub = command("probe", "see what a model's attention does on some images")
    sub.add_argument("model", metavar="MODEL", help=_MODEL)
    sub.add_argument("--data", metavar="SRC", default="nano", help=_SRC)
    sub.add_argument("--images", metavar="N", type=count, default=64, help="at most so many (default 64)")
    sub.add_argument("--image-size", metavar="PIXELS", type=count, help="side of the input (default: the model's)")
    sub.add_argument("--json", action="store_true", help="one JSON document instead of a table")

    sub = command("apply", "put QK-Norm into a model, without training")
    sub.add_argument("model", metavar="MODEL", help=_MODEL)
    sub.add_argument(
        "settings", nargs="*", metavar="key=value", default=[], help="fields of QKNorm, e.g. gain=per_head"
    )
    sub.add_argument("-o", "--output", metavar="DIR", type=Path, required=True)
    sub.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default qwen3)")
    sub.add_argument("--init", choices=["fit", "match", "ones"], help="start of the norm (default fit)")
    sub.add_argument("--data", metavar="SRC", help=f"images to calibrate on: {_SRC} (default nano)")
    sub.add_argument("--images", metavar="N", type=count, help="how many (default 128)")
    sub.add_argument("--image-size", metavar="PIXELS", type=count, help="side of the input (default: the model's)")
    force(sub)

    sub = command("pair", "fine-tune the arms of a recipe as matched pairs, and report")
    sub.add_argument("recipe", metavar="RECIPE", help="a file, or the name of a shipped recipe such as nano")
    sub.add_argument("settings", nargs="*", metavar="key.sub=value", default=[], help="e.g. train.lr=[1e-4,3e-4]")
    sub.add_argument("-o", "--output", metavar="RUN_DIR", type=Path, help="default: runs/RECIPE")
    sub.add_argument("--dry-run", action="store_true", help="show the resolved recipe and the plan, train nothing")
    sub.add_argument("--shard", metavar="I/N", type=shard, default=(1, 1), help="train only part I of N")
    force(sub)

    sub = command("report", "make the report of a run folder again, from its files, or compare several")
    sub.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="several: also one table over all")
    sub.add_argument("-o", "--output", metavar="DIR", type=Path, help="write the report, or the comparison, to DIR")
    sub.add_argument(
        "--margin",
        metavar="POINTS",
        type=points,
        help="practically equal within so many (default: the recipe's)",
    )
    sub.add_argument(
        "--check",
        action="store_true",
        help="exit 3 on a verdict of worse, or a divergence in another arm than baseline",
    )
    force(sub)

    sub = command("export", "write a fine-tuned model for use elsewhere, and prove it")
    sub.add_argument("run_dir", metavar="RUN_DIR|DIR", type=Path)
    sub.add_argument("-o", "--output", metavar="DIR", type=Path, required=True)
    sub.add_argument(
        "--to",
        choices=["retrofit", "timm", "hf", "onnx"],
        default="retrofit",
        help="whose layout: retrofit.load's (default), timm's, transformers' with a modeling file, or an ONNX graph",
    )
    sub.add_argument("--arm", metavar="NAME", help="default: the first that is not the baseline")
    sub.add_argument("--seed", metavar="N", type=int, help="default: the first that finished")
    sub.add_argument("--lr", metavar="LR", type=float, help="default: the arm's best by validation loss")
    sub.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="the moving average of the weights, or not (default: the average where the recipe kept one)",
    )
    sub.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="of the weights (default: as saved)")
    sub.add_argument(
        "--finish-ramp",
        action="store_true",
        help="export norms that are still coming in as whole ones, which changes what the model computes",
    )
    force(sub)

    sub = command("verify", "prove that an export, of any target, computes what it should; exit 3 if not")
    sub.add_argument("dir", metavar="DIR", type=Path)
    return parser
