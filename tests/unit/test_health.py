# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Signals of the health of devices: what is read, and what it means."""

import os
import re

import ddt
import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import contract
from nova_accel.drivers import dfl
from nova_accel.drivers import nvme
from nova_accel.drivers import qat
from nova_accel.drivers import xrt
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.health import watch
from nova_accel.host import bus
from nova_accel.host import kernel
from nova_accel.host import pci
from nova_accel.sim import tree
from tests.unit import configured
from tests.unit.host import A, SimulatedHost

OK, SUSPECT, BAD = (signals.State.OK, signals.State.SUSPECT,
                    signals.State.QUARANTINED)
PORT = '0000:5d:00.0'
B, C, D = (f'0000:{n:02x}:00.0' for n in (2, 3, 4))
HEALTH = os.path.join(os.path.dirname(__file__),
                      '../../docs/source/operate/health.rst')


class WatchTestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.set('act')
        self.watch = watch.Watch()
        self.held, self.marks, self.whole = False, (), False

    def set(self, *items):
        self.config.config(group='accel', health=list(items))

    def round(self, *readings):
        """One look, in which the device reads that."""
        self.watch.begin()
        return self.judged(*readings)

    def judged(self, *readings):
        """A round that has begun before."""
        return self.watch.round({A: watch.Card(
            ('pci', '1:2'), self.held, self.held, self.marks, self.whole)},
            {A: readings})

    def ends(self, is_reset=True):
        """The server of the device is gone."""
        self.held = self.whole = False
        self.watch.restart_counters(A, is_reset)

    def states(self, address=A):
        return [(f.signal, f.state) for f in self.watch.findings(address)]

    def reasons(self, address=A):
        return [f.reason for f in self.watch.findings(address)]


def reading(signal, value=1, about='x'):
    return signals.Reading(signal, value, about)


@ddt.ddt
class TableTest(WatchTestCase):
    """Each row: free, with a server that has a part, and all of it."""

    @ddt.data(*signals.SIGNALS)
    def test_row(self, signal):
        row = signals.SIGNALS[signal]
        self.set(f'{signal}=act')
        for held, whole, state in (
                (False, False, row.free), (True, False, row.held),
                (True, True, row.state(True, True))):
            self.watch = watch.Watch()
            self.held, self.whole = held, whole
            if row.counts:
                self.round(reading(signal, 7))
                self.assertEqual([], self.states())
                self.round(reading(signal, 7 + row.least - 1))
                before = [] if row.least > 1 else self.states()
                self.assertEqual([], before)
                self.round(reading(signal, 7 + 2 * row.least))
            else:
                self.round(reading(signal, 7))
            self.assertEqual([] if state is OK else [(signal, state)],
                             self.states())

    @ddt.data(*signals.SIGNALS)
    def test_guest_cannot_quarantine(self, signal):
        row = signals.SIGNALS[signal]
        if row.cause is signals.Cause.ANY:
            self.assertLess(row.held.rank, BAD.rank)
        if row.cause is not signals.Cause.NONE:
            self.assertLess(row.state(True, True).rank, BAD.rank)

    def test_page(self):
        """The page says the same of each signal."""
        with open(HEALTH, encoding='utf-8') as file:
            table = re.search(
                r'Which guests can cause a signal$(.*?)^[^ \n]', file.read(),
                re.DOTALL | re.MULTILINE)[1]
        rows = re.split(r'\n   \* - ', table)[2:]
        self.assertEqual(
            [{name for name, row in signals.SIGNALS.items()
              if row.cause is cause} for cause in (
                 signals.Cause.ANY, signals.Cause.WHOLE, signals.Cause.NONE)],
            [{*re.findall('``([a-z_]+)``', row)} for row in rows])

    @ddt.data(*signals.SIGNALS)
    def test_new_and_sticky(self, signal):
        row = signals.SIGNALS[signal]
        self.assertTrue(row.counts or not row.sticky,
                        'a level says itself when it is over')
        self.assertFalse(row.is_new and BAD in (row.free, row.held))


