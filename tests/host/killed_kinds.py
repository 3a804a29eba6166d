# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Operations of each kind of device, and what must be true after them.

tests.host.test_killed kills nova-compute at the points of these operations,
and tests.host.test_faults has a call fail in them.
"""

import contextlib
import os
import shutil
import sqlite3
import uuid

import ddt
from oslo_config import fixture as config_fixture

from nova_accel import conf
from nova_accel.host import pci
from nova_accel import model
from nova_accel import sim
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds
from tests.host.killed_operations import (
    KilledTestCase, MOVE, OperationsMixin, SERVER)
from tests.unit import vgpus
from tests.unit.host import (A, B, FUNCTION, INTERFACE, OTHER, plain, SHELL,
                             vf)

DISK = '0000:02:00.0'
SSD, VGPU, GPU, CLOCK = (f'CUSTOM_ACCELERATOR_{type_}' for type_ in (
    'SSD', 'VGPU', 'GPU', 'TIMECARD'))


class FpgaTest(KilledTestCase, OperationsMixin):

    DEVICES = {'cards': [{'address': A}, {'address': B}]}
    SPECS = base.asks(FUNCTION, runtime_programming='true')
    LOOKS = ((['carries', A], plain(FUNCTION)),)

    def test_plug_that_fails(self):
        """The server, whose allocation Nova may leave, starts later."""
        kernel = self.simulated.kernel

        def after():
            kernel.set_fault(A, pr_error=None)
            self.compute.run([['reconcile'], ['start_again', SERVER]])
            self.assertHolds()
            self.assertEqual(plain(OTHER), self.compute.run(
                [['carries', A]])[0])
            self.delete()
        self.at_each_point(
            lambda: kernel.set_fault(A, pr_error='crc'),
            lambda: [['boot_that_fails', base.asks(OTHER), self.allocation,
                      None, SERVER]], after)

    def test_move(self):
        """A move away, which is reverted."""
        def after():
            self.compute.run([['reconcile'], ['come_back', SERVER]])
            self.assertHolds()
            self.delete()
        self.at_each_point(
            self.booted, lambda: [['go_and_come_back', SERVER]], after)

    def test_resize_on_the_same_host(self):
        """A server that fails in it, and is deleted."""
        other = self.host.allocation(B)
        self.at_each_point(
            self.booted, lambda: [['resize_here', SERVER, other]],
            lambda: self.compute.run([['reconcile'],
                                      ['delete_moved', SERVER]]))

    def test_confirm_on_the_same_host(self):
        """The server keeps what it got by the resize."""
        other = self.host.allocation(B)

        def begin():
            self.booted()
            self.migration, = self.compute.run(
                [['resize_here', SERVER, other]])

        def steps():
            return [['confirm', SERVER, self.migration, True]]

        def after():
            self.compute.run([['reconcile'], *steps()])
            self.assertEqual(
                [[[SERVER, vf(B)]], {SERVER: [vf(B)]}],
                self.compute.run([['seen']])[0])
            self.delete()
        self.at_each_point(begin, steps, after)

    def test_lost_allocation(self):
        """It is allocated again to the server, which has its device."""
        def begin():
            self.booted()
            self.compute.run([['reconcile'], ['lose', SERVER]])

        def after():
            self.compute.run([['reconcile']])
            self.assertHolds()
            self.assertEqual(
                self.allocation, self.host.cloud.read()['allocations'][SERVER])
            self.delete()
        self.at_each_point(begin, lambda: [['reconcile']], after)

    def test_move_that_nova_has_ended(self):
        """This host does not hear that a migration was confirmed."""
        def begin():
            self.booted()
            self.migration, = self.compute.run([['migrate_away', SERVER]])
            self.host.cloud.stop_guest(SERVER, undefine=True)
            self.host.cloud.allocate(self.migration, None)
            self.host.cloud.delete_server(SERVER)
        self.at_each_point(
            begin, lambda: [['reconcile']],
            lambda: self.compute.run([['reconcile']]))

    def test_orders(self):
        """The operator has a disabled region programmed, and cleans it."""
        self.at_each_point(
            lambda: None,
            lambda: [['disable', A], ['order', 'program', f'{A} {OTHER}'],
                     ['order', 'clean', A], ['enable']],
            lambda: self.compute.run([
                ['withdraw_orders'], ['enable'], ['reconcile']]))

    def comes(self):
        return [['come', SERVER, MOVE, self.SPECS, self.allocation]]

    def test_live_migration_to_this_host(self):
        """The server stays where it is, and has nothing here meanwhile."""
        def after():
            currents, *_ = self.compute.run([
                ['currents'], ['does_not_come', SERVER], ['reconcile']])
            self.assertEqual([], currents)
        self.at_each_point(lambda: None, self.comes, after)

    def test_live_migration_arrives(self):
        """The server is here, whatever this host has heard of it."""
        def after():
            self.compute.run([['is_here', SERVER], ['reconcile']])
            self.assertHolds()
            self.assertEqual([plain(FUNCTION), [SERVER]], self.compute.run(
                [['carries', A], ['currents']]))
            self.delete()
        self.at_each_point(
            lambda: self.compute.run([*self.comes(), ['guest_comes', SERVER]]),
            lambda: [['arrive', SERVER, MOVE]], after)

    def test_runtime_programming(self):
        def begin():
            self.booted()
            self.compute.run([
                ['ten_minutes_pass'], ['ask', SERVER, self.other]])

        def after():
            self.compute.run([['reconcile'], ['run_runtime']])
            self.assertHolds()
            self.assertEqual(plain(OTHER), self.compute.run(
                [['carries', A]])[0])
            self.delete()
        self.at_each_point(begin, lambda: [['run_runtime']], after)

    def test_sigterm(self):
        """It ends at once, though the card is programmed for minutes."""
        seconds, said = self.compute.run([[
            'boot_and_sigterm', A, self.SPECS, self.allocation, None,
            SERVER]])[0]
        # programming may take 300 s
        self.assertLess(seconds, 60)
        self.assertIn('nova-compute stops', said[0])
        self.compute.run([['heal', A], ['reconcile'], ['delete', SERVER]])
        self.assertNothingLeft()


class RegionResetTest(KilledTestCase):
    """Between two servers a region is reset, and carries what it did."""

    DEVICES = {'cards': [{'address': A}]}
    SPECS = base.asks(FUNCTION)
    LOOKS = ((['carries', A], plain(FUNCTION)),)

    def set_up_host(self):
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            handover=['reset'], group='accel')
        super().set_up_host()

    def booted(self, uuid_=SERVER):
        super().booted(uuid_)
        kernel = self.simulated.kernel
        self.found = kernel.guest_reads(vf(A)).get('registers')
        kernel.guest_writes(vf(A), registers=f'of {uuid_}')

    def check_next(self):
        self.assertIsNone(self.found)

    def test_unplug(self):
        self.at_each_point(
            self.booted, lambda: [['delete', SERVER]], self.delete)


class TenantsImageTest(KilledTestCase):
    """What a server has in its region is its project's image."""

    DEVICES = {'cards': [{'address': A}]}
    SPECS = base.asks(runtime_programming='true')
    BLANK = 'cccccccc-0000-4000-8000-000000000000'
    STRANGERS = 'eeeeeeee-0000-4000-8000-000000000000'

    def set_up_host(self):
        super().set_up_host()
        self.tenants = self.host.upload(
            OTHER, {'visibility': 'private', 'owner': clouds.PROJECT})
        self.host.upload(self.BLANK, {
            'accel:clears': 'registers', 'accel:region_type_id': INTERFACE})

    def assertNothingLeft(self):
        self.assertEqual([[], {}], self.compute.run(
            [['reconcile'], ['seen']])[-1])
        # what the card answers; nova-compute may not know
        self.assertNotEqual(plain(OTHER), base.function_on_card(
            self.simulated.kernel, vf(A)))

    def test_plug(self):
        points = self.at_each_point(lambda: self.compute.run(
            [['ten_minutes_pass']]), lambda: [
            ['boot', self.SPECS, self.allocation,
             {'accel:bitstream_id': self.tenants}, SERVER]], self.delete)
        # among others after program_dfl_port and after set_loaded
        self.assertGreater(points, 4)

    def reuse(self, function, **more):
        """Another image gets the id of the server's (OSSN-0075), and no file
        has what the first one had."""
        shutil.rmtree(f'{self.directory}/cache', ignore_errors=True)
        self.host.cloud.delete_image(self.tenants)
        self.host.upload(function, {'id': self.tenants, **more})

    def start_after_a_power_cut(self):
        self.reuse(self.STRANGERS, owner='eve', visibility='community')
        self.power_cut()
        self.start()

    def start(self):
        """It may be refused, but never has the image of another project, once
        it had its own."""
        has = [claim.restore_content for claim in claim_store.copy_of(
            self.host.store.path).claims(SERVER)]
        self.compute.run([
            ['ten_minutes_pass'], ['reconcile'],
            ['attempt', 'start_again', SERVER]])
        if any(has):
            self.counted += 1
            # of a guest, too
            card = self.simulated.kernel._look()[1]['cards'][A]
            self.assertNotEqual(plain(self.STRANGERS),
                                model.uuid_hex(card['functions'][0]))

    def delete(self):
        super().delete()
        self.reuse(OTHER, visibility='private', owner=clouds.PROJECT)

    def boots(self):
        return [['boot', self.SPECS, self.allocation,
                 {'accel:bitstream_id': self.tenants}, SERVER]]

    def test_boot_before_the_id_is_used_again(self):
        def after():
            self.start_after_a_power_cut()
            self.delete()
        self.counted = 0
        self.at_each_point(lambda: self.compute.run(
            [['ten_minutes_pass']]), self.boots, after)
        self.assertGreater(self.counted, 0)

    def test_start_after_the_id_is_used_again(self):
        self.counted = 0

        def begin():
            self.compute.run([['ten_minutes_pass'], *self.boots()])
            self.start_after_a_power_cut()
            self.power_cut()

        def after():
            self.start()
            self.delete()
        self.at_each_point(
            begin, lambda: [['attempt', 'start_again', SERVER]], after)
        self.assertGreater(self.counted, 0)

    def test_start_before_the_id_is_used_again(self):
        """Its region's record is gone while it is programmed again."""
        self.counted = 0

        def begin():
            self.compute.run([['ten_minutes_pass'], *self.boots()])
            self.power_cut()

        def after():
            self.start_after_a_power_cut()
            self.delete()
        self.at_each_point(
            begin, lambda: [['start_again', SERVER]], after)
        self.assertGreater(self.counted, 0)


