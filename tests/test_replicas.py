"""Replicas: the first difference is named, averages are exact, spreads are what they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taciturn import replicas
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.replicas import (
    MOST_STEPS,
    ReplicaReport,
    check_replicas,
    resync,
    spread,
    suggest_resync_every,
)
from taciturn.transport import DistributedTransport, Transport, run_threads

TIMEOUT_S = 30.0
T = TypeVar("T")


class Net(nn.Module):
    """Tensors of every kind: of 16 to 64 bits, complex, frozen, tied, not contiguous, empty."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32, frozen: bool = False):
            values = torch.randn(shape, generator=g, dtype=torch.float64)
            return nn.Parameter(values.to(dtype), requires_grad=not frozen)

        self.weight = parameter(5, 7)
        self.frozen = parameter(3, 3, frozen=True)
        self.tied = self.weight
        self.half16 = parameter(11, dtype=torch.float16)
        self.brain16 = parameter(3, 3, dtype=torch.bfloat16)
        self.double64 = parameter(4, 4, dtype=torch.float64)
        self.wave = parameter(3, dtype=torch.complex64)
        self.scalar = parameter()
        self.nothing = parameter(0, 4)
        self.turned = nn.Parameter(parameter(6, 2).detach().t())
        self.gappy = nn.Parameter(parameter(6, 4).detach()[:, ::2])
        self.conv = nn.Parameter(
            parameter(2, 3, 2, 2).detach().to(memory_format=torch.channels_last)
        )
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("hidden", parameter(4).detach(), persistent=False)
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("small", torch.zeros(3, dtype=torch.uint8))


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def on_ranks(models: Sequence[nn.Module], function: Callable[[nn.Module, Transport], T]) -> list[T]:
    """Run ``function`` on a thread per model."""
    return run_threads(len(models), lambda t: function(models[t.rank], t), TIMEOUT_S)


def check(models: Sequence[nn.Module], **options: Any) -> ReplicaReport:
    """Check the replicas; all ranks must report the same."""
    reports = on_ranks(models, lambda model, t: check_replicas(model, t, **options))
    assert all(report == reports[0] for report in reports)
    return reports[0]


def equal_nets(ranks: int) -> list[Net]:
    return [Net() for _ in range(ranks)]


def different_nets(ranks: int) -> list[Net]:
    """Nets that differ in every tensor that has elements."""
    nets = [Net(seed) for seed in range(ranks)]
    for rank, net in enumerate(nets):
        for name, tensor in named(net.norm).items():
            tensor.add_(rank if "num" in name else rank / 7)
        net.mask[rank % 5] = True
        net.small[1] = 7 * rank
    return nets


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of the last element, counted through its bytes."""
    part = tensor.flatten()[-1:].clone(memory_format=torch.contiguous_format)
    part.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    tensor[tuple(size - 1 for size in tensor.shape)] = part[0]


TENSORS = [name for name, tensor in named(Net()).items() if tensor.numel()]


@pytest.mark.parametrize("name", TENSORS)
def test_a_flipped_bit_is_named_with_its_rank(name):
    """One bit of one tensor on rank 1 of 3: the tensor and the rank, whatever kind of tensor."""
    nets = equal_nets(3)
    assert check(nets).equal
    before = named(nets[0])[name].clone()
    changed = named(nets[1])[name]
    flip(changed, 0)
    report = check(nets)
    assert not report.equal
    assert (report.name, report.ranks, report.differing) == (name, (1,), 1)
    real = torch.view_as_real if before.is_complex() else torch.Tensor.double
    gap = (real(changed).double() - real(before).double()).abs()
    scale = real(before).double().square().mean().sqrt().item()
    assert report.scale == pytest.approx(scale)
    if scale:
        assert report.max_difference == pytest.approx(gap.max().item() / scale)
        rms = gap.square().mean().sqrt().item()
        assert report.rms_difference == pytest.approx(rms / scale)
    else:
        assert report.max_difference == report.rms_difference == math.inf
    assert name in str(report)
    assert "rank 1 " in str(report)
    assert "\n" not in str(report)
    with pytest.raises(MismatchError, match="resync"):
        report.raise_if_different()


def test_equal_replicas_send_24_bytes():
    """Where nothing differs, each rank sends a header and the three integers of N - 1 ranks."""
    for report, counts in on_ranks(
        equal_nets(3), lambda model, t: (check_replicas(model, t), t.ledger.snapshot())
    ):
        assert counts.sent_bytes == 40 + 2 * 24
        assert report == ReplicaReport(3, len(named(Net())))
        assert str(report) == f"3 replicas are equal in all {report.tensors} tensors"
        report.raise_if_different()


def test_the_majority_is_right():
    """The rank named is the odd one out; without a majority the lowest rank's version counts."""
    for changes, expected in [
        ({0: 1.0}, (0,)),
        ({0: 1.0, 2: 1.0}, (1, 3)),
        ({2: 1.0, 3: 2.0}, (2, 3)),
        ({0: 1.0, 1: 2.0, 2: 3.0}, (1, 2, 3)),
        ({0: 1.0, 1: 2.0}, (0, 1)),
    ]:
        nets = equal_nets(4)
        for rank, change in changes.items():
            nets[rank].weight.detach()[2, 3] += change
            nets[rank].hidden += change
        report = check(nets)
        assert (report.name, report.ranks, report.differing) == ("weight", expected, 2)


