"""The programs in examples/, run as their first lines say, or on ranks that start faster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
ENDING = re.compile(r"from step (\d+): parameters ([0-9a-f]{8})")


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example on two ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_ddp_minimal():
    """A plain loop with five lines more trains, and tells what a step cost."""
    done = torchrun(str(EXAMPLES / "ddp_minimal.py"))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert "StepMetrics(step=50" in done.stdout
    plain = (EXAMPLES / "ddp_minimal.py").read_text().count("# +")
    assert plain <= 5


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "new"), [("diloco", 4), ("accumulation", 7)])
def test_loops_with_fewer_exchanges(name, new, tmp_path):
    """A plain loop with a few lines more trains."""
    path = EXAMPLES / f"{name}_minimal.py"
    ended = run_script(path, [], tmp_path, ranks=2)
    assert [rank.status for rank in ended] == [0, 0], [rank.err for rank in ended]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", ended[0].out)]
    assert losses[-1] < 0.8 * losses[0]
    assert path.read_text().count("# +") <= new


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_killed_and_resumed(tmp_path):
    """Killed at step 12 and resumed with other buckets, a run ends as if nothing had happened."""
    ends = {}
    for name, first in (("whole", ()), ("killed", ("--die-at", "12"))):
        folder = tmp_path / name
        folder.mkdir()
        script = EXAMPLES / "ddp_resume.py"
        ended = run_script(script, [str(folder), *first], tmp_path, ranks=2)
        if first:
            assert {rank.status for rank in ended} == {-signal.SIGKILL}
            again = [str(folder), "--bucket-cap-mb", "0.01"]
            ended = run_script(script, again, tmp_path, ranks=2)
        assert [rank.status for rank in ended] == [0, 0], [rank.err for rank in ended]
        found = ENDING.search(ended[0].out)
        assert found is not None
        ends[name] = found.groups()
    assert ends["killed"][0] == "10"
    assert ends["whole"][0] == "0"
    assert ends["killed"][1] == ends["whole"][1]
