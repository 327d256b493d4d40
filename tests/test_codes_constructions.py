from __future__ import annotations

import math
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest

from code_simulator import all_reduce, gaussian
from taciturn.collectives.codes import CODES, Code, decoding, design, rounding_of
from taciturn.collectives.codes import constructions as codes_module
from taciturn.collectives.codes.limits import MOST_PASSES
from taciturn.errors import CodeError

CHAIN_CODES = [name for name in CODES if name != "vandermonde"]
# One of every construction, well within float64.
SAMPLES: list[tuple[str, dict[str, object]]] = [
    ("vandermonde", {"ranks": 4, "components": 5, "eps": 0.1}),
    ("vandermonde", {"ranks": 5, "components": 7, "eps": 0.05, "nodes": "roots"}),
    ("vandermonde", {"ranks": 4, "components": 10, "eps": 0.1, "nodes": "roots"}),
    ("clustered", {"ranks": 8, "passes": 3, "eps": 0.05}),
    ("clustered", {"ranks": 5, "passes": 3, "eps": 0.05, "orthonormal": True}),
    ("polynomial", {"ranks": 8, "passes": 4, "eps": 0.05}),
    ("polynomial", {"ranks": 3, "passes": 4, "orthonormal": True}),
    ("optimized", {"ranks": 6, "passes": 3, "rounding": rounding_of("bf16")}),
    ("optimized", {"ranks": 8, "passes": 4}),
    ("fourier", {"ranks": 8, "passes": 8}),
    ("fourier", {"ranks": 7, "passes": 5, "stretch": 0.6}),
]
every_sample = pytest.mark.parametrize(
    ("name", "options"), SAMPLES, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in SAMPLES]
)


