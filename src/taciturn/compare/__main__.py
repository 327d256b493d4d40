"""``python -m taciturn.compare FOLDER``: be one of the ranks that a comparison has started."""

from __future__ import annotations

import sys
from pathlib import Path

from taciturn.compare.sessions import run_rank
from taciturn.ending import end_rank

end_rank(run_rank(Path(sys.argv[1])))
