# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Drivers and cards that fail, hang, come and go."""

import dataclasses
import queue
import re
import threading
import time
import types

import ddt
import fixtures

from nova_accel.drivers import dfl
from nova_accel.drivers import nvme
from nova_accel import exception
from nova_accel.host import kernel
from nova_accel.inventory import holds
from nova_accel import model
from tests import limits
from tests.unit import host as simulated
from tests.unit.inventory_host import (
    A, B, C, fpga, GONE, handle, InventoryTestBase, loaded, OK, QUARANTINED)

SICK = model.Health.QUARANTINED
PROJECT = 'a project'


class ScannerTestBase(InventoryTestBase):

    #: seconds; tests of calls that hang wait as long
    TIMEOUT = 60

    def setUp(self):
        super().setUp()
        self.conf.config(group='accel', discovery_timeout=self.TIMEOUT)
        self.driver.devices = (fpga(A), fpga(B), fpga(C))
        self.other.devices = ()

    def healths(self):
        return [self.health(a) for a in (A, B, C)]

    def look(self):
        self.inventory.looks.run()

    def timed(self, function, *args):
        began = time.monotonic()
        function(*args)
        return time.monotonic() - began


class FailuresTest(ScannerTestBase):
    """A driver that raises in one method costs its own devices."""

    def setUp(self):
        super().setUp()
        self.other.devices = (fpga('0000:09:00.0', driver='other'),)
        self.inventory.scanner.scan()

    def assertOthersAreWell(self):
        self.assertEqual([OK] * 3, self.healths())

    def check(self, method, scan, fenced):
        """Whether it is fenced while it fails, and well again after it."""
        self.other.trouble[method] = RuntimeError('boom')
        logged = self.useFixture(fixtures.FakeLogger())
        for _ in range(3):
            scan()
        self.assertEqual(QUARANTINED if fenced else OK,
                         self.health('0000:09:00.0'))
        self.assertOthersAreWell()
        if fenced:
            self.assertIn('boom', self.why('0000:09:00.0'))
            self.assertEqual(1, len(re.findall(
                'withheld: .*RuntimeError: boom', logged.output)))
        self.other.trouble.clear()
        self.look()
        self.assertEqual(OK, self.health('0000:09:00.0'))

    def test_find(self):
        self.check('find', self.inventory.scanner.scan, True)

    def test_examine(self):
        self.check('examine', self.inventory.scanner.scan, True)

    def test_fingerprint(self):
        self.check('fingerprint', self.look, True)

    def test_state(self):
        self.check('state', self.look, True)

    def test_configure(self):
        self.check('configure', self.inventory.scanner.configure, False)

    def test_configuration_that_is_wrong(self):
        self.driver.trouble['configure'] = exception.ConfigurationError('no')
        self.assertRaises(exception.ConfigurationError,
                          self.inventory.scanner.configure)
        self.assertEqual(1, self.other.count('configure'))

    def test_one_card(self):
        self.driver.trouble['examine', A] = OSError(5, 'Input/output error')
        self.inventory.scanner.scan()
        self.assertEqual([QUARANTINED, OK, OK], self.healths())
        self.assertEqual(1, len(self.inventory.devices[A].regions))
        self.driver.trouble.clear()
        self.look()
        self.assertOthersAreWell()

    def test_new_card_that_fails(self):
        self.driver.devices += (fpga('0000:04:00.0'),)
        self.driver.trouble['examine', '0000:04:00.0'] = ValueError('what')
        logged = self.useFixture(fixtures.FakeLogger())
        for _ in range(3):
            self.look()
        self.assertNotIn('0000:04:00.0', self.inventory.devices)
        self.assertEqual(1, logged.output.count('is withheld'))
        self.driver.trouble.clear()
        self.look()
        self.assertEqual(OK, self.health('0000:04:00.0'))


