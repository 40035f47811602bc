"""Ports on loopback that nobody else is given."""

from __future__ import annotations

import socket


class Port:
    """A free port that stays this test's until it is released, whoever listens on it or does not.

    One that was found free and let go may be given to any process before it is used, or between two servers
    of one address. This one is bound, by a socket that does not listen: the system gives it to nobody,
    refuses connections to it, and lets those listen who set ``SO_REUSEADDR``, as servers do.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Lets it go."""
        self._socket.close()
