"""retrofit.errors: what a misspelled name is answered with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrofit import errors
from retrofit.errors import RetrofitError, nearest

NAMES = ["vit_tiny_patch16_224", "vit_base_patch16_224", "davit_tiny", "resnet50"]


def test_every_kind_is_one_that_the_command_line_prints() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) >= 6
    assert all(issubclass(kind, RetrofitError) for kind in kinds)
    assert issubclass(RetrofitError, ValueError)  # what a library user catches


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("vit_tiny_patch16_242", "vit_tiny_patch16_224"),
        ("vit_tny", "vit_tiny_patch16_224"),  # near by its beginning
        ("resnet_50", "resnet50"),
        ("davit-tiny", "davit_tiny"),
    ],
)
def test_the_nearest_name_comes_first(name: str, first: str) -> None:
    assert nearest(name, NAMES).startswith(f"; did you mean {first}")


def test_nothing_near_says_nothing() -> None:
    assert nearest("convnext", NAMES) == ""
    assert nearest("anything", []) == ""


def test_no_more_than_n_and_no_name_twice() -> None:
    known = [f"model_{i}" for i in range(9)]
    assert nearest("model_", known, n=2).count("model_") == 2
    assert nearest("gain", ["gain", "gain"]) == "; did you mean gain?"


@given(st.lists(st.text(max_size=8), max_size=6), st.text(max_size=8))
def test_the_answer_does_not_depend_on_the_order_of_what_is_known(known: list[str], name: str) -> None:
    assert nearest(name, known) == nearest(name, known[::-1])
    assert name not in known or nearest(name, known).startswith(f"; did you mean {name}")
