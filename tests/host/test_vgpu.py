# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What servers are given, on a simulated host and without Nova."""

import threading
import time
import uuid

import fixtures
from oslo_config import fixture as config_fixture

from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.store import values
from tests.host import base
from tests.unit import vgpus
from tests.unit.host import A

SPECS = {'resources1:CUSTOM_ACCELERATOR_FPGA': '1'}


class AttachTestCase(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.instance = str(uuid.uuid4())

    def start(self, *cards, drivers=('dfl',), **more):
        """nova-compute starts, for the first time or again."""
        if cards or more:
            self.useFixture(config_fixture.Config(conf.CONF))
            self.directory = self.useFixture(fixtures.TempDir()).path
            self.start_host(*cards, drivers=drivers, **more)
        else:
            self.restart()

    def allocation(self, resource_class='CUSTOM_ACCELERATOR_FPGA'):
        return {p.uuid: {'resources': {resource_class: 1}} for p in
                self.host.inventory.shown.providers().values()
                if resource_class in p.inventory}

    def server(self, specs=SPECS, instance=None):
        return request.Server(instance or self.instance, 'demo', specs)

    def plug(self, allocations, specs=SPECS, instance=None):
        return self.host.accelerators.plug(
            self.host.cloud.admin_context(), self.server(specs, instance),
            allocations)

    def unplug(self, instance=None):
        return self.host.guests.unplug(instance or self.instance)

    def retry_releases(self):
        return self.host.releases.retry()


class AttachTest(AttachTestCase):

    def test_allocation_without_accelerator(self):
        self.start({'address': A})
        error = self.assertRaises(exception.DeviceUnavailable, self.plug, {})
        self.assertIn('the allocation has no accelerators', str(error))
        self.assertEqual([], self.host.store.claims())

    def test_native_vgpu_beside_standard_classes(self):
        """A class that both have, allocated from Nova's provider."""
        self.start({'address': A})
        self.config.config(resource_classes='standard', group='accel')
        self.assertEqual([], self.plug(
            {str(uuid.uuid4()): {'resources': {'VGPU': 1}}},
            {'resources1:VGPU': '1'}))

    def test_vf_that_was_not_made_again(self):
        self.start({'address': A, 'product': 'PAC_D5005', 'ports': 1,
                    'vfs': 1})
        claim, = self.plug(self.allocation())
        self.host.accelerators.restore(None, self.server())
        self.simulated.kernel.reboot()
        self.config.config(virtual_functions=[], group='accel')
        self.start()
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.accelerators.restore, None,
            self.server())
        self.assertIn(f'{claim.handle.address} of {A}', str(error))
        self.config.config(virtual_functions=[f'{A}=1'], group='accel')
        self.simulated.kernel.reboot()
        self.start()
        self.host.accelerators.restore(None, self.server())


GPU, VF = vgpus.GPU, vgpus.VF
TRAIT = vgpus.TRAIT
VGPU = 'CUSTOM_ACCELERATOR_VGPU'