class HangingTest(ScannerTestBase):

    TIMEOUT = 2

    def test_siblings_go_on(self):
        self.inventory.scanner.scan()
        hangs = self.hang(self.driver, 'examine', B)
        self.driver.devices += (fpga('0000:04:00.0'),)
        self.look()
        self.assertEqual([OK, QUARANTINED, OK], self.healths())
        self.assertEqual(OK, self.health('0000:04:00.0'))
        self.assertIn('did not end within 2 s', self.why(B))
        # given, and released, as if it were not there
        for address in (A, C, '0000:04:00.0'):
            self.inventory.find(address, 0)
            self.inventory.find_held(self.claim(address))
            self.assertEqual('done', self.inventory.cards.call(
                address, 'Releasing', lambda: 'done', seconds=1))
        error = self.assertRaises(
            exception.DeviceUnavailable, self.inventory.find, B, 0)
        self.assertIn('did not end', str(error))
        # the card answers, and nothing has to be done for who has it
        self.inventory.find_held(self.claim(B))
        self.driver.trouble.clear()
        hangs.set()
        self.wait_for(lambda: self.health(B) is OK)

    def test_ends_just_as_its_limit_passes(self):
        """Its thread says so before it is told that it hangs."""
        self.inventory.scanner.scan()
        hangs = self.hang(self.driver, 'examine', B)
        withhold = self.inventory.table.withheld.withhold

        def late(address, kind, why):
            hangs.set()
            self.wait_for(lambda: not self.inventory.cards.is_busy(B))
            return withhold(address, kind, why)
        self.useFixture(fixtures.MockPatchObject(
            self.inventory.table.withheld, 'withhold', late))
        self.inventory.scanner.scan()
        self.driver.trouble.clear()
        self.inventory.scanner.scan()
        self.assertEqual([OK] * 3, self.healths())

    def test_twenty_passes_make_one_thread(self):
        self.inventory.scanner.scan()
        self.hang(self.driver, 'examine', B)
        self.hang(self.driver, 'state', B)
        before = len(limits.at_work())
        took = []
        for number in range(20):
            self.driver.devices = (fpga(A), fpga(B), fpga(C, number % 2 + 1))
            took.append(self.timed(self.look))
        # one that waited for the card would take a second
        self.assertTrue(sum(took[1:]) < 10, took)
        self.assertEqual(before + 1, len(limits.at_work()))
        self.assertEqual([OK, QUARANTINED, OK], self.healths())

    def test_start_waits_one_limit(self):
        cards = [f'0000:{number:02x}:00.0' for number in range(0x40, 0x60)]
        self.driver.devices = tuple(map(fpga, cards))
        for address in cards:
            self.hang(self.driver, 'examine', address)
        self.hang(self.driver, 'configure')
        self.other.devices = (fpga('0000:09:00.0', driver='other'),)

        def start():
            self.inventory.scanner.configure()
            self.inventory.scanner.scan()
            self.inventory.configuration.check()
        self.conf.config(group='accel', discovery_timeout=4)
        took = self.timed(start)
        # a limit for each card would be a minute and more; what is above one
        # limit is for a loaded machine
        self.assertTrue(3.5 < took < 40, took)
        self.assertEqual(OK, self.health('0000:09:00.0'))

    def test_known_card_that_hangs_at_the_start(self):
        self.inventory.scanner.scan()
        again = self.make()
        self.hang(self.driver, 'examine', A)
        again.scanner.scan()
        self.assertEqual(1, len(again.devices[A].regions))
        self.assertEqual(({holds.Kind.HANGS}, set()),
                         (again.table.kinds(A), again.table.kinds(B)))

    def test_find_and_fingerprint_that_hang(self):
        self.inventory.scanner.scan()
        self.other.devices = (fpga('0000:09:00.0', driver='other'),)
        events = [self.hang(self.other, 'fingerprint')]
        before = len(limits.at_work())
        for number in range(5):
            self.driver.devices += (fpga(f'0000:1{number}:00.0'),)
            self.look()
            self.assertEqual(OK, self.health(f'0000:1{number}:00.0'))
        self.assertEqual(before + 1, len(limits.at_work()))
        self.other.trouble.clear()
        events[0].set()
        self.wait_for(lambda: '0000:09:00.0' in self.inventory.devices)
        self.wait_for(lambda: len(limits.at_work()) == before)
        self.assertEqual(OK, self.health('0000:09:00.0'))

    def test_configure_that_ends_late(self):
        hangs = self.hang(self.driver, 'configure')
        self.inventory.scanner.configure()
        self.inventory.scanner.scan()
        self.driver.devices += (fpga('0000:04:00.0'),)
        hangs.set()
        self.wait_for(lambda: '0000:04:00.0' in self.inventory.devices)

    def test_programming_that_never_returns_fences_the_card(self):
        """Not only its region: no build waits for the others."""
        self.driver.devices = (fpga(A, regions=2), fpga(B))
        self.inventory.scanner.scan()
        hangs = threading.Event()
        self.addCleanup(hangs.set)
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        self.assertRaises(
            exception.DeviceTimeout, self.inventory.cards.call, A,
            'Programming', hangs.wait, seconds=0.05)
        self.inventory.programming_failed(A, 0, report=False)
        self.assertRaises(exception.DeviceUnavailable, self.inventory.find,
                          A, 1)
        self.inventory.find(B, 0)
        hangs.set()
        self.wait_for(lambda: self.health(A) is OK)
        # no server is told that it carries anything
        region = self.inventory.find(A, 0)[1]
        self.assertEqual((None, None), (region.function_uuid,
                                        region.bitstream_id))


