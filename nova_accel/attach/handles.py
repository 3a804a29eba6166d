# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Clean handles after a server.

A vGPU is removed. An FPGA region is cleaned by attach.regions. Other handles
are cleaned by release() or RESETS of their driver (drivers.contract). All
handles are cleaned at the same time. If cleaning fails, the claim stays, and
cleaning is retried.

For example, server A has a disk, and is deleted. attach.releases makes its
claim DELETING. The driver erases the disk, the result is written into the
journal, the claim ends, and Placement shows the disk as free. If the driver
takes longer than [accel] device_timeout, its call continues in the background,
and the claim ends when the call succeeds.

The result depends on the policy. With the policy reset, a disk whose driver
erases it by a reset is clean. A reset does not clear everything in a GPU: its
result is "reset only", and the handle counts as unclean if the operator
configures a stricter policy later. With the policy operator the claim waits
until the operator releases it.

For cards that are absent or at another address see _clean_when_back() and
_follow().
"""

from collections.abc import Iterable
from concurrent import futures
import dataclasses
import time

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel.attach import publishing
from nova_accel.attach import readiness as device_readiness
from nova_accel.attach import regions as free_regions
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.host import usage
from nova_accel.inventory import identity
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import values

CONF = conf.CONF
LOG = logging.getLogger(__name__)
#: maximum seconds between two attempts to clear a device
_LONGEST_PAUSE = 3600


@dataclasses.dataclass(eq=False)
class Handles:
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _cloud: novas.Cloud
    _regions: free_regions.Regions
    _readiness: device_readiness.Readiness
    _publisher: publishing.Publisher

    def __post_init__(self) -> None:
        self._releasing = locks.Locks(
            'region', 'The handles of {}', loading.seconds_at_most)
        #: uuid of a claim -> number of failed attempts to clear its device, and
        #: time.monotonic() of the next one
        self._pauses: dict[str, tuple[int, float]] = {}

    def is_due(self, claim: model.Claim) -> bool:
        """Return whether the release of a claim may be tried now. After a
        failed release there is a pause."""
        return time.monotonic() >= self._pauses.get(claim.uuid, (0, 0))[1]

    def _pause(self, claim):
        times = self._pauses.get(claim.uuid, (0, 0))[0]
        self._pauses[claim.uuid] = times + 1, time.monotonic() + min(
            CONF.accel.discovery_interval << times, _LONGEST_PAUSE)

    def release(self, claims: Iterable[model.Claim], seconds: float,
                region_seconds: float) -> None:
        """Clean handles in parallel. Each claim ends when its handle is clean,
        perhaps after this call has returned.

        :param seconds: limit of the wait.
        :param region_seconds: limit of the wait for FPGA regions.
        """
        started, of_regions = [], []
        for (_, index), mine in server_holdings.by_region(
                claims).items():
            if index is None:
                started += [limited.start(self._release, claim)
                            for claim in mine]
            else:
                of_regions.append(limited.start(self._release_region, mine))
        futures.wait(started, seconds)
        futures.wait(of_regions, region_seconds)

    def _end(self, claim):
        """End the claim of a handle that is clean, and offer the handle."""
        address = claim.device_address
        self._pauses.pop(claim.uuid, None)
        self._readiness.rescan_cards([claim])
        self._readiness.rescan_siblings([claim])
        # before the handle is free: earlier scans may have read other values
        if claim.instance_uuid:
            self._inventory.health.mark(address, signals.RECOVERED, False)
        self._inventory.health.restart_counters(
            address, is_reset=claim.key == address)
        if not any(c.device_address == address and c.uuid != claim.uuid
                   for c in self._holdings.all()):
            self._inventory.looks.between_servers(address)
        self._holdings.released([claim])
        self._publisher.show_devices([claim])

    def _release_region(self, claims):
        address, index = claims[0].device_address, claims[0].region_index
        try:
            # another thread may have cleaned it meanwhile
            with self._releasing.held(f'{address} region{index}'):
                claims = self._holdings.now(claims)
                if self._clean_region(address, index, claims):
                    for claim in claims:
                        self._end(claim)
                else:
                    self._publisher.show_devices(claims)
        except Exception as error:
            LOG.error('%s region%s, which server %s had, could not be '
                      'released; the next comparison tries again: %s',
                      address, index, claims[0].holder, error,
                      exc_info=exception.without_sentence(error))

    def _clean_region(self, address, index, claims):
        """Clean a region.

        :returns: whether the region is clean. Otherwise the claims stay, and
            no other server gets the region.
        """
        used = any(c.part == (address, index)
                   and c.state is not model.ClaimState.DELETING
                   for c in self._holdings.all())
        if not claims or used:
            # if servers share a region it is cleaned after the last one
            return True
        where, device = self._inventory.table.place(claims[0])
        try:
            claims = self._follow(claims, where, device)
            if not claims:
                return True
            if not (device and self._inventory.present(device.address)):
                self._clean_when_back(claims, device)
            self._regions.look_after(claims)
            device = self._inventory.devices.get(
                claims[0].device_address) or device
            with self._inventory.contents.returning(
                    claims[0].device_address, index):
                done = self._regions.clean(claims)
            if device:
                for claim in claims:
                    self._write_result(claim, device, done)
            return True
        except exception.AcceleratorError as error:
            new = [claim for claim in claims if str(error) != claim.error]
            for claim in new:
                LOG.error('%s region%s, which server %s had, is not given to '
                          'another server: %s', address, index,
                          claim.holder, error)
                self._holdings.keep_error(claim, str(error))
                if device:
                    self._note(claim, device, 'none', str(error))
            return False

    def _clean_when_back(self, claims, device):
        """Withhold an absent card, if it needs cleaning, until it returns and
        is clean.

        The card still has the data of its last server. A card whose driver is
        not enabled any more counts as absent.

        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        claim = claims[0]
        if not any(c.prepared for c in claims):
            return
        region = device.find_region(claim.region_index) if device else None
        if region and (region.guest_can_reprogram or any(
                c.handle.address == c.device_address for c in claims)):
            # only the guest knows what it loaded
            self._inventory.contents.forget(
                device.address, region.index, claim.project_id)
        if device is None or handover.policy(
                device, *(c.handle.address for c in claims)) not in (
                    handover.Policy.NONE, handover.Policy.OPERATOR):
            self._clean_first(claim)

    def _clean_first(self, claim):
        """Withhold the card of a claim until the card is clean."""
        self._holdings.settle(todo=[
            values.Unsettled(serial=claim.serial) if claim.serial
            else values.Unsettled(claim.device_address, ids=claim.ids,
                                  ports=claim.ports)])

    def _release(self, claim):
        before = self._inventory.devices.get(claim.device_address)

        def end():
            # a scan may have read other values during the cleaning of the VF
            if claim.key != claim.device_address and before != (
                    self._inventory.devices.get(claim.device_address)):
                self._inventory.scanner.scan(addresses=[claim.device_address])
            self._end(claim)
        try:
            if self._clean(claim, late=end):
                end()
        except Exception as error:
            LOG.error('%s, which server %s had, could not be released; the '
                      'next comparison tries again: %s', claim.handle.address,
                      claim.holder, error,
                      exc_info=exception.without_sentence(error))

    def _clean(self, claim, late):
        """Clean a handle.

        :param late: called if cleaning succeeds after this call has returned.
        :returns: whether the handle is clean. Otherwise the claim stays, and
            no other server gets the handle.
        """
        where, device = self._inventory.table.place(claim)
        if (device and not device.serial
                and claim.handle.address == device.address):
            # a guest had the device during each scan up to now
            self._inventory.scanner.scan(addresses=[device.address])
            where, device = self._inventory.table.place(claim)
        if device is None or (
                claim.created_type and where is not identity.Where.HERE):
            # a vGPU ends when its GPU loses power; if the GPU is only gone,
            # its driver removes the vGPU when the GPU is back
            return True
        try:
            followed = self._follow([claim], where, device)
            if not followed:
                return True
            claim, = followed
            if not claim.prepared:
                if hangs := self._inventory.cards.hanging(claim.key):
                    raise exception.DeviceTimeout(f'{hangs}.')
                if not self._inventory.prepares_every_handle(device):
                    # the driver cleans nothing, or has created nothing
                    self._write_result(claim, device, None)
                return True
            driver = self._inventory.driver_of(device)

            def release(*args):
                self._release_by(driver, claim, *args)
            self._readiness.call(
                device, claim,
                f'Releasing {claim.handle.address} of {device.address}',
                release, late=late)
            return True
        except exception.AcceleratorError as error:
            if str(error) != claim.error:
                LOG.error('%s, which server %s had, is not given to another '
                          'server: %s', claim.handle.address,
                          claim.holder, error)
            self._holdings.keep_error(claim, str(error))
            return False

    def _follow(self, claims, where, device):
        """Return the claims if their card is at their address. If another card
        is there, call _release_without_card() and return [].

        :param claims: claims of one card.
        :raises DeviceUnavailable: the card is at another address now, and its
            claims still have the former one.
        """
        if where is identity.Where.EXCHANGED:
            for claim in claims:
                self._release_without_card(claim, device)
            return []
        if where is identity.Where.MOVED:
            claim = claims[0]
            raise exception.DeviceUnavailable(
                f'{claim.handle.address} had to be cleaned after its server, '
                f'and ' + identity.trouble(
                    claim, where, device,
                    self._inventory.staying.get(claim.uuid, '')) + '.')
        return claims

    def _release_without_card(self, claim, other):
        """End the claim of an absent card if another card is at its address.

        The other card is not touched. If it may be the same card, with an
        identity that the guest changed, the handle waits for the operator.

        :param other: the device that is now at the address of the claim.
        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        if claim.prepared:
            self._clean_first(claim)
        LOG.warning('%s, which server %s had, is released without cleaning: '
                    'the card with the %s is not found, and another one is '
                    'there', claim.handle.address, claim.holder,
                    f'serial number {claim.serial}' if claim.serial
                    else f'product {claim.ids}')
        self._note(claim, other, 'none', values.EXCHANGED)
        is_anothers = any(c.card.identifies(other.card)
                          for c in self._holdings.all() if c != claim)
        if not is_anothers and (
                not (claim.serial and other.serial) or self._inventory
                .driver_of(other).SERVER_CAN_CHANGE_SERIAL):
            # it may be the same card, whose guest changed its identity
            self._holdings.await_operator(claim)

    def _release_by(self, driver, claim, device, *args):
        """Call release() of a driver without a time limit, and write the
        result of the release. Runs in the worker of the card."""
        handle = claim.handle
        try:
            # the kernel alone is not enough: a driver of the host may have
            # left the function enabled, and a mediated device has no such state
            if handle.type is model.HandleType.MDEV or any(
                    pci.is_open(driver.kernel, function)
                    for function in handle.addresses):
                loading.check_not_in_use(
                    self._cloud, driver.kernel, [handle],
                    f'{handle.address} cannot be released')
            done = driver.release(device, *args)
            usage.restore_drivers(driver.kernel, handle)
        except Exception as error:
            if isinstance(error, exception.NotCleared):
                self._pause(claim)
            text = str(error) or repr(error)
            # the journal has each error once, not once per attempt
            if any(text not in c.error for c in self._holdings.now([claim])):
                self._note(claim, device, 'none', text)
            raise
        self._write_result(claim, device, done)

    # Results

    def _write_result(self, claim: model.Claim, device: model.Device,
                      done: str | None) -> None:
        """Write the result of a release, after the driver has finished.

        With the policy operator, the claim becomes WAITING.

        :param done: how the driver cleaned the handle, or None if the driver
            cleaned nothing.
        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        result = values.CLEAN if done else 'not cleaned'
        policy = handover.policy(device, claim.handle.address)
        left = _region(
            self._inventory.devices.get(device.address), claim)
        if (done and claim.prepared and left
                and policy is handover.Policy.RESET
                and left.origin != model.OPERATOR):
            # a reset does not remove what a project has loaded
            result = values.RESET_ONLY
        elif (done and claim.prepared and claim.region_index is None
              and policy is handover.Policy.RESET
              and not self._inventory.driver_of(device).RESET_IS_ALL):
            result = values.RESET_ONLY
        elif (done and claim.prepared and left and device.memory
              and 'memory cleared' not in done):
            result = values.MEMORY_KEPT
        waits = policy is handover.Policy.OPERATOR and not claim.created_type
        if waits:
            LOG.warning('%s, which server %s had, is withheld until the '
                        'operator has cleaned it and gives the command '
                        'nova-accel release %s', claim.handle.address,
                        claim.holder, claim.handle.address)
            result = 'waits for the operator'
        elif not done and policy is not handover.Policy.NONE and (
                claim.region_index is None and not claim.created_type):
            LOG.warning('%s, which server %s had, is not cleaned for the next '
                        'server: the driver %s has cleaned nothing, and the '
                        'policy is %s', claim.handle.address, claim.holder,
                        device.driver, policy.value)
        self._note_unclean(claim, device, policy, done)
        self._note(claim, device, done or 'none', result)
        if waits:
            self._holdings.await_operator(claim)

    def _note_unclean(self, claim, device, policy, done):
        """Store how clean the handle of an ending claim is.

        The handle counts as unclean if the operator later configures a policy
        under which it would have been cleaned better.

        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        if not claim.prepared or claim.created_type:
            # the server left nothing on it
            return
        none = handover.Policy.NONE
        if policy is none or policy is handover.Policy.RESET and not done:
            self._holdings.note_unclean(claim, device, none.value)
        elif policy is handover.Policy.RESET and (
                claim.region_index is not None
                or not self._inventory.driver_of(device).RESET_IS_ALL):
            self._holdings.note_unclean(claim, device, policy.value)
        else:
            is_shown = base.facts_of(done).get('memory') != (
                handover.NOT_SHOWN)
            self._holdings.note_unclean(
                claim, device, None if is_shown else handover.NOT_SHOWN)

    def _note(self, claim: model.Claim, device: model.Device, method: str,
              result: str) -> None:
        """Add a hand-over to the journal.

        :param device: the device as it was before the release.
        :param method: what driver.release() returned, or 'none' if the device
            was not cleaned.
        """
        now = self._inventory.devices.get(claim.device_address)
        self._holdings.note_handover(
            device, _region(device, claim), _region(now, claim),
            str(method), result, claim, base.shown_of(method))


def _region(device: model.Device | None, claim: model.Claim,
            ) -> model.Region | None:
    """Return the region of a claim, or None without a device or region."""
    return device.find_region(claim.region_index) if device else None
