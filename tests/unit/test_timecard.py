# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The driver of time cards on simulated hosts."""

import dataclasses
import json
import time

import ddt
import fixtures

from nova_accel.drivers import base
from nova_accel.drivers import timecard
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from nova_accel import sim
from tests.unit import configured
from tests.unit.host import SimulatedHost

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
A, B = '0000:02:00.0', '0000:04:00.0'
SERIAL = 'SERIAL_3C_6D_89_00_12_FE'
CARD = {'address': A, 'serial': '3c:6d:89:00:12:fe', 'offset': -42}
#: a clock of its own, and one of a network card
CLOCK = {'address': B, 'vendor': '10ee', 'device': '9038',
         'class': '0x058000', 'driver': 'ptp_acme'}
NETWORK = {**CLOCK, 'class': '0x020000', 'net': 'eth0', 'driver': 'ice'}
LOST = 'LOST @ 2026-11-21T04:12:09'


def traits(*names):
    return {naming.property_trait('TIMECARD', name) for name in names}


class TestCase(configured.TestCase):

    def start(self, *cards, ptp_devices=(), **kinds):
        self.config.config(group='accel', ptp_devices=list(ptp_devices))
        self.host = self.useFixture(SimulatedHost(
            timecards=list(cards), **kinds))
        self.kernel = self.host.kernel
        self.driver = timecard.TimecardDriver(self.kernel)
        self.driver.configure()
        return self.driver.discover()

    def device(self, known=None):
        """The only one there is."""
        device, = self.driver.discover(known).values()
        self.assertLess(len(device.reason), 256)
        return device

    def state(self, **attributes):
        self.kernel.set_fault(A, attributes=attributes)

    def assertTraits(self, device, *names):
        self.assertEqual(traits(*names), {*device.traits})

    def assertQuarantined(self, device, *words):
        self.assertEqual(QUARANTINED, device.health)
        for word in words:
            self.assertIn(word, device.reason)


