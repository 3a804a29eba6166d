# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What libvirt says that a guest has, and what it does not say; and the XML by
which a guest gets its devices."""

import types
from unittest import mock

import fixtures
from lxml import etree
from nova.virt.libvirt import config
from nova.virt.libvirt import guest as libvirt_guest
import testtools

from nova_accel import exception
from nova_accel import model
from nova_accel.virt import guest
from tests.unit.host import A

XML = """<domain type="kvm"><devices>
  <hostdev mode="subsystem" type="pci" managed="yes"><source>
    <address domain="0x0000" bus="0x5e" slot="0x00" function="0x0"/>
  </source></hostdev></devices></domain>"""
NO_DOMAIN, LOST, MISSING = 42, 38, 99
OTHER, MDEV = '0000:af:00.1', '5d1f7a90-c3b8-4e26-9f01-2b7c6a0e4d13'


class Failed(Exception):
    """As libvirt.libvirtError."""

    def get_error_code(self):
        return self.args[0]


def function(address, **more):
    return model.AttachHandle(model.HandleType.PCI, address, **more)


class Domain:

    def __init__(self, answer, state=(1, 1)):
        self.answer = answer
        self.found = state
        #: (what was called, address of a device, flags)
        self.calls = []
        #: what detaching raises
        self.error = None

    def state(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def _call(self, name, xml, flags):
        place = etree.fromstring(xml).find('source/address')
        self.calls.append((name, ':'.join(
            place.get(part) for part in ('bus', 'function')), flags))

    def attachDeviceFlags(self, xml, flags):
        self._call('attach', xml, flags)
        if self.error:
            raise self.error

    def detachDeviceFlags(self, xml, flags):
        self._call('detach', xml, flags)
        if self.error:
            raise self.error

    def XMLDesc(self, flags=0):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class GuestTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.libvirt', types.SimpleNamespace(
                libvirtError=Failed, VIR_ERR_NO_DOMAIN=NO_DOMAIN,
                VIR_ERR_DEVICE_MISSING=MISSING, VIR_DOMAIN_PAUSED=3)))
        # Nova 31 imports it here, where there may be none
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.guest.libvirt', types.SimpleNamespace(
                VIR_DOMAIN_AFFECT_CONFIG=2, VIR_DOMAIN_AFFECT_LIVE=1)))
        self.hostdevs = guest.Hostdevs(
            lambda hostdev, managed: setattr(hostdev, 'managed', managed == (
                'true') and 'yes' or 'no'))


class AddressesTest(GuestTestCase):

    def addresses(self, answer):
        return guest.Hostdevs.addresses(libvirt_guest.Guest(Domain(answer)))

    def test_addresses(self):
        self.assertEqual({A}, self.addresses(XML))

    def test_guest_that_has_ended(self):
        self.assertEqual(set(), self.addresses(Failed(NO_DOMAIN)))

    def test_libvirt_fails(self):
        """That is no guest without devices, from which they could be taken."""
        self.assertRaises(Failed, self.addresses, Failed(LOST))


class XmlTest(GuestTestCase):
    """Of a guest that is being made."""

    def made(self, *handles, there='', iommufd=()):
        xml = config.LibvirtConfigGuest()
        xml.parse_str(f'<domain><devices>{there}</devices></domain>')
        self.hostdevs.add(xml, handles, {}, iommufd)
        return [(
            hostdev.get('type'), hostdev.get('managed'),
            *hostdev.find('source/address').values(),
            hostdev.find('driver') is not None)
            for device in xml.devices
            for hostdev in [device.format_dom()]]

    def test_function(self):
        self.assertEqual(
            [('pci', 'yes', '0x0000', '0xaf', '0x00', '0x1', False)],
            self.made(function(OTHER)))

    def test_vendors_driver_stays(self):
        self.assertEqual('no', self.made(function(OTHER, managed=False))[0][1])

    def test_functions_that_go_along(self):
        self.assertEqual(['0x0', '0x1'], [
            found[5] for found in self.made(
                function('0000:af:00.0', companions=(OTHER,)))])

    def test_mediated_device(self):
        (kind, _, uuid, _), = self.made(
            model.AttachHandle(model.HandleType.MDEV, MDEV))
        self.assertEqual(('mdev', MDEV), (kind, uuid))

    def test_iommufd(self):
        """Of the one and not of the other."""
        self.assertEqual([False, True], [
            found[-1] for found in self.made(
                function(A), function(OTHER), iommufd=[OTHER])])

    def test_mediated_device_that_nova_put_back(self):
        """It is not twice in the guest."""
        there = (f'<hostdev mode="subsystem" type="mdev" model="vfio-pci" '
                 f'managed="no"><source><address uuid="{MDEV}"/></source>'
                 f'</hostdev>')
        handle = model.AttachHandle(model.HandleType.MDEV, MDEV)
        self.assertEqual(1, len(self.made(handle, there=there)))

    def test_xml_of_earlier(self):
        """What is missing is added, and nothing twice."""
        self.assertEqual(XML, self.hostdevs.complete(XML, [function(A)]))
        found = etree.fromstring(self.hostdevs.complete(
            XML, [function(A), function(OTHER)]))
        self.assertEqual(['0x5e', '0xaf'], [
            place.get('bus') for place in found.iterfind(
                'devices/hostdev/source/address')])

    def test_opened_by_iommufd(self):
        xml = XML.replace('</source>', '</source><driver iommufd="yes"/>')
        self.assertEqual({OTHER}, guest.without_iommufd(xml, [A, OTHER]))
        self.assertEqual({A}, guest.without_iommufd(XML, [A]))


class RunningTest(GuestTestCase):
    """Devices of a guest that runs."""

    def setUp(self):
        super().setUp()
        self.domain = Domain(XML)
        self.guest = mock.Mock(
            wraps=libvirt_guest.Guest(self.domain), uuid='one')
        self.now = 0
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.virt.guest.time', types.SimpleNamespace(
                monotonic=lambda: self.now, sleep=self.sleep)))
        #: what the guest has after a while
        self.later = XML

    def sleep(self, seconds):
        self.now += 5
        self.domain.answer = self.later

    def test_attach_what_is_missing(self):
        handles = [function(A), function(OTHER)]
        self.hostdevs.attach(self.guest, handles)
        self.assertEqual([('attach', '0xaf:0x1', 1)], self.domain.calls)
        self.hostdevs.attach(self.guest, handles, lasts=True)
        self.assertEqual(('attach', '0xaf:0x1', 3), self.domain.calls[-1])

    def test_one_is_refused(self):
        """The others are attached, and the error is not lost."""
        self.domain.error = Failed(LOST)
        self.assertRaises(Failed, self.hostdevs.attach, self.guest, [
            function(OTHER), function('0000:af:00.2')])
        self.assertEqual(2, len(self.domain.calls))

    def test_detach(self):
        """It ends when the guest has released the device."""
        self.later = '<domain><devices/></domain>'
        self.hostdevs.detach(self.guest, [function(A), function(OTHER)])
        self.assertEqual([('detach', '0x5e:0x0', 1)], self.domain.calls)

    def test_guest_keeps_it(self):
        error = self.assertRaises(
            exception.DeviceError, self.hostdevs.detach, self.guest,
            [function(A)])
        self.assertIn(f'must release {A} and did not within 20 s', str(error))

    def test_detach_that_is_refused(self):
        self.domain.error = Failed(LOST)
        self.assertRaises(Failed, self.hostdevs.detach, self.guest,
                          [function(A)])

    def test_detach_that_is_under_way(self):
        """Of an operation before."""
        for error in (Failed(MISSING), Failed(LOST, 'device is already in '
                                              'the process of unplug')):
            self.domain.error = error
            self.assertRaises(exception.DeviceError, self.hostdevs.detach,
                              self.guest, [function(A)])

    def test_paused_by_an_error(self):
        for state, is_paused in (
                ((3, 0), True), ((3, 1), False), ((1, 0), False),
                (Failed(NO_DOMAIN), False)):
            self.assertEqual(is_paused, guest.is_paused(
                libvirt_guest.Guest(Domain(XML, state))))
        self.assertRaises(Failed, guest.is_paused, libvirt_guest.Guest(
            Domain(XML, Failed(LOST))))
