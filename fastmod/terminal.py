"""Output on any terminal: characters that its encoding lacks are written in ASCII instead of ending the program."""

from __future__ import annotations

import codecs
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_SPELT = {"±": "+-", "…": "~", "¬": "not "}


def be_lenient() -> None:
    """Set up the streams of this process: rich draws tables in ASCII where it must, but not the words in them nor its
    own mark for text that was cut off."""
    codecs.register_error("fastmod", _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fastmod")


def folded(table: Table) -> Table:
    """The table, with words that a narrow terminal or a pipe has no room for on several lines: what is cut off cannot
    be told from its neighbours."""
    for column in table.columns:
        column.overflow = "fold"
    return table


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_SPELT.get(c) or c.encode("ascii", "backslashreplace").decode() for c in characters), error.end