def test_size_of_a_difference():
    """Relative to the rms of the majority's tensor, of the rank that differs most."""
    nets = [nn.Linear(4, 1, bias=False) for _ in range(4)]
    for net, value in zip(nets, (2.0, 2.0, 3.0, 6.0), strict=True):
        net.weight.detach().fill_(2.0)[0, 1] = value
    report = check(nets)
    assert report.ranks == (2, 3)
    assert (report.scale, report.max_difference, report.rms_difference) == (2.0, 2.0, 1.0)


def test_nans_are_equal_zeros_are_not():
    """NaN equals NaN of any payload, infinities themselves; 0.0 differs from -0.0, by 0."""
    for name in ("weight", "half16", "brain16", "double64", "wave", "conv"):
        nets = equal_nets(2)
        for rank, net in enumerate(nets):
            tensor = named(net)[name]
            odd = torch.tensor([math.nan, math.inf, -math.inf]).to(tensor.dtype)
            odd.view(torch.uint8)[0] ^= rank  # another payload on rank 1
            for place, value in zip((tensor != 0).nonzero()[:3].tolist(), odd, strict=True):
                tensor[tuple(place)] = value
            assert tensor.isnan().any()
        assert check(nets).equal, name
        assert on_ranks(nets, spread)[0].overall == 0
    for a, b in [(math.nan, 1.0), (math.inf, 1.0), (math.inf, -math.inf), (1.0, math.nan)]:
        nets = equal_nets(2)
        nets[0].weight.detach()[0, 0] = a
        nets[1].weight.detach()[0, 0] = b
        report = check(nets)
        assert (report.ranks, report.max_difference) == ((1,), math.inf)
    nets = equal_nets(2)
    nets[0].weight.detach()[0, 0] = 0.0
    nets[1].weight.detach()[0, 0] = -0.0
    report = check(nets)
    assert (report.name, report.max_difference, report.rms_difference) == ("weight", 0, 0)


DIGESTS = {"crc": lambda t: replicas._crc(t), "device": lambda t: int(replicas._device_digest(t))}


@pytest.mark.parametrize("digest", DIGESTS.values(), ids=DIGESTS)
@pytest.mark.parametrize("numel", [2, 3, 1000, 70_000, 5_000_001])
def test_digests_see_swaps_and_flips(digest, numel):
    """Both digests change with one bit anywhere and with two elements swapped, signs included."""
    values = torch.ones(numel)
    values[1] = -1.0  # a swap of these changes one bit per word, the top one
    first = digest(values)
    for i in {0, 2 % numel, numel // 2, numel - 1} - {1}:
        swapped = values.clone()
        swapped[1], swapped[i] = swapped[i].item(), swapped[1].item()
        assert digest(swapped) != first
        for bit in (0, 22, 30, 31):
            flipped = values.clone()
            flipped[i : i + 1].view(torch.int32).bitwise_xor_(torch.tensor(1 << bit).int())
            assert digest(flipped) != first
    assert digest(values.clone()) == first


@given(data=st.data(), digest=st.sampled_from(list(DIGESTS)))
def test_digests_depend_on_values_alone(data, digest):
    """Neither alignment nor length mod 4 matters, and any two different strings differ."""
    a = data.draw(st.binary(min_size=1, max_size=40))
    b = data.draw(st.binary(min_size=len(a), max_size=len(a)))
    offset = data.draw(st.integers(0, 3))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.bool]))
    if len(a) % dtype.itemsize:
        dtype = torch.uint8

    def tensor(text: bytes, start: int) -> torch.Tensor:
        raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        values = raw.bool() if dtype == torch.bool else raw.clone().view(dtype)
        return torch.cat([values[:1].repeat(start), values])[start:]

    one, other, moved = tensor(a, 0), tensor(b, 0), tensor(a, offset)
    if dtype == torch.bfloat16:
        one, other, moved = (t.nan_to_num_() for t in (one, other, moved))
    assert DIGESTS[digest](one) == DIGESTS[digest](moved)
    assert (DIGESTS[digest](one) == DIGESTS[digest](other)) == (bits(one) == bits(other))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16])
