# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Requests to Glance with a limit in time and in size.

``requests`` limits only single reads of a socket, and glanceclient reads a JSON
body to its end: a Glance, or a proxy before it, that sends one byte a second,
or JSON without an end, would be read for ever. Therefore each step (a response
with its JSON, a chunk of data) runs in a thread of its own. At the time limit
the caller returns and the connection is closed. Only a thread that still waits
for headers remains; at most _MOST_LATE of them exist.
"""

from collections.abc import Callable, Generator
import concurrent.futures
import contextlib
import json
import os
import re
import socket
import time
import typing

from keystoneauth1 import adapter
from keystoneauth1 import exceptions as ks_exc
import requests

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import text

CONF = conf.CONF

#: bytes of one chunk of data
CHUNK = 1 << 20
#: maximum bytes of one read of JSON, of a JSON body, of the body of an error
_READ, _MOST_JSON, _MOST_ERROR = 1 << 16, 16 << 20, 1 << 16
_MOST_LATE = 16
#: unfinished steps whose callers have returned
_LATE: set[concurrent.futures.Future] = set()
_DATA = 'application/octet-stream'
#: client errors that are temporary: Request Timeout, Too Many Requests
_LATER = 408, 429


def get_json(client, path: str, what: str,
             is_valid: Callable[[dict], bool]) -> dict:
    """Return the JSON object in Glance's response to a GET.

    :param client: a glanceclient (version 2) created with a session.
    :param what: the requested thing, for errors.
    :param is_valid: returns whether an object has the expected structure.
    :raises BitstreamError: Glance refused the request.
    :raises GlanceUnavailable: Glance did not respond within [accel]
        glance_timeout, or the response has another structure.
    """
    end = time.monotonic() + CONF.accel.glance_timeout
    with _open(client, path, what) as response:
        body = _body(client, what, end, response, _MOST_JSON)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not (isinstance(found, dict) and is_valid(found)):
            raise _no_glance(client, what, response)
        return found


def get_data(client, path: str, what: str, size: int | None, seconds: float,
             ) -> Generator[bytes, None, None]:
    """Yield the data of an image in chunks of at most CHUNK bytes.

    :param client: see get_json().
    :param what: the requested thing, for errors.
    :param size: size of the data according to Glance, for errors.
    :param seconds: time limit for all data.
    :raises BitstreamError: Glance refused the request, or has no data.
    :raises GlanceUnavailable: Glance did not begin to respond within [accel]
        glance_timeout, stopped sending, or did not finish in time.
    """
    end = time.monotonic() + seconds
    received = 0
    with _open(client, path, what) as response:
        if response.status_code == requests.codes.no_content:
            raise exception.BitstreamError(
                f'Glance was asked for {what}, and has the image without '
                f'data: upload the bitstream again.')
        if response.headers.get('Content-Type') != _DATA:
            raise _no_glance(client, what, response)
        chunks = response.iter_content(CHUNK)
        while True:
            try:
                chunk = _within(client, what, end, response, next, chunks, b'')
            except _Late:
                raise exception.GlanceUnavailable(
                    f'Glance at {where(client)} was asked for {what} and sent '
                    f'{received} bytes within {seconds:.0f} s (ten times '
                    f'[accel] glance_timeout): check the network, or raise '
                    f'that option.') from None
            except (requests.RequestException, OSError) as error:
                raise _stopped(client, f'{what} after {received} of {size} '
                                       f'bytes', error) from None
            if not chunk:
                return
            received += len(chunk)
            yield chunk


def where(client) -> str:
    """Return the address of Glance, for errors."""
    return client.http_client.endpoint_override or 'its endpoint'


def reason(error: BaseException) -> str:
    """Return the innermost cause of an error as one printable line."""
    while error.__context__ is not None:
        error = error.__context__
    line = ' '.join(str(error).split())
    line = line.encode('ascii', 'replace').decode()
    return line[:160] or type(error).__name__


class _Late(exception.GlanceUnavailable):
    """A step did not end in time."""


def _within(client, what, end, response, function, *args) -> typing.Any:
    """Call a function in another thread, and return its result.

    :param end: the time limit, as a value of time.monotonic().
    :param response: closed at the limit; None before there is a response.
    :raises _Late: the limit passed. The thread may still run.
    """
    if len(_LATE) >= _MOST_LATE:
        raise _Late(
            f'Glance at {where(client)} is not asked for {what}, because '
            f'{_MOST_LATE} earlier requests wait for its answer: check that '
            f'it runs.')
    future = limited.start(function, *args)
    try:
        return future.result(max(0.0, end - time.monotonic()))
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
    _LATE.add(future)
    future.add_done_callback(_LATE.discard)
    if response is not None:
        future.add_done_callback(lambda _: _close(response))
        _end(response)
    raise _no_answer(client, what)


def _no_answer(client, what) -> _Late:
    return _Late(
        f'Glance at {where(client)} was asked for {what} and did not answer '
        f'within {CONF.accel.glance_timeout} s ([accel] glance_timeout): '
        f'check that it runs.')


def _end(response) -> None:
    """Shut down the connection of a response that another thread reads.

    close() would wait for that thread, and urllib3 has shutdown() only since
    release 2.3.
    """
    with contextlib.suppress(OSError, ValueError), socket.socket(
            fileno=os.dup(response.raw.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _close(response) -> None:
    # under eventlet, a thread that still reads the response makes this call
    # reentrant; that thread closes it when it ends
    with contextlib.suppress(RuntimeError):
        response.close()


@contextlib.contextmanager
def _open(client, path, what):
    """Yield the successful response to a GET, with its body unread.

    :raises BitstreamError: Glance refused the request.
    :raises GlanceUnavailable: Glance did not answer.
    """
    end = time.monotonic() + CONF.accel.glance_timeout
    response = _within(client, what, end, None, _get, client, path, what)
    with contextlib.ExitStack() as stack:
        stack.callback(_close, response)
        if response.ok and response.status_code < 300:
            yield response
            return
        why = ''
        with contextlib.suppress(exception.GlanceUnavailable):
            why = _words(_body(client, what, end, response, _MOST_ERROR))
        raise _refused(client, what, response.status_code,
                       why or response.reason)


def _get(client, path, what):
    # not with glanceclient's own request(), which reads bodies to their end
    try:
        return adapter.Adapter.request(
            client.http_client, path, 'GET', stream=True, raise_exc=False,
            # logging would read the body
            log=False, timeout=CONF.accel.glance_timeout)
    except ks_exc.Unauthorized as error:
        raise _refused(client, what, 401, reason(error)) from None
    except (ks_exc.AuthorizationFailure, ks_exc.MissingAuthPlugin):
        raise exception.BitstreamError(
            f'Glance cannot be asked for {what} because the request has no '
            f'token of a user: repeat the operation as the user of the '
            f'server.') from None
    except ks_exc.ConnectTimeout:
        raise _no_answer(client, what) from None
    except (ks_exc.ClientException, requests.RequestException, OSError,
            # http.client raises it for a response that is not HTTP
            ValueError) as error:
        raise exception.GlanceUnavailable(
            f'Glance at {where(client)} was asked for {what} and cannot be '
            f'reached ({reason(error)}): check Glance, and its endpoint '
            f'in [glance] of nova.conf.') from None


def _body(client, what, end, response, most) -> bytes:
    """Return the body of a response, cut off after ``most`` bytes.

    :raises GlanceUnavailable: Glance did not send the body in time.
    """
    try:
        return _within(client, what, end, response, _read, response, most)
    except (requests.RequestException, OSError) as error:
        raise _stopped(client, what, error) from None


def _read(response, most) -> bytes:
    body = bytearray()
    for chunk in response.iter_content(_READ):
        body += chunk
        if len(body) > most:
            break
    return bytes(body[:most])


def _words(body: bytes) -> str:
    """Return the message in the body of an error: JSON, HTML or plain text."""
    words = body.decode('ascii', 'replace')
    with contextlib.suppress(*exception.MALFORMED):
        # the form of glance.common.wsgi.Fault
        words = ' '.join(
            found['message'] for found in json.loads(body).values())
    return ' '.join(re.sub(r'<.+?>', ' ', words).split())[:160]


def _refused(client, what, code, why) -> exception.AcceleratorError:
    if code == 401:
        return exception.ImageRefused(
            f'Glance was asked for {what} and rejects the token of the user '
            f'(401), which has expired or been revoked: log in again and '
            f'repeat the operation.')
    if code == 403:
        return exception.ImageRefused(
            f'Glance was asked for {what} and does not permit it to the user '
            f'(403): ask the owner of the image or the operator.')
    if code == 404:
        return exception.ImageNotFound(
            f'Glance was asked for {what}, which does not exist or is not '
            f'visible to the project of the server: correct the image id, or '
            f'share the image with the project.')
    if 400 <= code < 500 and code not in _LATER:
        return exception.BitstreamError(
            f'Glance was asked for {what} and refuses ({why}): correct the '
            f'request.')
    return exception.GlanceUnavailable(
        f'Glance at {where(client)} was asked for {what} and is out of '
        f'service ({code}, {why}): read its log, or that of the proxy in front '
        f'of it, then try again.')


def _stopped(client, what, error) -> exception.GlanceUnavailable:
    return exception.GlanceUnavailable(
        f'Glance at {where(client)} stopped sending {what} ({reason(error)}): '
        f'read its log, then try again.')


def _no_glance(client, what, response) -> exception.GlanceUnavailable:
    found = text.printable(response.headers.get('Content-Type'))
    return exception.GlanceUnavailable(
        f'Glance at {where(client)} was asked for {what}, and the answer is '
        f'{found}, which is not from Glance: check the endpoint in the '
        f'catalog or [glance] of nova.conf.')
