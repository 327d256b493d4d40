"""Batches of a loader, of which one is known ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

__all__ = ["Batch", "Lookahead"]

Batch = TypeVar("Batch")


class Lookahead(Generic[Batch]):
    """An iterator that knows whether it has another item, by fetching it ahead."""

    def __init__(self, items: Iterable[Batch]) -> None:
        self._iterator = iter(items)
        self._held: list[Batch] = []

    @property
    def ready(self) -> bool:
        """There is another item."""
        if not self._held:
            for item in self._iterator:
                self._held.append(item)
                break
        return bool(self._held)

    def take(self) -> Batch:
        """Return the next item."""
        return self._held.pop()
