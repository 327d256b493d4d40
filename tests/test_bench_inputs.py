"""Buffers for a bench: real gradients, noise, files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taciturn.bench import inputs
from taciturn.bench.inputs import (
    GPT,
    GPTShape,
    Span,
    check_source,
    file_elems,
    gpt_shape,
    gradients,
    make_input,
)
from taciturn.errors import InputError


@pytest.mark.parametrize("numel", [1, 4097, 60_000, 200_001])
def test_gradients_fill_the_buffer_in_parameter_order(numel: int) -> None:
    """A buffer has exactly the elements asked for, and named parameters tile it without gaps."""
    data = gradients(numel, rank=0)
    assert data.buffer.shape == (numel,)
    assert data.buffer.dtype == torch.float32
    assert [span.start for span in data.spans] == [0, *(span.stop for span in data.spans[:-1])]
    assert data.spans[-1].stop == numel
    names = [name for name, _ in GPT(gpt_shape(numel), torch.Generator()).named_parameters()]
    assert [span.name for span in data.spans] == names[: len(data.spans)]
    assert torch.isfinite(data.buffer).all()


def test_gradients_are_autograd_s() -> None:
    """Moving the weights along the gradient changes this rank's loss as the gradient says."""
    shape, seed, rank = GPTShape(32, 1), 3, 1
    data = gradients(shape.params, rank, seed)
    common = torch.Generator().manual_seed(seed)
    model = GPT(shape, common)
    inputs._warm_up(model, inputs.corpus(), common)
    own = torch.Generator().manual_seed((seed << 20) + rank + 1)
    batch = inputs.draw_batch(inputs.corpus(), inputs.SEQUENCES, own)
    model.double()
    slope = data.buffer.double()
    step = 1e-4 * slope / slope.norm()
    losses = []
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for sign in (1, -1):
        torch.nn.utils.vector_to_parameters(weights + sign * step, model.parameters())
        losses.append(model.loss(batch).item())
    # Central difference: its own error is of order step^2.
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope.norm().item(), rel=1e-4)


def test_gradients_are_repeatable_and_differ_between_ranks() -> None:
    """One seed and rank give one gradient, bit for bit; another rank or seed gives another."""
    first = gradients(30_000, rank=2, seed=5).buffer
    assert torch.equal(first, gradients(30_000, rank=2, seed=5).buffer)
    assert not torch.equal(first, gradients(30_000, rank=3, seed=5).buffer)
    assert not torch.equal(first, gradients(30_000, rank=2, seed=6).buffer)


def test_gradients_are_not_noise() -> None:
    """Ranks agree in part, and parameters differ in scale by more than a factor of ten."""
    several = [gradients(60_000, rank) for rank in range(4)]
    stack = torch.stack([data.buffer for data in several])
    common = stack.mean(0).square().sum() / stack.square().mean(0).sum()
    assert common > 0.5  # independent noise would have 1/4
    scales = [several[0].buffer[s.start : s.stop].square().mean().sqrt() for s in several[0].spans]
    assert max(scales) > 10 * min(scales)


def test_training_randomness_is_left_alone() -> None:
    """Making any input moves no global random state."""
    before = torch.get_rng_state()
    gradients(10_000, rank=0)
    make_input("random", 100, rank=0)
    assert torch.equal(before, torch.get_rng_state())


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 1 << 28))
def test_the_model_is_just_large_enough(numel: int) -> None:
    """The GPT has no fewer parameters than elements, and beyond 1 MiB not half as many more."""
    shape = gpt_shape(numel)
    assert shape.params >= numel
    assert shape.width % inputs.HEAD_ELEMS == 0
    if numel > 1 << 18:
        assert shape.params < 1.5 * numel
    if numel >= 1 << 23:
        assert shape.params < 1.1 * numel


@pytest.mark.parametrize("shape", [GPTShape(32, 1), GPTShape(64, 3), GPTShape(96, 2)])
def test_parameter_count(shape: GPTShape) -> None:
    """The count that sizes the model is that of its parameters."""
    model = GPT(shape, torch.Generator())
    assert sum(p.numel() for p in model.parameters()) == shape.params


def test_initialisation_is_gpt_2_s() -> None:
    """Weights have deviation 0.02, residual projections 0.02 / sqrt(2 depth), biases are zero."""
    model = GPT(GPTShape(128, 2), torch.Generator().manual_seed(0))
    # The deviation of n normal draws is off by 1 / sqrt(2 n): 16384 draws, within 3 % at 5 sigma.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            wanted = 0.01 if name.endswith(("proj.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.03)


