"""One server of a remote store as its client sees it: reached, lost, found again."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as flight
import torch

from torchrec_ext.errors import StoreError
from torchrec_ext.store.flight import wire
from torchrec_ext.store.flight.shares import Share, other_share

logger = logging.getLogger(__name__)

Part = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""What one server is asked: arguments, a JSON object, and tensors."""

_DESCRIPTOR = flight.FlightDescriptor.for_command(b"")

# The server is gone, or going: another connection may find it, or its successor.
_LOST = (flight.FlightUnavailableError, flight.FlightCancelledError)

# A channel of its own for each connection: gRPC would make a new one wait for as long as the one that
# failed before it.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Run:
    """One run of a server, as it is reached.

    Attributes:
        client: the Flight client.
        instance: the server's name for the run.
        epoch: rows that were read in an earlier one may be another run's, and have to be read again.
    """

    client: Any
    instance: str
    epoch: int


class Connection:
    """A server, and which share of the tables it holds.

    It is reached when it is needed. When it was lost, the next request looks for it again.

    Args:
        url: ``grpc://host:port`` or ``grpc+tls://host:port``.
        share: what it should hold.
        token: what it wants to know.
        tls_root_certs: the certificates to trust, PEM.

    Raises:
        ValueError: the URL or the token is not one.
    """

    def __init__(
        self, url: str, share: Share, *, token: str | None = None, tls_root_certs: bytes | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("grpc", "grpc+tls") or not parts.hostname or not parts.port:
            raise ValueError(f"a store's server is grpc://host:port or grpc+tls://host:port, not {url!r}")
        self.url = url
        self.epoch = 0
        self._share = share
        self._tls_root_certs = tls_root_certs
        self._headers = (
            [(wire.AUTHORIZATION.encode(), wire.authorization(token))] if token is not None else []
        )
        self._client: Any = None
        self._instance: str | None = None
        self._reported = False  # that the server was lost
        self._lock = threading.Lock()

    def reach(self, timeout: float) -> Run:
        """Finds the server, unless it was found before.

        Raises:
            StoreError: it cannot be reached, is not the server that it should be, or was restarted
                without anybody having been told so.
        """
        with self._lock:
            if self._client is None:
                self._find(timeout)
            assert self._instance is not None
            return Run(self._client, self._instance, self.epoch)

    def options(self, timeout: float) -> flight.FlightCallOptions:
        """What goes with each call."""
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def lose(self, client: Any, *, reported: bool) -> None:
        """Takes note that the server does not answer on a client any more.

        Args:
            client: the client.
            reported: whether the user is told so by an error.
        """
        with self._lock:
            if self._client is client:
                # Not closed: other threads may be waiting for an answer on it.
                self._client = None
                self._reported = reported

    def forget(self) -> None:
        """Begins another epoch."""
        with self._lock:
            self.epoch += 1

    def close(self) -> None:
        """Lets go of the connection."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def explained(self, error: Exception, timeout: float) -> StoreError:
        """The error to raise for one of Flight's."""
        if isinstance(error, flight.FlightUnauthenticatedError):
            what = "refused the token" if self._headers else "wants a token"
        elif isinstance(error, flight.FlightTimedOutError):
            what = f"did not answer within {timeout:g} s"
        elif isinstance(error, _LOST):
            what = f"cannot be reached: {_first_words(error)}"
        else:
            what = f"answered with an error: {type(error).__name__} {_first_words(error)}"
        return StoreError(f"the store's server {self.url} {what}")

    def restarted(self) -> StoreError:
        """The error to raise when another run of the server answers."""
        return StoreError(
            f"the store's server {self.url} was restarted, and did nothing of what it was asked; the next "
            "request goes to the new one, which has only what was in a file"
        )

    def _find(self, timeout: float) -> None:
        try:
            client = flight.FlightClient(
                self.url, tls_root_certs=self._tls_root_certs, generic_options=_OPTIONS
            )
            known, self._instance = self._instance, self._hello(client, timeout)
        except (pa.ArrowException, OSError) as error:
            self._reported = True
            raise self.explained(error, timeout) from error
        self._client = client
        reported, self._reported = self._reported, False
        if known is not None and known != self._instance:
            self.epoch += 1
            if not reported:
                raise self.restarted()
            logger.warning("the store's server %s is back; it was restarted", self.url)

    def _hello(self, client: Any, timeout: float) -> str:
        """Asks the server who it is; checks that it is who it should be."""
        answers = list(client.do_action(flight.Action(wire.HELLO, b""), self.options(timeout)))
        try:
            answer = json.loads(answers[0].body.to_pybytes())
            protocol, instance, share = answer["protocol"], str(answer["instance"]), answer["share"]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self.url} is not a store's server: it says {answers!r}") from error
        if protocol != wire.PROTOCOL:
            raise StoreError(
                f"the store's server {self.url} speaks protocol {protocol}, this client {wire.PROTOCOL}: "
                "run the same version of torchrec_ext on both sides"
            )
        if share is not None and Share(*share) != self._share:
            raise StoreError(f"{self.url}: {other_share(Share(*share), self._share)}")
        return instance


