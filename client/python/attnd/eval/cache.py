# SPDX-License-Identifier: Apache-2.0
"""Arrays kept on disk between runs: prefilled KV and the local dense run take minutes, and never
change.

An entry is an .npz file named by a hash of all that it depends on. Files are written under another
name and renamed, so that a reader sees whole entries only and two runs may share a folder. The
least recently used entries are removed when the folder outgrows its bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Callable

import numpy as np

from attnd.tensors import Array

DEFAULT_MAX_BYTES = 4 << 30
# Part of every key: raise it when the model runner computes something else.
_VERSION = "1"


def default_folder() -> pathlib.Path:
    """attnd in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "attnd"


def cache_key(*parts: str | bytes | Array) -> str:
    """A hash of the parts in their order."""
    digest = hashlib.sha256(_VERSION.encode())
    for part in parts:
        raw = part.encode() if isinstance(part, str) else bytes(part)
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


class Cache:
    """A folder of entries, at most max_bytes together."""

    def __init__(self, folder: pathlib.Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def get(self, kind: str, key: str, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of an entry by name; made and kept if there are none."""
        path = self._folder / f"{kind}-{key}.npz"
        found = _read(path)
        if found is None:
            found = dict(make())
            self._write(path, found)
        return found

    def _write(self, path: pathlib.Path, arrays: Mapping[str, Array]) -> None:
        """Keeps an entry if the bound allows. A full disk only costs the entry."""
        size = sum(array.nbytes for array in arrays.values())
        if size > self._max_bytes:
            return
        temporary: str | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            with tempfile.NamedTemporaryFile(
                dir=self._folder, prefix=".new-", delete=False
            ) as file:
                temporary = file.name
                np.savez(file, **arrays)  # type: ignore[arg-type]
            os.replace(temporary, path)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _make_room(self, size: int) -> None:
        """Removes the least recently used entries until `size` more bytes fit."""
        entries = []
        for path in self._folder.glob("*.npz"):
            with contextlib.suppress(OSError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = size + sum(entry_size for _, entry_size, _ in entries)
        for _, entry_size, path in sorted(entries):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= entry_size


def _read(path: pathlib.Path) -> dict[str, Array] | None:
    """The entry, marked as used now; None if there is none or it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        os.utime(path)
        return arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
