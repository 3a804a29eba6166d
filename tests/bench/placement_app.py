# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Serve Placement over HTTP from a process of its own.

``python -m tests.bench.placement_app URL`` prints its address and serves the
database at a URL of SQLAlchemy, without authentication, for
tests.bench.providers.
"""

import socketserver
import sys
from wsgiref import simple_server

from oslo_config import cfg
from placement import conf
from placement import db_api
from placement import deploy
from placement import policy


class Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True


class Handler(simple_server.WSGIRequestHandler):

    def log_message(self, *args):
        """Log nothing."""


def main(url):
    config = cfg.ConfigOpts()
    conf.register_opts(config)
    config.set_override('connection', url, 'placement_database')
    config.set_override('auth_strategy', 'noauth2', 'api')
    config([], default_config_files=[], default_config_dirs=[])
    db_api.configure(config)
    policy.init(config)
    server = simple_server.make_server(
        '127.0.0.1', 0, deploy.loadapp(config), Server, Handler)
    print(f'http://127.0.0.1:{server.server_port}', flush=True)
    server.serve_forever()


if __name__ == '__main__':
    main(*sys.argv[1:])
