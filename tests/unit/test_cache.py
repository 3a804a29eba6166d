# Licensed under the Apache License, Version 2.0. See LICENSE.

import concurrent.futures
import contextlib
import hashlib
import http.server
import os
import pathlib
import resource
import shutil
import threading
import time
import uuid

import fixtures
from glanceclient.v2 import client as glance_client
from keystoneauth1 import session as ks_session
from keystoneauth1 import token_endpoint
from oslo_config import fixture as config_fixture
import testtools
from testtools import matchers

from nova_accel.bitstream import cache
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from tests.unit import configured

MIB = 1 << 20


def client_of(url):
    return glance_client.Client(
        session=ks_session.Session(), endpoint_override=url,
        auth=token_endpoint.Token(url, 'token'))


def image_of(id, content, size):
    return glance.Image(id=id, name='nlb0', size=size, content=content,
                        entry={})


class NeededTest(configured.TestCase):
    """What others do in the cache costs no server its bitstream."""

    def setUp(self):
        super().setUp()
        self.config.config(bitstream_cache_size=2, group='accel')
        self.server = self.useFixture(DataServer())
        self.client = client_of(self.server.url)
        self.needed = []
        self.cache = cache.BitstreamCache(
            self.useFixture(fixtures.TempDir()).path, lambda: self.needed)

    def image(self, data, id=None):
        id = id or str(uuid.uuid4())
        self.server.data[id] = data
        return image_of(id, f'sha256-{hashlib.sha256(data).hexdigest()}',
                        len(data))

    def use(self, image):
        with self.cache.fetch(self.client, image):
            pass

    def is_there(self, image):
        return os.path.exists(self.cache._path(image.content))

    def test_what_a_server_has_stays(self):
        mine = self.image(b'm' * MIB)
        self.use(mine)
        self.needed.append(mine.id)
        others = [self.image(bytes([n]) * MIB) for n in range(4)]
        for other in others:
            self.use(other)
        self.assertTrue(self.is_there(mine))
        self.assertEqual([False, False, False, True],
                         [self.is_there(o) for o in others])

    def test_many_small_ones(self):
        """They fit into the size, and each use of the cache would look at all
        of them, for every server of the host."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.cache._MOST', 3))
        mine = self.image(b'mine')
        self.needed.append(mine.id)
        for image in (mine, *(self.image(b'%d' % n) for n in range(9))):
            with self.cache.fetch(self.client, image):
                pass
        names = os.listdir(self.cache.directory)
        self.assertEqual(6, len(names), names)
        self.assertIn(mine.content, names)
        with self.cache.by_image(mine.id, mine.content):
            pass

    def test_downloads_under_way_count(self):
        self.server.go_on.clear()
        images = [self.image(bytes([n]) * MIB) for n in range(3)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = [pool.submit(self.use, image) for image in images[:2]]
            try:
                while len(self.cache._under_way) < 2:
                    time.sleep(0.01)
                # it waits, and does not begin
                last = pool.submit(self.use, images[2])
                self.assertRaises(concurrent.futures.TimeoutError,
                                  last.result, 0.2)
                self.assertEqual(2, len(self.server.downloads))
            finally:
                self.server.go_on.set()
            for future in (*first, last):
                future.result()
        self.assertEqual({}, self.cache._under_way)
        self.assertEqual(3, len(self.server.downloads))

    def test_id_that_was_purged_and_chosen_again(self):
        genuine = self.image(b'genuine')
        self.use(genuine)
        self.use(self.image(b'trojan', genuine.id))
        with self.cache.by_image(genuine.id, genuine.content) as file:
            self.assertEqual(b'genuine', pathlib.Path(file.path).read_bytes())
        self.assertRaises(
            exception.BitstreamError,
            self.cache.by_image(genuine.id, '').__enter__)


class DataServer(fixtures.Fixture):
    """Serves the data of images over HTTP as Glance does, and counts."""

    def _setUp(self):
        self.data = {}
        self.downloads = []
        #: cleared, an answer stops in its middle until it is set
        self.go_on = threading.Event()
        self.go_on.set()
        fixture = self

        class Handler(http.server.BaseHTTPRequestHandler):

            def do_GET(self):
                id = self.path.split('/')[-2]
                data = fixture.data[id]
                fixture.downloads.append(id)
                self.send_response(200)
                self.send_header('Content-Type', 'application/octet-stream')
                self.send_header('Content-Length', str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(data[:len(data) // 2])
                    fixture.go_on.wait()
                    self.wfile.write(data[len(data) // 2:])

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{server.server_port}'
        thread = threading.Thread(
            target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        self.addCleanup(server.server_close)
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)
        self.addCleanup(self.go_on.set)

    def image(self, data, size=None, id=None):
        id = id or str(uuid.uuid4())
        self.data[id] = data
        return image_of(id, 'sha512-' + hashlib.sha512(data).hexdigest(),
                        len(data) if size is None else size)


class CacheTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF)).config
        self.server = self.useFixture(DataServer())
        self.client = client_of(self.server.url)
        self.directory = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'a', 'cache')
        self.cache = cache.BitstreamCache(self.directory)

    def use(self, image):
        with self.cache.fetch(self.client, image) as file:
            return pathlib.Path(file.path).read_bytes()

    def contents(self):
        """The names of what the directory holds, without the links."""
        return {e.name for e in os.scandir(self.directory)
                if not e.is_symlink()}

    def age(self, image, seconds):
        then = time.time() - seconds
        os.utime(os.path.join(self.directory, image.content), (then, then))

    def test_downloaded_once(self):
        image = self.server.image(b'x' * 100)
        with self.cache.fetch(self.client, image) as file:
            self.assertEqual(image.content, file.content)
            self.assertEqual(os.path.join(self.directory, image.content),
                             file.path)
        self.assertEqual([b'x' * 100] * 2,
                         [self.use(image), self.use(image)])
        self.assertEqual([image.id], self.server.downloads)

    def test_same_content_of_two_images(self):
        images = [self.server.image(b'x' * 100) for _ in range(2)]
        for image in images:
            self.use(image)
        self.assertEqual([images[0].id], self.server.downloads)
        for image in images:
            with self.cache.by_image(image.id, image.content) as file:
                self.assertEqual(image.content, file.content)

    def test_private(self):
        self.use(self.server.image(b'x'))
        modes = {os.stat(path).st_mode & 0o77 for path in (
            self.directory, *(os.path.join(self.directory, name)
                              for name in self.contents()))}
        self.assertEqual({0}, modes)

    def test_least_recently_used_goes_first(self):
        self.config(bitstream_cache_size=3, group='accel')
        old, older, new = (self.server.image(bytes([i]) * MIB)
                           for i in range(3))
        for image in (old, older, new):
            self.use(image)
        self.age(old, 100)
        self.age(older, 200)
        last = self.server.image(b'z' * MIB)
        self.use(last)
        self.assertEqual({old.content, new.content, last.content},
                         self.contents())

    def test_use_makes_young(self):
        self.config(bitstream_cache_size=2, group='accel')
        first, second = (self.server.image(bytes([i]) * MIB)
                         for i in range(2))
        for image in (first, second):
            self.use(image)
            self.age(image, 100)
        self.use(first)
        last = self.server.image(b'z' * MIB)
        self.use(last)
        self.assertEqual({first.content, last.content}, self.contents())

    def test_in_use_is_not_evicted(self):
        self.config(bitstream_cache_size=1, group='accel')
        first, second = (self.server.image(bytes([i]) * MIB)
                         for i in range(2))
        with self.cache.fetch(self.client, first) as file:
            self.age(first, 100)
            self.use(second)
            self.assertEqual(bytes(MIB),
                             pathlib.Path(file.path).read_bytes())
        # only then, and it was the last to go out of use
        self.assertThat(self.contents(), matchers.HasLength(1))

    def test_size_zero_keeps_nothing(self):
        self.config(bitstream_cache_size=0, group='accel')
        image = self.server.image(b'x' * 100)
        self.assertEqual(b'x' * 100, self.use(image))
        self.assertEqual(set(), self.contents())
        self.assertEqual(b'x' * 100, self.use(image))

    def test_nothing_kept_after_an_error_of_the_user(self):
        self.config(bitstream_cache_size=0, group='accel')
        image = self.server.image(b'x' * 100)

        def fail():
            with self.cache.fetch(self.client, image):
                raise ZeroDivisionError
        self.assertRaises(ZeroDivisionError, fail)
        self.assertEqual(set(), self.contents())

    def test_threads_download_once(self):
        image = self.server.image(b'x' * MIB)
        self.server.go_on.clear()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(self.use, image) for _ in range(8)]
            time.sleep(0.3)
            self.assertEqual([False] * 8, [f.done() for f in futures])
            self.server.go_on.set()
            results = {f.result(20) for f in futures}
        self.assertEqual({b'x' * MIB}, results)
        self.assertEqual([image.id], self.server.downloads)
        self.assertEqual({image.content}, self.contents())

    def test_who_waits_has_a_limit(self):
        """A download that does not end keeps no other caller for ever."""
        image = self.server.image(b'x' * MIB)
        self.server.go_on.clear()
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self.addCleanup(pool.shutdown)
        self.addCleanup(self.server.go_on.set)
        downloads = pool.submit(self.use, image)
        while not self.server.downloads:
            time.sleep(0.01)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.glance.download_seconds', lambda: 0.1))
        log = self.useFixture(fixtures.FakeLogger())
        waiting = cache.BitstreamCache.fetch(
            self.cache, self.client, image)
        error = self.assertRaises(
            exception.LockTimeout, waiting.__enter__)
        self.assertIn('The data of a bitstream were waited for',
                      str(error))
        # and where the other one is
        self.assertIn('glance.download(client, image, file)', log.output)
        self.server.go_on.set()
        self.assertEqual(b'x' * MIB, downloads.result(20))

    def test_download_has_a_limit(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.glance.download_seconds', lambda: 0))
        error = self.assertRaises(
            exception.GlanceUnavailable, self.use, self.server.image(b'x'))
        self.assertIn('sent 0 bytes within 0 s', str(error))
        self.assertEqual(set(), self.contents())

    def test_directory_is_removed(self):
        """As by an operator who needs room on the disk."""
        image = self.server.image(b'x' * 100)
        shutil.rmtree(self.directory)
        self.assertEqual(b'x' * 100, self.use(image))
        with self.cache.fetch(self.client, image) as file:
            shutil.rmtree(self.directory)
            self.assertFalse(os.path.exists(file.path))
        self.assertEqual(b'x' * 100, self.use(image))
        self.assertEqual({image.content}, self.contents())

    def test_directory_is_removed_while_downloading(self):
        image = self.server.image(b'x' * MIB)
        self.server.go_on.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(self.use, image)
            while not self.server.downloads:
                time.sleep(0.01)
            shutil.rmtree(self.directory)
            self.server.go_on.set()
            error = future.exception(20)
        self.assertIsInstance(error, exception.ConfigurationError)
        self.assertIn('cannot be written (No such file', str(error))
        self.assertEqual(b'x' * MIB, self.use(image))

    def test_directory_cannot_be_made_again(self):
        image = self.server.image(b'x' * MIB)
        above = os.path.dirname(self.directory)
        shutil.rmtree(above)
        pathlib.Path(above).touch()
        error = self.assertRaises(
            exception.ConfigurationError, self.use, image)
        self.assertIn('cannot be written (Not a directory)', str(error))

    def test_another_tries_after_a_failure(self):
        """Who waited for a download that failed makes its own."""
        image = self.server.image(b'x' * MIB)
        wrong = image_of(image.id, image.content, size=image.size + 1)
        self.server.go_on.clear()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            fails = pool.submit(self.use, wrong)
            while not self.server.downloads:
                time.sleep(0.01)
            works = pool.submit(self.use, image)
            time.sleep(0.2)
            self.server.go_on.set()
            self.assertIsInstance(fails.exception(20),
                                  exception.BitstreamError)
            self.assertEqual(b'x' * MIB, works.result(20))

    def test_start_after_a_kill(self):
        """The next process removes an abandoned download, and no other one."""
        parts = [pathlib.Path(self.directory, f'{name}.part')
                 for name in ('abandoned', 'under-way')]
        for part in parts:
            part.write_bytes(b'y' * 500)
        long_ago = time.time() - glance.download_seconds() - 601
        os.utime(parts[0], (long_ago, long_ago))
        cache.BitstreamCache(self.directory)
        self.assertEqual([parts[1]],
                         [*pathlib.Path(self.directory).iterdir()])

    def test_clock_jumps(self):
        """A year ahead, while an image is downloaded and another is used."""
        image, other = (self.server.image(bytes([n]) * MIB) for n in range(2))
        download = glance.download

        def jump(client, image, file):
            download(client, image, file)
            file.flush()
            os.utime(file.fileno(), (0, time.time() - 365 * 86400))
            if image is not other:
                self.use(other)
        self.useFixture(fixtures.MockPatchObject(glance, 'download', jump))
        self.assertEqual(bytes(MIB), self.use(image))

    def test_two_processes_download_the_same(self):
        """A second nova-compute of this machine does not truncate the file
        that the first one writes, or has just given to a server."""
        image = self.server.image(b'x' * MIB)
        other = cache.BitstreamCache(self.directory)
        download, began = glance.download, threading.Event()

        def slow(client, image, file):
            if not began.is_set():
                began.set()
                download(client, image, file)
                with other.fetch(client, image) as leased:
                    self.assertEqual(
                        MIB, os.path.getsize(leased.path))
                return
            download(client, image, file)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.glance.download', slow))
        self.assertEqual(b'x' * MIB, self.use(image))
        self.assertEqual({image.content}, self.contents())

    def test_by_image(self):
        id = str(uuid.uuid4())
        old = self.server.image(b'old', id=id)
        self.use(old)
        new = self.server.image(b'new', id=id)
        self.use(new)
        again = cache.BitstreamCache(self.directory)
        for image, data in (old, b'old'), (new, b'new'):
            with again.by_image(id, image.content) as file:
                self.assertEqual(data, pathlib.Path(file.path).read_bytes())
                self.assertEqual(image.content, file.content)

    def test_by_image_missing(self):
        image = self.server.image(b'x')
        self.use(image)
        os.unlink(os.path.join(self.directory, image.content))
        for content in (image.content, ''):
            error = self.assertRaises(
                exception.BitstreamError,
                self.cache.by_image(image.id, content).__enter__)
            self.assertIn(image.id, str(error))
            self.assertIn('fetch the image from Glance', str(error))
        # and the link to nothing goes at the next start
        cache.BitstreamCache(self.directory)
        self.assertEqual([], os.listdir(self.directory))

    def test_by_image_holds_a_lease(self):
        image = self.server.image(b'x' * MIB)
        self.use(image)
        self.config(bitstream_cache_size=0, group='accel')
        with self.cache.by_image(image.id, image.content):
            self.use(self.server.image(b'y'))
            self.assertEqual({image.content}, self.contents())

    def test_wrong_data_leave_nothing(self):
        image = self.server.image(b'x' * 100)
        self.server.data[image.id] = b'y' * 100
        error = self.assertRaises(
            exception.BitstreamError, self.use, image)
        self.assertIn(image.id, str(error))
        self.assertEqual([], os.listdir(self.directory))

    def test_directory_that_cannot_be_made(self):
        error = self.assertRaises(
            exception.ConfigurationError, cache.BitstreamCache, '/dev/null/x')
        self.assertIn('[accel] bitstream_cache = /dev/null/x', str(error))

    def test_file_system_full(self):
        image = self.server.image(b'x' * MIB)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, limits[1]))
        try:
            error = self.assertRaises(
                exception.ConfigurationError, self.use, image)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assertIn('cannot be written (File too large)', str(error))
        self.assertTrue(error.elsewhere)
        self.assertEqual([], os.listdir(self.directory))

    def test_contention(self):
        """Threads with a cache too small for all: each reads its own data."""
        self.config(bitstream_cache_size=1, group='accel')
        images = [self.server.image(bytes([i]) * (MIB // 2))
                  for i in range(4)]

        def work(number):
            return all(self.use(images[(number + i) % 4])
                       == bytes([(number + i) % 4]) * (MIB // 2)
                       for i in range(8))
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            self.assertEqual([True] * 6, list(pool.map(work, range(6))))
        self.assertThat(len(self.contents()), matchers.LessThan(3))
