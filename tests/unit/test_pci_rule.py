# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices by the operator's rules, on simulated hosts."""

import dataclasses
import json

import ddt
import fixtures

from nova_accel.drivers import base
from nova_accel.drivers import pci_rule
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from tests.unit import configured
from tests.unit.host import A, B, SimulatedHost, vf

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
NPU = {'address': A, 'vendor': '19e5', 'device': 'd801', 'class': '0x120000',
       'driver': 'davinci', 'total_vfs': 4, 'vf_device': 'd80f'}
GAUDI = {'address': B, 'vendor': '1da3', 'device': '1020',
         'class': '0x120000', 'driver': 'habanalabs'}
BRIDGE = {'address': '0000:00:01.0', 'vendor': '19e5', 'device': '0001',
          'class': '0x060400', 'driver': 'pcieport'}


class TestCase(configured.TestCase):

    def start(self, *rules, others=(NPU, GAUDI, BRIDGE), **more):
        self.config.config(group='accel', pci_devices=list(rules))
        self.kernel = self.useFixture(
            SimulatedHost(others=list(others), **more)).kernel
        self.driver = pci_rule.PciRuleDriver(self.kernel)
        return self.driver.discover()

    def handles(self, device):
        return [h.address for h in device.handles]

    def warnings(self):
        logged = self.useFixture(fixtures.FakeLogger())
        self.driver.configure()
        return logged.output.splitlines()