@ddt.ddt
class RoundsTest(WatchTestCase):

    def test_counts_since_the_hand_over(self):
        self.held = True
        self.round(reading('nonfatal_errors', 5))
        self.round(reading('nonfatal_errors', 7))
        self.round(reading('nonfatal_errors', 7))
        self.round(reading('nonfatal_errors', 8))
        self.assertEqual(['it had 3 uncorrectable PCIe errors (x)'],
                         self.reasons())
        # what grows while the device is cleaned ends with the claim
        self.ends()
        self.round(reading('nonfatal_errors', 20))
        self.assertEqual([], self.reasons())
        self.round(reading('nonfatal_errors', 20))
        self.assertEqual([], self.reasons())

    def test_ends_with_a_claim_of_several(self):
        """Of a card with two servers it is not known which one it was."""
        self.held = True
        self.round(reading('fatal_errors', 0))
        self.round(reading('fatal_errors', 1))
        self.assertEqual([('fatal_errors', SUSPECT)], self.states())
        self.ends()
        self.held = True
        self.round(reading('fatal_errors', 1))
        self.assertEqual([], self.states())

    @ddt.data('fatal_errors', 'link_errors')
    def test_server_between_two_looks(self, signal):
        """No look has seen it: what it provoked, and what its hand-over did,
        quarantines nothing."""
        self.round(reading(signal, 5))
        self.watch.note(A, 'recovery_failed')
        self.ends()
        self.round(reading(signal, 6))
        self.assertEqual([], self.states())
        self.round(reading(signal, 7))
        self.assertEqual([(signal, BAD)], self.states())

    def test_ends_while_it_is_looked_at(self):
        """Its counters may have been read before that, or after."""
        for read in 5, 6:
            self.watch = watch.Watch()
            self.held = True
            self.round(reading('fatal_errors', 5))
            self.watch.begin()
            self.ends()
            self.judged(reading('fatal_errors', read))
            self.assertEqual([], self.states())
            self.round(reading('fatal_errors', 6))
            self.assertEqual([], self.states())
            self.round(reading('fatal_errors', 7))
            self.assertEqual([('fatal_errors', BAD)], self.states())

    def test_not_read_since_it_ended(self):
        """What it has grown by is seen later."""
        self.held = True
        self.round(reading('fatal_errors', 5))
        self.ends()
        for readings in {}, {A: None}:
            self.watch.begin()
            self.watch.round({A: watch.Card(
                ('pci', '1:2'), False, False)}, readings)
            self.assertFalse(self.watch.is_current(A))
        self.round(reading('fatal_errors', 6))
        self.assertEqual([], self.states())
        self.assertTrue(self.watch.is_current(A))
        self.round(reading('fatal_errors', 7))
        self.assertEqual([('fatal_errors', BAD)], self.states())

    def test_part_of_a_card_ends(self):
        """What no guest can cause counts."""
        self.held = True
        self.round(reading('link_errors', 0), reading('fatal_errors', 0))
        for errors in 1, 2:
            self.ends(is_reset=False)
            self.held = True
            self.round(reading('link_errors', errors),
                       reading('fatal_errors', errors))
            self.assertEqual([('link_errors', BAD)], self.states())

    def test_guest_takes_the_link_down(self):
        """The reset after it ends that; a link that stays narrow does not."""
        self.held = self.whole = True
        found = [reading('link_errors', 0)], [
            reading('link_errors', 1), reading('link_width_half')]
        for readings in found:
            self.round(*readings)
        self.assertEqual(
            {('link_errors', SUSPECT), ('link_width_half', SUSPECT)},
            {*self.states()})
        self.ends()
        self.assertEqual(1, len(self.watch.fencing(A, found[1])))
        self.round(*found[1])
        self.assertEqual([('link_width_half', BAD)], self.states())
        self.round(found[1][0])
        self.assertEqual([], self.states())

    def test_guest_takes_the_link_of_another_function_down(self):
        card = watch.Card(('pci', '1:2'), False, True, slot_whole=True)
        for errors in 0, 1:
            self.watch.begin()
            self.watch.round({A: card}, {A: [
                reading('link_errors', errors), reading('link_width_half')]})
        self.assertEqual({SUSPECT}, {state for _, state in self.states()})

    def test_kernel_tells_after_the_end(self):
        self.ends()
        self.watch.note(A, 'recovery_failed')
        self.round()
        self.assertEqual([], self.states())
        self.watch.note(A, 'recovery_failed')
        self.round()
        self.assertEqual([('recovery_failed', BAD)], self.states())

    def test_server_has_another_function_of_the_slot(self):
        """What is told of both is not held against the one that is free."""
        card = watch.Card(('pci', '1:2'), False, True)
        for errors in 0, 1:
            self.watch.note(A, 'recovery_failed')
            self.watch.begin()
            self.watch.round({A: card}, {A: [
                reading('fatal_errors', errors), reading('card_failed')]})
        self.assertEqual([('card_failed', BAD), ('fatal_errors', SUSPECT),
                          ('recovery_failed', SUSPECT)], self.states())

    def test_counter_without_a_value(self):
        """It was 0, or cannot be read now."""
        self.round()
        self.round(reading('nonfatal_errors', 2))
        self.assertEqual([('nonfatal_errors', SUSPECT)], self.states())
        self.held = True
        self.round()
        self.ends()
        self.round()
        self.round(reading('nonfatal_errors', 2))
        self.assertEqual([], self.states())

    def test_counter_begins_again(self):
        self.round(reading('nonfatal_errors', 100))
        self.round(reading('nonfatal_errors', 0))
        self.assertEqual([], self.states())
        self.round(reading('nonfatal_errors', 2))
        self.assertEqual(['it had 2 uncorrectable PCIe errors (x)'],
                         self.reasons())
        # and in the same look it has counted some
        self.round(reading('nonfatal_errors', 1))
        self.assertEqual(['it had 3 uncorrectable PCIe errors (x)'],
                         self.reasons())

    def test_level_ends_by_itself(self):
        self.round(reading('link_width', 8, 'of 16'))
        self.assertEqual(['its PCIe link has 8 lanes of 16'], self.reasons())
        self.round()
        self.assertEqual([], self.reasons())

    def test_cannot_be_read(self):
        """What is known stays; what cannot be read is not OK."""
        self.round(reading('power'))
        self.assertTrue(self.watch.is_read(A))
        self.watch.round({A: watch.Card(('pci', '1:2'), False, False)},
                         {A: None})
        self.assertEqual([('power', BAD)], self.states())
        self.assertFalse(self.watch.is_read(A))
        # a card that is busy was not asked
        self.watch.round({A: watch.Card(('pci', '1:2'), False, False)}, {})
        self.assertEqual([('power', BAD)], self.states())

    def test_event(self):
        for held, state in (False, BAD), (True, SUSPECT):
            self.watch = watch.Watch()
            self.held = held
            self.watch.note(A, 'recovery_failed')
            self.watch.note(B, 'recovery_failed')
            self.round()
            self.assertEqual([('recovery_failed', state)], self.states())
            self.assertEqual([], self.states(B))

    def test_marks(self):
        """After its server as well, and where the device cannot be read."""
        self.held = True
        self.marks = 'programming',
        self.round()
        self.ends()
        self.watch.round({A: watch.Card(
            ('pci', '1:2'), False, False, self.marks)}, {A: None})
        self.assertEqual([('programming', SUSPECT)], self.states())
        self.marks = 'start',
        self.watch.round({A: watch.Card(
            ('pci', '1:2'), False, False, self.marks)}, {})
        self.assertEqual([('start', SUSPECT)], self.states())
        self.marks = ()
        self.round()
        self.assertEqual([], self.states())

    def test_acknowledged(self):
        self.round(reading('link_errors', 0))
        self.round(reading('link_errors', 1))
        finding, = self.watch.findings(A)
        self.assertTrue(finding.is_sticky)
        # until it is written down it stays, also where a server had the device
        self.held = True
        self.round(reading('link_errors', 1))
        self.ends()
        self.round(reading('link_errors', 1))
        self.assertEqual([finding], self.watch.findings(A))
        self.watch.acknowledge(A, [finding])
        self.round(reading('link_errors', 1))
        self.assertEqual([], self.states())
        self.round(reading('link_errors', 2))
        self.assertEqual([('link_errors', BAD)], self.states())

    def test_observed(self):
        """Nothing is done about it, and nothing is more than suspect."""
        self.set('observe')
        self.round(reading('power'))
        finding, = self.watch.findings(A)
        self.assertEqual((SUSPECT, False), (finding.state, finding.acts))

    def test_new_signals_are_observed(self):
        self.round(reading('temperature'), reading('card_warns'))
        self.assertEqual({'temperature': False, 'card_warns': True},
                         {f.signal: f.acts for f in self.watch.findings(A)})
        self.set('act', 'temperature=act')
        self.round(reading('temperature'))
        self.assertTrue(self.watch.findings(A)[0].acts)

    def test_off(self):
        self.set('act', 'power=off')
        self.round(reading('power'))
        self.assertEqual([], self.states())
        self.assertFalse(signals.is_off())
        self.set('off')
        self.assertTrue(signals.is_off())


