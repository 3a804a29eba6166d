# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel drill: a false finding goes the whole way, and back.

The order is written as by the command, beside nova-compute.
"""

import os
import time
import types

import fixtures

from nova_accel.attach import metrics
from nova_accel.health import signals
from nova_accel import naming
from tests.host import test_health
from tests.host import test_maintenance
from tests.host.test_health import ONE, TWO, WORN


class DrillTestCase(test_health.HealthTestCase,
                    test_maintenance.OrderTestCase):

    MODE = 'act'
    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.file = os.path.join(self.directory, 'nova_accel.prom')
        self.start(ONE, TWO, metrics_file=self.file)
        self.host.report()

    def short(self):
        """A place that tells nothing is given up soon."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.attach.drill.SECONDS', 3))

    def drill(self, address=ONE, stays=0):
        return self.done('drill', address, str(stays))

    def nothing_left(self):
        self.assertEqual((), self.host.notices.signals_of(ONE))
        self.assertFalse(metrics.has(self.file, ONE, signals.DRILL))
        self.assertEqual(
            set(), self.host.cloud.find_providers(trait=naming.SUSPECT))
        self.assertEqual({TWO: 'ok', ONE: 'quarantined'}, self.states())


class DrillTest(DrillTestCase):

    def test_whole_way(self):
        self.host.disable(ONE)
        self.look()
        self.assertRegex(self.drill(), (
            f'^The drill of {ONE} arrived at nova-compute, in a notification, '
            f'in the file of metrics, in Placement within [0-9.]+ s, was '
            f'answered by a function reset, and is over there[.]$'))
        self.assertEqual([[ONE, None]], self.host.kernel.resets(ONE))
        self.assertIn('was answered by a function reset', self.drill())
        self.assertEqual(2, len(self.host.kernel.resets(ONE)))
        self.nothing_left()
        # what each place was told, and what it was told after it
        self.assertEqual(
            [[signals.DRILL], []], [
                payload['signals'] for _, payload
                in self.host.cloud.read()['notices']][-2:])
        self.assertIn(f'Device {ONE} is quarantined: the operator has a drill',
                      self.log.output)
        self.assertEqual({}, {**self.host.cloud.read()['servers']})
        # it is the operator's word that still holds, and nothing else
        self.host.enable()
        self.look()
        self.assertEqual('ok', self.states()[ONE])

    def test_owner_reads_it(self):
        server, other = self.boot(), self.boot(address=TWO)
        self.host.disable(ONE)
        said = []
        say = self.host.cloud.say

        def heard(uuid, key, text):
            said.append((uuid, key, text))
            say(uuid, key, text)
        self.host.cloud.say = heard
        self.assertIn('in the metadata of 1 servers', self.drill())
        self.assertEqual([(server, 'accel1:health', 'degraded: 1 of 1'),
                          (server, 'accel1:health', None)], said)
        self.assertHas(server, ONE)
        self.assertHas(other, TWO)
        self.assertEqual([], self.host.kernel.resets(ONE))

    def test_not_disabled(self):
        self.assertEqual(
            f'A drill of {ONE} was asked for, and a server might get it '
            f'meanwhile, because the operator has not disabled it: '
            f'nova-accel disable {ONE} first.', self.refused('drill', ONE, '0'))
        self.nothing_was_told()

    def test_disabled_by_nova_compute(self):
        self.turn(**test_health.OF_LINK)
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
        """The card is pulled while the finding stays, and a report forgets
        it."""
        self.host.disable(ONE)

        def sleep(seconds):
            if seconds != 7:
                time.sleep(seconds)
                return
            self.host.kernel.set_fault(ONE, vanish=True)
            self.look()
            # fenced, then removed
            self.host.report()
            self.host.report()
            self.assertNotIn(ONE, self.host.inventory.devices)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.attach.drill.time', types.SimpleNamespace(
                monotonic=time.monotonic, sleep=sleep)))
        self.assertIn('and is over there', self.drill(stays=7))

    def test_off(self):
        self.config.config(group='accel', health=['act', 'drill=off'])
        self.host.disable(ONE)
        self.assertIn('has it off: add drill=observe or drill=act there',
                      self.refused('drill', ONE, '0'))

    def test_two_at_a_time(self):
        self.host.disable(ONE)
        with self.host.inventory.health.drilled(ONE):
            # of the first one nothing is found before a look
            self.assertIn('there is one already',
                          self.refused('drill', ONE, '0'))
        self.drill()

    def nothing_was_told(self):
        self.assertEqual([], self.host.cloud.read().get('notices', []))


class ArrivesNotTest(DrillTestCase):
    """What a place does not tell is the answer, and nothing stays."""

    def setUp(self):
        super().setUp()
        self.short()
        self.host.disable(ONE)

    def not_seen(self):
        answer = self.refused('drill', ONE, '0')
        return answer.partition('after 3 s it is not seen ')[2]

    def test_bus_of_messages(self):
        def refuse(*args):
            raise ConnectionError('no bus')
        notify, self.host.cloud.notify = self.host.cloud.notify, refuse
        self.assertIn('in a notification', self.not_seen())
        self.host.cloud.notify = notify
        self.look()
        self.drill()
        self.nothing_left()

    def test_metrics(self):
        """Their directory is not there any more."""
        self.config.config(group='accel', metrics_file=os.path.join(
            self.directory, 'none', 'x.prom'))
        self.assertIn('in the file of metrics', self.not_seen())

    def test_placement(self):
        self.host.cloud.show = lambda *args: None
        self.assertIn('in Placement', self.not_seen())

    def test_device_cannot_be_read(self):
        self.host.inventory._drivers['pci'].health = None
        self.assertIn('at nova-compute', self.not_seen())
        self.assertEqual((), self.host.notices.signals_of(ONE))


class ObserveTest(DrillTestCase):

    MODE = 'observe'

    def test_only_the_operator_is_told(self):
        server = self.boot()
        self.host.disable(ONE)
        self.assertIn('in the file of metrics within', self.drill())
        self.assertEqual([], self.host.kernel.resets(ONE))
        self.assertIn('neither Placement nor owners are told, because [accel] '
                      'health has it observed only', self.drill())
        self.assertEqual({}, self.host.cloud.read()['servers'][server][
            'metadata'])


class PoolTest(DrillTestCase):

    POOLS = 'host'

    def test_pool_with_others(self):
        self.host.disable(ONE)
        self.assertIn('Placement does not show it, because its pool has '
                      'others', self.drill())
