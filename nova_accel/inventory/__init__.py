# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The devices of a host, their state, and their providers in Placement."""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import usage
from nova_accel.inventory import cards
from nova_accel.inventory import conditions
from nova_accel.inventory import configuration
from nova_accel.inventory import devices
from nova_accel.inventory import examination
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel.inventory import looks
from nova_accel.inventory import offers
from nova_accel.inventory import recovery
from nova_accel.inventory import scan_state
from nova_accel.inventory import scanner
from nova_accel.inventory import shown as what_is_shown
from nova_accel.inventory import users as device_users
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Inventory:
    """The devices of one compute host.

    Any thread may call its methods. If a card hangs, the first call waits
    until the time limit, and later calls for the card fail at once.
    """

    def __init__(self, drivers: Mapping[str, base.AcceleratorDriver],
                 store: claim_store.ClaimStore,
                 taken_elsewhere: Callable[[model.Device], str]
                 = lambda device: '', reads_serials: bool = True):
        """:param drivers: drivers by name, in the order of [accel]
            enabled_drivers. A device that several drivers find belongs to the
            first of them.
        :param taken_elsewhere: function that returns a clause if an option of
            Nova names a device as well, for example '0000:3b:00.1 is matched
            by [pci] device_spec', otherwise ''. It runs in the worker of the
            card, within the time limit, and may read the host. A device with a
            clause is withheld, and logged once as an ERROR.
        :param reads_serials: whether to read serial numbers and users of
            devices, which needs privileges.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        #: held while a handle is chosen and claimed
        self.claiming = locks.Lock('choice')
        self._drivers = drivers
        self.table = devices.DeviceTable(store, drivers)
        self.contents = self.table.contents
        #: runs every call of a driver about one card
        self.cards = cards.Cards(hangs=self._hangs, ended=self._ended)
        #: what follows from the health of the devices
        self.health = conditions.Conditions(self.table, store)
        self.users = device_users.Users(
            self.table, drivers, reads_serials)
        state = scan_state.ScanState()
        device_rules = rules.DeviceRules()
        device_rules.known(self.table.snapshot().values())
        self.scanner = scanner.Scanner(
            drivers, self.table, self.cards, state, device_rules,
            examination.Examiner(
                drivers, self.table, state, device_rules, self.users,
                taken_elsewhere, reads_serials))
        self.looks = looks.Looks(
            drivers, self.table, self.cards, state, self.scanner, self.health,
            self.users)
        self.configuration = configuration.Configuration(
            drivers, self.table, device_rules)
        #: failures of the last scans, see ScanState.failures()
        self.failures = state.failures
        self.recovery = recovery.Recovery(
            self.table, self.cards, store, self.claiming, drivers, self.health)
        #: the providers in Placement
        self.shown = what_is_shown.Shown(
            drivers, self.table, store, device_rules)
        self._every_handle = frozenset(
            name for name, driver in drivers.items()
            if contract.attends(type(driver)))
        #: uuid of a claim -> why it does not follow its card to another
        #: address; a clause (attach.following)
        self.staying: Mapping[str, str] = {}

    def _hangs(self, key: str, why: str) -> None:
        """Withhold a device while a call about the device hangs.

        :param key: key of the call, as in inventory.cards. A key that is not
            the address of a device has no effect.
        """
        self.table.withheld.withhold(key, holds.Kind.HANGS, why)
        if not self.cards.hanging(key):
            # the call may have ended, and reported that, before the hold was
            # set
            self.table.withheld.lift(key, holds.Kind.HANGS)

    def _ended(self, key: str) -> None:
        """Lift the hold HANGS of a device whose call has returned, and scan
        the device. If the key of the call is a driver, scan its devices."""
        self.table.withheld.lift(key, holds.Kind.HANGS)
        self.table.reports.invalidate(key)
        kind, _, name = key.partition(':')
        if kind == 'driver':
            self.scanner.scan(names=[name])
        else:
            self.scanner.scan(addresses=[key])

    # The devices

    @property
    def devices(self) -> dict[str, model.Device]:
        """Return a snapshot of the reported devices by address. Do not change
        the dict."""
        return self.table.snapshot()

    def present(self, address: str) -> model.Device | None:
        """Return a device, or None if its driver does not find it now."""
        return (self.devices.get(address)
                if self.table.reports.is_present(address) else None)

    def find(self, address: str, index: int | None,
             ) -> tuple[model.Device, model.Region | None]:
        """Return a device for a new claim, and the region with this index.

        :param index: None for a claim of the whole device.
        :raises DeviceUnavailable: the device is absent, or the device or the
            region is withheld.
        """
        found = self._part(address, index)
        withheld = self.table.offered().withheld_by((address, index))
        if withheld:
            what = f'{_name(address, index)} was allocated, and it is'
            raise exception.DeviceUnavailable(
                f'{what} withheld ({holds.reasons(withheld)}): build the '
                f'server on another host.', found=f'{what} not well')
        return found

    def find_free(self, name: str,
                  ) -> tuple[model.Device, model.Region | None]:
        """Return a device or region that the operator may clean or program.

        :param name: see identity.part().
        :raises DeviceUnavailable: the device is absent, a server has it, or it
            has a hold other than DISABLED.
        """
        device, region = identity.part(name, self.devices)
        offered = self.table.offered()
        chosen = [part for part, found in offers.parts(device)
                  if region in (None, found)]
        others = [hold for hold in offered.withheld_by(
            (device.address, region.index if region else None))
            if hold.kind is not holds.Kind.DISABLED]
        if others:
            raise exception.DeviceUnavailable(
                f'{name} cannot be worked on, because it is withheld '
                f'({holds.reasons(others)}): resolve that first.')
        for part in chosen:
            for offer in offered.of(part):
                if offer.claim and offer.state is offers.State.HELD:
                    raise exception.DeviceUnavailable(
                        f'{name} cannot be worked on while server '
                        f'{offer.claim.holder} has {offer.handle.address}: '
                        f'move, shelve or delete the server.')
        return device, region

    def _part(self, address, index):
        device = self.devices.get(address)
        region = device.find_region(index) if device else None
        if device is None or index is not None and region is None:
            found = (f'{_name(address, index)} was allocated, and the device '
                     f'is not on this host any more')
            raise exception.DeviceUnavailable(
                f'{found}: build the server on another.', found=found)
        return device, region

    def find_held(self, claim: model.Claim,
                  ) -> tuple[model.Device, model.Region | None]:
        """Return the device of a claim, and the region of the claim if any,
        after a check that the server can use them.

        If the card is withheld, it must answer within [accel]
        discovery_timeout. A hanging call about another handle of the card is
        accepted: a VF, a vGPU, or a region that needs no programming works
        meanwhile.

        :raises DeviceUnavailable: the device is absent, nova.conf leaves it
            out, or it does not answer.
        :raises DeviceUnavailable: another card is in its slot, or the running
            guest of another server has a part of the handle's IOMMU group.
        :raises DeviceUnavailable: a call about the handle or a programming of
            the region hangs.
        """
        address, index = claim.device_address, claim.region_index

        def cannot(found, why):
            held = f'{_name(address, index)} is held by the server, and'
            return exception.DeviceUnavailable(
                f'{held} {why}.', found=f'{held} {found}')
        trouble = identity.trouble(
            claim, *self.table.place(claim),
            self.staying.get(claim.uuid, ''))
        if trouble:
            raise cannot('another card is in its place', trouble)
        device, region = self._part(address, index)
        why = self.cards.hanging(claim.key)
        if self.contents.is_unknown(address, index):
            # a hanging call for the card may be programming the region
            why = why or self.cards.hanging(address)
        if why:
            raise cannot('does not respond', f'does not respond: {why}')
        for other in self._rivals_that_run(claim, device):
            raise cannot(
                'shares its IOMMU group with a device of a server that runs',
                f'shares its IOMMU group with {offers.named([other])}, which '
                f'runs: stop or move one of the two servers')
        withheld = self.table.offered().withheld_by((address, None))
        why = holds.reasons(withheld)
        if any(hold.kind is holds.Kind.LEFT_OUT for hold in withheld):
            raise cannot(
                'the configuration of this host leaves it out',
                f'nova.conf leaves it out ({why}): change that back, or '
                f'delete the server')
        if any(hold.kind is holds.Kind.GONE for hold in withheld):
            raise cannot('is gone', f'is gone ({why}): put the card back, or '
                                    f'delete the server')
        if withheld and not self._answers(device):
            raise cannot('does not answer', f'does not answer ({why}): '
                         f'power-cycle the card, or delete the server')
        return device, region

    def _rivals_that_run(self, claim, device) -> list[offers.Offer]:
        """Return handles of other servers that running guests have open, and
        that share an IOMMU group with the handle of a claim.

        The kernel may have added functions to a group since the claim.

        :raises DeviceTimeout: the kernel does not answer.
        """
        return [
            other for offer, others in self.table.rivals()
            if offer.handle == claim.handle for other in others
            if self.cards.call(
                f'asking:{other.handle.address}',
                f'Asking whether a guest has {other.handle.address}',
                usage.is_open, self.driver_of(device).kernel, other.handle,
                seconds=CONF.accel.discovery_timeout, patient=True)]

    def ask_users(self, chosen: Iterable[offers.Offer]) -> None:
        """Withhold those of the chosen handles that a process of the host has
        open.

        :raises DeviceTimeout: the kernel does not answer.
        """
        of_card = collections.defaultdict(list)
        for offer in chosen:
            of_card[offer.part[0]].append(offer.handle)
        for address, handles in of_card.items():
            self.cards.call(
                # in parallel to work for other servers on the card
                f'users:{address}',
                f'Asking which processes of the host have {address} open',
                self.users.ask, self.devices[address], handles,
                seconds=CONF.accel.discovery_timeout, patient=True)

    def identity_for_claim(self, address: str) -> dict[str, Any]:
        """Return the fields of a claim on a device that identify its card:
        serial, ids and ports."""
        device = self.devices[address]
        return {'serial': identity.serial_for_claim(
                    address, self.devices, self.table.reports.gone()),
                'ids': device.ids, 'ports': device.ports}

    def _answers(self, device: model.Device) -> bool:
        try:
            return self.cards.call(
                # in parallel to work for other servers on the card
                f'asking:{device.address}',
                f'Asking {device.address} whether it answers',
                self.driver_of(device).answers, device,
                seconds=CONF.accel.discovery_timeout)
        except exception.DeviceBusy:
            # the card is busy, hence it answers
            return True
        except exception.DeviceUnavailable:
            raise
        except Exception as error:
            LOG.warning('Device %s is not known to answer: %s',
                        device.address, error)
            return False

    def driver_of(self, device: model.Device) -> base.AcceleratorDriver:
        """Return the driver of a device.

        :raises DeviceUnavailable: its driver is not enabled any more.
        """
        try:
            return self._drivers[device.driver]
        except KeyError:
            raise exception.DeviceUnavailable(
                f'{device.address} needs the driver {device.driver}, which '
                f'[accel] enabled_drivers does not name: enable it.') from None

    def prepares_every_handle(self, device: model.Device) -> bool:
        """Return whether nova-compute calls prepare() and release() of the
        driver for every handle of a device. Otherwise it calls them only for
        handles that are created on demand."""
        return device.driver in self._every_handle and not device.creatable

    def guest_can_reprogram(self, address: str, index: int | None) -> bool:
        """Return whether a guest can change the content of a region unnoticed.
        """
        device = self.devices.get(address)
        region = device.find_region(index) if device else None
        return bool(region and region.guest_can_reprogram)

    def withhold_in_guests(self, in_guests: Mapping[str, str],
                           ) -> dict[str, str]:
        """Withhold devices of which guests use a handle without a claim, and
        lift this kind of hold (IN_GUEST) from all other devices.

        :param in_guests: address of each host device that a guest has without
            a claim -> uuid of the guest's server.
        :returns: the entries of in_guests that are handles of nova_accel.
        """
        found = {}
        for address, device in self.devices.items():
            mine = {h.address for h in device.all_handles
                    if h.address in in_guests}
            found.update({a: in_guests[a] for a in mine})
            if mine:
                part = min(mine)
                self.table.withheld.withhold(
                    address, holds.Kind.IN_GUEST,
                    f'a guest has {part} without a claim, see the log of '
                    f'nova-compute')
            else:
                self.table.withheld.lift(address, holds.Kind.IN_GUEST)
        return found

    # What regions carry

    def programming_failed(self, address: str, index: int,
                           report: bool) -> None:
        """End a programming that did not succeed.

        :param report: True if the call of the driver has ended. The card is
            then scanned, and the region has the content that the driver reads,
            with the origin that Contents.begin() stored. False if the call may
            still run (DeviceTimeout). The content is then unknown until the
            region is programmed again, and the card is withheld until the call
            ends.
        :raises IllegalTransition: the region is not being programmed.
        """
        try:
            self.contents.ended(address, index, report)
        except exception.AcceleratorsUnavailable as error:
            LOG.error('The content of %s stays unknown: %s',
                      _name(address, index), error)
        if report:
            self.scanner.scan(addresses=[address])

    # Scans

    def recover(self) -> None:
        """Recover failed cards, and failed regions of cards, that no server
        has a claim on. Each failure is tried once; see inventory.recovery."""
        recovered = self.recovery.run()
        if recovered:
            self.scanner.scan(addresses=recovered)
            self.recovery.forget_well()

    def close(self) -> None:
        """Stop the periodic looks, and refuse new calls for cards."""
        self.looks.close()
        self.cards.close()


def _name(address: str, index: int | None) -> str:
    return address if index is None else f'{address} region{index}'
