# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A real Glance for tests and trials: its API, SQLite, a directory of images.

As a fixture::

    glance = self.useFixture(GlanceService())
    alice = glance.client('alice', 'alpha')
    image = glance.upload(alice, 'nlb0', data, **{'accel:function_id': ...})

It needs neither Keystone nor root. A token is '<user>:<project>:<roles>' with
roles separated by commas, see tests.glance_app. For a whole Nova set
``[glance] api_servers`` to ``.url``; NovaTokens gives the requests of Nova's
functional test harness such a token.
"""

import atexit
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import fixtures
from glanceclient.v2 import client as glance_client
from keystoneauth1 import session as ks_session
from keystoneauth1 import token_endpoint
from testtools import content

from tests import limits

#: where the package tests lies
ROOT = pathlib.Path(__file__).parent.parent
#: seconds; a loaded machine needs many of them
START_TIMEOUT = 300

CONF = """
[DEFAULT]
enabled_backends = images:file
debug = {debug}
[glance_store]
default_backend = images
[images]
filesystem_store_datadir = {directory}/images
[os_glance_staging_store]
filesystem_store_datadir = {directory}/staging
[os_glance_tasks_store]
filesystem_store_datadir = {directory}/tasks
[database]
connection = sqlite:///{directory}/glance.sqlite
sqlite_synchronous = false
[paste_deploy]
config_file = {directory}/paste.ini
"""

PASTE = """
[pipeline:glance-api]
pipeline = versionnegotiation identity context rootapp
[composite:rootapp]
paste.composite_factory = glance.api:root_app_factory
/: apiversions
/v2: apiv2app
[app:apiversions]
paste.app_factory = glance.api.versions:create_resource
[app:apiv2app]
paste.app_factory = glance.api.v2.router:API.factory
[filter:versionnegotiation]
paste.filter_factory = glance.api.middleware.version_negotiation:\
VersionNegotiationFilter.factory
[filter:context]
paste.filter_factory = glance.api.middleware.context:ContextMiddleware.factory
[filter:identity]
paste.filter_factory = tests.glance_app:identity_filter
"""


class GlanceService(fixtures.Fixture):
    """Runs Glance on a loopback port until the fixture is cleaned up.

    ``url`` is its endpoint without version, ``pid`` that of its process.
    """

    def __init__(self, directory: str | None = None, debug: bool = False):
        """:param directory: an empty one for all of Glance's data, which stay;
            by default a temporary one.
        """
        super().__init__()
        self._directory = directory
        self._debug = debug

    def _setUp(self):
        self.directory = self._directory or self.useFixture(
            fixtures.TempDir()).path
        for name, text in (('glance-api.conf', CONF), ('paste.ini', PASTE)):
            self._write(name, text.format(
                directory=self.directory, debug=self._debug))
        for name in ('images', 'staging', 'tasks'):
            os.makedirs(os.path.join(self.directory, name), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, 'port'))
        path = os.path.join(self.directory, 'output')
        self.addDetail('glance', content.content_from_file(path))
        with open(path, 'wb') as output:
            # the child dies when the other end of its standard input closes
            process = subprocess.Popen(
                [sys.executable, '-m', 'tests.glance_app', self.directory],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=output, stderr=output)
        self.pid = process.pid
        # of a cloud, which goes on after a test
        limits.PROCESSES.add(self.pid)
        self.addCleanup(self._stop, process)
        self.url = f'http://127.0.0.1:{self._port(process)}'

    def _write(self, name, text):
        with open(os.path.join(self.directory, name), 'w') as file:
            file.write(text)

    def _read(self, name):
        with open(os.path.join(self.directory, name)) as file:
            return file.read()

    def _port(self, process):
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                return self._read('port')
            time.sleep(0.02)
        raise RuntimeError(
            f'Glance did not start (exit status {process.poll()}): '
            f'{self._read("output")}')

    @staticmethod
    def _stop(process):
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @staticmethod
    def token(user, project, roles='reader,member'):
        return f'{user}:{project}:{roles}'

    def client(self, user='alice', project='alpha', roles='reader,member',
               url=None) -> glance_client.Client:
        """A client made as Nova makes it: session and endpoint override."""
        auth = token_endpoint.Token(
            url or self.url, self.token(user, project, roles))
        return glance_client.Client(
            session=ks_session.Session(), auth=auth,
            endpoint_override=url or self.url)

    @staticmethod
    def upload(client, name, data, **properties):
        """Make an active image.

        :param data: bytes or a file open for reading.
        :param properties: attributes and properties of the image; raw and
            bare unless given.
        :returns: the image's record, a dict.
        """
        properties = {'disk_format': 'raw', 'container_format': 'bare',
                      **properties}
        if isinstance(data, bytes):
            data = io.BytesIO(data)
        image = client.images.create(name=name, **properties)
        client.images.upload(image.id, data)
        return dict(client.images.get(image.id))

    @contextlib.contextmanager
    def fault(self, do, on='/file'):
        """While in the context, spoil the answers to some requests.

        :param do: a fault of tests.glance_app.Faults.
        :param on: the end of the paths of the requests, by default those for
            the data of images.
        """
        self._write('faults.json.new', json.dumps({'do': do, 'on': on}))
        path = os.path.join(self.directory, 'faults.json')
        os.rename(path + '.new', path)
        try:
            yield
        finally:
            os.unlink(path)

    def requests(self) -> list[str]:
        """'<method> <path>' of each request up to now."""
        try:
            return self._read('requests').splitlines()
        except FileNotFoundError:
            return []

    def forget_requests(self):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, 'requests'))


class SharedGlance(fixtures.Fixture):
    """One Glance for all tests of this process, without images for each.

    ``service`` is the Glance, ``client`` that of its administrator. Starting
    one takes as long as several requests of Nova.
    """

    #: the one that runs
    _running = None
    #: of this process; during a test tempfile makes what ends with the test
    _top = tempfile.gettempdir()

    def _setUp(self):
        if not SharedGlance._running:
            directory = tempfile.mkdtemp(dir=self._top)
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            service = GlanceService(directory)
            service.setUp()
            atexit.register(service.cleanUp)
            SharedGlance._running = service
        self.service = self._running
        self.client = self.service.client('operator', 'operators',
                                          'admin,member,reader')
        self.addDetail('glance', self.service.getDetails()['glance'])
        self.addCleanup(self._empty)

    def _empty(self):
        for image in self.client.images.list():
            self.client.images.delete(image.id)
        self.service.forget_requests()


class NovaTokens(fixtures.Fixture):
    """Tokens for the requests of Nova's functional test harness.

    Its OSAPIFixture makes contexts that have no token, with which Nova's
    Glance client asks nothing at all. Use this fixture after that one.
    """

    def _setUp(self):
        from nova.api import auth
        create = auth.NovaKeystoneContext._create_context

        def with_token(env, **kwargs):
            context = create(env, **kwargs)
            context.auth_token = GlanceService.token(
                context.user_id, context.project_id, ','.join(context.roles))
            return context
        self.useFixture(fixtures.MonkeyPatch(
            'nova.api.auth.NovaKeystoneContext._create_context',
            staticmethod(with_token)))
