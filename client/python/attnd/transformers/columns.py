# SPDX-License-Identifier: Apache-2.0
"""Which columns of a padded batch hold tokens.

Transformers pads the rows of a batch to equal length: its caches and masks count columns. attnd
keeps only the tokens, so a row's position on the server is the number of its tokens in the columns
before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Flags = npt.NDArray[np.bool_]


class Step:
    """The new columns of one forward pass.

    Attributes:
        present: [rows, new columns] whether a column holds a token.
        positions: of each row, its tokens before the new columns.
        full: whether every new column holds a token.
        empty: whether none does.
    """

    def __init__(self, seen: Flags, new: int) -> None:
        """seen: [rows, columns] of all columns, the new ones last."""
        self.present = seen[:, seen.shape[1] - new :]
        self.positions = seen[:, : seen.shape[1] - new].sum(1).tolist()
        self.full = bool(self.present.all())  # once, as each layer asks several times
        self.empty = not self.present.any()
        self._seen = seen
        self._mask: torch.Tensor | None = None
        self._places: torch.Tensor | None = None

    def tokens(self) -> list[int]:
        """Of each row, its new tokens."""
        counts: list[int] = self.present.sum(1).tolist()
        return counts

    def places(self, device: torch.device) -> torch.Tensor:
        """[tokens] of each new token its column among the new ones of all rows, row by row. Once
        there it waits for the device no more, as a mask of flags would in each layer."""
        if self._places is None or self._places.device != device:
            self._places = torch.from_numpy(np.flatnonzero(self.present)).to(device)
        return self._places

    def local_mask(self, device: torch.device) -> torch.Tensor | None:
        """[rows, 1, new columns, columns]: whether a query sees a key; None if the queries are all
        columns, without padding: then causal order says it all."""
        new, columns = self.present.shape[1], self._seen.shape[1]
        if new == columns and self._seen.all():
            return None
        if self._mask is None or self._mask.device != device:
            seen = torch.from_numpy(self._seen).to(device)
            column = torch.arange(columns, device=device)
            query = column[columns - new :, None]
            # A padding query sees itself: a row of a softmax must not be empty.
            self._mask = ((column <= query) & seen[:, None, None, :]) | (column == query)
        return self._mask


def flags_of(mask: torch.Tensor | None) -> Flags | None:
    """Where a mask of Transformers is not zero, in host memory; waits for its device."""
    return None if mask is None else mask.detach().cpu().numpy().astype(bool)


class Columns:
    """The columns of a cache. Not for threads."""

    def __init__(self) -> None:
        self._present: Flags = np.zeros((0, 0), bool)

    def __len__(self) -> int:
        return self._present.shape[1]

    @property
    def rows(self) -> int:
        return self._present.shape[0]

    def tokens(self) -> list[int]:
        """Of each row, its tokens."""
        counts: list[int] = self._present.sum(1).tolist()
        return counts

    def last(self, row: int, columns: int) -> Flags:
        """[columns] whether each of a row's last `columns` holds a token."""
        return self._present[row, len(self) - columns :]

    def begin(self, rows: int) -> None:
        """Starts over with a batch of that many rows and no columns."""
        self._present = np.zeros((rows, 0), bool)

    def append(self, rows: int, new: int, mask: Flags | None) -> Step:
        """Adds new columns.

        Args:
            rows: the batch's rows.
            new: how many columns.
            mask: [rows, columns before + new] whether a column holds a token; None: all do.

        Raises:
            ValueError: if the number of rows has changed, or the mask has another shape or hides
                other columns before than the masks that these came with.
        """
        if rows != self.rows:
            raise ValueError(f"the batch has {rows} rows, the cache holds {self.rows}")
        columns = len(self) + new
        if mask is None:
            seen = np.ones((rows, columns), bool)
        elif mask.shape != (rows, columns):
            raise ValueError(
                f"attention_mask has shape {mask.shape}, {(rows, columns)} is expected: "
                f"a column for each token in the cache and each new one"
            )
        else:
            seen = mask
        if not np.array_equal(seen[:, : len(self)], self._present):
            raise ValueError(
                "attention_mask hides other tokens of the cache than before; it must begin with "
                "the mask that the cache's tokens came with"
            )
        self._present = seen
        return Step(seen, new)

    def copy(self) -> Columns:
        """Columns of their own, with the same contents."""
        copied = Columns()
        copied._present = self._present  # never changed in place
        return copied

    def select(self, indices: Sequence[int]) -> None:
        """The rows become these ones of the old rows."""
        self._present = self._present[np.asarray(indices, int)]

    def crop(self, columns: int) -> None:
        """Only the first `columns` stay."""
        self._present = self._present[:, :columns]


def tokens_of(columns: torch.Tensor, step: Step) -> torch.Tensor:
    """[rows, heads, new, dim] -> [tokens, heads, dim], row by row, without columns of padding."""
    rows = columns.transpose(1, 2)
    tokens = rows.reshape(-1, *rows.shape[2:])
    return tokens if step.full else tokens.index_select(0, step.places(columns.device))


class Place:
    """Where the tokens of a step's columns go, in each layer of a pass."""

    def __init__(self, tokens: torch.Tensor, step: Step) -> None:
        """tokens: [tokens, heads, dim] in host memory."""
        self._tokens = tokens
        self._step = step
        self._columns: torch.Tensor | None = None  # the same memory, where no column is padding
        if step.full:
            rows = tokens.view(*step.present.shape, *tokens.shape[1:])
            self._columns = rows.transpose(1, 2)

    def write(self, columns: torch.Tensor) -> None:
        """What tokens_of() returns of such columns, which have the tokens' dtype; copied once, but
        for padded ones. Waits for their device."""
        if self._columns is None:
            self._tokens.copy_(tokens_of(columns.detach(), self._step))
        else:
            self._columns.copy_(columns.detach())


def columns_of(tokens: torch.Tensor, step: Step) -> torch.Tensor:
    """[tokens, heads, dim] -> [rows, new, heads, dim], zeros where there is no token."""
    if step.full:
        return tokens.reshape(*step.present.shape, *tokens.shape[1:])
    out = tokens.new_zeros((step.present.size, *tokens.shape[1:]))
    out.index_copy_(0, step.places(tokens.device), tokens)
    return out.view(*step.present.shape, *tokens.shape[1:])