@ddt.ddt
class Rules(TestCase):

    def test_dead_card_is_no_other_product(self):
        """A rule with an address matches all ones as well."""
        known = self.start(f'address={A} type=AI')
        self.kernel.set_fault(A, attributes={'vendor': '0xffff',
                                             'device': '0xffff'})
        now = self.driver.discover(known)[A]
        self.assertEqual((model.Health.QUARANTINED, known[A].ids),
                         (now.health, now.ids))
        self.assertIn('a dead card', now.reason)

    def test_another_product_has_nothing_of_the_first(self):
        known = self.start(f'address={A} type=AI')
        before = {A: dataclasses.replace(known[A], product_id='d802',
                                         record=(('firmware', '1'),))}
        self.assertEqual(known, self.driver.discover(before))

    def test_what_the_rule_says(self):
        found = self.start(
            'vendor=19e5 product=d801 type=AI name=Ascend-310 '
            'traits=CUSTOM_NPU,CUSTOM_NPU_ASCEND',
            'vendor=1da3 type=AI')
        self.assertEqual([A, B], sorted(found))
        npu, gaudi = found[A], found[B]
        self.assertEqual(
            ('AI', 'HUAWEI', 'Ascend-310', '19e5', 'd801', 'pci', OK, [A]),
            (npu.type, npu.vendor, npu.product, npu.vendor_id, npu.product_id,
             npu.driver, npu.health, self.handles(npu)))
        self.assertLessEqual(
            {'CUSTOM_AI_HUAWEI', 'CUSTOM_AI_HUAWEI_ASCEND_310', 'CUSTOM_NPU',
             'CUSTOM_NPU_ASCEND'}, naming.device_traits(npu))
        self.assertLessEqual({'CUSTOM_AI_HABANA', 'CUSTOM_AI_HABANA_1020'},
                             naming.device_traits(gaudi))
        self.assertEqual('CUSTOM_ACCELERATOR_AI',
                         naming.resource_class(npu.type))
        self.assertEqual([], self.warnings())

    @ddt.data(
        'vendor=19e5', 'vendor=0x19E5', 'product=d80?', 'address=0000:5e:*',
        'driver=davinci', 'driver=da*', 'class=120000 vendor=19e5',
        'class=12* product=d801', 'vendor=19e5 driver=davinci')
    def test_ways_to_name_a_device(self, pairs):
        self.assertEqual([A], list(self.start(f'{pairs} type=AI')))

    def test_first_rule_counts(self):
        found = self.start('vendor=19e5 type=NPU', 'class=1200* type=AI',
                           others=[NPU, GAUDI])
        self.assertEqual(['NPU', 'AI'], [found[a].type for a in (A, B)])
        warning, = self.warnings()
        self.assertIn(f'{A} is matched by "vendor=19e5 type=NPU" and by '
                      f'"class=1200* type=AI"', warning)

    def test_rule_that_matches_nothing(self):
        self.assertEqual([], list(self.start('vendor=cabc type=AI')))
        warning, = self.warnings()
        self.assertIn('pci_devices = vendor=cabc type=AI matches no device',
                      warning)

    def test_bridges_are_never_taken(self):
        self.assertEqual([A], list(self.start('vendor=19e5 type=AI')))
        warning, = self.warnings()
        self.assertIn(f'bridge {BRIDGE["address"]}', warning)

    def test_no_rules(self):
        self.assertEqual({}, self.start())
        self.assertEqual([], self.warnings())

    @ddt.data(
        ('vendor=19e5', 'type, which every rule needs'),
        ('vendor=19e5 type=ai', 'type, which every rule needs'),
        ('vendor=19e5 type=A-B', 'type, which every rule needs'),
        ('type=AI', 'no key says which devices'),
        ('type=AI name=X traits=CUSTOM_X', 'no key says which devices'),
        ('vendor=19e5 type=AI traits=NPU', "'NPU' is not a trait"),
        ('vendor=19e5 type=AI traits=CUSTOM_X,CUSTOM_y', "'CUSTOM_y' is no"),
        ('vendor=19e5 type=AI name=a/b', "the name 'a/b'"),
        ('vendor=19e5 type=AI size=4', "'size' is none of the keys"),
        ('vendor=9e5 type=AI', 'which is not 4 hexadecimal digits'),
        ('class=1200 type=AI', 'which is not 6 hexadecimal digits'),
        ('', 'an empty rule'))
    @ddt.unpack
    def test_rules_that_mean_nothing(self, rule, said):
        self.start()
        self.config.config(group='accel', pci_devices=[rule])
        for call in (self.driver.discover, self.driver.configure):
            error = self.assertRaises(exception.ConfigurationError, call)
            self.assertIn(said, str(error))
            self.assertIn('[accel] pci_devices', str(error))
            self.assertLessEqual(len(str(error)), 255)

    def test_rule_that_is_taken_away(self):
        known = self.start('class=1200* type=AI')
        self.config.config(group='accel',
                           pci_devices=['vendor=1da3 type=AI'])
        self.assertEqual([B], list(self.driver.discover(known)))


SXM = {'address': A, 'vendor': '10de', 'device': '2330', 'class': '0x030200',
       'driver': 'nvidia'}
NVSWITCH = {'address': '0000:07:00.0', 'vendor': '10de', 'device': '22a3',
            'class': '0x068000', 'driver': None}


@ddt.ddt
class Nvswitches(TestCase):
    """The rules for GPUs that NVSwitches join are not only of the driver
    gpu."""

    @ddt.data('vendor=10de type=GPU', 'address=* vendor=10de type=GPU',
              f'address={A[:-1]}? type=GPU', 'class=0302* type=GPU')
    def test_gpu_by_a_wide_rule(self, rule):
        found = self.start(rule, others=[SXM, NVSWITCH])[A]
        self.assertEqual((QUARANTINED, ()), (found.health, found.handles))
        for text in (NVSWITCH['address'], f'address={A}', pci_rule.OPTION):
            self.assertIn(text, found.reason)

    def test_gpu_by_its_address(self):
        found = self.start(f'address={A} type=GPU', others=[SXM, NVSWITCH])
        self.assertEqual(OK, found[A].health)

    def test_gpus_of_a_set(self):
        self.config.config(group='accel', device_sets=[f'{A} {B}'],
                           fabric_command='/etc/nova/fabric')
        found = self.start('vendor=10de type=GPU', others=[
            SXM, {**SXM, 'address': B}, NVSWITCH])
        self.assertEqual([OK, OK], [found[a].health for a in (A, B)])

    def test_other_device_of_nvidia(self):
        found = self.start('vendor=10de type=NET', others=[
            {**SXM, 'class': '0x120000'}, NVSWITCH])
        self.assertEqual(OK, found[A].health)


