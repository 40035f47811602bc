"""URLs as they may be shown."""

from __future__ import annotations

from urllib.parse import unquote


def without_credentials(url: str) -> str:
    """The URL as it may be shown: without user, password and query."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    # By hand: a password may hold what a URL parser trips over, and its error would then quote it.
    before, _, query = rest.partition("?")
    if "@" in query:  # a password with a question mark, or a query with a password: nobody knows
        return f"{scheme}://..."
    return f"{scheme}://{before.rpartition('@')[2]}"


def redacted(text: str, url: str) -> str:
    """What somebody else says of a URL, as it may be shown: whatever may be a credential is starred out."""
    rest = url.partition("://")[2]
    before, _, query = rest.partition("?")
    user_info = rest.rpartition("@")[0] if "@" in query else before.rpartition("@")[0]
    secrets = {user_info, *user_info.partition(":")[::2]}
    secrets |= {pair.partition("=")[2] for pair in query.split("&") if not pair.startswith(_PUBLIC)}
    for secret in sorted({*secrets, *map(unquote, secrets)} - {""}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


_PUBLIC = tuple(f"{name}=" for name in ("scheme", "region", "endpoint_override", "replication", "user"))
