# SPDX-License-Identifier: Apache-2.0
"""How the new tokens of a batch divide into Decode messages, within the server's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Consecutive new tokens of one row.

    Attributes:
        row: number of the row in the batch.
        start: the first of them, counted from the row's first new token.
        tokens: how many, 1 or more.
    """

    row: int
    start: int
    tokens: int


def split(tokens_of_row: Sequence[int], max_tokens: int, max_rows: int) -> list[list[Piece]]:
    """The pieces of each message, in the order of rows and tokens; no row is in a message twice.

    Args:
        tokens_of_row: new tokens of each row; rows without any are in no message.
        max_tokens: most tokens of a message, 1 or more.
        max_rows: most rows of a message, 1 or more.
    """
    messages: list[list[Piece]] = []
    room = 0
    for row, tokens in enumerate(tokens_of_row):
        start = 0
        while start < tokens:
            if room == 0 or len(messages[-1]) == max_rows:
                messages.append([])
                room = max_tokens
            piece = Piece(row, start, min(room, tokens - start))
            messages[-1].append(piece)
            start += piece.tokens
            room -= piece.tokens
    return messages
