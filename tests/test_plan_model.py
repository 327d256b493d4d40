"""What is exchanged: models by name, by sizes and as modules, cut as the hook and DDP cut them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from taciturn.bench import inputs
from taciturn.errors import InputError
from taciturn.exchange import FIRST_BYTES, GROUP_BYTES, _cut, backward_order
from taciturn.gpt import gpt_shape
from taciturn.methods import aggregator, parse
from taciturn.plan import CANDIDATES, Model, parse_model
from taciturn.plan import model as sizes
from taciturn.plan.prediction import OVERLAPPED
from taciturn.plan.timing import Compute, read_timing

TRACES = Path(__file__).parent / "traces"
SHAPES = st.lists(
    st.lists(st.integers(1, 3000), min_size=1, max_size=2).map(tuple), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", ["gpt-05m", "gpt-5m"])
def test_bundled_models_are_the_benchs(name: str) -> None:
    """A bundled name has the parameters of bench's GPT of that size, in the order of backward."""
    numel = sizes.BUNDLED[name]
    net = inputs.GPT(gpt_shape(numel), torch.Generator())
    shapes = {n: tuple(p.shape) for n, p in net.named_parameters()}
    model = parse_model(name)
    assert model.tensors == tuple((n, shapes[n]) for n in backward_order(net))
    assert Model.of_module(net).tensors == model.tensors
    assert model.numel == sum(p.numel() for p in net.parameters()) >= numel


@given(SHAPES)
def test_groups_are_the_hooks(shapes: list[tuple[int, ...]]) -> None:
    """Groups are those of ``taciturn.exchange``: nothing lost, nothing twice, the same cuts."""
    model = Model("some", tuple((f"p{i}", shape) for i, shape in enumerate(shapes)))
    tensors = [(n, torch.empty(shape, device="meta")) for n, shape in model.tensors]
    cut = [group.shapes for group, _ in _cut(tensors, GROUP_BYTES, GROUP_BYTES)]
    assert [buffer.shapes for buffer in model.groups()] == cut
    overlapped = [group.shapes for group, _ in _cut(tensors, GROUP_BYTES, FIRST_BYTES)]
    assert [buffer.shapes for buffer in model.buckets()] == overlapped
    assert sizes.GROUP_BYTES == GROUP_BYTES


def test_overlapped_methods_are_the_hooks() -> None:
    """Planned in DDP's buckets is what the hook exchanges in them."""
    for candidate in CANDIDATES:
        overlaps = aggregator(candidate.method).overlaps
        assert overlaps == (parse(candidate.method).name in OVERLAPPED)


@given(SHAPES)
def test_buckets_are_ddps(shapes: list[tuple[int, ...]]) -> None:
    """Buckets are those that torch assigns, with its first bucket of 1 MiB."""
    model = Model("some", tuple((f"p{i}", shape) for i, shape in enumerate(shapes)))
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    assert sizes.FIRST_BUCKET_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES
    limits = [sizes.FIRST_BUCKET_BYTES, sizes.GROUP_BYTES]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    told = [buffer.shapes for buffer in model.buckets()]
    assert told == [tuple(shapes[i] for i in bucket) for bucket in assigned]
    ready = [buffer.ready for buffer in model.buckets()]
    assert ready == sorted(ready)
    assert ready[-1] == 1


def test_sizes_are_buckets() -> None:
    """A list of sizes is exchanged as given, by the hook and by DDP alike."""
    model = parse_model("25MiB, 25MiB,3MiB")
    numels = [25 * 2**18, 25 * 2**18, 3 * 2**18]
    assert [b.numel for b in model.groups()] == numels == [b.numel for b in model.buckets()]
    assert model.groups()[0].ready == pytest.approx(25 / 53)
    assert not model.shapes_known


