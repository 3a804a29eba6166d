# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Drivers that misbehave, devices that come and go, and Nova's own tree."""

import dataclasses
import os
import queue
import threading
import time
import types
import uuid

import fixtures
from nova.compute import provider_tree
from oslo_config import fixture as config_fixture
import testtools

from nova_accel.attach import claims
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel.virt import inventory

NODE = 'host'
CLASS = 'CUSTOM_ACCELERATOR_FPGA'


def handle(address):
    return model.AttachHandle(model.HandleType.PCI, address)


def fpga(address, regions=1, driver='good', **more):
    return model.Device(
        address=address, type='FPGA', vendor='ACME', product='X1',
        vendor_id='1234', product_id='0001', driver=driver, regions=tuple(
            model.Region(index=i, region_type_uuid='a' * 32,
                         function_uuid='b' * 32,
                         handles=(handle(f'{address[:-1]}{i + 1}'),))
            for i in range(regions)), **more)


class Driver(base.AcceleratorDriver):
    """A vendor's driver, which finds what it is told to."""

    def __init__(self, *devices):
        super().__init__(kernel=None)
        self.devices = devices
        self.hang = threading.Event()
        self.hang.set()
        self.error = None
        self.calls = 0

    def discover(self, known=None):
        self.calls += 1
        self.hang.wait()
        if self.error:
            raise self.error
        return {d.address: d for d in self.devices}

    def fingerprint(self):
        return self.devices


class InventoryTestBase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        self.store = claims.ClaimStore(os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'claims.sqlite'))
        self.driver = Driver(fpga('0000:01:00.0'))
        self.other = Driver(fpga('0000:02:00.0', driver='other'))
        self.addCleanup(self.other.hang.set)
        self.inventory = inventory.Inventory(
            {'good': self.driver, 'other': self.other}, self.store)
        self.tree = provider_tree.ProviderTree()
        self.root = str(uuid.uuid4())
        self.tree.new_root(NODE, self.root)
        self.consumers = set()

    def update(self):
        self.inventory.scan()
        self.inventory.update_tree(
            self.tree, NODE, lambda uuid: self.name(uuid) in self.consumers)
        return {self.name(u): self.tree.data(u)
                for u in self.tree.get_provider_uuids(NODE)}

    def name(self, uuid_):
        return self.tree.data(uuid_).name

    def claim(self, address, region=0):
        self.store.add([model.Claim(
            uuid=str(uuid.uuid4()), instance_uuid=str(uuid.uuid4()),
            consumer_uuid=str(uuid.uuid4()),
            role=model.Role.CURRENT, provider_uuid=str(uuid.uuid4()),
            resource_class=CLASS, group='1', device_address=address,
            region_index=region, handle=handle(
                f'{address[:-1]}{region + 1}'))])

    def fenced(self, data):
        return (naming.FENCED in data.traits
                and data.inventory[CLASS]['reserved'] == 1)