class GlanceTest(WatchTestCase):

    def glance(self, *readings):
        self.watch.begin()
        return self.watch.round({A: watch.Card(('pci', '1:2'), False, False)},
                                {A: readings}, is_glance=True)

    def test_least(self):
        """It is of a whole interval, whatever glances are in it."""
        self.set('act', 'corrected_errors=act')
        self.round(reading('corrected_errors', 7))
        for value in 60, 106:
            self.glance(reading('corrected_errors', value))
            self.assertEqual([], self.states())
        self.glance(reading('corrected_errors', 107))
        self.assertEqual(['its PCIe link corrected 100 errors (x)'],
                         self.reasons())

    def test_interval_ends(self):
        self.set('act', 'corrected_errors=act')
        self.round(reading('corrected_errors', 7))
        self.glance(reading('corrected_errors', 60))
        self.round(reading('corrected_errors', 60))
        self.glance(reading('corrected_errors', 159))
        self.assertEqual([], self.states())

    def test_counter_begins_again(self):
        """As it does when the kernel finds the device again."""
        self.set('act', 'corrected_errors=act')
        self.round(reading('corrected_errors', 200))
        self.glance(reading('corrected_errors', 3))
        self.glance(reading('corrected_errors', 102))
        self.assertEqual([], self.states())
        self.glance(reading('corrected_errors', 103))
        self.assertEqual([('corrected_errors', SUSPECT)], self.states())

    def test_hand_over(self):
        self.round(reading('fatal_errors', 1))
        self.ends()
        self.glance(reading('fatal_errors', 5))
        self.assertEqual([], self.states())
        self.glance(reading('fatal_errors', 6))
        self.assertEqual([('fatal_errors', BAD)], self.states())


