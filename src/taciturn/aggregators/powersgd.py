"""The average over ranks as one low-rank product per matrix: PowerSGD.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (NeurIPS 2019), arXiv:1905.13727, algorithms 1 and 2. With M_i the matrix of rank i
and Q what the last step left, on every rank:

    P = orthonormalize(sum over ranks of P_i),  P_i = M_i Q
    Q' = mean over ranks of Q_i,                Q_i = M_i^T P
    output = P Q'^T

Differences from the paper:

- Q is orthonormalized too before it is used (as in torch's hook), so that P is as well conditioned
  as the matrices, not as their square, and tiny gradients do not underflow.
- A direction that came out zero, of a zero or rank-deficient matrix, or not finite keeps its last
  value: zeros would stay zeros for ever.
- The residual is what *this rank* brought and the average does not hold, where the paper and
  torch's hook have input - output:

      residual_i = (I - P P^T) M_i (I - Q Q^T) = M_i - P Q_i^T - (I - P P^T) P_i Q^T

  Law: the sum over ranks of output + residual_i is that of M_i. P Q_i^T sums to the output times
  the number of ranks. The last term sums to zero, since P spans the sum of the P_i: the ranks have
  seen in the first exchange that these parts cancel. Whichever residuals are taken have the same
  sum. But input - output also keeps, step after step, all by which this rank differs from the
  mean, and M_i - P Q_i^T alone that part of it which lies outside the columns of the sum. It is
  never sent, and grows: with constant random 12 x 9 matrices on 3 ranks, in 200 steps to 70 times
  the gradient for M_i - P Q_i^T, and not beyond 3 times for this one (r = 4).

With ``alternate=True`` there is one exchange per step. In even steps Q is fixed, orthonormal and
the same on all ranks, and P is exchanged: output = (mean of P_i) Q^T, and residual_i = M_i (I - Q
Q^T). In odd steps P is fixed and Q exchanged: output = P (mean of Q_i)^T, and residual_i = (I - P
P^T) M_i. Either way a rank sends its projection on what is fixed and keeps the rest, so that the
law holds in each step; two steps are one power iteration.

Factors lie in memory as rows, P^T of shape (r, m) and Q^T of shape (r, n): the products with them
are several times as fast as with columns (MKL, r = 4).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from taciturn.aggregators.base import Aggregator, Group
from taciturn.collectives.base import Collective, Cost
from taciturn.collectives.ring import Ring
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.ranges import check_number, check_whole
from taciturn.transport import Transport

__all__ = ["PowerSGD"]

Side = Literal["left", "right"]
_OTHER: dict[Side, Side] = {"left": "right", "right": "left"}

_DEPENDENT = 1e-12
"""A row counts as dependent on those before it if less than this share of its square is left.

