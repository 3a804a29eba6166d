# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel drill: a false finding goes the whole way, and back.

The order is written as by the command, beside nova-compute.
"""

import os
import types

import fixtures

from nova_accel.health import signals
from nova_accel import naming
from tests.host import health
from tests.host import maintenance
from tests.host.health import ONE, TWO, WORN


class DrillTestCase(health.HealthTestCase,
                    maintenance.OrderTestCase):

    MODE = 'act'
    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.file = os.path.join(self.directory, 'nova_accel.prom')
        self.start(ONE, TWO, metrics_file=self.file)
        self.host.report()

    def drill(self, meanwhile):
        """Have a drill of 7 seconds.

        :param meanwhile: called in their place, once nova-compute has found
            the drill.
        """
        def sleep(seconds):
            self.assertEqual(7, seconds)
            self.wait_for(lambda: signals.DRILL in self.found())
            meanwhile()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.admin.maintenance.time', types.SimpleNamespace(
                sleep=sleep)))
        answer = self.done('drill', ONE, '7')
        self.wait_for(lambda: signals.DRILL not in self.found())
        return answer

    def found(self, address=ONE):
        known = self.host.inventory.health.conditions().get(address)
        return {f.signal for f in known.findings} if known else set()

    def in_metrics(self):
        # the first look may not have written it yet
        if not os.path.exists(self.file):
            return False
        with open(self.file) as file:
            return 'signal="drill"' in file.read()

    def notices(self):
        return [payload['signals'] for _, payload
                in self.host.cloud.read().get('notices', ())]


class DrillTest(DrillTestCase):

    def test_whole_way(self):
        self.host.disable(ONE)
        self.look()

        def meanwhile():
            self.wait_for(self.in_metrics)
            self.wait_for(lambda: self.notices()[-1] == [signals.DRILL])
            self.assertIn(naming.SUSPECT, self.shown()[0])
            # a comparison begins with that
            self.host.inventory.recover()
        for resets in 1, 2:
            self.assertEqual(
                f'{ONE} reported a false finding (signal drill) for 7 s, to '
                f'the log, notifications, metrics, Placement and the owners '
                f'of its servers: check that your alert arrived.',
                self.drill(meanwhile))
            self.wait_for(lambda: not self.in_metrics())
            self.wait_for(lambda: self.notices()[-1] == [])
            self.assertNotIn(naming.SUSPECT, self.shown()[0])
            self.assertEqual({TWO: 'ok', ONE: 'quarantined'}, self.states())
            self.host.inventory.recover()
            self.assertEqual(resets, len(self.host.kernel.resets(ONE)))
        self.assertIn(f'Device {ONE} is quarantined: the operator has a drill',
                      self.log.output)
        # it is the operator's word that still holds, and nothing else
        self.host.enable()
        self.look()
        self.assertEqual('ok', self.states()[ONE])

    def test_owner_reads_it(self):
        server, other = self.boot(), self.boot(address=TWO)
        self.host.disable(ONE)

        def read():
            return self.host.cloud.read()['servers'][server]['metadata']
        self.drill(lambda: self.wait_for(
            lambda: read() == {'accel1:health': 'degraded: 1 of 1'}))
        self.wait_for(lambda: not read())
        self.assertHas(server, ONE)
        self.assertHas(other, TWO)
        self.assertEqual([], self.host.kernel.resets(ONE))

    def test_not_disabled(self):
        self.assertEqual(
            f'A drill of {ONE} was asked for, and a server might get it '
            f'meanwhile, because the operator has not disabled it: '
            f'nova-accel disable {ONE} first.', self.refused('drill', ONE, '0'))
        self.assertEqual([], self.notices())

    def test_disabled_by_nova_compute(self):
        self.turn(**health.OF_LINK)
        self.assertIn('the operator has not disabled it',
                      self.refused('drill', ONE, '0'))

    def test_not_well(self):
        """What is true of it could not be told from the drill."""
        self.host.disable(ONE)
        self.turn(**WORN)
        self.assertIn('its PCIe link has 8 lanes of 16): name a device that '
                      'is', self.refused('drill', ONE, '0'))

    def test_gone(self):
        self.host.disable(ONE)
        self.host.kernel.set_fault(ONE, vanish=True)
        self.look()
        self.look()
        self.assertIn('it is not well', self.refused('drill', ONE, '0'))
        self.assertIn('is not a device of this host',
                      self.refused('drill', '0000:99:00.0', '0'))

    def test_goes_meanwhile(self):
        """The card is pulled, and a report forgets it."""
        self.host.disable(ONE)

        def meanwhile():
            self.host.kernel.set_fault(ONE, vanish=True)
            self.look()
            # fenced, then removed
            self.host.report()
            self.host.report()
            self.assertNotIn(ONE, self.host.inventory.devices)
        self.drill(meanwhile)

    def test_off(self):
        self.config.config(group='accel', health=['act', 'drill=off'])
        self.host.disable(ONE)
        self.assertIn('has it off: add drill=observe or drill=act there',
                      self.refused('drill', ONE, '0'))

    def test_two_at_a_time(self):
        self.host.disable(ONE)
        with self.host.inventory.health.drilled(ONE):
            # of the first one nothing is found before a look
            self.assertIn('another one is in progress',
                          self.refused('drill', ONE, '0'))


class ObserveTest(DrillTestCase):

    MODE = 'observe'

    def test_only_the_operator_is_told(self):
        server = self.boot()
        self.host.disable(ONE)
        self.assertIn('notifications, metrics: check', self.drill(
            lambda: self.wait_for(self.in_metrics)))
        self.host.inventory.recover()
        self.assertEqual([], self.host.kernel.resets(ONE))
        self.assertEqual({}, self.host.cloud.read()['servers'][server][
            'metadata'])