class BreakerTest(WatchTestCase):

    def many(self, *bad, of=(A, B, C, D), is_glance=False):
        card = watch.Card(('pci', '1:2'), False, False)
        return self.watch.round(
            {address: card for address in of},
            {address: [reading('power')] if address in bad else []
             for address in of}, is_glance)

    def test_glances(self):
        """They divide no interval: what turns in them turns at once."""
        self.many()
        self.assertEqual({}, self.many(A, is_glance=True))
        self.assertEqual([('power', BAD)], self.states())
        self.assertEqual({('pci', '1:2'): [A, B]},
                         self.many(A, B, is_glance=True))
        self.assertEqual([('power', SUSPECT)] * 2,
                         self.states() + self.states(B))
        # one that has gone meanwhile is not looked for
        self.many(B, C, of=(B, C, D), is_glance=True)
        self.assertEqual({}, self.many(B, C, of=(B, C, D)))
        self.many(C)
        self.assertEqual({}, self.many(B, C))
        self.assertEqual([('power', BAD)], self.states(B))

    def test_half_of_a_kind(self):
        self.many()
        self.assertEqual({('pci', '1:2'): [A, B]}, self.many(A, B))
        self.assertEqual([('power', SUSPECT)], self.states())
        # it stays so while nothing else comes
        self.assertEqual({}, self.many(A, B))
        self.assertEqual([('power', SUSPECT)], self.states())
        # another one alone is not spared
        self.assertEqual({}, self.many(A, B, C))
        self.assertEqual([('power', BAD)], self.states(C))
        # nor is one of them, once it was well
        self.many(B, C)
        self.many(A, B, C)
        self.assertEqual([('power', BAD)], self.states())

    def test_fenced_before_the_start(self):
        """They had not turned in one round."""
        card = watch.Card(('pci', '1:2'), False, False, (signals.FENCED,))
        found = [reading('power')]
        self.assertEqual({}, self.watch.round(
            {A: card, B: card}, {A: found, B: found}))
        self.assertEqual([('power', BAD)], self.states())

    def test_less_than_half(self):
        self.many(of=(A, B, C, D, '5'))
        self.assertEqual({}, self.many(A, B, of=(A, B, C, D, '5')))
        self.assertEqual([('power', BAD)], self.states())

    def test_guests_do_not_spare_others(self):
        """Two guests take down the links of their cards, and at the same time
        a third one breaks."""
        self.many()
        cards = {address: watch.Card(
            ('pci', '1:2'), address != C, address != C,
            slot_whole=address != C) for address in (A, B, C, D)}
        found = [reading('power')]
        self.assertEqual({}, self.watch.round(
            cards, {A: found, B: found, C: found, D: []}))
        self.assertEqual([('power', BAD)], self.states(C))
        self.assertEqual([('power', SUSPECT)], self.states(A))

    def test_the_only_one(self):
        """One device of two may just be broken."""
        self.assertEqual({}, self.many(A, of=(A,)))
        self.assertEqual([('power', BAD)], self.states())