The factors come from fp32 products, whose errors are a few 1e-7 of a row: below 1e-6 there is only
noise. In fp64 the share itself is known to some 1e-16.
"""

_GOOD = 1e-8
"""Where every row has more than this share left, one pass leaves rows orthonormal to about 1e-8."""


@dataclass(eq=False)
class PowerSGD(Aggregator):
    """Low-rank average of every matrix; the rest exactly. Two exchanges of small factors a group.

    The matrix of a tensor of shape (m, ...) is (m, n), in logical order. All ranks get the same
    bits if they run the same torch with as many threads on processors of one kind.

    Law (``test_conservation``): sum over ranks of input = sum over ranks of (output + residual), in
    every step and in both modes, up to rounding; what ``over`` rounds is in the residual as far as
    its own residual tells.

    Args:
        rank: r, directions kept of each matrix; clamped to min(m, n). More: more bytes, less error.
        alternate: one exchange per step, of the left and the right factors in turn: half the
            latency, and twice the steps to follow a change.
        min_saving: a tensor is compressed only if r (m + n) times this is at most m n, so from 1 on
            r < min(m, n); else it is sent as it is, as are vectors. Higher: fewer are compressed.
        warm_start: begin with the factors of the last step, else with random ones in every step,
            which approximate far worse.
        seed: of the first factors, the same on every rank.
        over: collective that sums the factors and what is not compressed; Ring() if None.

    Raises:
        InputError: values that cannot be used, or a collective after which ranks differ.
    """

    rank: int = 4
    alternate: bool = False
    min_saving: float = 2.0
    warm_start: bool = True
    seed: int = 0
    over: Collective | None = None
    _over: Collective = field(init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)
    _factors: dict[Side, dict[str, torch.Tensor]] = field(init=False, repr=False)
    _pending: dict[Side, dict[str, torch.Tensor]] = field(init=False, repr=False)
    _plans: dict[Group, _Plan] = field(default_factory=dict, init=False, repr=False)
    _over_before: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _names_known: bool = field(default=True, init=False, repr=False)

    name: ClassVar[str] = "powersgd"
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1)
        check_whole("seed", self.seed, 0)
        check_number("min_saving", self.min_saving, 0, hint="with 0 every matrix is compressed")
        if self.alternate and not self.warm_start:
            raise InputError(
                "alternate=True with warm_start=False: one exchange refreshes the factors of the "
                "step before; keep the warm start, or take two exchanges"
            )
        self._over = Ring() if self.over is None else self.over
        self.bit_identical = self._over.exact or self._over.bit_identical
        if not self.bit_identical:
            raise InputError(
                f"over={self._over}: all ranks must get the same factors, bit for bit, and after "
                "this collective they differ; use a ring, a quantized ring, direct or the backend"
            )
        self._factors = {"left": {}, "right": {}}
        self._pending = {"left": {}, "right": {}}

    # -- one step

    @override
    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        if transport.size == 1:
            if residual is not None:
                residual.zero_()
            return
        if self._over_before is None:  # the first group of a step
            self._over_before = self._over.state_dict()
        try:
            with torch.no_grad():
                _check(gradients, group, residual)
                self._average(gradients, group, transport, residual)
        except (PeerError, MismatchError):
            raise
        except Exception as error:
            transport.fail(error)  # the other ranks must not wait for this one

    def _average(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None,
    ) -> None:
        plan, codec, feedback = self._plan(group), transport.ledger.codec, residual is not None
        side: Side = "left" if self.alternate and self._step % 2 else "right"
        with codec():
            matrices = [batch.matrices(gradients) for batch in plan.batches]
            rest = plan.rest_of(gradients)
            start = self._start(plan, side, gradients)
            fixed = plan.orthonormal(start, side)
        first = last = self._exchange(plan, matrices, fixed, side, rest, transport, feedback)
        if plan.batches and not self.alternate:
            with codec():
                side = _OTHER[side]
                fixed = plan.orthonormal(first.total, side)
            last = self._exchange(plan, matrices, fixed, side, [], transport, feedback)
        with codec():
            if residual is not None:
                residual.copy_(gradients)
                plan.subtract(residual, first, last)
                if rest:
                    lost = first.rest_lost
                    rest_residual = torch.zeros_like(first.rest) if lost is None else lost
                    torch._foreach_copy_(plan.rest_of(residual), plan.packed_rest(rest_residual))
            last.total.div_(transport.size)
            plan.replace(gradients, matrices, last)
            if rest:
                torch._foreach_copy_(rest, plan.packed_rest(first.rest.div_(transport.size)))
            if self.warm_start:
                old = self._start(plan, _OTHER[side], gradients) if self.alternate else start
                self._learn(plan, _OTHER[side], last.total, old)

    def _exchange(
        self,
        plan: _Plan,
        matrices: list[torch.Tensor],
        fixed: torch.Tensor,
        side: Side,
        rest: list[torch.Tensor],
        transport: Transport,
        feedback: bool,
    ) -> _Exchange:
        """Sum the factors opposite to the fixed ones; what is not compressed travels behind."""
        with transport.ledger.codec():
            numel = plan.numels[_OTHER[side]]
            buffer = fixed.new_empty(numel + sum(part.numel() for part in rest))
            total, behind = buffer[:numel], buffer[numel:]
            plan.multiply(matrices, fixed, side, total)
            if rest:
                torch.cat(rest, out=behind)
            own = total.clone() if feedback else None
            lost = torch.empty_like(buffer) if feedback and not self._over.exact else None
        self._over.all_reduce(buffer, transport, lost)
        if own is None or lost is None:
            return _Exchange(fixed, side, total, behind, own, None)
        return _Exchange(fixed, side, total, behind, own.sub_(lost[:numel]), lost[numel:])

    # -- factors from step to step

    def _start(self, plan: _Plan, side: Side, like: torch.Tensor) -> torch.Tensor:
        """Return the factors of one side, shape (plan.numels[side],): held, else random."""
        result = like.new_empty(plan.numels[side])
        for batch, factors in zip(plan.batches, plan.factors(result, side), strict=True):
            torch.stack([self._factor(n, batch, side).to(like) for n in batch.names], out=factors)
        return result

    def _factor(self, name: str, batch: _Batch, side: Side) -> torch.Tensor:
        """Return the factor of one matrix, shape (r, its rows or columns)."""
        shape = (batch.rank, batch.lengths[side])
        held = self._factors[side].get(name) if self.warm_start else None
        if held is None:
            # Of its own for every parameter, so that groups and their order do not matter; the
            # same for every rank, device and dtype.
            key = repr((self.seed, name, side, None if self.warm_start else self._step))
            digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            return torch.randn(shape, generator=generator)
        if held.shape != shape:
            raise InputError(_wrong_shape(side, name, held, shape))
        return held

    def _learn(self, plan: _Plan, side: Side, factors: torch.Tensor, old: torch.Tensor) -> None:
        """Note new factors, for when the step is kept; directions that are dead stay as they were.

        Dead is zero, which no product would ever change again, or not finite.
        """
        for batch, new, kept in zip(
            plan.batches, plan.factors(factors, side), plan.factors(old, side), strict=True
        ):
            largest = new.abs().amax(dim=2, keepdim=True)
            alive = (largest > 0) & (largest < math.inf)
            chosen = torch.where(alive, new, kept)
            self._pending[side].update(zip(batch.names, chosen.unbind(), strict=True))

    @override
    def finish_step(self, keep: bool) -> None:
        """End a step: adopt the new factors, or forget them.

        Raises:
            InputError: a loaded state holds parameters that are in no group of the first step.
        """
        over_before, self._over_before = self._over_before, None
        pending, self._pending = self._pending, {"left": {}, "right": {}}
        if over_before is None:
            return  # nothing was exchanged
        if not keep:
            self._over.load_state_dict(over_before)
            return
        self._check_names()
        for side in _OTHER:
            self._factors[side].update(pending[side])
        self._step += 1

    def _check_names(self) -> None:
        if self._names_known:
            return
        known = {name for plan in self._plans.values() for b in plan.batches for name in b.names}
        unknown = sorted({*self._factors["left"], *self._factors["right"]} - known)
        if unknown:
            raise InputError(
                f"the state holds factors of {', '.join(map(repr, unknown[:5]))}, which this model "
                "does not compress: it was saved with another model, rank or min_saving"
            )
        self._names_known = True

    @override
    def memory_bytes(self) -> int:
        return sum(f.nbytes for factors in self._factors.values() for f in factors.values())

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the factors by parameter name, and the collective's state."""
        left, right = (
            {name: factor.clone() for name, factor in self._factors[side].items()}
            for side in ("left", "right")
        )
        return {"step": self._step, "left": left, "right": right, "over": self._over.state_dict()}

    @override
    def check_state(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        _check_state(state, self)
        batches = [batch for group in groups for batch in self._plan(group).batches]
        for side in _OTHER:
            held: dict[str, torch.Tensor] = state[side]
            wanted = {name: (b.rank, b.lengths[side]) for b in batches for name in b.names}
            if held and (odd := sorted(set(held) ^ set(wanted))):
                raise InputError(
                    f"the {side} factors in this state and the matrices that are compressed here "
                    f"differ in {', '.join(map(repr, odd[:3]))}: it was saved with another model, "
                    "rank or min_saving, or is damaged"
                )
            for name, factor in held.items():
                if tuple(factor.shape) != wanted[name]:
                    raise InputError(_wrong_shape(side, name, factor, wanted[name]))
        copy(self._over).load_state_dict(state["over"])

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            InputError: the state belongs to another aggregator, or to other settings of this one.
        """
        _check_state(state, self)
        self._over.load_state_dict(state["over"])
        self._step = state["step"]
        self._factors = {
            side: {name: factor.clone() for name, factor in state[side].items()} for side in _OTHER
        }
        self._pending = {"left": {}, "right": {}}
        self._over_before = None
        self._names_known = False

    # -- cost

    @override
    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        """Return what one call costs ``rank``: two all-reduces, or one with ``alternate``.

        One too where nothing is compressed. The number for alternating is that of the next step:
        left and right factors differ in length. The workspace is with a residual.
        """
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        plan = self._plan(group)
        first: Side = "right" if self.alternate and self._step % 2 else "left"
        numels = [plan.numels[first] + plan.rest_numel]
        if plan.batches and not self.alternate:
            numels.append(plan.numels[_OTHER[first]])
        parts = [self._over.cost(numel, dtype, ranks, rank) for numel in numels]
        costs = [part for part in parts if part is not None]
        if len(costs) < len(parts):
            return None
        factors = sum(plan.numels.values())
        # Buffers and their roundings; start, fixed and own factors, what cancels, and all of these
        # side by side for one product (more than the fp64 copies, gone by then); copies of matrices
        # and of their residuals.
        elements = 2 * sum(numels) + plan.rest_numel + 6 * factors + 2 * plan.copied_numel
        return Cost(
            rounds=sum(c.rounds for c in costs),
            messages=sum(c.messages for c in costs),
            sent_bytes=sum(c.sent_bytes for c in costs),
            workspace_bytes=elements * dtype.itemsize + max(c.workspace_bytes for c in costs),
        )

    def _plan(self, group: Group) -> _Plan:
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = _Plan(group, self.rank, self.min_saving)
        return plan


@dataclass(frozen=True)
class _Exchange:
    """Factors of one side, orthonormal and equal on all ranks, and the sum of the other side's."""

    fixed: torch.Tensor
    side: Side
    """Of ``fixed``."""
    total: torch.Tensor
    rest: torch.Tensor
    """The sum of what is not compressed."""
    own: torch.Tensor | None
    """What of this rank is in ``total``; None without error feedback."""
    rest_lost: torch.Tensor | None
    """What this rank rounded away of ``rest``; None if nothing."""


class _Batch:
    """Matrices of one shape (m, n) and one layout, worked on as one tensor of shape (B, m, n).

    Their parts of the buffer lie at equal distances, as the layers of a network do, so that the
    tensor is a view of the buffer; where a tensor's layout has no matrix view, it is a copy.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], rank: int) -> None:
        self.shape, self.strides = shape, strides
        m, n = shape[0], math.prod(shape[1:])
        self.rank = min(rank, m, n)
        self.lengths: dict[Side, int] = {"left": m, "right": n}
        self.matrix_strides = _matrix_strides(shape, strides)
        self.names: list[str] = []
        self.starts: list[int] = []

    def takes(self, start: int) -> bool:
        """Say whether a tensor that begins at ``start`` continues the row of those here."""
        if self.matrix_strides is None or len(self.starts) < 2:
            return True
        return start - self.starts[-1] == self.starts[1] - self.starts[0]

    def matrices(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrices in a buffer, shape (B, m, n): a view or a copy."""
        shape = (len(self.names), self.lengths["left"], self.lengths["right"])
        if self.matrix_strides is None:
            # Into memory of our own: stacked channels_last tensors would be channels_last again.
            copy = flat.new_empty((len(self.names), *self.shape))
            return torch.stack(self._tensors(flat), out=copy).view(shape)
        step = self.starts[1] - self.starts[0] if len(self.starts) > 1 else 0
        offset = flat.storage_offset() + self.starts[0]
        return flat.as_strided(shape, (step, *self.matrix_strides), offset)

    def write(self, flat: torch.Tensor, matrices: torch.Tensor) -> None:
        """Write changed ``matrices`` back to the buffer where they are a copy."""
        if self.matrix_strides is None:
            torch._foreach_copy_(
                self._tensors(flat), list(matrices.view(len(self.names), *self.shape))
            )

    def _tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(self.shape, self.strides, flat.storage_offset() + start)
            for start in self.starts
        ]