@ddt.ddt
class Devices(TestCase):

    def test_device_of_a_guest_is_as_known(self):
        known = self.start('driver=davinci type=AI', 'driver=h* type=AI')
        self.kernel.guest_takes(A)
        self.assertEqual('vfio-pci', pci.driver(self.kernel, A))
        self.assertEqual(known, self.driver.discover(known))

    @ddt.data('mlx5_vfio_pci', 'xe-vfio-pci')
    def test_device_of_a_guest_under_a_variant(self, variant):
        """libvirt 10.0 and later choose it; the rule has another driver."""
        known = self.start('driver=davinci type=AI', others=[
            {**NPU, 'vfio_driver': variant}])
        self.kernel.guest_takes(A)
        self.assertEqual(variant, pci.driver(self.kernel, A))
        self.assertEqual(known, self.driver.discover(known))
        self.kernel.guest_returns(A)
        self.assertEqual('davinci', pci.driver(self.kernel, A))

    @ddt.data('qat_vfio_pci', 'nvgrace_gpu_vfio_pci')
    def test_variant_that_the_operator_bound(self, variant):
        """It stays, also after the reset between two servers."""
        found = self.start('product=d801 type=AI', others=[
            {**NPU, 'driver': variant}])
        handle, = found[A].handles
        self.kernel.guest_takes(A)
        self.assertTrue(pci.is_open(self.kernel, A))
        self.kernel.guest_returns(A)
        self.assertEqual('reset flr', self.driver.release(
            found[A], handle, None, base.Use()))
        self.assertEqual([[A, variant]], self.kernel.resets(A))
        self.assertEqual(variant, pci.driver(self.kernel, A))

    def test_bound_to_vfio_by_the_operator(self):
        found = self.start('driver=vfio-pci type=AI', 'driver=davinci type=X',
                           others=[{**NPU, 'driver': 'vfio-pci'}])
        self.assertEqual(('AI', OK), (found[A].type, found[A].health))
        self.assertEqual(found, self.driver.discover(found))

    def test_virtual_functions(self):
        self.config.config(group='accel', virtual_functions=[f'{A}=2'])
        self.start('product=d801 type=AI')
        self.driver.configure()
        found = self.driver.discover()
        self.assertEqual([f'{A[:-1]}1', f'{A[:-1]}2'],
                         self.handles(found[A]))
        # a rule for the id of the VFs names no device
        self.assertEqual({}, self.start('product=d80f type=AI'))

    def test_disk_that_the_host_uses(self):
        found = self.start('class=010802 type=DISK', nvmes=[
            {'address': A, 'use': 'mounted at /'}, {'address': B}], others=[])
        self.assertEqual((QUARANTINED, ()),
                         (found[A].health, found[A].handles))
        self.assertIn('mounted at /', found[A].reason)
        self.assertEqual((OK, [B]), (found[B].health,
                                     self.handles(found[B])))
        log = self.useFixture(fixtures.FakeLogger())
        self.kernel.use_disk(B, 'dm-0')
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, found[B],
            found[B].handles[0], None, True, base.Use())
        self.assertIn('the host uses it', str(error))
        self.assertIn('dm-0', log.output)
        # nor is it reset after a server, under what the host has on it
        error = self.assertRaises(
            exception.DeviceError, self.driver.release, found[B],
            found[B].handles[0], None, base.Use())
        self.assertIn('the host uses it (', str(error))
        self.assertEqual([], self.kernel.resets(B))

    def test_network_of_the_host(self):
        found = self.start('class=02* type=NIC', others=[], nics=[
            {'address': A}, {'address': B, 'up': False}])
        self.assertEqual((QUARANTINED, ()),
                         (found[A].health, found[A].handles))
        self.assertIn('is up', found[A].reason)
        self.assertEqual((OK, [B]), (found[B].health,
                                     self.handles(found[B])))

    def test_vfs_of_a_card_that_is_up(self):
        found = self.start('class=02* type=NIC', others=[], nics=[
            {'address': A, 'total_vfs': 2, 'vfs': 2}])
        self.assertEqual((OK, [f'{A[:-1]}1', f'{A[:-1]}2']),
                         (found[A].health, self.handles(found[A])))

    def test_dead(self):
        known = self.start('vendor=19e5 type=AI')
        self.kernel.set_fault(A, dead=True)
        dead = self.driver.discover(known)[A]
        self.assertEqual((QUARANTINED, [A]), (dead.health,
                                              self.handles(dead)))


