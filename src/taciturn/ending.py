"""How a process that was a rank ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["end_rank"]


def end_rank(status: int) -> NoReturn:
    """End this process at once, without the interpreter's own end.

    Gloo's threads outlive their process group wherever a module of DistributedDataParallel still
    holds it. In an orderly exit they would be waited for, and they wait for ranks that are lost; or
    one of them would drop the tensors of the last call while the interpreter ends, for which it
    asks for the interpreter's lock, and the process is aborted.

    Args:
        status: exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
