"""Parsed events as columns of numbers, which grow batch by batch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taciturn.trace.events import Label, Lane, Queue
from taciturn.trace.kinds import GPU_WORK, Kind, KindRule, classify

__all__ = ["Columns", "column", "nanoseconds", "whole"]

# Rows whose arguments are kept: what says which collective it is, and who waits for whom.
_WITH_ARGS = frozenset({Kind.COMMUNICATION, Kind.CALL, Kind.DEVICE_SYNC})
_ON_GPU = frozenset({*GPU_WORK, Kind.DEVICE_SYNC, Kind.GPU_ANNOTATION})
_CPU_CATEGORIES = frozenset({"user_annotation", "cpu_op", "Operator", "hpu_op"})


class Columns:
    """Grows column by column while batches of parsed events come in."""

    def __init__(self, rules: Sequence[KindRule]) -> None:
        self.rules = rules
        self.start_us = array("d")
        self.duration_us = array("d")
        self.label = array("i")
        self.lane = array("i")
        self.queue = array("i")
        self.correlation = array("q")
        self.external = array("q")
        self.labels: dict[tuple[Any, Any], int] = {}
        self.label_list: list[Label] = []
        self.lanes: dict[tuple[Any, Any], int] = {}
        self.lane_list: list[Lane] = []
        self.lane_names: dict[int, str] = {}
        self.queues: dict[tuple[Any, Any], int] = {}
        self.queue_list: list[Queue] = []
        self.args: dict[int, Mapping[str, Any]] = {}
        self.flow_number = array("q")
        self.flow_us = array("d")
        self.flow_lane = array("i")
        self.flow_starts = array("b")
        self.python_events = 0
        self.odd = 0

    def add(self, batch: Sequence[Any]) -> None:
        """Take the events of a batch that count; those without a usable time are counted as odd."""
        for event in batch:
            try:
                phase = event["ph"]
                if phase == "X":
                    if event.get("cat") == "python_function":
                        self.python_events += 1
                    else:
                        self._complete(event)
                elif phase in ("s", "f") and event.get("cat") == "fwdbwd":
                    self._flow(event)
                elif phase == "M" and event.get("name") == "thread_name":
                    lane = self._lane(event.get("pid"), event.get("tid"))
                    self.lane_names[lane] = str(event["args"]["name"])
            except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
                self.odd += 1

    def _complete(self, event: dict[str, Any]) -> None:
        start = event["ts"]
        duration = event.get("dur", 0.0)
        if type(start) is str or type(duration) is str:
            start, duration = float(start), float(duration)
        if not (abs(start) < 4e15 and abs(duration) < 4e15):  # also False for NaN
            raise ValueError
        category, name = event.get("cat"), event.get("name")
        label = self.labels.get((category, name))
        if label is None:
            label = self._new_label(category, name)
        args = event.get("args")
        if type(args) is not dict:
            args = {}
        kind = self.label_list[label].kind
        correlation, external = args.get("correlation", -1), args.get("External id", -1)
        if type(correlation) is not int:
            correlation = whole(correlation)
        if type(external) is not int:
            external = whole(external)
        lane = self._lane(event.get("pid"), event.get("tid"))
        queue = -1
        if kind in _ON_GPU and (self.label_list[label].category not in _CPU_CATEGORIES):
            queue = self._queue(args, event)
        if not (abs(correlation) < 2**62 and abs(external) < 2**62):
            raise ValueError
        if kind in _WITH_ARGS:
            self.args[len(self.start_us)] = args
        self.correlation.append(correlation)
        self.external.append(external)
        self.start_us.append(start)
        self.duration_us.append(duration)
        self.label.append(label)
        self.lane.append(lane)
        self.queue.append(queue)

    def _new_label(self, category: Any, name: Any) -> int:
        words = ("" if category is None else str(category), "" if name is None else str(name))
        label = self.labels[category, name] = len(self.label_list)
        self.label_list.append(Label(*words, classify(*words, self.rules)))
        return label

    def _lane(self, process: Any, thread: Any) -> int:
        lane = self.lanes.get((process, thread))
        if lane is None:
            lane = self.lanes[process, thread] = len(self.lane_list)
            self.lane_list.append(Lane(str(process), str(thread)))
        return lane

    def _queue(self, args: dict[str, Any], event: dict[str, Any]) -> int:
        """The stream from the arguments; where they lack it, a thread called "7" or "stream 7"."""
        device, stream = args.get("device", event.get("pid")), args.get("stream")
        if stream is None:
            stream = str(event.get("tid")).removeprefix("stream ")
        queue = self.queues.get((device, stream))
        if queue is None:
            queue = len(self.queue_list)
            written = Queue(str(device), str(stream))
            if written in self.queue_list:  # 7 and "7"
                queue = self.queue_list.index(written)
            else:
                self.queue_list.append(written)
            self.queues[device, stream] = queue
        return queue

    def _flow(self, event: dict[str, Any]) -> None:
        number, time = int(event["id"]), float(event["ts"])
        if not (abs(time) < 4e15 and abs(number) < 2**62):
            raise ValueError
        self.flow_number.append(number)
        self.flow_us.append(time)
        self.flow_lane.append(self._lane(event.get("pid"), event.get("tid")))
        self.flow_starts.append(event["ph"] == "s")


def whole(value: Any) -> int:
    """A number that joins events; -1 if it is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < 2**62 else -1


def nanoseconds(us: array[float]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Microseconds as whole nanoseconds; integer and fraction apart, so that none is lost."""
    values = np.frombuffer(us, np.float64) if us else np.empty(0)
    whole = np.floor(values)
    # ns = 1000 floor(us) + round(1000 (us - floor(us)))
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)


def column(values: array[Any], dtype: Any) -> np.ndarray[Any, Any]:
    """The memory of an array as numpy sees it; an empty one has none."""
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)