@ddt.ddt
class Together(TestCase):
    """All VFs of a function are one accelerator."""

    VFS = tuple(vf(A, number) for number in range(3))

    def start(self, npu=(), **more):
        self.config.config(group='accel', **more)
        return super().start('vendor=19e5 type=AI vfs=together', others=[
            {**NPU, 'vfs': 3, **dict(npu)}])[A]

    def release(self, device):
        for function in self.VFS:
            self.kernel.guest_takes(function)
            self.kernel.guest_returns(function)
        return self.driver.release(device, device.handles[0], None, base.Use())

    def test_one_handle(self):
        device = self.start()
        handle, = device.handles
        self.assertEqual((OK, self.VFS, A), (
            device.health, handle.functions, handle.parent))
        # the whole function, and what the host uses, stays there
        self.assertEqual({A, *self.VFS}, device.functions())

    def test_made_by_nova_compute(self):
        device = self.start({'vfs': 0}, virtual_functions=[f'{A}=2'])
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        self.assertIn('[accel] virtual_functions', device.reason)
        self.driver.configure()
        handle, = self.driver.discover()[A].handles
        self.assertEqual(self.VFS[:2], handle.functions)

    def test_that_a_guest_cannot_have(self):
        device = self.start({'faults': {'attributes': {'reset_method': ''}}})
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        self.assertIn('cannot be reset', device.reason)
        device = TestCase.start(
            self, 'vendor=19e5 type=AI vfs=together',
            others=[{**NPU, 'vfs': 3}], iommu=False)[A]
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        self.assertIn(f'of {vf(A)} ', device.reason)

    def test_one_that_is_excluded(self):
        device = self.start()
        self.config.config(
            exclude_devices=[f'address={self.VFS[2]}'], group='accel')
        self.assertEqual((), rules.DeviceRules().applied(device).handles)

    def test_each_is_reset(self):
        device = self.start()
        self.assertEqual(
            ', '.join(f'reset flr{then}' for then in (
                '', *(f' {other}' for other in self.VFS[1:]))),
            self.release(device))
        self.assertEqual([[f, None] for f in self.VFS], self.kernel.resets(A))

    def test_one_is_not_reset(self):
        device = self.start()
        self.kernel.set_fault(A, reset='EIO')
        error = self.assertRaises(
            exception.DeviceError, self.release, device)
        self.assertIn('must be reset after its server', str(error))

    def test_not_while_it_runs(self):
        device = self.start({'vfio_driver': 'mlx5_vfio_pci'})
        self.assertEqual('', device.migrates_by)
        self.assertIn('3 functions', device.stays)

    @ddt.data('vfs=all', 'vfs=2')
    def test_other_values(self, value):
        error = self.assertRaises(exception.ConfigurationError, TestCase.start,
                                  self, f'vendor=19e5 type=AI {value}')
        self.assertIn('vfs can only be together', str(error))


AUX = f'{A[:-1]}1'
#: another function of the same card, in an IOMMU group of its own
SECOND = {'address': AUX, 'vendor': '19e5', 'device': 'a222',
          'class': '0x118000', 'driver': None}


