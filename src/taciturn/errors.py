"""What can go wrong, as one tree.

::

    TaciturnError
    |-- MethodError(ValueError)      a method string that means nothing
    |-- InputError(ValueError)       a size, rate, file or tensor that cannot be used
    |-- CodeError(ValueError)        no such code, or parameters that admit none
    |-- MismatchError(RuntimeError)  ranks disagree on what they exchange
    |-- PeerError(RuntimeError)      a rank died, went silent or failed
    `-- TestbedError(RuntimeError)   no emulated network can be made here

Every message says what was wrong, the value received and what to do.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "CodeError",
    "InputError",
    "MethodError",
    "MismatchError",
    "PeerError",
    "TaciturnError",
    "TestbedError",
    "described",
]


class TaciturnError(Exception):
    """Root of every error that Taciturn raises on purpose."""


class MethodError(TaciturnError, ValueError):
    """A method string that names nothing, or gives a key a value it cannot have."""


class InputError(TaciturnError, ValueError):
    """A size, rate, file or tensor that cannot be used."""


class CodeError(TaciturnError, ValueError):
    """No such code, or parameters for which no code exists."""


class MismatchError(TaciturnError, RuntimeError):
    """The ranks disagree on the length, the dtype or the method of an exchange."""


class PeerError(TaciturnError, RuntimeError):
    """A rank died, went silent or failed in the middle of an exchange.

    Attributes:
        ranks: the ranks held responsible, in the group's numbering; empty if unknown.
        round: the round in which this rank noticed, counted from 1; 0 before the first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), round: int = 0) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.round = round


class TestbedError(TaciturnError, RuntimeError):
    """No emulated network can be made here; the message says why and how to go on without."""

    __test__ = False  # pytest: not a test class, in spite of its name


_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parent}{os.sep}",
    "<",  # such as <frozen importlib._bootstrap>
)


def described(error: BaseException) -> str:
    """An error of the user's code: its kind and message, and where in that code it arose.

    The place is the innermost one that is neither in Python's library, an installed package nor
    here; there is none where all of them are.
    """
    text = " ".join(str(error).split())  # one line
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # says the place itself
        return said
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{said} ({frame.filename}, line {frame.lineno})"
    return said
