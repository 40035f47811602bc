"""``StoreServer``: a local store for clients on other hosts, over Arrow Flight."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as flight
import torch

from torchrec_ext.errors import StoreError
from torchrec_ext.store.flight import wire
from torchrec_ext.store.flight.shares import Share, other_share
from torchrec_ext.store.local import LocalStore
from torchrec_ext.store.optimizers import optimizer_from_json
from torchrec_ext.store.store import Rows
from torchrec_ext.store.tables import table_from_json, table_to_json

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
        if store.device.type != "cpu":
            raise ValueError(f"a server's store must be on the CPU, not on {store.device}")
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
            logger.warning(
                "the token and all rows travel unencrypted; use grpc+tls:// outside a trusted network"
            )
        middleware = {"token": _TokenCheck(token)} if token is not None else {}
        self._store = store
        try:
            self._flight = _Flight(
                _Requests(store),
                f"{parts.scheme}://{parts.netloc if parts.port is not None else parts.netloc + ':0'}",
                tls_certificates=[flight.CertKeyPair(*tls)] if tls else None,
                middleware=middleware,
            )
        except (pa.ArrowException, OSError) as error:
            raise StoreError(
                f"cannot listen on {url}: is the address this host's, and the port free? ({error})"
            ) from error
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


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses calls that do not bring the token."""

    def __init__(self, token: str) -> None:
        self._expected = wire.authorization(token)

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        """See ``ServerMiddlewareFactory``."""
        given = next(iter(headers.get(wire.AUTHORIZATION, [])), "")
        if not hmac.compare_digest(given.encode(), self._expected):
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


class _Flight(flight.FlightServerBase):
    """Carries requests to ``_Requests``, and answers back."""

    def __init__(self, requests: _Requests, location: str, **options: Any) -> None:
        self._requests = requests  # first: the server runs before its constructor returns
        super().__init__(location, **options)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Says who the server is."""
        if action.type != wire.HELLO:
            raise NotImplementedError(f"no action {action.type!r}")
        return [json.dumps(self._requests.hello()).encode()]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answers a request."""
        tensors: Tensors = ()
        try:
            result, tensors = self._requests.answer(*wire.receive(reader))
        except pa.ArrowException:
            raise  # the client is gone
        except Exception as error:
            for _ in reader:  # an answer to a client that is still sending could get lost
                pass
            result = {"error": wire.error_to_json(error)}
            if not wire.travels(error):
                logger.exception("a request failed")
        wire.send(writer, result, tensors)


