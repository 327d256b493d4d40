"""Bytes of a trace file, as batches of event objects: streaming, and past what is broken.

The text of ``traceEvents`` is cut between events into pieces of about a mebibyte, and each piece is
parsed alone. A piece that does not parse is repaired (control bytes, invalid UTF-8, ``nan``, bad
escapes), and where that does not help, taken apart event by event; what is lost is counted.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from taciturn.errors import InputError

__all__ = ["Scan"]

BLOCK_BYTES = 1 << 20  # small enough that the objects of a piece stay in the cache
MAX_HEAD_BYTES = 1 << 26  # no trace has so much before its events
MAX_EVENT_BYTES = 1 << 24  # an "event" longer than this is one whose end is broken

_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARRAY_END = re.compile(rb"\}\s*\](?=\s*[,}]|\s*\Z)")
# Where an event begins: an object that is not the value of a key.
_ANCHOR = re.compile(rb'(?:\A|[\[,}])\s*(\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id)"\s*:)')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_NAN = re.compile(rb"(?<=[:,\[])(\s*)[-+]?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:\\|u[0-9a-fA-F]{4}|["/bfnrt]|(.))', re.DOTALL)
_ZIP_HEADER = struct.Struct("<8sH16xHH")  # of a file: what follows are its name and more
_WRONG_SUM = "the text differs from its checksum: some of it may be wrong"
_BLANK_CONTROL = bytes(b if b >= 0x20 else 0x20 for b in range(256))


class Scan:
    """Reads one file once.

    Attributes:
        metadata: what stands beside the events; complete after the last batch.
        size_bytes: of the text read so far.
        bytes_lost: of it.
        events_lost: at least so many.
        repaired: pieces that were valid only after repair.
        reasons: what happened, as sentences.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.size_bytes = 0
        self.bytes_lost = 0
        self.events_lost = 0
        self.repaired = 0
        self.reasons: list[str] = []
        self._buffer = b""
        self._in_object = False  # the events are the value of a key, not the whole file

    def batches(self) -> Iterator[list[Any]]:
        """The events as parsed, some thousands at a time.

        Raises:
            InputError: the file cannot be opened, is empty, or is no trace.
        """
        try:
            blocks = self._blocks()
            self._find_events(blocks)
            more, closed = True, False
            while not closed:
                more = more and self._more(blocks)
                events, closed = self._take(final=not more)
                if events:
                    yield events
                if not more:
                    break
            while len(self._buffer) < MAX_HEAD_BYTES and self._more(blocks):
                pass
            self._end(closed)
        except OSError as error:
            raise InputError(
                f"cannot read {self.path}: {error.strerror or error}; name a trace file, or a "
                "folder of them"
            ) from error
        if self.repaired:
            self.reasons.append(
                f"{self.repaired} pieces of the text were not valid JSON and were repaired"
            )

    # -- bytes ---------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[bytes]:
        """The decompressed text. The file's first bytes decide how, not its name."""
        with self.path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic[:2] == b"\x1f\x8b":
                yield from self._inflate(file, wbits=31)  # gzip
            elif magic == b"PK\x03\x04":
                yield from self._unzip(file)
            else:
                while block := file.read(BLOCK_BYTES):
                    yield block

    def _unzip(self, file: io.BufferedReader) -> Iterator[bytes]:
        """The text of the only member; of a damaged archive, of the first."""
        try:
            with zipfile.ZipFile(file) as archive:
                members = [one for one in archive.infolist() if one.filename.endswith(".json")]
            if len(members) != 1:
                raise InputError(
                    f"{self.path} is a zip archive with {len(members)} JSON files; unpack it "
                    "and name one file"
                )
            at, nbytes, crc = members[0].header_offset, members[0].compress_size, members[0].CRC
        except zipfile.BadZipFile:
            self.reasons.append("the zip archive has no directory: its first file is read")
            at, nbytes, crc = 0, None, None
        file.seek(at)
        header = file.read(_ZIP_HEADER.size)
        if len(header) < _ZIP_HEADER.size or not header.startswith(b"PK\x03\x04"):
            self.reasons.append("the zip archive is damaged: a file's header is missing")
            return
        _, method, name_bytes, extra_bytes = _ZIP_HEADER.unpack(header)
        if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(
                f"{self.path} is a zip archive packed by method {method}, which is not read; "
                "unpack it"
            )
        file.seek(name_bytes + extra_bytes, io.SEEK_CUR)
        packed = _Part(file, nbytes)
        if method == zipfile.ZIP_DEFLATED:
            blocks = self._inflate(packed, wbits=-15)
        else:
            blocks = iter(lambda: packed.read(BLOCK_BYTES), b"")
        found, reasons = 0, len(self.reasons)
        for block in blocks:
            found = zlib.crc32(block, found)
            yield block
        if crc is not None and found != crc and len(self.reasons) == reasons:
            self.reasons.append(_WRONG_SUM)

    def _inflate(self, file: io.BufferedReader | _Part, wbits: int) -> Iterator[bytes]:
        """The text of a compressed stream, up to where it is damaged or ends."""
        stream = before = zlib.decompressobj(wbits)
        rest = b""
        try:
            while True:
                rest = rest or file.read(BLOCK_BYTES)
                if not rest:
                    break
                if stream.eof:  # another member, or what follows the stream
                    if wbits < 0 or not rest.startswith(b"\x1f\x8b"):
                        break
                    stream = zlib.decompressobj(wbits)
                before = stream.copy()
                # Bounded: a block of blanks may grow a thousandfold.
                text = stream.decompress(rest, BLOCK_BYTES)
                rest = stream.unused_data if stream.eof else stream.unconsumed_tail
                if text:
                    yield text
        except zlib.error as error:
            yield from _until_damage(before, rest)
            wrong = "incorrect data check" in str(error) or "incorrect length check" in str(error)
            self.reasons.append(
                _WRONG_SUM
                if wrong
                else f"the compressed data is damaged ({error}); what follows is lost"
            )
            return
        if not stream.eof:
            self.reasons.append("the compressed file is cut short; what follows is lost")

    def _more(self, blocks: Iterator[bytes]) -> bool:
        block = next(blocks, b"")
        self.size_bytes += len(block)
        self._buffer += block
        return bool(block)

    # -- before and after the events -----------------------------------------------------------

    def _find_events(self, blocks: Iterator[bytes]) -> None:
        """Leave the buffer at the first event, with the text before it parsed."""
        while self._more(blocks):
            text = self._buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text.startswith(b"["):
                self._buffer = text[1:]
                return
            if text and not text.startswith(b"{"):
                break
            if found := _KEY.search(text):
                self._in_object = True
                self.metadata = self._object(text[1 : found.start()].rstrip().rstrip(b","))
                self._buffer = text[found.end() :]
                return
            if len(text) > MAX_HEAD_BYTES:
                break
        if not self._buffer.strip():
            why = "; ".join(self.reasons) or "the file is empty"
            raise InputError(f"{self.path} holds no text: {why}; record the trace again")
        shown = self._buffer[:40].decode("utf-8", "replace")
        raise InputError(
            f"{self.path} is not a profiler trace: it has no list of traceEvents and begins with "
            f"{shown!r}; name a file that torch.profiler wrote"
        )

    def _object(self, inside: bytes) -> dict[str, Any]:
        """An object from the text between its braces; empty, and noted, if that is broken."""
        if not inside.strip():
            return {}
        for text in (inside, _repair(inside)):
            try:
                value: dict[str, Any] = orjson.loads(b"{" + text + b"}")
            except orjson.JSONDecodeError:
                continue
            return value
        self.bytes_lost += len(inside)
        self.reasons.append("the text beside the events is broken: what it says is not used")
        return {}

    def _end(self, closed: bool) -> None:
        """Take what follows the list of events, or say that the file ended inside it."""
        rest = self._buffer.strip()
        self._buffer = b""
        if not closed:
            lost = rest.strip(b", \t\r\n")
            self.bytes_lost += len(lost)
            self.events_lost += bool(lost)
            self.reasons.append(
                f"the file ends inside its list of events: {len(lost)} bytes of the last one are "
                "lost, and whatever followed"
                if lost
                else "the list of events has no closing bracket; what followed is lost"
            )
        elif not self._in_object:
            self.bytes_lost += len(rest)
            if rest:
                self.reasons.append(f"{len(rest)} bytes after the list of events were not read")
        elif rest.endswith(b"}"):
            self.metadata.update(self._object(rest[:-1].strip().strip(b",")))
        else:
            self.reasons.append("the file ends before its last brace")
            self.metadata.update(self._object(rest.strip(b", \t\r\n")))

    # -- events --------------------------------------------------------------------------------

    def _take(self, final: bool) -> tuple[list[Any], bool]:
        """Events from the front of the buffer, which loses them; was that the end of the list?"""
        text = self._buffer
        cuts: list[tuple[int, int]] = []
        if final:
            ends = [*_ARRAY_END.finditer(text)][-3:]
            cuts = [(end.start() + 1, end.end()) for end in reversed(ends)]
        elif boundary := _last_boundary(text):
            cuts = [boundary]
        elif len(text) < MAX_EVENT_BYTES and not _ARRAY_END.search(text):
            return [], False
        for cut, after in cuts:
            events = _parse(text[:cut])
            if events is not None:
                self._buffer = text[after:]
                return events, final
        found = _by_braces(text)
        if found is None:
            fixed = _repair(text)
            if fixed != text:
                self.repaired += 1
                text = fixed
                found = _by_braces(text)
        if found is None or (not (final or found.events) and len(text) >= MAX_EVENT_BYTES):
            return self._by_anchors(text, final)
        self._buffer = text[found.used :]
        return found.events, found.closed

    def _by_anchors(self, text: bytes, final: bool) -> tuple[list[Any], bool]:
        """Events of a broken text: each from where one seems to begin to where the next does."""
        starts = [found.start(1) for found in _ANCHOR.finditer(text)]
        self._lose(text[: starts[0]] if starts else text)
        events: list[Any] = []
        closed = False
        self._buffer = b""
        for start, end in pairwise([*starts, len(text)]):
            piece = text[start:end]
            parsed = _parse(piece.strip(b", \t\r\n"))
            if parsed is not None:
                events += parsed
                continue
            found = _by_braces(piece)
            if found is not None and found.events:
                events += found.events
                self._buffer = piece[found.used :]
                closed = found.closed
            elif end == len(text) and (final or len(piece) < MAX_EVENT_BYTES):
                self._buffer = piece  # perhaps only not yet complete
            else:
                self._lose(piece)
            if closed:
                self._buffer += text[end:]
                break
            if end < len(text):
                self._lose(self._buffer)
                self._buffer = b""
        return events, closed

    def _lose(self, piece: bytes) -> None:
        lost = piece.strip(b", \t\r\n")
        if lost:
            if not self.events_lost:
                shown = lost[:60].decode("utf-8", "replace")
                self.reasons.append(f"events that are no valid JSON were left out; first {shown!r}")
            self.bytes_lost += len(lost)
            self.events_lost += 1