class Request:
    """A request that is under way to a server.

    Args:
        connection: the server.
        run: the run of it that is meant.
        op: what to do.
        args: a JSON object.
        tensors: int64 or float32.
        timeout: how many seconds it may take.
        retry: whether to ask once more over a new connection when this one is lost: only if asking
            twice makes no difference.
    """

    def __init__(
        self,
        connection: Connection,
        run: Run,
        op: str,
        args: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        *,
        timeout: float,
        retry: bool,
    ) -> None:
        self._connection = connection
        self._header = {"op": op, "args": args, "instance": run.instance}
        self._tensors = tensors
        self._timeout = timeout
        self._is_change = not retry
        self._may_retry = retry
        self._send(run)

    def answer(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Waits for the answer.

        Raises:
            StoreError: there is none.
            Exception: what the server's store raised.
        """
        try:
            answer, tensors = self._receive()
        except _LOST as error:
            self._connection.lose(self._run.client, reported=not self._may_retry)
            if not self._may_retry:
                raise self._unanswered(error) from error
            self._may_retry = False
            run = self._connection.reach(self._timeout)
            if run.instance != self._run.instance:
                raise self._connection.restarted() from error
            self._send(run)
            return self.answer()
        except (pa.ArrowException, OSError) as error:
            self._connection.lose(self._run.client, reported=True)
            raise self._unanswered(error) from error
        if "restarted" in answer:
            self._connection.lose(self._run.client, reported=True)
            raise self._connection.restarted()
        if "error" in answer:
            wire.raise_error(answer["error"])
        return answer, tensors

    def _send(self, run: Run) -> None:
        self._run = run
        self._reader: Any = None
        self._failure: Exception | None = None
        try:
            self._writer, self._reader = run.client.do_exchange(
                _DESCRIPTOR, self._connection.options(self._timeout)
            )
            wire.send(self._writer, self._header, self._tensors)
            self._writer.done_writing()
        except (pa.ArrowException, OSError) as error:
            self._failure = error  # the answer tells better what is wrong

    def _receive(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if self._failure is not None and self._reader is None:
            raise self._failure
        try:
            return wire.receive(self._reader)
        except StoreError as error:
            raise self._failure or StoreError(
                f"the store's server {self._connection.url}: {error}"
            ) from error
        finally:
            with suppress(pa.ArrowException, OSError):  # the reader has told what is wrong
                self._writer.close()

    def _unanswered(self, error: Exception) -> StoreError:
        explained = self._connection.explained(error, self._timeout)
        if not self._is_change or isinstance(error, flight.FlightUnauthenticatedError):
            return explained
        return StoreError(f"{explained}; the change may have been made, or not, or by some servers only")


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        content: a JSON object.
        tensors: what came with it.
        epoch: that in which the server was asked.
    """

    content: dict[str, Any]
    tensors: list[torch.Tensor]
    epoch: int


class Servers:
    """All servers of a store.

    Args:
        connections: in the order of their shares.
        timeout: how many seconds a request may take.

    Raises:
        StoreError: a server cannot be reached, or is not the one that it should be.
        ValueError: two of them are the same.
    """

    def __init__(self, connections: Sequence[Connection], timeout: float) -> None:
        self._connections = connections
        self._timeout = timeout
        self._closed: str | None = None
        if len({run.instance for run in self.reach()}) < len(connections):
            raise ValueError(f"some are the same server: {[connection.url for connection in connections]}")

    def __len__(self) -> int:
        return len(self._connections)

    def reach(self) -> list[Run]:
        """Finds those that were lost; see ``Connection.reach``."""
        if self._closed:
            raise StoreError(self._closed)
        return [connection.reach(self._timeout) for connection in self._connections]

    def ask(
        self,
        op: str,
        parts: Sequence[Part] | Part,
        *,
        runs: Sequence[Run] | None = None,
        retry: bool = False,
        timeout: float | None = None,
    ) -> list[Answer]:
        """Asks all servers at the same time, and waits for all answers.

        Args:
            op: what for.
            parts: each server's arguments and tensors, or those of all.
            runs: which runs of the servers are meant; by default the present ones.
            retry: see ``Request``.
            timeout: how many seconds it may take.
        """
        runs = runs or self.reach()
        requests = [
            Request(connection, run, op, *part, timeout=timeout or self._timeout, retry=retry)
            for connection, run, part in zip(
                self._connections,
                runs,
                [parts] * len(self) if isinstance(parts, tuple) else parts,
                strict=True,
            )
        ]
        answers = []
        errors = []
        for request, run in zip(requests, runs, strict=True):
            try:
                answers.append(Answer(*request.answer(), run.epoch))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def forget(self) -> None:
        """Begins another epoch with all of them."""
        for connection in self._connections:
            connection.forget()

    def close(self) -> None:
        """Lets go of the connections."""
        if self._closed is None:
            self._closed = "the store is closed"
            for connection in self._connections:
                connection.close()

    def abandon(self) -> None:
        """Leaves the connections to the process that this one was forked from."""
        # Not closed: gRPC would wait for threads that are not there.
        self._closed = "a remote store cannot be used after a fork; open it in the process that uses it"


def _first_words(error: Exception) -> str:
    """What an error of Flight says, without gRPC's details."""
    words = str(error).split(". Detail:")[0].split(". gRPC client debug context")[0]
    return words.partition("with message: ")[2] or words
