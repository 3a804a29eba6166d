# Licensed under the Apache License, Version 2.0. See LICENSE.
"""In which domains a host is, with files, commands and a library of the test.
"""

import os
import shutil
import subprocess
import sys

import fixtures
from nova.compute import provider_tree
import testtools

from nova_accel import exception
from nova_accel.host import domains
from nova_accel.host import nvml
from nova_accel import naming
from tests.unit import configured

#: names, arguments and layouts as in nvml.h of CUDA 12.4
_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned version; unsigned char cluster[16]; int status;
                 unsigned clique; unsigned char state; unsigned health;
               } fabric;
int nvmlInit_v2(void) { return atoi(getenv("NVML_INIT")); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device)
{
    *device = (void *)(0x123456789a00UL + number);
    return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, fabric *found)
{
    if (found->version != (sizeof *found | 2 << 24))
        return 25;
    unsigned number = (unsigned long)device & 0xff;
    /* not supported, still probing, completed */
    found->state = getenv("NVML_STATES")[number] - '0';
    found->clique = getenv("NVML_CLIQUES")[number] - '0';
    memset(found->cluster, 0xab, 16);
    return 0;
}
"""


class DomainsTestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.domains = domains.Domains()

    def set_near(self, *items):
        self.config.config(near=list(items), group='accel')

    def write(self, name, text, mode=0o600):
        path = os.path.join(self.directory, name)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)
        os.chmod(path, mode)
        return path


class OptionTest(DomainsTestCase):

    def test_refused(self):
        for said, items in (
                ('the level rack twice', ['rack=CUSTOM_NEAR_RACK_A',
                                          'rack=CUSTOM_NEAR_RACK_B']),
                ('which is not <level>=<trait>', ['CUSTOM_NEAR_RACK_A']),
                ('which is not <level>=<trait>', ['Rack=CUSTOM_NEAR_RACK_A']),
                ('which is not <level>=<trait>', ['rack=']),
                ('only the level nvlink', ['rack=auto']),
                ('write CUSTOM_NEAR_RACK_<DOMAIN>', ['rack=CUSTOM_R7']),
                ('write CUSTOM_NEAR_RACK_<DOMAIN>', ['rack=r7'])):
            self.set_near(*items)
            error = self.assertRaises(
                exception.ConfigurationError, domains.wanted)
            self.assertIn(said, str(error))

    def test_read(self):
        self.set_near('nvlink=auto', 'rail=/etc/rail',
                      'rack=CUSTOM_NEAR_RACK_R7')
        self.assertEqual({'nvlink': 'auto', 'rail': '/etc/rail',
                          'rack': 'CUSTOM_NEAR_RACK_R7'}, domains.wanted())


class LookTest(DomainsTestCase):

    def test_sources(self):
        self.set_near(
            'rack=CUSTOM_NEAR_RACK_R7',
            'row=' + self.write('row', 'row 3\n'),
            'rail=' + self.write('rail', '#!/bin/sh\necho CUSTOM_NEAR_RAIL_2',
                                 0o700))
        self.domains.look()
        self.assertEqual({
            'rack': 'CUSTOM_NEAR_RACK_R7', 'row': 'CUSTOM_NEAR_ROW_ROW_3',
            'rail': 'CUSTOM_NEAR_RAIL_2'}, self.domains.found)
        self.assertEqual(self.domains.found, naming.near_of(
            ['COMPUTE_NODE', *self.domains.found.values()]))

    def test_fails_and_stays(self):
        path = self.write('rack', 'R7')
        self.set_near(f'rack={path}', 'row=CUSTOM_NEAR_ROW_1')
        self.domains.begin()
        for said, text, mode in (
                ('names for traits may contain', 'R/7', 0o600),
                ('ended with 3', '#!/bin/sh\necho no >&2\nexit 3', 0o700),
                ('names for traits may contain', '', 0o600)):
            self.write('rack', text, mode)
            error = self.assertRaises(
                exception.AcceleratorError, self.domains.look)
            self.assertIn(said, str(error))
            self.assertEqual({'rack': 'CUSTOM_NEAR_RACK_R7',
                              'row': 'CUSTOM_NEAR_ROW_1'}, self.domains.found)
        os.remove(path)
        error = self.assertRaises(
            exception.AcceleratorError, self.domains.look)
        self.assertIn('cannot be read', str(error))

    def test_named_pipe(self):
        """It is not waited for who writes into it."""
        path = os.path.join(self.directory, 'rack')
        os.mkfifo(path)
        self.set_near(f'rack={path}')
        error = self.assertRaises(
            exception.ConfigurationError, self.domains.look)
        self.assertIn("has the name ''", str(error))

    def test_file_without_end(self):
        self.set_near('rack=/dev/zero')
        self.assertRaises(exception.ConfigurationError, self.domains.look)

    def test_start_is_not_held_up(self):
        self.set_near('rack=' + self.write(
            'rack', '#!/bin/sh\nexec sleep 60', 0o700))
        self.config.config(device_timeout=1, group='accel')
        with self.assertLogs(domains.LOG.logger, 'WARNING') as log:
            self.domains.begin()
        self.assertIn('are not scheduled here', log.output[0])
        self.assertFalse(self.domains.found)

    def test_tree(self):
        tree = provider_tree.ProviderTree()
        tree.new_root('host', 'a2459075-d96c-40d5-893e-577ff92e721c')
        tree.add_traits('host', 'CUSTOM_NEAR_RACK_R6', 'CUSTOM_OTHER',
                        'CUSTOM_NEAR_ROW_1')
        before = tree.data('host').traits
        # nothing is known yet
        self.domains.show(tree, 'host')
        self.assertEqual(before, tree.data('host').traits)
        self.set_near('rack=CUSTOM_NEAR_RACK_R7')
        self.domains.look()
        self.domains.show(tree, 'host')
        self.assertEqual({'CUSTOM_NEAR_RACK_R7', 'CUSTOM_OTHER'},
                         set(tree.data('host').traits))

    def test_host_in_two_domains(self):
        self.assertEqual({'row': 'CUSTOM_NEAR_ROW_1'}, naming.near_of([
            'CUSTOM_NEAR_RACK_A', 'CUSTOM_NEAR_ROW_1', 'CUSTOM_NEAR_RACK_B']))


@testtools.skipUnless(shutil.which('cc'), 'no C compiler')
class LibraryTest(DomainsTestCase):

    def setUp(self):
        super().setUp()
        source = self.write('nvml.c', _SOURCE)
        subprocess.run(
            ['cc', '-shared', '-fPIC', '-o',
             os.path.join(self.directory, nvml.LIBRARY), source], check=True)

    def run_library(self, states, cliques='777', init=0):
        return subprocess.run(
            [sys.executable, '-m', nvml.__name__], capture_output=True,
            text=True, check=False, env={
                **os.environ, 'LD_LIBRARY_PATH': self.directory,
                'NVML_STATES': states, 'NVML_CLIQUES': cliques,
                'NVML_INIT': str(init)})

    def test_domain(self):
        for states in '333', '031':
            done = self.run_library(states)
            self.assertEqual(
                ('abababab-abab-abab-abab-abababababab-7\n', '', 0),
                (done.stdout, done.stderr, done.returncode))
        self.assertEqual(
            'CUSTOM_NEAR_NVLINK_ABABABAB_ABAB_ABAB_ABAB_ABABABABABAB_7',
            naming.near_trait('nvlink', done.stdout.strip(), 'test'))

    def test_none(self):
        for said, done in (
                ('in no NVLink domain', self.run_library('012')),
                ('in 2 NVLink domains', self.run_library('333', '778')),
                ('nvmlInit_v2 of libnvidia-ml.so.1 answered 9',
                 self.run_library('333', init=9))):
            self.assertEqual(1, done.returncode)
            self.assertIn(said, done.stderr)

    def test_without_library(self):
        self.set_near('nvlink=auto')
        error = self.assertRaises(
            exception.AcceleratorError, self.domains.look)
        self.assertIn('libnvidia-ml.so.1 cannot be used', str(error))
        self.assertEqual({}, self.domains.found)
