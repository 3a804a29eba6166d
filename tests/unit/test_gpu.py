# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whole GPUs, on simulated hosts."""

import dataclasses
import errno
import json
import os

import ddt
import fixtures

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import gpu
from nova_accel.drivers import pci_rule
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from tests.unit.gpus import COMPANY, SOUND, TestCase, USB
from tests.unit.host import A, B

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED


class BeforeSriovManageTest(TestCase):
    """A card for vGPUs is not given whole because its VFs come later."""

    def start(self, *drivers, module='nvidia_vgpu_vfio', kind=gpu.GpuDriver,
              **more):
        self.config.config(group='accel', enabled_drivers=list(drivers))
        super().start({'address': A, 'driver': 'nvidia', **more})
        exists = self.kernel.exists
        self.kernel.exists = lambda path: exists(path) or path == (
            f'module/{module}') or path.endswith('/sriov_totalvfs')
        self.driver = kind(self.kernel)
        return self.driver.discover()[A]

    def test_waits_for_its_vfs(self):
        """With and without the driver vgpu, and while sriov-manage has taken
        the card from its driver."""
        self.config.config(group='accel', pci_devices=['vendor=10de type=AI'])
        for kind in gpu.GpuDriver, pci_rule.PciRuleDriver:
            for drivers in ('gpu', 'vgpu'), ('gpu',):
                for bound in 'nvidia', None:
                    self.refused(
                        self.start(*drivers, driver=bound, kind=kind),
                        f'sriov-manage -e {A}', 'bind it to vfio-pci')

    def test_amds_manager(self):
        self.refused(self.start(
            'gpu', vendor='1002', device='744c', driver='gim', module='gim'),
            'driver gim of AMD', 'bind it to vfio-pci')

    def test_cards_that_are_whole(self):
        for more in {'module': 'none'}, {'driver': 'vfio-pci'}, {
                'vendor': '8086', 'device': '56c0'}:
            self.assertEqual(1, len(self.start('gpu', **more).handles))

    def test_ends_with_its_cause(self):
        """A look follows when the manager comes, and when it goes."""
        self.start('gpu', module='none')
        before = self.driver.state(A)
        exists = self.kernel.exists
        self.kernel.exists = lambda path: exists(path) or path == (
            'module/nvidia_vgpu_vfio')
        self.assertNotEqual(before, self.driver.state(A))


