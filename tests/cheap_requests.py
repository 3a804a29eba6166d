# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Requests to applications of this process, without text in between.

wsgi_intercept has an HTTP client write its request and read the answer as a
server would. A tenth of the processor time of a functional test went into
that. Here a session calls the application; both sides see the same.
"""

import functools
import io
import sys
from urllib import parse

import requests
from requests import adapters
from requests import cookies
from requests import models
import urllib3
import wsgi_intercept


def _environ(request, host, port, script_name):
    """What wsgi_intercept.make_environ() reads from the text of a request."""
    url = parse.urlsplit(request.url)
    path = url.path or '/'
    if path.startswith(script_name):
        path = path[len(script_name):]
    else:
        script_name = ''
    body = request.body or b''
    if isinstance(body, str):
        body = body.encode()
    uri = parse.urlunsplit(('', '', url.path or '/', url.query, ''))
    environ = {
        'wsgi.version': (1, 0), 'wsgi.url_scheme': 'http',
        'wsgi.input': io.BytesIO(body), 'wsgi.errors': sys.stderr,
        'wsgi.multithread': 0, 'wsgi.multiprocess': 0, 'wsgi.run_once': 0,
        'REQUEST_METHOD': request.method, 'SCRIPT_NAME': script_name,
        'PATH_INFO': parse.unquote_to_bytes(path).decode('latin-1'),
        'REQUEST_URI': uri, 'RAW_URI': uri, 'SERVER_PROTOCOL': 'HTTP/1.1',
        'SERVER_NAME': host, 'SERVER_PORT': port, 'HTTP_HOST': url.netloc,
        'REMOTE_ADDR': '127.0.0.1'}
    if url.query:
        environ['QUERY_STRING'] = url.query
    for name, value in request.headers.items():
        if isinstance(value, bytes):
            value = value.decode('latin-1')
        name = name.upper().replace('-', '_')
        environ[name if name in ('CONTENT_TYPE', 'CONTENT_LENGTH')
                else f'HTTP_{name}'] = value
    return environ


def _straight(send):
    """send() of the adapter that each session has."""
    @functools.wraps(send)
    def sent(adapter, request, *args, **kwargs):
        url = parse.urlsplit(request.url)
        where = url.hostname, url.port or 80
        known = wsgi_intercept._wsgi_intercept.get(where)
        if url.scheme != 'http' or not known or not isinstance(
                request.body, (bytes, str, type(None))):
            return send(adapter, request, *args, **kwargs)
        create, script_name = known
        answer, written = [], []

        def start_response(status, headers, exc_info=None):
            answer[:] = status, headers
            return written.append
        found = create()(_environ(request, *where, script_name),
                         start_response)
        try:
            body = b''.join([*found])
        finally:
            if hasattr(found, 'close'):
                found.close()
        status, headers = answer
        code, _, reason = status.partition(' ')
        # it has no cookies, which no server of these tests sends
        return adapter.build_response(request, urllib3.HTTPResponse(
            body=io.BytesIO(b''.join(written) + body), headers=headers,
            status=int(code), reason=reason, preload_content=False,
            request_method=request.method))
    return sent


def _of_some(header):
    """get_cookie_header() of requests."""
    @functools.wraps(header)
    def of(jar, request):
        return header(jar, request) if len(jar) else None
    return of


def install() -> None:
    """Have all sessions of this process do so. Call it once."""
    adapters.HTTPAdapter.send = _straight(requests.adapters.HTTPAdapter.send)
    models.get_cookie_header = _of_some(cookies.get_cookie_header)