@ddt.ddt
class Slot(TestCase):
    """Functions of the same slot that no rule names."""

    RULE = 'product=d801 type=AI'

    def start(self, second=(), npu=(), rules=(RULE,), **config):
        self.config.config(group='accel', **config)
        return super().start(*rules, others=[
            {**NPU, 'total_vfs': 0, **dict(npu)},
            {**SECOND, **dict(second)}])[A]

    def refused(self, device, *said):
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        for text in said:
            self.assertIn(text, device.reason)

    def end(self, device):
        """A server has the function, and its guest has ended."""
        handle, = device.handles
        self.driver.prepare(device, handle, None, True, base.Use())
        functions = (A, *handle.companions)
        self.kernel.guest_takes(*functions)
        for function in functions:
            self.kernel.guest_returns(function)
        return self.driver.release(device, handle, None, base.Use())

    @ddt.data(None, 'vfio-pci')
    def test_goes_along(self, bound):
        """Also from another IOMMU group, into which the guest does not
        see."""
        device = self.start({'driver': bound})
        self.assertEqual((OK, (AUX,), ()), (
            device.health, device.company, device.handles[0].companions))
        self.assertEqual(f'reset flr, reset flr {AUX}', self.end(device))
        self.assertEqual([[AUX, 'vfio-pci']], self.kernel.resets(AUX))
        self.assertEqual('vfio-pci', pci.driver(self.kernel, AUX))

    def test_sound_goes_along_though_the_host_has_a_driver(self):
        device = self.start({'class': '0x040300', 'driver': 'snd_hda_intel',
                             'iommu_group': 7}, {'iommu_group': 7})
        self.assertEqual((AUX,), device.handles[0].companions)
        self.assertEqual(f'reset flr, reset flr {AUX}', self.end(device))

    @ddt.data(({'driver': 'davinci_mgmt'}, 'driver davinci_mgmt of the host'),
              ({'total_vfs': 2, 'vfs': 2}, 'virtual functions'))
    @ddt.unpack
    def test_somebody_else_uses_it(self, second, said):
        device = self.start(second)
        self.refused(device, AUX, said, f'{A}=reset')
        self.config.config(group='accel', handover=[f'{A}=reset'])
        device = self.driver.discover()[A]
        self.assertEqual((OK, ()), (device.health, device.company))
        self.assertEqual('reset flr', self.end(device))
        self.assertEqual([], self.kernel.resets(AUX))

    def test_interface_of_the_host(self):
        device = TestCase.start(self, self.RULE, others=[
            {**NPU, 'total_vfs': 0}], nics=[{'address': AUX}])[A]
        self.refused(device, AUX, 'is up')

    def test_another_guest_has_it(self):
        """Given by hand, or by Nova: what it has is not reset under it."""
        device = self.start()
        before = self.driver.state(A)
        self.kernel.guest_takes(AUX)
        self.assertNotEqual(before, self.driver.state(A))
        self.refused(self.driver.discover()[A], AUX, 'a guest has it')
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, device,
            device.handles[0], None, True, base.Use())
        self.assertIn('used by another process', str(error))
        error = self.assertRaises(
            exception.DeviceError, self.driver.release, device,
            device.handles[0], None, base.Use())
        self.assertIn('a guest has it', str(error))
        self.assertEqual(([], []), (self.kernel.resets(A),
                                    self.kernel.resets(AUX)))
        self.kernel.guest_returns(AUX)
        self.assertEqual(f'reset flr, reset flr {AUX}', self.end(device))

    def test_device_of_its_own(self):
        """Two that rules name are two devices; each is reset by itself."""
        device = self.start(rules=(self.RULE, 'product=a222 type=AUX'))
        self.assertEqual((), device.company)
        self.assertEqual('reset flr', self.end(device))
        self.kernel.guest_takes(AUX)
        self.assertEqual('reset flr', self.end(self.driver.discover()[A]))

    def test_bridges_stay(self):
        self.assertEqual((), self.start({'class': '0x060400'}).company)

    def test_virtual_functions_are_reset_by_themselves(self):
        device = self.start({'address': f'{A[:-1]}7', 'driver': 'x'},
                            {'total_vfs': 2, 'vfs': 2})
        self.assertEqual((OK, ()), (device.health, device.company))

    def test_known_again(self):
        device = self.start()
        self.assertEqual(device, model.from_dict(
            model.Device, json.loads(json.dumps(
                dataclasses.asdict(device), default=lambda kind: kind.value))))


