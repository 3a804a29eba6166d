# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What follows from the health of devices, on a host with servers."""

import time
from unittest import mock

from nova_accel import exception
from nova_accel.health import signals
from nova_accel.inventory import holds
from nova_accel import naming
from nova_accel.sim import tree
from tests.host import base
from tests.host import cloud as clouds
from tests.host.health import (
    FATAL, FOUR, HALF, HealthTestCase, OF_LINK, ONE, THREE, TWO, WORN)
from tests.unit.host import A, B, OTHER, vf


class SingleTest(HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start(ONE, TWO, THREE)

    def test_suspect(self):
        """It has a trait, and a server can get it all the same."""
        self.turn(**WORN)
        self.assertEqual({ONE: 'suspect', TWO: 'ok', THREE: 'ok'},
                         self.states())
        traits, amounts = self.shown()
        self.assertIn(naming.SUSPECT, traits)
        self.assertEqual((0, 1), amounts)
        self.assertHas(self.boot(), ONE)
        self.turn()
        self.assertNotIn(naming.SUSPECT, self.shown()[0])
        # of a whole device in a guest only the bus can be seen
        self.assertEqual('unknown', self.states()[ONE])

    def test_trait_is_known(self):
        """Before any device has it, once; a Placement that did not answer is
        asked again."""
        def known():
            return self.host.cloud.read().get('traits', [])
        self.wait_for(lambda: known() == [naming.SUSPECT])
        self.host.cloud.remove_trait(naming.SUSPECT)
        self.host.cloud.placement_error = exception.PlacementUnavailable('No.')
        self.restart()
        self.look()
        self.wait_for(lambda: f'Flavors cannot forbid or require '
                      f'{naming.SUSPECT} (No.)' in self.log.output)
        self.host.cloud.placement_error = None
        for _ in range(2):
            self.look()
            self.wait_for(lambda: known() == [naming.SUSPECT])
        background = self.host.publisher.background
        self.wait_for(lambda: not background.runs)
        self.look()
        self.assertFalse(background.runs)

    def test_level(self):
        """A fence as long as it is so."""
        self.turn(**HALF)
        self.assertEqual('quarantined', self.states()[ONE])
        traits, amounts = self.shown()
        self.assertIn(naming.FENCED, traits)
        self.assertEqual((1, 1), amounts)
        self.assertIn('its PCIe link has 4 lanes of 16', self.log.output)
        self.turn()
        self.assertEqual('ok', self.states()[ONE])
        self.assertEqual((0, 1), self.shown()[1])

    def test_sticky(self):
        """Until the operator enables it, also after a restart."""
        self.turn(**OF_LINK)
        word, = self.host.store.disabled()
        self.assertEqual(
            (True, 'its PCIe link had 1 uncorrectable errors (DLP)'),
            (word.of_health, word.reason))
        self.assertEqual((1, 1), self.shown()[1])
        self.look()
        self.restart()
        self.look()
        self.assertEqual('quarantined', self.states()[ONE])
        self.assertEqual((1, 1), self.shown()[1])
        self.host.enable()
        self.look()
        self.assertEqual('ok', self.states()[ONE])
        self.assertEqual((0, 1), self.shown()[1])
        # the next one counts again
        self.turn(aer_dev_fatal=tree.errors('aer_dev_fatal', DLP=2))
        self.assertEqual('quarantined', self.states()[ONE])

    def test_beside_the_operators_word(self):
        self.host.disable(ONE)
        self.turn(**OF_LINK)
        mine, of_health = self.host.store.disabled()
        self.assertEqual(
            ('it is hot', '2026-11-22T02:17:43+00:00', False),
            (mine.reason, mine.since, mine.of_health))
        self.assertEqual(
            (True, 'its PCIe link had 1 uncorrectable errors (DLP)'),
            (of_health.of_health, of_health.reason))
        self.assertEqual({holds.Kind.DISABLED, holds.Kind.DEFECTIVE},
                         self.host.inventory.table.kinds(ONE))
        self.host.enable()
        self.assertEqual((), self.host.store.disabled())

    def test_store_fails(self):
        """What cannot be written down is tried again, and holds till then."""
        self.read_only(True)
        self.turn(**OF_LINK)
        self.assertIn('this is not stored yet', self.log.output)
        self.assertEqual('suspect', self.states()[ONE])
        self.read_only(False)
        self.look()
        self.assertEqual('quarantined', self.states()[ONE])

    def test_holder_keeps_it(self):
        """No state stops its server, or its restart. Its guest may have made
        the link narrow: the reset after it decides."""
        server = self.boot()
        self.turn(**HALF)
        self.assertEqual('suspect', self.states()[ONE])
        self.assertHas(server, ONE)
        self.host.reboot(server)
        self.assertHas(server, ONE)
        self.host.delete(server)
        self.assertEqual((1, 1), self.shown()[1])

    def test_what_a_server_provokes(self):
        """It is suspect, and is not any more once the server is gone."""
        server = self.boot()
        self.look()
        self.turn(**FATAL)
        self.host.kernel.says('pci', ONE, 'ERROR_EVENT=FAILED_RECOVERY')
        self.assertEqual('suspect', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())
        self.host.delete(server)
        self.look()
        self.assertEqual('ok', self.states()[ONE])
        self.assertEqual((0, 1), self.shown()[1])

    def test_many_cards_of_a_tenant(self):
        """Its guests take the links down: no card is out of service."""
        for _ in range(3):
            server = self.boot()
            self.look()
            self.host.kernel.set_fault(
                ONE, attributes=HALF, port={'aer_dev_fatal': tree.errors(
                    'aer_dev_fatal', SDES=1)})
            self.look()
            self.assertEqual('suspect', self.states()[ONE])
            # the reset
            self.host.kernel.set_fault(ONE, attributes=None, port=None)
            self.host.delete(server)
            self.look()
            self.assertEqual('ok', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())
        self.assertEqual((0, 1), self.shown()[1])

    def test_server_between_two_looks(self):
        """What it provoked quarantines nothing, nor what its hand-over did."""
        server = self.boot()
        self.host.kernel.set_fault(ONE, attributes=FATAL, port=OF_LINK)
        self.host.kernel.says('pci', ONE, 'ERROR_EVENT=FAILED_RECOVERY')
        self.host.delete(server)
        self.look()
        self.assertEqual('ok', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())

    def test_not_read_after_it(self):
        """What was provoked is seen later."""
        server = self.boot()
        self.host.kernel.set_fault(ONE, attributes=FATAL)
        self.host.delete(server)
        with mock.patch.object(
                type(self.driver), 'health', side_effect=OSError('No.')):
            self.look()
        self.look()
        self.assertEqual('ok', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())

    def test_restart(self):
        """Two that have failed on different days do not look like a failure of
        the host, and are offered at no time."""
        self.turn(ONE, **HALF)
        self.turn(TWO, **HALF)
        for looks in 0, 1, 2:
            if looks < 2:
                self.restart()
            if looks:
                self.look()
            self.assertEqual(
                {ONE: 'quarantined', TWO: 'quarantined'},
                {address: state for address, state in self.states().items()
                 if address != THREE})
            self.assertEqual((1, 1), self.shown()[1])
        self.turn(ONE)
        self.assertEqual('ok', self.states()[ONE])
        self.restart()
        self.assertEqual((0, 1), self.shown()[1])

    def test_for_a_moment(self):
        """It does not answer after its state was read, as while its port
        contains an error (pci-error-recovery.rst of Linux, DPC)."""
        examine = self.driver.examine

        def late(address, before):
            self.host.kernel.set_fault(ONE, dead=True)
            try:
                return examine(address, before)
            finally:
                self.host.kernel.set_fault(ONE, dead=None)
        with mock.patch.object(self.driver, 'examine', late):
            self.host.inventory.scanner.scan(addresses=[ONE])
        self.assertEqual('quarantined', self.states()[ONE])
        self.look()
        self.look()
        self.assertEqual('ok', self.states()[ONE])

    def test_half_of_them(self):
        """It may be the host: nothing is quarantined."""
        self.look(**{ONE: HALF, TWO: HALF})
        self.assertEqual({ONE: 'suspect', TWO: 'suspect', THREE: 'ok'},
                         self.states())
        self.assertIn('2 devices of the driver pci would be withheld, all '
                      'since the last look', self.log.output)
        self.assertEqual((0, 1), self.shown()[1])

    def test_kernel_says(self):
        """Without waiting for the interval; and of a device without a driver,
        which the kernel never recovers, it says nothing."""
        self.host.kernel.rebind(ONE, 'vfio-pci')
        ends = time.monotonic() + base.PATIENCE
        while self.states()[ONE] != 'quarantined':
            self.assertLess(time.monotonic(), ends)
            # nova-compute may not have begun to listen
            for address in TWO, ONE:
                self.host.kernel.says(
                    'pci', address, 'ERROR_EVENT=FAILED_RECOVERY')
            time.sleep(0.2)
        self.assertEqual('ok', self.states()[TWO])

    def test_hangs(self):
        """A look that does not return is the finding, and delays no other."""
        self.config.config(group='accel', discovery_timeout=1)
        self.host.kernel.set_fault(ONE, hang='read')
        self.addCleanup(self.host.kernel.set_fault, ONE, hang=None)
        self.look(**{TWO: HALF})
        self.assertEqual({ONE: 'quarantined', TWO: 'quarantined',
                          THREE: 'ok'}, self.states())
        self.assertEqual((1, 1), self.shown()[1])

    def test_nonsense(self):
        """A driver that reads nonsense costs what it reads, and no more."""
        driver = type(self.driver)
        sound = driver.health
        with mock.patch.object(driver, 'health', lambda driver, device: (
                [signals.Reading('heat')] if device.address == ONE
                else sound(driver, device))):
            self.look(**{TWO: HALF})
            self.look()
        self.assertEqual({ONE: 'unknown', TWO: 'quarantined', THREE: 'ok'},
                         self.states())
        self.assertEqual(1, self.log.output.count(
            f'The health of {ONE} cannot be read now: The driver pci '
            f'reads Reading'))
        self.assertEqual((0, 1), self.shown()[1])

    def test_flavor_forbids(self):
        self.turn(**WORN)
        self.host.report()
        self.assertRaises(
            exception.DeviceUnavailable, self.boot,
            **{f'trait1:{naming.SUSPECT}': 'forbidden'})


class FunctionsTest(HealthTestCase):
    """Two functions of a card, each a device of its own."""

    POOLS = 'none'
    FUNCTIONS = '0000:02:00.0', '0000:02:00.1'

    def setUp(self):
        super().setUp()
        self.start_with([
            {'address': function, 'bridges': ['pci0000:00', '0000:00:10.0']}
            for function in self.FUNCTIONS])

    def test_what_a_server_provokes(self):
        """The port and the kernel tell it of both. The free one is suspect
        until the server is gone."""
        server = self.boot()
        self.look()
        self.host.kernel.set_fault(ONE, port=FATAL)
        self.look()
        self.assertEqual({'suspect'}, {*self.states().values()})
        self.host.delete(server)
        self.look()
        self.assertEqual({'ok'}, {*self.states().values()})
        self.assertEqual((), self.host.store.disabled())


class SharedTest(HealthTestCase):
    """A card of VFs."""

    ALSO = {'total_vfs': 2, 'vfs': 2}

    def test_short_servers(self):
        """They do not hide what they cannot cause; its owner reads it until
        the operator has looked after it."""
        self.start(ONE)
        server = self.boot()
        self.look()
        self.host.delete(self.boot())
        self.turn(**OF_LINK)
        self.assertEqual('quarantined', self.states()[ONE])

        def told():
            self.look()
            self.host.owners.run()
            return [*self.host.cloud.read()['servers'][server][
                'metadata'].values()]
        self.assertEqual(['failed: 1 of 1'], told())
        self.host.enable()
        self.assertEqual([], told())


class ObserveTest(HealthTestCase):

    MODE = 'observe'
    POOLS = 'none'

    def test_nothing_changes(self):
        self.start(ONE, TWO, THREE)
        before = self.shown()
        self.look(**{ONE: {**OF_LINK, **HALF}})
        self.assertEqual('suspect', self.states()[ONE])
        self.assertEqual(before, self.shown())
        self.assertEqual((), self.host.store.disabled())
        self.assertIn('([accel] health has it observed only)',
                      self.log.output)
        # once, and not at each look
        said = self.log.output
        self.look()
        self.assertEqual(said, self.log.output)


class OffTest(HealthTestCase):

    MODE = 'off'
    POOLS = 'none'

    def test_nothing_is_read(self):
        self.start(ONE)
        with mock.patch.object(type(self.driver), 'health', None):
            self.turn(**HALF)
        self.assertEqual({ONE: 'unknown'}, self.states())
        self.assertNotIn('cannot be read', self.log.output)


class PoolTest(HealthTestCase):

    def setUp(self):
        super().setUp()
        self.start(ONE, TWO, THREE, FOUR)

    def test_given_last(self):
        """As long as another one is free, the pool has no trait."""
        self.turn(**WORN)
        self.assertNotIn(naming.SUSPECT, self.shown()[0])
        server = self.boot(3)
        self.assertHas(server, TWO, THREE, FOUR)
        self.assertIn(naming.SUSPECT, self.shown()[0])
        self.assertHas(self.boot(1), ONE)

    def test_flavor_forbids(self):
        """Of a pool with others, too: on the host."""
        self.turn(**WORN)
        self.host.report()
        forbids = {f'trait1:{naming.SUSPECT}': 'forbidden'}
        self.assertRaises(exception.DeviceUnavailable, self.boot, 4,
                          **forbids)
        self.assertHas(self.boot(3, **forbids), TWO, THREE, FOUR)

    def test_flavor_requires(self):
        """For diagnosis."""
        self.look(**{a: WORN for a in (ONE, TWO, THREE, FOUR)})
        self.host.report()
        self.assertHas(self.boot(
            **{f'trait1:{naming.SUSPECT}': 'required'}), ONE)


class RegionsTestCase(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', health=['act'],
                           discovery_interval=3600)
        self.start_host({'address': A}, {'address': B})
        self.host.inventory.looks.run()

    def traits(self, address):
        self.host.report()
        uuid, = self.host.allocation(address)
        return self.host.cloud.read()['providers'][uuid]['traits']


class RegionsTest(RegionsTestCase):
    """FPGAs: the trait is on the card and on its regions."""

    def test_fme_fails_while_a_server_has_a_region(self):
        """What its server may have done ends with the server; what is so
        without one is given to none."""
        server = self.host.boot(base.asks(), self.host.allocation(A))
        self.host.kernel.set_fault(A, attributes={'catfatal_errors': '0x4'})
        self.host.inventory.looks.run()
        self.assertIn(naming.SUSPECT, self.traits(A))
        self.assertNotIn(naming.FENCED, self.traits(A))
        self.assertNotIn(naming.SUSPECT, self.traits(B))
        self.assertHas(server, vf(A))
        self.host.delete(server)
        self.host.inventory.looks.run()
        self.assertIn(naming.FENCED, self.traits(A))


class InVainTest(RegionsTestCase):
    """What nova-compute did with a device in vain: it is given last until the
    same succeeds, also after its server."""

    def look(self):
        self.host.inventory.looks.run()

    def condition(self, address=A):
        found = self.host.inventory.health.conditions()[address]
        return found.state.value, [f.signal for f in found.findings]

    def programming_fails(self, image):
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.host.boot_that_fails(
            base.asks(bitstream_id=image), self.host.allocation(A))

    def test_programming(self):
        image = self.host.upload(OTHER)
        self.programming_fails(image)
        self.look()
        self.assertEqual(('suspect', ['programming']), self.condition())
        self.assertIn(naming.SUSPECT, self.traits(A))
        self.assertNotIn(naming.SUSPECT, self.traits(B))
        server = self.host.boot(
            base.asks(bitstream_id=image), self.host.allocation(A))
        self.look()
        self.assertEqual(('ok', []), self.condition())
        self.assertHas(server, vf(A))

    def test_image_of_a_project(self):
        """It may just be a bad one: a tenant cannot make a card suspect."""
        self.programming_fails(self.host.upload(
            OTHER, {'owner': clouds.PROJECT, 'visibility': 'private'}))
        self.look()
        self.assertEqual(('ok', []), self.condition())

    def start_fails(self, said):
        boot = self.host.start_guest

        def fail(uuid_):
            raise RuntimeError(said)
        self.host.start_guest = fail
        self.assertRaises(RuntimeError, self.host.boot, base.asks(),
                          self.host.allocation(A))
        self.host.start_guest = boot
        self.look()

    def test_start(self):
        """QEMU names the device that it cannot have."""
        self.start_fails(f'vfio {vf(A)}: failed to setup container')
        self.assertEqual(('suspect', ['start']), self.condition())
        server = self.host.boot(base.asks(), self.host.allocation(A))
        self.look()
        self.assertEqual(('ok', []), self.condition())
        self.assertHas(server, vf(A))

    def test_restart(self):
        """It is in the store at once, and ends as before."""
        self.start_fails(f'vfio {vf(A)}: failed to setup container')
        image = self.host.upload(OTHER)
        self.programming_fails(image)
        for _ in range(2):
            self.restart()
            self.look()
            self.assertEqual(
                ('suspect', ['programming', 'start']), self.condition())
            self.assertIn(naming.SUSPECT, self.traits(A))
            self.assertEqual(('ok', []), self.condition(B))
        self.host.boot(base.asks(bitstream_id=image), self.host.allocation(A))
        self.restart()
        self.look()
        self.assertEqual(('ok', []), self.condition())

    def test_another_card(self):
        """It goes where the card goes."""
        self.start_host(*({'address': address, 'device_serial': serial}
                          for address, serial in ((A, '01'), (B, '02'))))
        self.start_fails(f'vfio {vf(A)}: failed to setup container')
        self.assertEqual(('suspect', ['start']), self.condition())
        self.host.kernel.exchange_cards(A, B)
        self.look()
        self.restart()
        self.look()
        self.assertEqual(([], ['start']),
                         (self.condition(A)[1], self.condition(B)[1]))

    def test_start_of_another_server(self):
        """The owner of the one with another part of the card is not told."""
        self.start_host({'address': A, 'ports': 2, 'vfs': 2})
        self.look()
        mine, other = (
            {uuid: {'resources': {base.FPGA: 1}}} for uuid, provider
            in self.host.inventory.shown.providers().items()
            if A in provider.addresses and base.FPGA in provider.inventory)
        server = self.host.boot(base.asks(), mine)
        claim, = self.host.holdings.of(server)
        with mock.patch.object(
                self.host, 'start_guest', side_effect=RuntimeError(
                    f'vfio {vf(A)} or {vf(A)[:-1]}2: no container')):
            self.assertRaises(RuntimeError, self.host.boot, base.asks(), other)
        self.look()
        self.assertEqual(('suspect', ['start']), self.condition())
        self.assertIs(signals.State.OK,
                      self.host.inventory.health.conditions()[A].for_owner)
        self.assertEqual([claim], self.host.holdings.of(server))

    def test_start_that_fails_for_another_reason(self):
        self.start_fails('the network is down')
        self.assertEqual(('ok', []), self.condition())


class OwnersTest(HealthTestCase):
    """What the metadata of servers say, in words that name no device."""

    POOLS = 'none'
    KEY = 'accel1:health'

    def setUp(self):
        super().setUp()
        self.start(ONE, TWO)
        self.server = self.boot()
        self.wait(None)

    def wait(self, said, server=None):
        """Until the metadata say that, within a look."""
        ends = time.monotonic() + base.PATIENCE
        while self.metadata(server).get(self.KEY) != said:
            self.assertLess(time.monotonic(), ends, self.metadata(server))
            time.sleep(0.02)

    def metadata(self, server=None):
        return self.host.cloud.read()['servers'][server or self.server][
            'metadata']

    def test_told_and_taken_back(self):
        self.turn(**WORN)
        self.wait('degraded: 1 of 1')
        self.host.kernel.set_fault(ONE, dead=True)
        self.look()
        self.wait('failed: 1 of 1')
        self.host.kernel.set_fault(ONE, dead=None)
        self.turn()
        self.wait(None)

    def test_gone(self):
        self.host.kernel.set_fault(ONE, vanish=True)
        self.look()
        self.look()
        self.wait('gone: 1 of 1')

    def test_others_words(self):
        """What the owner writes stays, and nothing is said of what only the
        operator has against a device, nor of another server's."""
        other = self.boot(address=TWO)
        self.host.cloud.set_metadata(self.server, 'accel1:note', 'text')
        self.host.disable(ONE)
        self.turn(TWO, **WORN)
        self.wait('degraded: 1 of 1', other)
        self.assertEqual({'accel1:note': 'text'}, self.metadata())

    def test_restart(self):
        """What an earlier process, or another host, has written."""
        self.host.cloud.set_metadata(self.server, self.KEY, 'failed: 1 of 1')
        self.host.cloud.set_metadata(
            self.server, 'accel2:health', 'gone: 1 of 1')
        self.restart()
        self.look()
        # one key is removed after the other
        self.wait_for(lambda: self.metadata() == {})

    def test_nothing_is_asked_while_nothing_changes(self):
        self.look()
        self.host.owners.run()
        self.host.cloud.servers = None
        self.host.owners.run()
        self.turn(**WORN)
        self.assertRaises(TypeError, self.host.owners.run)

    def test_metadata_are_replaced(self):
        """By their owner, who gives all of them (PUT .../metadata)."""
        self.turn(**WORN)
        self.wait('degraded: 1 of 1')
        self.host.cloud.set_server(self.server, metadata={'note': '1'})
        self.look()
        self.wait('degraded: 1 of 1')
        self.assertEqual('1', self.metadata()['note'])

    def test_while_nova_works_on_it(self):
        self.host.cloud.set_server(self.server, task_state='rebooting')
        self.turn(**WORN)
        self.host.owners.run()
        self.assertEqual({}, self.metadata())
        self.host.cloud.set_server(self.server, task_state=None)
        self.look()
        self.wait('degraded: 1 of 1')

    def test_database_does_not_answer(self):
        """It is tried again, and the log says so once."""
        set_metadata, refused = self.host.cloud.set_metadata, []

        def refuse(*args):
            refused.append(args)
            raise ConnectionError('no database')
        self.host.cloud.set_metadata = refuse
        self.turn(**WORN)
        ends = time.monotonic() + base.PATIENCE
        while len(refused) < 2:
            self.assertLess(time.monotonic(), ends)
            self.look()
        self.host.cloud.set_metadata = set_metadata
        self.look()
        self.wait('degraded: 1 of 1')
        self.assertEqual(1, self.log.output.count(
            'The health of accelerators cannot be written'))

    def test_server_is_gone(self):
        self.turn(**WORN)
        self.wait('degraded: 1 of 1')
        self.host.delete(self.server)
        self.turn()
        self.host.owners.run()
        self.assertEqual({}, self.host.owners._written)


class PausedTest(HealthTestCase):
    """QEMU pauses the guest of one of two servers that have VFs of a card."""

    SAID = 'paused by an error: hard reboot the server'

    def setUp(self):
        super().setUp()
        self.config.config(
            group='accel', health=[self.MODE], discovery_interval=3600,
            pci_devices=['vendor=8086 type=CARD'])
        self.start_host(drivers=('pci',), others=[
            {'address': ONE, 'bridges': ['pci0000:00', '0000:00:10.0'],
             'total_vfs': 2, 'vfs': 2}])
        self.server, self.other = self.boot(), self.boot()
        self.look()

    def told(self, server):
        return self.host.cloud.read()['servers'][server]['metadata']

    def wait_told(self, *said):
        self.wait_for(lambda: [*self.told(self.server).values()] == [*said])

    def found(self):
        return [f.signal for f in self.host.inventory.health.conditions()[
            ONE].findings]

    def test_told_until_it_runs(self):
        """Its owner and the operator, not the other owner; within one look.
        The card is for others as before."""
        self.host.cloud.pause_guest(self.server)
        self.look()
        self.wait_told(self.SAID)
        self.wait_for(lambda: self.found() == [signals.PAUSED])
        self.assertEqual({ONE: 'ok'}, self.states())
        self.assertNotIn(naming.SUSPECT, self.shown()[0])
        self.assertEqual((), self.host.inventory.table.holds_of(ONE))
        self.assertEqual({}, self.told(self.other))
        self.look()
        self.assertEqual(1, self.log.output.count(
            f'QEMU has paused the guest of server {self.server} because of an '
            f'error: hard reboot the server'))
        self.assertEqual((), self.host.store.disabled())
        self.host.reboot(self.server)
        self.look()
        self.wait_told()
        self.wait_for(lambda: self.found() == [])

    def test_with_what_the_card_tells(self):
        self.turn(aer_dev_nonfatal=tree.errors('aer_dev_nonfatal',
                                               TLP=1))
        self.host.cloud.pause_guest(self.server)
        self.look()
        self.wait_told(f'degraded: 1 of 1; {self.SAID}')
        self.wait_for(lambda: [*self.told(self.other).values()] == [
            'degraded: 1 of 1'])

    def test_deleted(self):
        self.host.cloud.pause_guest(self.server)
        self.look()
        self.wait_told(self.SAID)
        self.host.delete(self.server)
        self.look()
        self.wait_for(lambda: self.found() == [])

    def test_asked_for(self):
        """By the owner, or by Nova while it works on the server."""
        for fields in {'vm_state': 'paused'}, {'task_state': 'pausing'}:
            self.host.cloud.set_server(
                self.server, **{'vm_state': 'active', 'task_state': None,
                                **fields})
            self.host.cloud.pause_guest(self.server)
            self.host.paused.run()
            self.assertEqual(frozenset(),
                             self.host.inventory.health.paused())

    def test_observed(self):
        self.config.config(group='accel', health=['observe'])
        self.host.cloud.pause_guest(self.server)
        self.look()
        self.wait_for(lambda: self.found() == [signals.PAUSED])
        self.host.owners.run()
        self.assertEqual({}, self.told(self.server))

    def test_off(self):
        """libvirt is not asked."""
        self.config.config(group='accel', health=['act', 'guest_paused=off'])
        self.host.cloud.paused = None
        self.host.paused.run()


class NotToldTest(HealthTestCase):

    MODE = 'observe'
    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start(ONE)
        self.server = self.boot()

    def told(self):
        # a device that is gone is scanned for, and then known
        self.look()
        self.look()
        self.host.owners.run()
        return [*self.host.cloud.read()['servers'][self.server][
            'metadata'].values()]

    def test_observed_only(self):
        self.host.kernel.set_fault(ONE, attributes=HALF)
        self.assertEqual([], self.told())

    def test_what_is_certain(self):
        """Owners read it in each mode."""
        self.host.kernel.set_fault(ONE, dead=True)
        self.assertEqual(['failed: 1 of 1'], self.told())
        self.host.kernel.set_fault(ONE, dead=None, vanish=True)
        self.assertEqual(['gone: 1 of 1'], self.told())

    def test_operator_excludes_it(self):
        self.config.config(
            group='accel', exclude_devices=[f'address={ONE}'])
        self.restart()
        self.assertEqual([], self.told())
        self.assertEqual('quarantined', self.states()[ONE])


class NotReadTest(NotToldTest):
    """What is certain is told also if no signal is read."""

    MODE = 'off'


class RuleTakenAwayTest(base.HostTestCase):

    def test_disk_is_well(self):
        self.config.config(group='accel', health=['act'])
        self.start_host(drivers=('nvme',), nvmes=[{'address': ONE}])
        server = self.host.boot(
            {'resources1:CUSTOM_ACCELERATOR_SSD': '1'},
            self.host.allocation(resource_class='CUSTOM_ACCELERATOR_SSD'))
        self.config.config(group='accel', include_devices=[])
        self.restart()
        self.host.inventory.looks.run()
        device = self.host.inventory.devices[ONE]
        self.assertIn('offers only what a rule', device.reason)
        self.host.owners.run()
        self.assertEqual({}, self.host.cloud.read()['servers'][server][
            'metadata'])
