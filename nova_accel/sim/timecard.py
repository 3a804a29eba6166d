# Licensed under the Apache License, Version 2.0. See LICENSE.
"""PTP hardware clocks: OCP time cards under ptp_ocp, and other clocks.

Attributes and their texts are those of drivers/ptp/ptp_ocp.c and ptp_sysfs.c
of Linux 7.2. The settings after a reset (SETTINGS) are an assumption. A real
card changes some attributes itself, such as the offset; here the fault
"attributes" sets them.
"""

import dataclasses
import errno
from typing import ClassVar

from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: product -> vendor and device
PRODUCTS = {
    'META': ('1d9b', '0400'),
    'CELESTICA': ('18d4', '1008'),
    'ADVA': ('ad5a', '0400'),
    # reports neither its receiver nor its offset
    'OROLIA': ('1ad7', 'a000'),
}


@dataclasses.dataclass(frozen=True)
class ClockCard(card.Card):
    """A function with a PTP clock, like that of a network card."""

    clock_name: str = 'ptp'
    #: name of its network interface
    net: str | None = None

    KEYS: ClassVar[dict] = {'clock_name': reader.text, 'net': reader.text}

    def add_physical(self, tree, mine, function):
        if mine['driver'] != self.driver or self.driver is None:
            return
        self.add_class(tree, function, 'ptp', f'ptp{mine["number"]}', {
            'clock_name': self.clock_name, 'max_adjustment': '500000000',
            'n_alarms': '0', 'n_external_timestamps': '0',
            'n_periodic_outputs': '0', 'n_programmable_pins': '0',
            'pps_available': '1'})
        if self.net:
            self.add_class(tree, function, 'net', self.net, {
                'address': '52:54:00:12:34:56'})

    def add_class(self, tree, function, kind, name, attributes):
        """Add a device of class ``kind`` to /sys/class and to its function."""
        place = self.place()
        function.setdefault(kind, {})[name] = {
            **attributes, 'device': sysfs.Link(place)}
        tree['class'].setdefault(kind, {})[name] = sysfs.Link(
            f'{place}/{kind}/{name}')


@dataclasses.dataclass(frozen=True)
class TimeCard(ClockCard):
    """An OCP time card."""

    class_code: str = '0x058000'
    driver: str | None = 'ptp_ocp'
    clock_name: str = 'ptp_ocp'
    serial: str = '00:00:00:00:00:00'
    gnss: str | None = 'SYNC'
    source: str = 'PPS'
    offset: int | None = 0
    #: firmware version that devlink shows
    firmware: str = '32771'
    #: number of interrupts that the kernel has assigned
    interrupts: int = 17

    KEYS: ClassVar[dict] = {
        'serial': reader.text, 'source': reader.text,
        'firmware': reader.text, 'interrupts': int}
    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        #: errno of writing an attribute
        'write': reader.one_of('EINVAL', 'EOPNOTSUPP', 'EIO'),
    }
    #: the settings after a reset, except the source
    SETTINGS: ClassVar[dict] = {
        'tod_correction': '0', **{f'freq{n}/seconds': '0' for n in range(1, 5)},
        # period, duty, phase, polarity, start
        **{f'gen{n}/signal': '0 0 0 0 1970-01-01T00:00:00 TAI'
           for n in range(1, 5)},
        'utc_tai_offset': '37', 'ts_window_adjust': '0', 'irig_b_mode': '0',
        'sma1': 'IN: 10Mhz', 'sma2': 'IN: PPS1', 'sma3': 'OUT: 10Mhz',
        'sma4': 'OUT: PHC'}

    @classmethod
    def describe(cls, item):
        product = item.take('product', reader.one_of(*PRODUCTS), 'META')
        vendor, device = PRODUCTS[product]
        return dict(
            cls.describe_any(item), ids=(vendor, device, vendor, '0000'),
            **(dict(gnss=None, offset=None) if product == 'OROLIA'
               else cls.taken(item, {'gnss': reader.text, 'offset': int})))

    def fresh(self, state):
        return {**super().fresh(state), 'serial': self.serial,
                'firmware': self.firmware,
                'settings': {**self.SETTINGS, 'clock_source': self.source}}

    def keeps(self):
        return (*super().keeps(), 'serial', 'firmware', 'settings')

    def reset(self, mine, vf):
        super().reset(mine, vf)
        mine['settings'] = {**self.SETTINGS, 'clock_source': 'NONE'}

    def add_physical(self, tree, mine, function):
        super().add_physical(tree, mine, function)
        if mine['driver'] != self.driver:
            return
        ptp = f'ptp{mine["number"]}'
        attributes: sysfs.Directory = {
            'serialnum': mine['serial'],
            'available_clock_sources':
                'NONE TOD IRIG PPS PTP RTC DCF REGS EXT',
            'ptp': sysfs.Link(f'{self.place()}/ptp/{ptp}')}
        for path, text in mine['settings'].items():
            group, _, name = path.rpartition('/')
            (attributes.setdefault(group, {}) if group else attributes)[
                name] = text
        if self.gnss is not None:
            attributes.update(
                gnss_sync=self.gnss, clock_status_offset=str(self.offset),
                clock_status_drift='0')
        self.add_class(tree, function, 'timecard', f'ocp{mine["number"]}',
                       attributes)
        function['msi_irqs'] = {
            str(24 + n): 'msi' for n in range(self.interrupts)}


class TimecardOperations(card.Operations):
    """Operations of a simulated kernel on time cards."""

    def write_timecard(self, function, attribute, value):
        with self._update() as (host, state):
            found, mine, _ = self._owner(host, state, function)
            if not isinstance(found, TimeCard) or (
                    mine['driver'] != found.driver):
                raise sysfs.error(errno.ENODEV, function)
            refused = found.faulty(mine).get('write')
            if refused or attribute not in mine['settings']:
                raise sysfs.error(getattr(errno, refused or 'ENOENT'),
                                  attribute)
            if (attribute.startswith('gen')
                    and found.interrupts <= 10 + int(attribute[3])):
                # signal_out[] of ptp_ocp.c is empty there, and the kernel kills
                # the thread that writes
                raise RuntimeError('Oops: ptp_ocp_signal_enable')
            # signal_store() in ptp_ocp.c accepts up to four numbers
            mine['settings'][attribute] = (
                TimeCard.SETTINGS[attribute] if attribute.startswith('gen')
                and value == '0' else value)

    def read_firmware(self, function):
        found, mine, _ = self._owner(*self._look(), function)
        if not isinstance(found, TimeCard):
            return {'fw.version': found.firmware} if found.firmware else {}
        return ({'fw': mine['firmware']} if mine['driver'] == found.driver
                else {})
