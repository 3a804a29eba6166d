# Licensed under the Apache License, Version 2.0. See LICENSE.
"""As much of Cyborg's API as the scenarios of cyborg-tempest-plugin ask for.

A device profile becomes a file of [accel] device_profiles by "nova-accel import
profiles"; an accelerator request is a claim in "nova-accel claims".
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
from urllib import parse
import uuid

from tests.lab import databases
from tests.lab import processes
from tests.tempest import hosts

PORT = 6666


def accel(*command):
    return subprocess.run(
        [str(word) for word in (databases.BIN / 'nova-accel', *command)],
        # that of the wheel
        env={**os.environ, 'PYTHONPATH': ''}, capture_output=True, text=True)


def profile_file(name) -> pathlib.Path:
    return processes.RUN / f'device_profiles/{name}.yaml'


def requests(server):
    """Return a request for each device that servers, or one server, have."""
    found = []
    for host in hosts.names():
        for claim in hosts.claims(host):
            owner, handle = claim['Server'], claim['Handle']
            if not owner or not handle or server not in (None, owner):
                continue
            at = re.fullmatch(r'(\w{4}):(\w\w):(\w\w)\.(\w)', handle)
            found.append({
                'uuid': str(uuid.uuid5(uuid.NAMESPACE_URL, owner + handle)),
                'instance_uuid': owner, 'hostname': host,
                'state': claim['State'],
                'attach_handle_type': 'PCI' if at else 'MDEV',
                'attach_handle_info': dict(zip(
                    ('domain', 'bus', 'device', 'function'), at.groups(),
                    strict=True)) if at else {'vgpu_mark': handle}})
    return found


def answer(method, path, query, body):
    """Return (status, object) for a request."""
    if path == '/accelerator_requests' and method == 'GET':
        bound = query.get('bind_state') == ['resolved']
        return '200 OK', {'arqs': [
            request for request in requests(query.get('instance', [None])[0])
            if request['state'] == 'Bound' or not bound]}
    if path == '/device_profiles' and method == 'POST':
        profile, = json.loads(body)
        profile['uuid'] = str(uuid.uuid4())
        with tempfile.NamedTemporaryFile('w') as file:
            json.dump({'device_profiles': [profile]}, file)
            file.flush()
            done = accel('import', 'profiles', '--write',
                         *hosts.controller(), file.name)
        if done.returncode:
            return '400 Bad Request', {'error': done.stderr}
        return '201 Created', profile
    name = re.fullmatch('/device_profiles/([-0-9A-Za-z]+)', path)
    if name and method == 'DELETE':
        profile_file(name[1]).unlink()
        return '204 No Content', None
    if not path:
        return '200 OK', {'versions': []}
    return '404 Not Found', {'error': f'{method} {path}'}


def application(environ, start_response):
    body = environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
    status, found = answer(
        environ['REQUEST_METHOD'],
        environ['PATH_INFO'].removeprefix('/v2').rstrip('/'),
        parse.parse_qs(environ['QUERY_STRING']), body)
    text = b'' if found is None else json.dumps(found).encode()
    start_response(status, [('Content-Type', 'application/json'),
                            ('Content-Length', str(len(text)))])
    return [text]
