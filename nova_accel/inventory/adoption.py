# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What drivers report is taken over, and of which card it is.

Which card is at an address is found out when it is adopted: _place().

================================  ============================================
what is adopted at an address     what is known of it
================================  ============================================
the card that was there, or one   what was known there
that cannot be distinguished
one from another address, or one  its record, the origins of its contents, and
that returns                      all that the store says of it; not what else
                                  its regions carry
a new one in place of another     nothing, nor what its regions carry
a new one where none was          nothing; its regions carry the operator's
the same, without serial number,  nothing; its regions carry a project's
while a project's content is on
a card that is away
one with the serial number of     the same as of that one, until it is seen
another that is here              whether both are: then each is known by its
                                  address and product
================================  ============================================

While a region is being programmed, or where a change came in between, what a
scan saw of the device is discarded: every look takes a ticket() before it
begins.
"""

from collections.abc import Iterable
import dataclasses

from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.inventory import contents
from nova_accel.inventory import fences
from nova_accel.inventory import identity
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

LOG = logging.getLogger(__name__)


class Adoption(fences.Fences, contents.Contents):

    def adopt(self, device: model.Device, ticket: int) -> bool:
        """Take over what a driver says of a device.

        :returns: False where that does not count: it is older than what is
            known, or an earlier driver has the device.
        """
        address = device.address
        known = self._place(device)
        with self._lock:
            if self._is_stale(address, ticket):
                return False
            before = self._reported.get(address)
            if before and before.driver != device.driver and (
                    before.health is not model.Health.GONE):
                owner, other = sorted(
                    (before.driver, device.driver),
                    key=lambda n: self._order.get(n, len(self._order)))
                self._note_shared(address, owner, other)
                if owner != device.driver:
                    return False
            self._since[address] = ticket
            device = self._with_record(device, before, known)
            if before:
                device = _with_earlier_traits(device, before)
            if before and not identity.is_other_card(before, device):
                device = self._with_past(dataclasses.replace(
                    device, marks=before.marks), before)
            else:
                device = dataclasses.replace(device, marks=())
            if before != device:
                self._reported[address] = device
                self._generation += 1
                self._fence_shared()
            return True

    def _is_stale(self, address, ticket) -> bool:
        return (self._is_programming(address)
                or ticket < self._since.get(address, 0))

    def _with_record(self, device, before, known):
        """Return the device with its record from before, where what the driver
        reads now may be the work of a server."""
        same = before and not identity.is_other_card(before, device)
        if same or not known:
            known = before if same else None
        if (known and known.record != device.record
                and self._may_be_changed(device)
                # the operator takes it as it is
                and handover.policy(device)
                is not handover.Policy.NONE):
            device = dataclasses.replace(device, record=known.record)
        return device

    def record_of(self, serial: str,
                  ) -> tuple[tuple[str, str], ...] | None:
        """Return the record of the device with a serial number, wherever it
        was; None for an unknown one."""
        with self._lock:
            known = self._known(serial, self._at(serial))
            return known.record if known else None

    def _with_past(self, device, before):
        """Return the device as it is kept while a server has a claim on it: a
        region that the server could reprogram may carry what it loaded
        then."""
        were_open = {r.index for r in before.regions if r.guest_can_reprogram}
        if not any(r.index in were_open and not r.guest_can_reprogram
                   for r in device.regions) or not any(
                       c.device_address == device.address
                       for c in self._store.claims()):
            return device
        return dataclasses.replace(device, regions=tuple(
            dataclasses.replace(r, guest_can_reprogram=(
                r.guest_can_reprogram or r.index in were_open))
            for r in device.regions))

    def _may_be_changed(self, device) -> bool:
        """Return whether a server has or had the device, which is not clean
        yet."""
        return any(c.card.means(device.card) for c in self._store.claims()
                   ) or any(row.means(device)
                            for row in self._store.unsettled())

    def _place(self, device: model.Device) -> model.Card | None:
        """Find out which card is at an address, and write it down where it is
        another one than before.

        :returns: what is known of it, where it comes from another address.
        """
        address = device.address
        with self._writing:
            with self._lock:
                before = self._reported.get(address)
                is_other = bool(
                    before and identity.is_other_card(before, device))
                stays = before and device.serial == (
                    before.serial or self._store.serials().get(address, ''))
                same = [] if stays else self._at(device.serial, address)
                known = None if stays else self._known(device.serial, same)
                may_be_moved = (not before and not known
                                and self._may_be_moved(device))
                present = list(filter(self._is_present, same))
            if not (is_other or known or may_be_moved):
                return None
            origins = known.origins if known else {}
            loaded = {region.index: model.Loaded(
                None, None, None, '', model.SOME_PROJECT if may_be_moved
                else _not_the_operators(origins.get(region.index)))
                for region in device.regions}
            try:
                self._store.place(device, not present, loaded)
            except exception.AcceleratorsUnavailable:
                if before and is_other:
                    self._lose(before)
                raise
            with self._lock:
                # what is gone from another address is this card
                for other in same if not present else ():
                    if other in self._reported:
                        self._reported[other] = dataclasses.replace(
                            self._reported[other], serial='')
                self._generation += 1
        self._say_both(device, present)
        return known

    def _lose(self, device: model.Device) -> None:
        """Know that a card is not at its address any more, where it cannot be
        written down which one is."""
        with self._lock:
            self._reported[device.address] = dataclasses.replace(
                device, health=model.Health.GONE,
                reason='another card is in its place, which cannot be written '
                       'down')
            self._generation += 1

    def _at(self, serial: str, but_at: str = '') -> list[str]:
        """Return the addresses of cards with a serial number, also of those
        that do not tell their own now."""
        serials = {**self._store.serials(), **{
            address: device.serial for address, device
            in self._reported.items() if device.serial}}
        return [address for address, other in serials.items()
                if other == serial and address != but_at]

    def _known(self, serial: str, addresses: Iterable[str],
               ) -> model.Card | None:
        """Return what is known of the card with a serial number.

        :param addresses: of _at(), with self._lock.
        """
        for address in addresses:
            there = self._reported.get(address)
            return model.Card(
                serial, there.ids if there else '',
                there.record if there else (),
                {index: loaded.origin for (a, index), loaded
                 in self._store.loaded().items() if a == address})
        return next((card for card in self._store.away()
                     if serial and card.serial == serial), None)

    def _say_both(self, device, present):
        # where this process has looked: a card that was moved is seen at its
        # new place first
        for other in present:
            if other in self._since:
                LOG.error(
                    'Devices %s and %s both say that their serial number is '
                    '%s: nova-compute tells them by their addresses, and does '
                    'not notice if they are exchanged; ask their vendor for '
                    'other firmware', other, device.address, device.serial)

    def _may_be_moved(self, device) -> bool:
        """Return whether a card without serial number may be one from another
        address with what a project has loaded."""
        if device.serial:
            return False
        for (address, _), loaded in self._store.loaded().items():
            # what is gone is noted before what has come is scanned
            there = self._reported.get(address)
            if address != device.address and _is_a_projects(loaded.origin) and (
                    there is None or not self._is_present(address)
                    and not there.serial
                    and not identity.is_other_card(there, device)):
                return True
        return any(any(map(_is_a_projects, card.origins.values()))
                   and not model.are_other_products(card.ids, device.ids)
                   for card in self._store.away())

    def gone(self, address: str, driver: str, ticket: int) -> str:
        """Note that a driver does not find a device any more.

        :returns: the driver that found it as well, and did not get it from
            this one; '' without one.
        """
        with self._lock:
            device = self._reported.get(address)
            if (device is None or device.driver != driver
                    or device.health is model.Health.GONE
                    or self._is_stale(address, ticket)):
                return ''
            LOG.warning('Device %s is not found any more', address)
            self._since[address] = ticket
            self._reported[address] = dataclasses.replace(
                device, health=model.Health.GONE,
                reason='its driver does not find it any more')
            _, other = self._shared.pop(address, ('', ''))
            self._generation += 1
            self._fence_shared()
            return other

    def remove(self, address: str) -> None:
        """Forget a device that is gone, of which nothing is left anywhere.

        :raises IllegalTransition: it is not gone.
        """
        with self._lock:
            device = self._reported.get(address)
            if device is None:
                return
            if device.health is not model.Health.GONE:
                raise exception.IllegalTransition(
                    f'{address} cannot be removed, because it is '
                    f'{device.health.value}.')
            del self._reported[address]
            self._fences.pop(address, None)
            self._generation += 1
        self.save()


def _with_earlier_traits(device, before):
    """Return the device, which knows what was shown at its address before.

    Placement still has that, and who asks for a product or a type of region
    that is not there any more would get the device.
    """
    earlier = {*before.earlier_traits, *naming.identity_traits(before)
               } - naming.identity_traits(device)
    return dataclasses.replace(device, earlier_traits=tuple(sorted(earlier)))


def _is_a_projects(origin: str | None) -> bool:
    return origin not in (model.OPERATOR, None)


def _not_the_operators(origin: str | None) -> str | None:
    """Of a content about which nothing else is known any more."""
    return origin if origin != model.OPERATOR else None