def slope(x: list[float], y: list[float]) -> float:
    """Of log y against log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@every_sample
def test_rounds_and_bytes_and_storage_follow_the_formulas(
    name: str, options: dict[str, object]
) -> None:
    """L = c + N - 2 rounds, L/c buffers sent, 1 + N/c stored, and each rank sends L messages."""
    code = design(name, **options)
    n, c = code.ranks, code.components
    assert code.rounds == c + n - 2
    assert code.sent_buffers == pytest.approx(1 + (n - 2) / c)
    assert code.storage_buffers == pytest.approx(1 + n / c)
    assert len(code.table) == code.rounds + 1
    assert all_reduce(code, gaussian(code, 1)).sent == code.rounds


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_each_complete_message_is_decoded_once(ranks: int, passes: int) -> None:
    """The receive rounds of all residues are the rounds N-1..L, each once, p for each residue."""
    code = design("fourier", ranks, passes)
    rounds = [code.receive_rounds(w) for w in range(ranks)]
    assert sorted(t for each in rounds for t in each) == list(range(ranks - 1, code.rounds + 1))
    for w, each in enumerate(rounds):
        assert len(each) == passes
        assert all(t % ranks == w for t in each)


@every_sample
def test_bias_is_what_the_protocol_leaves(name: str, options: dict[str, object]) -> None:
    """The expected replica error without rounding is that of the played protocol, to 5 %."""
    code = design(name, **options)
    seen = all_reduce(code, gaussian(code, 4000 // code.table.shape[1]))
    assert seen.replica_error == pytest.approx(code.expected(0).replica_error, rel=0.05)
    assert seen.spread == pytest.approx(code.expected(0).spread, rel=0.05)


@every_sample
def test_centred_decoding_is_exact_in_the_replica_mean(
    name: str, options: dict[str, object]
) -> None:
    """Law: errors cancel over ranks, to max(1e-12, 1e-15 x condition number) in float64."""
    code = design(name, **options)
    seen = all_reduce(code, gaussian(code, 100))
    assert seen.mean_error <= max(1e-12, 1e-15 * code.condition_number)
    if code.name != "vandermonde" or code.turns is not None:
        assert seen.spread > 1e-6  # which no rounding explains


@every_sample
@pytest.mark.parametrize("own", ["exact", "fresh"])
def test_what_all_ranks_share_is_decoded_exactly_on_each(
    name: str, options: dict[str, object], own: str
) -> None:
    """A buffer equal on all ranks comes back N times as large on every replica."""
    code = design(name, **options)
    same = np.broadcast_to(gaussian(code, 50)[:1], gaussian(code, 50).shape)
    seen = all_reduce(code, same, own=own)
    assert seen.replica_error <= max(1e-12, 1e-15 * code.condition_number)


@every_sample
def test_decoding_the_forwarded_messages_works_too(name: str, options: dict[str, object]) -> None:
    """own="fresh": decoded with the own term among the others, exact in the mean all the same."""
    code = design(name, **options)
    seen = all_reduce(code, gaussian(code, 4000 // code.table.shape[1]), own="fresh")
    assert seen.replica_error == pytest.approx(code.expected(0, "fresh").replica_error, rel=0.05)
    assert seen.mean_error <= max(1e-12, 1e-15 * code.condition_number)


def test_in_place_variant_as_stated() -> None:
    """N=8, p=2, eps 1e-2, storage 1 + N/c: 2.0e-3 per replica, rounding in the mean."""
    code = design("polynomial", 8, 2, eps=1e-2)
    assert code.storage_buffers == 1.5
    seen = all_reduce(code, gaussian(code, 2000), own="fresh")
    assert seen.replica_error == pytest.approx(2.0e-3, rel=0.03)
    assert seen.mean_error < 1e-13


@pytest.mark.parametrize("code", ["clustered", "polynomial"])
@pytest.mark.parametrize("passes", [2, 3, 4])
@pytest.mark.parametrize("ranks", [4, 8])
def test_error_and_condition_number_have_the_stated_slopes(
    code: str, passes: int, ranks: int
) -> None:
    """Error O(eps), condition number O(eps^-(p-1)): slopes within 0.1, the error's as played."""
    grid = [0.02, 0.01, 0.005]
    family = [design(code, ranks, passes, eps=eps) for eps in grid]
    played = [all_reduce(each, gaussian(each, 200)).replica_error for each in family]
    assert slope(grid, played) == pytest.approx(1, abs=0.1)
    assert slope(grid, [each.expected(0).replica_error for each in family]) == pytest.approx(
        1, abs=0.1
    )
    assert slope(grid, [each.condition_number for each in family]) == pytest.approx(
        1 - passes, abs=0.1
    )


@pytest.mark.parametrize(("ranks", "components"), [(4, 5), (4, 7), (4, 10), (3, 8), (5, 7), (6, 9)])
def test_nodes_at_roots_of_unity_reach_the_papers_exponent(ranks: int, components: int) -> None:
    """r* = ceil(c/N) - 1 also where N does not divide c: error slope 1, condition slope -r*."""
    grid = [0.02, 0.01, 0.005]
    family = [
        design("vandermonde", ranks, components=components, nodes="roots", eps=eps) for eps in grid
    ]
    star = math.ceil(components / ranks) - 1
    errors = [all_reduce(each, gaussian(each, 200)).replica_error for each in family]
    assert slope(grid, errors) == pytest.approx(1, abs=0.1)
    assert slope(grid, [each.condition_number for each in family]) == pytest.approx(-star, abs=0.1)


@pytest.mark.parametrize(("ranks", "passes"), [(3, 2), (4, 3), (5, 2)])
def test_nodes_at_roots_are_the_clustered_chains_when_n_divides_c(ranks: int, passes: int) -> None:
    """With c = pN the shared layout at the roots is the clustered code in another basis."""
    shared = design("vandermonde", ranks, components=passes * ranks, nodes="roots", eps=0.05)
    chains = design("clustered", ranks, passes, eps=0.05)
    assert shared.condition_number == pytest.approx(chains.condition_number, rel=1e-6)
    assert shared.expected(1e-3).replica_error == pytest.approx(
        chains.expected(1e-3).replica_error, rel=1e-6
    )


