"""``python -m taciturn.compare FOLDER``: be one of the ranks that a comparison has started."""

from __future__ import annotations

import sys
from pathlib import Path

from taciturn.compare.sessions import run_rank

sys.exit(run_rank(Path(sys.argv[1])))
