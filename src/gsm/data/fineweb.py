"""FineWeb: web text in parquet files, read from a folder, or streamed from the Hugging Face hub.

`datasets` lists the files on the hub, which are then read without a copy on the disk.

The columns are FineWeb's (text, id, dump, url, date, file_path, language, language_score, token_count); only `text` is
read. Any other data set on the hub that lies there as parquet with a text column works as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from gsm.data.cache import writable
from gsm.data.corpus import Corpus
from gsm.data.module import TextData
from gsm.data.reading import Piece, needed, read_pieces
from gsm.files import read_json, write_json

REMOTE = "hf://"


def text_data(
    *,
    path: str | None = None,
    repository: str = "HuggingFaceFW/fineweb",
    subset: str | None = "sample-10BT",
    revision: str | None = None,
    files: str | list[str] | None = None,
    validation: str | list[str] | None = None,
    text_field: str = "text",
    **chosen: Any,
) -> TextData:
    """Return `TextData` over FineWeb.

    Args:
        path: a folder of parquet files (or one); None: `repository` on the hub.
        repository: a data set on the hub, `owner/name`.
        subset: its configuration.
        revision: its commit, tag or branch; None: the newest when its files are first listed. The list stays in the
            cache, so that later runs take the same commit.
        files: patterns of the files to take, relative to `path` or within the repository; None: all.
        validation: patterns of the files to hold out; None: the last of their names.
        text_field: the column with the text.
        chosen: the other arguments of `TextData`.

    Raises:
        ValueError: as `TextData` and `FineWeb`.
    """
    which = {"repository": repository, "subset": subset, "revision": revision}
    corpus = FineWeb(path, files=files, validation=validation, text_field=text_field, **which)
    return TextData(corpus=corpus, **chosen)


class FineWeb(Corpus):
    """The parquet files of a data set. On the hub, `files` has their addresses with the commit.

    The last of their names is held out, or those that `validation` names. Of a single file, documents are held out by
    their hash. So validation reads one file and not all.

    Args:
        root: a folder of parquet files (or one); None: the hub.
        repository: a data set on the hub, `owner/name`.
        subset: its configuration.
        revision: its commit, tag or branch; None: its newest.
        others: the other arguments of `Corpus`.

    Raises:
        FileNotFoundError: there is nothing at `root`.
        ModuleNotFoundError: the extra `data` is not installed (at first use).
        ConnectionError: the hub is needed and cannot be reached (at first use).
        ValueError: as in `Corpus`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        repository: str = "HuggingFaceFW/fineweb",
        subset: str | None = "sample-10BT",
        revision: str | None = None,
        **others: Any,
    ) -> None:
        self.repository, self.subset, self.revision, self.remote = repository, subset, revision, root is None
        super().__init__(os.curdir if root is None else root, name="fineweb", suffixes=(".parquet",), **others)

    def _by_default(self, names: list[str]) -> dict[str, list[str]]:
        if len(names) == 1:
            return super()._by_default(names)
        return {"train": names[:-1], "validation": names[-1:]}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the files and the split of each; on the hub, over their addresses, which hold the commit."""
        if not self.remote:
            return super().digest
        return hashlib.sha256(json.dumps([self.files, self.text_field]).encode()).hexdigest()

    def _walk(self) -> Iterator[str]:
        return iter(self._listed) if self.remote else super()._walk()

    def _bytes(self, name: str) -> int:
        return 0 if name.startswith(REMOTE) else super()._bytes(name)

    def _identity(self, name: str) -> str:
        return name if name.startswith(REMOTE) else super()._identity(name)

    def _local(self, name: str) -> str:
        """Return a name for patterns: on the hub, the part of an address after its commit."""
        return name.partition("@")[2].partition("/")[2] if name.startswith(REMOTE) else name

    @property
    def _place(self) -> str:
        return f"{self.repository} ({self.subset}) on the hub" if self.remote else super()._place

    @cached_property
    def _listed(self) -> list[str]:
        """The addresses of all files on the hub. The cache keeps them: later runs need no network for cached ids."""
        which = [self.repository, self.subset, self.revision]
        note = self.notes and self.notes / f"hub-{hashlib.sha256(json.dumps(which).encode()).hexdigest()[:20]}.json"
        files = ((note and read_json(note)) or {}).get("files")
        if not files:
            files = self._list()
            if note:
                with writable(note.parent):
                    write_json(note, {"which": which, "files": files})
        return files

    def _list(self) -> list[str]:
        datasets = needed("datasets", "the hub's files")
        try:
            builder = datasets.load_dataset_builder(self.repository, self.subset, revision=self.revision)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConnectionError(
                f"the files of {self.repository} ({self.subset}) cannot be listed on the hub ({error}); "
                "set data.path to a folder that holds its parquet files"
            ) from error
        return sorted(str(file) for files in (builder.config.data_files or {}).values() for file in files)

    def _read(self, name: str) -> Iterator[Piece]:
        return read_pieces(name, self.text_field) if name.startswith(REMOTE) else super()._read(name)