class MailboxTest(KilledTestCase):
    """What a guest loads while the mailbox is open is its project's."""

    DEVICES = {'alveos': [{'address': A, 'programming_seconds': 0}]}
    DRIVER, SPECS = 'xrt', base.ONE

    def xclbin(self, function):
        path = f'{self.directory}/{function}.xclbin'
        sim.make_xclbin(path, function, SHELL)
        return path

    def set_up_host(self):
        super().set_up_host()
        with open(self.xclbin(FUNCTION), 'rb') as file:
            self.host.cloud.upload(file.read(), **{
                'accel:clears': 'registers', 'accel:region_type_id': SHELL})

    def begin(self):
        # no image would be programmed again
        self.compute.run([['forget', A]])
        self.booted()
        # as xclmgmt does when it is bound
        self.simulated.kernel.opens_mailbox(A)
        self.simulated.kernel.guest_programs(
            f'{A[:-1]}1', self.xclbin(OTHER))

    def assertNothingLeft(self):
        self.assertEqual([[], {}], self.compute.run(
            [['reconcile'], ['seen']])[-1])
        self.assertEqual(
            plain(FUNCTION),
            self.simulated.kernel.loaded_xclbin(A))

    def test_look(self):
        self.at_each_point(
            self.begin, lambda: [], self.delete, of_the_start=True)


