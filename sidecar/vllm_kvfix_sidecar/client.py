# SPDX-License-Identifier: Apache-2.0
"""Asks a running sidecar what it knows, and believes nothing of the answer that was not checked."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from vllm_kvfix_sidecar import bearer, report
from vllm_kvfix_sidecar.deadline import within
from vllm_kvfix_sidecar.settings import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_kvfix_sidecar.report import Report

T = TypeVar("T")
PATH, NOW, HISTORY = "/diagnosis", "/api/now", "/api/history"
CONNECT_S = 2.0
ANSWER_S = 10.0
LARGEST_ANSWER = 8 << 20
_CHUNK = 1 << 16
_SCHEMES = ("http", "https")
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # what a sidecar listens on is asked by loopback


class NoAnswerError(Exception):
    """Nobody answered, or not as a sidecar does; the message says why, for a person."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A sidecar sends nobody elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: the answer is an error."""


def url_of(text: str, page: str = PATH) -> str:
    """Where to ask for the page: of ``http://HOST:PORT``, ``HOST:PORT``, or a whole URL.

    Raises:
        ValueError: It is none of them.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        good = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or any(char.isspace() or not char.isprintable() for char in text):
        raise ValueError(f"{text!r} is no address of a sidecar; write it like http://127.0.0.1:9464")
    path = page if parts.path in {"", "/"} else parts.path
    return parts._replace(path=path, fragment="").geturl()


def url_at(address: Address, page: str = PATH) -> str | None:
    """The page of a sidecar of this machine that listens there; None where the port is any free one."""
    if not address.port:
        return None
    return url_of(f"http://{Address(_ANY.get(address.host, address.host), address.port)}", page)


def ask(
    url: str,
    answer_s: float = ANSWER_S,
    clock: Callable[[], float] = time.monotonic,
    *,
    token: str | None = None,
) -> Report:
    """What the sidecar at ``url`` knows; ``token``: the one that it may want.

    Raises:
        NoAnswerError: Nobody answers within ``answer_s``, or what answers is no sidecar of this schema.
    """
    return understood(url, report.parse, answer_s, clock, token=token)


def understood(
    url: str,
    parse: Callable[[bytes], T],
    answer_s: float = ANSWER_S,
    clock: Callable[[], float] = time.monotonic,
    *,
    token: str | None = None,
) -> T:
    """What ``parse`` makes of the answer of ``url``; it raises :class:`report.MalformedReportError`.

    Raises:
        NoAnswerError: Nobody answers within ``answer_s``, or not what is parsed.
    """
    done: list[bytes | NoAnswerError] = []
    # In a thread: a time limit of sockets begins anew with each byte.
    if not within(answer_s, lambda: done.append(_fetched(url, answer_s, clock, token)), "ask a sidecar") or not done:
        raise NoAnswerError(f"{url} did not answer within {answer_s:g} s")
    if isinstance(done[0], NoAnswerError):
        raise done[0]
    try:
        return parse(done[0])
    except report.MalformedReportError as error:
        raise NoAnswerError(f"what answers at {url} is no sidecar that this command understands: {error}") from error


def _fetched(url: str, answer_s: float, clock: Callable[[], float], token: str | None) -> bytes | NoAnswerError:
    deadline = clock() + answer_s
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310  # http alone
    try:
        with _opener(url).open(request, timeout=min(CONNECT_S, answer_s)) as response:
            return _body(response, lambda: clock() < deadline)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED:
            why = "wants another token" if token else "wants a token"
            return NoAnswerError(f"{url} {why}: name the file that holds it by --token-file, or {bearer.VARIABLE}")
        return NoAnswerError(f"{url} answered {error.code}, not what a sidecar with {urlsplit(url).path} answers")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return NoAnswerError(f"nobody answers at {url}: {getattr(reason, 'strerror', None) or reason}")


def _opener(url: str) -> urllib.request.OpenerDirector:
    host = urlsplit(url).hostname or ""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if Address(host, 0).is_loopback:  # a proxy would ask its own loopback
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _body(response: Any, in_time: Callable[[], bool]) -> bytes:
    """All of an answer that is not too large, and does not dribble on.

    Raises:
        ValueError: It is, or does.
    """
    body = bytearray()
    while in_time() and (chunk := response.read1(_CHUNK)):
        body += chunk
        if len(body) > LARGEST_ANSWER:
            raise ValueError(f"its answer is larger than {LARGEST_ANSWER >> 20} MiB")
    if not in_time():
        raise ValueError("its answer took too long")
    return bytes(body)