class _Part:
    """The next bytes of a file, so many or all."""

    def __init__(self, file: io.BufferedReader, nbytes: int | None) -> None:
        self._file = file
        self._left = nbytes

    def read(self, nbytes: int) -> bytes:
        """Up to so many; empty at the end."""
        data = self._file.read(nbytes if self._left is None else min(nbytes, self._left))
        if self._left is not None:
            self._left -= len(data)
        return data


def _until_damage(stream: Any, packed: bytes) -> Iterator[bytes]:
    """What a stream makes of data in which an error is, up to that error; byte by byte."""
    text = bytearray()
    for place in range(len(packed)):
        try:
            text += stream.decompress(packed[place : place + 1])
        except zlib.error:
            break
        if len(text) >= BLOCK_BYTES:
            yield bytes(text)
            text.clear()
    if text:  # nothing would be the end of all
        yield bytes(text)


class _Found(NamedTuple):
    """Events at the front of a text, how many bytes they take, and whether the list ended."""

    events: list[Any]
    used: int
    closed: bool


def _parse(inside: bytes) -> list[Any] | None:
    """A list from the text between its brackets; None if that is not valid."""
    try:
        value: list[Any] = orjson.loads(b"[" + inside + b"]")
    except orjson.JSONDecodeError:
        return None
    return value