class DiskTest(KilledTestCase, OperationsMixin):

    DEVICES = {'nvmes': [{'address': DISK}]}
    DRIVER, CLASS, ADDRESS = 'nvme', SSD, DISK
    SPECS = {f'resources1:{SSD}': '1'}

    def booted(self, uuid_=SERVER):
        super().booted(uuid_)
        self.simulated.kernel.write_disk(DISK, f'secret of {uuid_}')

    def check_clean(self):
        self.assertNotIn('secret', self.simulated.kernel.data_of_disk(DISK))


class SanitizeTest(DiskTest):
    """Servers delete the namespaces of their disks."""

    DEVICES = {'nvmes': [{'address': DISK, 'sanitize': ['crypto']}]}
    SIZE = 1 << 39

    def booted(self, uuid_=SERVER):
        super().booted(uuid_)
        self.simulated.kernel.change_disk(DISK, namespaces=[])

    def check_clean(self):
        super().check_clean()
        found = self.simulated.kernel.read_nvme(DISK)
        self.assertEqual([self.SIZE], [
            n.blocks * n.block_size for n in found.namespaces])


class HangingSanitizeTest(SanitizeTest):

    test_plug = test_unplug = test_confirm = test_resume = None

    def test_sanitize_that_runs_when_it_is_killed(self):
        """The next nova-compute waits for it."""
        self.booted()
        self.simulated.kernel.set_fault(DISK, hang='sanitize')
        # each process ends while the driver waits
        self.compute.options['device_timeout'] = 1
        for step in ['delete', SERVER], ['reconcile']:
            self.compute.end()
            self.compute.run([step])
        self.compute.end()
        del self.compute.options['device_timeout']
        self.assertIn('secret', self.simulated.kernel.data_of_disk(DISK))
        self.assertEqual([[SERVER, DISK]],
                         self.compute.run([['seen']])[0][0])
        self.simulated.kernel.set_fault(DISK, hang=None)
        self.compute.run([['reconcile']])
        self.assertNothingLeft()


