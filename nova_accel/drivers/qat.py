# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Offer the VFs of Intel QuickAssist cards, with their services.

All VFs of a physical function have the same services. From generation 4 on,
they are set by the attribute qat/cfg_services of a PF that is down. Sources:
Documentation/ABI/testing/sysfs-driver-qat of Linux, drivers/crypto/intel/qat,
and vfio_pci.c for the functions that VFIO refuses.
"""

import dataclasses
import errno
import re
import time

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF

OPTION = '[accel] qat_services'
#: seconds until a silent card is read again: longer than the timer of any card.
#: A read by another process in that time could make the card look dead
HEARTBEAT_SECONDS = 0.6


_NO_VFS = (f'it has no VFs, and is not given to a guest whole: create VFs by '
           f'{sriov.OPTION}')


@dataclasses.dataclass(frozen=True)
class _Product:
    name: str
    family: str
    #: the PF's driver in the kernel
    driver: str


#: device id of the PF
_PRODUCTS = {
    '0434': _Product('DH89XXCC', 'GEN1', 'dh895xcc'),
    '0435': _Product('DH895XCC', 'GEN2', 'dh895xcc'),
    '37c8': _Product('C62X', 'GEN2', 'c6xx'),
    '19e2': _Product('C3XXX', 'GEN2', 'c3xxx'),
    '6f54': _Product('D15XX', 'GEN2', 'd15xx'),
    '18a0': _Product('C4XXX', 'GEN3', 'c4xxx'),
    '4940': _Product('4XXX', 'GEN4', '4xxx'),
    '4942': _Product('401XX', 'GEN4', '4xxx'),
    '4944': _Product('402XX', 'GEN4', '4xxx'),
    '4946': _Product('420XX', 'GEN4', '420xx'),
    '4948': _Product('6XXX', 'GEN6', '6xxx'),
}
#: driver -> Linux release that added it; drivers without an entry are older
#: than libvirt 8.0, or Intel's own. Source: the log of
#: drivers/crypto/intel/qat/Makefile
_SINCE = {'4xxx': '5.11', '420xx': '6.8', '6xxx': '6.16'}


def _trait(service: str) -> str:
    return naming.property_trait('QAT', 'SERVICE', service)


#: traits of the services of adf_cfg_services.c
_TRAITS = frozenset(map(_trait, ('sym', 'asym', 'dc', 'dcc', 'decomp')))


class QatDriver(base.PciDriver):
    """Driver of QAT cards: a device for each PF, whose VFs guests get.

    No directory of sysfs shows that a service changed, a card went down, or a
    heartbeat was lost, and the kernel checks a heartbeat only when it is read.
    Therefore each card is examined every [accel] discovery_interval, which
    reads three attributes of sysfs and one of debugfs. A card that does not
    respond is detected later, because the kernel reports it at the third read.
    """

    CONTRACT = base.CONTRACT
    NAME = 'qat'
    POOLED = True
    POLLED = True
    #: VFIO resets a VF, too, but does not report whether that succeeded
    RESETS = True
    RESET_IS_ALL = True

    # Configuration

    def check(self, device=None):
        """Check a device by its heartbeat; see the base class."""
        if device is not None:
            self.kernel.read_qat_heartbeat(device.address)
        return ()

    def configure(self):
        """Call set_up() for all cards.

        :raises DeviceError: set_up() failed for the cards in the error.
        """
        wanted = wanted_services()
        cards = [address for address in self.names(pci.DEVICES)
                 if self._is_bound_card(address)]
        failed = [
            f'{OPTION} names {address}, which is not a QAT card whose PF has a '
            f'driver of the host: correct the address, or bind the driver.'
            for address in wanted if address not in (None, *cards)]
        for address in cards:
            try:
                self.set_up(address)
            except exception.ConfigurationError:
                raise
            except exception.AcceleratorError as e:
                failed.append(str(e))
        if failed:
            raise exception.DeviceError(' '.join(failed))

    def set_up(self, address):
        """Set the services of a card, and then create its VFs. A card with VFs
        refuses a change of services.

        :raises DeviceError: the services were refused, and no VFs are created.
            Or the VFs were refused.
        """
        if not self._is_bound_card(address):
            return
        wanted = wanted_services()
        services = wanted.get(address, wanted.get(None))
        if services:
            self._set_services(address, services, named=address in wanted)
        self._make_vfs(address)

    def _is_bound_card(self, address) -> bool:
        try:
            return bool(
                not pci.physical_function(self.kernel, address)
                and self.identify(address)
                and pci.driver(self.kernel, address) not in (None, base.VFIO))
        except (OSError, ValueError):
            return False

    def _set_services(self, address, wanted, named):
        what = f'{OPTION} requests {wanted} on {address}'
        try:
            before = self.kernel.read(pci.path(address, 'qat/cfg_services'))
            state = self.kernel.read(pci.path(address, 'qat/state'))
            vfs = pci.virtual_functions(self.kernel, address)
        except FileNotFoundError:
            if not named:
                return
            raise exception.DeviceError(
                f'{what}, whose services cannot be set (it has no '
                f'qat/cfg_services, which cards from generation 4 on have '
                f'since Linux 6.0): leave it out of the option.') from None
        except OSError as e:
            raise exception.DeviceError(
                f'{what}, and what it has now cannot be read ({e}): read '
                f'dmesg.') from e
        same = sorted(before.split(';')) == sorted(wanted.split(';'))
        if same and state == 'up':
            return
        if vfs:
            # going down would remove the VFs, also those in use
            raise exception.DeviceError(
                f'{what}, and it does {before} and has VFs, which may be in '
                f'use: write 0 to its sriov_numvfs when no server has one, '
                f'and nova-compute sets them.')
        try:
            if state != 'down':
                self._write(address, 'state', 'down')
            if not same:
                self._write(address, 'cfg_services', wanted)
            self._write(address, 'state', 'up')
        except OSError as e:
            result = (f'keeps {before}' if self._restore(address, before)
                      else 'is down now')
            reason, remedy = (
                ('the host itself is using it',
                 'end that; nova-compute tries again')
                if e.errno == errno.EBUSY else
                (e.strerror, 'choose services that this card can do together, '
                             'and read dmesg'))
            raise exception.DeviceError(
                f'{what}, and the kernel refused ({reason}); it '
                f'{result}: {remedy}.') from e

    def _restore(self, address, services) -> bool:
        """Restore the services of a card. Return whether the card is up."""
        try:
            if self.kernel.read(pci.path(address, 'qat/state')) != 'up':
                self._write(address, 'cfg_services', services)
                self._write(address, 'state', 'up')
            return True
        except OSError:
            return False

    def _write(self, address, attribute, value):
        self.kernel.write_attribute(address, f'qat/{attribute}', value)

    def _make_vfs(self, address):
        count = sriov.missing(self.kernel, address)
        if not count:
            return
        total = int(self.kernel.read(pci.path(address, 'sriov_totalvfs')))
        if count != total:
            # the kernel creates all VFs, whatever number is written
            raise exception.ConfigurationError(
                f'{sriov.OPTION} requests {count} VFs of {address}, and a QAT '
                f'card has all of its {total} or none: write {total}, and '
                f'exclude VFs by [accel] exclude_devices.')
        sriov.make(self.kernel, address)

    # Discovery

    def identify(self, address):
        ids = pci.ids(self.kernel, address)
        product = _PRODUCTS.get(ids[1]) if ids[0] == '8086' else None
        return product and model.Device(
            address=address, type='QAT', vendor='INTEL', product=product.name,
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME,
            family=product.family, state_traits=tuple(sorted(_TRAITS)))

    def look(self, device, before):
        product = _PRODUCTS[device.product_id]
        bound = pci.driver(self.kernel, device.address)
        if bound in (None, base.VFIO):
            since = _SINCE.get(product.driver)
            raise base.Defect(
                f'it is bound to {bound or "no driver"}, and only its VFs are '
                f'given to guests: bind it to {product.driver}'
                + f' (Linux {since} or later)' * bool(since))
        device = self._with_services(device, before)
        vfs = pci.virtual_functions(self.kernel, device.address)
        obstacles = {vf: pci.obstacle(self.kernel, vf) for vf in vfs}
        device = dataclasses.replace(device, handles=tuple(
            model.AttachHandle(model.HandleType.PCI, vf, parent=device.address)
            for vf in vfs if not obstacles[vf]))
        reason = (sriov.NONE if not vfs and device.address in sriov.wanted()
                  else self._defect(device, before))
        if not reason and not device.handles:
            reason = obstacles[vfs[0]] if vfs else _NO_VFS
        if reason:
            device = dataclasses.replace(
                device, health=model.Health.QUARANTINED, reason=reason,
                is_not_offered=reason == _NO_VFS)
        return device

    def _with_services(self, device, before):
        """Return the device with traits of its services, or unchanged if the
        kernel does not show them."""
        text = self.attribute(device.address, 'qat/cfg_services')
        if text is None:
            return device
        if not re.fullmatch('[a-z0-9]+(;[a-z0-9]+)*', text):
            raise base.Defect(f'its qat/cfg_services is {text!r}, which are '
                              f'not services: read dmesg')
        traits = {_trait(service) for service in text.split(';')}
        # including traits of services that only a newer kernel knows
        volatile = {*_TRAITS, *traits,
                    *(before.state_traits if before else ())}
        return dataclasses.replace(device, traits=tuple(sorted(traits)),
                                   state_traits=tuple(sorted(volatile)))

    def _defect(self, device, before) -> str:
        """Return why VFs of the card would not work, as a clause, or ''."""
        state = self.attribute(device.address, 'qat/state')
        if state not in (None, 'up'):
            return (f'it is {state}: write up to its qat/state' if
                    state == 'down' else f'its qat/state is {state!r}, which '
                    f'is neither up nor down: read dmesg')
        # the kernel resets the count to 0 when it restarts the card
        fatal = self.attribute(device.address, 'qat_ras/errors_fatal')
        if fatal not in (None, '0'):
            return (f'it had fatal errors (qat_ras/errors_fatal is {fatal}): '
                    f'reset it when no server has a VF')
        if before and self._is_silent(device.address):
            return ('its heartbeat is lost: reset it when no server has a VF, '
                    'or write on to its qat/auto_reset')
        return ''

    def health(self, device):
        """Read the bus and the error counters of the card; see the base class.

        Source: Documentation/ABI/testing/sysfs-driver-qat_ras of Linux. Fatal
        errors and a lost heartbeat are defects, see look().
        """
        yield from super().health(device)
        text = self.attribute(device.address, 'qat_ras/errors_nonfatal')
        if text is not None:
            yield signals.Reading(
                'card_errors', int(text), 'qat_ras/errors_nonfatal')

    def _is_silent(self, address) -> bool:
        """Return whether the driver of the card reports that the card does not
        respond.

        Only nova-compute calls this method, for cards that it found before,
        because nova-accel discover lacks the privileges.
        """
        try:
            if self.kernel.read_qat_heartbeat(address) == 0:
                return False
            time.sleep(HEARTBEAT_SECONDS)
            return self.kernel.read_qat_heartbeat(address) == -1
        except Exception:
            # debugfs is hidden, or the privileged process is not configured
            return False


def wanted_services() -> dict[str | None, str]:
    """Return address of a PF -> services. The key None stands for PFs without
    an entry.

    :raises ConfigurationError: the option cannot be read.
    """
    result = {}
    for item in CONF.accel.qat_services:
        address, equals, services = item.rpartition('=')
        services = services.strip()
        if not re.fullmatch('[a-z]+(;[a-z]+){0,3}', services):
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, which is neither services like '
                f'sym;asym nor <PCI address>=<services>: correct it.')
        key = None
        if equals:
            key, = pci.addresses(OPTION, [address])
        if key in result:
            raise exception.ConfigurationError(
                f'{OPTION} has services {"for " + key if key else "for all"} '
                f'twice: remove one of them.')
        result[key] = services
    return result
