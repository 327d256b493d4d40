"""Training that talks less, and proof that it helped."""

from __future__ import annotations
