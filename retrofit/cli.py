"""The command line: one short handler a subcommand. torch is imported only where a command needs it.

Exit codes: 0 success; 2 a user's mistake; 3 checked, and the answer is no; 1 a fault of ours; 130, 143 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from retrofit import arguments
from retrofit.errors import CheckpointError, Interrupted, ModelError, RetrofitError
from retrofit.qknorm import QKNorm
from retrofit.runfiles import dumps, locked, read_json

OK, FAULT, MISTAKE, NO = 0, 1, 2, 3
_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)
"""A disk or a quota that is full, what may not be written, and a file where a folder should be."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = arguments.parser(
        models=_models, probe=_probe, apply=_apply, pair=_pair, report=_report, export=_export, verify=_verify
    )
    args, rest = parser.parse_known_args(argv)
    settings = [word for word in rest if "=" in word and not word.startswith("-")]
    strange = [word for word in rest if word not in settings]
    if strange or (settings and not hasattr(args, "settings")):
        parser.error(f"unrecognized arguments: {' '.join(strange or settings)}")
    if hasattr(args, "settings"):
        args.settings = [*args.settings, *settings]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a log that cannot hold a minus sign or a name
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGINT):  # the second too, which a shell's background jobs ignore
        signal.signal(number, _interrupt)
    try:
        return int(args.handler(args))
    except RetrofitError as error:
        if not _is_main_process():
            return MISTAKE
        lines = str(error).splitlines()
        return _said("\n  ".join(lines if len(lines) == 1 else ["", *lines]), MISTAKE)
    except BrokenPipeError:
        sys.stderr.close()
        return OK
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        return _said(f"{error.filename or 'the output'} cannot be written: {error.strerror}", MISTAKE)
    except KeyboardInterrupt as error:
        kept = "what was trained is saved" if isinstance(error, Interrupted) else "what was saved is kept"
        resumes = f"; {kept}, and the same command goes on from there" if args.handler is _pair else ""
        return _said(f"interrupted{resumes}", 128 + getattr(error, "number", signal.SIGINT))


def _said(words: str, code: int) -> int:
    print(f"retrofit: {words}".replace(": \n", ":\n", 1), file=sys.stderr)
    return code


def _interrupt(number: int, _frame: Any) -> NoReturn:
    raise Interrupted(number)