@ddt.ddt
class Discovery(TestCase):

    def test_cards(self):
        found = self.start({'address': A, 'numa_node': 1},
                           {'address': B, 'device': '1234'})
        one, two = found[A], found[B]
        self.assertEqual(
            ('GPU', 'NVIDIA', 'L40S', 'ADA', '10de', '26b9', 'gpu', 1, OK),
            (one.type, one.vendor, one.product, one.family, one.vendor_id,
             one.product_id, one.driver, one.numa_node, one.health))
        handle, = one.handles
        self.assertEqual(
            (model.HandleType.PCI, A, True, ()),
            (handle.type, handle.address, handle.managed, handle.companions))
        traits = naming.device_traits(one)
        for trait in ('CUSTOM_GPU_NVIDIA', 'CUSTOM_GPU_NVIDIA_L40S',
                      'CUSTOM_GPU_NVIDIA_ADA', 'CUSTOM_GPU_NVIDIA_26B9'):
            self.assertIn(trait, traits)
        self.assertEqual({'CUSTOM_GPU_NVIDIA', 'CUSTOM_GPU_NVIDIA_1234',
                          conf.CONF.accel.owner_trait},
                         naming.device_traits(two))

    def test_place(self):
        """Also of a card that is found dead, and of one that a guest has."""
        above = ['pci0000:5d', '0000:5d:00.0']
        places = {A: (1, *above, A), B: (None, f'pci{B[:7]}', B)}
        known = self.start({'address': A, 'numa_node': 1, 'bridges': above},
                           {'address': B})
        self.kernel.guest_takes(A)
        self.kernel.set_fault(B, dead=True)
        for found in known, self.driver.discover(known):
            self.assertEqual(places, {a: d.place for a, d in found.items()})
        self.assertEqual(above, found[A].as_dict()['bridges'])
        self.assertEqual(found[A], model.from_dict(model.Device, json.loads(
            json.dumps(dataclasses.asdict(found[A]),
                       default=lambda kind: kind.value))))

    @ddt.data(
        ('devices/pci0000:5d/0000:5d:00.0/0000:5e:00.0',
         ('pci0000:5d', '0000:5d:00.0')),
        ('devices/platform/4010000000.pcie/pci0000:00/0000:5e:00.0',
         ('pci0000:00',)),
        # below Intel's VMD: a root complex below a function
        ('devices/pci0000:5d/0000:5d:05.5/pci10000:00/10000:00:02.0/'
         '0000:5e:00.0', ('pci0000:5d', '0000:5d:05.5', 'pci10000:00',
                          '10000:00:02.0')),
        ('devices/strange/0000:5e:00.0', ()), (None, ()))
    @ddt.unpack
    def test_bridges(self, target, bridges):
        """As the kernel of this machine would tell."""
        root = self.useFixture(fixtures.TempDir()).path
        os.makedirs(os.path.join(root, pci.DEVICES))
        if target:
            os.symlink(f'../../../{target}', os.path.join(root, pci.path(A)))
        self.assertEqual(bridges, pci.bridges(host_kernel.Kernel(root), A))

    def test_names_can_be_traits(self):
        for (vendor, *_), (product, family) in {
                **gpu.PRODUCTS, **gpu.BOARDS}.items():
            for name in (product, family):
                self.assertEqual(
                    f'CUSTOM_GPU_{gpu.VENDORS[vendor]}_{name}',
                    naming.device_trait('GPU', gpu.VENDORS[vendor], name,
                                        'the table'))

    @ddt.data(('10de', '14a9', 'A16'), ('10de', '157e', 'A2'),
              ('103c', '14a9', '25b6'))
    @ddt.unpack
    def test_two_products_of_one_id(self, vendor, subsystem, product):
        device = self.start({
            'address': A, 'device': '25b6', 'subsystem_vendor': vendor,
            'subsystem_device': subsystem})[A]
        self.assertEqual(product, device.product)

    # vendor, class, whether it is a GPU
    @ddt.data(('10de', '0x030000', True), ('10de', '0x030200', True),
              ('1002', '0x038000', True), ('8086', '0x038000', True),
              ('1002', '0x120000', True),
              # an FPGA, an NVSwitch, sound, and a BMC's display
              ('8086', '0x120000', False), ('10de', '0x068000', False),
              ('10de', '0x040300', False), ('1a03', '0x030000', False))
    @ddt.unpack
    def test_what_is_a_gpu(self, vendor, class_code, ours):
        found = self.start({'address': A, 'vendor': vendor,
                            'class': class_code})
        self.assertEqual([A] if ours else [], list(found))

    @ddt.data('nvidia', 'vfio-pci', None)
    def test_whatever_driver_it_has(self, bound):
        # the operator may have bound it at boot, and nobody knew it before
        device = self.start({'address': A, 'driver': bound})[A]
        self.assertEqual((OK, [A]), (device.health, [
            h.address for h in device.handles]))

    def test_card_of_a_guest_is_as_known(self):
        known = self.start({'address': A, 'iommu_group': 7}, others=COMPANY)
        self.kernel.guest_takes(A, SOUND, USB)
        self.assertEqual(known, self.driver.discover(known))
        self.assertEqual(known, self.driver.discover())

    @ddt.data([], ['vendor=1002'], ['address=0000:99:*'])
    def test_only_what_a_rule_includes(self, rules):
        self.config.config(group='accel', include_devices=rules)
        for found in (self.start({'address': A})[A], self.driver.discover()[A]):
            self.refused(found, '[accel] include_devices', f'address={A}',
                         'vendor=10de product=26b9')

    def test_card_of_a_server_that_no_rule_includes(self):
        """The rule was removed; the server keeps the card."""
        known = self.start({'address': A})
        self.config.config(group='accel', include_devices=[])
        found = self.driver.discover(known)[A]
        self.assertEqual((QUARANTINED, known[A].handles),
                         (found.health, found.handles))
        self.assertTrue(self.driver.answers(found))

    # a bridge, and which rule it takes
    @ddt.data(({'vendor': '10de', 'class': '0x068000'}, True),
              ({'vendor': '8086', 'class': '0x068000'}, False),
              ({'vendor': '10de', 'class': '0x060400'}, False))
    @ddt.unpack
    def test_under_nvswitches(self, bridge, by_address):
        self.config.config(group='accel', include_devices=['vendor=10de'])
        bridge = {'address': '0000:07:00.0', 'driver': None, **bridge}
        device = self.start({'address': A, 'device': '2331'},
                            others=[bridge])[A]
        if not by_address:
            self.assertEqual(OK, device.health)
            return
        self.refused(device, '0000:07:00.0', f'address={A}', 'Fabric Manager')
        # a rule that was written for other cards, or before the others came
        for rule in (f'address={A[:-1]}?', 'address=*', f'address={A[:-1]}[0]',
                     'vendor=10de product=2331 address=0000:5e:*',
                     f'address={B}', f'address={A} product=20b0'):
            self.config.config(group='accel',
                               include_devices=[rule, 'vendor=10de'])
            self.refused(self.driver.discover()[A], 'without wildcards')
        self.config.config(group='accel', include_devices=[
            'vendor=10de', f'address={A.upper()}'])
        self.assertEqual(OK, self.driver.discover()[A].health)

    def test_sets_under_nvswitches(self):
        self.config.config(group='accel', include_devices=['vendor=10de'],
                           device_sets=[f'{A} {B}'], fabric_command='static')
        found = self.start(*(
            {'address': address, 'device': '2330'}
            for address in (A, B, '0000:91:00.0')), others=[{
                'address': '0000:07:00.0', 'driver': None, 'vendor': '10de',
                'class': '0x068000'}])
        self.assertEqual([OK, OK, QUARANTINED],
                         [found[a].health for a in sorted(found)])
        self.assertIn('[accel] device_sets', found['0000:91:00.0'].reason)
        # a guest's CUDA would fail with 802
        self.config.config(group='accel', fabric_command=None)
        self.refused(self.driver.discover()[A], '[accel] fabric_command')

    def test_other_gpu_beside_nvswitches(self):
        self.config.config(group='accel', include_devices=['vendor=1002'])
        device = self.start(
            {'address': A, 'vendor': '1002', 'device': '744c'},
            others=[{'address': '0000:07:00.0', 'vendor': '10de',
                     'class': '0x068000', 'driver': None}])[A]
        self.assertEqual(OK, device.health)

    # by pci.ids of 2026-08: B200, HGX B200 168GB, B100, B300, what is before
    # them, GB102; an RTX PRO 6000 and an RTX 5070
    @ddt.data(('2901', True), ('2909', True), ('2920', True), ('3182', True),
              ('28ff', False), ('29bc', True), ('2bb5', False),
              ('2f04', False))
    @ddt.unpack
    def test_under_switches_that_are_not_seen(self, product, joined):
        self.config.config(group='accel', include_devices=['vendor=10de'])
        device = self.start({'address': A, 'device': product})[A]
        if joined:
            self.refused(device, 'NVSwitches join it', f'address={A}')
        else:
            self.assertEqual(OK, device.health)

    # by pci.ids of 2026-10, as P100, V100, A100, H100, H200: SXM modules, and
    # PCI Express cards; a product of theirs that is not known
    @ddt.data(('15f9', True), ('1db1', True), ('1db5', True), ('20b0', True),
              ('20b2', True), ('20f3', True), ('2330', True), ('2335', True),
              ('2336', True), ('237e', True), ('15f8', False),
              ('1db6', False), ('20b5', False), ('20b7', False),
              ('20f1', False), ('2331', False), ('2321', False),
              ('233b', False), ('2235', False), ('26b9', False),
              # TITAN V, CMP, H100 CNX, AX800
              ('1d81', False), ('1d83', False), ('1d84', False),
              ('1dc1', False), ('1df4', False), ('2082', False),
              ('20c2', False), ('2313', False), ('20fd', False))
    @ddt.unpack
    def test_boards_without_switches(self, product, joined):
        """Four V100 SXM2 of a mesh have IOMMU groups of their own."""
        self.config.config(group='accel', include_devices=['vendor=10de'])
        found = self.start({'address': A, 'device': product},
                           {'address': B, 'device': product})
        if not joined:
            self.assertEqual(OK, found[A].health)
            return
        self.refused(found[A], 'NVLink joins it', '[accel] device_sets',
                     f'address={A}')
        self.config.config(group='accel', device_sets=[f'{A} {B}'])
        self.assertEqual(OK, self.driver.discover()[A].health)
        self.config.config(group='accel', device_sets=[],
                           include_devices=[f'address={A}'])
        self.assertEqual([OK, QUARANTINED], [
            device.health for device in self.driver.discover().values()])

    # without a display, as GPUs for data centers; with one
    @ddt.data(('0x030200', True), ('0x030000', False))
    @ddt.unpack
    def test_products_that_are_newer(self, class_code, unknown):
        self.config.config(group='accel', include_devices=['vendor=10de'])
        device = self.start({'address': A, 'device': '3541',
                             'class': class_code})[A]
        if unknown:
            self.refused(device, 'product 3541 is newer than this release',
                         'may join it', f'address={A}')
        else:
            self.assertEqual(OK, device.health)

    # GH200 by three ids, GB200, GB300 by three, Vera Rubin by two
    @ddt.data('2342', '2345', '2348', '2941', '31a1', '31c2', '31c3', '3041',
              '307f')
    def test_memory_that_no_guest_of_nova_can_have(self, product):
        for option, driver in (
                ('include_devices', gpu.GpuDriver),
                ('pci_devices', pci_rule.PciRuleDriver)):
            for rule in f'address={A}', 'vendor=10de':
                self.config.config(group='accel', **{option: [
                    rule + ' type=GPU' * (option == 'pci_devices')]})
                # as sysfs writes the variant of vfio-pci
                for bound in ('nvidia', 'vfio-pci', 'nvgrace_gpu_vfio_pci'):
                    self.start({'address': A, 'device': product,
                                'driver': bound})
                    self.refused(driver(self.kernel).discover()[A],
                                 'SMMUv3', 'IOMMUFD', 'leave it to the host')

    # MI300X, MI325X, MI355X, one that is newer, MI50, MI60, MI100, MI210; an
    # RX 7900
    @ddt.data(('74a1', '12', True), ('74a5', '12', True), ('75a3', '12', True),
              ('76a1', '12', True), ('66a1', '03', True), ('66a0', '03', True),
              ('738c', '03', True), ('738e', '03', True), ('740f', '03', True),
              ('744c', '03', False))
    @ddt.unpack
    def test_under_xgmi(self, product, kind, joined):
        self.config.config(group='accel', include_devices=['vendor=1002'])
        card = {'vendor': '1002', 'device': product,
                'class': {'12': '0x120000', '03': '0x038000'}[kind]}
        device = self.start({'address': A, **card}, {'address': B, **card})[A]
        if not joined:
            self.assertEqual(OK, device.health)
            return
        self.refused(device, 'XGMI', '[accel] device_sets')
        self.config.config(group='accel', device_sets=[f'{A} {B}'])
        self.assertEqual(OK, self.driver.discover()[A].health)
        self.config.config(group='accel', device_sets=[], include_devices=[
            f'address={A}', f'address={B[:-1]}?'])
        self.assertEqual([OK, QUARANTINED], [
            device.health for device in self.driver.discover().values()])

    def test_boot_display_is_never_taken(self):
        self.config.config(group='accel', include_devices=[
            f'address={A}', f'address={B}'])
        found = self.start(
            {'address': A, 'class': '0x030000', 'boot_vga': True},
            {'address': B, 'class': '0x030000'})
        self.refused(found[A], 'display of this host')
        self.assertEqual(OK, found[B].health)

    def test_boot_display_by_a_rule_of_its_class(self):
        self.config.config(group='accel', pci_devices=['class=03???? type=GPU'])
        self.start({'address': A, 'class': '0x030000', 'boot_vga': True},
                   {'address': B, 'class': '0x030000'})
        found = pci_rule.PciRuleDriver(self.kernel).discover()
        self.refused(found[A], 'display of this host')
        self.assertEqual(OK, found[B].health)

    # MI300A, GB10
    @ddt.data(('1002', '74a0', '0x120000'), ('10de', '2e12', '0x030000'))
    @ddt.unpack
    def test_memory_of_the_host(self, vendor, product, class_code):
        self.config.config(group='accel', include_devices=[f'address={A}'])
        self.refused(self.start({
            'address': A, 'vendor': vendor, 'device': product,
            'class': class_code})[A], 'its memory is that of the host')

    def test_boot_vga_that_cannot_be_read(self):
        found = self.start({'address': A, 'class': '0x030000', 'faults': {
            'attributes': {'boot_vga': 'EIO'}}}, {'address': B})
        self.refused(found[A], 'sysfs')
        self.assertEqual(OK, found[B].health)

    @ddt.data(({'total_vfs': 4, 'vfs': 2}, []), ({'mdev': True}, []),
              ({'total_vfs': 4}, [f'{A}=2']))
    @ddt.unpack
    def test_shared_out(self, more, vfs):
        """Then it is of the driver vgpu, or a reason is shown for its rule."""
        self.config.config(group='accel', virtual_functions=vfs,
                           include_devices=[f'address={A}', f'address={B}'],
                           enabled_drivers=['gpu', 'vgpu'])
        self.assertEqual([B], list(self.start({'address': A, **more},
                                              {'address': B})))
        self.config.config(group='accel', enabled_drivers=['gpu'])
        found = self.driver.discover()
        self.refused(found[A], 'shared out', 'add vgpu to [accel]')
        named = rules.DeviceRules()
        for device in found.values():
            named.applied(device)
        self.assertEqual([], named.unused())

    def test_shared_out_since_it_was_known(self):
        known = self.start({'address': A, 'total_vfs': 4}, {'address': B})
        before = self.driver.fingerprint()
        self.kernel.set_numvfs(A, 2)
        self.assertNotEqual(before, self.driver.fingerprint())
        found = self.driver.discover(known)
        self.assertEqual([QUARANTINED, OK],
                         [device.health for device in found.values()])

    def test_in_recovery_mode(self):
        known = self.start({'address': A, 'vendor': '8086', 'device': 'e211',
                            'driver': 'xe'})
        before, exists = self.driver.state(A), self.kernel.exists
        self.kernel.exists = lambda path: exists(path) or path == pci.path(
            A, 'survivability_mode')
        self.assertNotEqual(before, self.driver.state(A))
        self.refused(self.driver.discover()[A], 'in recovery mode')
        self.assertEqual(OK, known[A].health)

    def test_no_iommu(self):
        self.refused(self.start({'address': A}, iommu=False)[A], 'IOMMU')

    def test_dead_and_back(self):
        known = self.start({'address': A})
        self.kernel.set_fault(A, dead=True)
        dead = self.driver.discover(known)
        self.assertEqual((QUARANTINED, known[A].handles),
                         (dead[A].health, dead[A].handles))
        self.assertIn('power-cycle', dead[A].reason)
        self.kernel.power_cycle()
        self.assertEqual(known, self.driver.discover(dead))