class OptionTest(WatchTestCase):

    def refused(self, *items):
        self.set(*items)
        return str(self.assertRaises(exception.ConfigurationError,
                                     signals.modes))

    def test_default_observes(self):
        self.config.register_opts([], 'accel')
        conf.CONF.clear_override('health', 'accel')
        self.assertEqual({signals.Mode.OBSERVE}, {*signals.modes().values()})

    def test_malformed(self):
        self.assertIn("'on' is neither off nor observe nor act",
                      self.refused('act', 'power=on'))
        said = self.refused('heat=act')
        self.assertIn("'heat' is not a signal: the signals are link_errors, "
                      "fatal_errors", said)


class StateTest(testtools.TestCase):

    def test_states(self):
        for expected, *about in (
                ('gone', True, True, True, True, True),
                ('quarantined', False, True, True, True, True),
                ('suspect', False, False, True, True, True),
                ('suspect', False, False, True, False, False),
                ('unknown', False, False, False, True, True),
                ('unknown', False, False, False, False, False),
                ('ok', False, False, False, True, False)):
            self.assertEqual(expected, signals.state_of(*about).value, about)


class ReadingsTestCase(testtools.TestCase):

    def host(self, *cards, **kinds):
        self.useFixture(config_fixture.Config(conf.CONF))
        self.kernel = self.useFixture(SimulatedHost(*cards, **kinds)).kernel

    def fault(self, **attributes):
        self.kernel.set_fault(A, attributes=attributes)