def test_vandermonde_error_vanishes_as_its_nodes_approach_one() -> None:
    """N=4, c=5: error 2e-3 and condition 9e11 at delta 0.01, and the error falls with delta."""
    code = design("vandermonde", 4, components=5, eps=0.01)
    assert code.expected(0).replica_error == pytest.approx(2e-3, rel=0.05)
    assert code.condition_number == pytest.approx(9e11, rel=0.05)
    assert all_reduce(code, gaussian(code, 500)).replica_error == pytest.approx(2e-3, rel=0.1)
    deltas = [0.3, 0.1, 0.03]
    family = [design("vandermonde", 4, components=5, eps=delta) for delta in deltas]
    assert slope(deltas, [each.expected(0).replica_error for each in family]) == pytest.approx(
        1, abs=0.1
    )
    assert slope(deltas, [each.condition_number for each in family]) == pytest.approx(-4, abs=0.2)


@pytest.mark.parametrize(
    ("passes", "eps", "error", "condition"),
    [
        (2, 1e-2, 2.3e-3, 2e2),
        (2, 1e-1, 2.3e-2, 2e1),
        (3, 1e-2, 1.9e-3, 9e4),
        (4, 1e-2, 1.7e-3, 4.5e7),
    ],
)
def test_clustered_code_has_the_published_figures(
    passes: int, eps: float, error: float, condition: float
) -> None:
    """N=8, to the digits given."""
    code = design("clustered", 8, passes, eps=eps)
    assert code.expected(0).replica_error == pytest.approx(error, rel=0.03)
    assert code.condition_number == pytest.approx(condition, rel=0.03)


@pytest.mark.parametrize(
    ("passes", "error", "saved"),
    [(2, 1.4e-4, 21), (3, 2.1e-3, 29), (4, 8.2e-3, 32), (8, 7.8e-2, 38)],
)
def test_polynomial_default_on_fp32_is_the_best_eps(passes: int, error: float, saved: int) -> None:
    """N=8, fp32: the default eps has the best simulated error, to 12 %, and saves these bytes."""
    code = design("polynomial", 8, passes)
    assert code.expected(rounding_of("fp32")).replica_error == pytest.approx(error, rel=0.12)
    assert round(100 * (1 - code.sent_buffers / 1.75)) == saved


@pytest.mark.parametrize(
    ("ranks", "passes", "sent", "condition", "spread", "bf16"),
    [
        (8, 2, 1.375, 1.0, 0.39, 5e-3),
        (8, 4, 1.188, 1.2, 0.46, 7e-3),
        (8, 8, 1.094, 1.3, 0.47, 1.0e-2),
        (8, 16, 1.047, 1.3, 0.48, 1.4e-2),
        (16, 16, 1.055, 1.4, 0.55, 1.9e-2),
    ],
)
def test_fourier_code_has_the_published_figures(
    ranks: int, passes: int, sent: float, condition: float, spread: float, bf16: float
) -> None:
    """Bytes, condition number, spread and the mean error on bf16, to the digits given."""
    code = design("fourier", ranks, passes)
    assert code.sent_buffers == pytest.approx(sent, abs=6e-4)
    assert code.condition_number == pytest.approx(condition, abs=0.05)
    assert code.expected(0).spread == pytest.approx(spread, abs=6e-3)
    assert code.expected(rounding_of("bf16")).mean_error == pytest.approx(bf16, rel=0.08)


def test_stretch_lowers_the_spread_at_the_cost_of_condition() -> None:
    """N=8, p=4, s=0.7: spread 0.30, condition 4.0."""
    code = design("fourier", 8, 4, stretch=0.7)
    assert code.expected(0).spread == pytest.approx(0.30, abs=5e-3)
    assert code.condition_number == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13, 16, 32])