@ddt.ddt
class Discovery(TestCase):

    def test_card(self):
        device = self.start({**CARD, 'numa_node': 1})[A]
        self.assertEqual(
            ('TIMECARD', 'META', 'TIMECARD', '1d9b', '0400', 'timecard', 1,
             OK, [A]),
            (device.type, device.vendor, device.product, device.vendor_id,
             device.product_id, device.driver, device.numa_node,
             device.health, [h.address for h in device.handles]))
        self.assertTraits(device, SERIAL, 'GNSS_SYNC', 'SOURCE_PPS',
                          'OFFSET_WITHIN_100NS', 'OFFSET_WITHIN_1US',
                          'OFFSET_WITHIN_10US')
        self.assertEqual({'CUSTOM_TIMECARD_META',
                          'CUSTOM_TIMECARD_META_TIMECARD', 'OWNER_CYBORG',
                          *device.traits}, naming.device_traits(device))

    @ddt.data(('META', 'META', 'TIMECARD'), ('ADVA', 'ADVA', 'TIMECARD'),
              ('CELESTICA', 'CELESTICA', 'TIMECARD'),
              ('OROLIA', 'OROLIA', 'ARTCARD'))
    @ddt.unpack
    def test_products(self, simulated, vendor, product):
        device = self.start({'address': A, 'product': simulated})[A]
        self.assertEqual((vendor, product, OK),
                         (device.vendor, device.product, device.health))

    def test_card_that_tells_less(self):
        self.start({'address': A, 'product': 'OROLIA', 'source': 'EXT'})
        self.assertTraits(self.device(), 'SOURCE_EXT')

    @ddt.data((0, 3), (100, 3), (-100, 3), (101, 2), (-1000, 2), (1001, 1),
              (10000, 1), (10001, 0), (-2147483647, 0))
    @ddt.unpack
    def test_accuracy(self, offset, bands):
        self.start({**CARD, 'offset': offset})
        self.assertTraits(self.device(), SERIAL, 'GNSS_SYNC', 'SOURCE_PPS', *(
            'OFFSET_WITHIN_10US', 'OFFSET_WITHIN_1US',
            'OFFSET_WITHIN_100NS')[:bands])

    @ddt.data('NONE', '(null)', 'missing')
    def test_no_source_no_accuracy(self, source):
        self.start(CARD)
        self.state(clock_source=source)
        self.assertTraits(self.device(), SERIAL, 'GNSS_SYNC')

    def test_lost_sync(self):
        device = self.start(CARD)[A]
        self.state(gnss_sync=LOST, clock_source='RTC')
        after = self.device({A: device})
        self.assertTraits(after, SERIAL, 'SOURCE_RTC', 'OFFSET_WITHIN_100NS',
                          'OFFSET_WITHIN_1US', 'OFFSET_WITHIN_10US')
        self.assertLessEqual(traits('GNSS_SYNC', 'SOURCE_PPS'),
                             {*after.state_traits} - {*after.traits})

    def test_numbers_of_ocp_and_ptp_mean_nothing(self):
        before = self.start({**CARD, 'faults': {'renumber': True}})
        names = self.kernel.listdir('class/timecard')
        self.assertEqual(before, self.driver.discover(before))
        self.assertNotEqual(names, self.kernel.listdir('class/timecard'))

    @ddt.data('missing', '00:00:00:00:00:00')
    def test_no_serial(self, serial):
        self.start(CARD)
        self.state(serialnum=serial)
        self.assertNotIn(naming.property_trait('TIMECARD', SERIAL),
                         self.device().traits)

    def test_another_card_in_its_slot(self):
        first = self.start(CARD)[A]
        self.state(serialnum='02:00:00:00:00:01')
        second = self.device({A: first})
        new = naming.property_trait('TIMECARD', 'SERIAL_02_00_00_00_00_01')
        self.assertIn(new, second.traits)
        self.assertNotIn(new, second.state_traits)
        self.assertLessEqual(traits(SERIAL), {*second.state_traits}
                             - {*second.traits})
        # and back again
        self.state()
        third = self.device({A: second})
        self.kernel.guest_takes(A)
        self.assertTraits(self.device({A: third}), SERIAL)

    @ddt.data('serialnum', 'gnss_sync', 'clock_source', 'clock_status_offset')
    def test_attributes_that_make_no_sense(self, name):
        known = self.start(CARD)
        for value, words in (('', name), ('one, two', name),
                             ('EIO', 'cannot be read')):
            self.state(**{name: value})
            device = self.device(known)
            self.assertQuarantined(device, words)
            self.assertEqual([A], [h.address for h in device.handles])
            # what is not known now is taken away
            self.assertEqual((), device.traits)
            self.assertLessEqual(traits('GNSS_SYNC'),
                                 {*device.state_traits})
        self.state()
        self.assertEqual(known, self.driver.discover(known))

    def test_card_that_goes_while_it_is_looked_at(self):
        self.start(CARD)
        read = self.kernel.read

        def vanish(path):
            if path.endswith('gnss_sync'):
                self.kernel.set_fault(A, vanish=True)
            return read(path)
        self.kernel.read = vanish
        self.assertIn(self.device().health, (OK, QUARANTINED))
        self.assertEqual({}, self.driver.discover())

    @ddt.data(None, 'pci-stub')
    def test_driver(self, driver):
        self.start({**CARD, 'driver': driver})
        self.assertQuarantined(self.device(), driver or 'no driver',
                               'bind it to ptp_ocp')

    def test_iommu(self):
        self.start(CARD, iommu=False)
        self.assertQuarantined(self.device(), 'IOMMU')

    def test_fingerprint_follows_clocks_and_state_the_time(self):
        self.config.config(group='accel', discovery_interval=1)
        self.start(CARD)
        first = self.driver.fingerprint()
        self.kernel.rebind(A, 'ptp_ocp')
        self.assertNotEqual(first, self.driver.fingerprint())
        end = time.monotonic() + 120
        state = self.driver.state(A)
        while self.driver.state(A) == state:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)


class Guests(TestCase):

    def test_guest_has_it(self):
        known = self.start(CARD)
        self.kernel.guest_takes(A)
        self.assertEqual([], self.kernel.listdir('class/timecard')
                         if self.kernel.exists('class/timecard') else [])
        device = self.device(known)
        self.assertEqual((OK, [A]), (
            device.health, [h.address for h in device.handles]))
        self.assertTraits(device, SERIAL)
        # those are taken away, what it is stays
        self.assertLessEqual(
            traits('GNSS_SYNC', 'SOURCE_PPS', 'OFFSET_WITHIN_1US'),
            {*device.state_traits})
        # and it stays so, however often one looks
        self.assertEqual(device, self.device({A: device}))
        self.kernel.guest_returns(A)
        self.assertEqual(known, self.driver.discover({A: device}))

    def test_quarantined_before_a_guest_had_it(self):
        self.start(CARD)
        self.state(gnss_sync='?')
        known = self.driver.discover()
        self.kernel.guest_takes(A)
        self.assertEqual(OK, self.device(known).health)

    def test_card_that_the_operator_keeps_for_guests(self):
        self.start({**CARD, 'driver': 'vfio-pci'})
        device = self.device()
        self.assertEqual((OK, [A], ()), (
            device.health, [h.address for h in device.handles],
            device.traits))


