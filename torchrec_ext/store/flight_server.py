"""``StoreServer``: a local store for clients on other hosts, over Arrow Flight."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow.flight as flight
import torch

from torchrec_ext.errors import StoreError
from torchrec_ext.store import wire
from torchrec_ext.store.local import LocalStore
from torchrec_ext.store.optimizers import optimizer_from_json
from torchrec_ext.store.store import Rows
from torchrec_ext.store.tables import CHUNK_BYTES, Constant, DenseTable, Table, table_from_json, table_to_json

logger = logging.getLogger(__name__)

Tensors = Sequence[torch.Tensor]
Answer = tuple[dict[str, Any], Tensors]


class StoreServer:
    """Serves a store to every ``RemoteStore`` that knows the token. It runs once it is made.

    Args:
        store: the store; the server closes it.
        url: where to listen, ``grpc://host:port`` or ``grpc+tls://host:port``; port 0 is any free one.
        token: what clients have to know; None: nothing.
        tls: the certificate and the private key, PEM, for ``grpc+tls``.
        insecure: allows to listen without a token where other hosts can connect.

    Raises:
        ValueError: the arguments contradict each other.
        StoreError: the address cannot be listened on.
    """

    def __init__(
        self,
        store: LocalStore,
        url: str = "grpc://127.0.0.1:0",
        *,
        token: str | None = None,
        tls: tuple[bytes, bytes] | None = None,
        insecure: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("grpc", "grpc+tls") or not parts.hostname:
            raise ValueError(f"a server listens on grpc://host:port or grpc+tls://host:port, not {url!r}")
        if (parts.scheme == "grpc+tls") != (tls is not None):
            raise ValueError("a certificate and its key go with grpc+tls://, and it needs both")
        if token is None and not insecure and not _is_loopback(parts.hostname):
            raise ValueError(
                f"{parts.hostname} can be reached from other hosts: give the server a token, "
                "or allow everybody in with `insecure`"
            )
        if token is not None and tls is None and not _is_loopback(parts.hostname):
            logger.warning("the token and all rows travel unencrypted; use grpc+tls:// outside a trusted network")
        middleware = {"token": _TokenCheck(token)} if token is not None else {}
        self._store = store
        try:
            self._flight = _Flight(
                _Requests(store),
                f"{parts.scheme}://{parts.netloc if parts.port is not None else parts.netloc + ':0'}",
                tls_certificates=[flight.CertKeyPair(*tls)] if tls else None,
                middleware=middleware,
            )
        except (flight.FlightError, OSError, ValueError) as error:
            raise StoreError(f"cannot listen on {url}: {error}") from error
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.url = f"{parts.scheme}://{host}:{self._flight.port}"

    def close(self, grace: float | None = None) -> bool:
        """Refuses new requests, finishes those under way, and closes the store.

        Args:
            grace: how many seconds to wait for requests under way; None: as long as they take.

        Returns:
            Whether all were finished; if not, their threads are still there.
        """
        stopping = threading.Thread(target=self._flight.shutdown, name="store-shutdown", daemon=True)
        stopping.start()
        stopping.join(grace)
        self._store.close()
        return not stopping.is_alive()


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls that do not bring the token."""

    def __init__(self, token: str) -> None:
        self._expected = wire.authorization(token)

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = next(iter(headers.get(wire.AUTHORIZATION, [])), "")
        if not hmac.compare_digest(given.encode(), self._expected.encode()):
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    """Carries requests to ``_Requests`` and answers back."""

    def __init__(self, requests: _Requests, location: str, **options: Any) -> None:
        super().__init__(location, **options)
        self._requests = requests

    def do_action(self, context: Any, action: Any) -> Any:
        if action.type != wire.HELLO:
            raise NotImplementedError(f"no action {action.type!r}")
        return [json.dumps(self._requests.hello()).encode()]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        result: dict[str, Any]
        tensors: Tensors = ()
        try:
            header, given = wire.receive(reader)
            result, tensors = self._requests.answer(header, given)
        except Exception as error:
            described = wire.error_to_json(error)
            if described["kind"] == StoreError.__name__:
                logger.warning("a request failed", exc_info=error)
            result = {"error": described}
        wire.send(writer, result, tensors)


class _Requests:
    """What clients can ask for."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._instance = secrets.token_hex(8)
        self._share = _Placement(store)
        # So that the clock after a change is the one that the change's rows are stamped with.
        self._changing = threading.Lock()
        self._handlers: dict[str, Callable[[dict[str, Any], Tensors], Answer]] = {
            "describe": self._describe,
            "create_tables": self._create_tables,
            "set_optimizer": self._set_optimizer,
            "pull_many": self._pull_many,
            "refresh_many": self._refresh_many,
            "update_many": self._update_many,
            "read": self._read,
            "write": self._write,
            "evict_unused": self._evict_unused,
            "snapshot": self._snapshot,
            "restore": self._restore,
        }

    def hello(self) -> dict[str, Any]:
        """Who the server is."""
        return {
            "protocol": wire.PROTOCOL,
            "instance": self._instance,
            "share": self._share.to_json(),
        }
