# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams from a real Glance."""

import hashlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import tracemalloc
import uuid

import fixtures
from oslo_config import fixture as config_fixture
import testtools
from testtools import matchers

from nova_accel.bitstream import cache
from nova_accel.bitstream import gbs
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from nova_accel import request as accel_request
from tests import glance_service
from tests.unit import bitstreams

A10_11 = bitstreams.INTERFACE
A10_12 = '69528db6-eb31-577a-8c36-68f9faa081f6'
NLB0 = bitstreams.NLB0
NLB3 = 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'
MIB = 1 << 20

#: a process that fetches an image and prints by how many KiB that raised its
#: peak memory; ru_maxrss would begin with the peak of its parent
FETCH = """
import re, sys
from nova_accel.bitstream import cache, glance
from nova_accel import request
from tests.glance_service import GlanceService

def peak():
    with open('/proc/self/status') as file:
        return int(re.search('VmHWM: *(.*) kB', file.read().replace(
            '\\t', ' ')).group(1))

url, project, id, directory = sys.argv[1:]
client = GlanceService().client(project=project, url=url)
wanted = request.AcceleratorRequest('', 'CUSTOM_ACCELERATOR_FPGA', 1,
                                    bitstream_id=id)
store = cache.BitstreamCache(directory)
_, image = glance.find(client, wanted, None, project)
before = peak()
with store.fetch(client, image):
    print(peak() - before)
"""


def wanted(runtime_programming=True, **kwargs):
    if 'function_id' in kwargs:
        kwargs['function_id'] = model.uuid_hex(kwargs['function_id'])
    return accel_request.AcceleratorRequest(
        group='_ACCEL0', resource_class='CUSTOM_ACCELERATOR_FPGA', amount=1,
        runtime_programming=runtime_programming, **kwargs)


def region(type_=A10_11):
    return model.Region(0, type_ and model.uuid_hex(type_), None)


class GlanceTestBase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.glance = self.useFixture(glance_service.SharedGlance()).service
        self.config = self.useFixture(config_fixture.Config(conf.CONF)).config
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.cache = cache.BitstreamCache(self.directory)
        # what one test uploads is out of sight of the others
        self.project = uuid.uuid4().hex
        self.client = self.glance.client('alice', self.project)

    def upload(self, data=None, name='nlb0', client=None, **properties):
        data = bitstreams.make() if data is None else data
        properties = {f'accel:{k}' if k in (
            'function_id', 'function_name', 'region_type_id') else k: v
            for k, v in properties.items()}
        return self.glance.upload(
            client or self.client, name, data, **properties)

    def find(self, type_=A10_11, client=None, project=None, operators=None,
             **kwargs):
        """The image alone; for a server of the client's project."""
        self.source, image = glance.find(
            client or self.client, wanted(**kwargs),
            region(type_).region_type_uuid, project or self.project,
            operators)
        return image

    def refused(self, what, *parts, **kwargs):
        """find() raises what, in one sentence with the parts."""
        return self.assertSentence(self.assertRaises(
            what, self.find, **kwargs), *parts)

    def assertSentence(self, error, *parts):
        text = str(error)
        self.assertTrue(text.isascii() and text.isprintable(), text)
        self.assertThat(text, matchers.EndsWith('.'))
        for part in parts:
            self.assertIn(part, text)
        # Nova cuts the faults of servers off there
        self.assertLessEqual(len(text), 255, text)
        return error


