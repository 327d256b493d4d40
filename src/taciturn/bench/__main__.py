"""What :func:`taciturn.bench.bench` starts on each rank: ``python -m taciturn.bench FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from taciturn.bench.run import run_rank
from taciturn.ending import end_rank

end_rank(run_rank(Path(sys.argv[1])))
