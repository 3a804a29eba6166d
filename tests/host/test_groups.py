# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices in one IOMMU group, which the kernel gives to one guest."""

import ddt

from nova_accel import exception
from nova_accel.inventory import offers
from tests.host import base

A, B, C = '0000:86:00.0', '0000:87:00.0', '0000:88:00.0'
GPU, NPU = 'CUSTOM_ACCELERATOR_GPU', 'CUSTOM_ACCELERATOR_NPU'
RULE = 'vendor=1da3 type=NPU'


def gpu(address, group=7, **more):
    return {'gpus': [{'address': address, 'iommu_group': group,
                      'driver': 'vfio-pci', **more}]}


def npu(address, group=7, **more):
    return {'others': [{
        'address': address, 'vendor': '1da3', 'class': '0x120000',
        'iommu_group': group, 'driver': 'vfio-pci', **more}]}


def ahci(address, driver='ahci'):
    return npu(address, vendor='8086', device='2922', driver=driver,
               **{'class': '0x010601'})


class TestCase(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(discovery_interval=3600, pci_devices=[RULE],
                           group='accel')

    def start(self, *devices):
        self.start_host(drivers=('gpu', 'pci'), **_host(devices))

    def change(self, *devices):
        """The host boots with other IOMMU groups."""
        self.simulated.describe(**_host(devices))
        self.host.cloud.lose_power()
        self.host.kernel.reboot()
        self.restart()
        self.host.reconcile()
        self.look()

    def look(self):
        self.host.inventory.looks.run()
        self.host.report()

    def offers(self):
        return {offer.handle.address: offer
                for offer in self.host.inventory.table.offered().all()}

    def free(self):
        return sorted(address for address, offer in self.offers().items()
                      if offer.state is offers.State.FREE)

    def why(self, address):
        return '; '.join(
            hold.reason for hold in self.offers()[address].all_holds)

    def counted(self):
        """What Placement has for servers."""
        return sum(
            item['total'] - item['reserved'] for provider
            in self.host.cloud.read()['providers'].values()
            for item in provider['inventory'].values())

    def boot(self, address, name=GPU, amount=1):
        return self.host.boot(
            {f'resources1:{name}': str(amount)},
            self.host.allocation(address, name, amount))


def _host(devices):
    found = {'gpus': [], 'others': []}
    for device in devices:
        for kind, items in device.items():
            found[kind] += items
    return found


@ddt.ddt
class SeparateTest(TestCase):
    """Two servers could get one each."""

    @ddt.data(
        (gpu(A), gpu(B)), (npu(A), npu(B)), (gpu(A), npu(B)),
        # of one slot
        (npu(A), npu(f'{A[:-1]}1')))
    def test_withheld(self, devices):
        one, other = (item['address'] for device in devices
                      for items in device.values() for item in items)
        self.start(*devices)
        self.assertEqual([], self.free())
        self.assertEqual(0, self.counted())
        for address, mate in ((one, other), (other, one)):
            self.assertIn(f'{address} is in one IOMMU group with {mate}, and '
                          f'the kernel gives a group to one guest',
                          self.why(address))
        self.assertIn(f'{A} is in one IOMMU group with', self.log.output)

    def test_others_are_offered(self):
        self.start(gpu(A), gpu(B), gpu(C, 8))
        self.assertEqual([C], self.free())
        self.assertEqual(1, self.counted())
        self.assertHas(self.boot(C), C)

    def test_set(self):
        """They go together."""
        self.config.config(device_sets=[f'{A} {B}'], group='accel')
        self.start(gpu(A), gpu(B))
        self.assertEqual([A, B], self.free())
        server = self.boot(A, amount=2)
        self.assertHas(server, A, B)
        self.host.reboot(server)
        self.assertHas(server, A, B)
        self.host.delete(server)
        self.assertEqual([A, B], self.free())

    def test_set_that_the_host_has(self):
        """The group is viable once all of it is taken from its drivers."""
        self.config.config(device_sets=[f'{A} {B}'], group='accel')
        self.start(gpu(A, driver='nvidia'), gpu(B, driver='nvidia'))
        self.assertEqual([A, B], self.free())
        server = self.boot(A, amount=2)
        self.assertHas(server, A, B)
        self.host.cloud.stop_guest(server)
        self.host.start_guest(server)
        self.assertHas(server, A, B)
        self.host.delete(server)
        self.assertEqual([A, B], self.free())

    def test_set_and_another_one(self):
        self.config.config(device_sets=[f'{A} {B}'], group='accel')
        self.start(gpu(A), gpu(B), npu(C))
        self.assertEqual([], self.free())
        self.assertIn(f'with {A}, {B}, and', self.why(C))

    def test_only_one_is_offered(self):
        """By a rule, or because the operator has disabled the other one."""
        self.start(gpu(A), npu(B, vendor='1da4'))
        self.assertEqual([A], self.free())
        self.assertHas(self.boot(A), A)

    def test_disabled(self):
        self.start(gpu(A), gpu(B))
        self.host.disable(B)
        self.assertEqual([A], self.free())
        server = self.boot(A)
        self.host.enable()
        self.assertEqual([], self.free())
        self.assertIn(f'with {A} (of server {server}), and',
                      self.why(B))
        self.host.delete(server)
        self.assertEqual([], self.free())

    def test_process_of_the_host(self):
        """It has what is not offered, and with it the group."""
        self.start(gpu(A), npu(B, vendor='1da4'))
        self.host.kernel.guest_takes(B)
        self.look()
        self.assertEqual([], self.free())
        self.assertIn(f'{B} is open through VFIO', self.why(A))
        self.host.kernel.guest_returns(B)
        self.look()
        self.assertEqual([A], self.free())

    def test_driver_of_the_host(self):
        """The group is not viable while it has another member."""
        self.start(gpu(A), ahci(B))
        self.assertEqual([], self.free())
        self.assertIn(f'with {B}, which the driver ahci of the host keeps',
                      self.host.inventory.devices[A].reason)
        # what was not well at first is scanned once more
        self.look()
        self.host.kernel.unbind(B)
        self.look()
        self.assertEqual([A], self.free())
        self.host.kernel.rebind(B, 'ahci')
        self.look()
        self.assertEqual([], self.free())


class GrownTest(TestCase):
    """A boot without ACS joins groups of which servers have devices."""

    def setUp(self):
        super().setUp()
        self.start(gpu(A), gpu(B, 8), gpu(C, 9))

    def test_one_is_free(self):
        server = self.boot(A)
        mine, = self.host.devices_of(server)
        self.change(gpu(A), gpu(B), gpu(C, 9))
        self.assertEqual([C], self.free())
        self.host.start_guest(server)
        self.assertHas(server, mine)
        self.assertEqual(2, self.counted())
        # ACS is back
        self.change(gpu(A), gpu(B, 8), gpu(C, 9))
        self.assertEqual([B, C], self.free())

    def test_both_are_of_servers(self):
        """One of them runs at a time."""
        one, other = self.boot(A), self.boot(A)
        self.assertHas(one, A)
        self.assertHas(other, B)
        self.change(gpu(A), gpu(B), gpu(C, 9))
        self.assertIn(
            f'{A} (of server {one}) is in one IOMMU group with {B} (of server '
            f'{other}), and only one of these servers can run', self.log.output)
        self.host.start_guest(one)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.start_guest, other)
        self.assertIn(f'shares its IOMMU group with {A} (of server {one}), '
                      f'which runs: stop or move one of the two servers',
                      str(error))
        self.assertNotIn(one, exception.for_owner(error))
        self.host.cloud.stop_guest(one)
        self.host.start_guest(other)
        self.assertHas(other, B)
        self.host.delete(other)
        self.host.start_guest(one)
        self.assertEqual([C], self.free())