class FindTest(GlanceTestBase):

    def test_by_image(self):
        record = self.upload()
        self.upload()
        found = self.find(bitstream_id=record['id'])
        self.assertEqual(
            (record['id'], 'nlb0', record['size'],
             'sha512-' + record['os_hash_value']),
            (found.id, found.name, found.size, found.content))
        self.assertIsNone(glance.function_name(found))

    def test_by_image_is_one_request(self):
        record = self.upload()
        before = len(self.glance.requests())
        self.find(bitstream_id=record['id'])
        self.assertEqual([f'GET /v2/images/{record["id"]}'],
                         self.glance.requests()[before:])

    def test_by_image_unknown(self):
        id = str(uuid.uuid4())
        self.refused(exception.BitstreamError, id, 'not visible to',
                     bitstream_id=id)

    def test_by_image_of_another_project(self):
        id = self.upload(visibility='private')['id']
        bob = self.glance.client('bob', 'another')
        self.refused(exception.BitstreamError, id, 'not visible to', 'share',
                     client=bob, project='another', bitstream_id=id)
        # an administrator sees it, and it counts for its project's servers
        root = self.glance.client('root', 'another', 'admin')
        self.assertEqual(id, self.find(client=root, bitstream_id=id).id)
        error = self.refused(
            exception.ImageNotFound, id, 'not visible to the project of the '
            'server', client=root, project='another', bitstream_id=id)
        # as if it did not exist
        missing = str(uuid.uuid4())
        with testtools.ExpectedException(exception.ImageNotFound):
            self.find(client=root, project='another', bitstream_id=missing)
        self.assertNotIn('nlb0', str(error))

    def test_by_image_shared(self):
        id = self.upload(visibility='shared')['id']
        bob = self.glance.client('bob', 'another')
        root = self.glance.client('root', 'third', 'admin')
        self.refused(exception.BitstreamError, id, client=bob,
                     project='another', bitstream_id=id)
        self.client.image_members.create(id, 'another')
        for client in (bob, root):
            self.refused(exception.BitstreamError, id, client=client,
                         project='another', bitstream_id=id)
        bob.image_members.update(id, 'another', 'accepted')
        for client in (bob, root):
            self.assertEqual(id, self.find(
                client=client, project='another', bitstream_id=id).id)

    def test_by_image_of_the_community(self):
        id = self.upload(visibility='community')['id']
        bob = self.glance.client('bob', 'another')
        self.assertEqual(id, self.find(
            client=bob, project='another', bitstream_id=id,
            chosen_by_owner=True).id)
        # any project can make one with the id of an image that is gone
        self.refused(exception.ImageNotFound, id, client=bob,
                     project='another', bitstream_id=id)

    def test_by_image_without_data(self):
        id = self.client.images.create(name='empty').id
        error = self.refused(exception.BitstreamError, id, "('empty')",
                             'queued', bitstream_id=id)
        self.assertFalse(error.elsewhere)

    def test_by_image_deactivated(self):
        id = self.upload()['id']
        root = self.glance.client('root', 'another', 'admin')
        root.images.deactivate(id)
        self.refused(exception.BitstreamError, id, 'deactivated',
                     'reactivate', bitstream_id=id)

    def test_by_image_for_another_region(self):
        id = self.upload(region_type_id=A10_12)['id']
        error = self.refused(exception.IncompatibleBitstream, id, A10_12,
                             A10_11, bitstream_id=id)
        self.assertTrue(error.elsewhere)
        self.assertEqual(id, self.find(type_=A10_12, bitstream_id=id).id)

    def test_by_function(self):
        right = self.upload(function_id=NLB0)['id']
        self.upload(function_id=NLB3)
        self.upload()
        self.assertEqual(right, self.find(function_id=NLB0).id)

    def test_by_function_in_any_spelling(self):
        for spelling in (NLB0, NLB0.upper(), NLB0.replace('-', ''),
                         NLB0.replace('-', '').upper()):
            project = uuid.uuid4().hex
            client = self.glance.client('alice', project)
            right = self.upload(client=client, function_id=spelling)['id']
            self.assertEqual(
                right, self.find(client=client, project=project,
                                 function_id=NLB0).id)

    def test_by_function_name(self):
        right = self.upload(function_name='aes-128', function_id=NLB0)['id']
        self.upload(function_name='aes-256', function_id=NLB3)
        found = self.find(function_name='aes-128')
        self.assertEqual(right, found.id)
        self.assertEqual('aes-128', glance.function_name(found))

    def test_by_function_that_fits(self):
        self.upload(function_id=NLB0, region_type_id=A10_12)
        right = self.upload(function_id=NLB0,
                            region_type_id=A10_11.upper())['id']
        self.assertEqual(right, self.find(function_id=NLB0).id)

    def test_by_function_of_another_region(self):
        id = self.upload(function_id=NLB0, region_type_id=A10_12)['id']
        self.refused(exception.IncompatibleBitstream, id, A10_12, A10_11,
                     function_id=NLB0)

    def test_by_function_none(self):
        self.upload()
        for kwargs in ({'function_id': NLB3}, {'function_name': 'none'}):
            self.refused(exception.BitstreamError, *kwargs.values(),
                         'No image', **kwargs)

    def test_by_function_of_another_project(self):
        self.upload(function_id=NLB0, visibility='private')
        self.refused(exception.BitstreamError, NLB0, function_id=NLB0,
                     client=self.glance.client('bob', 'another'),
                     project='another')

    def test_by_function_of_the_own_project(self):
        """Where the flavor does not let its users choose."""
        function = self.function()
        self.upload(function_id=function, visibility='private')
        for more in ({}, {'operators': self.glance.client(
                'admin', uuid.uuid4().hex, 'admin')}):
            self.refused(exception.BitstreamError, 'No image of the operator',
                         function_id=function, runtime_programming=False,
                         **more)

    def function(self):
        """One that no other test has: administrators see all projects."""
        return str(uuid.uuid4())

    def test_by_function_with_any_token(self):
        """Only what the project of the server may use is counted or named."""
        function = self.function()
        eve = self.glance.client('eve', 'third')
        root = self.glance.client('root', 'another', 'admin')
        ids = []
        for visibility in ('private', 'shared', 'community'):
            for _ in range(2):
                ids.append(self.upload(
                    client=eve, function_id=function,
                    visibility=visibility)['id'])
        for client in (root, self.client):
            error = self.refused(exception.BitstreamError, 'No image',
                                 client=client, function_id=function)
            for id in ids:
                self.assertNotIn(id, str(error))
        own = self.upload(function_id=function, visibility='private')['id']
        for client in (root, self.client):
            self.assertEqual(own, self.find(
                client=client, function_id=function).id)

    def test_by_function_in_order(self):
        """Accepted from others, then the project's own, then the
        operator's."""
        function = self.function()
        root = self.glance.client('root', 'another', 'admin')
        eve = self.glance.client('eve', 'third')
        shared = self.upload(client=eve, function_id=function,
                             visibility='shared')['id']
        eve.image_members.create(shared, self.project)
        self.refused(exception.BitstreamError, 'No image', client=root,
                     function_id=function)
        self.client.image_members.update(shared, self.project, 'accepted')

        def assertFound(id):
            for client in (root, self.client):
                self.assertEqual(id, self.find(
                    client=client, function_id=function).id)
        assertFound(shared)
        assertFound(self.upload(function_id=function)['id'])
        unfit = self.upload(client=root, function_id=function,
                            visibility='public', region_type_id=A10_12)
        self.assertEqual('operator', glance.origin(unfit))
        self.assertNotEqual(unfit['id'], self.find(function_id=function).id)
        assertFound(self.upload(client=root, function_id=function,
                                visibility='public')['id'])

    def test_images_of_the_operator(self):
        """They need not be visible to the user."""
        function = self.function()
        project = uuid.uuid4().hex
        self.config(bitstream_owners=[project], group='accel')
        admin = self.glance.client('admin', project, 'admin')
        own = self.upload(function_id=function)
        self.assertEqual(self.project, glance.origin(own))
        self.assertEqual(own['id'], self.find(
            function_id=function, operators=admin).id)
        # the operator's credentials are for the operator's images
        self.assertIs(self.client, self.source)
        theirs = self.upload(client=admin, function_id=function,
                             visibility='private')
        self.assertEqual('operator', glance.origin(theirs))
        self.assertEqual(own['id'], self.find(function_id=function).id)
        for kwargs in ({'function_id': function},
                       {'bitstream_id': theirs['id']}):
            self.assertEqual(theirs['id'], self.find(
                operators=admin, **kwargs).id)
            self.assertIs(admin, self.source)
        self.refused(exception.BitstreamError, theirs['id'], 'not visible to',
                     bitstream_id=theirs['id'])
        bob = self.glance.client('bob', 'another')
        self.refused(exception.BitstreamError, own['id'], 'not visible to',
                     client=bob, project='another', operators=admin,
                     bitstream_id=own['id'])

    def test_by_function_several(self):
        ids = [self.upload(name=name, function_id=NLB0)['id']
               for name in ('one', 'two')]
        self.refused(exception.BitstreamError, *ids,
                     'accel:bitstream_id', function_id=NLB0)

    def test_by_function_many(self):
        """More than a page of Glance's, of which an error names some."""
        for _ in range(27):
            self.client.images.create(
                name='n', **{'accel:function_id': NLB0})
        self.refused(exception.BitstreamError, 'and 24 more', NLB0,
                     'none is active', function_id=NLB0)

    def test_by_function_not_active(self):
        self.client.images.create(
            name='queued', **{'accel:function_id': NLB0})
        right = self.upload(function_id=NLB0)['id']
        self.assertEqual(right, self.find(function_id=NLB0).id)

    def test_hostile_names(self):
        for name in ('x' * 255, 'a\nb\x1b[31m\u202e'):
            self.upload(name=name, function_id=NLB0)
        self.refused(exception.BitstreamError, function_id=NLB0)

    def test_hostile_function_name(self):
        name = '&limit=1\n"%00/\u00e9'
        right = self.upload(function_name=name)['id']
        self.assertEqual(right, self.find(function_name=name).id)
        self.refused(exception.BitstreamError, function_name=name + 'x')