class LooksTest(ScannerTestBase):

    def test_nothing_changed(self):
        self.inventory.scanner.scan()
        self.look()
        examined = self.driver.count('examine')
        for _ in range(3):
            self.look()
        self.assertEqual(examined, self.driver.count('examine'))
        self.assertEqual(1, self.driver.count('find'))

    def test_only_drivers_with_another_fingerprint_are_asked(self):
        self.inventory.scanner.scan()
        finds = self.other.count('find')
        self.driver.devices = (fpga(A, regions=2), fpga(B))
        self.look()
        self.assertEqual((2, finds), (self.driver.count('find'),
                                      self.other.count('find')))
        self.assertEqual([OK, OK, GONE], self.healths())
        self.assertEqual(2, len(self.inventory.devices[A].regions))

    def test_card_that_dies_while_idle(self):
        self.inventory.scanner.scan()
        before = self.driver.count('examine')
        dead = dataclasses.replace(fpga(A), health=SICK,
                                   reason='it is dead')
        # not a sign in the fingerprint
        self.driver.fingerprint = lambda: 'the same'
        self.inventory.scanner.scan()
        self.driver.devices = (dead, *self.driver.devices[1:])
        self.driver.state_of = lambda address: address == A or None
        self.look()
        self.assertEqual([QUARANTINED, OK, OK], self.healths())
        self.assertEqual(before + 4, self.driver.count('examine'))

    def test_kernel_says_what_comes(self):
        """A device is noticed when the kernel tells, or says nothing more."""
        self.driver.devices = ()
        self.inventory.scanner.scan()
        events = queue.Queue()
        self.inventory.looks.watch(types.SimpleNamespace(
            changes=lambda over: iter(events.get, 'end')))
        self.addCleanup(events.put, 'end')
        self.driver.devices = (fpga(A),)
        net, pci = kernel.Change('net'), kernel.Change('pci', A)
        for event in (net, None):
            events.put(event)
        self.assertEqual({}, self.inventory.devices)
        for event in (pci, pci, None, None):
            events.put(event)
        self.wait_for(lambda: A in self.inventory.devices)
        self.assertEqual(2, self.driver.count('find'))

    def test_exchanged_before_a_look(self):
        """Each slot has a card again when nova-compute looks."""
        serials = {A: '1', B: '2'}
        self.driver.devices = fpga(A), fpga(B)
        self.driver.serial = serials.get
        self.inventory.scanner.scan()
        events = queue.Queue()
        self.inventory.looks.watch(types.SimpleNamespace(
            changes=lambda over: iter(events.get, 'end')))
        self.addCleanup(events.put, 'end')
        serials |= {A: '2', B: '1'}
        for address in A, A, B, B:
            events.put(kernel.Change('pci', address))
        events.put(None)
        self.wait_for(lambda: ['2', '1'] == [
            self.inventory.devices[a].serial for a in (A, B)])

    def test_looks_each_interval(self):
        self.inventory.scanner.scan()
        self.inventory.looks.watch(
            types.SimpleNamespace(changes=lambda over: ()))
        time.sleep(1.2)
        self.assertEqual(1, self.driver.count('fingerprint'))
        self.conf.config(group='accel', discovery_interval=1)
        self.wait_for(lambda: self.driver.count('fingerprint') == 2)

    def test_change_during_a_look(self):
        self.inventory.scanner.scan()
        hangs = self.hang(self.other, 'fingerprint')
        background = self.inventory.looks.background
        background.start()
        self.wait_for(lambda: self.other.count('fingerprint') == 2)
        background.start()
        background.start()
        self.other.trouble.clear()
        hangs.set()
        self.wait_for(lambda: not background.runs)
        self.assertEqual(3, self.driver.count('fingerprint'))