class VgpuTest(AttachTestCase):
    """Handles that are made on demand, and removed."""

    def setUp(self):
        super().setUp()
        self.other = str(uuid.uuid4())

    def start_vgpus(self, framework='mdev', **more):
        self.start(vgpus=[vgpus.gpu(framework, **more)],
                   drivers=['vgpu'])
        self.kernel = self.host.kernel

    def give(self, type_=None, instance=None, **specs):
        specs = {'resources1:' + VGPU: '1', **specs}
        if type_:
            specs[f'trait1:{TRAIT[type_]}'] = 'required'
        claim, = self.plug(self.allocation(VGPU), specs, instance)
        return claim

    def test_taken_along(self):
        """What a guest takes along at a live migration, and how much memory
        of it."""
        self.start_vgpus()
        claim = self.give('nvidia-558')
        taken = self.host.descriptions
        found, = taken.of_claims([claim])
        self.assertEqual(
            ('1', claim.handle.address), (found.group, found.address))
        self.assertEqual(2048, taken.memory(self.instance))
        self.assertEqual(0, taken.memory(self.other))
        self.host.holdings.doubt([claim], 'its removal failed')
        error = self.assertRaises(
            exception.DeviceUnavailable, taken.of_claims,
            self.host.holdings.of(self.instance))
        self.assertIn(f'may not have {claim.handle.address} as it needs it '
                      f'(its removal failed)', str(error))

    def total(self):
        provider, = self.host.inventory.shown.providers().values()
        return provider.inventory.get(VGPU, 0)

    def offered(self):
        provider, = self.host.inventory.shown.providers().values()
        self.assertFalse(provider.traits & provider.retired_traits)
        return {name for name, trait in TRAIT.items()
                if trait in provider.traits}

    def exists(self, claim):
        return self.kernel.exists(
            f'bus/mdev/devices/{claim.handle.address}')

    def test_inventory_follows(self):
        for framework in ('mdev', 'sriov-mdev', 'vendor-vfio'):
            self.start_vgpus(framework)
            self.assertEqual((4, set(TRAIT)), (self.total(), self.offered()))
            claim = self.give('nvidia-558')
            self.assertEqual(
                (TRAIT['nvidia-558'], model.ClaimState.BOUND),
                (claim.created_type,
                 self.host.store.claims()[0].state))
            self.assertEqual({'nvidia-558'}, self.offered())
            if framework != 'vendor-vfio':
                # its VFs all say that there is room for one more
                self.assertEqual(2, self.total())
            error = self.assertRaises(
                exception.DeviceUnavailable, self.give, 'nvidia-557',
                self.other)
            self.assertIn('does not fit (any more)', str(error))
            self.give('nvidia-558', self.other)
            self.assertEqual((2, set()), (self.total(), self.offered()))
            self.assertEqual(1, self.unplug(self.other))
            self.assertEqual({'nvidia-558'}, self.offered())
            self.unplug()
            self.assertEqual((4, set(TRAIT)), (self.total(), self.offered()))

    def test_guest_has_it(self):
        """Whatever Nova believes: its removal would take it from the guest."""
        self.start_vgpus()
        claim = self.give('nvidia-558')
        self.host.cloud.start_guest(self.instance, [claim.handle])
        self.unplug()
        self.assertTrue(self.exists(claim))
        self.assertIn(f'{claim.handle.address} cannot be released, because '
                      f'the guest of server {self.instance}, which runs',
                      self.log.output)
        self.host.cloud.stop_guest(self.instance, undefine=True)
        self.assertEqual(1, self.retry_releases())
        self.assertFalse(self.exists(claim))

    def test_deleted_while_its_driver_is_not_enabled(self):
        """It is taken away when the driver is there again."""
        for framework in ('mdev', 'vendor-vfio'):
            self.start_vgpus(framework)
            self.give('nvidia-1560')
            for names in ([], ['vgpu']):
                self.config.config(enabled_drivers=names, group='accel')
                self.start()
                if not names:
                    self.unplug()
                    claim, = self.host.store.claims()
                    self.assertIn('needs the driver vgpu', claim.error)
            self.host.reconciler.run()
            self.assertEqual([], self.host.store.claims())
            self.assertEqual((4, set(TRAIT)), (self.total(), self.offered()))

    def test_room_that_strangers_have(self):
        """What is allocated meanwhile is reserved, and released later."""
        self.start_vgpus()
        uuid_, = self.allocation(VGPU)
        self.host.cloud.allocate(self.instance, self.allocation(VGPU))
        for taken, reserved in ((True, 4), (False, 0)):
            if taken:
                self.kernel.create_mdev(GPU, 'nvidia-1560', self.other)
            else:
                self.kernel.remove_mdev(self.other)
            self.host.inventory.scanner.scan()
            self.host.report()
            provider = self.host.cloud.read()['providers'][uuid_]
            self.assertEqual(taken, naming.FENCED in provider['traits'])
            there = provider['inventory'][VGPU]
            self.assertEqual((4, reserved),
                             (there['total'], there['reserved']))

    def test_any_type(self):
        self.start_vgpus()
        self.assertEqual(TRAIT['nvidia-557'], self.give().created_type)
        self.unplug()
        self.config.config(vgpu_types=['1560', '557'], group='accel')
        self.host.inventory.scanner.scan()
        self.assertEqual(TRAIT['nvidia-1560'], self.give().created_type)

    def test_forbidden_type(self):
        """It can be made again, as the last vGPU of another type ends after
        Placement has allocated the GPU."""
        self.start_vgpus()
        self.give('nvidia-558', self.other)
        store = self.host.store
        refresh = store.refresh

        def ends():
            store.refresh = refresh
            self.unplug(self.other)
            self.assertIn('nvidia-557', self.offered())
        store.refresh = ends
        claim = self.give(**{f'trait1:{TRAIT["nvidia-557"]}': 'forbidden'})
        self.assertEqual(TRAIT['nvidia-558'], claim.created_type)

    def test_type_of_another_card(self):
        """Traits of the unnumbered group may be any provider's."""
        self.start(vgpus=[vgpus.gpu('mdev')], drivers=['vgpu'],
                   mdev_parents=[vgpus.MTTY])
        gpu, = [p for p in self.host.inventory.shown.providers()
                .values() if GPU in p.addresses]
        error = self.assertRaises(
            exception.DeviceUnavailable, self.plug,
            {gpu.uuid: {'resources': {VGPU: 1}}},
            {f'resources:{VGPU}': '1',
             'trait:CUSTOM_LINUX_MTTY_DUAL_PORT_SERIAL': 'required'})
        self.assertIn(f'{GPU}, which cannot create '
                      f'CUSTOM_LINUX_MTTY_DUAL_PORT_SERIAL', str(error))

    def test_host_boot(self):
        """All is made again before its room goes to others."""
        for framework in ('mdev', 'sriov-mdev', 'vendor-vfio'):
            self.start_vgpus(framework)
            claims = [self.give('nvidia-558'),
                      self.give('nvidia-558', self.other)]
            self.host.parts.close()
            self.kernel.reboot()
            self.start(drivers=['vgpu'])
            self.assertEqual((2, set()), (self.total(), self.offered()))
            for claim in claims:
                self.kernel.guest_opens(claim.handle.address)

    def test_host_boot_with_another_driver(self):
        """Its types have other numbers: a server gets its own type, also one
        whose claims were read from its guest."""
        for framework in ('mdev', 'sriov-mdev', 'vendor-vfio'):
            self.start_vgpus(framework)
            server = self.host.boot(
                {f'resources1:{VGPU}': '1',
                 f'trait1:{TRAIT["nvidia-558"]}': 'required'},
                self.host.allocation(resource_class=VGPU))
            claim, = self.host.holdings.of(server)
            self.lose_store()
            self.assertEqual([claim], self.host.holdings.of(server))
            self.host.cloud.stop_guest(server, undefine=True)
            self.host.parts.close()
            prefix = '' if framework == 'vendor-vfio' else 'nvidia-'
            self.simulated.describe(vgpus=[vgpus.gpu(framework, types=[
                {'id': f'{prefix}558', 'name': 'NVIDIA A40-4Q', 'units': 4},
                {'id': f'{prefix}99', 'name': 'NVIDIA A40-2Q', 'units': 2}])])
            self.kernel.reboot()
            self.start(drivers=['vgpu'])
            self.host.start_guest(server)
            device = self.host.inventory.devices[GPU]
            self.assertEqual(
                TRAIT['nvidia-558'],
                self.host.inventory.driver_of(device).created_type(
                    device, claim.handle))
            # 2 GB of 4 are left
            self.assertEqual({'nvidia-558'}, self.offered())
            self.host.delete(server)
            self.assertEqual({'nvidia-558', 'nvidia-1560'}, self.offered())

    def test_host_boot_without_room(self):
        self.start_vgpus()
        self.give('nvidia-558')
        self.host.parts.close()
        self.kernel.reboot()
        self.kernel.create_mdev(
            GPU, 'nvidia-1560', '11111111-2222-4333-8444-555555555555')
        self.start(drivers=['vgpu'])
        self.assertIn(f'The vGPU of server {self.instance} could not be '
                      f'created again', self.log.output)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.accelerators.restore, None,
            self.server())
        self.assertIn('has no room for it any more', str(error))
        self.assertEqual(1, self.total())

    def test_killed_while_made(self):
        for state in (model.ClaimState.INITIAL,
                      model.ClaimState.PROVISIONING):
            self.start_vgpus()
            claim = self.give('nvidia-558')
            self.host.store.update([claim], state=state)
            self.host.parts.close()
            self.start(drivers=['vgpu'])
            self.assertEqual([model.ClaimState.UNKNOWN],
                             self.host.states(self.instance))
            self.assertEqual(1, self.unplug())
            self.assertFalse(self.exists(claim))
            self.assertEqual((4, set(TRAIT)), (self.total(), self.offered()))

    def test_killed_while_taken_back(self):
        self.start_vgpus()
        claim = self.give('nvidia-558')
        self.host.store.update(
            [claim], state=model.ClaimState.DELETING)
        self.host.parts.close()
        self.start(drivers=['vgpu'])
        # the slot is free in Placement, and not in truth
        self.assertEqual(1, self.total())
        self.assertEqual([], self.host.guests.handles(self.instance))
        self.assertEqual(1, self.retry_releases())
        self.assertFalse(self.exists(claim))
        self.assertEqual([], self.host.store.claims())

    def test_release_that_hangs(self):
        self.start_vgpus()
        claim = self.give('nvidia-558')
        self.kernel.guest_opens(claim.handle.address)
        self.config.config(device_timeout=1, group='accel')
        self.unplug()
        self.config.config(device_timeout=30, group='accel')
        self.assertIn(f'of {GPU} did not end within 1 s',
                      self.log.output)
        held, = self.host.store.claims()
        self.assertIs(model.ClaimState.DELETING, held.state)
        self.assertIn('see what keeps the device open', held.error)
        # others get what is left of the GPU, while it hangs
        other = self.give('nvidia-558', self.other)
        self.assertTrue(self.host.inventory.cards.hanging(
            claim.handle.key))
        self.assertNotEqual(claim.handle, other.handle)
        self.assertEqual(1, self.total())
        self.unplug(self.other)
        self.assertEqual(0, self.retry_releases())
        self.assertEqual([held.uuid], [
            c.uuid for c in self.host.store.claims()])
        self.kernel.guest_closes(claim.handle.address)
        # by its late end, or by the next try
        while self.host.store.claims():
            self.retry_releases()
            time.sleep(0.01)
        self.assertEqual((4, set(TRAIT)), (self.total(), self.offered()))
        # the next owner keeps it, whatever ends late
        next_owner = self.give('nvidia-558', self.other)
        self.assertEqual(claim.handle, next_owner.handle)
        self.assertEqual(0, self.retry_releases())
        self.assertTrue(self.exists(next_owner))

    def test_release_that_comes_late(self):
        """It had to wait, and another server has the handle meanwhile."""
        for framework in ('mdev', 'vendor-vfio'):
            self.start_vgpus(framework)
            claim = self.give('nvidia-558')
            other_call = threading.Event()
            cards = self.host.inventory.cards
            threading.Thread(target=cards.call, args=(
                claim.handle.key, 'Another call', other_call.wait),
                kwargs={'seconds': 9}).start()
            late = threading.Thread(target=self.unplug)
            late.start()
            store = self.host.store
            while store.claims()[0].state is not model.ClaimState.DELETING:
                time.sleep(0.01)
            store.remove([claim])
            store.add([model.Claim(**{
                **vars(claim), 'uuid': str(uuid.uuid4()),
                'instance_uuid': self.other,
                'state': model.ClaimState.BOUND})])
            other_call.set()
            late.join()
            self.kernel.guest_opens(claim.handle.address)
            self.assertEqual(
                [self.other], [c.instance_uuid for c in store.claims()])

    def test_stranger_was_faster(self):
        """What others have made of a VF stays when our server gives it up."""
        self.start_vgpus('vendor-vfio')
        self.kernel.write_attribute(
            VF[0], 'nvidia/current_vgpu_type', '558')
        error = self.assertRaises(
            exception.DeviceUnavailable, self.give, 'nvidia-558')
        self.assertIn('another program has made it', str(error))
        self.kernel.guest_opens(VF[0])
        self.assertEqual([], self.host.store.claims())
        # the next one gets another VF
        self.assertEqual(VF[1], self.give('nvidia-558').handle.address)

    def test_making_that_hangs(self):
        self.start_vgpus(faults={'hang': 'create'})
        self.config.config(device_timeout=1, group='accel')
        error = self.assertRaises(
            exception.DeviceTimeout, self.give, 'nvidia-558')
        self.config.config(device_timeout=30, group='accel')
        self.assertIn('did not end within 1 s', str(error))
        claim, = self.host.store.claims()
        self.assertIs(model.ClaimState.DELETING, claim.state)
        self.kernel.set_fault(GPU, hang=None)
        while self.host.inventory.cards.hanging(claim.handle.key):
            time.sleep(0.01)
        self.assertTrue(self.exists(claim))
        self.assertEqual(1, self.retry_releases())
        self.assertFalse(self.exists(claim))
        self.assertEqual((4, set(TRAIT)), (self.total(), self.offered()))

    def test_mediated_devices_that_are_ours(self):
        self.start_vgpus()
        claim = self.give('nvidia-558')
        self.kernel.set_fault(GPU, vanish=True)
        self.host.inventory.scanner.scan()
        self.assertIn(claim.handle.address,
                      self.host.descriptions.mediated_devices())


class ReadyVfsTest(base.HostTestCase):
    """VFs of Intel's and AMD's GPUs: each is a vGPU as it is."""

    POOLS = 'none'

    def test_reset_between_two_servers(self):
        self.start_host(drivers=('vgpu',), vgpus=[vgpus.gpu(
            'sriov', vendor='8086', device='56c0', driver='i915', types=[])])
        uuid_, = [p.uuid for p in self.host.inventory.shown.providers().values()
                  if p.inventory]
        server = self.host.boot(
            {'resources1:CUSTOM_ACCELERATOR_VGPU': '1'},
            {uuid_: {'resources': {'CUSTOM_ACCELERATOR_VGPU': 1}}})
        vf, = self.host.devices_of(server)
        self.host.delete(server)
        self.assertEqual([vf], [function for function, _ in
                                self.simulated.kernel.resets(vgpus.GPU)])
        record, = self.host.store.handovers()
        self.assertEqual(('reset flr', values.CLEAN),
                         (record.method, record.result))
        self.assertEqual([], self.host.holdings.all())