class InventoryTest(InventoryTestBase):

    def test_providers_below_the_node(self):
        data = self.update()
        self.assertEqual({
            'host', 'host_accel_0000:01:00.0', 'host_accel_0000:02:00.0',
            'host_accel_0000:01:00.0_region0',
            'host_accel_0000:02:00.0_region0'}, set(data))
        region = data['host_accel_0000:01:00.0_region0']
        self.assertEqual((1, 0), (region.inventory[CLASS]['total'],
                                  region.inventory[CLASS]['reserved']))
        self.assertIn(naming.PROGRAMMABLE, region.traits)

    def test_traits_that_come_and_go(self):
        """Ours of a state that is over go, those that others set stay."""
        card = dataclasses.replace(
            fpga('0000:01:00.0', regions=0), handles=(handle('0000:01:00.0'),),
            traits=('CUSTOM_LOCKED',),
            volatile_traits=('CUSTOM_LOCKED', 'CUSTOM_LOST'))
        self.driver.devices = (card,)
        name = 'host_accel_0000:01:00.0'
        self.tree.add_traits(self.update()[name].uuid, 'CUSTOM_OF_OTHERS')
        self.driver.devices = (dataclasses.replace(
            card, traits=('CUSTOM_LOST',)),)
        traits = self.update()[name].traits
        self.assertLessEqual({'CUSTOM_LOST', 'CUSTOM_OF_OTHERS'}, traits)
        self.assertNotIn('CUSTOM_LOCKED', traits)

    def test_handle_that_cannot_be_taken_back(self):
        """Placement is not told of what would be refused."""
        self.driver.devices = (dataclasses.replace(
            fpga('0000:01:00.0', regions=0),
            handles=(handle('0000:01:00.1'), handle('0000:01:00.2')),
            creatable=(model.CreatableType('a', 'CUSTOM_A', 2),)),)
        name = 'host_accel_0000:01:00.0'
        self.assertEqual(2, self.update()[name].inventory[CLASS]['total'])
        self.claim('0000:01:00.0', 0)
        claim, = self.store.claims()
        self.assertEqual(2, self.update()[name].inventory[CLASS]['total'])
        self.store.update([claim], state=model.ClaimState.DELETING,
                          created_type='a')
        self.assertEqual(1, self.update()[name].inventory[CLASS]['total'])

    def test_kernel_says_what_comes(self):
        """A device is noticed when the kernel tells, or says nothing more."""
        self.driver.devices = ()
        self.update()
        events = queue.Queue()
        kernel = types.SimpleNamespace(
            changes=lambda: iter(events.get, 'end'))
        self.inventory.watch(kernel)
        self.addCleanup(events.put, 'end')
        self.driver.devices = (fpga('0000:01:00.0'),)
        for event in ('net', None):
            events.put(event)
        self.assertEqual({'0000:02:00.0'}, set(self.inventory.devices))
        calls = self.driver.calls
        for event in ('pci', 'pci', None, None):
            events.put(event)
        end = time.monotonic() + 10
        while '0000:01:00.0' not in self.inventory.devices:
            self.assertTrue(time.monotonic() < end)
            time.sleep(0.01)
        self.assertEqual(calls + 1, self.driver.calls)

    def test_only_drivers_with_another_fingerprint_are_asked(self):
        self.update()
        calls, others = self.driver.calls, self.other.calls
        self.driver.devices = (fpga('0000:01:00.0', regions=2),)
        self.inventory._scan_if_changed()
        self.assertEqual((calls + 1, others),
                         (self.driver.calls, self.other.calls))
        self.assertEqual({'0000:01:00.0': 2, '0000:02:00.0': 1}, {
            a: len(d.regions) for a, d in self.inventory.devices.items()})
        self.inventory._scan_if_changed()
        self.assertEqual(calls + 1, self.driver.calls)

    def test_device_that_moves_to_another_driver(self):
        self.update()
        self.driver.devices, gone = (), self.driver.devices
        self.inventory._scan_if_changed()
        self.other.devices += tuple(
            dataclasses.replace(d, driver='other') for d in gone)
        self.inventory._scan_if_changed()
        device = self.inventory.devices['0000:01:00.0']
        self.assertEqual(('other', model.Health.OK),
                         (device.driver, device.health))
        self.assertEqual({}, self.inventory.shared)

    def test_driver_that_raises_costs_only_its_own_devices(self):
        self.update()
        self.other.error = RuntimeError('boom')
        data = self.update()
        self.assertTrue(self.fenced(data['host_accel_0000:02:00.0_region0']))
        self.assertFalse(self.fenced(data['host_accel_0000:01:00.0_region0']))
        self.other.error = None
        data = self.update()
        self.assertFalse(self.fenced(data['host_accel_0000:02:00.0_region0']))
        self.assertEqual(0, data['host_accel_0000:02:00.0_region0']
                         .inventory[CLASS]['reserved'])

    def test_driver_that_hangs_costs_only_its_own_devices(self):
        self.update()
        self.conf.config(discovery_timeout=1, group='accel')
        self.other.hang.clear()
        data = self.update()
        self.assertTrue(self.fenced(data['host_accel_0000:02:00.0_region0']))
        self.assertFalse(self.fenced(data['host_accel_0000:01:00.0_region0']))
        # the call that hangs is the only one
        calls = self.other.calls
        self.update()
        self.assertEqual(calls, self.other.calls)

    def test_operators_reservation_stays(self):
        self.update()
        name = 'host_accel_0000:01:00.0_region0'
        changed = self.tree.data(name).inventory
        changed[CLASS].update(reserved=1, allocation_ratio=2.0)
        self.tree.update_inventory(name, changed)
        item = self.update()[name].inventory[CLASS]
        self.assertEqual((1, 2.0), (item['reserved'],
                                    item['allocation_ratio']))

    def test_gone_and_held(self):
        self.update()
        self.claim('0000:01:00.0')
        self.driver.devices = ()
        for _ in range(3):
            data = self.update()
            self.assertTrue(
                self.fenced(data['host_accel_0000:01:00.0_region0']))
        self.assertEqual(
            model.Health.GONE,
            self.inventory.devices['0000:01:00.0'].health)

    def test_gone_and_allocated_by_somebody_not_here_yet(self):
        self.update()
        self.consumers.add('host_accel_0000:01:00.0_region0')
        self.driver.devices = ()
        for _ in range(3):
            data = self.update()
            self.assertTrue(
                self.fenced(data['host_accel_0000:01:00.0_region0']))
        self.consumers.clear()
        self.assertNotIn('host_accel_0000:01:00.0', self.update())
        self.assertEqual({}, {
            a: d for a, d in self.store.devices().items() if '01' in a})

    def test_gone_and_free_is_fenced_before_it_is_removed(self):
        self.update()
        self.driver.devices = ()
        data = self.update()
        self.assertTrue(self.fenced(data['host_accel_0000:01:00.0_region0']))
        self.assertNotIn('host_accel_0000:01:00.0', self.update())

    def test_regions_that_come_and_go(self):
        self.driver.devices = (fpga('0000:01:00.0', regions=3),)
        self.assertIn('host_accel_0000:01:00.0_region2', self.update())
        self.driver.devices = (fpga('0000:01:00.0', regions=1),)
        self.consumers.add('host_accel_0000:01:00.0_region1')
        self.update()
        data = self.update()
        self.assertNotIn('host_accel_0000:01:00.0_region2', data)
        self.assertTrue(self.fenced(data['host_accel_0000:01:00.0_region1']))

    def test_handles_that_go_while_allocated(self):
        self.update()
        region = self.driver.devices[0].regions[0]
        self.driver.devices = (dataclasses.replace(
            self.driver.devices[0],
            regions=(dataclasses.replace(region, handles=()),)),)
        name = 'host_accel_0000:01:00.0_region0'
        self.consumers.add(name)
        self.assertEqual(1, self.update()[name].inventory[CLASS]['reserved'])
        self.consumers.clear()
        self.assertEqual({}, self.update()[name].inventory)

    def test_providers_of_an_earlier_life(self):
        self.update()
        again = inventory.Inventory({'good': Driver()}, claims.ClaimStore(
            os.path.join(self.useFixture(fixtures.TempDir()).path, 'c')))
        for _ in range(2):
            again.scan()
            again.update_tree(self.tree, NODE, lambda uuid: False)
        self.assertEqual([self.root], self.tree.get_provider_uuids(NODE))

    def test_other_providers_are_left_alone(self):
        self.tree.new_child('host_pci_0000_84_00_0', NODE)
        self.tree.new_child('host_0000:81:00.0', NODE)
        self.tree.update_traits('host_0000:81:00.0', {'CUSTOM_PROGRAMMABLE'})
        self.update()
        data = self.update()
        self.assertEqual({'CUSTOM_PROGRAMMABLE'},
                         data['host_0000:81:00.0'].traits)
        self.assertIn('host_pci_0000_84_00_0', data)

    def test_name_that_placement_refuses(self):
        self.driver.devices = (dataclasses.replace(
            fpga('0000:01:00.0'), product='X/1'),)
        data = self.update()
        self.assertNotIn('host_accel_0000:01:00.0', data)
        self.assertIn('host_accel_0000:02:00.0', data)

    def test_scan_that_began_before_a_programming(self):
        self.update()
        self.driver.hang.clear()
        scan = threading.Thread(target=self.inventory.scan)
        scan.start()
        with self.inventory.programming('0000:01:00.0'):
            self.inventory.set_loaded(
                '0000:01:00.0', 0, model.Loaded(
                    'c' * 32, str(uuid.uuid4()), 'new', 'sha512-0'))
        self.driver.hang.set()
        scan.join()
        region = self.inventory.devices['0000:01:00.0'].region(0)
        self.assertEqual(('c' * 32, 'new'),
                         (region.function_uuid, region.function_name))

    def test_what_was_loaded_is_forgotten_when_the_card_says_otherwise(self):
        self.update()
        self.inventory.set_loaded(
            '0000:01:00.0', 0, model.Loaded(
                'c' * 32, str(uuid.uuid4()), 'new', 'sha512-0'))
        self.update()
        region = self.inventory.devices['0000:01:00.0'].region(0)
        self.assertEqual(('b' * 32, None, None), (
            region.function_uuid, region.function_name, region.bitstream_id))