def test_rare_dtypes(dtype):
    """8-bit floats and unsigned integers are compared and made equal as all others."""
    models = []
    for rank in range(2):
        model = nn.Linear(1, 1)
        model.register_buffer("rare", torch.tensor([1.0 + rank, 3.0, 8.0]).to(dtype))
        models.append(model)
    for model in models[1:]:
        model.load_state_dict({**models[0].state_dict(), "rare": model.rare})
    report = check(models)
    assert (report.name, report.ranks, report.differing) == ("rare", (1,), 1)
    on_ranks(models, resync)
    assert check(models).equal
    assert models[0].rare.float()[0] == (2.0 if dtype == torch.uint16 else 1.5)


def test_memory_format_does_not_matter():
    """Equal values in channels_last on one rank and contiguous on the other are equal."""
    nets = equal_nets(2)
    nets[1].conv = nn.Parameter(nets[1].conv.detach().contiguous())
    assert check(nets).equal
    nets[1].conv.detach()[1, 2, 0, 1] += 1
    assert check(nets).name == "conv"
    on_ranks(nets, resync)
    assert check(nets).equal
    assert nets[0].conv.is_contiguous(memory_format=torch.channels_last)


def test_tied_parameters_once():
    """They are compared and averaged once, under their first name."""
    nets = equal_nets(2)
    nets[1].tied.detach()[0, 0] += 2.0
    middle = nets[0].tied.detach()[0, 0].item() + 1.0
    report = check(nets)
    assert (report.name, report.differing) == ("weight", 1)
    assert report.tensors == len(named(nets[0]))
    on_ranks(nets, resync)
    assert nets[0].tied is nets[0].weight
    assert nets[0].tied[0, 0].item() == pytest.approx(middle)
    assert "tied" not in on_ranks(nets, spread)[0].by_name


def test_buffers_can_be_left_out():
    """``buffers=False`` neither compares nor changes them."""
    nets = equal_nets(2)
    nets[1].hidden += 1
    assert check(nets).name == "hidden"
    assert check(nets, buffers=False).equal
    before = nets[1].hidden.clone()
    on_ranks(nets, lambda model, t: resync(model, t, buffers=False))
    assert torch.equal(nets[1].hidden, before)


def _without_buffer(net: Net) -> None:
    del net.norm._buffers["running_var"]


def _other_order(net: Net) -> None:
    net._parameters["frozen"] = net._parameters.pop("frozen")


MISMATCHES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "buffer": (_without_buffer, "'norm.running_var' is missing on rank 1"),
    "more": (lambda net: net.register_buffer("more", torch.ones(1)),
             "'more' is missing on ranks 0, 2"),
    "shape": (lambda net: setattr(net, "half16", nn.Parameter(torch.ones(12).half())),
              r"'half16' is of shape \(11,\) on rank 0, of shape \(12,\) on rank 1"),
    "dtype": (lambda net: net.norm.double(),
              "'norm.weight' is of torch.float32 on rank 0, of torch.float64 on rank 1"),
    "order": (_other_order, "where rank 0 has 'frozen', rank 1 has 'half16'"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "what"),
    [(f, what) for f in (check_replicas, resync) for what in MISMATCHES]
    + [(spread, what) for what in ("shape", "dtype", "order")],  # of parameters only
)
def test_different_models_are_refused(function, what):
    """Names, shapes and dtypes that differ: every rank names the first, and nothing changes."""
    nets = different_nets(3)
    change, text = MISMATCHES[what]
    change(nets[1])
    before = [{name: bits(tensor) for name, tensor in named(net).items()} for net in nets]

    def call(model: nn.Module, transport: Transport) -> str:
        with pytest.raises(MismatchError, match=text) as caught:
            function(model, transport)
        return str(caught.value)

    texts = on_ranks(nets, call)
    assert len(set(texts)) == 1
    assert [{n: bits(t) for n, t in named(net).items()} for net in nets] == before


