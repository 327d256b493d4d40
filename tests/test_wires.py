"""Wire formats: exact sizes, bounded errors, and the inputs that break quantizers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from taciturn.collectives.wires import WIRES, Wire, make_wire
from taciturn.collectives.wires.base import BlockLayout
from taciturn.collectives.wires.compiled_wires import CompiledBlocks, CompiledPlain
from taciturn.collectives.wires.torch_wires import BlockScaled, Plain
from taciturn.errors import InputError

CPU = torch.device("cpu")
FP32 = torch.float32


def coded(wire: Wire, values: torch.Tensor) -> torch.Tensor:
    """Return what ``values`` become on the other side."""
    message = wire.message(values.numel())
    assert message.data.nbytes == wire.nbytes(values.numel())
    wire.encode(values, message)
    out = torch.full_like(values, math.nan)
    wire.decode(message, out)
    return out


def step(wire: Wire, values: torch.Tensor) -> torch.Tensor:
    """Return the largest error the wire may make at each element, from its definition."""
    if isinstance(wire, CompiledBlocks | BlockScaled):
        layout, stochastic = wire.layout, getattr(wire, "stochastic", False)
        # The scale is rounded up to bf16, 2^-7 apart at most; nearest rounding errs by half a step.
        block = torch.nn.functional.pad(values, (0, -values.numel() % layout.block))
        largest = block.view(-1, layout.block).abs().amax(1, keepdim=True)
        scale = (largest / layout.largest * (1 + 2**-8) / (1 - 2**-8)).clamp(min=2.0**-126)
        half = (scale / 2 * (1 + 1e-5)).expand(-1, layout.block).reshape(-1)
        return half[: values.numel()] * (2 if stochastic else 1)
    bits = {"fp64": 53, "fp32": 24, "fp16": 11, "bf16": 8}[wire.name]
    smallest = {"fp16": 2.0**-25, "bf16": 2.0**-134}.get(wire.name, 0.0)  # half a subnormal
    return (values.abs() * 2.0**-bits + smallest) * (2 if getattr(wire, "stochastic", False) else 1)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("numel", [0, 1, 2, 127, 128, 129, 1000, (1 << 17) + 3])
def test_error_is_within_half_a_step(name, numel):
    """Every element comes back within half a step of the format, at any length."""
    wire = make_wire(name, torch.float32)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert ((coded(wire, values) - values).abs() <= step(wire, values)).all()


@pytest.mark.parametrize(
    ("name", "block", "numel", "nbytes"),
    [
        ("fp32", 128, 10, 40),
        ("bf16", 128, 10, 20),
        ("int8", 128, 128, 130),
        ("int8", 128, 129, 260),
        ("int4", 128, 128, 66),
        ("int4", 32, 33, 36),
        ("int8", 64, 0, 0),
    ],
)
def test_message_bytes(name, block, numel, nbytes):
    """A message is one bf16 scale per block and the integers; the last block is padded."""
    assert make_wire(name, torch.float32, block=block).nbytes(numel) == nbytes


HARD_BLOCKS = {
    "zeros": [0.0] * 4,
    "constant": [9.0] * 4,
    "negative": [-9.0, -9.0],
    "tiny": [1e-38],
    "subnormal": [1e-42, -3e-43],
    "outlier": [1e-3, -1e-3, 3e38, 1e-3],
    "alternating": [127.0, -127.0] * 3,
}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("block", HARD_BLOCKS)
def test_hard_blocks(block, name, rounding):
    """Constant, zero, tiny and outlier blocks: finite, zero stays zero, others within one step."""
    wire = make_wire(name, torch.float32, rounding=rounding, seed=3)
    values = torch.tensor(HARD_BLOCKS[block])
    out = coded(wire, values)
    assert out.isfinite().all()
    assert (out[values == 0] == 0).all()
    assert ((out - values).abs() <= step(wire, values)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", WIRES)
def test_non_finite_stays_non_finite(name, rounding, bad):
    """A NaN or infinity never becomes a number, and other blocks stay finite."""
    if rounding == "stochastic" and name not in ("int8", "int4", "bf16"):
        pytest.skip("this wire has no stochastic rounding")
    wire = make_wire(name, torch.float32, rounding=rounding)
    values = torch.ones(256)
    values[3] = bad
    out = coded(wire, values)
    assert not out[3].isfinite()
    assert out[128:].isfinite().all()


def test_nan_with_any_payload_stays_nan():
    """No bit pattern of a NaN is rounded into a number by the bit tricks."""
    patterns = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF]
    bits = torch.tensor(patterns, dtype=torch.int32)
    for name in ("bf16", "int8"):
        for rounding in ("nearest", "stochastic"):
            wire = make_wire(name, torch.float32, rounding=rounding)
            for value in bits.view(torch.float32):
                assert coded(wire, value.repeat(4)).isnan().all()


def test_fp16_overflow_is_infinite():
    """A value that fp16 cannot hold becomes infinite, as casting does, so that it is noticed."""
    assert coded(make_wire("fp16", torch.float32), torch.tensor([1e6])).isinf().all()


@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
def test_stochastic_rounding_is_unbiased_and_repeatable(name):
    """The mean of many roundings is the value; the same seed rounds the same way."""
    values = torch.tensor([0.3, -0.77, 1.0]).repeat(20000)
    out = coded(make_wire(name, torch.float32, rounding="stochastic", seed=1), values)
    again = coded(make_wire(name, torch.float32, rounding="stochastic", seed=1), values)
    other = coded(make_wire(name, torch.float32, rounding="stochastic", seed=2), values)
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    one_step = step(make_wire(name, torch.float32, rounding="stochastic"), values).max().item()
    tolerance = 5 * one_step / math.sqrt(20000)  # five standard errors, each at most a step
    assert (out.view(-1, 3).mean(0) - values[:3]).abs().max().item() <= tolerance


def test_stochastic_rounding_leaves_the_global_generator_alone():
    """Training's random numbers are not consumed."""
    before = torch.get_rng_state()
    coded(make_wire("int8", torch.float32, rounding="stochastic"), torch.randn(3).mul_(0).add_(1))
    torch.set_rng_state(before)
    coded(make_wire("int4", torch.float32, rounding="stochastic"), torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())