class RecoveryTest(InventoryTestBase):
    """Regions that a failure left unusable come back when nobody is hurt."""

    def setUp(self):
        super().setUp()
        self.recovered = []
        self.driver.recover = self.recover
        well = self.driver.devices[0]
        self.driver.devices = (dataclasses.replace(
            well, regions=(dataclasses.replace(
                well.regions[0], health=model.Health.QUARANTINED,
                reason='the port is disabled'),)),)
        self.well = well
        self.inventory.scan()

    def recover(self, address):
        self.recovered.append(address)
        self.assertIs(model.Health.QUARANTINED,
                      self.inventory.devices[address].health)
        self.driver.devices = (self.well,)

    def test_recovered(self):
        self.inventory.recover()
        self.assertEqual(['0000:01:00.0'], self.recovered)
        device = self.inventory.devices['0000:01:00.0']
        self.assertEqual([model.Health.OK] * 2,
                         [device.health, device.regions[0].health])

    def test_not_while_a_server_has_a_part_of_it(self):
        self.claim('0000:01:00.0', region=1)
        self.inventory.recover()
        self.assertEqual([], self.recovered)

    def test_once_for_a_reason(self):
        self.well = self.driver.devices[0]
        for _ in range(3):
            self.inventory.recover()
        self.assertEqual(['0000:01:00.0'], self.recovered)
        self.assertIs(model.Health.OK,
                      self.inventory.devices['0000:01:00.0'].health)