class _Requests:
    """What clients can ask for.

    Every handler gets a request's arguments and tensors, and returns those of the answer.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._instance = secrets.token_hex(8)
        self._share = _KeptShare(store)
        # So that the clock after a change is what the change stamped its rows with.
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
        share = self._share.get()
        return {
            "protocol": wire.PROTOCOL,
            "instance": self._instance,
            "share": None if share is None else [share.index, share.count],
        }

    def answer(self, request: dict[str, Any], tensors: Tensors) -> Answer:
        """Does what a request says; raises what the store raises."""
        if request["instance"] != self._instance:
            return {"restarted": True}, ()
        return self._handlers[request["op"]](request["args"], tensors)

    def _describe(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        tables = self._store.tables
        return {
            "clock": self._store.clock,
            "tables": [table_to_json(table) for table in tables.values()],
            "optimizers": [self._store.optimizer(name).to_json() for name in tables],
        }, ()

    def _create_tables(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        with self._changing:
            share = self._share.set(Share(*args["share"]))
            tables = [share.table(table_from_json(table)) for table in args["tables"]]
            made = self._store.create_tables(
                tables,
                optimizer_from_json(args["optimizer"]),
                key_of=share.keys,
            )
        return {"made": made}, ()

    def _set_optimizer(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        with self._changing:
            self._store.set_optimizer(args["tables"], optimizer_from_json(args["optimizer"]))
        return {}, ()

    def _pull_many(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        keys, counts = self._keys_and_counts(args, tensors)
        requests = list(zip(args["tables"], keys, strict=True))
        with self._lock_to_admit(args):
            found = self._store.pull_many(requests, admit=args["admit"], counts=counts)
        return {}, [*(rows.rows for rows in found), *(rows.versions for rows in found)]

    def _refresh_many(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        count = len(args["tables"])
        before, rest = tensors[:count], tensors[count:]
        keys, counts = self._keys_and_counts(args, rest)
        tables = self._store.tables
        held = [
            Rows(table_keys, torch.empty(len(table_keys), tables[name].dim), versions.clone())
            for name, table_keys, versions in zip(args["tables"], keys, before, strict=True)
        ]
        with self._lock_to_admit(args):
            self._store.refresh_many(
                list(zip(args["tables"], held, strict=True)), admit=args["admit"], counts=counts
            )
        answer = []
        for rows, versions in zip(held, before, strict=True):
            changed = (rows.versions != versions).nonzero().flatten()
            answer += [changed, rows.rows[changed], rows.versions[changed]]
        return {}, answer

    def _update_many(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        count = len(args["tables"])
        keys = self._local_keys(args["tables"], tensors[:count])
        grads, wanted = tensors[count : 2 * count], tensors[2 * count :]
        requests = list(zip(args["tables"], keys, grads, strict=True))
        back = list(zip(args["tables"], keys, wanted, strict=True))
        with self._changing:
            self._store.update_many(requests, step=args["step"], lr=args["lr"])
            rows = [self._store.pull(table, part[at]) for table, part, at in back]
            return {"clock": self._store.clock}, rows

    def _read(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        weight, slots = self._store.read(args["table"], *self._local_keys([args["table"]], tensors))
        return {"slots": list(slots)}, [weight, *slots.values()]

    def _write(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        (keys,) = self._local_keys([args["table"]], tensors[:1])
        values = list(tensors[1:])
        rows = values.pop(0) if args["rows"] else None
        with self._changing:
            self._store.write(args["table"], keys, rows, dict(zip(args["slots"], values, strict=True)))
            return {"clock": self._store.clock}, ()

    def _evict_unused(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        with self._changing:
            return {"evicted": self._store.evict_unused(args["table"], args["steps"])}, ()

    def _snapshot(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        snapshot = self._store.snapshot(args["tables"])
        share = self._share.get() or Share()
        parts = {
            name: replace(part, keys=share.keys(part.table, part.keys))
            for name, part in snapshot.tables.items()
        }
        return wire.snapshot_to_message(replace(snapshot, tables=parts))

    def _restore(self, args: dict[str, Any], tensors: Tensors) -> Answer:
        snapshot = wire.snapshot_from_message(args, tensors)
        share = self._share.get() or Share()
        parts = {
            name: replace(
                part,
                keys=share.local_keys(part.table, part.keys),
                slot_keys={slot: share.local_keys(part.table, keys) for slot, keys in part.slot_keys.items()},
            )
            for name, part in snapshot.tables.items()
        }
        with self._changing:
            # What is missing, and what to do about it, the client has found out for all servers.
            self._store.restore(replace(snapshot, tables=parts), key_of=share.keys)
        return {}, ()

    def _keys_and_counts(
        self, args: dict[str, Any], tensors: Tensors
    ) -> tuple[list[torch.Tensor], Tensors | None]:
        count = len(args["tables"])
        return self._local_keys(args["tables"], tensors[:count]), tensors[count:] or None

    def _local_keys(self, names: Sequence[str], keys: Tensors) -> list[torch.Tensor]:
        share = self._share.get()
        if share is None or share.count == 1:
            return list(keys)
        tables = self._store.tables
        return [share.local_keys(tables[name], part) for name, part in zip(names, keys, strict=True)]

    def _lock_to_admit(self, args: dict[str, Any]) -> AbstractContextManager[object]:
        return self._changing if args["admit"] else nullcontext()


class _KeptShare:
    """Which share of the keys a server has, kept with its store's rows."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        place = store.place
        with place.locked(exclusive=True):
            try:
                self._kept = place.array("share", (2,), torch.int64, create=False)
            except StoreError:
                if not store.tables:
                    place.drop("share.")  # of a process that died here
                self._kept = place.array("share", (2,), torch.int64, create=True)

    def get(self) -> Share | None:
        """The share; None as long as there are no tables."""
        if not self._store.tables:
            return None
        index, count = self._kept.tolist()
        return Share(index, count) if count else Share()  # 0: they were made without a server

    def set(self, share: Share) -> Share:
        """Keeps the share.

        Raises:
            StoreError: the server has another one.
        """
        there = self.get()
        if there is not None and there != share:
            raise StoreError(other_share(there, share))
        self._kept.copy_(torch.tensor([share.index, share.count]))
        return share


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