@ddt.ddt
class Release(TestCase):
    """What is done with a card between two servers."""

    def start(self, *cards, handover=(), **kinds):
        self.config.config(group='accel', handover=list(handover))
        self.known = super().start(*cards or [CARD], **kinds)[A]
        return self.known

    def use(self, **changes):
        """A guest has had the card, and has changed it."""
        self.kernel.guest_takes(A)
        self.kernel.change_timecard(A, **changes)
        self.kernel.guest_returns(A)

    def release(self):
        return self.driver.release(
            self.known, self.known.handles[0], None, base.Use())

    def refused(self, *said):
        error = str(self.assertRaises(exception.DeviceError, self.release))
        for text in (A, *said):
            self.assertIn(text, error)
        self.assertLessEqual(len(error), 255)

    def test_what_is_known_of_a_card(self):
        record = dict(self.start().record)
        self.assertEqual(('3c:6d:89:00:12:fe', '32771', 'PPS', 'OUT: PHC'), (
            record['serial'], record['firmware fw'],
            record['setting clock_source'], record['setting sma4']))
        self.kernel.guest_takes(A)
        seen = self.device({A: self.known})
        self.assertEqual(self.known.record, seen.record)
        self.assertEqual(seen, model.from_dict(
            model.Device, json.loads(json.dumps(
                dataclasses.asdict(seen), default=lambda e: e.value))))

    def test_reset_and_set_as_before(self):
        self.start()
        self.use(sma1='OUT: GND', utc_tai_offset='0')
        # the reset itself has changed the source
        done = self.release()
        self.assertEqual('reset flr, compared, 1 setting restored', done)
        facts = json.loads(done.shown)
        self.assertEqual({'as before'}, {*facts.values()})
        self.assertIn('serial', facts)
        self.assertNotIn('setting sma1', facts)
        self.assertEqual([[A, None]], self.kernel.resets(A))
        self.assertEqual(self.known, self.device({A: self.known}))

    def test_generators_and_counters(self):
        """Also where a reset leaves them as they were."""
        self.start()
        self.kernel.change_timecard(A, tod_correction='-3')
        self.known = self.device({A: self.known})
        self.use()
        reset = self.kernel.reset_function

        def leaves(function):
            reset(function)
            self.kernel.change_timecard(A, **{
                'gen2/signal': '1000000 50 0 0 2026-11-24T00:00:00 TAI',
                'freq3/seconds': '7', 'tod_correction': '4'})
        self.kernel.reset_function = leaves
        # these and the source
        self.assertIn('compared, 3 settings restored', self.release())
        top = f'bus/pci/devices/{A}/timecard'
        top = f'{top}/{self.kernel.listdir(top)[0]}'
        self.assertEqual(
            ['0', '0', '-3'], [self.kernel.read(f'{top}/{name}').split()[0]
                               for name in ('gen2/signal', 'freq3/seconds',
                                            'tod_correction')])
        self.assertEqual(self.known, self.device({A: self.known}))

    def test_card_with_one_interrupt(self):
        """It has the generators' attributes, and no generator."""
        self.start({**CARD, 'interrupts': 1})
        self.use()
        self.assertIn('reset flr, compared', self.release())

    def test_reset_that_is_none(self):
        """FPGAs keep their state in D3hot."""
        for method, health in (('pm', model.Health.QUARANTINED),
                               ('bus', model.Health.OK),
                               ('flr pm', model.Health.OK)):
            self.start({**CARD, 'reset_method': method})
            self.assertEqual(health, self.device().health)
        self.start({**CARD, 'reset_method': 'pm'},
                   handover=[f'{A}=operator'])
        self.assertEqual(model.Health.OK, self.device().health)

    def test_settings_of_the_operator(self):
        self.start()
        self.kernel.change_timecard(A, sma1='IN: PPS2', irig_b_mode='3')
        self.known = self.device({A: self.known})
        self.use(sma1='IN: 10Mhz')
        self.assertIn('3 settings restored', self.release())
        self.assertEqual(self.known, self.device({A: self.known}))

    def test_of_a_card_that_the_operator_keeps_for_guests(self):
        self.start({**CARD, 'driver': 'vfio-pci'})
        self.use()
        self.assertEqual('reset flr', self.release())

    def test_bound_to_vfio_since(self):
        """By the operator, or by a process that was killed meanwhile."""
        self.start()
        self.kernel.rebind(A, 'vfio-pci')
        self.use(sma1='OUT: GND')
        self.assertIn('compared', self.release())
        self.assertEqual('vfio-pci', pci.driver(self.kernel, A))
        self.kernel.probe(A)
        self.assertEqual(self.known.record, self.device().record)

    @ddt.data(('serial', '02:00:00:00:00:01'), ('firmware', '666'))
    @ddt.unpack
    def test_another_card_than_before(self, name, value):
        self.start()
        self.use(**{name: value})
        for _ in range(2):
            self.refused(name, value, f'{A}=none')
        self.config.config(group='accel', handover=[f'{A}=none'])
        self.assertIsNone(self.release())

    def test_only_reset(self):
        self.start(handover=['reset'])
        self.use()
        self.assertEqual('reset flr, compared, 0 settings restored',
                         self.release())

    @ddt.data('EINVAL', 'EIO')
    def test_card_that_refuses_its_settings(self, fault):
        self.start()
        self.use()
        self.kernel.set_fault(A, write=fault)
        self.refused('clock_source', 'PPS')
        self.kernel.set_fault(A, write=None)
        self.assertIn('1 setting restored', self.release())

    def test_setting_that_is_not_taken(self):
        self.start()
        self.use()
        self.state(sma2='IN: None')
        self.refused('sma2', 'IN: None')

    def test_card_that_its_driver_does_not_show(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.timecard._READY_SECONDS', 0.2))
        self.start()
        self.use()
        # a kernel without the module
        self.kernel.probe = lambda function: None
        self.refused('ptp_ocp shows no card')

    def test_card_that_cannot_be_reset(self):
        self.start({**CARD, 'reset_method': ''})
        self.assertQuarantined(self.device(), 'cannot be reset')

    def test_other_clocks_are_reset(self):
        self.config.config(group='accel', handover=[])
        device = TestCase.start(
            self, clocks=[CLOCK], ptp_devices=[B])[B]
        self.assertEqual((), device.record)
        self.assertEqual('reset flr', self.driver.release(
            device, device.handles[0], None, base.Use()))


class Named(TestCase):

    def test_clocks_are_taken_only_by_name(self):
        self.assertEqual({}, self.start(clocks=[CLOCK]))

    def test_clock_by_name(self):
        device = self.start(clocks=[CLOCK], ptp_devices=[B.upper()])[B]
        self.assertEqual(('TIMECARD', '10ee', '9038', OK, [B], ()), (
            device.type, device.vendor, device.product, device.health,
            [h.address for h in device.handles], device.traits))
        self.assertLessEqual({'CUSTOM_TIMECARD_10EE',
                              'CUSTOM_TIMECARD_10EE_9038'},
                             naming.device_traits(device))
        self.kernel.guest_takes(B)
        self.assertEqual({B: device}, self.driver.discover({B: device}))

    def test_no_clock(self):
        self.start(others=[{'address': B, 'driver': 'ahci'}],
                   ptp_devices=[B])
        self.assertQuarantined(self.device(), 'no PTP clock', 'ahci',
                               'ptp_devices')

    def test_name_that_is_taken_out_again(self):
        known = self.start(clocks=[CLOCK], ptp_devices=[B])
        self.config.config(group='accel', ptp_devices=[])
        self.assertEqual({}, self.driver.discover(known))

    def test_network_card_is_never_taken(self):
        for clock in (NETWORK, {**NETWORK, 'net': None},
                      {**NETWORK, 'class': '0x058000'}):
            error = self.assertRaises(
                exception.ConfigurationError, self.start, clocks=[clock],
                ptp_devices=[B])
            for word in (B, 'network card', 'ptp_devices'):
                self.assertIn(word, str(error))
            self.assertEqual({}, self.driver.discover())
            self.assertEqual({}, self.start(clocks=[clock]))

    def test_address_that_is_none(self):
        error = self.assertRaises(exception.ConfigurationError, self.start,
                                  ptp_devices=['eth0'])
        self.assertIn('eth0', str(error))

    def test_address_where_nothing_is(self):
        self.assertEqual({}, self.start(ptp_devices=[B]))


class Simulation(TestCase):

    def test_links(self):
        self.start(CARD)
        name, = self.kernel.listdir('class/timecard')
        top = f'class/timecard/{name}'
        self.assertEqual('ptp_ocp', self.kernel.read(f'{top}/ptp/clock_name'))
        self.assertEqual('0x0400', self.kernel.read(f'{top}/device/device'))

    def test_description(self):
        host = self.useFixture(SimulatedHost())
        for line in ('product: X', 'offset: far', 'gnss: 1'):
            with open(host.path, 'w') as file:
                file.write(f'timecards:\n  - address: "{A}"\n    {line}\n')
            text = str(self.assertRaises(
                exception.InvalidSimulation, sim.SimulatedKernel, host.path))
            self.assertIn('line 3', text)
