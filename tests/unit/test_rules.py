# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which devices the operator lets the host report."""

import dataclasses
import types

import ddt

from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel import model
from tests.unit import configured

A, B = '0000:5e:00.0', '0000:81:00.0'


def handle(address, **more):
    return model.AttachHandle(model.HandleType.PCI, address, **more)


def device(address, vendor='8086', product='09c4', **more):
    return model.Device(
        address=address, type='FPGA', vendor='INTEL', product='X',
        vendor_id=vendor, product_id=product, driver='dfl', **more)


class TestCase(configured.TestCase):

    def rules(self, include=(), exclude=()):
        self.config.config(group='accel', include_devices=list(include),
                           exclude_devices=list(exclude))
        return rules.DeviceRules()

    def left(self, found, *devices):
        found.known(devices)
        return [d.address for d in devices if found.applied(d)]


class Traits(TestCase):

    def rules(self, *given):
        self.config.config(group='accel', device_traits=list(given))
        return rules.DeviceRules()

    def test_those_of_all_rules_that_match(self):
        found = self.rules(
            'vendor=8086 traits=CUSTOM_GOLD,CUSTOM_NEW',
            'product=1*  traits=CUSTOM_OLD', 'address=0000:01:00.0 '
            'traits=CUSTOM_RACK_7')
        one = device('0000:01:00.0', traits=('CUSTOM_OWN', 'CUSTOM_GOLD'))
        self.assertEqual(
            ('CUSTOM_GOLD', 'CUSTOM_NEW', 'CUSTOM_OWN', 'CUSTOM_RACK_7'),
            found.applied(one).traits)
        self.assertEqual([f'{rules.TRAITS} = product=1*  traits=CUSTOM_OLD '
                          f'matches no device that the drivers find: correct '
                          f'or remove it.'], found.unused())
        other = device('0000:02:00.0', vendor='1da3', traits=('CUSTOM_OWN',))
        self.assertEqual(('CUSTOM_OWN',), found.applied(other).traits)

    def test_rules_that_cannot_be(self):
        for text, said in (
                ('vendor=8086', "has '' among its traits"),
                ('vendor=8086 traits=GOLD', "has 'GOLD' among its traits"),
                ('vendor=8086 traits=CUSTOM_A,', "has '' among its traits"),
                ('driver=nvme traits=CUSTOM_A', "'driver' is none of the")):
            error = self.assertRaises(exception.ConfigurationError,
                                      self.rules, text)
            self.assertIn(said, str(error))
            self.assertIn('[accel] device_traits', str(error))


@ddt.ddt
class Parsing(TestCase):

    @ddt.data(
        ('model=x', "'model' is none of the keys address, vendor, product"),
        ('vendor', "'vendor' has no value"),
        ('vendor=', "'vendor' has no value"),
        ('=8086', "'' is none of the keys"),
        ('vendor=8086 vendor=1002', "'vendor' is there twice"),
        ('vendor=8o86', "is '8o86', which is not 4 hexadecimal digits"),
        ('product=9c4', "is '9c4', which is not 4 hexadecimal digits"),
        ('', 'an empty rule'), ('   ', 'an empty rule'))
    @ddt.unpack
    def test_rules_that_mean_nothing(self, text, said):
        for name in ('include', 'exclude'):
            error = self.assertRaises(exception.ConfigurationError,
                                      self.rules, **{name: [text]})
            self.assertIn(said, str(error))
            self.assertIn(f'[accel] {name}_devices', str(error))
            self.assertLessEqual(len(str(error)), 255)

    @ddt.data('vendor=8086', 'vendor=0x8086', 'product=09C4',
              'vendor=8086 product=09c4', f'address={A}',
              'address=0000:5E:00.0', 'address=00000000:5E:00.0',
              'address=*:5e:00.0',
              'address=0000:5e:*', 'address=????:5e:00.?', 'product=09*',
              'product=09c[0-5]', f'  vendor=8086   address={A} ')
    def test_spellings(self, text):
        self.assertEqual([A], self.left(self.rules([text]), device(A)))

    @ddt.data('address=10000:5e:00.0', 'address=00010000:5E:00.0')
    def test_domain_of_five_digits(self, text):
        self.assertEqual(['10000:5e:00.0'], self.left(
            self.rules([text]), device(A), device('10000:5e:00.0')))

    def test_subsystem(self):
        one = device(A, subsystem='10de:1533')
        other = device(B, subsystem='10de:1642')
        unknown = device('0000:01:00.0')
        for text, expected in (('subsystem=10DE:1533', [A]),
                               ('product=09c4 subsystem=10de:*', [A, B]),
                               ('subsystem=????:1642', [B])):
            self.assertEqual(expected, self.left(
                self.rules([text]), one, other, unknown))
        error = self.assertRaises(exception.ConfigurationError,
                                  self.rules, ['subsystem=1533'])
        self.assertIn('not <vendor>:<device>', str(error))

    @ddt.data('vendor=1002', 'product=09c5', f'address={B}', 'address=5e',
              'vendor=8086 product=09c5', f'product=09c4 address={B}',
              'address=0000:5e', 'product=09c[5-9]')
    def test_other_devices(self, text):
        self.assertFalse(self.rules([text]).includes(device(A)))