class OwnershipTest(ScannerTestBase):

    def refused(self, *said):
        error = self.assertRaises(exception.ConfigurationError,
                                  self.inventory.configuration.check)
        for text in said:
            self.assertIn(text, str(error))
        self.assertLessEqual(len(str(error)), 255)

    def warnings(self):
        logged = self.useFixture(fixtures.FakeLogger())
        self.inventory.configuration.check()
        return logged.output

    def test_two_drivers_find_one_device(self):
        self.other.devices = (fpga(A, driver='other'),)
        for _ in range(2):
            self.inventory.scanner.scan()
            self.refused('good and other', A)
            # one of the two has it until then
            self.assertEqual('good', self.inventory.devices[A].driver)

    def test_function_of_another_drivers_device(self):
        """Its VF, or the sound of its graphics card."""
        for function in (handle('0000:01:00.1'), model.AttachHandle(
                model.HandleType.PCI, '0000:09:00.0',
                companions=('0000:01:00.1',))):
            self.other.devices = (dataclasses.replace(
                fpga('0000:09:00.0', regions=0, driver='other'),
                handles=(function,)),)
            self.inventory = self.make(good=self.driver, other=self.other)
            log = self.useFixture(fixtures.FakeLogger())
            self.inventory.scanner.scan()
            self.assertIn('the driver good has 0000:01:00.1', log.output)
            self.assertEqual('', self.warnings())
            self.assertEqual(OK, self.health('0000:01:00.0'))
            self.assertEqual(QUARANTINED, self.health('0000:09:00.0'))
            self.other.devices = (fpga('0000:09:00.0', driver='other'),)
            self.look()
            self.assertEqual(OK, self.health('0000:09:00.0'))

    def test_device_that_moves_to_another_driver(self):
        self.inventory.scanner.scan()
        self.driver.devices, gone = (), self.driver.devices
        self.look()
        self.assertEqual([GONE] * 3, self.healths())
        self.other.devices = tuple(
            dataclasses.replace(d, driver='other') for d in gone)
        self.look()
        self.assertEqual(('other', OK), (self.inventory.devices[A].driver,
                                         self.health(A)))
        self.assertEqual('', self.warnings())

    def test_device_of_a_driver_that_is_not_enabled_any_more(self):
        self.inventory.scanner.scan()
        self.other.devices = (fpga(A, driver='other'),)
        self.inventory = self.make(other=self.other)
        self.inventory.scanner.scan()
        self.assertEqual('other', self.inventory.devices[A].driver)
        self.assertEqual([OK, QUARANTINED, QUARANTINED], self.healths())
        self.assertEqual('', self.warnings())
        self.assertRaises(exception.DeviceUnavailable,
                          self.inventory.driver_of, fpga(B))

    def test_rule_makes_it_one_drivers(self):
        self.conf.config(group='accel', exclude_devices=[f'address={A}'])
        self.inventory = self.make()
        self.other.devices = (fpga(A, driver='other'),)
        self.inventory.scanner.scan()
        self.assertEqual('', self.warnings())
        self.assertEqual({B, C}, set(self.inventory.devices))
        # it may hang, and that does not matter
        self.assertEqual(0, self.driver.count('examine', A))

    def test_rule_without_effect(self):
        self.conf.config(group='accel', exclude_devices=['vendor=1002'])
        self.inventory = self.make()
        self.inventory.scanner.scan()
        self.assertIn('vendor=1002 matches no device', self.warnings())

    def test_vfs_of_nobody(self):
        self.conf.config(group='accel', virtual_functions=[
            f'{A}=2', '0000:99:00.0=2'])
        self.inventory.scanner.scan()
        logged = self.warnings()
        self.assertIn('names 0000:99:00.0, which no driver', logged)
        self.assertNotIn(f'names {A}', logged)

    def test_handover_of_no_device(self):
        self.conf.config(group='accel', handover=[
            'reset', f'{A}=none', '0000:99:00.0=operator',
            f'address={A} vendor=1234=none', 'vendor=1002=none'])
        self.inventory.scanner.scan()
        logged = self.warnings()
        self.assertIn('[accel] handover names 0000:99:00.0, which no driver',
                      logged)
        self.assertNotIn(f'names {A}', logged)
        self.assertIn('[accel] handover = vendor=1002 matches no device',
                      logged)
        self.assertNotIn('vendor=1234', logged)

    def test_option_of_nova_has_it_too(self):
        self.conflicts[A] = f'{A} is matched by [pci] device_spec'
        self.inventory.scanner.scan()
        self.refused(A, '[pci] device_spec', 'driver good')

    def test_option_of_nova_has_what_comes_later(self):
        self.conflicts['0000:04:00.0'] = (
            '0000:04:00.0 is matched by [pci] device_spec')
        self.inventory.scanner.scan()
        self.inventory.configuration.check()
        self.driver.devices += (fpga('0000:04:00.0'),)
        logged = self.useFixture(fixtures.FakeLogger())
        self.look()
        for _ in range(2):
            self.inventory.scanner.scan()
        self.assertEqual(QUARANTINED, self.health('0000:04:00.0'))
        self.assertIn('device_spec', self.why('0000:04:00.0'))
        self.assertEqual(1, logged.output.count('device_spec'))
        self.assertRaises(exception.DeviceUnavailable, self.inventory.find,
                          '0000:04:00.0', 0)
        self.conflicts.clear()
        self.inventory.scanner.scan()
        self.assertEqual(OK, self.health('0000:04:00.0'))

    def test_option_of_nova_that_cannot_be_compared(self):
        self.conflicts = None
        self.inventory.scanner.scan()
        self.assertEqual([OK] * 3, self.healths())