class _Plan:
    """What is compressed of a group, in which batches, and where factors and the rest are packed.

    The factors of one side (left: of the rows, right: of the columns) are one buffer, batch after
    batch, shape (B, r, length) each.
    """

    def __init__(self, group: Group, rank: int, min_saving: float) -> None:
        self.batches: list[_Batch] = []
        self.rest: list[tuple[int, int]] = []
        """Where what is not compressed lies in the gradients, neighbours as one."""
        latest: dict[tuple[tuple[int, ...], tuple[int, ...]], _Batch] = {}
        layouts = zip(group.names, group.shapes, group.strides, group.bounds, strict=True)
        for name, shape, strides, (start, stop) in layouts:
            if not _is_compressed(shape, rank, min_saving):
                if self.rest and self.rest[-1][1] == start:
                    start = self.rest.pop()[0]
                self.rest.append((start, stop))
                continue
            batch = latest.get((shape, strides))
            if batch is None or not batch.takes(start):
                batch = latest[shape, strides] = _Batch(shape, strides, rank)
                self.batches.append(batch)
            batch.names.append(name)
            batch.starts.append(start)
        self.rest_numel = sum(stop - start for start, stop in self.rest)
        self.rank = max((batch.rank for batch in self.batches), default=0)
        self.count = sum(len(batch.names) for batch in self.batches)
        self.shapes: dict[Side, list[tuple[int, int, int]]] = {
            side: [(len(b.names), b.rank, b.lengths[side]) for b in self.batches] for side in _OTHER
        }
        self.sizes = {side: [math.prod(s) for s in shapes] for side, shapes in self.shapes.items()}
        self.numels = {side: sum(sizes) for side, sizes in self.sizes.items()}
        self.copied_numel = sum(
            math.prod((len(b.names), *b.shape)) for b in self.batches if b.matrix_strides is None
        )

    def factors(self, flat: torch.Tensor, side: Side) -> list[torch.Tensor]:
        """Return the factors in a buffer, by batch; views of shape (B, r, length)."""
        parts = flat.split(self.sizes[side])
        return [part.view(shape) for part, shape in zip(parts, self.shapes[side], strict=True)]

    def rest_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of the gradients that are not compressed."""
        return [flat[start:stop] for start, stop in self.rest]

    def packed_rest(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of :meth:`rest_of` in a buffer in which they lie side by side."""
        return list(packed.split([stop - start for start, stop in self.rest]))

    def multiply(
        self, matrices: list[torch.Tensor], fixed: torch.Tensor, side: Side, out: torch.Tensor
    ) -> None:
        """Write the other side's factors: M Q as Q^T M^T for ``side`` right, M^T P for left."""
        products = zip(
            matrices, self.factors(fixed, side), self.factors(out, _OTHER[side]), strict=True
        )
        for matrix, factor, product in products:
            torch.bmm(factor, matrix if side == "left" else matrix.mT, out=product)

    def _sides(
        self, exchange: _Exchange, exchanged: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return left and right factors by batch, P^T (B, r, m) and Q^T (B, r, n)."""
        fixed, other = exchange.fixed, exchanged
        left, right = (fixed, other) if exchange.side == "left" else (other, fixed)
        return self.factors(left, "left"), self.factors(right, "right")

    def replace(
        self, gradients: torch.Tensor, matrices: list[torch.Tensor], exchange: _Exchange
    ) -> None:
        """Replace the matrices of ``gradients`` by P Q^T."""
        sides = self._sides(exchange, exchange.total)
        for batch, matrix, p, q in zip(self.batches, matrices, *sides, strict=True):
            torch.bmm(p.mT, q, out=matrix)
            batch.write(gradients, matrix)

    def subtract(self, residual: torch.Tensor, first: _Exchange, last: _Exchange) -> None:
        """Subtract from ``residual`` what of this rank is in the output, or cancels in the sum."""
        assert first.own is not None
        assert last.own is not None
        lefts, rights = self._sides(last, last.own)
        if first is not last:
            # P Q_i^T + (I - P P^T) P_i Q^T is one product of 2 r directions.
            pairs = zip(lefts, rights, *self._sides(first, first.own), strict=True)
            lefts, rights = [], []
            for p, q, p_own, q_first in pairs:
                cancels = torch.baddbmm(p_own, p_own @ p.mT, p, alpha=-1)
                # A row of the sum that P left out as dependent is only nearly in its span.
                cancels *= p.abs().amax(dim=2, keepdim=True) > 0
                lefts.append(torch.cat([p, cancels], dim=1))
                rights.append(torch.cat([q, q_first], dim=1))
        for batch, p, q in zip(self.batches, lefts, rights, strict=True):
            matrix = batch.matrices(residual)
            matrix.baddbmm_(p.mT, q, alpha=-1)
            batch.write(residual, matrix)

    def orthonormal(self, flat: torch.Tensor, side: Side) -> torch.Tensor:
        """Return an orthonormal basis of the rows of each factor; zero for dependent rows.

        Gram-Schmidt in the order of the rows, in fp64 and by their inner products only: X -> L^-1 X
        with X X^T = L L^T, so that a few calls do all matrices at once. It leaves an error of 1e-16
        times the condition number squared, so where that is large it is done twice (Yamamoto et
        al., "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44, 2015). The scale does
        not matter: squares of the smallest and the largest fp32 are within the range of fp64 (in
        fp64 gradients, rows below 1e-150 count as zero).

        All ranks get the same bits from the same ``flat``: everything is computed in memory of its
        own, at the same alignment, on which some products depend.
        """
        if not self.batches:
            return flat
        wide = flat.to(torch.float64, copy=True)
        for _ in range(2):
            rows = self.factors(wide, side)
            gram = wide.new_zeros(self.count, self.rank, self.rank)
            for x, products in zip(rows, self._by_batch(gram), strict=True):
                torch.bmm(x, x.mT, out=products)
            inverse, good = _inverse_cholesky(gram)
            wide = torch.empty_like(wide)
            inverses, results = self._by_batch(inverse), self.factors(wide, side)
            for x, inverse, result in zip(rows, inverses, results, strict=True):
                torch.bmm(inverse, x, out=result)
            if good:
                break
        return wide.to(flat.dtype)

    def _by_batch(self, square: torch.Tensor) -> list[torch.Tensor]:
        """Cut (count, rank, rank) into views (B, r, r); ranks may be clamped."""
        parts = square.split([len(batch.names) for batch in self.batches])
        return [p[:, : b.rank, : b.rank] for p, b in zip(parts, self.batches, strict=True)]


def _inverse_cholesky(gram: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return L^-1 with gram = L L^T, shape (B, r, r), and whether all are well conditioned.

    Rows of dependent vectors are zero. A matrix that holds anything not finite becomes NaN.
    """
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    lower, failed = torch.linalg.cholesky_ex(gram)
    shares = _diagonal(lower).square() / _diagonal(gram)
    if ((shares > _GOOD).all() & (failed == 0).all()).item():
        return torch.linalg.solve_triangular(lower, identity, upper=False), True
    # The rare case, by Gauss-Jordan on [gram, I].
    gram = gram + gram * 0  # an infinity would else look like a large, good pivot
    least = _diagonal(gram) * _DEPENDENT
    work = torch.cat([gram, identity], dim=2)
    for j in range(gram.shape[1]):
        row = work[:, j]
        pivot = row[:, j]
        row *= torch.where(pivot <= least[:, j], 0.0, pivot.rsqrt()).unsqueeze(1)
        work[:, j + 1 :] -= row[:, j + 1 : gram.shape[1]].unsqueeze(2) * row.unsqueeze(1)
    return work[:, :, gram.shape[1] :], False


def _diagonal(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=1, dim2=2)


def _is_compressed(shape: tuple[int, ...], rank: int, min_saving: float) -> bool:
    if len(shape) < 2 or 0 in shape:
        return False
    m, n = shape[0], math.prod(shape[1:])
    return min(rank, m, n) * (m + n) * min_saving <= m * n


def _matrix_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the strides of the (shape[0], rest) view of a tensor; None if it has none."""
    try:
        matrix = torch.empty_strided(shape, strides, device="meta").view(shape[0], -1)
    except RuntimeError:
        return None
    return matrix.stride(0), matrix.stride(1)


def _check(gradients: torch.Tensor, group: Group, residual: torch.Tensor | None) -> None:
    """Refuse buffers that are not what :meth:`Aggregator.aggregate` asks for."""
    for what, tensor in (("gradients", gradients), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.shape != (group.numel,) or not tensor.is_contiguous():
            raise InputError(
                f"{what} of shape {tuple(tensor.shape)}: a contiguous buffer of shape "
                f"({group.numel},) is needed, as the group says"
            )
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.dtype != gradients.dtype:
            raise InputError(
                f"{what} of {tensor.dtype}: fp32 or fp64, the same for both, is needed"
            )


def _wrong_shape(side: Side, name: str, factor: torch.Tensor, shape: tuple[int, int]) -> str:
    return (
        f"the {side} factor of {name!r} in this state has shape {tuple(factor.shape)}, and {shape} "
        "is needed: it was saved with another model, rank or min_saving"
    )


def _check_state(state: dict[str, Any], settings: PowerSGD) -> None:
    """Refuse a state that is not from a PowerSGD with these settings."""
    if set(state) != {"step", "left", "right", "over"}:
        raise InputError(
            f"PowerSGD was given a state with {sorted(state)}, and needs 'step', 'left', 'right' "
            "and 'over': this checkpoint belongs to another method"
        )
    if not isinstance(state["step"], int) or state["step"] < 0:
        raise InputError(f"step={state['step']!r} in the state of PowerSGD: a count is needed")
    for side in _OTHER:
        for name, factor in state[side].items():
            usable = isinstance(factor, torch.Tensor) and factor.is_floating_point()
            if not usable or factor.dim() != 2 or not 1 <= factor.shape[0] <= settings.rank:
                got = tuple(factor.shape) if isinstance(factor, torch.Tensor) else factor
                raise InputError(
                    f"the {side} factor of {name!r} in this state is {got}: a real matrix of at "
                    f"most rank={settings.rank} rows is needed; was it saved with another rank?"
                )
            if not factor.isfinite().all():
                raise InputError(
                    f"the {side} factor of {name!r} in this state is not finite: take an older one"
                )
    # What is held after a step: nothing without warm start, else right factors, and left ones too
    # if the exchanges alternate.
    held = {side for side in _OTHER if state[side]}
    possible: set[Side] = {"left", "right"} if settings.alternate else {"right"}
    wrong = held - (possible if settings.warm_start else set())
    if wrong or (settings.alternate and held == {"right"}):
        raise InputError(
            f"this state of PowerSGD holds {' and '.join(sorted(held))} factors, which does not "
            f"fit alternate={settings.alternate}, warm_start={settings.warm_start}: load it with "
            "the settings that it was saved with"
        )
