# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find the cards of claims, and the devices that operators name.

A claim remembers the serial number of its device and the path of ports to it
(host.pci.ports), because PCI addresses may change: a boot may number the buses
differently, for example after a card was added, and people exchange cards.

========================== ================= ===============================
At the claim's address     At others         Result
========================== ================= ===============================
the card of the claim      (not compared)    HERE
another card, an unknown   the card, once    MOVED
one, or none
another card               none, or several  EXCHANGED
a card without comparable  none, or several  EXCHANGED if the product is
serial number or ports                       another one, otherwise HERE:
                                             nothing else can be compared
no card                    none, or several  HERE
========================== ================= ===============================

A card is found by its serial number if the claim has one and exactly one
device reports it, otherwise by its ports and product (model.CardKey). Products
are compared by the ids of vendor and device, and by the ids of the subsystem
if both are known. If a claim is MOVED, attach.following moves it to the
present address of its card.

The same table applies to a row of a disabled device (values.Disabled). If the
result is EXCHANGED, every device with the serial number is disabled. A device
whose serial number a server can change is disabled by its address as well
(model.Device.is_of). Pure: no I/O, no state.
"""

from collections.abc import Collection, Iterable, Mapping
import enum

from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from nova_accel.store import values


class Where(enum.Enum):
    HERE = 'here'
    #: its card is at another address
    MOVED = 'moved'
    #: its card is not found, and another card is at its address
    EXCHANGED = 'exchanged'


def serial_for_claim(address: str, devices: Mapping[str, model.Device],
                     gone: Collection[str]) -> str:
    """Return the serial number of a device, or '' if it is unknown or another
    device of this host has the same number."""
    serial = devices[address].serial
    return '' if _others(address, serial, devices, gone) else serial


def whereabouts(claim: model.Claim | values.Disabled,
                devices: Mapping[str, model.Device],
                gone: Collection[str] = (),
                ) -> tuple[Where, model.Device | None]:
    """Find the card of a claim.

    :param claim: a claim, or a row of a disabled device.
    :param gone: addresses of absent devices.
    :returns: the place and the device there. The device is the other card if
        the place is EXCHANGED, and None if the place is HERE and no device is
        known at the address.
    """
    here = devices.get(claim.device_address)
    present = None if claim.device_address in gone else here
    key = claim.card
    for is_known, is_it in (
            (key.serial, lambda device: device.serial == key.serial),
            (key.ports, lambda device: device.ports == key.ports
             and key.identifies(device.card))):
        if not is_known:
            continue
        if present and is_it(present):
            return Where.HERE, here
        found = [device for device in devices.values() if is_it(device)
                 and device.address != claim.device_address
                 and device.address not in gone]
        if len(found) == 1:
            return Where.MOVED, found[0]
    if present is None or key.means(present.card):
        return Where.HERE, here
    return Where.EXCHANGED, present


def is_other_card(before: model.Device, now: model.Device) -> bool:
    """Return whether a different card occupies an address than before."""
    return not before.card.means(now.card._replace(address=before.address))


def _others(address, serial, devices, gone):
    return [d for d in devices.values()
            if serial and d.serial == serial and d.address != address
            and d.address not in gone]


def disabled(devices: Mapping[str, model.Device],
             rows: Iterable[values.Disabled], gone: Collection[str] = (),
             ) -> dict[str, tuple[values.Disabled, ...]]:
    """Find the devices that the operator has disabled.

    :param rows: rows of the store.
    :returns: present address -> the rows about the device.
    """
    found: dict[str, tuple[values.Disabled, ...]] = {}
    for row in rows:
        where, device = whereabouts(row, devices, gone)
        there = [device] if device and where is not Where.EXCHANGED else (
            _others(row.device_address, row.serial, devices, gone))
        here = devices.get(row.device_address)
        if here and here.is_of(row.card):
            # a server may have disguised it as another card
            there.append(here)
        for address in {device.address for device in there}:
            found[address] = (*found.get(address, ()), row)
    return found


def trouble(claim: model.Claim, where: Where, device: model.Device | None,
            stays: str = '') -> str:
    """Return why a server cannot use the device at the address of its claim.

    :param where: where the card of the claim is, from whereabouts().
    :param device: the device there, from whereabouts().
    :param stays: why the claim stays at its address although its card is at
        another (attach.following), a clause; '' if it will follow.
    :returns: the last part of a sentence, or '' if the server can use it.
    """
    if where is Where.MOVED:
        assert device
        return (f'its card ({_known_by(claim)}) is at {device.address} now, '
                f'and {stays or "the claim has not followed it yet"}')
    if where is Where.EXCHANGED:
        assert device
        return (f'another card is there ({_compared(claim, device)}): put '
                f'the first one back, or shelve or delete the server')
    return ''


def _known_by(claim: model.Claim) -> str:
    return (f'serial number {claim.serial[:20]}' if claim.serial
            else f'product {claim.ids} behind {claim.ports}' if claim.ports
            else f'product {claim.ids}')


def _compared(claim: model.Claim, device: model.Device) -> str:
    if device.serial and claim.serial:
        return (f'serial number {device.serial[:20]} in place of '
                f'{claim.serial[:20]}')
    if model.are_other_products(claim.ids, device.ids):
        return f'product {device.ids} in place of {claim.ids}'
    return f'behind {device.ports} in place of {claim.ports}'


def places(claims: Iterable[model.Claim],
           devices: Mapping[str, model.Device], gone: Collection[str] = (),
           ) -> dict[str, tuple[Where, model.Device]]:
    """Find the claims whose cards are MOVED or EXCHANGED.

    :returns: uuid of a claim -> the result of whereabouts() for the claim.
    """
    found: dict[str, tuple[Where, model.Device]] = {}
    for claim in claims:
        where, device = whereabouts(claim, devices, gone)
        if where is not Where.HERE:
            assert device
            found[claim.uuid] = where, device
    return found


def misplaced(claims: Iterable[model.Claim],
              moved: Mapping[str, tuple[Where, model.Device]],
              ) -> dict[str, str]:
    """Find the devices that are withheld because of claims on cards that are
    MOVED or EXCHANGED: the devices at the addresses of the claims, and at the
    present addresses of their cards.

    :param moved: the result of places() for the claims.
    :returns: address -> the reason, a clause.
    """
    found = {}
    for claim in claims:
        if claim.uuid not in moved:
            continue
        where, device = moved[claim.uuid]
        card = f'a server had another card there ({_known_by(claim)})'
        if where is Where.MOVED:
            found[claim.device_address] = (
                f'{card}, which is at {device.address} now')
            found.setdefault(device.address, (
                f'a server had it at {claim.device_address}, and its data may '
                f'be on it: the log of nova-compute says why the server has '
                f'not got it here'))
        else:
            found[claim.device_address] = (
                f'{card}: put that one back, or shelve or delete the server')
    return found


# Names of devices that operators use


def named(name: str, devices: Mapping[str, model.Device]) -> str:
    """Return the address of the device that an operator means.

    :param name: address, serial number, or name of the resource provider.
    :raises DeviceUnavailable: the name denotes no device, several, or a part
        of one.
    """
    # the name of a provider begins with the name of its node
    part = pci.from_lspci(name.rpartition('_accel_')[2])
    if part in devices:
        return part
    with_serial = [a for a, d in devices.items() if d.serial == name and name]
    if len(with_serial) == 1:
        return with_serial[0]
    if with_serial:
        raise exception.DeviceUnavailable(
            f'{len(with_serial)} devices have the serial number {name}: name '
            f'one of them by its address, {", ".join(sorted(with_serial))}.')
    whole = next((
        address for address, device in devices.items()
        if part in _regions(device)
        or any(part == handle.address for handle in device.all_handles)), None)
    if whole:
        raise exception.DeviceUnavailable(
            f'{name} is a part of the device {whole}, and only whole devices '
            f'can be named here: name {whole}.')
    what = ('is a pool of devices' if naming.is_pool(part)
            else 'is not a device that nova-compute knows on this host')
    raise exception.DeviceUnavailable(
        f'{name} {what}: name one of '
        f'{", ".join(sorted(devices)) or "none, as it has found none"}.')


def named_part(name: str, devices: Mapping[str, model.Device]) -> str:
    """Convert an operator's name of a device or region into a name for part().

    :param name: a name that named() accepts, or the name of the provider of a
        region.
    :raises DeviceUnavailable: as in named().
    """
    short = pci.from_lspci(name.rpartition('_accel_')[2])
    return (short if any(short in _regions(d) for d in devices.values())
            else named(name, devices))


def part(name: str, devices: Mapping[str, model.Device],
         ) -> tuple[model.Device, model.Region | None]:
    """Return the device, and the region if any, that a name denotes.

    :param name: the address of a device (0000:5e:00.0), with the region if any
        (0000:5e:00.0_region1).
    :raises DeviceUnavailable: the host does not have the device or region.
    """
    for device in devices.values():
        if name == device.address:
            return device, None
        if name in _regions(device):
            return device, _regions(device)[name]
    raise exception.DeviceUnavailable(
        f'{name} is not a device of this host, nor a region of one: name one '
        f'that nova-accel discover shows.')


def _regions(device: model.Device) -> dict[str, model.Region]:
    return {f'{device.address}_{r.name}': r for r in device.regions}