class NvmeVfTest(DiskTest):

    PF, VF = DISK, '0000:02:00.1'
    DEVICES = {'nvmes': [{'address': DISK, 'total_vfs': 1, 'vfs': 1}]}

    def booted(self, uuid_=SERVER):
        KilledTestCase.booted(self, uuid_)
        self.simulated.kernel.write_disk(self.VF, f'secret of {uuid_}')

    def check_clean(self):
        self.assertNotIn('secret', self.simulated.kernel.data_of_disk(self.VF))
        self.assertTrue(self.simulated.kernel.read_nvme_vfs(DISK)[0].online)

    # a loss of power takes the VFs, which the operator configures again
    test_resume = None


class LostStoreTest(DiskTest):
    """What was found out before the kill stays, the rest is found then."""

    FREE = '0000:03:00.0'
    DEVICES = {'nvmes': [{'address': DISK}, {'address': FREE}]}
    test_plug = test_unplug = test_confirm = test_resume = None

    def begin(self):
        self.booted()
        self.compute.end()
        self.simulated.kernel.write_disk(self.FREE, 'secret of another')
        for name in os.listdir(self.directory):
            if name.startswith(claim_store.file_name(clouds.NODE)):
                os.unlink(os.path.join(self.directory, name))

    def after(self):
        self.compute.run([['reconcile']])
        self.assertEqual([[[SERVER, DISK]], {SERVER: [DISK]}],
                         self.compute.run([['seen']])[0])
        kernel = self.simulated.kernel
        self.assertEqual((f'secret of {SERVER}', ''), (
            kernel.data_of_disk(DISK), kernel.data_of_disk(self.FREE)))
        self.delete()

    def test_settling(self):
        self.at_each_point(self.begin, lambda: [['reconcile']], self.after)

    def test_start(self):
        self.at_each_point(self.begin, lambda: [['reconcile']], self.after,
                           of_the_start=True)


