"""Send and receive between ranks: over ``torch.distributed``, or between threads of one process.

Both transports obey the same laws, tested over one table (``tests/test_transport.py``):

- Messages from one rank to another with one tag arrive in the order they were sent.
- A request is waited for exactly once; until then its tensor belongs to the transport.
- A dead, silent or failing rank becomes an error on every other rank within ``timeout_s``, and all
  ranks name the same culprit. In a ring only the successor notices, so each rank that fails posts a
  report to the store that the launcher holds and then closes its connections, which wakes its
  neighbours; the reports decide who is named.
- A transport that failed is finished: later calls raise at once. Make a new one.
"""

from __future__ import annotations

from taciturn.transport.base import HEADER_BYTES, Header, Request, Transport
from taciturn.transport.distributed import DistributedTransport
from taciturn.transport.threads import ThreadTransport, run_threads

__all__ = [
    "HEADER_BYTES",
    "DistributedTransport",
    "Header",
    "Request",
    "ThreadTransport",
    "Transport",
    "run_threads",
]
