"""``python -m taciturn``, and ``torchrun ... -m taciturn``."""

from __future__ import annotations

from taciturn.cli import main

if __name__ == "__main__":
    main()