def test_fourier_condition_number_stays_below_half_pi(ranks: int) -> None:
    """Law: for every p and N."""
    for passes in [*range(1, 20), 32, 64]:
        assert design("fourier", ranks, passes).condition_number <= math.pi / 2


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("decode", ["centred", "least_squares"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_one_pass_is_the_ring_bit_for_bit(code: str, decode: str, ranks: int) -> None:
    """P = 1: V and D are 1 exactly, so that sums of dyadic numbers are exact."""
    ring = design(code, ranks, 1, decode=decode)
    assert not ring.shared
    assert np.all(ring.table == 1)
    assert np.all(ring.decoders() == 1)
    gradients = np.random.default_rng(0).integers(-1000, 1000, (ranks, ranks, 1, 64)) / 8.0
    assert np.array_equal(
        all_reduce(ring, gradients).decoded,
        np.broadcast_to(gradients.sum(axis=0), gradients.shape),
    )


@pytest.mark.parametrize("code", CODES)
def test_a_single_rank_sends_nothing(code: str) -> None:
    """N = 1: no rounds, no bytes, the own buffer back."""
    alone = design(code, 1, 3)
    assert (alone.rounds, alone.sent_buffers) == (0, 0)
    assert alone.expected(0.1).replica_error == 0
    gradients = gaussian(alone, 5)
    assert np.array_equal(all_reduce(alone, gradients).decoded, gradients)


@pytest.mark.parametrize("code", CHAIN_CODES)
def test_two_ranks_are_exact(code: str) -> None:
    """N = 2: L = c, one buffer, and no bias for any code."""
    pair = design(code, 2, 3)
    assert pair.sent_buffers == 1
    assert all_reduce(pair, gaussian(pair, 50)).replica_error <= 1e-15 * max(
        1000, pair.condition_number
    )


def test_least_squares_is_closer_on_each_replica_and_biased_in_the_mean() -> None:
    """N=8, p=2, eps 1e-2: 4e-6 in the replica mean, where centred decoding leaves rounding."""
    closest = design("polynomial", 8, 2, eps=1e-2, decode="least_squares")
    centred = design("polynomial", 8, 2, eps=1e-2)
    expected = closest.expected(0)
    assert expected.mean_error == pytest.approx(4e-6, rel=0.15)
    assert expected.replica_error < centred.expected(0).replica_error
    seen = all_reduce(closest, gaussian(closest, 500))
    assert seen.mean_error == pytest.approx(expected.mean_error, rel=0.1)
    assert seen.replica_error == pytest.approx(expected.replica_error, rel=0.05)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("passes", [2, 3, 4, 8, 16])
def test_optimized_code_has_the_smallest_replica_error(wire: str, passes: int) -> None:
    """It is at least as good as any eps of the polynomials and any stretch of the Fourier code."""
    rounding = rounding_of(wire)

    def error(code: Code) -> float:
        return code.expected(rounding).replica_error

    best = error(design("optimized", 8, passes, rounding=rounding))
    assert best <= 1.005 * error(design("polynomial", 8, passes, rounding=rounding))
    for stretch in np.linspace(0.3, 1, 15):
        assert best <= error(design("fourier", 8, passes, stretch=float(stretch)))


@pytest.mark.parametrize(
    ("wire", "passes", "gain"),
    [("fp32", 4, 0.15), ("bf16", 3, 0.09), ("bf16", 4, 0.12), ("bf16", 8, 0.25), ("int8", 8, 0.35)],
)
def test_optimizing_pays_by_the_stated_share(wire: str, passes: int, gain: float) -> None:
    """Less replica error than the polynomial code at its best eps, N=8."""
    rounding = rounding_of(wire)
    best, plain = (
        design(code, 8, passes, rounding=rounding).expected(rounding).replica_error
        for code in ("optimized", "polynomial")
    )
    assert best <= (1 - gain) * plain


def test_optimized_code_keeps_to_its_condition_bound() -> None:
    """The bound holds, costs error, and an impossible one is refused."""
    rounding = rounding_of("bf16")
    free = design("optimized", 8, 4, rounding=rounding)
    bound = design("optimized", 8, 4, rounding=rounding, condition_bound=20)
    assert bound.condition_number <= 20 < free.condition_number
    assert bound.expected(rounding).replica_error > free.expected(rounding).replica_error
    with pytest.raises(CodeError, match="condition_bound"):
        design("optimized", 8, 4, condition_bound=1)


@every_sample
def test_every_rank_designs_the_same_code(name: str, options: dict[str, object]) -> None:
    """A second design from scratch has the same table, bit for bit, and the same fingerprint."""
    first = design(name, **options)
    codes_module._build.cache_clear()
    codes_module.search_shape.cache_clear()
    second = design(name, **options)
    assert second is not first
    assert np.array_equal(first.table, second.table)
    assert first.fingerprint == second.fingerprint


def test_fingerprints_tell_codes_apart() -> None:
    """Whatever parameter differs."""
    prints = {design(name, **options).fingerprint for name, options in SAMPLES}
    assert len(prints) == len(SAMPLES)
    assert design("fourier", 8, 4).fingerprint != design("fourier", 8, 4, stretch=0.9).fingerprint
    assert (
        design("polynomial", 8, 2, eps=0.1).fingerprint
        != design("polynomial", 8, 2, eps=0.1, decode="least_squares").fingerprint
    )


@every_sample
def test_codes_cannot_be_changed(name: str, options: dict[str, object]) -> None:
    """Designs are shared between callers: table and decoders are read-only."""
    code = design(name, **options)
    for array in (code.table, code.decoders(), code.decoders("fresh")):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_orthonormal_columns() -> None:
    """Orthonormal times sqrt(L + 1); with small eps, clustered nodes become polynomials."""
    for code in (
        design("polynomial", 8, 4, orthonormal=True),
        design("clustered", 8, 4, eps=0.05, orthonormal=True),
        design("fourier", 8, 4, stretch=0.8, orthonormal=True),
    ):
        gram = code.table.T @ code.table / len(code.table)
        assert np.allclose(gram, np.eye(4), atol=1e-12)
    near = design("clustered", 8, 4, eps=1e-3, orthonormal=True)
    limit = design("polynomial", 8, 4, orthonormal=True)
    assert np.allclose(near.table, limit.table, atol=5e-3)


def test_descriptions_name_what_was_chosen() -> None:
    assert design("fourier", 8, 8, stretch=0.7).describe() == "fourier, passes 8, stretch 0.7"
    assert design("polynomial", 8, 4, eps=0.05).describe() == "polynomial, passes 4, eps 0.05"
    assert "components 5" in design("vandermonde", 4, components=5).describe()
    assert "least_squares" in design("fourier", 8, 2, decode="least_squares").describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": "furier"}, "did you mean 'fourier'"),
        ({"code": "reed-solomon"}, "known are vandermonde, clustered"),
        ({"ranks": 0}, "ranks=0: give a whole number"),
        ({"ranks": True}, "ranks=True: give"),
        ({"passes": 0}, "passes=0: give"),
        ({"passes": -3}, "passes=-3: give"),
        ({"passes": 2.5}, "passes=2.5: give"),
        ({"code": "polynomial", "eps": 0.0}, "eps=0.0: give a finite number above 0"),
        ({"code": "polynomial", "eps": -1.0}, "eps=-1.0: give"),
        ({"code": "polynomial", "eps": math.nan}, "eps=nan: give"),
        ({"code": "polynomial", "eps": math.inf}, "eps=inf: give"),
        ({"code": "clustered", "eps": 8.0}, "eps 8.0 puts nodes"),
        ({"code": "vandermonde", "components": 9, "eps": 3.0}, "eps 3.0 puts nodes"),
        ({"stretch": 0.0}, "stretch=0.0: give"),
        ({"stretch": 1.5}, r"stretch=1.5: give a finite number above 0"),
        ({"stretch": math.nan}, "stretch=nan: give"),
        ({"code": "polynomial", "stretch": 0.5}, "stretch=0.5 has no meaning for 'polynomial'"),
        ({"eps": 0.1}, "eps=0.1 has no meaning for 'fourier'"),
        ({"code": "optimized", "eps": 0.1}, "eps=0.1 has no meaning for 'optimized'"),
        ({"components": 9}, "components=9 has no meaning for 'fourier'.*or use vandermonde"),
        ({"code": "vandermonde", "components": 5}, "components 5 for 8 ranks"),
        ({"code": "vandermonde", "components": 0}, "components=0: give"),
        ({"nodes": "roots"}, "nodes='roots' has no meaning for 'fourier'"),
        ({"code": "vandermonde", "nodes": "square"}, "nodes 'square' are unknown"),
        ({"code": "vandermonde", "orthonormal": True}, "orthonormal=True has no meaning"),
        ({"decode": "viterbi"}, "decode 'viterbi' is unknown"),
        ({"rounding": -1.0}, "rounding=-1.0: give"),
        ({"code": "optimized", "condition_bound": 0.5}, "condition_bound=0.5: give"),
    ],
)
def test_impossible_parameters_are_refused(arguments: dict[str, object], message: str) -> None:
    """What was wrong, the value received, what to do."""
    given = {"code": "fourier", "ranks": 8, "passes": 4, **arguments}
    with pytest.raises(CodeError, match=message):
        design(**given)


