"""retrofit.recipe: what may stand in a recipe, what is said of what may not, and that nothing is lost on the way."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofit.errors import RecipeError
from retrofit.qknorm import PRESETS, QKNorm
from retrofit.recipe import Arm, Data, Model, Recipe, Train, dump, load_recipe, parse, parse_qk_norm, shipped

RETROFIT = {"baseline": {}, "retrofit": {"qk_norm": "qwen3"}}


def faults(content: Any, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse(content, overrides)
    return str(caught.value).splitlines()


def fault(content: Any, *overrides: str) -> str:
    (line,) = faults(content, *overrides)
    return line


# What may stand there


def test_an_empty_recipe_is_the_defaults() -> None:
    assert parse({}) == Recipe() == Recipe(model=Model(source="nano"), arms={"baseline": Arm()})
    empty = yaml.safe_load("model:\ndata:\narms:\ntrain:\n")
    assert parse(empty) == Recipe()
    assert parse(yaml.safe_load("arms:\n  baseline:\n")) == Recipe()


def test_short_forms_mean_the_long_ones() -> None:
    assert parse({"model": "timm/a.b"}).model == Model(source="timm/a.b")
    long = parse({"model": {"timm": "a.b", "pretrained": False, "model_args": {"depth": 2}}}).model
    assert long == Model(source="timm/a.b", pretrained=False, model_args={"depth": 2})
    assert parse({"model": {"hf": "x/y"}}).model == Model(source="hf/x/y")
    once = parse({"train": {"lr": 1e-3, "seeds": 4, "precision": "fp32"}}).train
    assert once == Train(lr=(1e-3,), seeds=(4,), precision=("fp32",))


def test_numbers_that_yaml_reads_as_words_are_numbers() -> None:
    """YAML 1.1 takes 1e-3, without a dot, for a string."""
    assert yaml.safe_load("1e-3") == "1e-3"
    train = parse(yaml.safe_load("train: {lr: [1e-3, 3.0e-3], epochs: 1e1, weight_decay: 5e-2}")).train
    assert train.lr == (0.001, 0.003)
    assert train.epochs == 10.0
    assert train.weight_decay == 0.05


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_formula_with_changes(name: str) -> None:
    arms = {"baseline": {}, "a": {"qk_norm": name}, "b": {"qk_norm": {"preset": name, "eps": 1e-4, "layers": [0, -1]}}}
    parsed = parse({"arms": arms}).arms
    assert parsed["a"].qk_norm == QKNorm.preset(name)
    assert parsed["b"].qk_norm == QKNorm.preset(name, eps=1e-4, layers=(0, -1))


def test_a_single_arm_needs_no_baseline() -> None:
    assert parse({"arms": {"tuned": {"qk_norm": "vit22b"}}}).plan()[0].arm == "tuned"


def test_the_baselines_twin_stands_last_at_the_rates_that_are_named() -> None:
    def arms(aa: Any) -> list[tuple[float, str]]:
        return [(k.lr, k.arm) for k in parse({"arms": RETROFIT, "train": {"lr": [1e-3, 1e-2]}, "aa": aa}).plan()]

    pairs = [[(lr, "baseline"), (lr, "retrofit")] for lr in (1e-3, 1e-2)]
    assert arms(False) == [*pairs[0], *pairs[1]]
    assert arms(True) == [*pairs[0], (1e-3, "aa"), *pairs[1], (1e-2, "aa")]
    for named in (["1e-2"], 1e-2):
        assert arms(named) == [*pairs[0], *pairs[1], (1e-2, "aa")]


def test_an_arm_has_its_own_settings_only_where_the_recipe_says_unmatched() -> None:
    arms = {"baseline": {}, "retrofit": {"qk_norm": "qwen3", "train": {"weight_decay": 0.0, "lr": "3e-3"}}}
    study = parse({"arms": arms, "unmatched": ["weight_decay", "lr"], "train": {"lr": [1e-3, 3e-3]}})
    assert study.train_of("retrofit") == replace(study.train, weight_decay=0.0, lr=(3e-3,))
    assert study.train_of("baseline") == study.train
    assert [k.folder for k in study.plan()] == ["baseline/lr0.001-s0", "baseline/lr0.003-s0", "retrofit/lr0.003-s0"]
    assert parse(yaml.safe_load(dump(study))) == study
    refused = faults({"arms": arms})
    assert [line.partition(":")[0] for line in refused] == [f"arms.retrofit.train.{k}" for k in ("weight_decay", "lr")]
    assert refused[0].endswith("arms differ in their norm alone, unless the recipe says unmatched: [weight_decay]")


# What may not


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"arms": {"aa": {}, "baseline": {}}}, "arms.aa: this is the name of the baseline's twin"),
        ({"arms": {"tuned": {}}, "aa": True}, "aa: a twin needs an arm called baseline"),
        ({"aa": [0.5]}, "aa: 0.5 is not in train.lr"),
        ({"aa": [float("nan")]}, "aa: true, false or some of train.lr is needed, not [nan]"),
        ({"unmatched": "batch_size"}, "unmatched: batch_size: an arm may have its own lr, warmup"),
        ({"arms": {"baseline": {}, "Baseline": {}}}, "arms.Baseline: something else in a run folder has this name"),
        ({"arms": {"baseline": {}, "run.json": {}}}, "arms.run.json: something else in a run folder has this name"),
        ({"arms": {"baseline": {}, "export": {}}}, "arms.export: something else in a run folder has this name"),
        ({"aa": "maybe"}, "aa: true, false or some of train.lr is needed, not 'maybe'"),
        ({"train": {"lockstep": "all"}}, "train.lockstep: auto, or a number of runs from 1 on"),
        ({"train": {"lockstep": 0}}, "train.lockstep: auto, or a number of runs from 1 on"),
        ({"arms": {"a": {"weight_decay": 0}}}, "arms.a.weight_decay: unknown key (keys: qk_norm, init"),
        ({"arms": {"a": {"train": {"seeds": 1}}}, "unmatched": "seeds"}, "arms.a.train.seeds: an arm may have its own"),
        ({"arms": {"a": {"train": {"warmup": 2}}}, "unmatched": "warmup"}, "arms.a.train.warmup: Input should be less"),
    ],
)
def test_twins_and_settings_that_cannot_be(content: Any, words: str) -> None:
    assert fault(content).startswith(words)


def test_every_fault_comes_at_once_with_its_path_and_the_nearest_key() -> None:
    content = {
        "trian": {},
        "model": {"source": "nano", "pretraind": True},
        "data": {"image_sise": 32, "hflip": 2, "source": 3},
        "arms": {"a": {"qk_norm": {"preset": "qwen3", "gian": "shared", "eps": "small"}}, "b": {"init": "fits"}},
        "train": {"batchsize": 8, "lr": [1e-3, "fast"], "seeds": [0.5], "steps": 0, "precision": "fp64"},
    }
    found = faults(content, "epochs", "=3")
    expected = {
        "'epochs' is not a setting": "train.epochs=3",
        "'=3' is not a setting": "key=value",
        "trian: unknown key": "did you mean train?",
        "model.pretraind: unknown key": "did you mean pretrained?",
        "data.image_sise: unknown key": "did you mean image_size",
        "data.hflip: ": "not 2",
        "data.source: ": "not 3",
        "arms.a.qk_norm.gian: unknown key": "did you mean gain?",
        "arms.a.qk_norm.eps: ": "not 'small'",
        "arms.b.init: ": "not 'fits'",
        "train.batchsize: unknown key": "did you mean batch_size?",
        "train.lr.1: ": "not 'fast'",
        "train.seeds.0: ": "not 0.5",
        "train.steps: ": "not 0",
        "train.precision.0: ": "not 'fp64'",
    }
    for start, words in expected.items():
        (line,) = [line for line in found if line.startswith(start)]
        assert words in line
    assert len(found) == len(expected)


def test_an_unknown_key_lists_the_keys_that_are_there() -> None:
    line = fault({"arms": {"a": {"qk_norm": {"zzz": 1}}}})
    assert line.startswith("arms.a.qk_norm.zzz: unknown key (keys: norm, axis, gain,")
    assert "preset" in line
    assert "(keys: model, data, arms, train, aa, unmatched, margin)" in fault({"zzz": None})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"arms": {"a": {}, "b": {}}}, "arms: one of them must be called baseline"),
        ({"arms": {"baseline": {"qk_norm": "qwen3"}}}, "arms.baseline.qk_norm: the baseline has no QK-Norm"),
        ({"arms": {}}, "arms: at least one is needed"),
        ({"arms": {"../up": {}}}, "arms.../up: a name of letters"),
        ({"arms": {"a/b": {}}}, "arms.a/b: a name of letters"),
        ({"arms": {"": {}}}, "arms.: a name of letters"),
        ({"train": {"lr": [1e-3, 0.001]}}, "train.lr: the same value stands there twice"),
        ({"train": {"lr": [1e-3, 0.0010000001]}}, "train.lr: the same value stands there twice"),
        ({"train": {"seeds": [1, 1]}}, "train.seeds: the same value stands there twice"),
        ({"train": {"precision": ["bf16", "bf16"]}}, "train.precision: the same value stands there twice"),
        ({"train": {"seeds": []}}, "train.seeds: at least one value"),
        ({"train": {"lr": []}}, "train.lr: at least one value"),
        ({"train": {"lr": 0}}, "train.lr.0: "),
        ({"train": {"lr": float("nan")}}, "train.lr.0: "),
        ({"train": {"lr": float("inf")}}, "train.lr.0: "),
        ({"train": {"lr": 1e300}}, "train.lr.0: "),
        ({"train": {"seeds": [-1]}}, "train.seeds.0: "),
        ({"train": {"clip_grad": 0}}, "train.clip_grad: "),
        ({"train": {"warmup": 1.5}}, "train.warmup: "),
        ({"data": {"crop_scale": [1.0, 0.5]}}, "data.crop_scale: the smaller area comes first"),
        ({"data": {"train_images": 0}}, "data.train_images: "),
        ({"arms": {"a": {"qk_norm": "qwen"}}}, "arms.a.qk_norm: unknown preset 'qwen'; did you mean qwen3?"),
        ({"arms": {"a": {"qk_norm": {"eps": -1}}}}, "arms.a.qk_norm: eps=-1"),
        ({"arms": {"a": {"qk_norm": {"layers": "all"}}}}, "arms.a.qk_norm.layers: "),
        ({"arms": {"a": {"qk_norm": {"bias": True, "gain": "none"}}}}, "arms.a.qk_norm: bias and zero_centered"),
        (
            {"model": {"timm": "x", "pretrained": False}, "arms": RETROFIT},
            "arms.retrofit.init: fit keeps what a checkpoint knows; without one, take ones",
        ),
        ({"arms": ["a"]}, "arms: "),
        ({"train": "fast"}, "train: "),
        ({"model": 3}, "model: "),
        ({"model": {"timm": "a", "source": "b"}}, "model.timm: unknown key"),
        ({1: 2}, "1: "),
    ],
)
def test_a_wrong_value_is_one_line_that_begins_with_its_path(content: Any, words: str) -> None:
    assert fault(content).startswith(words)


def test_a_recipe_made_in_python_is_checked_too() -> None:
    with pytest.raises(RecipeError, match=r"train.lr: .*\n.*crop_scale"):
        Recipe(train=Train(lr=(1e-3, 1e-3)), data=Data(crop_scale=(1.0, 0.1)))


def test_random_weights_take_a_norm_that_starts_as_published() -> None:
    content = {"model": {"timm": "x", "pretrained": False}, "arms": RETROFIT}
    arms = parse(content, ["arms.retrofit.init=ones"]).arms
    assert arms == {"baseline": Arm(), "retrofit": Arm(qk_norm=QKNorm(), init="ones")}
    assert parse(content, ["model.pretrained=true"]).arms["retrofit"].init == "fit"
    with pytest.raises(RecipeError, match=r"^arms\.retrofit\.init: .*\narms\.more\.init: "):
        parse(content, ["arms.more={qk_norm: vit22b}"])


# Overrides


def test_overrides_name_the_same_keys() -> None:
    recipe = parse(
        {"model": "timm/x", "arms": RETROFIT, "train": {"lr": 1.0, "steps": 5}},
        [
            "train.lr=[1e-3,3e-3]",
            "train.seeds=[0, 1]",
            "train.steps=null",
            "data.source=a=b.parquet",
            "data.image_size=98",
            "arms.retrofit.init=ones",
            "arms.third={qk_norm: vit22b}",
        ],
    )
    assert recipe.train == Train(lr=(1e-3, 3e-3), seeds=(0, 1))
    assert (recipe.data.source, recipe.data.image_size) == ("a=b.parquet", 98)
    assert recipe.arms["retrofit"].init == "ones"
    assert recipe.arms["third"].qk_norm == QKNorm.preset("vit22b")


@pytest.mark.parametrize("model", ["timm/x", {"timm": "x"}, {"source": "timm/x"}])
def test_a_model_is_overridden_whole_or_in_part(model: Any) -> None:
    assert parse({"model": model}, ["model=timm:../a dir"]).model == Model(source="timm:../a dir")
    assert parse({"model": model}, ["model.pretrained=false"]).model == Model(source="timm/x", pretrained=False)
    args = parse({"model": model}, ["model.model_args.depth=2"]).model.model_args
    assert args == {"depth": 2}
    assert parse({}, ["model.pretrained=no"]).model == Model(source="nano", pretrained=False)


@pytest.mark.parametrize("norm", ["vit22b", {"preset": "vit22b"}, {"norm": "layernorm"}])
def test_a_part_of_a_norm_is_overridden_and_the_rest_stays(norm: Any) -> None:
    content = {"arms": {"baseline": {}, "retrofit": {"qk_norm": norm}}}
    changed = parse(content, ["arms.retrofit.qk_norm.gain=per_head"]).arms["retrofit"].qk_norm
    assert changed == QKNorm.preset("vit22b", gain="per_head")


def test_overriding_changes_nothing_that_was_given() -> None:
    content = {"arms": {"baseline": {}, "retrofit": {"qk_norm": {"preset": "qwen3"}}}, "train": None}
    parse(content, ["arms.retrofit.qk_norm.eps=1e-3", "train.steps=3"])
    assert content == {"arms": {"baseline": {}, "retrofit": {"qk_norm": {"preset": "qwen3"}}}, "train": None}


@pytest.mark.parametrize("text", ["", "=", "train", ".=1", "train.=1", ".lr=1", "train..lr=1", "-x"])
def test_what_is_no_override_says_how_to_write_one(text: str) -> None:
    assert fault({}, text).startswith(f"{text!r} is not a setting; write key=value, such as train.epochs=3")


def test_an_override_is_checked_as_a_recipe_is() -> None:
    assert fault({}, "train.lrs=1").startswith("train.lrs: unknown key; did you mean lr?")
    assert fault({}, "train.lr=[1e-3, oops").startswith("train.lr.0: ")  # no YAML, so a word
    assert fault({}, "train.seeds=2024-13-45").startswith("train.seeds.0: ")  # a date that is none


def test_a_norm_from_the_command_line() -> None:
    spec = parse_qk_norm("qwen3", ["eps=1e-5", "gain=per_head", "layers=[0, 1]"])
    assert spec == QKNorm(eps=1e-5, gain="per_head", layers=(0, 1))
    assert parse_qk_norm(QKNorm(norm="layernorm"), ["bias=true"]) == QKNorm(norm="layernorm", bias=True)
    with pytest.raises(RecipeError) as caught:
        parse_qk_norm("qwen3", ["gian=shared", "bias=maybe", "eps"])
    lines = sorted(str(caught.value).splitlines())
    assert [line.split(":")[0].split(" is ")[0] for line in lines] == ["'eps'", "bias", "gian"]
    with pytest.raises(RecipeError, match=r"^eps=-1.0 must be"):
        parse_qk_norm("qwen3", ["eps=-1"])
    with pytest.raises(RecipeError, match=r"^unknown preset 'qwen'; did you mean qwen3\?"):
        parse_qk_norm("qwen", [])


# Files


def test_a_file_or_the_name_of_a_shipped_recipe(tmp_path: Path) -> None:
    path = tmp_path / "my recipe.yaml"
    path.write_text("data: {source: Bilder/Käfer}\ntrain: {steps: 3}\n", encoding="utf-8")
    assert load_recipe(path, ["train.seeds=2"]) == Recipe(
        data=Data(source="Bilder/Käfer"), train=Train(steps=3, seeds=(2,))
    )
    assert load_recipe(str(path)).data.source == "Bilder/Käfer"
    assert load_recipe("nano") == load_recipe(shipped()["nano"])
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_recipe(tmp_path / "empty.yaml") == Recipe()


@pytest.mark.parametrize("source", ["nan", "nano.yaml", "runs/nano.yml", "there/is/none"])
def test_a_missing_file_names_the_shipped_recipes(source: str) -> None:
    with pytest.raises(RecipeError, match=rf"^no recipe .*{source}.*nano"):
        load_recipe(source)
    with pytest.raises(RecipeError, match=r"did you mean nano\?"):
        load_recipe("nanno")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"train: [", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"seeds: 2024-13-45", "is not YAML"),
        (b"- a\n- b\n", "holds no keys"),
        (b"just words", "holds no keys"),
        (b"{[1]: 2}", "is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {steps: 1}\ndata: {}\ntrain: {steps: 2}\n", "train"),
        ("train:\n  lr: 1.0e-3\n  steps: 2\n  lr: 1.0e-4\n", "lr"),
        ("arms:\n  baseline: {}\n  a: {qk_norm: qwen3}\n  a: {qk_norm: vit22b}\n", "a"),
        ("model: {timm: x, model_args: {depth: 2, depth: 3}}\n", "depth"),
    ],
)
def test_a_key_that_stands_there_twice_is_refused(tmp_path: Path, text: str, key: str) -> None:
    """YAML itself lets the second one win."""
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"\b{key} stands there twice") as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_same_key_in_two_places_is_no_key_twice(tmp_path: Path) -> None:
    """Nor is one that goes over a merged one, which YAML is meant for."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "arms:\n  baseline: {}\n  a: {qk_norm: &own {preset: qwen3, eps: 1.0e-3}}\n"
        "  b: {qk_norm: &more {<<: *own, eps: 1.0e-4}}\n  c: {qk_norm: {<<: *more, gain: per_head}}\n"
    )
    eps = {name: arm.qk_norm.eps for name, arm in load_recipe(path).arms.items() if arm.qk_norm}
    assert eps == {"a": 1e-3, "b": 1e-4, "c": 1e-4}


