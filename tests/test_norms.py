"""The norm modules against float64 formulas, the libraries' own norms, and the bound on logits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import outputs_of, tiny_timm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from retrofit.norms import HeadNorm, logit_bound
from retrofit.qknorm import QKNorm

B, H, N, D = 2, 3, 5, 4

NORMS, AXES, GAINS = ("rms", "layernorm", "l2"), ("head", "projection"), ("shared", "per_head", "none")


def combinations():
    """Every formula that QKNorm allows, with scales of every kind."""
    scales = (
        {},
        {"scale": "learned", "scale_init": 3.0},
        {"scale": "learned_per_head", "scale_init": 3.0},
        {"scale": "learned", "scale_init": 3.0, "scale_max": 20.0},
        {"scale": "learned_per_head", "scale_init": 3.0, "scale_max": 20.0},
    )
    for norm, axis, gain in itertools.product(NORMS, AXES, GAINS):
        for bias, zero in itertools.product((False, True), repeat=2):
            if gain == "none" and (bias or zero):
                continue
            for scale in scales:
                yield QKNorm(norm=norm, axis=axis, gain=gain, bias=bias, zero_centered=zero, **scale)


SPECS = list(combinations())


def randomised(norm: HeadNorm, generator: torch.Generator) -> HeadNorm:
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if name == "scale":  # some of them above the clamp
                parameter.copy_(2 + 2 * torch.rand(parameter.shape, generator=generator))
    return norm


def formula(x: np.ndarray, spec: QKNorm, parameters: dict[str, np.ndarray], attention_scale: float) -> np.ndarray:
    """Head by head, image by image, token by token, in float64. x: [B, H, N, D]."""
    heads, channels = x.shape[1], x.shape[3]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    shift, scale = parameters.get("shift"), parameters.get("scale")

    def of_head(values: np.ndarray, h: int) -> np.ndarray:
        return values[h * channels : (h + 1) * channels] if values.size > channels else values

    result = np.empty_like(x)
    for b in range(x.shape[0]):
        for n in range(x.shape[2]):
            token = x[b, :, n].copy()  # [H, D]
            if shift is not None:
                token -= shift.reshape(heads, channels)
            for h in range(heads):
                seen = token.ravel() if spec.axis == "projection" else token[h]
                if spec.norm == "rms":
                    y = token[h] / math.sqrt((seen**2).mean() + spec.eps)
                elif spec.norm == "layernorm":
                    y = (token[h] - seen.mean()) / math.sqrt(seen.var() + spec.eps)
                else:
                    y = token[h] / max(math.sqrt((seen**2).sum()), spec.eps)
                if weight is not None:
                    y = y * (of_head(weight, h) + (1 if spec.zero_centered else 0))
                if bias is not None:
                    y = y + of_head(bias, h)
                if scale is not None:
                    s = scale[h] if scale.size > 1 else scale[0]
                    if spec.scale_max is not None:
                        s = min(math.exp(s), spec.scale_max)
                    y = y * s / attention_scale
                result[b, h, n] = y
    return result


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("role", ["q", "k"])
def test_every_formula_in_float64(layout: str, role: str) -> None:
    assert len(SPECS) == 270
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        norm = HeadNorm(
            spec, role, H, D, layout=layout, attention_scale=0.5, scale_init=3.0, shifted=True, dtype=torch.float64
        )
        norm = randomised(norm, generator)
        kinds = {name for name, _ in norm.named_parameters()}
        wanted = {"weight"} if spec.gain != "none" else set()
        wanted |= {"bias"} if spec.bias else set()
        wanted |= {"shift"} | ({"scale"} if role == "q" and spec.scale != "fixed" else set())
        assert kinds == wanted, spec
        assert all(p.ndim == 1 for p in norm.parameters())
        x = torch.randn(B, H, N, D, generator=generator, dtype=torch.float64)
        given_x = x if layout == "BHND" else x.transpose(1, 2)
        out = norm(given_x)
        out = out if layout == "BHND" else out.transpose(1, 2)
        parameters = {name: p.detach().numpy() for name, p in norm.named_parameters()}
        np.testing.assert_allclose(
            out.detach().numpy(), formula(x.numpy(), spec, parameters, 0.5), rtol=1e-10, atol=1e-12, err_msg=str(spec)
        )


@pytest.mark.parametrize("scale", ["learned", "learned_per_head"])
@pytest.mark.parametrize("clamp", [None, 100.0])
def test_learned_scale_takes_the_place_of_the_models(scale: str, clamp: float | None) -> None:
    spec = QKNorm(norm="l2", gain="none", eps=1e-12, scale=scale, scale_init=7.0, scale_max=clamp)
    q_norm = HeadNorm(spec, "q", H, D, attention_scale=0.3, scale_init=7.0)
    k_norm = HeadNorm(spec, "k", H, D, attention_scale=0.3, scale_init=7.0)
    q, k = torch.randn(2, B, H, N, D)
    cosine = F.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
    torch.testing.assert_close(0.3 * q_norm(q) @ k_norm(k).mT, 7.0 * cosine, rtol=1e-5, atol=1e-5)
    assert q_norm.scale.shape == ((1,) if scale == "learned" else (H,))


def test_starts_as_the_formula_itself() -> None:
    for spec in SPECS:
        norm = HeadNorm(spec, "k", H, D, shifted=True)
        for name, parameter in norm.named_parameters():
            start = 1.0 if name == "weight" and not spec.zero_centered else 0.0
            assert (parameter == start).all(), (spec, name)


def test_gains_have_the_wished_size() -> None:
    sizes = {gain: HeadNorm(QKNorm(gain=gain), "q", H, D).weight for gain in GAINS}
    assert sizes["none"] is None
    assert (sizes["shared"].shape, sizes["per_head"].shape) == ((D,), (H * D,))


# The libraries' own norms: the same weights in, the same numbers out.


def same(norm: HeadNorm, theirs: nn.Module, x: torch.Tensor, theirs_x: torch.Tensor | None = None) -> None:
    own = randomised(norm, torch.Generator().manual_seed(5))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            other = getattr(theirs, name)
            other.copy_(parameter.view_as(other))
        result = theirs(x if theirs_x is None else theirs_x)
        torch.testing.assert_close(own(x), result.view_as(x) if theirs_x is None else result, rtol=1e-6, atol=1e-6)


X = torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(4)) * 3


def test_qwen3() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    same(HeadNorm(QKNorm.preset("qwen3"), "q", H, D), Qwen3RMSNorm(D, eps=1e-6), X)


def test_gemma3() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    same(HeadNorm(QKNorm.preset("gemma3"), "q", H, D), Gemma3RMSNorm(D, eps=1e-6), X)


def test_gemma3_in_bfloat16_adds_one_in_float32() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    own = HeadNorm(QKNorm.preset("gemma3"), "q", H, D, dtype=torch.bfloat16)
    theirs = Gemma3RMSNorm(D, eps=1e-6).bfloat16()
    with torch.no_grad():
        own.weight.copy_(torch.tensor([0.0021, 0.0013, -0.0017, 0.0031]))  # lost where 1 + w is rounded to bfloat16
        theirs.weight.copy_(own.weight)
    assert torch.equal(own.gain, 1 + own.weight.float())
    assert torch.equal(own(X.bfloat16()), theirs(X.bfloat16()))


def test_olmo2() -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    norm, theirs = HeadNorm(QKNorm.preset("olmo2"), "q", H, D), Olmo2RMSNorm(H * D, eps=1e-6)
    randomised(norm, torch.Generator().manual_seed(6))
    with torch.no_grad():
        theirs.weight.copy_(norm.weight)
        flat = theirs(X.transpose(1, 2).flatten(2))
    torch.testing.assert_close(norm(X), flat.unflatten(-1, (H, D)).transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_chameleon() -> None:
    from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm

    theirs = ChameleonLayerNorm((H, D))
    same(HeadNorm(QKNorm.preset("chameleon"), "q", H, D, layout="BNHD"), theirs, X.transpose(1, 2))


def test_llama4() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

    same(HeadNorm(QKNorm.preset("llama4"), "q", H, D), Llama4TextL2Norm(eps=1e-5), X)


def test_flax_layernorm_of_vit22b() -> None:
    norm = HeadNorm(QKNorm.preset("vit22b"), "q", H, D)
    randomised(norm, torch.Generator().manual_seed(6))
    torch.testing.assert_close(norm(X), F.layer_norm(X, (D,), norm.weight, None, 1e-6), rtol=1e-6, atol=1e-6)


def test_unit_l2_is_torch_normalize() -> None:
    norm = HeadNorm(QKNorm.preset("henry2020"), "k", H, D)
    torch.testing.assert_close(norm(X), F.normalize(X, dim=-1), rtol=1e-6, atol=1e-6)


def test_a_model_built_with_timms_qk_norm_and_one_retrofitted_agree(images) -> None:
    from retrofit.surgery import insert_qk_norm

    native, plain = tiny_timm(qk_norm=True), tiny_timm()
    with torch.no_grad():
        for name, p in native.named_parameters():
            if "_norm." in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    plain.load_state_dict(native.state_dict(), strict=False)
    assert not torch.allclose(outputs_of(native, images), outputs_of(plain, images), atol=1e-4)
    insert_qk_norm(plain, QKNorm.preset("timm"), init="ones")
    lacking = plain.load_state_dict(native.state_dict(), strict=False)
    assert lacking.unexpected_keys == []
    assert all(key.endswith("_norm.shift") for key in lacking.missing_keys)
    torch.testing.assert_close(outputs_of(plain, images), outputs_of(native, images), rtol=1e-5, atol=1e-5)


# Precision and extremes.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", ["half", "float32"])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, weights: str) -> None:
    generator = torch.Generator().manual_seed(7)
    near_the_limit = torch.randn(B, H, N, D, generator=generator).clamp(-2, 2) * 3e4
    for spec in SPECS:
        norm = HeadNorm(
            spec, "q", H, D, scale_init=3.0, attention_scale=0.5, dtype=dtype if weights == "half" else torch.float32
        )
        randomised(norm, generator)
        for x in (near_the_limit.to(dtype), (near_the_limit * 1e-8).to(dtype)):
            out = norm(x)
            assert out.dtype == dtype
            parameters = {name: p.detach().double().numpy() for name, p in norm.named_parameters()}
            wanted = torch.from_numpy(formula(x.double().numpy(), spec, parameters, 0.5))
            # One rounding to the dtype, none before it.
            step = torch.finfo(dtype).eps * wanted.abs() + 2e-5 + torch.finfo(dtype).smallest_normal
            assert ((out.double() - wanted).abs() <= step).all(), spec


def test_float64_stays_float64() -> None:
    assert HeadNorm(QKNorm(), "q", H, D)(X.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-12, 1e-4])
def test_tiny_vectors_give_finite_values_and_gradients(dtype: torch.dtype, length: float) -> None:
    for spec in SPECS:
        norm = HeadNorm(spec, "q", H, D, scale_init=3.0, dtype=dtype)
        x = (torch.ones(1, H, 2, D) * length).to(dtype).requires_grad_()
        out = norm(x)
        out.float().sum().backward()
        assert out.isfinite().all(), spec
        assert x.grad.isfinite().all(), spec
        assert all(p.grad.isfinite().all() for p in norm.parameters()), spec


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(8)
    for spec in SPECS[::7]:
        norm = HeadNorm(spec, "k", H, D, shifted=True, dtype=torch.float64)
        randomised(norm, generator)
        x = torch.randn(1, H, 2, D, generator=generator, dtype=torch.float64, requires_grad=True)
        names = [name for name, _ in norm.named_parameters()]

        def run(x, *values, norm=norm, names=names):
            return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))

        torch.autograd.gradcheck(run, (x, *norm.parameters()))


def test_construction_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    for spec in SPECS:
        HeadNorm(spec, "q", H, D, scale_init=3.0)
        HeadNorm(spec, "k", H, D, shifted=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_dtype_and_device_are_those_asked_for() -> None:
    norm = HeadNorm(QKNorm.preset("chameleon"), "k", H, D, shifted=True, dtype=torch.bfloat16, device="meta")
    assert {(p.dtype, p.device.type) for p in norm.parameters()} == {(torch.bfloat16, "meta")}


# The bound.


def rotation(generator: torch.Generator) -> torch.Tensor:
    """A random orthogonal matrix, as RoPE's is one."""
    return torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))[0]