class NoGlanceTest(GlanceTestBase):
    """Glance does not answer, or not as Glance does."""

    def setUp(self):
        super().setUp()
        self.image = self.upload()['id']

    def unavailable(self, *parts):
        for kwargs in ({'bitstream_id': self.image}, {'function_id': NLB0}):
            error = self.refused(
                exception.GlanceUnavailable, *parts, self.glance.url, **kwargs)
            self.assertTrue(error.elsewhere)

    def test_hangs(self):
        self.config(glance_timeout=1, group='accel')
        for on in (self.image, '/images'):
            with self.glance.fault('hang', on=on):
                kwargs = ({'bitstream_id': self.image} if on == self.image
                          else {'function_id': NLB0})
                start = time.monotonic()
                self.refused(exception.GlanceUnavailable, 'within 1 s',
                             'glance_timeout', self.glance.url, **kwargs)
                # where the option is ignored it takes a minute
                self.assertLess(time.monotonic() - start, 30)

    def test_answers_badly(self):
        for fault, part in (('503', 'No server is available'),
                            ('bare_502', 'proxy'),
                            # or what it is called under eventlet
                            ('reset', 'cannot be reached'),
                            ('login_page', 'text/html')):
            with self.glance.fault(fault, on=''):
                self.unavailable(part)

    def test_another_error_is_handled(self):
        """Python chains it to the error of Glance. The owner does not read it,
        because it may be of another server."""
        gone = self.glance.client(url='http://127.0.0.1:1')
        with self.glance.fault('503', on=''):
            for part, kwargs in (('No server is available', {}),
                                 ('cannot be reached', {'client': gone})):
                try:
                    raise RuntimeError('of another server')
                except RuntimeError:
                    error = self.refused(exception.GlanceUnavailable, part,
                                         bitstream_id=self.image, **kwargs)
                self.assertNotIn('of another server', str(error))

    def test_refused_connection(self):
        # a port that was free a moment ago
        with socket.create_server(('127.0.0.1', 0)) as server:
            url = 'http://127.0.0.1:%s' % server.getsockname()[1]
        client = self.glance.client(url=url)
        # "Connection refused", and ECONNREFUSED under eventlet
        self.refused(exception.GlanceUnavailable, 'cannot be reached', '111',
                     url, client=client, bitstream_id=self.image)

    def test_token_refused(self):
        client = self.glance.client('', '', '')
        error = self.refused(exception.BitstreamError, '(401)', 'token',
                             client=client, bitstream_id=self.image)
        self.assertFalse(error.elsewhere)

    def test_forbidden(self):
        with self.glance.fault('403', on=self.image):
            self.refused(exception.BitstreamError, '(403)', self.image,
                         bitstream_id=self.image)