# The plan


def test_the_plan_is_every_combination_with_pairs_together() -> None:
    recipe = parse({"arms": RETROFIT, "train": {"lr": [1e-3, 3e-3], "seeds": [5, 6]}})
    assert [(k.seed, k.lr, k.arm) for k in recipe.plan()] == [
        (seed, lr, arm) for seed in (5, 6) for lr in (1e-3, 3e-3) for arm in ("baseline", "retrofit")
    ]
    assert recipe.plan()[3].folder == "retrofit/lr0.003-s5"
    assert {k.precision for k in recipe.plan()} == {"bf16"}


def test_several_precisions_have_folders_of_their_own() -> None:
    plan = parse({"arms": RETROFIT, "train": {"precision": ["fp32", "bf16"]}}).plan()
    assert [k.folder for k in plan] == [
        f"{arm}/lr0.0001-s0-{precision}" for precision in ("fp32", "bf16") for arm in RETROFIT
    ]
    assert [k.precision for k in plan] == ["fp32", "fp32", "bf16", "bf16"]


# Nothing is lost

FLOATS = st.floats(1e-9, 1e3, allow_nan=False)
WORDS = st.text(min_size=1, max_size=12).filter(lambda text: not re.search("[\ud800-\udfff]", text))
NORMS = st.sampled_from(sorted(PRESETS)).map(QKNorm.preset) | st.builds(
    QKNorm,
    norm=st.sampled_from(["rms", "layernorm"]),
    axis=st.sampled_from(["head", "projection"]),
    gain=st.sampled_from(["shared", "per_head"]),
    bias=st.booleans(),
    zero_centered=st.booleans(),
    eps=FLOATS,
    layers=st.none() | st.lists(st.integers(-9, 9), min_size=1, max_size=3).map(tuple),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


def valid(model: Model, arms: dict[str, Arm], **more: Any) -> Recipe:
    """Random weights have nothing that `match` could keep."""
    if not model.pretrained:
        arms = {name: replace(arm, init="ones") if arm.qk_norm else arm for name, arm in arms.items()}
    return Recipe(model=model, arms=arms, **more)


RECIPES = st.builds(
    valid,
    model=st.builds(Model, source=WORDS, model_args=st.dictionaries(WORDS, JSON, max_size=2), pretrained=st.booleans()),
    data=st.builds(
        Data,
        source=WORDS,
        train=st.none() | WORDS,
        image_size=st.none() | st.integers(1, 999),
        hflip=st.floats(0, 1),
        color_jitter=st.floats(0, 9),
        auto_augment=st.none() | WORDS,
    ),
    arms=st.dictionaries(
        st.from_regex(r"[a-z0-9][A-Za-z0-9_.-]{0,6}", fullmatch=True).filter("baseline".__ne__),
        st.builds(Arm, qk_norm=st.none() | NORMS, init=st.sampled_from(["ones", "match", "fit"])),
        max_size=3,
    ).map(lambda arms: {"baseline": Arm(), **arms}),
    train=st.builds(
        Train,
        epochs=FLOATS,
        steps=st.none() | st.integers(1, 10**6),
        lr=st.lists(FLOATS, min_size=1, max_size=3, unique_by="{:g}".format).map(tuple),
        seeds=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3, unique=True).map(tuple),
        precision=st.lists(st.sampled_from(["fp32", "bf16", "fp16"]), min_size=1, unique=True).map(tuple),
        warmup=st.floats(0, 1),
        optimizer=WORDS,
        clip_grad=st.none() | FLOATS,
        attention=st.sampled_from(["auto", "fused", "unfused"]),
        schedule=st.sampled_from(["cosine", "linear", "constant"]),
        optimizer_args=st.dictionaries(WORDS, JSON, max_size=2),
        layer_decay=st.floats(0.1, 1),
        freeze=st.sampled_from(["none", "head_only", "attention_only", "norms_only"]),
        mixup=st.floats(0, 9),
        drop_path=st.none(),
        ema=st.none() | st.floats(0.1, 0.99),
        compile=st.none() | WORDS.filter(lambda text: text not in ("true", "false")),
        trackers=st.lists(st.sampled_from(["tensorboard", "trackio", "wandb"]), unique=True).map(tuple),
    ),
)


@settings(max_examples=40, deadline=None)
@given(RECIPES)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    again = load_recipe(path)
    assert again == recipe
    assert dump(again) == dump(recipe)
    assert len({key.folder for key in recipe.plan()}) == len(recipe.plan())


def test_a_written_recipe_is_one_that_a_person_can_read() -> None:
    text = dump(parse({"model": "nano", "arms": RETROFIT}))
    assert text.startswith("model:\n  source: nano\n  model_args: {}\n  pretrained: true\ndata:\n")
    assert "lr: [0.0001]" in text
    assert "!!" not in text