class BusTest(ReadingsTestCase):

    def setUp(self):
        super().setUp()
        self.bridges = ('pci0000:5d', PORT)
        self.host(others=[{'address': A, 'bridges': [*self.bridges]}])
        self.before = self.read()

    def read(self):
        return [*bus.readings(self.kernel, A, self.bridges)]

    def new(self):
        return [r for r in self.read() if r not in self.before]

    def test_all_well(self):
        self.assertEqual([], self.before)

    def test_errors(self):
        self.fault(
            aer_dev_fatal=tree.errors('aer_dev_fatal', DLP=1, MalfTLP=2),
            aer_dev_nonfatal=tree.errors(
                'aer_dev_nonfatal', RxOF=3, UnsupReq=4, ECRC=5),
            aer_dev_correctable=tree.errors(
                'aer_dev_correctable', RxErr=6, BadTLP=7, NonFatalErr=8))
        self.assertEqual([
            ('corrected_errors', 13, 'of all kinds'),
            ('fatal_errors', 2, 'MalfTLP'), ('link_errors', 1, 'DLP'),
            ('link_errors', 3, 'RxOF'), ('nonfatal_errors', 5, 'ECRC')],
            sorted(self.new()))

    def test_glance(self):
        """Reads what changes often, and a look all."""
        cache = {}

        def read(is_glance):
            return [r.signal for r in bus.readings(
                self.kernel, A, self.bridges, cache, is_glance)]
        self.assertEqual([], read(True))
        self.fault(max_link_width='32')
        self.kernel.set_fault(A, port={'max_link_width': '32'})
        self.assertEqual([], read(True))
        self.assertEqual(['link_width'], read(False))
        self.fault(max_link_width='32', current_link_width='8')
        self.assertEqual(['link_width_half'], read(True))

    def test_old_names(self):
        self.fault(aer_dev_fatal='Data Link Protocol 1\nMalformed TLP 2\n'
                                 'TOTAL_ERR_FATAL 3')
        self.assertEqual([('fatal_errors', 2, 'Malformed TLP'),
                          ('link_errors', 1, 'DLP')], sorted(self.new()))

    def test_port(self):
        self.kernel.set_fault(A, port={'aer_dev_fatal': tree.errors(
            'aer_dev_fatal', SDES=1)})
        self.assertEqual([('link_errors', 1, f'SDES at port {PORT}')],
                         self.new())

    def test_width(self):
        for now, most, found in (
                ('8', '16', ('link_width', 8, 'of 16')),
                ('4', '16', ('link_width_half', 4, 'of 16')),
                ('16', '16', None), ('0', '16', None), ('255', '16', None),
                # the slot has no more
                ('8', '8', None)):
            self.kernel.set_fault(
                A, attributes={'current_link_width': now},
                port={'max_link_width': most})
            self.assertEqual([found] if found else [], self.new())

    def test_speed(self):
        for now, found in (
                ('2.5 GT/s PCIe', ('link_speed', 2500, 'of 16000')),
                ('16.0 GT/s PCIe', None), ('Unknown', None)):
            self.fault(current_link_speed=now)
            self.assertEqual([found] if found else [], self.new())

    def test_power(self):
        self.fault(power_state='error')
        self.assertEqual([signals.Reading('power')], self.new())
        self.fault(power_state='unknown')
        self.assertEqual([], self.new())

    def test_old_kernel(self):
        """Attributes that it does not have, and others that cannot be read."""
        names = (*tree._ERROR_NAMES, 'current_link_width', 'power_state',
                 'max_link_speed')
        self.kernel.set_fault(
            A, attributes={**dict.fromkeys(names, 'missing'),
                           'current_link_speed': 'EIO'},
            port=dict.fromkeys(names, 'missing'))
        self.assertEqual([], self.read())

    def test_gone(self):
        self.kernel.set_fault(A, vanish=True)
        self.assertRaises(FileNotFoundError, self.read)

    def test_from_files(self):
        """As Linux has it, with a newline at the end of each."""
        directory = self.useFixture(fixtures.TempDir()).path
        found = os.path.join(directory, pci.path(A))
        os.makedirs(found)
        for name, text in (
                ('aer_dev_fatal', tree.errors('aer_dev_fatal', SDES=2)),
                ('current_link_width', '4'), ('max_link_width', '16')):
            with open(os.path.join(found, name), 'w') as file:
                file.write(f'{text}\n')
        self.kernel = kernel.Kernel(directory)
        self.bridges = ()
        self.assertIn(('link_errors', 2, 'SDES'), self.read())
        self.assertIn(('link_width_half', 4, 'of 16'), self.read())