class Release(TestCase):
    """What is done with a function between two servers."""

    RULE = 'vendor=19e5 type=AI'

    def start(self, *rules, npu=NPU, handover=(), **more):
        self.config.config(group='accel', handover=list(handover))
        self.device = super().start(*rules or [self.RULE], others=[npu],
                                    **more)[A]
        return self.device

    def use(self):
        for handle in self.device.handles:
            self.kernel.guest_takes(handle.address)
            self.kernel.guest_returns(handle.address)

    def release(self, number=0):
        return self.driver.release(
            self.device, self.device.handles[number], None, base.Use())

    def test_whole_function(self):
        self.start()
        self.use()
        self.assertEqual('reset flr', self.release())
        self.assertEqual([[A, None]], self.kernel.resets(A))
        self.assertEqual('davinci', pci.driver(self.kernel, A))

    def test_virtual_functions(self):
        """Each by itself; its ids read as ones in every state."""
        self.start(npu={**NPU, 'vfs': 2})
        self.use()
        self.assertEqual('reset flr', self.release(1))
        self.assertEqual([['0000:5e:00.2', None]], self.kernel.resets(A))

    def test_without_a_way_to_reset(self):
        device = self.start(npu={**NPU, 'reset_method': ''})
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        self.assertIn('cannot be reset', device.reason)
        self.config.config(group='accel', handover=['pci=none'])
        self.assertEqual(OK, self.driver.discover()[A].health)
        self.assertIsNone(self.driver.release(
            device, model.AttachHandle(model.HandleType.PCI, A), None,
            base.Use()))

    def test_policy_of_one_virtual_function(self):
        missing = {'attributes': {'reset_method': ''}}
        device = self.start(npu={**NPU, 'vfs': 2, 'faults': missing},
                            handover=['0000:5e:00.2=none'])
        self.assertEqual(['0000:5e:00.2'], self.handles(device))

    def test_used_by_the_host_since(self):
        """What a server leaves may be brought up when it comes back."""
        self.config.config(group='accel', handover=[])
        device = TestCase.start(
            self, 'class=010802 type=DISK', others=[],
            nvmes=[{'address': A}])[A]
        self.kernel.use_disk(A, 'mounted at /srv')
        error = self.assertRaises(exception.DeviceError, self.driver.release,
                                  device, device.handles[0], None, base.Use())
        self.assertIn('mounted at /srv', str(error))
        self.assertEqual([], self.kernel.resets(A))

    def test_rule_by_driver_knows_it_while_it_is_reset(self):
        known = self.start('driver=davinci type=AI')
        self.kernel.unbind(A)
        self.assertIn(A, self.driver.find())
        self.assertEqual({A: known}, self.driver.discover({A: known}))

    def test_deny_list_of_vfio(self):
        dsa = {**NPU, 'vendor': '8086', 'device': '0b25', 'total_vfs': 0}
        device = self.start('vendor=8086 type=AI', npu=dsa)
        self.assertEqual(QUARANTINED, device.health)
        self.assertIn('disable_denylist=1', device.reason)
        self.assertRaises(OSError, self.kernel.guest_takes, A)
        device = self.start('vendor=8086 type=AI', npu=dsa,
                            disable_denylist=True)
        self.assertEqual(OK, device.health)