@ddt.ddt
class Companions(TestCase):

    def start(self, *others, **more):
        self.config.config(group='accel', **more)
        return super().start(
            {'address': A, 'iommu_group': 7, 'class': '0x030000'},
            others=list(others))[A]

    def test_go_with_the_card(self):
        handle, = self.start(*COMPANY).handles
        self.assertEqual((SOUND, USB), handle.companions)

    def test_of_another_iommu_group_stay(self):
        sound, usb = COMPANY
        handle, = self.start(sound, {**usb, 'iommu_group': 8}).handles
        self.assertEqual((SOUND,), handle.companions)

    def test_of_another_slot_do_not_go(self):
        self.refused(self.start({**COMPANY[0], 'address': '0000:5e:01.1'}),
                     '0000:5e:01.1', 'snd_hda_intel')

    def test_of_another_kind_do_not_go(self):
        # the encryption controller of a processor with graphics
        self.refused(self.start({**COMPANY[0], 'class': '0x108000',
                                 'driver': 'ccp'}), SOUND, 'ccp')

    def test_company_that_has_vfs(self):
        """A guest with the whole function could reach those of others."""
        self.refused(self.start({**COMPANY[0], 'driver': 'vfio-pci',
                                 'total_vfs': 2, 'vfs': 2}),
                     SOUND, 'it has virtual functions')

    @ddt.data('vfio-pci', None, 'pcieport')
    def test_harmless_company(self, bound):
        device = self.start({**COMPANY[0], 'address': '0000:5e:01.0',
                             'class': '0x060400', 'driver': bound})
        self.assertEqual(
            (OK, ()), (device.health, device.handles[0].companions))

    def bound(self):
        return [pci.driver(self.kernel, a) for a in (A, SOUND, USB)]

    def prepare(self, device):
        self.driver.prepare(device, device.handles[0], None, True, base.Use())

    def test_of_another_guest(self):
        """One that was given a function of the slot by hand."""
        sound, usb = COMPANY
        usb = {**usb, 'iommu_group': 8}
        self.start(sound, usb)
        self.kernel.guest_takes(USB)
        self.refused(self.driver.discover()[A], USB, 'a guest has it')

    def test_are_bound_when_a_server_gets_the_card(self):
        device = self.start(*COMPANY)
        self.driver.configure()
        # nobody has asked for it yet
        self.assertEqual(['nvidia', 'snd_hda_intel', 'xhci_hcd'],
                         self.bound())
        self.prepare(device)
        self.assertEqual(['nvidia', 'vfio-pci', 'vfio-pci'], self.bound())
        self.assertEqual(device, self.driver.discover()[A])
        # a guest that runs may now get them one by one, as after a resume
        for address in (A, SOUND, USB):
            self.kernel.guest_takes(address, guest='one')
        self.prepare(device)
        for address in (A, SOUND, USB):
            self.kernel.guest_returns(address)
        self.assertEqual(['nvidia', 'vfio-pci', 'vfio-pci'], self.bound())

    def test_of_another_iommu_group_are_bound_as_well(self):
        # VFIO resets a slot only when it has all of its functions
        sound, usb = COMPANY
        device = self.start(sound, {**usb, 'iommu_group': 8})
        self.prepare(device)
        self.assertEqual(['nvidia', 'vfio-pci', 'vfio-pci'], self.bound())
        self.assertEqual((SOUND,), device.handles[0].companions)

    def test_one_by_one_is_refused_otherwise(self):
        self.start(*COMPANY)
        for address in (A, SOUND):
            error = self.assertRaises(OSError, self.kernel.guest_takes,
                                      address)
            self.assertEqual(errno.EPERM, error.errno)
        self.kernel.guest_takes(A, SOUND, USB)
        for address in (A, SOUND, USB):
            self.kernel.guest_returns(address)
        self.assertEqual(['nvidia', 'snd_hda_intel', 'xhci_hcd'],
                         self.bound())

    def test_kernel_that_refuses_to_bind(self):
        device = self.start(*COMPANY)
        self.kernel.set_fault(SOUND, bind='ENODEV')
        error = self.assertRaises(exception.DeviceError, self.prepare, device)
        self.assertIn(SOUND, str(error))
        self.assertLessEqual(len(str(error)), 255)


