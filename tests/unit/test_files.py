# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Files in a directory in which another user may place links and pipes."""

import errno
import itertools
import os
import resource
import stat
from unittest import mock

import ddt
import fixtures
import testtools

from nova_accel import files


@ddt.ddt
class FilesTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.path = os.path.join(self.directory, 'metrics.prom')

    def read(self, path=None):
        with open(path or self.path, encoding='utf-8') as file:
            return file.read()

    def test_replaced(self):
        for content in ('old', 'new'):
            files.replace(self.path, content, 0o640)
            self.assertEqual(content, self.read())
        self.assertEqual(0o640, stat.S_IMODE(os.stat(self.path).st_mode))
        self.assertEqual(['metrics.prom'], os.listdir(self.directory))

    def test_mode_of_the_umask(self):
        self.addCleanup(os.umask, os.umask(0o027))
        files.replace(self.path, 'new')
        self.assertEqual(0o640, stat.S_IMODE(os.stat(self.path).st_mode))

    def test_link_in_its_place(self):
        """The link is replaced; the file behind it stays as it is."""
        store = os.path.join(self.directory, 'store')
        with open(store, 'w') as file:
            file.write('claims')
        os.symlink(store, self.path)
        files.replace(self.path, 'new', 0o644)
        self.assertFalse(os.path.islink(self.path))
        self.assertEqual('claims', self.read(store))

    def test_name_of_the_new_file(self):
        """Another user cannot know it beforehand."""
        names = []
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.files.os.replace',
            lambda new, path: names.append(new) or os.rename(new, path)))
        files.replace(self.path, '1')
        files.replace(self.path, '2')
        self.assertEqual(2, len(set(names)))
        for name in names:
            # the collector reads files that end in .prom
            self.assertFalse(name.endswith('.prom'))
            self.assertEqual(self.directory, os.path.dirname(name))

    def test_cannot_be_replaced(self):
        os.mkdir(self.path)
        self.assertRaises(OSError, files.replace, self.path, 'new')
        self.assertEqual(['metrics.prom'], os.listdir(self.directory))

    def test_no_text(self):
        """Names of files that are not UTF-8 have such characters."""
        files.replace(self.path, 'a\udcffb')
        self.assertEqual('a\\udcffb', self.read())

    def test_created(self):
        files.create(self.path, 'new')
        self.assertEqual('new', self.read())
        self.assertRaises(FileExistsError, files.create, self.path, 'other')
        self.assertEqual('new', self.read())

    def test_link_or_pipe_where_a_new_file_goes(self):
        os.symlink(os.path.join(self.directory, 'absent'), self.path)
        pipe = os.path.join(self.directory, 'pipe')
        os.mkfifo(pipe)
        for path in (self.path, pipe):
            self.assertRaises(FileExistsError, files.create, path, 'new')
        self.assertEqual({'metrics.prom', 'pipe'},
                         {*os.listdir(self.directory)})

    @ddt.data(*itertools.product(
        ('open', 'fchmod', 'replace'),
        (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)))
    @ddt.unpack
    def test_file_system_refuses(self, call, number):
        """The old file stays as it was, alone."""
        files.replace(self.path, 'old')
        error = OSError(number, os.strerror(number))
        with mock.patch.object(os, call, side_effect=error):
            found = self.assertRaises(
                OSError, files.replace, self.path, 'new', 0o644)
        self.assertEqual((number, self.path), (found.errno, found.filename))
        self.assertEqual(['metrics.prom'], os.listdir(self.directory))
        self.assertEqual('old', self.read())

    def test_file_system_becomes_full(self):
        """The kernel writes a part of it: here as for too large a file, for
        which a test needs no file system of its own (setrlimit(2))."""
        files.replace(self.path, 'old')
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        for write, path in ((files.replace, self.path),
                            (files.create, f'{self.path}.other')):
            error = self.assertRaises(OSError, write, path, 'x' * 65537)
            self.assertEqual(errno.EFBIG, error.errno)
        self.assertEqual(['metrics.prom'], os.listdir(self.directory))
        self.assertEqual('old', self.read())