class ContentTest(ScannerTestBase):
    """What a region carries."""

    def content(self, inventory=None):
        region = (inventory or self.inventory).devices[A].region(0)
        return (region.function_uuid, region.function_name,
                region.bitstream_id is not None)

    READ, KNOWN, UNKNOWN = (('b' * 32, None, False), ('c' * 32, 'new', True),
                            (None, None, False))

    def setUp(self):
        super().setUp()
        self.inventory.scanner.scan()

    def program(self):
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        self.driver.devices = (dataclasses.replace(
            fpga(A)).with_region(0, function_uuid='c' * 32),)
        self.inventory.contents.programmed(A, 0, loaded())

    def test_programmed(self):
        self.assertEqual(self.READ, self.content())
        self.program()
        self.assertEqual(self.KNOWN, self.content())
        self.inventory.scanner.scan()
        self.assertEqual(self.KNOWN, self.content())
        self.assertEqual(self.KNOWN, self.content(self.make()))

    def test_killed_while_it_is_programmed(self):
        self.program()
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        self.assertEqual(self.UNKNOWN, self.content())
        again = self.make()
        again.scanner.scan()
        # whatever the card shows
        self.assertEqual(self.UNKNOWN, self.content(again))

    def test_look_that_ends_while_it_is_programmed(self):
        """It began before, and the card may not answer it."""
        table = self.inventory.table
        ticket = table.reports.ticket()
        table.contents.begin(A, 0, model.OPERATOR)
        self.assertFalse(table.adoption.adopt(dataclasses.replace(
            fpga(A), health=SICK, reason='no answer'), ticket))
        self.assertIs(OK, self.health(A))

    def test_failed(self):
        for report, content in ((False, self.UNKNOWN), (True, self.READ)):
            self.inventory.contents.begin(A, 0, model.OPERATOR)
            self.inventory.programming_failed(A, 0, report=report)
            self.inventory.scanner.scan()
            self.assertEqual(content, self.content())

    def test_card_says_otherwise(self):
        self.program()
        self.driver.devices = (fpga(A),)
        self.inventory.scanner.scan()
        self.assertEqual(self.READ, self.content())

    def test_guest_may_have_changed_it(self):
        self.program()
        self.inventory.contents.forget(A, 0, model.OPERATOR)
        self.assertEqual(self.UNKNOWN, self.content())
        self.inventory.scanner.scan(addresses=[A])
        self.assertEqual(('c' * 32, None, False), self.content())

    def program_from(self, origin):
        self.inventory.contents.begin(A, 0, origin)
        self.driver.devices = (fpga(A).with_region(
            0, function_uuid='c' * 32),)
        self.inventory.contents.programmed(A, 0, dataclasses.replace(
            loaded(), origin=origin))

    def test_origin(self):
        """Who put there what it carries, also for the next nova-compute."""
        self.assertOrigin(model.OPERATOR)
        for origin in (PROJECT, model.OPERATOR, None):
            self.program_from(origin)
            self.assertOrigin(origin)
        # a guest could change it
        for origin in (PROJECT, None, model.OPERATOR):
            self.program_from(model.OPERATOR)
            self.inventory.contents.forget(A, 0, origin)
            self.assertOrigin(origin)
            self.inventory.scanner.scan(addresses=[A])
            self.assertEqual('c' * 32, self.content()[0])
            self.assertOrigin(origin)

    def test_origin_after_a_programming_that_was_broken_off(self):
        """A project's, where the content of before or the new one is one's."""
        for before, image, expected in (
                (model.OPERATOR, model.OPERATOR, None),
                (model.OPERATOR, PROJECT, PROJECT),
                (PROJECT, model.OPERATOR, PROJECT),
                (PROJECT, 'another', 'another'),
                (None, model.OPERATOR, None),
                (None, PROJECT, PROJECT),
                # Glance does not say whose the image is
                (model.OPERATOR, None, model.SOME_PROJECT)):
            for report in (False, True):
                self.program_from(model.OPERATOR)
                self.inventory.contents.forget(A, 0, before)
                self.inventory.contents.begin(A, 0, image)
                # and where nova-compute is killed now
                self.assertOrigin(expected)
                self.inventory.programming_failed(A, 0, report=report)
                self.inventory.scanner.scan()
                self.assertOrigin(expected)
                # the next one begins as the last one ended
                self.inventory.contents.begin(A, 0, model.OPERATOR)
                self.assertOrigin(expected)
                self.inventory.contents.programmed(A, 0, dataclasses.replace(
                    loaded(), origin=model.OPERATOR))
                self.assertOrigin(model.OPERATOR)

    def test_origin_of_another_function_than_was_programmed(self):
        """A power cut, or a function that answers as it likes."""
        for origin, expected in ((model.OPERATOR, None), (PROJECT, PROJECT),
                                 (None, None)):
            self.program_from(origin)
            self.driver.devices = (fpga(A),)
            self.inventory.scanner.scan()
            self.assertEqual(self.READ, self.content())
            self.assertOrigin(expected)

    def assertOrigin(self, origin):
        again = self.make()
        again.scanner.scan()
        self.assertEqual([origin] * 2, [
            i.devices[A].region(0).origin for i in (self.inventory, again)])

    def test_found_to_be_there(self):
        self.inventory.contents.set_loaded(A, 0, loaded('b' * 32))
        self.assertEqual(('b' * 32, 'new', True), self.content())

    def test_illegal_transitions(self):
        ended = ((self.inventory.contents.programmed, A, 0, loaded()),
                 (self.inventory.programming_failed, A, 0, True))
        for call in ended:
            self.assertRaises(exception.IllegalTransition, *call)
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        for call in ((self.inventory.contents.begin, A, 0, None),
                     (self.inventory.contents.forget, A, 0, None),
                     (self.inventory.contents.set_loaded, A, 0, loaded())):
            self.assertRaises(exception.IllegalTransition, *call)
        self.assertRaises(exception.DeviceUnavailable,
                          self.inventory.contents.begin, A, 7, None)

    def test_store_that_cannot_be_written(self):
        error = exception.AcceleratorsUnavailable('The disk is full.')
        self.store.error = 'set_loaded', error
        self.assertRaises(exception.AcceleratorsUnavailable,
                          self.inventory.contents.begin, A, 0, None)
        self.assertEqual(self.READ, self.content())
        self.store.error = None
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        self.store.error = 'set_loaded', error
        self.assertRaises(exception.AcceleratorsUnavailable,
                          self.inventory.contents.programmed, A, 0, loaded())
        self.store.error = None
        self.assertEqual(self.UNKNOWN, self.content())
        self.assertEqual(self.UNKNOWN, self.content(self.make()))

    def test_scan_goes_on_without_the_store(self):
        self.store.error = None, exception.AcceleratorsUnavailable('Full.')
        logged = self.useFixture(fixtures.FakeLogger())
        self.driver.devices = (fpga(A), fpga(B))
        for _ in range(3):
            self.inventory.scanner.scan()
        self.assertEqual([OK, OK, GONE], self.healths())
        self.assertEqual(1, logged.output.count('Full.'))
        self.store.error = None
        self.inventory.scanner.scan()
        self.assertEqual({C}, self.store.gone())

    def test_scan_that_began_before_a_programming(self):
        hangs = self.hang(self.driver, 'examine', A)
        scan = threading.Thread(target=self.inventory.scanner.scan)
        scan.start()
        self.wait_for(lambda: self.driver.count('examine', A) == 2)
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        self.inventory.contents.programmed(A, 0, loaded())
        hangs.set()
        scan.join(30)
        self.assertEqual(self.KNOWN, self.content())

    def test_card_is_looked_at_after_its_programming(self):
        """What a scan left out meanwhile."""
        self.inventory.contents.begin(A, 0, model.OPERATOR)
        self.driver.devices = (fpga(A, regions=2),)
        self.inventory.scanner.scan()
        self.inventory.contents.programmed(A, 0, loaded('b' * 32))
        self.assertEqual(1, len(self.inventory.devices[A].regions))
        self.look()
        self.assertEqual(2, len(self.inventory.devices[A].regions))