class OlderCopyTest(LostStoreTest):
    """An older copy of the store is put back while nova-compute is stopped.
    """

    test_settling = None

    def begin(self):
        self.compute.run([['seen']])
        path = os.path.join(self.directory, claim_store.file_name(clouds.NODE))
        copy = f'{self.directory}/copy'
        with contextlib.closing(sqlite3.connect(path)) as store:
            store.execute('VACUUM INTO ?', (copy,))
        super().begin()
        os.rename(copy, path)


class ExchangedTest(DiskTest):
    """The disk of a server is away when the server is deleted."""

    SLOT = '0000:03:00.0'
    DEVICES = {'nvmes': [{'address': DISK}, {'address': SLOT}]}
    test_plug = test_unplug = test_confirm = test_resume = None

    def begin(self):
        self.booted()
        self.power_cut()
        self.simulated.kernel.exchange_cards(DISK, self.SLOT)
        self.simulated.kernel.set_fault(self.SLOT, vanish=True)
        self.simulated.kernel.write_disk(DISK, 'of the operator')

    def after(self):
        self.delete()
        kernel = self.simulated.kernel
        self.assertEqual('of the operator', kernel.data_of_disk(DISK))
        # it comes back
        kernel.set_fault(self.SLOT, vanish=None)
        kernel.exchange_cards(DISK, self.SLOT)
        # and the other one, which is not offered with what he has on it, too
        kernel.write_disk(self.SLOT, '')
        self.compute.run([['reconcile']])

    def test_delete(self):
        self.at_each_point(
            self.begin, lambda: [['delete', SERVER]], self.after)

    def test_follow(self):
        """The claim of a server that is shut off follows its disk."""
        def begin():
            self.booted()
            self.power_cut()
            self.simulated.kernel.exchange_cards(DISK, self.SLOT)

        def after():
            self.compute.run([['reconcile'], ['start_again', SERVER]])
            self.assertEqual({SERVER: [self.SLOT]},
                             self.compute.run([['seen']])[0][1])
            self.assertHolds()
            self.assertEqual(
                f'secret of {SERVER}',
                self.simulated.kernel.data_of_disk(self.SLOT))
            self.delete()
            self.compute.end()
            self.simulated.kernel.exchange_cards(DISK, self.SLOT)
        self.at_each_point(begin, lambda: [['reconcile']], after,
                           of_the_start=True)


class XrtTest(KilledTestCase):
    """A card that is programmed through its management function."""

    DEVICES = {'alveos': [{'address': A, 'programming_seconds': 0}]}
    DRIVER, SPECS = 'xrt', base.asks(FUNCTION)

    def set_up_host(self):
        super().set_up_host()
        for image in self.image, self.other:
            self.host.cloud.delete_image(image)
        for function in FUNCTION, OTHER:
            path = f'{self.directory}/{function}.xclbin'
            sim.make_xclbin(path, function, SHELL)
            with open(path, 'rb') as file:
                self.host.cloud.upload(file.read(), **{
                    'accel:function_id': str(uuid.UUID(function))})

    def test_plug(self):
        self.at_each_point(
            lambda: self.simulated.kernel.power_cycle(),
            lambda: [['boot', base.asks(OTHER), self.allocation, None,
                      SERVER]], self.delete)

    def test_unplug(self):
        self.at_each_point(
            self.booted, lambda: [['delete', SERVER]], self.delete)


class QatTest(KilledTestCase, OperationsMixin):

    DEVICES = {'qats': [{'address': A, 'vfs': 1}]}
    DRIVER, CLASS = 'qat', 'CUSTOM_ACCELERATOR_QAT'
    SPECS = {'resources1:CUSTOM_ACCELERATOR_QAT': '1'}

    # a loss of power takes the VFs, as of NvmeVfTest
    test_resume = None


