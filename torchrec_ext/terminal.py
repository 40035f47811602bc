"""What a terminal is shown of names that come from files."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Text that does nothing to a terminal, whoever wrote the file that it comes from: escaped, on one line.

    Args:
        text: what is to be shown.
        keep: characters that are left as they are, such as the line feeds of a message of several lines.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