@given(st.integers(1, 400), st.sampled_from(WIRES), st.integers(0, 2**31))
def test_relay_is_decode_add_encode(numel, name, seed):
    """Relaying equals decoding, adding and encoding; what is kept is what others decode."""
    generator = torch.Generator().manual_seed(seed)
    wire = make_wire(name, torch.float32)
    first, own = torch.randn(2, numel, generator=generator)
    message, onward, direct = (wire.message(numel) for _ in range(3))
    wire.encode(first, message)
    arrived, kept, decoded = torch.empty(numel), own.clone(), torch.empty(numel)
    wire.decode(message, arrived)
    wire.relay(message, own, onward, keep=False)
    assert torch.equal(kept, own)
    wire.relay(message, kept, onward, keep=True)
    wire.encode(arrived + own, direct)
    assert torch.equal(onward.data, direct.data)
    wire.decode(onward, decoded)
    assert torch.equal(kept, decoded)
    total = own.clone()
    wire.accumulate(message, total)
    assert torch.equal(total, own + arrived)


PAIRS = {
    "int8": (CompiledBlocks(BlockLayout(8, 128)), BlockScaled(BlockLayout(8, 128), FP32, CPU)),
    "int8 in small blocks": (
        CompiledBlocks(BlockLayout(8, 4)),
        BlockScaled(BlockLayout(8, 4), FP32, CPU),
    ),
    "int4": (CompiledBlocks(BlockLayout(4, 128)), BlockScaled(BlockLayout(4, 128), FP32, CPU)),
    "int4 in small blocks": (
        CompiledBlocks(BlockLayout(4, 2)),
        BlockScaled(BlockLayout(4, 2), FP32, CPU),
    ),
    "bf16": (CompiledPlain(torch.bfloat16, FP32), Plain(torch.bfloat16, FP32, CPU)),
    "fp32": (CompiledPlain(FP32, FP32), Plain(FP32, FP32, CPU)),
    "fp64": (CompiledPlain(torch.float64, torch.float64), Plain(torch.float64, torch.float64, CPU)),
}
"""Wires that do the same, by name: compiled loops, and tensor operations."""

SCALES = st.sampled_from([0.0, 1e-45, 1e-40, 1e-30, 1.0, 1e4, 3e38])


@given(
    st.sampled_from(sorted(PAIRS)),
    st.lists(st.tuples(SCALES, st.integers(0, 300)), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_compiled_loops_and_tensor_operations_agree(pair, parts, seed):
    """Both kinds of wire write the same bytes and come to the same numbers, at all magnitudes."""
    compiled, reference = PAIRS[pair]
    assert (compiled.name, compiled.compute) == (reference.name, reference.compute)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.cat([s * torch.rand(3, n, generator=generator).sub(0.5) for s, n in parts], 1)
    first, stale, term = numbers.to(compiled.compute)
    results = []
    for wire in (compiled, reference):
        message, relayed, exchanged = (wire.message(first.numel()) for _ in range(3))
        wire.encode(first, message)
        decoded, total, kept, left = first.clone(), stale.clone(), stale.clone(), stale.clone()
        wire.decode(message, decoded)
        wire.accumulate(message, total)
        wire.relay(message, kept, relayed, keep=True)
        wire.exchange(message, left, term, exchanged)
        results.append([m.data for m in (message, relayed, exchanged)])
        results[-1] += [decoded, total, kept, left]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_compiled_loops_keep_what_is_not_finite(pair, bad):
    """A NaN or infinity in what arrived or in what is added reaches the message that goes on."""
    wire, _ = PAIRS[pair]
    good = torch.ones(300, dtype=wire.compute)
    spoilt = good.clone()
    spoilt[5] = bad
    out = torch.empty_like(good)
    for first, own in ((good, spoilt), (spoilt, good)):
        message, onward = wire.message(300), wire.message(300)
        wire.encode(first, message)
        wire.relay(message, own.clone(), onward, keep=False)
        wire.decode(onward, out)
        assert not out[5].isfinite()
        wire.exchange(message, good.clone(), own.clone(), onward)
        wire.decode(onward, out)
        assert not out[5].isfinite()
        assert out[256:].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "int2"}, "choose one of"),
        ({"name": "int8", "block": 0}, "block=0"),
        ({"name": "int8", "block": 3}, "power of two"),
        ({"name": "int8", "rounding": "up"}, "rounding='up'"),
        ({"name": None, "rounding": "up"}, "rounding='up'"),
        ({"name": None, "rounding": "stochastic"}, "round stochastically"),
        ({"name": "fp16", "rounding": "stochastic"}, "round stochastically"),
    ],
)
def test_bad_arguments(arguments, text):
    """A wire that does not exist is refused with what does."""
    with pytest.raises(InputError, match=text):
        make_wire(arguments.pop("name"), torch.float32, **arguments)