@ddt.ddt
class VgpuTest(KilledTestCase, OperationsMixin):

    DEVICES = {'vgpus': [vgpus.gpu('mdev')]}
    DRIVER, CLASS, ADDRESS = 'vgpu', VGPU, vgpus.GPU
    SPECS = {f'resources1:{VGPU}': '1'}

    def check_clean(self):
        self.assertEqual(
            [], self.simulated.kernel.listdir('bus/mdev/devices'))


class VgpuOfVfTest(VgpuTest):
    """Those that NVIDIA's driver makes of VFs: a type that is written."""

    DEVICES = {'vgpus': [vgpus.gpu('vendor-vfio')]}

    def check_clean(self):
        kernel = self.simulated.kernel
        self.assertEqual(['0'] * len(vgpus.VF), [
            kernel.read(pci.path(address, 'nvidia/current_vgpu_type'))
            for address in vgpus.VF])


class GpuTest(KilledTestCase, OperationsMixin):

    DEVICES = {'gpus': [{'address': A}]}
    DRIVER, CLASS = 'gpu', GPU
    SPECS = {f'resources1:{GPU}': '1'}

    def check_clean(self):
        kernel = self.simulated.kernel
        self.assertEqual('nvidia', pci.driver(kernel, A))


class ResetTest(KilledTestCase):
    """No server gets a card that was not reset after the last one."""

    DEVICES = {'timecards': [{'address': A}]}
    DRIVER, CLASS = 'timecard', CLOCK
    SPECS = {f'resources1:{CLOCK}': '1'}

    def sma1(self):
        kernel = self.simulated.kernel
        name, = kernel.listdir(pci.path(A, 'timecard'))
        return kernel.read(pci.path(A, 'timecard', name, 'sma1'))

    def begin(self):
        self.booted()
        self.resets = len(self.simulated.kernel.resets(A))
        self.simulated.kernel.change_timecard(A, sma1='OUT: GND')

    def check_clean(self):
        self.assertEqual('IN: 10Mhz', self.sma1())
        self.assertLess(self.resets, len(self.simulated.kernel.resets(A)))

    def test_release(self):
        self.at_each_point(
            self.begin, lambda: [['delete', SERVER]], self.delete)


class OneTimeUseTest(KilledTestCase):
    """No server gets what the operator has not given back."""

    DEVICES = {'gpus': [{'address': A}]}
    DRIVER, CLASS = 'gpu', GPU
    SPECS = {f'resources1:{GPU}': '1'}

    def set_up_host(self):
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            handover=['operator'], group='accel')
        super().set_up_host()

    def after(self):
        self.delete()
        self.check_journal()
        for _ in range(2):
            self.compute.run([['report'], ['report']])
            name, = self.compute.run([['fenced']])[0]
            self.assertIn('_accel_pool_GPU_', name)
        self.reattach()

    def check_journal(self):
        self.assertEqual(
            SERVER, self.host.command().handovers()[-1].server)

    def reattach(self):
        self.compute.run([['reattach']])

    def check_next(self):
        """It is released again after this."""

    def assertNothingLeft(self):
        super().assertNothingLeft()
        self.compute.run([['report'], ['report']])
        self.reattach()

    def test_release(self):
        self.at_each_point(
            self.booted, lambda: [['delete', SERVER]], self.after)

    def test_report(self):
        """Killed while it is told to Placement, and when it is lowered."""
        def begin():
            self.booted()
            self.compute.run([['delete', SERVER]])
        self.at_each_point(
            begin, lambda: [['report'], ['report'], ['reattach'],
                            ['report'], ['report']], self.reattach, most=60)


def tests_of(module, *mixins, without=()):
    """Return the test cases of all kinds of devices.

    :param module: the name of the module whose tests they become.
    :param mixins: classes that go before the kind.
    :param without: names of kinds.
    """
    return {name: type(name, (*mixins, kind), {
        '__doc__': kind.__doc__, '__module__': module})
        for name, kind in globals().items()
        if isinstance(kind, type) and kind.__module__ == __name__
        and name not in without}
