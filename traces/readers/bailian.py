"""Qwen-Bailian JSONL: seconds, 16-token prefix blocks, sessions by parent chat ids."""

from __future__ import annotations

from array import array

import numpy as np
import pyarrow as pa

from traces.errors import InputError
from traces.readers.base import INT32_MAX, Chunk, Floats, Ints
from traces.readers.jsonl import JsonLinesReader, Row

ROOT = -1


class Reader(JsonLinesReader):
    """Rows of `chat_id`, `parent_chat_id` (-1: a root), `timestamp`, lengths, `type`, `turn` and `hash_ids`.

    A row is one request with its own input: a child may be shorter than its parent. A parent that the file does
    not have makes its child a root of its own session and is counted as an orphan. Memory besides the batch: one
    dictionary entry a row.
    """

    name = "bailian"
    unit_ns = 1_000_000_000
    block = 16
    fields = ("chat_id", "parent_chat_id", "input_length", "output_length")

    def links(self, chunk: Chunk, rows: list[Row], ids: Ints) -> dict[str, pa.Array | Ints | Floats]:
        """Session, turn, parent and kind; a parent that comes later in the file is left to `finish`."""
        if ids[0] == 0:
            self._row_of: dict[int, int] = {}  # chat id -> request id
            self._session = array("q")  # request id -> request id of the session's first turn
            self._waiting: list[tuple[int, int]] = []  # request id, chat id of a parent not met yet
        parent = np.array([self._link(chunk, i, row, int(ids[i])) for i, row in enumerate(rows)], dtype=np.int64)
        return {
            "session": np.frombuffer(self._session, dtype=np.int64)[ids[0] :].copy(),
            "turn": self._turns(chunk, rows),
            "parent_id": pa.array(parent, mask=parent < 0),
            "kind": self._kinds(chunk, rows),
        }

    def finish(self) -> None:
        """Resolve parents that follow their children; the others are orphans."""
        for child, chat in self._waiting:
            parent = self._row_of.get(chat)
            if parent is None:
                self.counts.orphans += 1
            else:
                self.late_parents.append((child, parent))

    def _link(self, chunk: Chunk, index: int, row: Row, request: int) -> int:
        """Request id of the parent, or -1."""
        chat, parent_chat = row["chat_id"], row["parent_chat_id"]
        if chat in self._row_of or chat == parent_chat:
            fault = "its own parent" if chat == parent_chat else "used before, a chat id names one request"
            raise InputError(f"{self.path}:{chunk.line_of(index)}: chat_id {chat} is {fault}; fix the row")
        self._row_of[chat] = request
        parent = ROOT if parent_chat == ROOT else self._row_of.get(parent_chat, ROOT)
        if parent == ROOT and parent_chat != ROOT:
            self._waiting.append((request, parent_chat))
        self._session.append(request if parent == ROOT else self._session[parent])
        return parent

    def _turns(self, chunk: Chunk, rows: list[Row]) -> Ints:
        turns = [row.get("turn", 1) for row in rows]
        for i, turn in enumerate(turns):
            if type(turn) is not int or not 0 <= turn <= INT32_MAX:
                raise InputError(f"{self.path}:{chunk.line_of(i)}: turn is {turn!r}, expected an integer; fix the row")
        return np.array(turns, dtype=np.int64)

    def _kinds(self, chunk: Chunk, rows: list[Row]) -> pa.Array:
        kinds = [row.get("type") for row in rows]
        for i, kind in enumerate(kinds):
            if kind is not None and type(kind) is not str:
                raise InputError(f"{self.path}:{chunk.line_of(i)}: type is {kind!r}, expected text; fix the row")
        return pa.array(kinds, pa.string())
