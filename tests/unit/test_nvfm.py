# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Partitions of NVSwitches, by the library of Fabric Manager."""

import subprocess
import sys

import ddt
import testtools

from nova_accel.host import nvfm
from tests.unit.nvfm_library import NvfmLibrary

#: the board of HGX H100, less its partitions of four
BOARD = {0: range(1, 9), 3: (1, 3), 4: (2, 4), 7: (1,)}
GPUS = {1: nvfm.Gpu('0000:1a:00.0'), 3: nvfm.Gpu('0000:1b:00.0')}


def gpus(*modules):
    return {module: nvfm.Gpu(f'0000:0{module}:00.0') for module in modules}


class FabricManager:
    """libnvfm with a Fabric Manager behind it, as nv_fm_agent.h says: a
    partition that is active already is IN_USE, one that is not is
    UNINITIALIZED; one whose GPUs are in an active one is refused as well."""

    def __init__(self, **answers):
        self.answers = answers
        self.active = set()
        self.calls = []
        self.knows = {}
        self.parameters = None

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            answer = self.answers.get(name)
            return answer if answer is not None else getattr(
                self, f'do_{name}')(*arguments)
        if not name.startswith('fm'):
            raise AttributeError(name)
        return call

    def do_fmLibInit(self):
        return 0

    do_fmLibShutdown = do_fmLibInit

    def do_fmDisconnect(self, handle):
        return 0 if handle.value == 42 else -1

    def do_fmConnect(self, parameters, handle):
        self.parameters = parameters._obj
        handle._obj.value = 42
        # sizes of the structures on 64 bits, as a C compiler says
        return 0 if self.parameters.version == 272 | 2 << 24 else -6

    def do_fmGetSupportedFabricPartitions(self, handle, found):
        found = found._obj
        if found.version != 131852 | 1 << 24:
            return -6
        found.count, found.most = len(BOARD), len(BOARD)
        for at, (number, modules) in enumerate(BOARD.items()):
            mine = found.partitions[at]
            mine.number, mine.count = number, len(modules)
            mine.is_active = number in self.active
            for place, module in enumerate(modules):
                mine.gpus[place].module = module
                mine.gpus[place].address = self.knows.get(module, b'')
        return 0

    def do_fmActivateFabricPartition(self, handle, number):
        if any(set(BOARD[number.value]) & set(BOARD[other])
               for other in self.active):
            return -7
        self.active.add(number.value)
        return 0

    def do_fmDeactivateFabricPartition(self, handle, number):
        if number.value not in self.active:
            return -4
        self.active.remove(number.value)
        return 0