def _models(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from retrofit.registry import registered

    entries = list(tqdm(registered(), unit="model", file=sys.stderr, mininterval=1))
    if args.json:
        print(dumps(entries, indent=2))
    else:
        from retrofit.tables import print_models

        print_models(entries)
    return OK


def _probe(args: argparse.Namespace) -> int:
    import copy

    from retrofit.checkpoint import load_model
    from retrofit.data import eval_batches, open_images
    from retrofit.models import evaluating, family_of, left_out
    from retrofit.probes import probe
    from retrofit.surgery import insert_qk_norm, survey

    model = load_model(args.model, image_size=args.image_size)
    family, images = family_of(model), open_images(args.data, args.images)

    def batches() -> Any:
        return (batch.pixels for batch in eval_batches(images, family.preprocess(model), 16))

    with evaluating(model), probe(model) as seen:
        for pixels in batches():
            family.forward(model, pixels)
    spec = QKNorm.preset("qwen3", gain="per_head")
    found = survey(model, spec)
    bounds, refusal = [], found.refusal
    if refusal is None:
        try:
            placed = insert_qk_norm(copy.deepcopy(model), spec, batches(), init="match")
            bounds = [layer.logit_bound for layer in placed.layers]
        except ModelError as error:  # a model that has diverged can still be looked at
            refusal = str(error)
    document = {
        "model": args.model,
        "data": args.data,
        "images": len(images),
        "layers": seen.rows(per_head=True),
        "qk_norm": {
            "formula": spec.describe(),
            "sites": len(found.sites),
            "skipped": found.skipped,
            "left_out": left_out(found.skipped),
            "refusal": refusal,
            "largest_bound": max((b for b in bounds if b is not None), default=None),
        },
    }
    if args.json:
        print(dumps(document, indent=2))
    else:
        from retrofit.tables import print_probe

        print_probe(document)
    return OK


def _apply(args: argparse.Namespace) -> int:
    recipe, arm = _to_apply(args)
    from retrofit.checkpoint import MANIFEST, fingerprint, load_model
    from retrofit.data import eval_batches, open_images
    from retrofit.export import export_model
    from retrofit.models import family_of
    from retrofit.runfiles import check_free
    from retrofit.surgery import insert_qk_norm
    from retrofit.tables import print_calibration, shock_lines

    check_free(args.output, MANIFEST, args.force)
    base, data = recipe.model, recipe.data
    model = load_model(base.source, image_size=data.image_size, model_args=base.model_args, pretrained=base.pretrained)
    preprocess, weights = family_of(model).preprocess(model), fingerprint(model.state_dict())
    images = open_images(data.source, data.calibration_images)
    # Every fourth image is kept out of calibration, to measure insertion shock on.
    held_out = images.subset([i for i in range(len(images)) if i % 4 == 3])
    calibration = images.subset([i for i in range(len(images)) if i % 4 != 3])
    insertion = insert_qk_norm(
        model,
        arm.qk_norm,
        images=(batch.pixels for batch in eval_batches(calibration, preprocess, 64)),
        init=arm.init,
        held_out=[batch.pixels for batch in eval_batches(held_out, preprocess, 64)] if len(held_out) else None,
    )
    about = {
        "base": base.source,
        "base_sha256": weights,
        "data": data.source,
        "init": arm.init,
        "calibration_images": len(calibration),
        "shock": {init: shock.document() for init, shock in insertion.shock.items()},
    }
    sample = next(eval_batches(images, preprocess, 4)).pixels
    findings = export_model(model, args.output, about=about, images=sample, force=args.force)
    print(f"{len(insertion.sites)} attention layers now have {arm.qk_norm.describe()}")
    print_calibration(insertion.layers)
    print("\n".join([*shock_lines(insertion.shock), *insertion.remarks, *findings, f"written to {args.output}"]))
    return OK


def _to_apply(args: argparse.Namespace) -> tuple[Any, Any]:
    """What `apply` is to carry out, as a recipe and an arm of it: from a recipe file, or from the options alone."""
    from dataclasses import replace

    from retrofit.recipe import load_recipe, parse, parse_qk_norm

    if Path(args.model).suffix in (".yaml", ".yml"):
        recipe = load_recipe(args.model)
    else:
        recipe = parse({"model": args.model, "arms": {"baseline": {}, "retrofit": {"qk_norm": "qwen3"}}})
    arm = next((arm for arm in recipe.arms.values() if arm.qk_norm is not None), None)
    if arm is None:
        raise RetrofitError(f"no arm of {args.model} has a qk_norm")
    if args.preset is not None or args.settings:
        assert arm.qk_norm is not None
        arm = replace(arm, qk_norm=parse_qk_norm(args.preset or arm.qk_norm, args.settings))
    given = {"source": args.data, "calibration_images": args.images, "image_size": args.image_size}
    data = replace(recipe.data, **{key: value for key, value in given.items() if value is not None})
    return replace(recipe, data=data), replace(arm, init=args.init or arm.init)


def _pair(args: argparse.Namespace) -> int:
    from retrofit.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.settings)
    run_dir = args.output or Path("runs") / Path(args.recipe).stem
    if args.dry_run:
        from retrofit.rehearsal import rehearse

        said = rehearse(recipe)
        if _is_main_process():
            print(said)
        return OK
    from retrofit.pair import run_pair

    trained = run_pair(recipe, run_dir, shard=args.shard, force=args.force, command=["retrofit", *sys.argv[1:]])
    if not _is_main_process():
        return OK
    if not trained:
        print(f"part {args.shard[0]} of {args.shard[1]} of this plan holds no pair: nothing to do")
        return OK
    from retrofit.report import write_report

    with locked(run_dir, wait=True):  # the last of several parts to end reports on all of them
        path = write_report(run_dir, args.force)
    _show_report(path)
    return OK


def _report(args: argparse.Namespace) -> int:
    from retrofit.report import write_overview, write_report

    several = len(args.run_dirs) > 1
    if several:
        print(write_overview(args.run_dirs, args.output, args.force, margin=args.margin))
    folder = None if several else args.output
    paths = [write_report(run_dir, args.force, margin=args.margin, folder=folder) for run_dir in args.run_dirs]
    documents = [_show_report(path) for path in paths]
    found = [(run, o) for run, d in zip(args.run_dirs, documents, strict=True) for o in d["verdict"]["objections"]]
    for run, objection in found if args.check else ():
        print(f"retrofit: {run}: {objection}", file=sys.stderr)
    return NO if found and args.check else OK


def _export(args: argparse.Namespace) -> int:
    from retrofit.export import export_run

    findings = export_run(
        args.run_dir,
        args.output,
        to=args.to,
        arm=args.arm,
        seed=args.seed,
        lr=args.lr,
        ema=args.ema,
        dtype=args.dtype,
        finish_ramp=args.finish_ramp,
        force=args.force,
    )
    print("\n".join([*findings, f"exported to {args.output}"]))
    return OK


def _verify(args: argparse.Namespace) -> int:
    from retrofit.export import verify

    try:
        proof = verify(args.dir)
    except CheckpointError as error:
        if not (args.dir / "retrofit.json").is_file():
            raise
        print(f"retrofit: {error}", file=sys.stderr)
        return NO
    print("\n".join(proof.findings), file=sys.stdout if proof.ok else sys.stderr)
    return OK if proof.ok else NO


def _is_main_process() -> bool:
    """False in the others that a launcher has started beside the first, which speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _show_report(path: Path) -> Any:
    """Prints what a report found, and returns its document."""
    document = read_json(path.with_suffix(".json"))
    print("\n".join([document["verdict"]["headline"], *document["verdict"]["sentences"], f"report: {path}"]))
    return document