class FetchTest(GlanceTestBase):

    def fetch(self, id=None, image=None):
        image = image or self.find(bitstream_id=id)
        with self.cache.fetch(self.client, image) as file:
            return pathlib.Path(file.path).read_bytes()

    def fails(self, what, *parts, **kwargs):
        error = self.assertSentence(
            self.assertRaises(what, self.fetch, **kwargs), *parts)
        self.assertEqual([], os.listdir(self.directory))
        self.assertEqual(what is exception.GlanceUnavailable, error.elsewhere)

    def test_data(self):
        for data in (bitstreams.make(), os.urandom(3 * MIB + 1)):
            self.assertEqual(data, self.fetch(self.upload(data)['id']))

    def test_end_to_end(self):
        self.upload(function_id=NLB0, region_type_id=A10_11)
        image = self.find(function_id=NLB0)
        with self.cache.fetch(self.client, image) as file:
            bitstream = gbs.parse(file.path, str(image))
            glance.verify(bitstream, model.uuid_hex(NLB0), image, region())
            self.assertEqual(file.path, bitstream.path)

    def test_hit_is_one_request_for_the_record(self):
        id = self.upload()['id']
        self.fetch(id)
        before = len(self.glance.requests())
        self.assertEqual(bitstreams.make(), self.fetch(id))
        self.assertEqual([f'GET /v2/images/{id}'],
                         self.glance.requests()[before:])

    def test_hit_is_authorized(self):
        """What is in the cache is nobody's who may not see the image."""
        id = self.upload(visibility='private')['id']
        self.fetch(id)
        bob = self.glance.client('bob', 'another')
        self.refused(exception.BitstreamError, 'not visible to', client=bob,
                     bitstream_id=id)

    def test_replaced_image_is_fetched_anew(self):
        """An image never changes; one of the same name is another."""
        first = self.upload(b'first', function_id=NLB0)['id']
        self.assertEqual(b'first', self.fetch(
            image=self.find(function_id=NLB0)))
        self.client.images.delete(first)
        self.upload(b'second', function_id=NLB0)
        self.assertEqual(b'second', self.fetch(
            image=self.find(function_id=NLB0)))

    def test_deleted_after_the_record(self):
        image = self.find(bitstream_id=self.upload()['id'])
        self.client.images.delete(image.id)
        self.fails(exception.BitstreamError, image.id, 'not visible to', 'data',
                   image=image)

    def test_lost_in_the_store(self):
        """The record is there and the file behind it is gone."""
        id = self.upload()['id']
        os.unlink(os.path.join(self.glance.directory, 'images', id))
        # Glance answers 204, as for an image without data
        self.fails(exception.BitstreamError, id, 'without data', id=id)

    def test_damaged_in_the_store(self):
        id = self.upload(b'x' * MIB)['id']
        path = pathlib.Path(self.glance.directory, 'images', id)
        path.write_bytes(b'y' * MIB)
        self.fails(
            exception.BitstreamError, id, 'sha512',
            hashlib.sha512(b'x' * MIB).hexdigest()[:16],
            hashlib.sha512(b'y' * MIB).hexdigest()[:16], id=id)

    def test_damaged_on_the_way(self):
        id = self.upload(b'x' * 3 * MIB)['id']
        for fault, parts in (
                ('flip', ('sha512',)),
                ('truncate', (f'{3 * MIB} bytes', f'sent {3 * MIB // 2}')),
                ('extend', (f'sent {3 * MIB + 1}:',))):
            with self.glance.fault(fault):
                self.fails(exception.BitstreamError, id, *parts, id=id)

    def test_breaks_off(self):
        id = self.upload(b'x' * 3 * MIB)['id']
        with self.glance.fault('close'):
            self.fails(exception.GlanceUnavailable, id, self.glance.url,
                       'stopped sending', f'of {3 * MIB} bytes', id=id)
        with self.glance.fault('reset'):
            self.fails(exception.GlanceUnavailable, id, self.glance.url,
                       id=id)
        with self.glance.fault('503'):
            self.fails(exception.GlanceUnavailable, id, '503', id=id)
        with self.glance.fault('login_page'):
            self.fails(exception.GlanceUnavailable, id, 'text/html', id=id)
        # and after all that it works
        self.assertEqual(b'x' * 3 * MIB, self.fetch(id))

    def test_stalls(self):
        self.config(glance_timeout=1, group='accel')
        id = self.upload(b'x' * 4 * MIB)['id']
        with self.glance.fault('stall'):
            self.fails(exception.GlanceUnavailable, 'stopped sending',
                       'timed out', id=id)
        with self.glance.fault('hang'):
            self.fails(exception.GlanceUnavailable, 'within 1 s', id=id)

    def test_download_forbidden(self):
        id = self.upload()['id']
        with self.glance.fault('403'):
            self.fails(exception.BitstreamError, id, '(403)', id=id)

    def test_too_large_by_its_record(self):
        self.config(bitstream_max_size=1, group='accel')
        self.fetch(self.upload(b'x' * MIB)['id'])
        image = self.find(bitstream_id=self.upload(b'x' * (MIB + 1))['id'])
        before = len(self.glance.requests())
        error = self.assertRaises(
            exception.BitstreamError, self.fetch, image=image)
        self.assertSentence(error, image.id, 'bitstream_max_size', '1 MiB')
        self.assertEqual(before, len(self.glance.requests()))

    def test_too_large_whatever_its_record_says(self):
        self.config(bitstream_max_size=1, group='accel')
        record = dict(self.upload(b'x' * 3 * MIB))
        for size in (None, 1):
            image = glance.Image(
                record['id'], 'x', size,
                f'sha512-{record["os_hash_value"]}', record)
            self.fails(exception.BitstreamError, image=image)

    def test_memory(self):
        """200 MiB go to the disk through a few."""
        path = os.path.join(self.directory, 'large')
        with open(path, 'wb') as file:
            file.write(os.urandom(MIB))
            file.truncate(200 * MIB)
        with open(path, 'rb') as file:
            id = self.upload(file)['id']
        os.unlink(path)
        grown = int(subprocess.run(
            [sys.executable, '-c', FETCH, self.glance.url, self.project, id,
             self.directory], cwd=glance_service.ROOT, check=True,
            stdout=subprocess.PIPE).stdout)
        self.assertLess(grown, 24 << 10)
        name, = (e for e in os.scandir(self.directory) if not e.is_symlink())
        self.assertEqual(200 * MIB, name.stat().st_size)

    def test_memory_of_python(self):
        id = self.upload(os.urandom(MIB) * 20)['id']
        image = self.find(bitstream_id=id)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        with self.cache.fetch(self.client, image):
            self.assertLess(tracemalloc.get_traced_memory()[1], 8 * MIB)


