"""Training that talks less, and proof that it helped.

The names below are loaded when they are first used: importing the package changes nothing and
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taciturn.lazy import lazily

if TYPE_CHECKING:
    from taciturn.accumulation import Accumulation
    from taciturn.aggregators import Aggregator, Cast, Mean, PowerSGD, TopK
    from taciturn.collectives import Backend, CodedRing, Collective, Direct, QuantizedRing, Ring
    from taciturn.error_feedback import ErrorFeedback
    from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError
    from taciturn.local_update import DiLoCo, LocalSGD
    from taciturn.methods import aggregator, build
    from taciturn.testbed import Testbed
    from taciturn.transport import DistributedTransport, Transport, run_threads

__all__ = [
    "Accumulation",
    "Aggregator",
    "Backend",
    "Cast",
    "CodedRing",
    "Collective",
    "DiLoCo",
    "Direct",
    "DistributedTransport",
    "ErrorFeedback",
    "InputError",
    "LocalSGD",
    "Mean",
    "MismatchError",
    "PeerError",
    "PowerSGD",
    "QuantizedRing",
    "Ring",
    "TaciturnError",
    "Testbed",
    "TopK",
    "Transport",
    "aggregator",
    "build",
    "run_threads",
]

__getattr__ = lazily(
    __name__,
    {
        "Accumulation": "accumulation",
        "Aggregator": "aggregators",
        "Cast": "aggregators",
        "ErrorFeedback": "error_feedback",
        "Mean": "aggregators",
        "PowerSGD": "aggregators",
        "TopK": "aggregators",
        "aggregator": "methods",
        "Backend": "collectives",
        "CodedRing": "collectives",
        "Collective": "collectives",
        "DiLoCo": "local_update",
        "Direct": "collectives",
        "DistributedTransport": "transport",
        "InputError": "errors",
        "LocalSGD": "local_update",
        "MismatchError": "errors",
        "PeerError": "errors",
        "TaciturnError": "errors",
        "QuantizedRing": "collectives",
        "Ring": "collectives",
        "Testbed": "testbed",
        "Transport": "transport",
        "build": "methods",
        "run_threads": "transport",
    },
)