class HeldTest(ScannerTestBase):
    """Quarantine forbids new claims, and no restart."""

    def test_quarantined(self):
        self.driver.devices = (dataclasses.replace(
            fpga(A), health=SICK, reason='it is hot'),)
        self.inventory.scanner.scan()
        self.assertRaises(exception.DeviceUnavailable, self.inventory.find,
                          A, 0)
        self.assertEqual(0, self.inventory.find_held(self.claim(A))[1].index)

    def test_its_driver_fails(self):
        self.inventory.scanner.scan()
        self.driver.trouble['find'] = RuntimeError('boom')
        self.inventory.scanner.scan()
        self.assertEqual([QUARANTINED] * 3, self.healths())
        self.inventory.find_held(self.claim(A))

    def test_does_not_answer(self):
        self.driver.devices = (dataclasses.replace(
            fpga(A), health=SICK, reason='it is dead'),)
        self.inventory.scanner.scan()
        self.driver.answers = lambda device: False
        error = self.assertRaises(exception.DeviceUnavailable,
                                  self.inventory.find_held, self.claim(A))
        self.assertIn('does not answer (it is dead)', str(error))

    def test_hangs_when_it_is_asked(self):
        self.driver.devices = (dataclasses.replace(
            fpga(A), health=SICK, reason='it is slow'),)
        self.inventory.scanner.scan()
        self.conf.config(group='accel', discovery_timeout=1)
        self.hang(self.driver, 'answers')
        claim = self.claim(A)
        for _ in range(2):
            self.assertRaises(exception.DeviceUnavailable,
                              self.inventory.find_held, claim)
        self.assertEqual(1, self.driver.count('answers'))

    def test_gone(self):
        self.inventory.scanner.scan()
        self.driver.devices = ()
        self.inventory.scanner.scan()
        error = self.assertRaises(exception.DeviceUnavailable,
                                  self.inventory.find_held, self.claim(A))
        self.assertIn('is gone', str(error))
        self.assertRaises(exception.DeviceUnavailable,
                          self.inventory.find_held,
                          self.claim('0000:99:00.0', None))