def test_test_folders_are_not_read(tmp_path: Path) -> None:
    """The text is sorted Python sources, without tests, installed packages and other files."""
    for name in (
        "b.py",
        "a.py",
        "a/z.py",
        "test/t.py",
        "x/tests/t.py",
        "site-packages/s.py",
        "n.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    found = [path.relative_to(tmp_path).as_posix() for path in inputs.source_files(tmp_path)]
    assert found == ["a/z.py", "a.py", "b.py"]


def test_no_source_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the library's sources says so and names another input."""
    inputs.corpus.cache_clear()
    monkeypatch.setattr(inputs.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(InputError, match="--input random"):
        check_source("gradients", ranks=2)


def test_random_is_independent_normal() -> None:
    """Ranks draw unit-variance noise that is uncorrelated between them."""
    a, b = (make_input("random", 1 << 16, rank).buffer for rank in range(2))
    assert a.square().mean().item() == pytest.approx(1, abs=0.03)  # 5 sigma of sqrt(2 / 65536)
    assert (a * b).mean().item() == pytest.approx(0, abs=0.02)  # 5 sigma of 1 / 256


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12).reshape(2, 6),
        torch.arange(12.0).bfloat16(),
        torch.arange(12.0).reshape(3, 4).requires_grad_(),
    ],
)
def test_pt_file(tmp_path: Path, value: torch.Tensor) -> None:
    """A .pt file with one real tensor is flattened to float32."""
    torch.save(value, tmp_path / "x.pt")
    data = make_input(str(tmp_path / "x.pt"), 12, rank=1)
    assert torch.equal(data.buffer, torch.arange(12.0))
    assert data.spans == ()
    assert "same on all ranks" in data.note


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2", "u1", "?", "<f2"])
def test_npy_file(tmp_path: Path, dtype: str) -> None:
    """A .npy file of real numbers in any byte order is flattened to float32."""
    np.save(tmp_path / "x.npy", np.array([[0, 1], [1, 0]]).astype(dtype))
    assert make_input(str(tmp_path / "x.npy"), 4, rank=0).buffer.tolist() == [0, 1, 1, 0]


def test_dict_keeps_names(tmp_path: Path) -> None:
    """A dict of tensors is laid end to end; its names stay with their elements, also when cut."""
    torch.save({"a": torch.ones(2, 2), "b": torch.zeros(3)}, tmp_path / "x.pt")
    source = str(tmp_path / "x.pt")
    assert file_elems(source) == 7
    assert make_input(source, 7, 0).spans == (Span("a", 0, 4), Span("b", 4, 7))
    assert make_input(source, 5, 0).spans == (Span("a", 0, 4), Span("b", 4, 5))
    assert make_input(source, 4, 0).spans == (Span("a", 0, 4),)


def test_other_sizes_are_cut_or_repeated(tmp_path: Path) -> None:
    """A file of another length than the buffer is cut or repeated, and the note says so."""
    torch.save(torch.arange(3.0), tmp_path / "x.pt")
    cut = make_input(str(tmp_path / "x.pt"), 2, 0)
    assert cut.buffer.tolist() == [0, 1]
    assert "first 2 of 3" in cut.note
    longer = make_input(str(tmp_path / "x.pt"), 7, 0)
    assert longer.buffer.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert "repeated to 7" in longer.note


def test_one_file_per_rank(tmp_path: Path) -> None:
    """``{rank}`` in the name stands for the rank; a missing one is found before anything starts."""
    for rank in range(2):
        torch.save(torch.full((4,), float(rank)), tmp_path / f"g{rank}.pt")
    source = str(tmp_path / "g{rank}.pt")
    assert make_input(source, 4, 1).buffer.tolist() == [1, 1, 1, 1]
    check_source(source, ranks=2)
    with pytest.raises(InputError, match=r"g2\.pt"):
        check_source(source, ranks=3)


class Evil:
    """Would make a folder when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_unusable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, damaged, foreign, empty or complex files are refused by name; none runs code."""
    monkeypatch.chdir(tmp_path)
    Path("damaged.pt").write_bytes(b"not a tensor")
    Path("damaged.npy").write_bytes(b"not an array")
    Path("text.txt").write_text("1 2 3")
    Path("evil.pt").write_bytes(pickle.dumps(Evil()))
    np.save("objects.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.save("complex.npy", np.ones(3, dtype=complex))
    np.save("words.npy", np.array(["a"]))
    torch.save(torch.ones(3, dtype=torch.complex64), "complex.pt")
    torch.save(torch.ones(3).to_sparse(), "sparse.pt")
    torch.save({"a": 1}, "number.pt")
    torch.save(torch.empty(0), "empty.pt")
    torch.save({}, "nothing.pt")
    Path("folder.pt").mkdir()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 13
    for name in [*files, "missing.pt", "gradient"]:
        with pytest.raises(InputError, match=name):
            check_source(name, ranks=1)
    assert not Path("unpickled").exists()


def test_a_buffer_needs_elements() -> None:
    """A buffer of no elements is refused."""
    with pytest.raises(InputError, match="0 elements"):
        make_input("random", 0, 0)


def test_the_largest_seed_is_the_last_that_a_generator_takes() -> None:
    """Every rank of up to a million can be told apart at ``MAX_SEED``; one more overflows."""
    for rank in (0, (1 << inputs.SEED_SHIFT) - 2):
        assert len(inputs.random_normal(3, rank, inputs.MAX_SEED).buffer) == 3
    with pytest.raises(ValueError, match="Overflow"):
        inputs.random_normal(3, 0, inputs.MAX_SEED + 1)