@ddt.ddt
class Release(TestCase):
    """What is done with a card between two servers."""

    def start(self, *others, handover=(), **more):
        self.config.config(group='accel', handover=list(handover))
        self.device = super().start(
            {'address': A, 'iommu_group': 7, **more}, others=others)[A]
        return self.device

    def use(self):
        """A server has the card, and its guest has ended."""
        functions = (A, *self.device.handles[0].companions)
        self.driver.prepare(
            self.device, self.device.handles[0], None, True, base.Use())
        self.kernel.guest_takes(*functions)
        for function in functions:
            self.kernel.guest_returns(function)

    def release(self):
        return self.driver.release(
            self.device, self.device.handles[0], None, base.Use())

    def refused(self, *said):
        error = str(self.assertRaises(exception.DeviceError, self.release))
        for text in (A, *said):
            self.assertIn(text, error)
        self.assertLessEqual(len(error), 255)

    def test_reset_without_a_driver_of_the_host(self):
        self.start()
        self.use()
        self.assertEqual('reset flr', self.release())
        self.assertEqual([[A, None]], self.kernel.resets(A))
        self.assertEqual('nvidia', pci.driver(self.kernel, A))

    def test_of_a_card_that_the_operator_keeps_for_guests(self):
        self.start(driver='vfio-pci', reset_method='pm bus',
                   handover=['reset'])
        self.use()
        self.assertEqual('reset pm', self.release())
        self.assertEqual([[A, 'vfio-pci']], self.kernel.resets(A))
        self.assertEqual('vfio-pci', pci.driver(self.kernel, A))

    def test_the_slot_goes_along(self):
        sound, usb = COMPANY
        self.start({**sound, 'reset_method': 'pm'},
                   {**usb, 'iommu_group': 8, 'reset_method': ''})
        self.use()
        # what cannot be reset has no memory of its own
        self.assertEqual(f'reset flr, reset pm {SOUND}', self.release())
        self.assertEqual([[SOUND, 'vfio-pci']], self.kernel.resets(SOUND))
        self.assertEqual([], self.kernel.resets(USB))

    def test_kernel_before_5_15(self):
        self.start(faults={'attributes': {'reset_method': 'missing'}})
        self.use()
        self.assertEqual('reset any', self.release())

    @ddt.data((['none'], 0), (['operator'], 0), (['gpu=none'], 0),
              (['none', f'{A}=reset'], 1), (['clear'], 1))
    @ddt.unpack
    def test_policies(self, handover, resets):
        self.start(handover=handover)
        self.use()
        self.assertEqual('reset flr' if resets else None, self.release())
        self.assertEqual(resets, len(self.kernel.resets(A)))

    @ddt.data(({'reset_method': ''}, ()),
              # emptied by the operator
              ({'faults': {'attributes': {'reset_method': ''}}}, ()),
              # of a bus with another function the kernel lists it all the same
              ({'reset_method': 'bus'}, COMPANY))
    @ddt.unpack
    def test_card_that_cannot_be_reset_is_not_offered(self, more, others):
        device = self.start(*others, **more)
        super().refused(device, A, 'reset_method', f'{A}=operator')
        for policy in ('none', 'operator'):
            self.config.config(group='accel', handover=[f'{A}={policy}'])
            self.assertEqual(OK, self.driver.discover()[A].health)
        self.config.config(group='accel', handover=['reset'])
        self.assertEqual(QUARANTINED, self.driver.discover()[A].health)

    def test_bus_of_its_own(self):
        self.start(reset_method='bus')
        self.use()
        self.assertEqual('reset bus', self.release())

    @ddt.data((['reset'], 'reset flr', False),
              ([f'{A}=bus'], 'reset bus', True),
              (['clear', 'gpu=bus'], 'reset bus', True))
    @ddt.unpack
    def test_by_its_bus(self, handover, done, ends):
        """What a reset of the function leaves; then it is as it was."""
        # of NVIDIA's more is read then: test_gpu_clearing
        self.start(handover=handover, reset_method='flr bus', vendor='1002',
                   device='744c')
        self.use()
        self.kernel.set_fault(A, attributes={'power_state': 'EIO'},
                              ends_by='card reset')
        self.assertEqual(done, self.release())
        path = pci.path(A, 'power_state')
        if ends:
            self.kernel.read(path)
        else:
            self.assertRaises(OSError, self.kernel.read, path)
        self.assertEqual('flr bus', self.kernel.read(
            pci.path(A, 'reset_method')))
        self.assertEqual('nvidia', pci.driver(self.kernel, A))

    def test_by_its_bus_as_the_operator_set_it(self):
        self.start(handover=['gpu=bus'], reset_method='flr bus')
        self.kernel.write_attribute(A, 'reset_method', 'bus')
        self.use()
        self.assertEqual('reset bus', self.release())
        self.assertEqual('bus', self.kernel.read(pci.path(A, 'reset_method')))

    @ddt.data(({'reset_method': 'flr'}, ()),
              ({'reset_method': 'flr bus'}, COMPANY),
              ({'faults': {'attributes': {'reset_method': 'missing'}}}, ()))
    @ddt.unpack
    def test_bus_that_cannot_be_reset(self, more, others):
        device = self.start(*others, handover=['gpu=bus'], **more)
        super().refused(device, A, 'by its bus', f'{A}=clear')
        self.config.config(group='accel', handover=['gpu=bus', f'{A}=clear'])
        self.assertEqual(OK, self.driver.discover()[A].health)

    @ddt.data('EIO', 'ENOTTY')
    def test_reset_that_fails(self, fault):
        self.start()
        self.use()
        self.kernel.set_fault(A, reset=fault)
        self.refused('must be reset')
        # the host's driver does not get what the server left
        self.assertIsNone(pci.driver(self.kernel, A))
        self.kernel.set_fault(A, reset=None)
        self.assertEqual('reset flr', self.release())
        self.assertEqual('nvidia', pci.driver(self.kernel, A))

    def test_reset_of_the_company_that_fails(self):
        self.start(*COMPANY)
        self.use()
        self.kernel.set_fault(SOUND, reset='EIO')
        self.refused(f'failed at {SOUND} (Input/output error)')

    def test_card_that_does_not_come_back(self):
        self.start()
        self.use()
        self.kernel.set_fault(A, reset='dead')
        self.refused('does not answer', 'power-cycle')

    def test_card_that_is_another_one_after_it(self):
        self.start()
        self.use()
        self.device = dataclasses.replace(self.device, product_id='2330')
        self.refused('other ids')

    def test_killed_between_the_steps(self):
        self.start()
        self.use()
        self.kernel.unbind(A)
        self.assertEqual('reset flr', self.release())
        self.assertEqual('nvidia', pci.driver(self.kernel, A))

    def test_driver_that_does_not_come_back(self):
        self.start()
        self.use()
        self.kernel.unbind(A)
        self.kernel.set_fault(A, bind='ENODEV')
        self.refused('No such device')