class VerifyTest(testtools.TestCase):
    """What needs no Glance: a file against what it was found by."""

    def verify(self, asked=None, type_=A10_11, function=NLB0, to=A10_11,
               **record):
        image = glance.Image('4711', 'nlb0', 1, 'sha512-00', {
            'accel:' + k: v for k, v in record.items()})
        glance.verify(
            model.Bitstream('/x', model.uuid_hex(type_),
                            function and model.uuid_hex(function), 20, 1),
            asked and model.uuid_hex(asked), image, region(to))

    def refused(self, what, *parts, **kwargs):
        error = self.assertRaises(what, self.verify, **kwargs)
        for part in ('4711', *parts):
            self.assertIn(part, str(error))

    def test_fits(self):
        self.verify()
        self.verify(NLB0, function_id=NLB0.upper(),
                    region_type_id=A10_11.replace('-', ''),
                    function_name='aes-128')
        self.verify(NLB0, function=None,
                    function_id=NLB0)

    def test_another_region_type(self):
        self.refused(exception.IncompatibleBitstream, A10_11, A10_12,
                     to=A10_12)

    def test_region_that_does_not_tell(self):
        self.refused(exception.IncompatibleBitstream,
                     'does not report its region type', to=None)

    def test_another_function(self):
        self.refused(exception.BitstreamError, NLB0, NLB3,
                     asked=NLB3)

    def test_properties_that_lie(self):
        for record in ({'function_id': NLB3}, {'function_id': 'nonsense'},
                       {'region_type_id': A10_12},
                       {'region_type_id': 'nonsense'},
                       {'function_name': 'aes/128'}):
            self.refused(exception.BitstreamError, *record.values(), **record)


