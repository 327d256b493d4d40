"""What kind of event a name and a category stand for: one table, which users can extend.

The first row that matches decides. A pattern of the user goes before all rows. Kernels whose name
sounds like communication but is in no row are ``UNKNOWN``: they count as compute and are listed in
the report, so that ``--kind`` can put them right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from fnmatch import translate
from typing import NamedTuple

from taciturn.errors import InputError

__all__ = ["GPU_WORK", "KIND_WORDS", "Kind", "KindRule", "classify", "parse_kind"]


class Kind(IntEnum):
    """What an event is, which decides what the timeline and the graph make of it."""

    UNKNOWN = 0
    """On a GPU: sounds like communication, counts as compute, and is listed. Elsewhere: ignored."""
    COMPUTE = 1
    """A GPU kernel that computes."""
    COMMUNICATION = 2
    """A collective at work: a kernel of NCCL or RCCL, or a range of gloo on its pool thread."""
    COPY = 3
    """A copy or fill on a GPU."""
    CODEC = 4
    """Encodes or decodes what is sent: a kernel, or a labelled range on the CPU."""
    LAUNCH = 5
    """A runtime call that puts work into a stream."""
    SYNC = 6
    """A runtime call in which the CPU waits for the GPU."""
    STREAM_WAIT = 7
    """A runtime call that makes a stream wait for an event."""
    EVENT_RECORD = 8
    """A runtime call that records an event into a stream."""
    RUNTIME = 9
    """Any other runtime call."""
    CPU = 10
    """An operator on a CPU thread."""
    CALL = 11
    """A call of torch.distributed: enqueues a collective, is not its transfer."""
    ANNOTATION = 12
    """A range that a user or a library put round others."""
    GPU_ANNOTATION = 13
    """The same, shown where its kernels ran: covers them, is no work of its own."""
    PYTHON = 14
    """A Python function of a trace with stacks: dropped by the reader."""
    DEVICE_SYNC = 15
    """A record of who waited for whom on the GPU (``cuda_sync``): an edge, never compute."""
    OVERHEAD = 16
    """The profiler's own work, or a span of it."""


GPU_WORK = (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY, Kind.CODEC, Kind.UNKNOWN)
"""What occupies a stream."""


class KindRule(NamedTuple):
    """A row: both expressions must be found; the name's is sought without regard to case."""

    category: str
    name: str
    kind: Kind
    text: str = ""
    """As the user wrote it; empty for rows of the table."""

    def matches(self, names: Sequence[str]) -> bool:
        """Whether it is about any of these names."""
        return any(re.search(self.name, name, re.IGNORECASE) for name in names)


_KERNEL = "^(?:kernel|Kernel)$"
_RUNTIME = "^(?:cuda_runtime|cuda_driver|Runtime|xpu_runtime|xpu_driver|privateuse1_(?:runtime|driver)|mtia_runtime)$"  # noqa: E501 - one row of the table
_OP = "^(?:cpu_op|Operator|hpu_op)$"

