# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Glance with the credentials of a nova.conf as operators write it.

In a process of its own, as options once registered stay.
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import testtools

NOVA_CONF = """
[service_user]
send_service_user_token = true
auth_type = password
auth_url = http://keystone.example/v3
username = nova
password = secret
project_name = service
user_domain_name = Default
project_domain_name = Default
[glance]
{glance}
"""

PROGRAM = """
import sys
from keystoneauth1 import fixture
import nova.conf
import requests_mock
from nova_accel import exception
from nova_accel.bitstream import glance

nova.conf.CONF(['--config-file', sys.argv[1]], project='nova')
token = fixture.V3Token()
token.set_project_scope()
token.add_service('image').add_standard_endpoints(
    public='http://wrong.example', region='other')
token.add_service('image').add_standard_endpoints(
    internal='http://glance.example/v2', region='here')
IMAGE = 'e2b1a1ba-7a4e-4a0c-8a3b-3d9ab0d0a4b7'
with requests_mock.Mocker() as http:
    http.get('http://keystone.example/v3', json={
        'version': fixture.V3Discovery('http://keystone.example/v3')})
    http.post('http://keystone.example/v3/auth/tokens', json=token,
              headers={'X-Subject-Token': 'the token'})
    http.get(f'http://glance.example/v2/images/{IMAGE}', json={
        'id': IMAGE, 'status': 'active', 'owner': 'mine'},
        request_headers={'X-Auth-Token': 'the token'})
    client = glance.service_client()
    glance.check_use(client, IMAGE, 'mine')
    http.post('http://keystone.example/v3/auth/tokens', status_code=401)
    try:
        glance.check_use(glance.service_client(), IMAGE, 'mine')
    except exception.AcceleratorError as error:
        print(error)
"""


class ServiceClientTest(testtools.TestCase):

    def run_with(self, glance):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, 'nova.conf')
            path.write_text(NOVA_CONF.format(glance=glance))
            done = subprocess.run(
                [sys.executable, '-c', PROGRAM, str(path)],
                capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stderr)
        # the wrong password is told in words
        self.assertIn('401', done.stdout)

    def test_endpoint_of_the_catalog(self):
        self.run_with('region_name = here')

    def test_endpoint_of_nova_conf(self):
        self.run_with('api_servers = http://glance.example')


if __name__ == '__main__':
    unittest.main()