class Devices(TestCase):

    def test_all_without_rules(self):
        found = self.rules()
        self.assertEqual([A, B], self.left(found, device(A), device(B)))
        self.assertEqual([], found.unused())

    def test_one_include_is_enough(self):
        found = self.rules([f'address={A}', 'vendor=1002'])
        self.assertEqual([A, B], self.left(
            found, device(A), device(B, '1002'), device('0000:01:00.0')))

    def test_devices_of_another_driver(self):
        """A rule hides those of the driver of which it names a device, also
        while that device is gone."""
        found = self.rules([f'address={A}'])
        gpu = dataclasses.replace(device('0000:3b:00.0'), driver='gpu')
        self.assertEqual([A, gpu.address], self.left(
            found, device(A), device(B), gpu))
        found = self.rules([f'address={A}'])
        found.known([device(A)])
        self.assertEqual([gpu.address], self.left(found, device(B), gpu))

    def test_found(self):
        """Before a device is examined; what cannot be read may be named."""
        def unreadable(path):
            raise OSError(path)

        for address, read, is_left in (
                (A, lambda path: '0x8086', False),
                (A, lambda path: '0x1002', True),
                (A, unreadable, False), ('card0', unreadable, True)):
            found = self.rules(['vendor=8086'])
            found.found('dfl', [address], types.SimpleNamespace(read=read))
            self.assertEqual(is_left, bool(found.applied(device(B, '1002'))))

    def test_exclude(self):
        found = self.rules(exclude=['vendor=1002', 'address=0000:01:*'])
        self.assertEqual([A], self.left(
            found, device(A), device(B, '1002'), device('0000:01:00.0')))
        self.assertEqual([], found.unused())

    def test_exclude_wins_and_says_so(self):
        found = self.rules(['vendor=8086'], [f'address={B}'])
        self.assertEqual([A], self.left(found, device(A), device(B)))
        self.assertEqual([
            f'{B} is matched by [accel] include_devices = vendor=8086 and by '
            f'[accel] exclude_devices = address={B}: it is excluded.'],
            found.unused())

    def test_rules_that_match_nothing(self):
        found = self.rules(['vendor=8086', 'vendor=1002'],
                           ['address=0000:99:*'])
        self.assertEqual([A], self.left(found, device(A)))
        one, two = found.unused()
        self.assertIn('include_devices = vendor=1002 matches no device', one)
        self.assertIn('exclude_devices = address=0000:99:* matches no', two)

    def test_single_vfs(self):
        vfs = [handle(f'0000:5e:00.{n}', parent=A) for n in (1, 2, 3)]
        found = self.rules(exclude=['address=0000:5e:00.[13]'])
        self.assertEqual((vfs[1],), found.applied(
            device(A, handles=tuple(vfs))).handles)
        regions = tuple(model.Region(index=n, region_type_uuid=None,
                                     function_uuid=None, handles=(vf,))
                        for n, vf in enumerate(vfs))
        self.assertEqual([(), (vfs[1],), ()], [
            r.handles for r in found.applied(
                device(A, regions=regions)).regions])
        self.assertEqual([], found.unused())

    def test_vf_that_has_mediated_devices(self):
        mdevs = tuple(model.AttachHandle(
            model.HandleType.MDEV, f'1111111{n}-2222-4333-8444-555555555555',
            parent=f'0000:5e:00.{n}') for n in (4, 5))
        found = self.rules(exclude=['address=0000:5e:00.4'])
        self.assertEqual(mdevs[1:], found.applied(
            device(A, handles=mdevs)).handles)

    def test_companion(self):
        # without its company the card cannot go to a guest
        card = device(A, handles=(handle(A, companions=('0000:5e:00.1',)),))
        found = self.rules(exclude=['address=0000:5e:00.1'])
        self.assertEqual((), found.applied(card).handles)


class AdviceTest(TestCase):

    def test_words_of_other_tools(self):
        for text, advice in (
                ('10DE:26b9', 'write vendor=10de product=26b9'),
                (A, f'write address={A}'), ('vendor', 'write vendor=value')):
            error = self.assertRaises(
                exception.ConfigurationError, rules.parse, rules.INCLUDE,
                [text], rules.KEYS)
            self.assertIn(advice, str(error))