RULES = (
    KindRule("^python_function$", "", Kind.PYTHON),
    # Names of NCCL before and after 2.19, in any case; RCCL's generic kernel says nothing more.
    KindRule(_KERNEL, r"nccl\w*kernel|rccl\w*kernel|msccl\w*kernel", Kind.COMMUNICATION),
    KindRule(_KERNEL, r"^(?:onecclkernel|ccl_kernel|hccl)", Kind.COMMUNICATION),
    # Kernels of PyTorch's symmetric memory and of the custom all-reduces of inference servers.
    KindRule(
        _KERNEL,
        r"(?:one_shot|two_shot|multimem)_all_(?:reduce|gather)|cross_device_reduce",
        Kind.COMMUNICATION,
    ),
    KindRule(_KERNEL, r"taciturn\w*(?:encode|decode|codec)", Kind.CODEC),
    KindRule(
        _KERNEL,
        r"[nr]ccl|(?:^|[^a-z])(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv)",
        Kind.UNKNOWN,
    ),
    KindRule(_KERNEL, "", Kind.COMPUTE),
    KindRule("^(?:gpu_memcpy|gpu_memset|Memcpy|Memset)$", "", Kind.COPY),
    KindRule("^collective_comm$", "", Kind.COMMUNICATION),
    KindRule(
        _RUNTIME, r"(?:Device|Stream|Event|Ctx|Context|Queue)_?Synchronize|queue.wait", Kind.SYNC
    ),
    # Without "Async" a copy returns when it is done.
    KindRule(_RUNTIME, r"^(?:cuda|hip)Memcpy(?:2D|3D|WithStream)?$", Kind.SYNC),
    KindRule(_RUNTIME, r"StreamWaitEvent", Kind.STREAM_WAIT),
    KindRule(_RUNTIME, r"EventRecord", Kind.EVENT_RECORD),
    KindRule(_RUNTIME, r"Launch|Memcpy|Memset|Enqueue", Kind.LAUNCH),
    KindRule(_RUNTIME, "", Kind.RUNTIME),
    KindRule("^cuda_sync$", "", Kind.DEVICE_SYNC),
    KindRule("^(?:gpu_user_annotation|mtia_user_annotation)$", "", Kind.GPU_ANNOTATION),
    KindRule("^user_annotation$", r"^(?:gloo|mpi|ucc):", Kind.COMMUNICATION),
    KindRule("^user_annotation$", r"^taciturn::exchange", Kind.COMMUNICATION),
    KindRule("^user_annotation$", r"^taciturn::(?:encode|decode|codec)", Kind.CODEC),
    KindRule("^user_annotation$", "^nccl:", Kind.CALL),
    KindRule("^user_annotation$", "", Kind.ANNOTATION),
    KindRule(_OP, r"^c10d(?:_functional)?::|^record_param_comms$", Kind.CALL),
    KindRule(_OP, "", Kind.CPU),
    KindRule("^(?:overhead|Overhead|Trace|cuda_event)$", "", Kind.OVERHEAD),
)
"""All rows, in the order in which they are tried."""

KIND_WORDS = {
    "comm": Kind.COMMUNICATION,
    "communication": Kind.COMMUNICATION,
    "compute": Kind.COMPUTE,
    "copy": Kind.COPY,
    "codec": Kind.CODEC,
    "launch": Kind.LAUNCH,
    "sync": Kind.SYNC,
    "ignore": Kind.OVERHEAD,
}
"""How a user writes a kind."""

_COMPILED = tuple(
    (re.compile(rule.category), re.compile(rule.name, re.IGNORECASE), rule.kind) for rule in RULES
)


def parse_kind(text: str) -> KindRule:
    """A rule like ``"*my_allreduce*=comm"``: a name with ``*`` and ``?``, and a kind.

    Raises:
        InputError: no ``=``, an empty pattern, or a kind that there is not.
    """
    pattern, equals, word = text.rpartition("=")
    if not equals or not pattern.strip() or word.strip().lower() not in KIND_WORDS:
        raise InputError(
            f"kind {text!r}: give PATTERN=KIND, with * and ? in the pattern and a kind of "
            f"{', '.join(KIND_WORDS)}; for example *my_allreduce*=comm"
        )
    return KindRule("", translate(pattern.strip()), KIND_WORDS[word.strip().lower()], text)


def classify(category: str, name: str, rules: Sequence[KindRule] = ()) -> Kind:
    """The kind of an event.

    Args:
        category: its ``cat``; empty if it has none.
        name: its name.
        rules: of the user, tried before the table; see :func:`parse_kind`.
    """
    for rule in rules:
        if re.search(rule.category, category) and re.search(rule.name, name, re.IGNORECASE):
            return rule.kind
    for category_is, name_is, kind in _COMPILED:
        if category_is.search(category) and name_is.search(name):
            return kind
    return Kind.UNKNOWN
