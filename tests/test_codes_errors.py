from __future__ import annotations

import math

import numpy as np
import pytest

from code_simulator import WIRES, all_reduce, bf16, blocks, fp16, fp32, gaussian
from taciturn.collectives.codes import design
from taciturn.collectives.codes.errors import CodeErrors, rounding_of
from taciturn.errors import CodeError

ROUNDINGS = {
    "fp32": (fp32, {}),
    "fp16": (fp16, {}),
    "bf16": (bf16, {}),
    "int8-128": (blocks(127, 128), {"block": 128}),
    "int8-32": (blocks(127, 32), {"block": 32}),
    "int8-1024": (blocks(127, 1024), {"block": 1024}),
    "int8-stochastic": (blocks(127, 128, stochastic=True), {"rounding": "stochastic"}),
    "int4-128": (blocks(7, 128), {"block": 128}),
    "int4-32": (blocks(7, 32), {"block": 32}),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_is_what_one_rounding_does_to_gaussians(name: str) -> None:
    """The stated rms relative error is the measured one to 4 %, over an octave of scales."""
    wire, options = ROUNDINGS[name]
    rng = np.random.default_rng(0)
    seen = []
    for scale in 2 ** np.linspace(0, 1, 9)[:-1]:
        x = scale * rng.standard_normal(1 << 16)
        seen.append(((wire(x) - x) ** 2).mean() / (x**2).mean())
    assert math.sqrt(np.mean(seen)) == pytest.approx(
        rounding_of(name.split("-")[0], **options), rel=0.04
    )


def test_wires_are_ordered_by_their_rounding() -> None:
    order = [rounding_of(wire) for wire in ("fp64", "fp32", "fp16", "bf16", "int8", "int4")]
    assert order == sorted(order)
    assert rounding_of("bf16", rounding="stochastic") == pytest.approx(
        math.sqrt(2) * rounding_of("bf16")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3",), "no rounding is known for the wire 'int3'"),
        (("int8", 0), "block=0: give"),
        (("bf16", 128, "upwards"), "rounding 'upwards' is unknown"),
    ],
)
def test_unknown_wires_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(CodeError, match=message):
        rounding_of(*arguments)


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fourier", {"passes": 1}),
        ("fourier", {"passes": 4}),
        ("fourier", {"passes": 8, "stretch": 0.8}),
        ("polynomial", {"passes": 2, "eps": 0.2}),
        ("polynomial", {"passes": 4, "orthonormal": True}),
        ("optimized", {"passes": 3}),
        ("clustered", {"passes": 3, "eps": 0.3, "decode": "least_squares"}),
        ("vandermonde", {"components": 11, "nodes": "roots", "eps": 0.2}),
    ],
)
@pytest.mark.parametrize("own", ["exact", "fresh"])
def test_expected_errors_are_those_of_the_protocol(
    name: str, options: dict[str, object], wire: str, own: str
) -> None:
    """With the wire's rounding at every hop, both errors and the spread are met to 15 %."""
    rounding = rounding_of(wire)
    code = design(name, 6, **{"rounding": rounding, **options})
    seen = all_reduce(code, gaussian(code, 512), wire=WIRES[wire], own=own)
    expected = code.expected(rounding, own)
    assert seen.mean_error == pytest.approx(expected.mean_error, rel=0.15)
    # a block quantized again is not quite what it was: its scale is rounded up once more
    assert seen.spread == pytest.approx(expected.spread, rel=0.15, abs=0.2 * rounding)
    assert seen.replica_error == pytest.approx(expected.replica_error, rel=0.15)


@pytest.mark.parametrize("passes", [1, 2, 4, 16])
def test_float32_arithmetic_doubles_the_noise_at_most(passes: int) -> None:
    """On an fp32 wire, combining and decoding in float32 add between nothing and as much again."""
    rounding = rounding_of("fp32")
    code = design("fourier", 8, passes)
    seen = all_reduce(code, gaussian(code, 256), dtype=np.float32)
    ratio = seen.mean_error / code.expected(rounding).mean_error
    assert 0.85 <= ratio <= 2


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_fourier_keeps_the_mean_error_within_five_plain_rings(wire: str, ranks: int) -> None:
    """At p = 16, on every wire: the noise grows with the root of the number of hops."""
    rounding = rounding_of(wire)
    ring = design("fourier", ranks, 1).expected(rounding).mean_error
    assert design("fourier", ranks, 16).expected(rounding).mean_error <= 5 * ring


def test_errors_split_into_spread_and_mean() -> None:
    """replica^2 = spread^2 + mean^2, and spread_hetero counts only what differs between ranks."""
    errors: CodeErrors = design("fourier", 8, 4).expected(0.01)
    assert errors.replica_error == pytest.approx(math.hypot(errors.spread, errors.mean_error))
    assert errors.spread_hetero == pytest.approx(errors.spread * math.sqrt(8 / 7))
    assert errors.bias < errors.replica_error


def test_spread_hetero_as_defined() -> None:
    """Divided by the rms of sqrt(N) (g_k - mean): the same with a common part of any size."""
    code = design("fourier", 8, 4)
    own = gaussian(code, 500)
    common = 5 * gaussian(code, 500, seed=1)[:1]
    seen = all_reduce(code, own + common)
    apart = own - own.mean(axis=0)
    scale = math.sqrt(8 * (apart**2).mean())
    off = seen.decoded - seen.decoded.mean(axis=0)
    assert math.sqrt((off**2).mean()) / scale == pytest.approx(
        code.expected(0).spread_hetero, rel=0.03
    )
