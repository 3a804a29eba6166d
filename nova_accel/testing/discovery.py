# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Tests of find() and examine(), and of devices that change."""

import errno

from nova_accel.drivers import base as drivers
from nova_accel.drivers import contract
from nova_accel.host import pci
from nova_accel.inventory import recovery
from nova_accel import model
from nova_accel.testing import base
from nova_accel.testing import kernel as kernels
from nova_accel.testing import promises

#: invalid values of attributes
_NONSENSE = ('', 'nonsense', '-1', '9' * 40, '0xffffffff', '\ufffd\0;$(x)',
             errno.EIO, errno.ENOENT)


class DiscoveryTests(base.Case):

    # A host on which nothing happens

    def test_find(self):
        """find() returns each device once and reads no device."""
        self._hang(*self.known)
        with self.changes_nothing(promises.FIND_IN_MEMORY):
            found = [*self.driver.find()]
        with self.promise(promises.FIND):
            self.assertEqual(len(set(found)), len(found), 'an address twice')
            self.assertLessEqual(set(self.known), set(found))

    def test_fingerprint(self):
        """fingerprint() reads no device; it changes if a device appears or
        disappears."""
        before = self._fingerprint()
        self._hang(*self.known)
        with self.changes_nothing(promises.FINGERPRINT_CHEAP):
            self.driver.fingerprint()
        self._hang(*self.known, ends=True)
        self.assertUnchanged(before)
        self.kernel.set_fault(self.one.address, vanish=True)
        if self.look_again(self.one.address) is None:
            with self.promise(promises.FINGERPRINT):
                self.assertNotEqual(
                    before, self._fingerprint(),
                    f'it is the same without {self.one.address}')
            self.kernel.set_fault(self.one.address, vanish=None)
            self.assertUnchanged(before)

    def assertUnchanged(self, before):
        with self.promise(promises.FINGERPRINT):
            self.assertEqual(before, self._fingerprint(),
                             'it changed, and the host did not')

    def _fingerprint(self):
        with self.promise(promises.FINGERPRINT):
            found = self.driver.fingerprint()
            hash(found)
            return found

    def test_examine(self):
        """examine() returns equal devices in each process and after a boot."""
        for address, device in self.known.items():
            self.assertSame(device, self.examine(address, device))
            self.assertSame(device, self.examine(address))
        self.start()
        self.assertSameHost()
        self.kernel.reboot()
        self.driver.configure()
        self.assertSameHost()

    def assertSameHost(self):
        found = self.discover(self.known)
        with self.promise(promises.FIND):
            self.assertEqual(sorted(self.known), sorted(found))
        for address, device in self.known.items():
            self.assertSame(device, found[address])

    def assertSame(self, device, found, promise=promises.EXAMINE):
        with self.promise(promise, device.address):
            self.assertEqual(self.facts(device), found and self.facts(found),
                             'nothing changed, and it is another one')

    @staticmethod
    def facts(device):
        """Return the properties that servers and Placement use."""
        return {'traits': {*device.traits} - {*device.state_traits}, **{
            name: getattr(device, name) for name in (
                'address', 'type', 'vendor', 'product', 'regions', 'handles',
                'memory', 'shell_id', 'health', 'reason')}}

    def test_handles(self):
        """No function belongs to two handles."""
        seen: dict = {}
        for device in self.known.values():
            with self.promise(promises.EXAMINE, device.address):
                self.assertTrue(
                    device.all_handles, 'it is well, and has no handle')
                for handle in device.all_handles:
                    for address in handle.addresses:
                        self.assertNotIn(
                            address, seen, f'{address} is in two handles')
                        seen[address] = device.address

    def test_names(self):
        for device in self.known.values():
            with self.promise(promises.NAMES, device.address):
                self.assertEqual('', self.refusal(device))

    def test_configure(self):
        """configure() changes nothing in a second call, and may be interrupted
        after any change."""
        with self.changes_nothing(promises.CONFIGURE):
            self.driver.configure()
        for number in self._changes_of_configure():
            self.kernel.reboot()
            with self.promise(promises.CONFIGURE,
                              f'a host after change {number}'):
                self.killed(number, lambda: self.driver.configure())
                self.driver.configure()
                self.assertSameHost()

    def _changes_of_configure(self):
        self.kernel.reboot()
        with self.kernel.watch() as watched:
            self.driver.configure()
        return range(1, watched.steps + 1)

    def killed(self, number, call):
        """Make a call, kill nova-compute during it after a number of changes,
        and start nova-compute again."""
        try:
            with self.kernel.watch(kill_after=number):
                call()
        except kernels.Killed:
            pass
        self.start()

    def test_check(self):
        """check() changes nothing."""
        self._hang(*self.known)
        with self.changes_nothing(promises.CHECK_OPTIONS):
            self.driver.check_options()
        self._hang(*self.known, ends=True)
        for device in self.known.values():
            with self.changes_nothing(promises.CHECK, device.address):
                for finding in self.driver.check(device):
                    self.assertIsInstance(finding, drivers.Finding)

    # Health and identity

    def test_health(self):
        """health() returns the same readings each time for a healthy device.
        """
        for device in self.known.values():
            with self.changes_nothing(promises.HEALTH, device.address):
                first = contract.readings(
                    self.name, self.driver.health(device))
                self.assertEqual(first, contract.readings(
                    self.name, self.driver.health(device)))

    def _readings(self):
        with self.promise(promises.HEALTH, self.one.address):
            try:
                return contract.readings(
                    self.name, self.driver.health(self.one))
            except (OSError, ValueError) as error:
                return str(error)

    def test_serial(self):
        """serial() is unique, and follows the card into another slot."""
        for address, serial in self.serials.items():
            with self.changes_nothing(promises.SERIAL, address):
                self.assertEqual(serial, contract.serial(
                    self.name, self.driver.serial(address)) or '')
                self.assertFalse(
                    serial and [*self.serials.values()].count(serial) > 1,
                    f'two cards have {serial!r}')
        if any(self.serials.values()) and self._exchange():
            with self.promise(promises.SERIAL, self.one.address):
                self.assertEqual(
                    self.serials[self.other.address],
                    self.driver.serial(self.one.address),
                    'the card was exchanged for another one')

    def test_exchanged_cards(self):
        """After two cards are exchanged, no report of one applies to the
        other."""
        if not self._exchange():
            self.skipTest('The cards cannot be exchanged.')
        self.driver.configure()
        for device in self.one, self.other:
            fresh = self.examine(device.address)
            self.assertSame(fresh, self.look_again(device.address))

    def test_moved_card(self):
        """A card that moves to an empty slot is recognized there."""
        address = self.one.address
        self.kernel.set_fault(address, vanish=True)
        if self.look_again(address) is not None or not self._exchange():
            self.skipTest('The card cannot be moved.')
        self.driver.configure()
        with self.promise(promises.EXAMINE, self.other.address):
            self.assertIsNone(self.look_again(self.other.address),
                              'its card is in another slot')
        self.assertSame(self.examine(address), self.look_again(address))

    def _exchange(self) -> bool:
        """Exchange the first two cards. Return False if they are not in slots.
        """
        one, other = self.one.address, self.other.address
        if not pci.ADDRESS.fullmatch(one) or not pci.ADDRESS.fullmatch(other):
            return False
        self.kernel.exchange_cards(one, other)
        return True

    # Devices that are not well

    def test_card_that_hangs(self):
        """A hanging card does not affect the other cards."""
        self._hang(self.one.address)
        device = self.other
        with self.promise(promises.EXAMINE_HANGS, device.address):
            self.assertSame(device, self.look_again(device.address))
            self.driver.state(device.address)
            self.driver.serial(device.address)
        with self.promise(promises.HEALTH, device.address):
            [*self.driver.health(device)]
        self._hang(self.one.address, ends=True)
        self.assertSameHost()

    def _hang(self, *addresses, ends=False):
        for address in addresses:
            if address in self.kernel._look()[0].cards:
                self.kernel.set_fault(address, hang=None if ends else 'read')

    def test_dead_card(self):
        """A card that does not answer is quarantined until it answers."""
        if not pci.ADDRESS.fullmatch(self.one.address):
            self.skipTest('The device is not a PCI function.')
        before = self._signs()
        self.kernel.set_fault(self.one.address, dead=True)
        with self.promise(promises.DEFECT, self.one.address):
            self.assertTrue(self.is_noticed(), 'the card reads as all ones')
        with self.promise(promises.STATE, self.one.address):
            self.assertTrue(
                self._signs() != before or getattr(self.DRIVER, 'POLLED', 0),
                'neither this nor fingerprint() changes if a card dies')
        with self.promise(promises.ANSWERS, self.one.address):
            self.assertFalse(self.driver.answers(self.one),
                             'the card reads as all ones')
        self._readings()
        self.kernel.power_cycle()
        self.driver.configure()
        self.assertEnded()

    def test_card_that_is_gone(self):
        """A card that disappears and returns is reported as before."""
        self.kernel.set_fault(self.one.address, vanish=True)
        gone = self.look_again(self.one.address)
        with self.promise(promises.EXAMINE, self.one.address):
            self.assertFalse(gone and gone.health is model.Health.OK,
                             'the card is gone, and it is well')
        self.assertSame(self.other, self.look_again(self.other.address))
        self.kernel.set_fault(self.one.address, vanish=None)
        self.driver.configure()
        self.assertEnded()

    def is_noticed(self) -> bool:
        """Return whether examine() reports a change of the first device."""
        found = self.look_again(self.one.address)
        with self.promise(promises.DEFECT, self.one.address):
            self.assertTrue(
                found is None or found.health is model.Health.OK
                or found.reason, 'it is quarantined without a reason')
        return found is None or self.facts(found) != self.facts(self.one)

    def _signs(self):
        return self.driver.fingerprint(), self.driver.state(self.one.address)

    def assertEnded(self):
        self.assertSame(self.one, self.look_again(self.one.address),
                        promises.DEFECT_ENDS)

    def test_nonsense(self):
        """An invalid value affects only its device, until the value is valid
        again."""
        address = self.one.address
        self.kernel.reads.clear()
        self.look_again(address)
        for place in sorted(self.kernel.reads):
            for value in _NONSENSE:
                self.kernel.spoiled[place] = value
                with self.promise(promises.DEFECT, f'{address}, where /sys/'
                                  f'{place} has {value!r}'):
                    found = self.look_again(address)
                    self.assertEqual('', self.refusal(found))
                    if found and found.health is not model.Health.OK:
                        self.assertTrue(found.reason, 'without a reason')
                self.kernel.spoiled.clear()
                with self.promise(promises.DEFECT_ENDS, f'{address}, where '
                                  f'/sys/{place} had {value!r}'):
                    self.assertEqual(
                        self.facts(self.one), self.facts(self.examine(
                            address, found and self.known[address])))

    def test_steps(self):
        for device in self.known.values():
            with self.promise(promises.STEPS, device.address):
                found = self.driver.steps(device)
                self.assertLessEqual(set(found), set(recovery.LADDER))
                self.assertTrue(all(map(callable, found.values())))