class NovaImagesTest(GlanceTestBase):
    """Nova's own client is let in as the user of its context."""

    def test_nova_sees_what_the_user_sees(self):
        from nova import context
        from nova import exception as nova_exception
        from nova.image import glance as nova_glance
        conf.CONF.set_override('api_servers', [self.glance.url], 'glance')
        self.addCleanup(conf.CONF.clear_override, 'api_servers', 'glance')
        record = self.upload(b'a guest', visibility='private')
        users = {project: context.RequestContext(
            'alice', project, roles=['member'], is_admin=False,
            auth_token=self.glance.token('alice', project))
            for project in (self.project, 'another')}
        service = nova_glance.get_default_image_service()
        self.assertEqual('nlb0', service.show(
            users[self.project], record['id'])['name'])
        self.assertEqual(b'a guest', b''.join(service.download(
            users[self.project], record['id'])))
        self.assertRaises(nova_exception.ImageNotFound, service.show,
                          users['another'], record['id'])

        # and its client serves us
        client = nova_glance.GlanceClientWrapper(
            users[self.project], endpoint=self.glance.url).client
        image = self.find(client=client, bitstream_id=record['id'])
        with self.cache.fetch(client, image) as file:
            self.assertEqual(b'a guest',
                             pathlib.Path(file.path).read_bytes())

    def test_context_without_token(self):
        from nova import context
        from nova.image import glance as nova_glance
        record = self.upload()
        client = nova_glance.GlanceClientWrapper(
            context.get_admin_context(), endpoint=self.glance.url).client
        self.refused(exception.BitstreamError, 'no token of a user',
                     client=client, bitstream_id=record['id'])
