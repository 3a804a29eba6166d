# Licensed under the Apache License, Version 2.0. See LICENSE.
"""In place of neutron: says that there are no networks, ports or groups."""

import http.server
import json
import sys


class Handler(http.server.BaseHTTPRequestHandler):

    def do_GET(self):
        path = self.path.partition('?')[0].rstrip('/')
        code, body = 200, {}
        if path in ('', '/v2.0'):
            body = {'versions': [{
                'id': 'v2.0', 'status': 'CURRENT', 'links': [{
                    'rel': 'self',
                    'href': f'http://{self.headers["Host"]}/v2.0/'}]}]}
        elif path.count('/') == 2:
            name = path.rsplit('/', 1)[-1].split('.')[0].replace('-', '_')
            body = {name: []}
        else:
            code, body = 404, {'NeutronError': {
                'type': 'NotFound', 'message': path, 'detail': ''}}
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == '__main__':
    http.server.ThreadingHTTPServer(
        ('0.0.0.0', int(sys.argv[1])), Handler).serve_forever()
