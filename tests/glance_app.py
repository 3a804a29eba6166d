# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A real Glance API in one process: ``python -m tests.glance_app <directory>``.

The directory holds glance-api.conf; the port goes into its file ``port`` once
requests are answered. The process ends when its standard input does, so that
it never outlives who started it. tests.glance_service starts it.
"""

import json
import os
import socket
import socketserver
import struct
import sys
import threading
import time
from wsgiref import simple_server

#: seconds for which a fault that never answers lasts
FOREVER = 3600


def identity_filter(global_conf, **local_conf):
    """Paste filter: the token '<user>:<project>:<role>,<role>' is that user.

    It sets what keystonemiddleware would, so that Glance's own context and
    policy decide what the user may. Any other token is one that has expired.
    """
    def filter_(app):
        def identified(environ, start_response):
            for key in ('USER_ID', 'PROJECT_ID', 'ROLES', 'IDENTITY_STATUS'):
                environ.pop('HTTP_X_' + key, None)
            parts = environ.get('HTTP_X_AUTH_TOKEN', '').split(':')
            if len(parts) == 3 and all(parts):
                environ.update(
                    HTTP_X_USER_ID=parts[0], HTTP_X_PROJECT_ID=parts[1],
                    HTTP_X_ROLES=parts[2], HTTP_X_IDENTITY_STATUS='Confirmed')
            return app(environ, start_response)
        return identified
    return filter_


class Faults:
    """Spoils the answers to requests as the file faults.json says.

    The file holds {"on": <end of the path>, "do": <fault>}; the faults are the
    methods whose names begin with do_.
    """

    def __init__(self, app, path):
        self.app = app
        self.path = path

    def __call__(self, environ, start_response):
        try:
            with open(self.path) as file:
                fault = json.load(file)
        except FileNotFoundError:
            return self.app(environ, start_response)
        if not environ['PATH_INFO'].endswith(fault['on']):
            return self.app(environ, start_response)
        return getattr(self, 'do_' + fault['do'])(environ, start_response)

    def do_hang(self, environ, start_response):
        time.sleep(FOREVER)

    def do_503(self, environ, start_response):
        start_response('503 Service Unavailable',
                       [('Content-Type', 'text/html')])
        return [b'<html><h1>No server is available</h1></html>']

    def do_bare_502(self, environ, start_response):
        start_response('502 Bad Gateway', [])
        return [b'broken']

    def do_403(self, environ, start_response):
        start_response('403 Forbidden', [('Content-Type', 'text/plain')])
        return [b'You are not authorized to complete download_image action.']

    def do_login_page(self, environ, start_response):
        start_response('200 OK', [('Content-Type', 'text/html')])
        return [b'<html>Please log in</html>']

    def do_reset(self, environ, start_response):
        environ['tests.connection'].setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        environ['tests.connection'].close()
        raise ConnectionResetError

    def _half(self, environ, start_response):
        """The first half of the true answer, under the true headers."""
        started = []

        def start(status, headers, exc_info=None):
            started[:] = status, headers
            return start_response(status, headers, exc_info)
        body = b''.join(self.app(environ, start))
        yield body[:len(body) // 2]

    def do_close(self, environ, start_response):
        yield from self._half(environ, start_response)
        raise ConnectionAbortedError

    def do_stall(self, environ, start_response):
        yield from self._half(environ, start_response)
        time.sleep(FOREVER)

    def _changed(self, environ, start_response, change):
        answer = []

        def start(status, headers, exc_info=None):
            answer[:] = status, headers
        body = change(b''.join(self.app(environ, start)))
        status, headers = answer
        headers = [h for h in headers if h[0].lower() != 'content-length']
        start_response(status, headers + [('Content-Length', str(len(body)))])
        return [body]

    def do_truncate(self, environ, start_response):
        return self._changed(environ, start_response,
                             lambda body: body[:len(body) // 2])

    def do_extend(self, environ, start_response):
        return self._changed(environ, start_response,
                             lambda body: body + b'x')

    def do_flip(self, environ, start_response):
        return self._changed(environ, start_response,
                             lambda body: body[:-1] + bytes([body[-1] ^ 1]))


class Chunked:
    """The body of a request in chunks, which wsgiref leaves to us."""

    def __init__(self, file):
        self.file = file
        self.close = file.close
        self.left = 0
        self.ended = False

    def read(self, size=-1):
        parts = []
        while not self.ended and size != 0:
            if not self.left:
                self.left = int(self.file.readline().split(b';')[0], 16)
                if not self.left:
                    self.file.readline()
                    self.ended = True
                    break
            part = self.file.read(
                self.left if size < 0 else min(size, self.left))
            if not part:
                raise ConnectionAbortedError
            parts.append(part)
            self.left -= len(part)
            if not self.left:
                self.file.readline()
            if size > 0:
                size -= len(part)
        return b''.join(parts)


class Handler(simple_server.WSGIRequestHandler):

    def get_environ(self):
        environ = super().get_environ()
        environ['tests.connection'] = self.connection
        if isinstance(self.rfile, Chunked):
            environ['wsgi.input_terminated'] = True
        return environ

    def parse_request(self):
        parsed = super().parse_request()
        if parsed:
            # before the answer, so that who has it finds the request here
            path = os.path.join(self.server.directory, 'requests')
            with open(path, 'a') as file:
                file.write(f'{self.command} {self.path}\n')
        if parsed and self.headers.get('Transfer-Encoding') == 'chunked':
            self.rfile = Chunked(self.rfile)
        return parsed

    def log_request(self, code='-', size='-'):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass  # the client went away


class Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self):
        # HTTPServer's would look its own name up in DNS
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address
        self.setup_environ()


def die_with_parent():
    sys.stdin.buffer.read()
    os._exit(0)


def main():
    directory = os.path.abspath(sys.argv[1])
    threading.Thread(target=die_with_parent, daemon=True).start()
    os.environ['OS_GLANCE_CONFIG_DIR'] = directory

    from glance.common import wsgi_app
    from glance.db.sqlalchemy import api
    from glance.db.sqlalchemy import models
    from glance.db.sqlalchemy import models_metadef
    from tests import cheap_process
    from tests import cheap_services
    cheap_services.databases()
    cheap_services.schemas()
    app = wsgi_app.init_app()
    models.BASE.metadata.create_all(api.get_engine())
    models_metadef.BASE_DICT.metadata.create_all(api.get_engine())

    cheap_process.collector()
    server = Server(('127.0.0.1', 0), Handler)
    server.directory = directory
    server.set_app(Faults(app, os.path.join(directory, 'faults.json')))
    path = os.path.join(directory, 'port')
    with open(path + '.new', 'w') as file:
        file.write(str(server.server_port))
    os.rename(path + '.new', path)
    server.serve_forever()


if __name__ == '__main__':
    main()
