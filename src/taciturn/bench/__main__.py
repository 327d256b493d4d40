"""What :func:`taciturn.bench.bench` starts on each rank: ``python -m taciturn.bench FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from taciturn.bench.run import run_rank

sys.exit(run_rank(Path(sys.argv[1])))
