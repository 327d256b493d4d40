"""What a code of the coded ring costs in accuracy: one rounding, and all of them together.

Two parts add up. The *bias* is there in exact arithmetic: a rank decodes ``sum_h W_h g_(i-h)``
with ``W_h`` near, but not at, the identity. The *noise* comes from the wire: every hop rounds the
message it forwards, the error stays in the chain for the rest of the trip and is amplified by
the decoder. Both are computed from the table and the decoders, for gradients that are independent
between ranks and components; a part common to all ranks adds no bias.

The errors are relative to the rms of the true sum, ``sqrt(N)`` for unit variance, and
``replica_error**2 == spread**2 + mean_error**2``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from taciturn.errors import CodeError
from taciturn.ranges import check_whole

__all__ = [
    "CodeErrors",
    "expected_in_chains",
    "expected_shared",
    "gain_of_errors",
    "rounded_energy",
    "rounding_of",
]

Array: TypeAlias = NDArray[np.float64]

_SIGNIFICAND_BITS = {"fp64": 53, "fp32": 24, "fp16": 11, "bf16": 8}
_LARGEST_LEVEL = {"int8": 127, "int4": 7}


@dataclass(frozen=True)
class CodeErrors:
    """Errors that a code predicts, each relative to the rms of the true sum.

    Attributes:
        replica_error: rms of ``decoded - sum`` over ranks and elements.
        mean_error: rms of ``mean over ranks of decoded - sum``.
        spread: rms of ``decoded - mean over ranks of decoded``.
        spread_hetero: the spread relative to the part of the sum that differs between ranks, the
            rms of ``sqrt(N) (g_k - mean over k of g_k)``, instead; nan for one rank.
        bias: the share of ``replica_error`` that exact arithmetic would leave.
    """

    replica_error: float
    mean_error: float
    spread: float
    spread_hetero: float
    bias: float


@lru_cache(maxsize=256)
def rounding_of(wire: str, block: int = 128, rounding: str = "nearest") -> float:
    """Return the rms error of one wire rounding over the rms of what is rounded.

    Floating point with a significand of ``m`` bits and ``u = 2**-m``: a value in ``[2^e, 2^(e+1))``
    is off by at most ``u 2^e``, uniformly, variance ``u^2 4^e / 3``; with mantissas spread as
    ``1/x`` (a Gaussian's, averaged over its scale) the mean of ``4^e / x^2`` is ``3 / (8 ln 2)``.
    Hence ``u / sqrt(8 ln 2) = 0.4247 u``. fp16's limited range is not modelled.

    Blocks of integers, levels ``-q..q``: the step is ``max|x| / q``, larger by a factor of
    ``1 + 2**-8 ln 2`` on average because the scale is a bf16 number rounded up; the error is
    uniform, its variance a twelfth of the step squared. ``E[max|x|^2]`` over a block of Gaussians
    is integrated numerically.

    Stochastic rounding doubles the variance of either.

    Args:
        wire: one of fp64, fp32, fp16, bf16, int8, int4.
        block: values that share a scale; for int8 and int4 only.
        rounding: "nearest" or "stochastic".

    Raises:
        CodeError: an unknown wire or rounding, or a block below one.
    """
    if rounding not in ("nearest", "stochastic"):
        raise CodeError(f"rounding {rounding!r} is unknown: use 'nearest' or 'stochastic'")
    factor = math.sqrt(2.0) if rounding == "stochastic" else 1.0
    if wire in _SIGNIFICAND_BITS:
        return factor * 2.0 ** -_SIGNIFICAND_BITS[wire] / math.sqrt(8 * math.log(2))
    if wire not in _LARGEST_LEVEL:
        known = ", ".join([*_SIGNIFICAND_BITS, *_LARGEST_LEVEL])
        raise CodeError(f"no rounding is known for the wire {wire!r}: use one of {known}")
    check_whole("block", block, 1, error=CodeError)
    step = math.sqrt(_mean_square_of_largest(block)) / _LARGEST_LEVEL[wire]
    return factor * step * (1 + 2.0**-8 * math.log(2)) / math.sqrt(12)


def _mean_square_of_largest(count: int) -> float:
    """E[max x^2] over ``count`` standard Gaussians: the integral of 2x (1 - P(|x| < x)^count)."""
    x, width = np.linspace(0.0, 12.0, 6001, retstep=True)
    return float((2 * x * (1 - erf(x / math.sqrt(2)) ** count)).sum() * width)


def expected_in_chains(
    *,
    table: Array,
    decoders: Array,
    contributions: Iterable[Array],
    receive_rounds: Sequence[tuple[int, ...]],
    hops: Sequence[int],
    rounding: float,
    kept: bool,
) -> CodeErrors:
    """Return the errors of a code in chains.

    Bias: per element ``sum over h of |W_h - I|^2 / p``, averaged over residues w; in the replica
    mean the matrices of one sender are averaged over receivers first. Noise: the error made at
    round t' has variance ``rounding^2 E[M_t'^2]`` and is in every later message of its chain,
    so it leaves the decoder as the sum of the columns of D that are received after t'.

    Args:
        table: V, shape (L + 1, p).
        decoders: D by residue, shape (N, p, p).
        contributions: V_h by residue, each of shape (H, p, p).
        receive_rounds: by residue, in the order of D's columns.
        hops: h of ``contributions``' first axis.
        rounding: rms relative error of one rounding.
        kept: whether the decoded message has itself been rounded at its own round.
    """
    ranks, order, _ = decoders.shape
    bias, drift = 0.0, np.zeros((ranks, order, order))
    for w, contribution in enumerate(contributions):
        off = decoders[w] @ contribution - np.eye(order)  # W_h - I
        bias += float((off**2).sum())
        # sender b + d meets receiver b + w over (w - d) mod N hops
        drift[(w - np.asarray(hops)) % ranks] += off
    energy = rounding**2 * rounded_energy(table, ranks)
    gains = [
        gain_of_errors(decoder, rounds, len(table), kept)
        for decoder, rounds in zip(decoders, receive_rounds, strict=True)
    ]
    mean_gain = sum(gains) / ranks
    return _errors(
        ranks,
        bias=bias / (ranks * order),
        mean_bias=float((drift**2).sum()) / (ranks**2 * order),
        noise=sum(float((energy * gain**2).sum()) for gain in gains) / (ranks * order),
        mean_noise=float((energy * mean_gain**2).sum()) / order,
    )


def expected_shared(
    *,
    table: Array,
    decoder: Array,
    contributions: Array,
    receive_rounds: tuple[int, ...],
    hops: Sequence[int],
    turned: Array,
    rounding: float,
    kept: bool,
) -> CodeErrors:
    """Return the errors of a code in the shared layout, as ``expected_in_chains`` does.

    A rank decodes messages of all N chains at once. Messages of one chain share its errors, those
    of different chains do not; in the mean over ranks all c messages of a chain meet, each
    turned back as its rank does.

    Args:
        table: V, shape (L + 1, c).
        decoder: D, shape (c, c).
        contributions: V_h, shape (H, c, c).
        receive_rounds: in the order of D's columns.
        hops: h of ``contributions``' first axis.
        turned: by rank, the matrix with which it turns its components, shape (N, c, c).
        rounding: rms relative error of one rounding.
        kept: whether the decoded message has itself been rounded at its own round.
    """
    ranks, order, _ = turned.shape
    off = decoder @ contributions - np.eye(order)
    back = turned.transpose(0, 2, 1)
    drift = (back[list(hops)] @ off @ turned[list(hops)]).sum(axis=0)
    energy = rounding**2 * rounded_energy(table, ranks)
    noise = 0.0
    for chain in range(ranks):
        mine = [a for a, t in enumerate(receive_rounds) if t % ranks == chain]
        rounds = tuple(receive_rounds[a] for a in mine)
        gain = gain_of_errors(decoder[:, mine], rounds, len(table), kept)
        noise += float((energy * gain**2).sum())
    columns = np.stack([back[t % ranks] @ decoder[:, a] for a, t in enumerate(receive_rounds)], 1)
    whole = gain_of_errors(columns, receive_rounds, len(table), kept)
    return _errors(
        ranks,
        bias=float((off**2).sum()) / order,
        mean_bias=float((drift**2).sum()) / (ranks * order),
        noise=noise / order,
        mean_noise=float((energy * whole**2).sum()) / (ranks * order),
    )


def rounded_energy(table: Array, ranks: int) -> Array:
    """E[M_t^2] of the message that is rounded at round t = 0..L: |V|^2 over the last N rows.

    Zero where the row is that of one pass before: the message goes on as it came, and rounding it
    again changes nothing (in a plain ring, from round N on).
    """
    total = np.concatenate([[0.0], np.cumsum((table**2).sum(axis=1))])
    end = np.arange(1, len(table) + 1)
    energy: Array = total[end] - total[np.maximum(end - ranks, 0)]
    energy[ranks:][np.all(table[ranks:] == table[:-ranks], axis=1)] = 0.0
    return energy


def gain_of_errors(decoder: Array, rounds: tuple[int, ...], length: int, kept: bool) -> Array:
    """How an error made at round t' = 0..length-1 leaves the decoder: shape (k, length)."""
    steps = np.zeros((len(decoder), length + 1))
    for column, t in enumerate(rounds):
        steps[:, t + kept] += decoder[:, column]  # errors made before t, or at t as well
    return np.cumsum(steps[:, :0:-1], axis=1)[:, ::-1]


def _errors(
    ranks: int, *, bias: float, mean_bias: float, noise: float, mean_noise: float
) -> CodeErrors:
    """Mean squares per element, for unit variance, as relative rms errors."""
    replica = (bias + noise) / ranks
    mean = min((mean_bias + mean_noise) / ranks, replica)
    spread = math.sqrt(replica - mean)
    hetero = spread * math.sqrt(ranks / (ranks - 1)) if ranks > 1 else math.nan
    return CodeErrors(math.sqrt(replica), math.sqrt(mean), spread, hetero, math.sqrt(bias / ranks))