def _last_boundary(text: bytes) -> tuple[int, int] | None:
    """The end of the last event that another follows, and where that other begins.

    Also finds a boundary between objects inside an event: then the text before it does not parse.
    """
    position = len(text)
    while (position := text.rfind(b"{", 0, position)) > 0:
        before = text[max(0, position - 80) : position].rstrip()
        if before.endswith(b",") and before[:-1].rstrip().endswith(b"}"):
            return text.rfind(b"}", 0, position) + 1, position
    return None


def _by_braces(text: bytes) -> _Found | None:
    """The complete events at the front of a text; None if one of them is not valid."""
    events: list[Any] = []
    depth = begin = used = 0
    for token in _TOKEN.finditer(text):
        mark = text[token.start()]
        if mark in b"{[":
            if depth == 0:
                if mark == b"["[0]:
                    return None
                begin = token.start()
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth < 0:
                closed = mark == b"]"[0]
                return _Found(events, token.end(), True) if closed else None
            if depth == 0:
                parsed = _parse(text[begin : token.end()])
                if parsed is None:
                    return None
                events += parsed
                used = token.end()
        elif depth == 0:
            return None  # a string between events
    return _Found(events, used, False)


def _repair(text: bytes) -> bytes:
    """The same text with what JSON forbids replaced: controls, bad UTF-8, ``nan``, escapes."""
    text = text.translate(_BLANK_CONTROL).decode("utf-8", "replace").encode()
    text = _NAN.sub(rb"\1null", text)
    return _BAD_ESCAPE.sub(lambda found: b"\\\\" + found[1] if found[1] else found[0], text)
