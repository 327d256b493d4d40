"""What :func:`taciturn.probe.probe` starts on each rank: ``python -m taciturn.probe FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from taciturn.ending import end_rank
from taciturn.probe.run import run_rank

end_rank(run_rank(Path(sys.argv[1])))
