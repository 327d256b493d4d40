"""What docs/measuring.md says about public recordings; its example by hand runs in the page."""

from __future__ import annotations

import pytest

from taciturn.trace.analysis import analyse
from trace_files import public


@pytest.mark.parametrize(
    ("name", "steps", "alone_s", "most_s"),
    [
        ("hta/ddp_resnet_nccl_rank0of2_fullmeta.json.gz", [4, 5], 10.1e-3, 0.0),
        ("hta/perparam_allreduce_nccl_rank1of2.json.gz", [2, 3, 4, 5], 59.5e-3, 20e-6),
    ],
)
def test_bound_by_launches(name: str, steps: list[int], alone_s: float, most_s: float) -> None:
    """Much is not overlapped, and not even the upper bound of what is exposed is anything."""
    report = analyse([public(name)]).report
    for step in [one for one in report.steps if one.step in steps]:
        assert step.not_overlapped_s > alone_s
        assert step.exposed_s == 0
        assert step.exposed_high_s <= most_s
        assert step.replay_error < 1e-4
        assert step.critical_path.launch_s > 0.97 * step.completed_s
    assert "bound by the CPU that issues the work" in report.diagnosis


def test_one_rank_cannot_decide() -> None:
    """The GPU runs behind: between nothing and some milliseconds are exposed."""
    report = analyse([public("tracelens/ddp_resnet_mi300_rank0of8.json.gz")]).report
    for step, most_s in zip(report.steps[1:], (4.5e-3, 2.7e-3), strict=True):
        assert step.exposed_low_s == 0
        assert step.exposed_high_s == pytest.approx(most_s, abs=0.05e-3)
