# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Offer clocks that a guest gets whole: OCP time cards, and the devices that
[accel] ptp_devices names.

A time card (driver ptp_ocp) reports its serial number, whether it follows its
GNSS receiver, and its offset from the source. Of any other PTP hardware clock,
sysfs shows only that it exists. While a guest has a card, the host can read
none of these. A guest can write the card's settings, memory and flash. After
the guest the card is reset, its serial number and firmware are compared with
their earlier values, and its settings are restored. Sources:
Documentation/ABI/testing/sysfs-timecard and sysfs-ptp of Linux,
drivers/ptp/ptp_ocp.c.
"""

import contextlib
import dataclasses
import errno
import re

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF

KERNEL_DRIVER = 'ptp_ocp'
OPTION = '[accel] ptp_devices'

#: (vendor, device) -> vendor, product; from ptp_ocp.c of Linux 7.2
_PRODUCTS = {
    ('1d9b', '0400'): ('META', 'TIMECARD'),
    ('18d4', '1008'): ('CELESTICA', 'TIMECARD'),
    ('1ad7', 'a000'): ('OROLIA', 'ARTCARD'),
    ('ad5a', '0400'): ('ADVA', 'TIMECARD'),
    ('ad5a', '0410'): ('ADVA', 'TIMECARD_X1'),
}
#: first byte of the class of network controllers
_NETWORK = 0x02
#: offset in nanoseconds -> the word in the trait
_BANDS = {100: '100NS', 1000: '1US', 10000: '10US'}
#: the settings that are restored after a server, in this order
_SETTINGS = ('utc_tai_offset', 'ts_window_adjust', 'irig_b_mode',
             'tod_correction', *(f'freq{n}/seconds' for n in range(1, 5)),
             'sma1', 'sma2', 'sma3', 'sma4', 'clock_source')
#: signal generators, which are stopped after a server: the driver does not know
#: that a server has started one (ptp_ocp_signal_enable() in ptp_ocp.c of
#: Linux). Attribute -> the interrupt of the card that the generator uses
_GENERATORS = {f'gen{n}/signal': 10 + n for n in range(1, 5)}
#: serial number of a card whose memory was never written
_NO_SERIAL = '00:00:00:00:00:00'
_SETTING, _FIRMWARE = 'setting ', 'firmware '
#: seconds until the host's driver should show a card that was bound
_READY_SECONDS = 20
#: names in ptp_ocp.c; NONE, without a source, is left out
_SOURCES = ('TOD', 'IRIG', 'PPS', 'PTP', 'RTC', 'DCF', 'REGS', 'EXT')


def _trait(*words: str) -> str:
    return naming.property_trait('TIMECARD', *words)


_GNSS = _trait('GNSS_SYNC')
#: all traits of the present state of a clock
_STATES = frozenset((
    _GNSS, *(_trait('OFFSET', 'WITHIN', band) for band in _BANDS.values()),
    *(_trait('SOURCE', source) for source in _SOURCES)))


class TimecardDriver(base.PciDriver):
    """Driver for time cards.

    Four attributes of each card are read every [accel] discovery_interval,
    because no directory of sysfs changes when the card loses its source.
    """

    CONTRACT = base.CONTRACT
    NAME = 'timecard'
    SERVER_CAN_CHANGE_SERIAL = True
    POLLED = True
    RESETS = True

    def check_options(self):
        """See the base class.

        :raises ConfigurationError: [accel] ptp_devices names a network card,
            or an entry is not a PCI address.
        """
        for address in named():
            try:
                network = self._is_network(address)
            except (OSError, ValueError):
                # absent now; found when it appears
                continue
            if network:
                raise exception.ConfigurationError(
                    f'{OPTION} names {address}, which is a network card, whose '
                    f'clock servers cannot get: remove it from the option.')

    # Discovery

    def left_out(self, device):
        """Return the reason if [accel] ptp_devices no longer names the device;
        see the base class."""
        return (f'{OPTION} does not name it' if self.is_there(device)
                and self.identify(device.address) is None else '')

    def fingerprint(self):
        return (*super().fingerprint(), *(self.names(path) for path in (
            'class/timecard', 'class/ptp')))

    def identify(self, address):
        ids = pci.ids(self.kernel, address)
        if ids in _PRODUCTS:
            vendor, product = _PRODUCTS[ids]
        elif address in named() and not self._is_network(address):
            vendor, product = ids
        else:
            return None
        return model.Device(
            address=address, type='TIMECARD', vendor=vendor, product=product,
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME,
            state_traits=tuple(sorted(_STATES)))

    def _is_network(self, address) -> bool:
        return (pci.class_code(self.kernel, address) >> 16 == _NETWORK
                or bool(self._children(address, 'net')))

    def _children(self, address, name) -> tuple[str, ...]:
        """Return the names of the function's child devices of a class.

        The number in a name, as in ocp0, changes whenever a driver is bound.
        """
        return self.names(pci.path(address, name))

    def look(self, device, before):
        address = device.address
        device = dataclasses.replace(
            device, handles=self.function_handles(address))
        bound = pci.driver(self.kernel, address)
        if bound == base.VFIO:
            return _unseen(device, before)
        if (device.vendor_id, device.product_id) not in _PRODUCTS:
            if not self._children(address, 'ptp'):
                raise base.Defect(
                    f'it shows no PTP clock (driver {bound or "none"}): bind '
                    f'it to its driver, or remove it from {OPTION}')
            return device
        cards = self._children(address, 'timecard')
        if bound != KERNEL_DRIVER or len(cards) != 1:
            raise base.Defect(
                f'it is bound to {bound or "no driver"} and shows '
                f'{len(cards) or "no"} time card: bind it to {KERNEL_DRIVER}')
        return dataclasses.replace(
            self._seen(device, pci.path(address, 'timecard', cards[0]),
                       before), record=self._record(address))

    def _seen(self, device, card, before):
        serial = self._serial(card)
        traits = {*serial, *self._gnss(card), *self._clock(card)}
        # traits of the previous card in this slot, or from another kernel, may
        # be outdated
        old = {*before.traits, *before.state_traits} if before else set()
        return dataclasses.replace(
            device, traits=tuple(sorted(traits)), state_traits=tuple(sorted(
                _STATES.union(traits, old).difference(serial))))

    def serial(self, address):
        """Return the serial number of an OCP time card; see the base class."""
        ids = pci.ids(self.kernel, address)
        if ids not in _PRODUCTS:
            return super().serial(address)
        cards = self._children(address, 'timecard')
        if len(cards) != 1:
            return None
        text = self._attribute(
            pci.path(address, 'timecard', cards[0]), 'serialnum')
        return '' if text in (None, _NO_SERIAL) else text

    def _record(self, address) -> tuple[tuple[str, str], ...]:
        """Return the identity and the settings of a card that is bound to
        ptp_ocp."""
        card, = self._children(address, 'timecard')
        top = pci.path(address, 'timecard', card)
        found = {'serial': self._attribute(top, 'serialnum')}
        # without devlink the host cannot read the firmware; if devlink becomes
        # unavailable during a server's life, the card is not accepted
        with contextlib.suppress(OSError):
            for name, version in sorted(
                    self.kernel.read_firmware(address).items()):
                found[f'{_FIRMWARE}{name}'] = version
        for name in _SETTINGS:
            found[f'{_SETTING}{name}'] = self._attribute(top, name)
        return tuple((name, value) for name, value in found.items()
                     if value and value != '(null)')

    def _attribute(self, card, name) -> str | None:
        """Return an attribute of a card, or None if the card or the kernel
        lacks it."""
        try:
            return self.kernel.read(f'{card}/{name}')
        except FileNotFoundError:
            return None

    def _serial(self, card) -> set[str]:
        text = self._attribute(card, 'serialnum')
        if text in (None, _NO_SERIAL):
            return set()
        if not re.fullmatch('[0-9a-f]{2}(:[0-9a-f]{2}){5}', text):
            raise base.Defect(f'its serialnum is {text!r}, which is not a '
                              f'serial number: read dmesg')
        return {_trait('SERIAL', text.replace(':', '_'))}

    def _gnss(self, card) -> set[str]:
        text = self._attribute(card, 'gnss_sync')
        if text == 'SYNC':
            return {_GNSS}
        if text is None or text.startswith('LOST'):
            return set()
        raise base.Defect(f'its gnss_sync is {text!r}, which is neither SYNC '
                          f'nor LOST: read dmesg')

    def _clock(self, card) -> set[str]:
        """Return the traits of a clock's source and of the offset from it."""
        source = self._attribute(card, 'clock_source')
        # the kernel writes (null) for a source without a name
        if source in (None, 'NONE', '(null)'):
            return set()
        if not re.fullmatch('[A-Za-z0-9_]+', source):
            raise base.Defect(f'its clock_source is {source!r}, which is '
                              f'not a name: read dmesg')
        traits = {_trait('SOURCE', source)}
        text = self._attribute(card, 'clock_status_offset')
        if text is not None:
            if not re.fullmatch('-?[0-9]+', text):
                raise base.Defect(
                    f'its clock_status_offset is {text!r}, which is not a '
                    f'number of nanoseconds: read dmesg')
            traits |= {_trait('OFFSET', 'WITHIN', band)
                       for most, band in _BANDS.items()
                       if abs(int(text)) <= most}
        return traits

    def _resettable(self, device):
        """Return the device if it can be reset; see the base class. The reset
        method pm, a change of the power state, does not count, because an FPGA
        survives it."""
        for handle in device.handles:
            if self.is_reset(device, handle) and pci.reset_methods(
                    self.kernel, handle.address) == ('pm',):
                raise base.Defect(
                    f'its only reset is a change of its power state (pm), '
                    f'which an FPGA survives: set {handover.OPTION} to '
                    f'{handle.address}=operator or {handle.address}=none to '
                    f'offer it all the same')
        return super()._resettable(device)

    # What servers get

    def release(self, device, handle, created_type, use):
        """Reset the card, compare it with its record, and restore its
        settings.

        Only values that the host has read before can be compared.

        :raises DeviceError: the card could not be reset, is another card, has
            other firmware than before, or refuses its settings.
        """
        done = super().release(device, handle, created_type, use)
        if done is None or not device.record:
            return done
        address = device.address
        # whether the operator keeps the card bound for guests
        kept = pci.driver(self.kernel, address) == base.VFIO
        try:
            if kept:
                self.kernel.probe(address)
            self._await_card(address)
            now = dict(self._record(address))
            self._compare(address, dict(device.record), now)
            restored = 0
            if handover.policy(device) is handover.Policy.CLEAR:
                restored = self._restore(address, dict(device.record), now)
            if kept:
                self.kernel.rebind(address, base.VFIO)
        except (OSError, ValueError) as error:
            raise exception.DeviceError(
                f'{address} had to be compared and set as before its server, '
                f'and that failed ({error}): see the kernel log; nova-compute '
                f'tries again.') from error
        return base.Cleaned(
            f'{done}, compared, {restored} '
            f'setting{"" if restored == 1 else "s"} restored',
            **{name: 'as before' for name, _ in device.record
               if not name.startswith(_SETTING)})

    def _await_card(self, address):
        if not limited.wait_until(
                lambda: len(self._children(address, 'timecard')) == 1,
                _READY_SECONDS):
            raise OSError(errno.ENODEV, f'{KERNEL_DRIVER} shows no card')

    @staticmethod
    def _compare(address, before, now):
        for name, value in before.items():
            if name.startswith(_SETTING) or now.get(name) == value:
                continue
            raise exception.DeviceError(
                f'{address} came back from its server with {name} '
                f'{now.get(name) or "missing"} in place of {value}: check '
                f'what is in the card; {handover.OPTION} {address}=none '
                f'accepts it.')

    def _restore(self, address, before, now) -> int:
        """Restore changed settings, and stop the generators of signals.

        :returns: number of settings that had changed.
        """
        top = pci.path(address, 'timecard',
                       *self._children(address, 'timecard'))
        others = [(name, before[key]) for name in _SETTINGS
                  if before.get(key := f'{_SETTING}{name}')
                  and now.get(key) != before[key]]
        # a write to the attribute of a generator without an interrupt makes
        # the kernel follow a null pointer: seen on 6.12
        interrupts = len(self.names(pci.path(address, 'msi_irqs')))
        for name, value in (*others, *(
                (name, '0') for name, its in _GENERATORS.items()
                if its < interrupts
                and self._attribute(top, name) is not None)):
            try:
                self.kernel.write_timecard(address, name, value)
            except OSError as error:
                raise OSError(error.errno, f'{name} {value!r}: '
                                           f'{error.strerror}') from error
        after = dict(self._record(address))
        for name in _SETTINGS:
            key = f'{_SETTING}{name}'
            if key in before and after.get(key) != before[key]:
                raise ValueError(f'{name} is {after.get(key)!r} and not '
                                 f'{before[key]!r}')
        return len(others)


def _unseen(device, before):
    """Return a card that the host cannot read, because it is bound to
    vfio-pci: with the identity of the last report, and without traits of its
    state."""
    if before is None:
        return device
    return dataclasses.replace(
        device, record=before.record,
        state_traits=before.state_traits, traits=tuple(
            trait for trait in before.traits
            if trait not in before.state_traits))


def named() -> set[str]:
    """Return the addresses of [accel] ptp_devices.

    :raises ConfigurationError: an entry is not a PCI address.
    """
    return set(pci.addresses(OPTION, CONF.accel.ptp_devices))