def test_a_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``module:callable`` is imported from the folder one stands in; frozen parameters are not
    exchanged.
    """
    (tmp_path / "own_model_of_test.py").write_text(
        "import torch\n"
        "def net():\n"
        "    m = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))\n"
        "    m[0].weight.requires_grad = False\n"
        "    return m\n"
        "def frozen(): return torch.nn.ReLU()\n"
        "def bad(): raise OSError('no weights')\n"
        "def number(): return 3\n"
        "thing = 3\n"
        "import sys\n"
        "def leaves(): sys.exit(0)\n"
        "def two_lines(): raise ValueError('one\\ntwo')\n"
        "def lazy(): return torch.nn.LazyLinear(3)\n"
        "def complex(): return torch.nn.Linear(3, 5, dtype=torch.complex64)\n"
        "half = torch.nn.Linear(3, 5).half()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = parse_model("own_model_of_test:net")
    assert model.tensors == (("1.bias", (7,)), ("1.weight", (7, 5)), ("0.bias", (5,)))
    made = parse_model("own_model_of_test:half")  # a module itself will do
    assert made.numel == 20
    assert made.notes == ("Gradients of torch.float16 are counted as fp32.",)
    for what, words in (
        ("frozen", "no parameters that are trained"),
        ("bad", "failed when it was called.*OSError: no weights"),
        ("number", "returned a int"),
        ("thing", "that is a int"),
        ("nothing", "has no 'nothing'"),
        ("leaves", r"failed when it was called.*SystemExit: 0 \(.*line 11\)"),
        ("two_lines", "ValueError: one two"),
        ("lazy", "weight has no shape yet"),
        ("complex", "complex64, and only real gradients"),
    ):
        with pytest.raises(InputError, match=words):
            parse_model(f"own_model_of_test:{what}")


@pytest.mark.parametrize("text", ["raise OSError('at import')", "import sys; sys.exit(3)", "def"])
def test_a_module_that_cannot_be_imported(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its own code does, it is one line, and never this program's end."""
    name = f"no_import_of_test_{len(text)}"
    (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="cannot be imported") as caught:
        parse_model(f"{name}:net")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "none that is known"),
        ("gpt-7m", "gpt-05m, gpt-5m"),
        ("25MiB,0", "is zero"),
        ("25MiB,,3MiB", "not a size"),
        ("0", "is zero"),
        ("10", "10 bytes is no whole number of fp32 elements"),
        ("25mbit", "unit 'mbit'"),
        ("no_such_module_here:net", "No module named"),
        (":net", "no module and a name in it"),
        ("..net:build", "no module and a name in it"),
        ("net:build:more", "no module and a name in it"),
    ],
)
def test_no_model(text: str, words: str) -> None:
    """What is no model, or one of no elements, is refused with what is accepted."""
    with pytest.raises(InputError, match=words):
        parse_model(text)


def test_a_model_without_parameters_is_refused() -> None:
    """Nothing to exchange is no plan; nor is a bucket of nothing among others."""
    with pytest.raises(InputError, match="no parameters"):
        Model("empty")
    with pytest.raises(InputError, match="no parameters"):
        Model("empty", (("a", (0, 3)),))
    with pytest.raises(InputError, match="bucket of no elements"):
        Model("gap", sizes=(3, 0))
    with pytest.raises(InputError, match="not both"):
        Model("two", (("a", (3,)),), (3,))


# ----------------------------------------------------------------------------- timing


def test_gradients_come_in_proportion_or_along_a_curve() -> None:
    """Without a trace a buffer is there in proportion to its bytes, with one along its curve."""
    plain = Compute(10.0, 0.5)
    assert [plain.ready_s(share) for share in (0, 0.25, 1)] == [0, 1.25, 5]
    late = Compute(10.0, 0.5, (0.0, 0.5, 1.0), (0.0, 0.9, 1.0))
    assert [late.ready_s(share) for share in (0.25, 0.5, 0.75, 1.0)] == pytest.approx(
        [2.25, 4.5, 4.75, 5.0]
    )


def test_a_trace_tells_when_gradients_are_there(tmp_path: Path) -> None:
    """A recorded DDP run gives a curve that ascends to 1, and its own compute if none is given."""
    for path in TRACES.glob("ddp_bucketed_rank*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = read_timing(tmp_path)
    assert len(found.made) > 2
    assert found.made[-1] == found.at[-1] == 1
    assert 0 < found.backward_share <= 1
    assert 0 < found.step_s < math.inf
    measured = read_timing(tmp_path, 0.25)
    assert measured.step_s == 0.25
    assert measured.made == found.made
    assert str(tmp_path) in found.source


def test_a_trace_without_a_backward_is_refused(tmp_path: Path) -> None:
    """Files in which nothing is exchanged beside a backward say nothing of it."""
    (tmp_path / "rank0.json").write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, '
        '"ts": 1, "dur": 5}], "distributedInfo": {"rank": 0, "world_size": 1}}'
    )
    with pytest.raises(InputError, match="no step in it has a backward"):
        read_timing(tmp_path)