@ddt.ddt
class ChangeTest(testtools.TestCase):

    def change(self, manager, action='activate', wanted=GPUS,
               address=nvfm.ADDRESS):
        return nvfm.change(manager, action, address, wanted)

    def refused(self, manager, *args, **kwargs):
        return str(self.assertRaises(
            nvfm.Failed, self.change, manager, *args, **kwargs))

    def test_there_and_back(self):
        manager = FabricManager()
        self.assertEqual('partition 3, active', self.change(manager))
        self.assertEqual({3}, manager.active)
        self.assertEqual('partition 3, inactive',
                         self.change(manager, 'deactivate'))
        self.assertEqual(set(), manager.active)
        self.assertEqual(['fmDisconnect', 'fmLibShutdown'],
                         manager.calls[-2:])

    @ddt.data(('activate', {3, 4}), ('deactivate', {4}), ('look', {3}),
              ('look', set()))
    @ddt.unpack
    def test_what_is_so_is_left_alone(self, action, active):
        manager = FabricManager()
        manager.active |= active
        self.change(manager, action)
        self.assertEqual(active, manager.active)
        self.assertNotIn('fmActivateFabricPartition', manager.calls)
        self.assertNotIn('fmDeactivateFabricPartition', manager.calls)

    def test_no_such_partition(self):
        manager = FabricManager()
        reason = self.refused(manager, wanted=gpus(1, 2))
        self.assertIn('no partitions of exactly the modules 1 2', reason)
        self.assertIn('3: 1 3; 4: 2 4', reason)
        # a part of one is not enough, nor is more than one
        self.refused(manager, wanted=gpus(1, 2, 3))
        self.assertEqual(set(), manager.active)
        self.assertEqual('fmLibShutdown', manager.calls[-1])

    def test_another_partition_has_a_gpu_of_it(self):
        manager = FabricManager()
        manager.active.add(0)
        self.assertIn('while partition 0', self.refused(manager))
        self.assertEqual({0}, manager.active)

    @ddt.data('activate', 'deactivate')
    def test_not_believed(self, action):
        manager = FabricManager(
            fmActivateFabricPartition=0, fmDeactivateFabricPartition=0)
        manager.active |= {3} if action == 'deactivate' else set()
        self.assertIn('answered FM_ST_SUCCESS, and the partition is',
                      self.refused(manager, action))

    def test_links_fail(self):
        manager = FabricManager(fmActivateFabricPartition=-10)
        self.assertIn('FM_ST_NVLINK_ERROR', self.refused(manager))

    @ddt.data(('fmLibInit', -2, 'GENERIC_ERROR'),
              ('fmConnect', -9, 'CONNECTION_NOT_VALID'),
              ('fmGetSupportedFabricPartitions', -8, 'NOT_CONFIGURED'),
              ('fmGetSupportedFabricPartitions', -99, '-99'))
    @ddt.unpack
    def test_not_there(self, call, answer, name):
        reason = self.refused(FabricManager(**{call: answer}))
        self.assertIn(call, reason)
        self.assertIn(name, reason)

    def test_it_sees_the_gpus_itself(self):
        manager = FabricManager()
        manager.knows = {1: b'00000000:1A:00.0', 3: b'00000000:1B:00.0'}
        self.change(manager)
        for other, read in (('00000000:1C:00.0', '0000:1c:00.0'),
                            ('00010000:1B:00.0', '10000:1b:00.0')):
            manager.knows[3] = other.encode()
            self.assertIn(
                f'0000:1b:00.0 for module 3, and Fabric Manager reports {read}',
                self.refused(manager, 'deactivate'))

    def test_address(self):
        manager = FabricManager()
        self.change(manager, address='/run/fm/socket')
        self.assertEqual((b'/run/fm/socket', 1, 2), (
            manager.parameters.address, manager.parameters.is_socket,
            manager.parameters.kind))
        self.change(manager)
        self.assertEqual((b'127.0.0.1:6666', 0, 1), (
            manager.parameters.address, manager.parameters.is_socket,
            manager.parameters.kind))

    def test_with_vfs(self):
        """One for each GPU, in the order of the partition."""
        manager, given = FabricManager(), []

        def activate(handle, number, vfs, count):
            given.extend((v.domain, v.bus, v.device, v.function)
                         for v in vfs[:count])
            return manager.do_fmActivateFabricPartition(handle, number)
        manager.do_fmActivateFabricPartitionWithVFs = activate
        wanted = {module: nvfm.Gpu(f'0000:1{module}:00.0', f'000{module}:1f:'
                                   f'1e.7') for module in (3, 1)}
        self.change(manager, wanted=wanted)
        self.assertEqual([(1, 0x1f, 0x1e, 7), (3, 0x1f, 0x1e, 7)], given)
        self.change(manager, 'deactivate', wanted)
        self.assertEqual(set(), manager.active)

    def test_library_of_release_470(self):
        manager = FabricManager()
        manager.do_fmConnect = lambda parameters, handle: (
            0 if parameters._obj.version == 268 | 1 << 24 else -6)
        manager.do_fmDisconnect = lambda handle: 0
        self.change(manager)
        self.assertEqual(2, manager.calls.count('fmConnect'))


class ProgramTest(testtools.TestCase):

    def run_it(self, *arguments):
        return subprocess.run([sys.executable, '-m', nvfm.__name__, *arguments],
                              capture_output=True, text=True)

    def test_without_library(self):
        done = self.run_it('look', nvfm.ADDRESS, '1=0000:1a:00.0')
        self.assertEqual(1, done.returncode)
        self.assertIn('libnvfm.so.1 cannot be loaded', done.stderr)
        self.assertNotIn('Traceback', done.stderr)

    def test_library_in_c(self):
        self.useFixture(NvfmLibrary())
        modules = ('2=0000:1a:00.0', '4=0000:1b:00.0')
        done = self.run_it('activate', '192.0.2.1:6666', *modules)
        self.assertEqual(('', 'partition 5, active\n'),
                         (done.stderr, done.stdout))
        done = self.run_it('activate', '192.0.2.1:6666',
                           '4=0000:1a:00.0/0000:1a:1f.6')
        self.assertIn('while partition 5', done.stderr)
        done = self.run_it('look', '192.0.2.1:6666', *modules)
        self.assertEqual('partition 5, active\n', done.stdout)
        done = self.run_it('activate', '192.0.2.2:6666', *modules)
        self.assertIn('answered FM_ST_CONNECTION_NOT_VALID', done.stderr)
        self.assertEqual(1, done.returncode)
