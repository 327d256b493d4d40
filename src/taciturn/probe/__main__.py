"""What :func:`taciturn.probe.probe` starts on each rank: ``python -m taciturn.probe FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from taciturn.probe.run import run_rank

sys.exit(run_rank(Path(sys.argv[1])))
