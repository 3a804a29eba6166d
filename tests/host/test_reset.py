# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is done with a device between two servers, and what is recorded."""

import contextlib
import functools
import sqlite3
import time

import fixtures

from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel.store import values
from tests.host import base
from tests.host import cloud as clouds
from tests.host import handovers
from tests.unit.host import A, B, FUNCTION, plain, vf

GPU, AI, CLOCK, SSD = (f'CUSTOM_ACCELERATOR_{type_}' for type_ in (
    'GPU', 'AI', 'TIMECARD', 'SSD'))
ONE_TIME_USE = 'HW_PCI_ONE_TIME_USE'
CARD = {'address': A, 'serial': '3c:6d:89:00:12:fe'}
NPU = {'address': A, 'vendor': '19e5', 'device': 'd801', 'class': '0x120000',
       'driver': 'davinci', 'total_vfs': 2, 'vfs': 2}
FIRST, SECOND = '0000:5e:00.1', '0000:5e:00.2'


class ResetTest(handovers.HandoverTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host(gpus=[{'address': A}, {'address': B}],
                        drivers=('gpu',))

    def test_between_two_servers(self):
        server = self.boot()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        # without a driver of the host, which has it again now
        self.assertEqual([[A, None]], self.resets())
        self.assertEqual('nvidia', pci.driver(self.simulated.kernel, A))
        self.assertEqual([(A, 'reset flr', 'clean')], self.results())
        found, = self.handovers()
        self.assertEqual((A, server, '', ''), (
            found.device, found.server, found.before, found.after))
        self.assertRegex(found.time,
                         r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00')
        self.assertHas(self.boot(), A)

    def test_restarts_of_a_server_reset_nothing(self):
        server = self.boot()
        self.host.reboot(server)
        self.host.revert(server, self.host.migrate_away(server))
        self.assertEqual(([], []), (self.resets(), self.handovers()))

    def test_move(self):
        server = self.boot()
        self.host.confirm(server, self.host.migrate_away(server))
        self.assertEqual([(A, 'reset flr', 'clean')], self.results())

    def test_reset_that_fails(self):
        """Fenced, said, tried again."""
        self.fault(reset='EIO')
        self.host.delete(self.boot())
        self.report()
        self.assertEqual((1, 1), self.reserved())
        self.assertRaises(exception.AcceleratorError, self.boot)
        self.assertIn(f'{A} must be reset', self.log.output)
        self.host.reconciler.run()
        self.host.reconciler.run()
        claim, = self.host.holdings.all()
        self.assertIn('Input/output error', claim.error)
        # once for each reason
        (handle, method, result), = self.results()
        self.assertEqual((A, 'none', claim.error), (handle, method, result))
        self.fault(reset=None)
        self.host.reconciler.run()
        self.report()
        self.assertEqual(((0, 1), []), (
            self.reserved(), self.host.holdings.all()))
        self.assertEqual((A, 'reset flr', 'clean'), self.results()[1])
        self.assertHas(self.boot(), A)

    def test_card_that_does_not_come_back(self):
        self.fault(reset='dead')
        self.host.delete(self.boot())
        self.fault(reset=None)
        self.host.reconciler.run()
        self.report()
        self.assertEqual((1, 1), self.reserved())
        self.assertIn('does not answer', self.results()[0][2])
        self.simulated.kernel.power_cycle()
        self.host.inventory.scanner.scan()
        self.host.reconciler.run()
        self.report()
        self.assertEqual((0, 1), self.reserved())

    def test_reset_that_takes_long(self):
        self.config.config(device_timeout=1, group='accel')
        self.fault(reset='hang')
        self.host.delete(self.boot())
        claim, = self.host.holdings.all()
        self.assertIn('did not end within 1 s', claim.error)
        self.assertEqual([], self.results())
        self.fault(reset=None)
        end = time.monotonic() + 120
        while self.host.holdings.all():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)
        self.assertEqual([(A, 'reset flr', 'clean')], self.results())

    def test_store_that_takes_no_entry(self):
        """No server gets what an older record would vouch for."""
        with contextlib.closing(sqlite3.connect(
                self.host.store.path)) as db:
            db.executescript(
                "CREATE TRIGGER full BEFORE INSERT ON handovers BEGIN "
                "SELECT RAISE(FAIL, 'no room'); END")
            server = self.boot()
            self.host.delete(server)
            claim, = self.host.holdings.all()
            self.assertIn('no room', claim.error)
            self.fault(reset='EIO')
            self.host.releases.retry()
            self.assertIn('is not in the journal', self.log.output)
            self.fault(reset=None)
            db.executescript('DROP TRIGGER full')
        self.host.releases.retry()
        self.host.settle()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([(A, 'reset flr', 'clean')], self.results())

    def test_policy_that_cannot_be_read(self):
        self.config.config(handover=['gpu=wipe'], group='accel')
        error = self.assertRaises(exception.ConfigurationError, self.restart)
        self.assertIn('gpu=wipe', str(error))


class RecordTest(handovers.HandoverTestCase):

    def test_region(self):
        self.CLASS = base.FPGA
        self.start_host({'address': A})
        image = self.host.upload(FUNCTION)
        for policy, method, result in (
                ('clear', f'programmed again with image {image}',
                 values.MEMORY_KEPT),
                ('reset', 'port reset', values.MEMORY_KEPT),
                ('none', 'none', 'not cleaned')):
            self.config.config(handover=[policy], group='accel')
            self.host.delete(self.host.boot(
                base.asks(bitstream_id=image), self.host.allocation(A)))
            found = self.handovers()[-1]
            self.assertEqual(
                (method, result, plain(FUNCTION), plain(FUNCTION),
                 model.OPERATOR),
                (found.method, found.result, found.before, found.after,
                 found.origin))

    def test_policies_of_two_products(self):
        """A rule tells them apart, where the driver is the same."""
        self.config.config(handover=['gpu=none', 'product=20b5=reset'],
                           group='accel')
        self.start_host(gpus=[{'address': A, 'device': '20b5'},
                              {'address': B}], drivers=('gpu',))
        for address in (A, B):
            self.host.delete(self.boot(address))
        self.assertEqual([(A, 'reset flr', 'clean'),
                          (B, 'none', 'not cleaned')], self.results())
        self.assertEqual([1, 0], [
            len(self.simulated.kernel.resets(a)) for a in (A, B)])

    def test_reset_leaves_what_a_project_loaded(self):
        """Where the record says clean, nothing of the server is left."""
        self.CLASS = base.FPGA
        self.start_host({'address': A})
        self.config.config(handover=['reset'], group='accel')
        image = self.host.upload(FUNCTION, {
            'owner': clouds.PROJECT, 'visibility': 'private'})
        self.host.delete(self.host.boot(
            base.asks(runtime_programming='true'), self.host.allocation(A),
            {'accel:bitstream_id': image}))
        found = self.handovers()[-1]
        self.assertEqual(
            ('port reset', 'reset only', plain(FUNCTION), clouds.PROJECT),
            (found.method, found.result, found.after, found.origin))

    def test_what_no_server_had(self):
        self.start_host(gpus=[{'address': A, 'iommu_group': 7}], others=[{
            'address': FIRST, 'class': '0x040300', 'driver': 'snd_hda_intel',
            'iommu_group': 7, 'faults': {'bind': 'EBUSY'}}],
            drivers=('gpu',))
        self.assertRaises(exception.DeviceError, self.boot)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(([], []), (self.handovers(), self.resets()))

    def test_disk(self):
        self.CLASS = SSD
        self.start_host(nvmes=[{'address': A}], drivers=('nvme',))
        self.host.delete(self.boot())
        (handle, method, result), = self.results()
        self.assertEqual((A, 'clean'), (handle, result))
        self.assertNotEqual('none', method)

    def test_disk_that_the_operator_needs_since(self):
        """No server reads what he has on it, and it is not erased."""
        self.CLASS = SSD
        self.start_host(nvmes=[{'address': A}], drivers=('nvme',))
        kernel = self.simulated.kernel
        kernel.sign_disk(A, 'LVM2_member')
        kernel.write_disk(A, 'data of the operator')
        self.restart()
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertIn('LVM2_member', str(error))
        self.assertEqual(('data of the operator', [], []), (
            kernel.data_of_disk(A), self.host.holdings.all(),
            self.results()))
        # what a server leaves there is erased, and the next one gets the disk
        kernel.sign_disk(A)
        server = self.boot()
        kernel.sign_disk(A, 'LVM2_member')
        self.host.reboot(server)
        self.host.delete(server)
        self.assertEqual('', kernel.data_of_disk(A))
        self.boot()

    def test_vf_whose_namespace_another_guest_has(self):
        """A guest attached it to its own controller, as some of them let
        it."""
        self.CLASS = SSD
        self.start_host(nvmes=[{'address': A, 'total_vfs': 2, 'vfs': 2}],
                        drivers=('nvme',))
        eve = self.boot()
        mine, = self.host.devices_of(eve)
        number, = [n for n in (1, 2) if mine != vf(A, n - 1)]
        kernel = self.simulated.kernel
        kernel.share_namespaces(A, number, 3 - number)
        # the disk is not read between
        error = str(self.assertRaises(exception.DeviceUnavailable, self.boot))
        self.assertIn('is attached to the controller', error)
        self.host.inventory.scanner.scan()
        self.report()
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        # nor is erased what is not hers
        kernel.write_disk(vf(A, number - 1), 'data of another')
        self.host.delete(eve)
        self.assertEqual('data of another',
                         kernel.data_of_disk(vf(A, number - 1)))
        self.assertEqual([eve], [c.instance_uuid
                                 for c in self.host.holdings.all()])
        kernel.share_namespaces(A, number)
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('data of another',
                         kernel.data_of_disk(vf(A, number - 1)))


class SlotTest(handovers.HandoverTestCase):
    """A card whose second function is in an IOMMU group of its own, where a
    tenant looks for what the one before left in it."""

    CLASS = AI

    def start(self, **second):
        self.config.config(pci_devices=['product=d801 type=AI'],
                           group='accel')
        self.start_host(others=[
            {**NPU, 'total_vfs': 0, 'vfs': 0},
            {'address': FIRST, 'vendor': '19e5', 'device': 'a222',
             'class': '0x118000', 'driver': None, **second}],
            drivers=('pci',))

    def test_is_reset_with_the_card(self):
        self.start()
        self.host.delete(self.boot())
        self.assertEqual(1, len(self.simulated.kernel.resets(FIRST)))
        found, = self.handovers()
        self.assertIn(FIRST, found.method)

    def test_reset_of_it_that_fails(self):
        self.start(faults={'reset': 'EIO'})
        self.host.delete(self.boot())
        self.report()
        self.assertEqual((1, 1), self.reserved())
        self.assertRaises(exception.AcceleratorError, self.boot)

    def test_is_one_of_novas(self):
        """nova-compute starts, and no server gets the card."""
        self.useFixture(fixtures.MonkeyPatch('tests.host.base.Host.__init__', (
            functools.partialmethod(
                base.Host.__init__, taken_elsewhere=lambda device: (
                    f'{FIRST} is matched by [pci] device_spec'
                    if FIRST in device.functions() else '')))))
        self.start()
        self.report()
        self.assertEqual((1, 1), self.reserved())
        self.assertIn(f'{FIRST} is matched by [pci] device_spec, and is '
                      f'a function of the same slot', self.log.output)
        self.host.inventory.configuration.check()


class QatTest(handovers.HandoverTestCase):

    CLASS = 'CUSTOM_ACCELERATOR_QAT'

    def test_vf_whose_reset_fails(self):
        self.start_host(qats=[{'address': A, 'vfs': 16}], drivers=('qat',))
        server = self.boot()
        handle, = self.host.devices_of(server)
        self.fault(reset='EIO')
        self.host.delete(server)
        claim, = self.host.holdings.all()
        self.assertIn(f'{handle} must be reset after its server',
                      claim.error)
        self.report()
        self.assertEqual((0, 15), self.reserved())
        self.assertNotIn(handle, self.host.devices_of(self.boot()))
        self.fault(reset=None)
        self.host.reconciler.run()
        self.assertEqual((handle, 'reset flr', 'clean'), self.results()[-1])
        self.report()
        self.assertEqual((0, 16), self.reserved())


class TimecardTest(handovers.HandoverTestCase):

    CLASS = CLOCK

    def setUp(self):
        super().setUp()
        self.start_host(timecards=[CARD], drivers=('timecard',))

    def end(self, server, **changes):
        """The guest changes the card and ends; the host reads the card
        before it is released."""
        self.simulated.kernel.change_timecard(A, **changes)
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.inventory.scanner.scan()
        self.restart()
        self.host.delete(server)

    def test_settings_are_as_before(self):
        before = self.host.inventory.devices[A]
        self.end(self.boot(), sma1='OUT: GND', clock_source='TOD')
        self.assertEqual([], self.host.holdings.all())
        self.host.inventory.scanner.scan()
        self.assertEqual(before.record, self.host.inventory.devices[A].record)
        found, = self.handovers()
        self.assertEqual(('3c:6d:89:00:12:fe', 'clean'),
                         (found.serial, found.result))
        self.assertIn('compared', found.method)

    def test_other_firmware(self):
        """The card is fenced until the operator accepts it."""
        self.end(self.boot(), firmware='666')
        self.report()
        self.assertEqual((1, 1), self.reserved())
        self.assertIn('firmware fw 666 in place of 32771', self.log.output)
        self.config.config(handover=[f'{A}=none'], group='accel')
        self.restart()
        self.host.reconciler.run()
        self.report()
        self.assertEqual((0, 1), self.reserved())
        # and it is what the next server gets
        self.host.inventory.scanner.scan()
        self.assertIn(('firmware fw', '666'),
                      self.host.inventory.devices[A].record)

    def test_what_the_operator_changes_between_servers(self):
        self.simulated.kernel.change_timecard(A, sma1='IN: PPS2')
        self.host.inventory.scanner.scan()
        server = self.boot()
        self.end(server, sma1='IN: 10Mhz')
        name, = self.simulated.kernel.listdir(pci.path(A, 'timecard'))
        self.assertEqual('IN: PPS2', self.simulated.kernel.read(
            pci.path(A, 'timecard', name, 'sma1')))


class OperatorTest(handovers.HandoverTestCase):
    """Devices of one-time use: the operator releases them."""

    def start(self, *cards, **kinds):
        self.config.config(handover=['operator'], group='accel')
        self.start_host(*cards, **kinds)

    def assertOneTimeUse(self, provider):
        """The os-traits of Nova 31 does not have the trait."""
        self.assertEqual(ONE_TIME_USE in self.host.cloud.traits,
                         ONE_TIME_USE in provider['traits'])

    def lower(self, reserved, address=A):
        """openstack resource provider inventory set --amend"""
        with self.host.cloud.state() as state:
            for provider in self.providers(state, address):
                provider['inventory'][self.CLASS]['reserved'] = reserved

    def test_another_policy_while_the_device_is_not_well(self):
        """It has the traits from before, without that of the policy."""
        self.start(gpus=[{'address': A}], drivers=('gpu',))
        self.simulated.kernel.set_fault(A, dead=True)
        self.restart()
        self.assertOneTimeUse(self.provider())
        self.config.config(handover=[], group='accel')
        self.restart()
        self.assertNotIn(ONE_TIME_USE, self.provider()['traits'])

    def test_whole_device(self):
        self.start(gpus=[{'address': A}], drivers=('gpu',))
        self.assertOneTimeUse(self.provider())
        server = self.boot()
        self.assertEqual((0, 1), self.reserved())
        self.host.delete(server)
        # at once, before Nova reports
        self.assertEqual((1, 1), self.reserved())
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([], self.resets())
        self.assertEqual([(A, 'none', 'waits for the operator')],
                         self.results())
        self.assertNotIn('is free', self.log.output)
        self.assertRaises(exception.AcceleratorError, self.boot)
        self.report()
        self.restart()
        self.report()
        self.host.reconciler.run()
        self.assertEqual((1, 1), self.reserved())
        # not by our fence, which goes without the operator
        self.assertNotIn('CUSTOM_ACCELERATOR_FENCED',
                         self.provider()['traits'])
        self.lower(0)
        self.report()
        self.assertEqual((0, 1), self.reserved())
        self.assertEqual({}, self.host.store.reserved())
        self.assertHas(self.boot(), A)

    def test_given_back_while_nova_compute_is_down(self):
        self.start(gpus=[{'address': A}], drivers=('gpu',))
        self.host.delete(self.boot())
        self.report()
        self.host.parts.close()
        self.lower(0)
        self.restart()
        self.report()
        self.assertEqual((0, 1), self.reserved())
        self.assertHas(self.boot(), A)

    def test_not_lowered_before_it_was_reserved(self):
        """Placement may not have heard of it when Nova next reports."""
        self.start(gpus=[{'address': A}], drivers=('gpu',))
        server = self.boot()
        show, self.host.cloud.show = self.host.cloud.show, (
            lambda *args: None)
        self.host.delete(server)
        self.host.cloud.show = show
        self.assertEqual((0, 1), self.reserved())
        self.report()
        self.assertEqual((1, 1), self.reserved())

    def test_some_of_several_handles(self):
        self.CLASS = AI
        self.config.config(pci_devices=['vendor=19e5 type=AI'], group='accel')
        self.start(others=[NPU], drivers=('pci',))
        first, second = self.boot(), self.boot()
        self.assertHas(first, FIRST)
        self.host.delete(first)
        self.report()
        self.assertEqual((0, 1), self.reserved())
        # the second is held, the first waits: none is left
        self.assertRaises(exception.AcceleratorError, self.boot)
        self.host.delete(second)
        self.report()
        self.assertEqual((2, 2), self.reserved())
        # the one that waits longest
        self.lower(1)
        self.report()
        self.assertEqual((0, 1), self.reserved())
        third = self.boot()
        self.assertHas(third, FIRST)
        # not by reserved, as not all wait
        self.assertIn(f'{SECOND} waited for you, and is free',
                      self.host.maintenance.release(SECOND))
        self.assertEqual((0, 2), self.reserved())
        self.assertHas(self.boot(), SECOND)

    def test_beside_what_the_operator_had_reserved(self):
        self.CLASS = AI
        self.config.config(pci_devices=['vendor=19e5 type=AI'], group='accel')
        self.start(others=[NPU], drivers=('pci',))
        self.lower(1)
        self.host.delete(self.boot())
        self.report()
        self.assertEqual((1, 1), self.reserved())
        # quarantined meanwhile, and well again
        self.fault(dead=True)
        self.host.inventory.scanner.scan()
        self.report()
        self.assertEqual((2, 2), self.reserved())
        self.fault(dead=None)
        self.host.inventory.scanner.scan()
        self.report()
        self.assertEqual((1, 1), self.reserved())
        self.host.maintenance.release(FIRST)
        self.assertEqual((1, 2), self.reserved())
        self.assertFalse([c for c in self.host.store.all_claims() if c.waits])

    def test_regions(self):
        self.CLASS = base.FPGA
        self.start({'address': A})
        self.assertOneTimeUse(self.provider('_region0'))
        self.host.delete(self.host.boot(base.ONE, self.host.allocation(A)))
        self.report()
        self.assertEqual((1, 1), self.reserved('_region0'))
        self.lower(0, '_region0')
        self.report()
        self.assertHas(self.host.boot(base.ONE, self.host.allocation(A)), FIRST)

    def test_trait_goes_with_the_policy(self):
        self.start(gpus=[{'address': A}], drivers=('gpu',))
        self.config.config(handover=[], group='accel')
        self.restart()
        self.assertNotIn(ONE_TIME_USE, self.provider()['traits'])

    def test_trait_that_placement_does_not_know(self):
        """It is reported once Placement does."""
        self.start_host(gpus=[{'address': A}], drivers=('gpu',))
        cloud = self.host.cloud
        self.config.config(handover=['operator'], group='accel')
        for known in (frozenset(), {ONE_TIME_USE}):
            cloud.traits = cloud.traits - {ONE_TIME_USE} | known
            self.restart()
            self.report()
            self.assertOneTimeUse(self.provider())

    def test_vgpus_cannot_wait(self):
        self.start(vgpus=[{
            'address': A, 'framework': 'mdev', 'units': 4, 'types': [
                {'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q', 'units': 1}]}],
            drivers=('vgpu',))
        device = self.host.inventory.devices[A]
        self.assertEqual(model.Health.QUARANTINED, device.health)
        self.assertIn('policy operator', device.reason)