BOUNDED = [spec for spec in SPECS if not spec.bias]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    spec=st.sampled_from(BOUNDED),
    seed=st.integers(0, 2**31),
    length=st.sampled_from([1e-4, 1.0, 1e4]),
    rotated=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_no_logit_exceeds_the_bound(spec: QKNorm, seed: int, length: float, rotated: bool, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = {"attention_scale": 0.4, "scale_init": 3.0, "dtype": torch.float64}
    q_norm = randomised(HeadNorm(spec, "q", 4, D, **kinds), generator)
    k_norm = randomised(HeadNorm(spec, "k", kv_heads, D, shifted=not rotated, **kinds), generator)
    q = torch.randn(1, 4, 40, D, generator=generator, dtype=torch.float64) * length
    k = torch.randn(1, kv_heads, 40, D, generator=generator, dtype=torch.float64) * length
    q[..., :D, :], k[..., :D, :] = torch.eye(D) * length, torch.eye(D) * length  # the axes themselves
    with torch.no_grad():
        q, k = q_norm(q), k_norm(k).repeat_interleave(4 // kv_heads, 1)
    if rotated:
        q, k = q @ rotation(generator), k @ rotation(generator)
    largest = float((0.4 * q @ k.mT).abs().max())
    bound = logit_bound(q_norm, k_norm, rotated)
    assert bound is not None
    assert largest <= bound * (1 + 1e-9)


@pytest.mark.parametrize("norm", ["rms", "l2"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("gain", ["shared", "per_head"])
@pytest.mark.parametrize("scale", ["fixed", "learned_per_head"])
def test_the_bound_is_reached(norm: str, axis: str, gain: str, scale: str) -> None:
    """All energy in the channel whose gains multiply to the most; a rotation may turn one channel into another."""
    spec = QKNorm(norm=norm, axis=axis, gain=gain, scale=scale, scale_init=None if scale == "fixed" else 3.0)
    generator = torch.Generator().manual_seed(9)
    q_norm = randomised(HeadNorm(spec, "q", H, D, attention_scale=D**-0.5, scale_init=3.0), generator)
    k_norm = randomised(HeadNorm(spec, "k", H, D, attention_scale=D**-0.5, scale_init=3.0), generator)
    largest = {False: 0.0, True: 0.0}
    with torch.no_grad():
        for h, c, e in itertools.product(range(H), range(D), range(D)):
            q, k = torch.zeros(2, 1, H, 1, D)
            q[0, h, 0, c] = k[0, h, 0, e] = 100.0
            lengths = q_norm(q)[0, h].norm() * k_norm(k)[0, h].norm() * D**-0.5
            largest[True] = max(largest[True], float(lengths))
            if c == e:
                largest[False] = max(largest[False], float(lengths))
    for rotated, reached in largest.items():
        assert reached == pytest.approx(logit_bound(q_norm, k_norm, rotated), rel=1e-4)


def test_the_bound_as_design_states_it() -> None:
    q_norm, k_norm = HeadNorm(QKNorm(), "q", H, D, attention_scale=0.5), HeadNorm(QKNorm(), "k", H, D)
    with torch.no_grad():
        q_norm.weight.copy_(torch.tensor([3.0, -1, 1, 1]))
        k_norm.weight.copy_(torch.tensor([1.0, 2, -5, 1]))
    assert logit_bound(q_norm, k_norm, rotated=False) == pytest.approx(2 * 5)
    assert logit_bound(q_norm, k_norm, rotated=True) == pytest.approx(2 * 15)
    wide = QKNorm(axis="projection")
    assert logit_bound(HeadNorm(wide, "q", H, D, attention_scale=0.5), HeadNorm(wide, "k", H, D), False) == 2 * H
    biased = QKNorm.preset("timm")
    assert logit_bound(HeadNorm(biased, "q", H, D), HeadNorm(biased, "k", H, D), False) is None