@pytest.mark.parametrize("passes", [40, 64])
@pytest.mark.parametrize("code", CODES)
def test_many_passes_are_designed_or_refused_at_once(
    code: str, passes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exact elimination, which would take minutes, is not begun, and LAPACK meets no infinity."""
    monkeypatch.setattr(decoding, "_scaled", lambda *_: pytest.fail("exact elimination"))
    with suppress(CodeError):
        assert design(code, 3, passes).expected(rounding_of("fp32")).replica_error > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("code", CODES)
def test_more_passes_than_pay_are_refused(code: str) -> None:
    """The bound is said with its reason."""
    with pytest.raises(CodeError, match=f"from 1 to {MOST_PASSES}; beyond 64 each doubling saves"):
        design(code, 8, MOST_PASSES + 1)


def test_polynomials_of_many_passes_are_orthonormal() -> None:
    """Where no eps gives a code that float64 decodes, the orthonormalised table still does."""
    code = design("polynomial", 8, 32)
    assert (code.orthonormal, code.eps) == (True, None)
    assert code.condition_number < 1e12


def test_one_and_one_point_nought_are_one_code() -> None:
    """Ranks that write a number in two ways have the same code, by its fingerprint."""
    for code, key in (("fourier", "stretch"), ("polynomial", "eps")):
        whole, real = (design(code, 8, 3, **{key: one}) for one in (1, 1.0))
        assert whole.fingerprint == real.fingerprint


def test_wrong_questions_to_a_code_are_refused() -> None:
    code = design("fourier", 8, 4)
    with pytest.raises(CodeError, match="residue 8"):
        code.receive_rounds(8)
    with pytest.raises(CodeError, match="own 'stale'"):
        code.decoders("stale")
    with pytest.raises(CodeError, match="rounding=nan"):
        code.expected(math.nan)


def test_the_table_of_codes_says_what_design_takes() -> None:
    """Each parameter that a construction lists is one that it accepts."""
    values = {"eps": 0.05, "stretch": 0.8, "orthonormal": True, "components": 12, "nodes": "roots",
              "condition_bound": 1e9}  # fmt: skip
    for name, spec in CODES.items():
        assert spec.name == name
        for parameter in spec.parameters:
            assert design(
                name, 4, 2 if parameter != "components" else 3, **{parameter: values[parameter]}
            )


def test_codes_are_numbers_not_tensors() -> None:
    """Importing the codes does not import torch."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from taciturn.collectives import codes\n"
        "print(codes.design('fourier', 8, 16).rounds)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "134\n", done.stderr
