"""Rows of whole documents, chosen so that little is left empty."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Literal

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.documents import TokenizedDocuments
from hyper_parallel.components.data.packing import PackedRows, Packing, cut_into_pieces, gather

Cost = Literal["total", "trained"]


class BestFitPacking(Packing):
    """Documents are not cut: each goes as a whole into a row that has room for it, and what is left is padded.

    Only a document of more than T tokens, which fits into no row, is cut, into rows of T and a rest. With the cost
    ``total`` the longest is placed first, each in the row with the least room that it fits into (best-fit decreasing;
    Ding et al., "Fewer Truncations Improve Language Modeling", 2024). With ``trained`` that number of rows is filled so
    that each trains about as many tokens: the document that trains most is placed first, each in the row that trains
    least so far and has room. Rows are made once; their order differs from epoch to epoch.
    """

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        seq_len: int,
        pad_id: int,
        seed: int | None,
        cost: Cost = "total",
    ) -> None:
        super().__init__(documents, seq_len=seq_len, pad_id=pad_id, seed=seed)
        self._pieces = cut_into_pieces(documents, seq_len)
        lengths = self._pieces.lengths
        rows = best_fit(lengths, seq_len)
        if cost == "trained":
            trained = _trained_labels(documents, self._pieces.starts, lengths)
            rows = balanced(lengths, trained, seq_len, rows=len(rows))
        self.rows_per_epoch = len(rows)
        self._members = np.array([piece for row in rows for piece in row], np.int64)
        self._offsets = np.cumsum([0, *map(len, rows)])

    @property
    def tokens_per_epoch(self) -> int:
        return int(self._pieces.lengths.sum())

    def _rows(self, epoch: int, rows_B: npt.NDArray[np.int64]) -> PackedRows:
        first_B, count_B = self._offsets[rows_B], self._offsets[rows_B + 1] - self._offsets[rows_B]
        columns_N = np.arange(max(count_B, default=0))
        exists_BN = columns_N < count_B[:, None]
        numbers_BN = np.where(exists_BN, self._members[np.where(exists_BN, first_B[:, None] + columns_N, 0)], -1)
        return gather(self._documents, self._pieces, numbers_BN, self._seq_len, self._pad_id)


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Numbers of the items in each row: the longest first, each into the row with the least room that it fits into."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room -> rows that have it
    rooms: list[int] = []  # the keys of `with_room`, ascending
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(item)
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return rows


def balanced(
    lengths: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], capacity: int, *, rows: int
) -> list[list[int]]:
    """Numbers of the items in each row: the dearest first, each into the row of least cost that has room for it.

    Begins with `rows` empty rows, and opens another where an item fits into none.
    """
    made: list[list[int]] = [[] for _ in range(rows)]
    heap = [(0, row, capacity) for row in range(rows)]  # (cost so far, row, room)
    for item in np.lexsort((-lengths, -costs)).tolist():
        length, too_full = int(lengths[item]), []
        while heap and heap[0][2] < length:
            too_full.append(heapq.heappop(heap))
        if heap:
            cost, row, room = heapq.heappop(heap)
        else:
            cost, row, room = 0, len(made), capacity
            made.append([])
        made[row].append(item)
        for entry in (*too_full, (cost + int(costs[item]), row, room - length)):
            if entry[2]:
                heapq.heappush(heap, entry)
    return [row for row in made if row]


def _trained_labels(
    documents: TokenizedDocuments, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    if documents.trained is None:
        return lengths
    return np.array(
        [
            np.count_nonzero(documents.trained[start + 1 : start + 1 + length])
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ],
        np.int64,
    )
