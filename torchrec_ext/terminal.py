"""How people are shown names that come from files, and numbers of things."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Text that does nothing to a terminal, whoever wrote the file that it comes from: escaped, on one line.

    Args:
        text: what is to be shown.
        keep: characters that are left as they are, such as the line feeds of a message of several lines.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def counted(number: int, what: str) -> str:
    """A number of things, as people write it: ``1 dump``, ``1,200 dumps``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
