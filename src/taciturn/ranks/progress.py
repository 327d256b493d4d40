"""How far a run is: what is still expected, and how it is shown."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from taciturn.units import format_seconds

__all__ = ["Clock", "Eta", "Progress", "show_progress", "tell"]

LINE_EVERY_S = 15.0  # between lines of progress where there is no terminal


class Progress(NamedTuple):
    """How far a run is: a fraction from 0 to 1, seconds still expected, and what is under way."""

    fraction: float
    remaining_s: float
    label: str


class Eta:
    """Seconds still to go in a list of steps.

    A step with a key seen before is expected to take the mean of those; another takes its prior
    guess times how wrong the guesses of its kind (the key up to ``:``) have been so far.
    """

    def __init__(self, steps: Sequence[tuple[str, float]]) -> None:
        self.steps = list(steps)
        self.done = 0
        self.elapsed_s = 0.0
        self._seen: dict[str, list[float]] = {}

    def advance(self, seconds: float) -> None:
        """The next step is done and took ``seconds``."""
        key, _ = self.steps[self.done]
        self._seen.setdefault(key, []).append(seconds)
        self.elapsed_s += seconds
        self.done += 1

    def _scale(self, kind: str) -> float:
        done = [(key, guess) for key, guess in self.steps[: self.done] if key.split(":")[0] == kind]
        guessed = sum(guess for _, guess in done)
        took = sum(sum(s) for key, s in self._seen.items() if key.split(":")[0] == kind)
        return took / guessed if guessed else 1.0

    @property
    def remaining_s(self) -> float:
        """Expected seconds of all steps that are not done."""
        scales = {kind: self._scale(kind) for kind in {key.split(":")[0] for key, _ in self.steps}}
        return sum(
            statistics.fmean(self._seen[key])
            if key in self._seen
            else guess * scales[key.split(":")[0]]
            for key, guess in self.steps[self.done :]
        )

    @property
    def fraction(self) -> float:
        """Share of the expected whole time that is over."""
        whole = self.elapsed_s + self.remaining_s
        return self.elapsed_s / whole if whole else 1.0


class Clock:
    """Times the steps of a run on this rank and tells who asked how far it is."""

    def __init__(self, eta: Eta, report: Callable[[Progress], None] | None) -> None:
        self.eta = eta
        self.report = report

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """One step of the list."""
        if self.report is not None:
            self.report(Progress(self.eta.fraction, self.eta.remaining_s, label))
        start = time.perf_counter()
        yield
        self.eta.advance(time.perf_counter() - start)


def tell(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def show_progress(console: Console, start: str) -> Iterator[Callable[[Progress], None]]:
    """A bar where there is a terminal, now and then a line where there is none."""
    if not console.is_terminal:
        last, told = time.monotonic(), ""

        def line(progress: Progress) -> None:
            nonlocal last, told
            if time.monotonic() - last >= LINE_EVERY_S and progress.label != told:
                last, told = time.monotonic(), progress.label
                left = format_seconds(round(progress.remaining_s) or 1)
                tell(
                    console,
                    f"{100 * progress.fraction:3.0f} %, about {left} left: {progress.label}",
                )

        yield line
        return
    columns = (
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(start, total=1.0, left="")

        def show(progress: Progress) -> None:
            left = f"about {format_seconds(round(progress.remaining_s) or 1)} left"
            bar.update(task, completed=progress.fraction, description=progress.label, left=left)

        yield show
