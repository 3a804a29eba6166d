# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python -m tests.buyer.judge SUITE PYTHON: the suite's verdict on a cloud.

nova-api and Placement of the functional tests answer at sockets, because each
step of the suite is a process. The suite runs three times: for the life of a
server; for the whole cloud after it; and for the whole cloud with a GPU that is
not well, which rows for health have to report.
"""

# chooses the threading mode, and so comes before the rest of Nova
from tests import functional  # noqa: F401

import logging
import os
import pathlib
import socketserver
import subprocess
import sys
import threading
import unittest
from wsgiref import simple_server
from xml.etree import ElementTree

import requests

from tests import buyer
from tests.buyer import guest
from tests.functional import operations
from tests.functional import process
from tests.nova import suites

BIN = pathlib.Path(sys.executable).parent
GPU, DISK = '0000:5e:00.0', '0000:81:00.0'
CONFIGURATION = '''
[accel]
enabled_drivers = gpu,nvme
include_devices = address=*
'''
#: run -> files of steps
RUNS = {'vm': ('vm.yaml', 'simulated.yaml'), 'fleet': ('fleet.yaml',),
        'sick': ('fleet.yaml',)}
#: what has to fail in a run
WRONG = {'sick': {'HostHealthCheck'}}


class Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True


class Quiet(simple_server.WSGIRequestHandler):

    def log_message(self, *args):
        pass


def forward(endpoint):
    """Return an application that asks the endpoint, which this process has."""
    def application(environ, start_response):
        answer = requests.request(
            environ['REQUEST_METHOD'],
            endpoint + environ['PATH_INFO'] + '?' + environ['QUERY_STRING'],
            data=environ['wsgi.input'].read(
                int(environ.get('CONTENT_LENGTH') or 0)),
            headers={'Content-Type': environ['CONTENT_TYPE'], **{
                name.removeprefix('HTTP_').replace('_', '-'): value
                for name, value in environ.items()
                if name.startswith('HTTP_')}}, allow_redirects=False)
        start_response(f'{answer.status_code} {answer.reason}', [
            (name, value) for name, value in answer.headers.items()
            if name.lower() not in ('connection', 'transfer-encoding')])
        return [answer.content]
    return application


def results(report):
    """Return row -> '' if it passed, or (kind, message)."""
    return {case.get('name'): next((
        (part.tag, part.get('message')) for part in case
        if part.tag in ('failure', 'error', 'skipped')), '')
        for case in ElementTree.parse(report).iter('testcase')
        # parts of a row have two names
        if '::' not in case.get('name')}


def faults(run, rows, permitted):
    """Return what is wrong with the results of a run."""
    found = [f'{run}: {p.pattern.pattern} of permitted.txt finds no row'
             for p in permitted if not any(map(p.pattern.fullmatch, rows))]
    for name, result in rows.items():
        kind, text = result or ('passed', '')
        wanted = ('failure' if name in WRONG.get(run, ()) else
                  'skipped' if any(p.pattern.fullmatch(name)
                                   for p in permitted) else 'passed')
        if kind != wanted:
            found.append(f'{run}: {name} {kind}, not {wanted}: {text}')
    return found


class Suite(operations.OperationsTestBase):
    """Two hosts, with a GPU and an NVMe disk each."""

    FRESH_CLOUD = True
    #: seconds; each step of the suite imports openstacksdk, on a loaded machine
    LIMIT = 3600
    HOSTS = {host: {'gpus': [{'address': GPU, 'iommu_group': 7,
                              'reset_method': 'flr bus'}],
                    'nvmes': [{'address': DISK}]}
             for host in ('compute1', 'compute2')}
    #: checkout of the suite, and the Python that runs it
    checkout = python = ''

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['gpu', 'nvme'], health=['act'],
                   group='accel')

    def runTest(self):
        self.boots = self.useFixture(guest.Boots())
        guest.serve(self)
        self.become_operator()
        self.endpoints = {
            name: self.serve(os.environ[name]) for name in (
                'OS_PLACEMENT_ENDPOINT_OVERRIDE',
                'OS_COMPUTE_ENDPOINT_OVERRIDE')}
        # which says there what versions it has
        self.endpoints['OS_IMAGE_ENDPOINT_OVERRIDE'] = self.glance.service.url
        flavor = self._create_flavor(name='gpu', extra_spec={
            'resources1:CUSTOM_ACCELERATOR_GPU': '1',
            'resources2:CUSTOM_ACCELERATOR_SSD': '1', 'group_policy': 'none'})
        found = self.judge('vm')
        self.assertEqual([], self.claims())
        self.report()
        found += self.judge('fleet')
        server = self._create_server(
            flavor_id=flavor, networks='none',
            image_uuid=self.glance.guest_image, expected_state='ACTIVE')
        self.sicken(server)
        found += self.judge('sick')
        for line in found:
            print(line)
        self.assertEqual([], found)

    def serve(self, endpoint):
        server = simple_server.make_server(
            '127.0.0.1', 0, forward(endpoint.removesuffix('/v2.1')), Server,
            Quiet)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tail = '/v2.1' if endpoint.endswith('/v2.1') else ''
        return f'http://127.0.0.1:{server.server_port}{tail}'

    def sicken(self, server):
        """Have the GPU of a server run at a part of its link's width."""
        host = server['OS-EXT-SRV-ATTR:host']
        looks = self.parts(host).inventory.looks
        looks.run()
        self.kernel(host).set_fault(GPU, attributes={
            'current_link_width': '8'})
        looks.run()
        process.until(lambda: self.assertTrue(any(
            name.endswith(':health') for name in self.api.get_server(
                server['id'])['metadata'])))
        self.report()

    def judge(self, run):
        """Run the suite; return what is wrong."""
        permitted = suites.exclusions(
            run, buyer.HERE / 'permitted.txt', RUNS)
        report = buyer.HOME / f'{run}.xml'
        report.unlink(missing_ok=True)
        with open(buyer.HOME / f'{run}.log', 'w') as log:
            subprocess.run(
                [self.python, '-m', 'isvctl.main', 'test', 'run',
                 *(word for file in RUNS[run]
                   for word in ('-f', buyer.HERE / file)), '--no-upload',
                 '--no-user-config', '--junitxml', report,
                 *self.settings(interval=1, journals=self.journals())],
                cwd=self.checkout, stdout=log, stderr=log, env=self.environ())
        rows = results(report)
        passed = sum(not result for result in rows.values())
        print(f'{run}: {passed} of {len(rows)} rows pass', flush=True)
        return faults(run, rows, permitted)

    @staticmethod
    def settings(**values):
        for name, value in values.items():
            yield '--set'
            yield f'tests.settings.{name}={value}'

    def environ(self):
        source = pathlib.Path(self.checkout)
        return {**os.environ, **self.endpoints,
                'PATH': f'{BIN}:{os.environ["PATH"]}',
                'PYTHONPATH': ':'.join(
                    str(source / name / 'src')
                    for name in ('isvctl', 'isvtest', 'isvreporter'))}

    def journals(self):
        """Write what query_sanitization() reads, as operators do."""
        directory = pathlib.Path(self.directory) / 'journals'
        directory.mkdir(exist_ok=True)
        config = directory / 'nova.conf'
        config.write_text(CONFIGURATION)
        for host in self.HOSTS:
            for command, options in (('handovers', ()), ('discover', (
                    '--simulated-host', f'{self.hosts}/{host}.yaml'))):
                with open(directory / f'{host}.{command}.json', 'w') as file:
                    subprocess.run(
                        [BIN / 'nova-accel', command, '-f', 'json', *options,
                         '--config-file', config,
                         '--store', self.parts(host).store.path],
                        stdout=file, check=True)
        return directory


def main(checkout, python):
    logging.disable(logging.INFO)
    Suite.checkout, Suite.python = checkout, python
    result = unittest.TextTestRunner().run(Suite())
    return not result.wasSuccessful()


if __name__ == '__main__':
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    # threads of connections must not keep the process
    os._exit(status)