@ddt.ddt
class RecoveryTest(ScannerTestBase):
    """Regions that a failure left unusable come back when no server is hurt."""

    def setUp(self):
        super().setUp()
        self.well = fpga(A)
        self.driver.devices = (self.well.with_region(
            0, health=SICK, reason='the port is disabled'),)
        self.inventory.scanner.scan()

    def recover(self):
        def recover(address):
            self.assertEqual(QUARANTINED, self.health(address))
            self.driver.devices = (self.well,)
        self.driver.recover = recover
        self.inventory.recover()

    def test_recovered(self):
        self.recover()
        device = self.inventory.devices[A]
        self.assertIs(model.Health.OK, device.regions[0].health)
        self.assertEqual(OK, self.health(A))

    def test_not_while_a_server_has_a_part_of_it(self):
        self.claim(A, region=1)
        self.inventory.recover()
        self.assertEqual(0, self.driver.count('recover'))

    def test_once_for_a_reason(self):
        for _ in range(3):
            self.inventory.recover()
        self.assertEqual(1, self.driver.count('recover'))
        self.assertIs(OK, self.health(A))

    @ddt.data(False, True)
    def test_again_when_it_was_well_in_between(self, looks):
        ill = self.driver.devices
        for _ in range(3):
            self.driver.devices = ill
            self.inventory.scanner.scan()
            self.recover()
            self.assertIs(model.Health.OK,
                          self.inventory.devices[A].regions[0].health)
            if looks:
                # the comparison that finds it well
                self.inventory.recover()

    def test_recovery_that_hangs(self):
        self.conf.config(group='accel', programming_timeout=1)
        hangs = self.hang(self.driver, 'recover')
        self.inventory.recover()
        self.assertEqual(QUARANTINED, self.health(A))
        self.assertIn('did not end', self.why(A))
        self.driver.devices = (self.well,)
        hangs.set()
        self.wait_for(lambda: self.health(A) is OK)