def test_the_transport_survives_a_mismatch():
    """All ranks refuse alike, so the next call goes on."""
    models = [nn.Linear(2, 2 + rank) for rank in range(3)]

    def call(model: nn.Module, transport: Transport) -> bool:
        with pytest.raises(MismatchError):
            check_replicas(model, transport)
        return check_replicas(nn.ReLU(), transport).equal

    assert all(on_ranks(models, call))


def test_different_calls_are_refused():
    """A rank that resynchronises while another checks: an error that says so."""

    def call(model: nn.Module, transport: Transport) -> None:
        (resync if transport.rank else check_replicas)(model, transport)

    with pytest.raises(MismatchError, match="rank 0 calls check_replicas, rank 1 calls resync"):
        on_ranks(equal_nets(2), call)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_resync_is_the_average(ranks):
    """Bit-identical replicas, equal to the fp64 average within the roundings of the sum.

    N - 1 additions, a division, and the rounding to the tensor's dtype: N + 1 half units in the
    last place of numbers no larger than the mean of the magnitudes.
    """
    nets = different_nets(ranks)
    before = [copy.deepcopy(named(net)) for net in nets]
    places = [{n: t.data_ptr() for n, t in named(net).items()} for net in nets]
    parameters = [list(net.parameters()) for net in nets]
    strides = {n: t.stride() for n, t in named(nets[0]).items()}
    on_ranks(nets, resync)
    assert check(nets).equal
    for rank, net in enumerate(nets):
        assert {n: t.data_ptr() for n, t in named(net).items()} == places[rank]
        assert all(a is b for a, b in zip(net.parameters(), parameters[rank], strict=True))
        assert {n: t.stride() for n, t in named(net).items()} == strides
        assert not net.frozen.requires_grad
    for name, result in named(nets[0]).items():
        assert all(bits(named(net)[name]) == bits(result) for net in nets)
        olds = [old[name] for old in before]
        if not result.dtype.is_floating_point and not result.dtype.is_complex:
            assert torch.equal(result, torch.stack(olds).amax(0)), name
            continue
        real = torch.view_as_real if result.is_complex() else torch.Tensor.double
        values = torch.stack([real(old).double() for old in olds])
        wide = torch.float32 if result.dtype.itemsize < 4 else torch.view_as_real(
            result).dtype if result.is_complex() else result.dtype  # fmt: skip
        own = torch.finfo(result.dtype).eps
        bound = (ranks * torch.finfo(wide).eps + own) / 2 * values.abs().mean(0)
        assert ((real(result).double() - values.mean(0)).abs() <= bound).all(), name
    assert nets[0].norm.num_batches_tracked == ranks - 1
    assert nets[0].mask.tolist() == [i < ranks for i in range(5)]


def test_resync_keeps_the_bits_of_what_is_equal():
    """At six ranks, where x + ... + x over 6 may not give x: nothing changes, nothing is sent."""
    nets = equal_nets(6)
    before = {n: bits(t) for n, t in named(nets[0]).items()}
    for net in nets[1:]:
        net.frozen += 1
    sent = on_ranks(nets, lambda model, t: (resync(model, t), t.ledger.snapshot().sent_bytes)[1])
    for net in nets:
        assert {n for n, t in named(net).items() if bits(t) != before[n]} == {"frozen"}
    tensors = len(before)
    assert max(sent) <= 3 * 40 + 5 * (24 + 8 * tensors) + 10 * 4 * 2  # 9 numbers: chunks of 1 or 2
    assert check(nets).equal


def test_resync_spreads_what_is_not_finite():
    """A NaN or infinity on one rank is one on all; the rest of the tensor is averaged."""
    nets = equal_nets(3)
    nets[1].weight.detach()[0, 0] = math.nan
    nets[2].weight.detach()[0, 1] = math.inf
    on_ranks(nets, resync)
    assert check(nets).equal
    assert nets[0].weight.detach().isfinite().logical_not().nonzero().tolist() == [[0, 0], [0, 1]]


