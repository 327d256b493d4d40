"""What is compared with what: one TOML file, checked whole before anything runs.

::

    task = "text-1m"                    # digits, text-300k, text-1m, text-3m or module:callable
    ranks = 8
    regimes = ["50mbit", "1gbit", "unshaped"]
    steps = 400
    seeds = 5

    [[methods]]
    method = "powersgd:rank={rank}"
    space = {rank = [1, 2, 4]}          # its own knobs, inside the same number of trials

Everything else has a default; :class:`Experiment` lists all.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from taciturn.compare.methods import AUTO, BASELINE, comparable
from taciturn.errors import CodeError, InputError, TaciturnError
from taciturn.ranges import check_number, check_whole
from taciturn.units import parse_rate

__all__ = ["CLUSTER", "LOOPBACK", "Contender", "Experiment", "Mode", "read_experiment"]

Mode = Literal["composed", "direct"]

LOOPBACK = "loopback"
"""The network of runs whose losses are composed with other networks' step times."""
CLUSTER = "cluster"
"""The network between ranks that torchrun has started, as a regime."""

FEWEST_SEEDS, MOST_SEEDS = 1, 100
TUNING_SEED, TARGET_SEED = 1_000_000, 2_000_000
"""First seeds of tuning and of fixing the target: what is reported has others."""

Space = Mapping[str, Sequence[int | float | str]]


@dataclass(frozen=True)
class Contender:
    """A method with the knobs that are tuned.

    Attributes:
        method: in the grammar; ``{name}`` stands for a knob.
        space: values of each knob.

    Raises:
        InputError, MethodError: no such method, or knobs that do not fit it.
    """

    method: str
    space: Space = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise InputError(f"method={self.method!r}: give text, as for --methods")
        if not isinstance(self.space, Mapping):
            raise InputError(f"space={self.space!r} of {self.method!r}: give {{knob = [values]}}")
        for knob, values in self.space.items():
            if not isinstance(values, list | tuple) or not values:
                raise InputError(f"space of {self.method!r}: {knob} needs a list of values")
        wanted = set(re.findall(r"\{(\w+)\}", self.method))
        if wanted != set(self.space):
            raise InputError(
                f"method {self.method!r} has the knobs {sorted(wanted) or 'none'}, and its space "
                f"{sorted(self.space) or 'none'}"
            )
        for text in self.variants():
            try:
                comparable(text)
            except CodeError as error:  # which knows numbers, and no method
                raise CodeError(f"{self.method!r}: {error}") from error

    def variants(self) -> list[str]:
        """The method with all combinations of its knobs."""
        names = list(self.space)
        combinations = itertools.product(*self.space.values())
        return [self.filled(dict(zip(names, some, strict=True))) for some in combinations]

    def filled(self, knobs: Mapping[str, Any]) -> str:
        """The method with these values of its knobs."""
        text = self.method
        for name, value in knobs.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    @property
    def shown(self) -> str:
        """The method with all values of its knobs: ``powersgd:rank=2|4``."""
        return self.filled({k: "|".join(map(str, values)) for k, values in self.space.items()})

    @property
    def is_baseline(self) -> bool:
        """It is DistributedDataParallel itself."""
        return self.method.split(":")[0].strip() == BASELINE

    @property
    def is_auto(self) -> bool:
        """It stands for what a plan recommends, per regime."""
        return self.method.split(":")[0].strip() == AUTO


_BUCKETS = {"bucket": ["1MiB", "25MiB"]}


def _baselines() -> tuple[Contender, ...]:
    return tuple(
        Contender(f"ddp:wire={wire},bucket={{bucket}}", _BUCKETS) for wire in ("fp32", "bf16")
    )


