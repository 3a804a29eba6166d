# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Accept reports of drivers, and determine which card each report is about.

The stored facts about a card (record, marks, holds, contents of regions)
follow the card to another address, and never apply to another card. For
example, a boot numbers an FPGA card 0000:65:00.0 instead of 0000:3b:00.0.
adopt() recognizes the serial number, moves the card's row in the store and the
contents of the regions to the new address, and marks the device at the old
address as gone.

================================  ============================================
Card in the report                Stored facts that apply to it
================================  ============================================
the previous card, or a card that the facts of the address
cannot be distinguished from it
a card from another address, or   the card's own facts. If its ports have
an absent card that returns       changed, its contents are unknown, and keep
                                  their origins
a new card in place of another    none, and its contents are unknown
a new card at an empty address    none, and its contents are the operator's
a new card at an empty address,   none, and its contents are a project's
without serial number, while a
card with a project's contents
is absent
a card with the serial number of  the facts of the other card until both are
another present card              found. Then each card is identified by its
                                  address and product
================================  ============================================

gone() notes that a device is absent. A report is discarded while a region of
the card is being programmed, or if the card has changed since the scan began
(Reports.ticket()).
"""

from collections.abc import Iterable
import dataclasses

from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.inventory import contents as region_contents
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel.inventory import reports as device_reports
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from nova_accel.store import values

LOG = logging.getLogger(__name__)


class Shared:
    """Detect devices and functions that several drivers find.

    =================  ======================================  ===============
    State of a device  Begins with                             Ends with
    =================  ======================================  ===============
    found by two       owner(): a later driver finds it, too   gone()
    drivers
    withheld (SHARED)  check(): another driver has one of its  check()
                       functions
    =================  ======================================  ===============
    """

    def __init__(self, reports: device_reports.Reports,
                 withheld: holds.Withheld, order: Iterable[str]):
        """
        :param order: names of the drivers; an earlier one has precedence.
        """
        self._reports = reports
        self._withheld = withheld
        self._order = {name: number for number, name in enumerate(order)}
        #: address -> the two drivers that find the device
        self._found: dict[str, tuple[str, str]] = {}

    def found_twice(self) -> dict[str, tuple[str, str]]:
        """Return address -> the two drivers that find the device. The first
        one owns the device."""
        with self._reports.lock:
            return dict(self._found)

    def owner(self, address: str, one: str, other: str) -> str:
        """Return which of two drivers that find the same device has
        precedence."""
        owner, loser = sorted((one, other), key=self._rank)
        with self._reports.lock:
            if self._found.get(address) != (owner, loser):
                self._found[address] = owner, loser
                LOG.error('Device %s is found by the drivers %s and %s; the '
                          'first has it', address, owner, loser)
        return owner

    def gone(self, address: str) -> str:
        """Forget a device that its owner does not find any more.

        :returns: the other driver that found the device, or ''.
        """
        with self._reports.lock:
            return self._found.pop(address, ('', ''))[1]

    def _rank(self, driver: str) -> int:
        return self._order.get(driver, len(self._order))

    def check(self) -> None:
        """Withhold each device that uses a function of another driver.

        A function belongs to the driver that finds the function itself as a
        device. Otherwise it belongs to the driver that finds a device in the
        same slot with this function, or else to the first driver that uses it.
        """
        with self._reports.lock:
            present = sorted(
                (device for address, device in self._reports.devices.items()
                 if self._reports.is_present(address)),
                key=lambda device: self._rank(device.driver))
            owners = {d.address: d.driver for d in present}
            for device in present:
                slot = device.address.rpartition('.')[0]
                for function in device.functions():
                    if function.rpartition('.')[0] == slot:
                        owners.setdefault(function, device.driver)
            for device in present:
                self._check(device, owners)

    def _check(self, device: model.Device, owners: dict[str, str]) -> None:
        """Withhold a device if another driver has one of its functions.

        :param owners: PCI function -> its driver. If the device is not
            withheld, its functions are added.
        """
        functions = device.functions()
        others = sorted({owners.get(f, device.driver)
                         for f in functions} - {device.driver})
        if not others:
            owners.update(dict.fromkeys(functions, device.driver))
            self._withheld.lift(device.address, holds.Kind.SHARED)
            return
        both = min(f for f in functions if owners.get(f) == others[0])
        if self._withheld.withhold(device.address, holds.Kind.SHARED,
                                   f'the driver {others[0]} has {both}'):
            LOG.error('Device %s of the driver %s is withheld, because '
                      'the driver %s has %s of it as well: disable '
                      'one of the two, or narrow the rules of '
                      '[accel] pci_devices', device.address,
                      device.driver, others[0], both)


@dataclasses.dataclass(eq=False)
class Adoption:
    _reports: device_reports.Reports
    _contents: region_contents.Contents
    _shared: Shared
    _store: claim_store.ClaimStore

    def adopt(self, device: model.Device, ticket: int) -> bool:
        """Accept the report of a driver about a device.

        :param ticket: Reports.ticket() before the scan.
        :returns: False if the report is discarded, because it is outdated, or
            because the device belongs to a driver with precedence.
        :raises AcceleratorsUnavailable: the card differs from the previous one
            at the address, and the store cannot be written.
        """
        address = device.address
        known = self._place(device)
        with self._reports.lock:
            if self._is_stale(address, ticket):
                return False
            before = self._reports.reported(address)
            if before and before.driver != device.driver and (
                    self._reports.is_present(address)
                    ) and device.driver != self._shared.owner(
                        address, before.driver, device.driver):
                return False
            self._reports.note_scan(address, ticket)
            device = self._with_record(device, before, known)
            notes = self._reports.notes(address)
            now = values.Notes(_earlier_traits(device, before, notes))
            if known:
                now = dataclasses.replace(now, marks=known.marks)
            elif before and not identity.is_other_card(before, device):
                device = self._with_past(device, before)
                now = dataclasses.replace(now, marks=notes.marks)
            twins = self._twins(device, before)
            if (before, notes) != (device, now):
                self._reports.put(device, now)
                self._shared.check()
        for other in twins:
            LOG.error(
                'Devices %s and %s report the same serial number %s: '
                'nova-compute identifies them by their ports and does not '
                'notice an exchange; ask their vendor for other firmware',
                other, address, device.serial)
        return True

    def _twins(self, device: model.Device, before: model.Device | None,
               ) -> list[str]:
        """Return the other present devices with the serial number of a device,
        to log them. The caller holds the lock.

        Return [] if the serial number and the health of the device are as
        before, because the devices were logged then. Two unhealthy devices may
        have the same number, for example the two ports of an NVMe disk.

        :param before: the last report of the device.
        """
        if before and (before.serial, before.health) == (
                device.serial, device.health):
            return []
        # a moved card is found at its new address first, before its old
        # address is scanned
        return [other for other, there in self._reports.devices.items()
                if device.serial and there.serial == device.serial
                and other != device.address
                and self._reports.is_present(other)
                and self._reports.was_scanned(other)
                and model.Health.OK in (device.health, there.health)]

    def gone(self, address: str, driver: str, ticket: int,
             left_out: str = '') -> str:
        """Note that a driver no longer finds a device.

        :param left_out: a clause with the option of nova.conf that excludes
            the device, or '' if the device is gone.
        :returns: another driver that finds the device, or ''.
        """
        with self._reports.lock:
            device = self._reports.reported(address)
            notes = self._reports.notes(address)
            if (device is None or device.driver != driver
                    or notes.gone and (
                        not notes.left_out or notes.gone == left_out)
                    or self._is_stale(address, ticket)):
                return ''
            if left_out:
                LOG.warning('Device %s is not offered any more, because %s',
                            address, left_out)
            else:
                LOG.warning('Device %s is not found any more', address)
            self._reports.note_scan(address, ticket)
            self._reports.set_gone(
                address, left_out or 'its driver does not find it any more',
                bool(left_out))
            other = self._shared.gone(address)
            self._shared.check()
            return other

    def _is_stale(self, address, ticket) -> bool:
        return (self._contents.is_programming(address)
                or self._reports.is_stale(address, ticket))

    def _with_record(self, device, before, known):
        """Return a device with its previous record, if a server may have
        changed the device and the hand-over policy is not "none".

        :param known: the stored facts about a card that has moved or returned,
            or None for other cards.
        """
        if known is None and before and (
                not identity.is_other_card(before, device)):
            known = before
        if (known and known.record != device.record
                and self._may_be_changed(device)
                # the operator accepted the device in its present state
                and handover.policy(device)
                is not handover.Policy.NONE):
            device = dataclasses.replace(device, record=known.record)
        return device

    def record_of(self, key: model.CardKey,
                  ) -> tuple[tuple[str, str], ...] | None:
        """Return the record that is stored at the last address of a card.

        :param key: identifies the card, without an address.
        :returns: () if only a claim knows the card, or None if it is unknown.
        """
        with self._reports.lock:
            known = self._known(key, self._at(key))
        if known:
            return known.record
        # without a report: a guest had the card when nova-compute first found
        # it, and the claim has the serial number
        return () if key.serial and any(
            c.serial == key.serial for c in self._store.claims()) else None

    def _with_past(self, device, before):
        """Return a device with guest_can_reprogram set for each region that
        had it in the last report, if a server has a claim on the device. Its
        guest may have changed the content of such a region."""
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
        """Return whether a server has the device, or has left data in it."""
        return any(c.card.means(device.card) for c in self._store.claims()
                   ) or any(row.means(device)
                            for row in self._store.unsettled())

    def _place(self, device: model.Device) -> values.Card | None:
        """Determine which card is at an address, and store a change.

        :returns: the known facts about a card that comes from another address
            or returns, or None for other cards.
        """
        address = device.address
        with self._reports.writing:
            with self._reports.lock:
                before = self._reports.reported(address)
                is_other = bool(
                    before and identity.is_other_card(before, device))
                stays = self._stays(device, before)
                same = [] if stays else self._at(device.card)
                known = None if stays else self._known(device.card, same)
                may_be_moved = (not before and not known
                                and self._may_be_moved(device))
                # a card with the same ports has left its other address
                present = [other for other in same
                           if self._reports.is_present(other)
                           and not (known and device.ports
                                    and known.key.ports == device.ports)]
            if not (is_other or known or may_be_moved):
                return None
            try:
                self._store.place(device, not present, _carried_along(
                    device, known, may_be_moved))
            except exception.AcceleratorsUnavailable:
                if is_other:
                    self._reports.set_gone(address, (
                        'another card is in its place, which cannot be '
                        'stored'))
                raise
            with self._reports.lock:
                for other in same if not present else ():
                    self._leave(other, address)
                self._reports.changed()
        return known

    def _stays(self, device: model.Device, before: model.Device | None,
               ) -> bool:
        """Return whether the device at an address is the same as before, by
        its serial number and ports."""
        if before is None:
            return False
        known = self._store.keys().get(device.address)
        return device.ports in ('', before.ports) and device.serial == (
            before.serial or (known.serial if known else ''))

    def _leave(self, address: str, now: str) -> None:
        """Mark an address as gone, because its card is at another address now.
        Discard the facts there, which follow the card.

        :param now: the new address of the card.
        """
        there = self._reports.reported(address)
        if there:
            self._reports.put(dataclasses.replace(
                there, serial='', ports='', record=()), dataclasses.replace(
                    self._reports.notes(address), marks=()))
            self._reports.set_gone(address, f'its card is at {now} now')

    def _at(self, card: model.CardKey) -> list[str]:
        """Return the other addresses at which a card was found last, or [] if
        the ports cannot distinguish it from a card that is still present.

        If a device reports no serial number now, its stored number is
        compared.
        """
        keys = dict(self._store.keys())
        for address, device in self._reports.devices.items():
            if device.serial or device.ports:
                stored = keys.get(address)
                keys[address] = device.card._replace(
                    serial=device.serial or (stored.serial if stored else ''))
        found = [address for address, key in keys.items()
                 if address != card.address and key.identifies(card)]
        # if several have its serial number, the ports decide
        at_ports = [address for address in found
                    if card.ports and keys[address].ports == card.ports]
        if not card.serial and (len(at_ports) > 1 or any(
                self._reports.was_scanned(address)
                and self._reports.is_present(address)
                for address in at_ports)):
            # the kernel shows both cards: their ports do not distinguish them
            return []
        return at_ports or found

    def _known(self, card: model.CardKey, addresses: Iterable[str],
               ) -> values.Card | None:
        """Return the stored facts about a card, or None if it is unknown. The
        caller holds the lock.

        :param addresses: the result of _at().
        """
        for address in addresses:
            there = self._reports.reported(address)
            return values.Card(
                there.card if there else self._store.keys()[address],
                there.record if there else (),
                {index: loaded for (a, index), loaded
                 in self._store.loaded().items() if a == address},
                self._reports.notes(address).marks)
        # in the same order as the store: by the serial number, then by the
        # ports
        return min((known for known in self._store.away()
                    if known.key.identifies(card)), default=None,
                   key=lambda known: known.key.serial != card.serial)

    def _may_be_moved(self, device) -> bool:
        """Return whether a card without a serial number may be an absent card
        that carries content of a project."""
        if device.serial:
            return False
        for (address, _), loaded in self._store.loaded().items():
            # absent cards are noted before new ones are scanned
            there = self._reports.reported(address)
            if address != device.address and _is_a_projects(loaded.origin) and (
                    there is None or not self._reports.is_present(address)
                    and not there.serial
                    and not model.are_other_products(there.ids, device.ids)):
                return True
        return any(any(map(_is_a_projects, card.origins.values()))
                   and not model.are_other_products(card.key.ids, device.ids)
                   for card in self._store.away())


def _carried_along(device: model.Device, known: values.Card | None,
                   may_be_moved: bool) -> dict[int, model.Loaded]:
    """Return region index -> content, for a card that is new at its address.

    :param known: the stored facts about the card, or None.
    :param may_be_moved: whether the card may carry content of a project.
    """
    if known and device.ports and known.key.ports == device.ports:
        # a server cannot change the slot of a card
        return dict(known.loaded)
    origins = known.origins if known else {}
    return {region.index: model.Loaded(
        None, None, None, '', model.SOME_PROJECT if may_be_moved
        else _not_the_operators(origins.get(region.index)))
        for region in device.regions}


def _earlier_traits(device: model.Device, before: model.Device | None,
                    notes: values.Notes) -> tuple[str, ...]:
    """Return the traits of earlier devices at an address that the present
    device lacks.

    While Placement has such traits, it gives the device to requests for the
    earlier product or type of region.
    """
    if before is None:
        return ()
    earlier = {*notes.earlier_traits, *naming.identity_traits(before)}
    return tuple(sorted(earlier - naming.identity_traits(device)))


def _is_a_projects(origin: str | None) -> bool:
    return origin not in (model.OPERATOR, None)


def _not_the_operators(origin: str | None) -> str | None:
    """Return an origin of content, but None (unknown) in place of the
    operator."""
    return origin if origin != model.OPERATOR else None