def test_resync_keeps_optimizers_valid():
    """An optimizer made before goes on with the parameters that were averaged."""
    nets = different_nets(2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
    on_ranks(nets, resync)
    before = nets[0].weight.detach().clone()
    for net, optimizer in zip(nets, optimizers, strict=True):
        net.weight.square().sum().backward()
        optimizer.step()
    assert torch.equal(nets[0].weight, torch.zeros_like(before))
    assert check(nets).equal


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_spread_is_the_oracles(ranks):
    """Rms over ranks and elements of what deviates, relative to the rms of the mean; no change."""
    nets = different_nets(ranks)
    before = [{n: bits(t) for n, t in named(net).items()} for net in nets]
    results = on_ranks(nets, spread)
    assert all(result == results[0] for result in results)
    assert [{n: bits(t) for n, t in named(net).items()} for net in nets] == before
    squares = []
    for name, parameter in nets[0].named_parameters():
        real = torch.view_as_real if parameter.is_complex() else torch.Tensor.double
        values = torch.stack([real(named(net)[name]).double() for net in nets])
        mean = values.mean(0)
        deviation, own = (values - mean).square().sum() / ranks, mean.square().sum()
        squares.append((deviation.item(), own.item()))
        expected = (deviation / own).sqrt().item() if parameter.numel() else 0.0
        assert results[0].by_name[name] == pytest.approx(expected, rel=1e-5), name
    assert set(results[0].by_name) == dict(nets[0].named_parameters()).keys()
    deviation, own = (sum(column) for column in zip(*squares, strict=True))
    assert results[0].overall == pytest.approx(math.sqrt(deviation / own), rel=1e-5)


def test_spread_of_special_cases():
    """No deviation is 0, also around zero; deviation around zero is infinite; NaN gives NaN."""
    assert on_ranks(equal_nets(6), spread)[0].overall == 0
    models = [nn.Linear(2, 1) for _ in range(2)]
    for model, sign in zip(models, (1, -1), strict=True):
        model.weight.detach().fill_(sign)
        model.bias.detach().zero_()
    result = on_ranks(models, spread)[0]
    assert (result.overall, result.by_name) == (math.inf, {"weight": math.inf, "bias": 0.0})
    models[1].weight.detach().fill_(math.inf)
    assert math.isnan(on_ranks(models, spread)[0].overall)
    assert on_ranks([nn.ReLU(), nn.ReLU()], spread)[0] == replicas.Spread(0.0, {})


def test_alone():
    """With one rank nothing is sent and nothing changes."""
    net = different_nets(3)[2]
    before = {n: bits(t) for n, t in named(net).items()}

    def function(model: nn.Module, transport: Transport) -> int:
        report = check_replicas(model, transport)
        assert report == ReplicaReport(1, len(before))
        resync(model, transport)
        assert spread(model, transport).overall == 0
        assert set(spread(model, transport).by_name.values()) == {0.0}
        return transport.ledger.snapshot().messages

    assert on_ranks([net], function) == [0]
    assert {n: bits(t) for n, t in named(net).items()} == before


def test_modules_without_tensors():
    """They are equal, and stay so."""
    models = [nn.ReLU() for _ in range(3)]
    assert check(models).equal
    on_ranks(models, resync)


def test_suggested_steps():
    """floor((budget / spread)^2), from 1 to MOST_STEPS."""
    assert suggest_resync_every(0.1, 0.3) == 9
    assert suggest_resync_every(0.1, 0.299) == 8
    assert suggest_resync_every(1.0, 1e-3) == 1
    assert suggest_resync_every(0.0, 1e-3) == MOST_STEPS
    assert suggest_resync_every(5e-324, 1e300) == MOST_STEPS
    assert suggest_resync_every(1.0, 99.995) == 9999
    for bad in (-1e-3, math.nan, math.inf):
        with pytest.raises(InputError, match="spread_per_step"):
            suggest_resync_every(bad, 1.0)
        with pytest.raises(InputError, match="budget"):
            suggest_resync_every(1.0, bad)
    with pytest.raises(InputError, match="budget"):
        suggest_resync_every(1.0, 0.0)


@given(st.floats(1e-9, 1.0), st.floats(1e-9, 1.0))
def test_suggested_steps_stay_within_the_budget(step, budget):
    """A random walk of that many steps is within the budget, and one more would not be."""
    steps = suggest_resync_every(step, budget)
    if steps > 1:
        assert step * math.sqrt(steps) <= budget * (1 + 1e-9)
    if steps < MOST_STEPS:
        assert step * math.sqrt(steps + 1) >= budget * (1 - 1e-9)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())


UNUSABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (Sparse, "'graph' is a torch.sparse_coo tensor"),
    "lazy": (lambda: nn.LazyLinear(3), "'weight' is not initialised"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' is a meta tensor"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_unusable_tensors_are_refused(what):
    """An error on the rank that has one, and on all others, without waiting for a time-out."""
    make, text = UNUSABLE[what]

    texts: dict[int, str] = {}

    def function(transport: Transport) -> None:
        model = make() if transport.rank == 1 else nn.Linear(2, 2)
        kind = InputError if transport.rank == 1 else PeerError
        with pytest.raises(kind) as caught:
            check_replicas(model, transport)
        texts[transport.rank] = str(caught.value)

    with pytest.raises(InputError, match=text):  # run_threads raises what one rank told the others
        run_threads(3, function, TIMEOUT_S)
    assert len(texts) == 3
    assert all(text in told for told in texts.values())


def test_expanded_buffers_are_refused_only_where_they_must_change():
    """They can be compared; several elements at one address cannot be averaged one by one."""
    models = [nn.Linear(2, 2) for _ in range(2)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    for model in models:
        model.register_buffer("ones", torch.ones(1).expand(4))
    on_ranks(models, resync)
    models[1].ones = torch.zeros(1).expand(4)
    assert check(models).name == "ones"
    with pytest.raises(InputError, match="'ones' is an expanded tensor"):
        on_ranks(models, resync)


def test_only_exact_averages():
    """``exact=False`` is refused, with the reason."""
    with pytest.raises(InputError, match="exact=False"):
        on_ranks([nn.Linear(1, 1)], lambda model, t: resync(model, t, exact=False))


def on_processes() -> dict[str, Any]:
    """What a gloo rank does with a DDP model: drift apart, see it, measure it, resynchronise."""
    transport = DistributedTransport(timeout_s=60.0)
    rank = transport.rank
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    net[0].bias.requires_grad_(False)
    model = DistributedDataParallel(net, broadcast_buffers=False)

    def step() -> None:
        torch.manual_seed(rank)
        model(torch.randn(8, 6) + rank).square().sum().backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None

    out: dict[str, Any] = {"fresh": check_replicas(model, transport)}
    for _ in range(5):
        step()
    out["statistics"] = check_replicas(model, transport)
    out["trained"] = check_replicas(model, transport, buffers=False)
    if rank == 1:
        net[0].bias.view(torch.int32)[2] ^= 1 << 20
    out["flipped"] = check_replicas(model, transport, buffers=False)
    out["spread"] = spread(model, transport)
    resync(model, transport)
    out["resynced"] = check_replicas(model, transport)
    step()
    out["went on"] = check_replicas(model, transport, buffers=False)
    out["state"] = {n: bits(t) for n, t in net.named_parameters()}
    if rank == 3:
        net.register_buffer("more", torch.ones(1))
    with pytest.raises(MismatchError, match="'more' is missing on ranks 0, 1, 2"):
        check_replicas(model, transport)
    out["after mismatch"] = check_replicas(model, transport, buffers=False)
    transport.close()
    return out


@pytest.mark.processes
def test_ddp_on_real_processes(pool):
    """Four gloo ranks with DDP: equal after training, a flipped bit is named, resync mends all."""
    results = pool.run(on_processes, timeout_s=100.0)  # DDP imports torch._dynamo: seconds
    for out in results:
        assert out["fresh"].equal
        assert out["trained"].equal
        assert out["statistics"].name == "1.running_mean"
        assert (out["flipped"].name, out["flipped"].ranks) == ("0.bias", (1,))
        assert out["flipped"].max_difference > 0
        assert out["spread"] == results[0]["spread"]
        assert {n for n, s in out["spread"].by_name.items() if s} == {"0.bias"}
        assert out["resynced"].equal
        assert out["went on"].equal
        assert out["after mismatch"].equal
        assert out["state"] == results[0]["state"]