@dataclass(frozen=True)
class Experiment:
    """All that is decided before the first number.

    Attributes:
        task: what is trained: a bundled task, or ``module:callable``.
        methods: what is held against the baselines.
        regimes: rates of every link, both ways, as ``50mbit`` or ``unshaped``; or only ``cluster``,
            the network between ranks that torchrun has started.
        ranks: how many are started.
        steps: global batches of a run.
        evaluations: how often a run is judged, evenly over its steps.
        seeds: fresh paired runs of every method.
        first_seed: the first of them; one that an earlier look at the task did not use.
        mode: ``composed``: losses once per method and seed, step times per regime; ``direct``:
            every regime in full.
        baselines: DistributedDataParallel, as it is tuned.
        baseline_trials: its tuning budget, at least that of the others.
        trials: tuning budget of each method.
        learning_rates: least and greatest of the search, on a logarithmic scale.
        target_seeds: runs of the tuned baseline that fix the target.
        target_slack: the target is the median of their best values, more by this share; a looser
            one is three times that, a stricter one none.
        margin: of quality: a method's final value may be worse by this share.
        probe_s: seconds of a probe of each regime, before and after.
        time_s: seconds in which each method's steps are timed, per seed and regime.
        timeout_s: a rank that is silent for longer counts as lost.

    Raises:
        InputError, MethodError: what cannot be.
    """

    task: str
    methods: tuple[Contender, ...]
    regimes: tuple[str, ...]
    ranks: int = 4
    steps: int = 200
    evaluations: int = 20
    seeds: int = 5
    first_seed: int = 0
    mode: Mode = "composed"
    baselines: tuple[Contender, ...] = field(default_factory=_baselines)
    baseline_trials: int = 8
    trials: int = 4
    learning_rates: tuple[float, float] = (3e-4, 1e-2)
    target_seeds: int = 3
    target_slack: float = 0.02
    margin: float = 0.02
    probe_s: float = 20.0
    time_s: float = 3.0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not isinstance(self.task, str) or not self.task.strip():
            raise InputError(f"task={self.task!r}: name a bundled one, or module:callable")
        check_whole("ranks", self.ranks, 2, 1024, hint="one rank has nobody to average with")
        check_whole("steps", self.steps, 10, 10_000_000)
        check_whole("evaluations", self.evaluations, 3, self.steps)
        check_whole("seeds", self.seeds, FEWEST_SEEDS, MOST_SEEDS)
        check_whole("first_seed", self.first_seed, 0, TUNING_SEED - MOST_SEEDS)
        check_whole("trials", self.trials, 1, 10_000, hint="a method that is not tuned is no rival")
        check_whole(
            "baseline_trials",
            self.baseline_trials,
            self.trials,
            10_000,
            hint="the baseline is tuned as well as the methods, or better",
        )
        check_whole("target_seeds", self.target_seeds, 1, MOST_SEEDS)
        for name, most in (("target_slack", 1.0), ("margin", 1.0)):
            check_number(name, getattr(self, name), 0, most)
        for name in ("probe_s", "time_s", "timeout_s"):
            check_number(name, getattr(self, name), 0, 86_400, above=True)
        if self.mode not in get_args(Mode):
            raise InputError(f"mode={self.mode!r}: choose {' or '.join(get_args(Mode))}")
        self._check_rates()
        self._check_methods()
        self._check_regimes()

    def _check_rates(self) -> None:
        for rate in self.learning_rates:
            check_number("learning_rates", rate, 0, above=True)
        if len(self.learning_rates) != 2 or self.learning_rates[0] > self.learning_rates[1]:
            raise InputError(f"learning_rates={list(self.learning_rates)}: give two, least first")

    def _check_methods(self) -> None:
        if not self.methods:
            raise InputError("no methods: there is nothing to compare with the baseline")
        if not self.baselines:
            raise InputError("no baselines: a speed-up is against tuned DistributedDataParallel")
        for one in self.baselines:
            if not one.is_baseline:
                raise InputError(
                    f"baseline {one.method!r}: baselines are {BASELINE}:wire=fp32 and the like"
                )
        texts = [one.method for one in (*self.baselines, *self.methods)]
        twice = {text for text in texts if texts.count(text) > 1}
        if twice:
            raise InputError(f"method {min(twice)!r} is there twice; once is enough")
        for one in self.methods:
            period = max(comparable(text).period for text in one.variants())
            if period > self.steps:
                raise InputError(
                    f"method {one.method!r} has rounds of {period} steps, and a run {self.steps}"
                )

    def _check_regimes(self) -> None:
        if not self.regimes:
            raise InputError("no regimes: give rates of the links, as 50mbit, 1gbit or unshaped")
        if self.on_cluster:
            if len(self.regimes) > 1:
                raise InputError(
                    f"regimes={list(self.regimes)}: {CLUSTER!r} is the network that torchrun's "
                    "ranks are on, and stands alone"
                )
            return
        rates = [parse_rate(regime) for regime in self.regimes]
        if len(set(rates)) < len(rates):
            raise InputError(f"regimes={list(self.regimes)}: one of them is there twice")

    @property
    def on_cluster(self) -> bool:
        """Its ranks are those of torchrun."""
        return CLUSTER in self.regimes

    @property
    def home(self) -> str:
        """The network of all runs that are not of a regime's own."""
        return CLUSTER if self.on_cluster else LOOPBACK

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Baselines and methods."""
        return (*self.baselines, *self.methods)

    def evaluate_at(self) -> tuple[int, ...]:
        """Steps after which a run is judged; the last one is among them."""
        n = self.evaluations
        return tuple(sorted({round(self.steps * k / n) for k in range(1, n + 1)}))

    def run_seeds(self) -> tuple[int, ...]:
        """Seeds that are reported."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

    def settings(self) -> dict[str, Any]:
        """All that must not change within one folder of records: everything but the seeds."""
        plain = asdict(self)
        del plain["seeds"]
        return plain

    def to_toml(self) -> str:
        """The file that :func:`read_experiment` reads. Law: what it reads is equal to this."""
        lines, tables = [], []
        for key, value in asdict(self).items():
            if key not in _TABLES:
                lines.append(f"{key} = {_toml(value)}")
                continue
            for one in value:
                tables += ["", f"[[{key}]]", f"method = {_toml(one['method'])}"]
                if one["space"]:
                    knobs = ", ".join(f"{k} = {_toml(v)}" for k, v in one["space"].items())
                    tables.append(f"space = {{{knobs}}}")
        return "\n".join([*lines, *tables, ""])


