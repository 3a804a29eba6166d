# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The services that commands ask: Placement itself, and others as given."""

import json
import threading
import uuid

import fixtures
from placement.tests.functional.fixtures import placement
import requests
from wsgi_intercept import interceptor

from tests import cheap

#: Nova's entry of a server
SERVER = {
    'id': '5e5e5e5e-1111-4222-8333-444444444444', 'name': 'web1',
    'status': 'ACTIVE', 'OS-EXT-STS:task_state': None, 'metadata': {},
    'OS-EXT-SRV-ATTR:hypervisor_hostname': 'compute1', 'locked': False,
    'flavor': {'original_name': 'one', 'vcpus': 0, 'ram': 64, 'disk': 20,
               'ephemeral': 0, 'swap': 0, 'extra_specs': {}}}


class Services(fixtures.Fixture):
    """Credentials for Placement, which runs in this process, and for what
    answer() says that Nova and Glance answer."""

    def _setUp(self):
        cheap.placement()
        self.url = self.useFixture(
            placement.PlacementFixture(token='admin')).endpoint
        #: (service, path with query) of each request
        self.asked = []
        #: (method, path, body) of each request to the others that writes
        self.written = []
        self._answers = {}
        self._lock = threading.Lock()
        for name, value in (
                ('OS_AUTH_TYPE', 'admin_token'), ('OS_TOKEN', 'admin'),
                ('OS_ENDPOINT', self.url),
                ('OS_CLIENT_CONFIG_FILE', '/nonexistent'),
                ('OS_PLACEMENT_ENDPOINT_OVERRIDE', self._others('placement')),
                ('OS_COMPUTE_ENDPOINT_OVERRIDE', self._others('nova')),
                ('OS_IMAGE_ENDPOINT_OVERRIDE', self._others('glance'))):
            self.useFixture(fixtures.EnvironmentVariable(name, value))

    def _others(self, name):
        host = f'{name}-{uuid.uuid4()}'
        intercept = interceptor.RequestsInterceptor(
            lambda: lambda *wsgi: self._answer(name, *wsgi), host=host,
            port=80)
        intercept.install_intercept()
        self.addCleanup(intercept.uninstall_intercept)
        return f'http://{host}'

    def answer(self, path, body):
        """What a path with its query begins with -> what is answered; None:
        403. What is not named is answered with 404."""
        self._answers[path] = body

    def _answer(self, name, environ, start_response):
        path = environ['PATH_INFO']
        if environ.get('QUERY_STRING'):
            path += f'?{environ["QUERY_STRING"]}'
        self.asked.append((name, path))
        if environ['REQUEST_METHOD'] != 'GET':
            self.written.append((
                environ['REQUEST_METHOD'], path, json.loads(
                    environ['wsgi.input'].read(
                        int(environ['CONTENT_LENGTH'])))))
        if name == 'placement' and path not in self._answers:
            # its database is in memory
            with self._lock:
                found = requests.get(f'{self.url}{path}', headers={
                    'X-Auth-Token': 'admin', 'OpenStack-API-Version':
                    environ.get('HTTP_OPENSTACK_API_VERSION', '')})
            start_response(f'{found.status_code} {found.reason}', [
                ('Content-Type', 'application/json')])
            return [found.content]
        body = next((body for start, body in self._answers.items()
                     if path.startswith(start)), 404)
        start_response({None: '403 Forbidden', 404: '404 Not Found'}.get(
            body if body in (None, 404) else '', '200 OK'),
            [('Content-Type', 'application/json')])
        return [json.dumps(body if isinstance(body, dict) else {}).encode()]

    # Placement

    def _put(self, url, body):
        answer = requests.put(f'{self.url}{url}', json=body, headers={
            'X-Auth-Token': 'admin', 'OpenStack-API-Version':
            'placement 1.36'})
        answer.raise_for_status()

    def provider(self, name, parent=None, inventory=None, traits=()):
        """Create one and return its uuid.

        :param inventory: class -> total, or total and reserved.
        """
        created = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
        answer = requests.post(
            f'{self.url}/resource_providers', json={
                'name': name, 'uuid': created,
                **({'parent_provider_uuid': parent} if parent else {})},
            headers={'X-Auth-Token': 'admin', 'OpenStack-API-Version':
                     'placement 1.36'})
        answer.raise_for_status()
        inventories = {}
        for resource_class, numbers in (inventory or {}).items():
            if resource_class.startswith('CUSTOM_'):
                self._put(f'/resource_classes/{resource_class}', None)
            total, reserved = (numbers if isinstance(numbers, tuple)
                               else (numbers, 0))
            inventories[resource_class] = {
                'total': total, 'reserved': reserved}
        url = f'/resource_providers/{created}'
        self._put(f'{url}/inventories', {
            'resource_provider_generation': 0, 'inventories': inventories})
        self.set_traits(created, traits)
        return created

    def set_traits(self, provider, traits, generation=1):
        """:param generation: 1 right after provider() without traits."""
        for trait in traits:
            if trait.startswith('CUSTOM_'):
                self._put(f'/traits/{trait}', None)
        self._put(f'/resource_providers/{provider}/traits', {
            'resource_provider_generation': generation,
            'traits': sorted(traits)})

    def allocate(self, consumer, provider, **resources):
        self._put(f'/allocations/{consumer}', {
            'allocations': {provider: {'resources': resources}},
            'project_id': 'p', 'user_id': 'u', 'consumer_generation': None})
