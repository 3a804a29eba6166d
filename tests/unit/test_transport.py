# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A Glance, or a proxy before it, that answers without an end."""

import contextlib
import json
import socket
import threading
import time
import types

import fixtures
from keystoneauth1 import adapter
from keystoneauth1 import noauth
from keystoneauth1 import session
from oslo_config import fixture as config_fixture
import testtools

from nova_accel.bitstream import glance
from nova_accel.bitstream import transport
from nova_accel import conf
from nova_accel import exception
from tests.unit import answers

#: seconds; without a limit each test takes minutes, or for ever
_SOON = 20
_JSON = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n'
_DATA = b'HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n'
_IMAGE = glance.Image('an-image', 'x', 100, 'md5-0', {})


class Server:
    """Sends what a function yields, to each connection."""

    def __init__(self, test, answer):
        """:param answer: takes the number of the request."""
        self._answer = answer
        self._socket = socket.create_server(('127.0.0.1', 0))
        # accept() is not interrupted otherwise
        self._socket.settimeout(0.1)
        self._ends = threading.Event()
        self.requests = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()
        test.addCleanup(self.close)
        self.url = 'http://127.0.0.1:%s' % self._socket.getsockname()[1]

    def close(self):
        self._ends.set()
        while self._threads:
            self._threads.pop(0).join()
        self._socket.close()

    def _run(self):
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._socket.accept()
                thread = threading.Thread(
                    target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:
            connection.settimeout(1)
            self.requests.append(
                connection.recv(65536).decode().split()[1])
            for part in self._answer(len(self.requests)):
                if self._ends.is_set():
                    return
                connection.sendall(part)

    def client(self):
        return types.SimpleNamespace(http_client=adapter.Adapter(
            session.Session(auth=noauth.NoAuth()),
            endpoint_override=self.url))


def slowly(part):
    while True:
        yield part
        time.sleep(0.2)


def page(body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    yield _JSON + b'Connection: close\r\nContent-Length: %d\r\n\r\n' % len(
        content) + content


class EndlessTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        # runs last, once the server has ended
        self.addCleanup(self._wait)
        self.config = self.useFixture(
            config_fixture.Config(conf.CONF)).config
        self.config(group='accel', glance_timeout=1)
        self.began = time.monotonic()

    def _wait(self):
        """No thread is left once the server has ended the connections."""
        for _ in range(100):
            if not transport._LATE:
                break
            time.sleep(0.1)
        self.assertEqual(set(), transport._LATE)

    def client(self, answer):
        self.server = Server(self, answer)
        return self.server.client()

    def assertEnds(self, part, call, *args, what=exception.GlanceUnavailable):
        error = self.assertRaises(what, call, *args)
        self.assertLess(time.monotonic() - self.began, _SOON)
        self.assertIn(part, str(error))
        self.assertIn(self.server.url, str(error))

    def listed(self, client):
        return list(glance.listed(client, {'name': 'x'}))

    def test_headers_byte_by_byte(self):
        self.assertEnds('within 1 s', self.listed, self.client(
            lambda _: slowly(b'H')))

    def test_json_byte_by_byte(self):
        def answer(_):
            yield _JSON + b'Content-Length: 1000000\r\n\r\n'
            yield from slowly(b' ')
        self.assertEnds('within 1 s', self.listed, self.client(answer))

    def test_json_without_an_end(self):
        self.config(group='accel', glance_timeout=60)

        def answer(_):
            yield _JSON + b'\r\n'
            while True:
                yield b' ' * 65536
        self.assertEnds('not from Glance', self.listed, self.client(answer))

    def test_json_too_deep(self):
        """Also that of an error."""
        self.assertEnds('not from Glance', self.listed, self.client(
            lambda _: page(answers.DEEP)))

        def refuses(_):
            yield (b'HTTP/1.1 409 Conflict\r\nConnection: close\r\n\r\n'
                   + answers.DEEP[:5000])
        self.assertRaises(exception.AcceleratorError, self.listed,
                          self.client(refuses))

    def test_error_byte_by_byte(self):
        """The status says enough."""
        def answer(_):
            yield (b'HTTP/1.1 503 Service Unavailable\r\n'
                   b'Content-Length: 1000000\r\n\r\n')
            yield from slowly(b'x')
        self.assertEnds('503, Service Unavailable', self.listed,
                        self.client(answer))

    def test_data_byte_by_byte(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.glance.download_seconds', lambda: 2))

        def answer(_):
            yield _DATA + b'Content-Length: 1000000\r\n\r\n'
            yield from slowly(b'x')
        with open(self.useFixture(fixtures.TempDir()).join('x'), 'wb') as file:
            self.assertEnds('within 2 s', glance.download,
                            self.client(answer), _IMAGE, file)

    def test_beginning_of_data_byte_by_byte(self):
        def answer(_):
            yield _DATA + b'Content-Length: 1000000\r\n\r\n'
            yield from slowly(b'x')
        self.assertEnds('within 1 s', glance.head, self.client(answer),
                        _IMAGE)

    def test_empty_pages(self):
        client = self.client(lambda _: page(
            {'images': [], 'next': '/v2/images?marker=x'}))
        self.assertEnds('has no end', self.listed, client)
        self.assertEqual(1, len(self.server.requests))

    def test_pages_of_one(self):
        self.config(group='accel', glance_timeout=60)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.glance.download_seconds', lambda: 0.5))
        client = self.client(lambda number: page(
            {'images': [{'id': str(number), 'status': 'active'}],
             'next': f'/v2/images?marker={number}'}))
        self.assertEnds('has no end', self.listed, client)

    def test_another_structure(self):
        for body in ([], {}, {'images': None}, {'images': {}},
                     {'images': [1]}, {'images': [{}]}, b'{"images": [',
                     b'\xff'):
            client = self.client(lambda _, body=body: page(body))
            self.assertEnds('not from Glance', self.listed, client)

    def test_not_http(self):
        client = self.client(lambda _: iter([b'\0' * 100]))
        self.assertEnds('cannot be reached', self.listed, client)

    def test_many_at_once(self):
        """Threads that wait for headers cannot be ended: they are counted."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.transport._MOST_LATE', 2))
        client = self.client(lambda _: slowly(b'H'))
        for _ in range(2):
            self.assertEnds('within 1 s', self.listed, client)
        self.assertEnds('2 earlier requests', self.listed, client)