def _toml(value: object) -> str:
    """Return text, a number, or a list of them: JSON writes these as TOML does."""
    return json.dumps(value)


_TABLES = {"methods": Contender, "baselines": Contender}


def read_experiment(path: Path) -> Experiment:
    """The experiment in a TOML file.

    Raises:
        InputError, MethodError: what cannot be; the message names the line and the nearest key.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no TOML: {error}") from error
    known = {f.name: f for f in fields(Experiment)}
    for key in values:
        if key not in known:
            raise InputError(f"{path}, line {_line(text, key)}: {_unknown(key, list(known))}")
    required = [
        n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING
    ]
    for name in required:
        if name not in values:
            raise InputError(f"{path}: {name!r} is missing; {', '.join(required)} are needed")
    try:
        for key in _TABLES:
            if key in values:
                values[key] = tuple(_contender(one) for one in _listed(key, values[key]))
        for key in ("regimes", "learning_rates"):
            if key in values:
                values[key] = tuple(_listed(key, values[key]))
        return Experiment(**values)
    except TaciturnError as error:
        raise InputError(f"{path}{_place(text, str(error), list(values))}: {error}") from error


def _listed(key: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{key}={value!r}: give a list")
    return value


def _contender(value: object) -> Contender:
    if isinstance(value, str):
        return Contender(value)
    if not isinstance(value, dict):
        raise InputError(f"methods: {value!r} is neither text nor a table with a method in it")
    for key in value:
        if key not in ("method", "space"):
            raise InputError(f"methods: {_unknown(key, ['method', 'space'])}")
    if "method" not in value:
        raise InputError(f"methods: {value!r} has no method in it")
    return Contender(**value)


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _line(text: str, key: str) -> int:
    """Return the number of the line in which a key is set, as well as can be told; 1 if nowhere."""
    pattern = re.compile(rf"""^\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*(=|\]|\.)""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return 1


def _place(text: str, message: str, keys: list[str]) -> str:
    """Return the line that an error is about, if its message begins with a key or quotes a line."""
    for key in keys:
        if message.startswith((f"{key}=", f"{key}:")):
            return f", line {_line(text, key)}"
    for quoted in re.findall(r"'([^']+)'", message):
        for number, line in enumerate(text.splitlines(), 1):
            if quoted in line:
                return f", line {number}"
    return ""
