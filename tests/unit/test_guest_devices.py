# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What libvirt says that a guest has, and what it does not say."""

import types

import fixtures
from nova.virt.libvirt import guest as libvirt_guest
import testtools

from nova_accel.virt import guest
from tests.unit.host import A

XML = """<domain type="kvm"><devices>
  <hostdev mode="subsystem" type="pci" managed="yes"><source>
    <address domain="0x0000" bus="0x5e" slot="0x00" function="0x0"/>
  </source></hostdev></devices></domain>"""
NO_DOMAIN, LOST = 42, 38


class Failed(Exception):
    """As libvirt.libvirtError."""

    def get_error_code(self):
        return self.args[0]


class Domain:

    def __init__(self, answer):
        self.answer = answer

    def XMLDesc(self, flags=0):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class AddressesTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.libvirt', types.SimpleNamespace(
                libvirtError=Failed, VIR_ERR_NO_DOMAIN=NO_DOMAIN)))
        # Nova 31 imports it here, where there may be none
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.guest.libvirt', types.SimpleNamespace()))

    def addresses(self, answer):
        return guest.Hostdevs.addresses(libvirt_guest.Guest(Domain(answer)))

    def test_addresses(self):
        self.assertEqual({A}, self.addresses(XML))

    def test_guest_that_has_ended(self):
        self.assertEqual(set(), self.addresses(Failed(NO_DOMAIN)))

    def test_libvirt_fails(self):
        """That is no guest without devices, from which they could be taken."""
        self.assertRaises(Failed, self.addresses, Failed(LOST))