class SimulatedTest(ScannerTestBase):
    """The real drivers on the simulated kernel."""

    TIMEOUT = 2

    def start(self, driver, *cards, **kinds):
        self.conf.config(group='accel', whole_cards=[A, B],
                         include_devices=['vendor=*'])
        self.host = self.useFixture(simulated.SimulatedHost(*cards, **kinds))
        self.inventory = self.make(it=driver(self.host.kernel))
        self.inventory._drivers['it'].NAME = 'it'
        self.inventory.scanner.scan()

    def test_fpga_that_hangs(self):
        self.start(dfl.DflDriver, {'address': A}, {'address': B})
        self.host.kernel.set_fault(A, hang='read')
        self.addCleanup(self.host.kernel.set_fault, A, hang=None)
        self.look()
        self.assertEqual([QUARANTINED, OK], [self.health(a) for a in (A, B)])
        self.host.kernel.set_fault(A, hang=None)
        self.wait_for(lambda: self.health(A) is OK)

    def test_disk_that_dies_while_idle(self):
        self.start(nvme.NvmeDriver, nvmes=[{'address': A}, {'address': B}])
        self.look()
        self.host.kernel.set_fault(A, dead=True)
        self.look()
        self.assertEqual([QUARANTINED, OK], [self.health(a) for a in (A, B)])
        self.assertIn('does not answer', self.inventory.devices[A].reason)
        self.assertRaises(exception.DeviceUnavailable,
                          self.inventory.find_held, self.claim(A, None))
        self.host.kernel.power_cycle()
        self.look()
        self.assertEqual(OK, self.health(A))

    def test_disk_of_nova_that_no_rule_includes(self):
        """nova_accel does not have it, and nothing is in conflict."""
        self.conflicts[A] = f'{A} is matched by [pci] device_spec'
        self.start(nvme.NvmeDriver, nvmes=[{'address': A}])
        self.assertRaises(exception.ConfigurationError,
                          self.inventory.configuration.check)
        self.conf.config(group='accel', include_devices=[])
        self.inventory = self.make(**self.inventory._drivers)
        self.inventory.scanner.scan()
        self.inventory.configuration.check()
        self.assertEqual(QUARANTINED, self.health(A))

    def test_fpga_that_vanishes(self):
        self.start(dfl.DflDriver, {'address': A}, {'address': B})
        self.host.kernel.set_fault(A, vanish=True)
        self.look()
        self.assertEqual([GONE, OK], [self.health(a) for a in (A, B)])
        self.host.kernel.set_fault(A, vanish=None)
        self.look()
        self.assertEqual(OK, self.health(A))