class ConfigurationTest(InventoryTestBase):
    """What only all drivers together show."""

    def scan(self, *devices):
        self.other.devices = devices
        self.inventory.scan()

    def refused(self):
        error = self.assertRaises(exception.ConfigurationError,
                                  self.inventory.check_configuration)
        for name in ('good', 'other', '0000:01:00.0'):
            self.assertIn(name, str(error))
        self.assertLessEqual(len(str(error)), 255)

    def warnings(self):
        logged = self.useFixture(fixtures.FakeLogger())
        self.inventory.check_configuration()
        return logged.output

    def test_two_drivers_find_one_device(self):
        self.scan(fpga('0000:01:00.0', driver='other'))
        self.refused()
        # one of the two has it until then
        self.assertEqual('good',
                         self.inventory.devices['0000:01:00.0'].driver)

    def test_function_of_another_drivers_device(self):
        # its VF, or the sound of its graphics card
        for function in (handle('0000:01:00.1'),
                         model.AttachHandle(
                             model.HandleType.PCI, '0000:02:00.0',
                             companions=('0000:01:00.1',))):
            self.scan(dataclasses.replace(
                fpga('0000:02:00.0', regions=0, driver='other'),
                handles=(function,)))
            error = self.assertRaises(
                exception.ConfigurationError,
                self.inventory.check_configuration)
            self.assertIn('good and other', str(error))
            self.inventory.shared.clear()

    def test_each_driver_has_its_own(self):
        self.inventory.scan()
        self.assertEqual('', self.warnings())

    def test_rule_makes_it_one_drivers(self):
        self.conf.config(group='accel',
                         exclude_devices=['address=0000:01:00.0'])
        self.inventory = inventory.Inventory(
            {'good': self.driver, 'other': self.other}, self.store)
        self.scan(fpga('0000:01:00.0', driver='other'))
        self.assertEqual('', self.warnings())
        self.assertEqual({}, self.inventory.devices)

    def test_rule_without_effect(self):
        self.conf.config(group='accel', exclude_devices=['vendor=1002'])
        self.inventory = inventory.Inventory({'good': self.driver},
                                             self.store)
        self.inventory.scan()
        self.assertIn('vendor=1002 matches no device', self.warnings())

    def test_vfs_of_nobody(self):
        self.conf.config(group='accel', virtual_functions=[
            '0000:01:00.0=2', '0000:99:00.0=2'])
        self.inventory.scan()
        logged = self.warnings()
        self.assertIn('names 0000:99:00.0, which no driver', logged)
        self.assertNotIn('names 0000:01:00.0', logged)
