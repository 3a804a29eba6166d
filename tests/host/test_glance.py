# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Cheap signals are read between two looks, and others see them at once."""

import os

import fixtures

from nova_accel.health import signals
from nova_accel.inventory import holds
from nova_accel.inventory import cards
from nova_accel import naming
from nova_accel.sim import tree
from tests.host import base
from tests.host import health
from tests.host.health import (
    FATAL, HALF, HealthTestCase, ONE, THREE, TWO, WORN)


class GlanceTest(HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.directory, 'x.prom')
        self.start(ONE, TWO, THREE, metrics_file=self.path)
        self.server = self.boot(address=TWO)
        self.look()
        self.quiet()

    def glance(self, address=ONE, **attributes):
        self.host.kernel.set_fault(address, attributes=attributes)
        self.host.inventory.looks.glance()

    def quiet(self):
        self.wait_for(lambda: not any(
            background.runs for background in self.host.after_look))

    def in_placement(self, address):
        """Traits and reserved of a provider, without a report."""
        uuid, = self.host.allocation(address, health.CARD)
        there = self.host.cloud.read()['providers'][uuid]
        return there['traits'], there['inventory'][health.CARD]['reserved']

    def owner_reads(self):
        return self.host.cloud.read()['servers'][self.server][
            'metadata'].get(naming.health_key('1'))

    def metrics(self, address):
        with open(self.path) as file:
            return [line for line in file
                    if line.startswith('nova_accel_device_finding')
                    and address in line]

    def test_all_see_it_without_a_report(self):
        """Placement, the owner and metrics; and its end as well."""
        self.glance(TWO, **WORN)
        self.wait_for(lambda: naming.SUSPECT in self.in_placement(TWO)[0])
        self.wait_for(lambda: self.owner_reads() == 'degraded: 1 of 1')
        self.wait_for(lambda: self.metrics(TWO))
        self.glance(TWO)
        self.wait_for(lambda: naming.SUSPECT not in self.in_placement(TWO)[0])
        self.wait_for(lambda: self.owner_reads() is None)
        self.wait_for(lambda: not self.metrics(TWO))

    def test_withheld(self):
        self.glance(**HALF)
        self.wait_for(lambda: self.in_placement(ONE)[1] == 1)
        self.assertEqual('quarantined', self.states()[ONE])

    def test_sticky(self):
        """It is withheld at once, and disabled from the next look on: until
        then the breaker may spare it."""
        self.glance(**FATAL)
        self.wait_for(lambda: self.in_placement(ONE)[1] == 1)
        kinds = self.host.inventory.table.kinds
        self.assertEqual({holds.Kind.UNHEALTHY},
                         kinds(ONE))
        self.look()
        self.assertIn(holds.Kind.DEFECTIVE, kinds(ONE))
        self.assertNotIn(holds.Kind.UNHEALTHY, kinds(ONE))

    def test_breaker(self):
        """Of devices that turn one after the other in one interval."""
        self.glance(ONE, **FATAL)
        self.glance(THREE, **FATAL)
        self.assertEqual({ONE: 'suspect', TWO: 'unknown', THREE: 'suspect'},
                         self.states())
        self.look()
        self.assertEqual({ONE: 'suspect', TWO: 'unknown', THREE: 'suspect'},
                         self.states())
        self.wait_for(lambda: self.in_placement(ONE)[1] == 0)

    def test_falls_off_the_bus(self):
        """It is scanned, and no other card."""
        scanned = []
        scan = self.host.inventory.scanner.scan
        self.useFixture(fixtures.MockPatchObject(
            self.host.inventory.scanner, 'scan', lambda *about: (
                scanned.append(about), scan(*about))))
        self.host.kernel.set_fault(ONE, dead=True)
        for _ in range(2):
            self.host.inventory.looks.glance()
        self.assertEqual([((), {ONE})], scanned)
        self.assertEqual('quarantined', self.states()[ONE])
        self.wait_for(lambda: self.in_placement(ONE)[1] == 1)

    def test_signals_of_the_card_stay(self):
        """A glance does not read them."""
        self.useFixture(fixtures.MockPatchObject(
            type(self.driver), 'health', lambda driver, device: [
                signals.Reading('wear', about='it is old')]))
        self.look()
        self.glance(TWO, **WORN)
        self.glance(TWO)
        self.assertEqual(dict.fromkeys((ONE, TWO, THREE), 'suspect'),
                         self.states())

    def test_nothing_has_changed(self):
        """Nothing is written, and no thread is started but for reading."""
        started = []
        for background in self.host.after_look:
            self.useFixture(fixtures.MockPatchObject(
                background, 'start', lambda: started.append(1)))
        for _ in range(3):
            self.glance()
        self.assertEqual([], started)

    def test_after_a_hand_over(self):
        """A glance reads all of the card; errors until then do not count."""
        self.host.delete(self.server)
        name = 'aer_dev_nonfatal'
        self.glance(TWO, **{name: tree.errors(name, MalfTLP=5)})
        self.assertEqual('ok', self.states()[TWO])
        self.glance(TWO, **{name: tree.errors(name, MalfTLP=6)})
        self.assertEqual('suspect', self.states()[TWO])

    def test_one_hangs(self):
        """The others are read, and a look begins, which withholds it."""
        self.useFixture(fixtures.MockPatchObject(cards, '_PATIENCE', 0.2))
        self.config.config(group='accel', discovery_timeout=1)
        self.host.kernel.set_fault(ONE, hang='read')
        self.addCleanup(self.host.kernel.set_fault, ONE, hang=None)
        self.glance(THREE, **WORN)
        self.assertEqual('suspect', self.states()[THREE])
        self.wait_for(lambda: holds.Kind.HANGS
                      in self.host.inventory.table.kinds(ONE))
        self.wait_for(lambda: not self.host.inventory.looks.background.runs)
        self.glance(THREE)
        self.assertEqual('ok', self.states()[THREE])

    def test_off(self):
        self.config.config(group='accel', health=['off'])
        reads = []
        self.useFixture(fixtures.MockPatchObject(
            self.host.inventory.looks, '_read_bus', reads.append))
        self.glance(**HALF)
        self.assertEqual([], reads)


class PeriodTest(base.HostTestCase):

    def test_thread(self):
        """Glances begin without a report, and end with nova-compute."""
        self.config.config(
            group='accel', health=['act'], discovery_interval=4,
            pci_devices=['vendor=8086 type=CARD'])
        self.start_host(drivers=('pci',), others=[
            {'address': ONE, 'bridges': ['pci0000:00', '0000:00:01.0']}])
        conditions = self.host.inventory.health.conditions
        self.wait_for(lambda: conditions()[ONE].state.value == 'ok')
        # a look would find it too
        self.host.inventory.looks.background.end()
        self.host.kernel.set_fault(ONE, attributes=HALF)
        self.wait_for(lambda: conditions()[ONE].state.value == 'quarantined')