class DriversTest(ReadingsTestCase):

    def read(self, driver, **attributes):
        """What is new once attributes are so."""
        self.driver = driver(self.kernel)
        device = self.driver.discover()[A]
        before = {*self.driver.health(device)}
        self.fault(**attributes)
        return [r for r in contract.readings('x', self.driver.health(device))
                if r not in before]

    def test_dfl(self):
        self.host({'address': A, 'vfs': 1})
        self.assertEqual([
            ('card_errors', 2, 'FME fme_errors'),
            ('card_failed', 1, 'its FME has catastrophic or fatal errors '
                               '(0x4)'),
            ('temperature', 1, 'FME temp1_crit_alarm')], sorted(self.read(
                dfl.DflDriver, fme_errors='0x3', catfatal_errors='0x4',
                temp1_crit_alarm='1')))

    def test_xrt(self):
        self.host(alveos=[{'address': A}])
        self.assertEqual([
            ('card_warns', 1, 'its AXI firewall of level 2 has tripped')],
            self.read(xrt.XrtDriver, detected_level='2'))

    def test_qat(self):
        self.host(qats=[{'address': A, 'vfs': 16}])
        self.assertEqual([
            ('card_errors', 3, 'qat_ras/errors_nonfatal')],
            self.read(qat.QatDriver, errors_nonfatal='3'))

    def nvme(self, **more):
        self.host(nvmes=[{'address': A, **more}])
        conf.CONF.set_override('include_devices', ['address=*'], 'accel')
        self.addCleanup(conf.CONF.clear_override, 'include_devices', 'accel')
        self.driver = nvme.NvmeDriver(self.kernel)
        self.device = self.driver.discover()[A]
        self.well = {*self.driver.health(self.device)}

    def of_log(self, **log):
        self.kernel.set_fault(A, health=log)
        return {r.signal: r.about for r in self.driver.health(self.device)
                if r not in self.well}

    def test_nvme(self):
        self.nvme()
        self.assertEqual({}, self.of_log(warning=0))
        self.assertEqual(
            {'card_failed': 'it is read-only',
             'temperature': 'NVMe critical warning'},
            self.of_log(warning=0b1010))
        for log in ({'warning': 1, 'spare': 5}, {'used': 100}):
            self.assertEqual({'wear'}, {*self.of_log(**log)})

    def test_nvme_of_a_server(self):
        """Of a whole disk in a guest nothing can be seen; of one whose VFs
        guests have all."""
        self.nvme()
        self.kernel.guest_takes(A)
        self.assertEqual({}, self.of_log(warning=8))

    def test_nvme_with_vfs(self):
        self.nvme(total_vfs=2, vfs=2)
        self.kernel.guest_takes(f'{A[:-1]}1')
        self.assertEqual({'card_failed'}, {*self.of_log(warning=8)})


@ddt.ddt
class ContractTest(testtools.TestCase):

    @ddt.data([1], ['power'], [('power', 1, '')],
              [signals.Reading('heat')], [signals.Reading('power', '1')],
              [signals.Reading('power', 1, b'x')],
              [signals.Reading('power', 1, '\ud800')],
              [signals.Reading('power')] * 257)
    def test_nonsense(self, found):
        error = self.assertRaises(exception.DeviceError, contract.readings,
                                  'acme', iter(found))
        self.assertIn('driver acme reads', str(error))

    def test_sound(self):
        found = (signals.Reading('power'),)
        self.assertEqual(found, contract.readings('acme', iter(found)))


@ddt.ddt
class MessagesTest(testtools.TestCase):
    """What the kernel sends, as kobject_uevent writes it."""

    @ddt.data(
        ('add', 'pci', 'pci0000:5d/0000:5d:00.0/0000:5e:00.0', (),
         ('pci', A, '')),
        ('remove', 'net', 'virtual/net/tap0', (), ('net', '', '')),
        ('change', 'pci', 'pci0000:5d/0000:5d:00.0/0000:5e:00.0',
         ('ERROR_EVENT=FAILED_RECOVERY', 'DEVICE_ONLINE=0'),
         ('pci', A, 'ERROR_EVENT=FAILED_RECOVERY')),
        ('change', 'drm', 'pci0000:5d/0000:5d:00.0/0000:5e:00.0/drm/card0',
         ('WEDGED=rebind,bus-reset',),
         ('drm', A, 'WEDGED=rebind,bus-reset')),
        ('change', 'nvme', 'pci0000:5d/0000:5e:00.0/nvme/nvme0',
         ('NVME_AEN=0x010002',), ('nvme', A, 'NVME_AEN=0x010002')),
        # behind Intel's VMD, whose domains have five digits
        ('change', 'nvme', 'pci0000:5d/0000:5d:05.5/pci10000:00/'
         '10000:00:02.0/10000:01:00.0/nvme/nvme2', ('NVME_AEN=0x010002',),
         ('nvme', '10000:01:00.0', 'NVME_AEN=0x010002')),
        ('change', 'drm', 'pci0000:5d/0000:5e:00.0/drm/card0', ('HOTPLUG=1',),
         None),
        ('bind', 'pci', 'pci0000:5d/0000:5e:00.0', (), None))
    @ddt.unpack
    def test_message(self, action, subsystem, place, more, change):
        message = '\0'.join((
            f'{action}@/devices/{place}', f'ACTION={action}',
            f'DEVPATH=/devices/{place}', f'SUBSYSTEM={subsystem}', *more, ''))
        self.assertEqual(change, kernel.change_of(message.encode()))

    def test_damaged(self):
        self.assertIsNone(kernel.change_of(b'\xff\0=\0ACTION'))
