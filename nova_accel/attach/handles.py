# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Handles that are made ready for a server and cleaned after it.

vGPUs, which are made on demand, and the handles of drivers with a prepare(), a
release() or RESETS (drivers.contract). Calls of a driver go through
inventory.cards: one at a time for a handle, each with a time limit.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
import dataclasses
import json

from nova_accel.attach import cleaning
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.inventory import identity
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request
from nova_accel.store import values

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: characters of JSON that a driver may remember of a handle
_MOST_REMEMBERED = 4096


class Handles:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud,
                 regions: cleaning.Regions):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        self._regions = regions
        self._releasing = locks.Locks(
            'region', 'The handles of {}', loading.seconds_at_most)

    def type_for(self, wanted: request.AcceleratorRequest,
                 device: model.Device) -> str | None:
        """Return which of the device's creatable types a request is for.

        :returns: the first type that has the traits asked for and can be made
            now; None for a device without creatable types.
        :raises DeviceUnavailable: none can be made.
        """
        if not device.creatable:
            return None
        # traits of the unnumbered group may be those of another device
        asked = wanted.required & {
            t.trait for d in self._inventory.devices.values()
            for t in d.creatable}
        for type_ in device.creatable:
            if (type_.available >= wanted.amount and asked <= {type_.trait}
                    and type_.trait not in wanted.forbidden):
                return type_.name
        what = ' and '.join(sorted(asked)) or 'any type'
        raise exception.DeviceUnavailable(
            f'{wanted} was allocated {device.address}, which cannot make '
            f'{what[:99]} of that now: the build is retried on another host.')

    def prepare(self, claims: Iterable[model.Claim], fresh: bool) -> None:
        """Make handles ready for the guest of the server that holds them.

        :param fresh: the server has just got them; whatever is on a handle
            is not its own.
        :raises AcceleratorError: one could not be made ready.
        """
        for claim in claims:
            device, _ = (
                self._inventory.find(claim.device_address, None) if fresh
                else self._inventory.find_held(claim))
            if claim.created_type:
                self._make(device, claim, fresh)
            elif self._inventory.prepares_every_handle(device):
                self._prepare(device, claim, fresh,
                              f'Preparing {claim.handle.address}')
                if not claim.prepared:
                    self._holdings.mark_prepared(claim, True)

    def _make(self, device, claim, fresh):
        if not claim.prepared:
            # first, because a crash may leave the vGPU without its mark
            self._holdings.mark_prepared(claim, True)
        try:
            self._prepare(device, claim, fresh,
                          f'Making {claim.handle.address} a '
                          f'{claim.created_type} of {device.address}')
        except exception.DeviceUnavailable:
            if not claim.prepared and not any(
                    now.driver_memory for now in self._holdings.now([claim])):
                # nothing was made: what is on the handle is not this server's
                self._holdings.mark_prepared(claim, False)
            raise

    def _prepare(self, device, claim, fresh, what):
        driver = self._inventory.driver_of(device)

        def prepare(*args):
            try:
                driver.prepare(*args)
            except exception.AcceleratorError:
                raise
            except Exception as error:
                # the owner of the server reads it
                LOG.exception('%s failed', what)
                raise exception.DeviceError(
                    f'{what} failed: {exception.for_owner(error)}') from error
        try:
            self._on_handle(device, claim, what, prepare, fresh)
        except exception.DeviceError:
            if fresh:
                self._inventory.health.mark(device.address, signals.START)
            raise

    def release(self, claims: Iterable[model.Claim],
                freed: Callable[[model.Claim], None],
                kept: Callable[[list[model.Claim]], None], seconds: float,
                region_seconds: float = 0) -> None:
        """Clean handles, all side by side.

        :param freed: called for each handle once it is clean, at once or long
            after this call has ended.
        :param kept: called with the claims of a region that is not clean, in
            the same way.
        :param seconds: how long to wait for them; none waits for another.
        :param region_seconds: how long to wait for those of FPGA regions.
        """
        started, of_regions = [], []
        for (_, index), mine in server_holdings.by_region(
                claims).items():
            if index is None:
                started += [limited.start(self._release, claim, freed)
                            for claim in mine]
            else:
                of_regions.append(
                    limited.start(
                        self._release_region, mine, freed, kept))
        futures.wait(started, seconds)
        futures.wait(of_regions, region_seconds)

    def _release_region(self, claims, freed, kept):
        address, index = claims[0].device_address, claims[0].region_index
        try:
            # of several that release it the next one finds it clean
            with self._releasing.held(f'{address} region{index}'):
                claims = self._holdings.now(claims)
                if self._clean_region(address, index, claims):
                    for claim in claims:
                        freed(claim)
                else:
                    kept(claims)
        except Exception as error:
            LOG.error('%s region%s, which server %s had, could not be '
                      'released; the next comparison tries again: %s',
                      address, index, claims[0].holder, error,
                      exc_info=exception.without_sentence(error))

    def _clean_region(self, address, index, claims):
        """Return True once nothing of the server is in its region. Otherwise
        the claims stay, and no other server gets it."""
        used = any(c.part == (address, index)
                   and c.state is not model.ClaimState.DELETING
                   for c in self._holdings.all())
        if not claims or used:
            # of servers that share a region the last one leaves it clean
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
            for claim in claims if device else ():
                self._judge(claim, device, done)
            return True
        except exception.AcceleratorError as error:
            new = [claim for claim in claims if str(error) != claim.error]
            for claim in new:
                LOG.error('%s region%s, which server %s had, is not given to '
                          'another server: %s', address, index,
                          claim.holder, error)
                self._holdings.keep_error(claim, str(error))
                if device:
                    self._note_handover(claim, device, 'none', str(error))
            return False

    def _clean_when_back(self, claims, device):
        """Note that a card is cleaned when it comes back: it is gone, or its
        driver is not enabled any more, with what the server left in it.

        :raises AcceleratorsUnavailable: that cannot be written down.
        """
        claim = claims[0]
        if not any(c.prepared for c in claims):
            return
        region = self._region(device, claim)
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
        """Note that the card of a claim is cleaned when it comes back."""
        self._holdings.settle(todo=[
            values.Unsettled(serial=claim.serial) if claim.serial
            else values.Unsettled(claim.device_address, ids=claim.ids)])

    def _release(self, claim, freed):
        before = self._inventory.devices.get(claim.device_address)

        def clean():
            # a VF that is cleaned is not what a scan should see of it
            if claim.key != claim.device_address and before != (
                    self._inventory.devices.get(claim.device_address)):
                self._inventory.scanner.scan(addresses=[claim.device_address])
            freed(claim)
        try:
            if self._clean(claim, late=clean):
                clean()
        except Exception as error:
            LOG.error('%s, which server %s had, could not be released; the '
                      'next comparison tries again: %s', claim.handle.address,
                      claim.holder, error,
                      exc_info=exception.without_sentence(error))

    def _clean(self, claim, late):
        """Return True once the handle is clean. Otherwise the claim stays, and
        the handle is not given to another server."""
        where, device = self._inventory.table.place(claim)
        if (device and not device.serial
                and claim.handle.address == device.address):
            # a guest had it when it was first seen, and has returned it
            self._inventory.scanner.scan(addresses=[device.address])
            where, device = self._inventory.table.place(claim)
        if device is None or (
                claim.created_type and where is not identity.Where.HERE):
            # a vGPU ends when the host loses its power; of a GPU that is only
            # gone the driver says that, when it is enabled
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
                    # the driver cleans nothing, or made nothing
                    self._judge(claim, device, None)
                return True
            driver = self._inventory.driver_of(device)

            def release(*args):
                self._release_by(driver, claim, *args)
            self._on_handle(
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
        """Return claims of one card as they would be where it is now; none,
        where it is not found and another one is at its address.

        :raises AcceleratorError: see _moved() and _give_up().
        """
        if where is identity.Where.EXCHANGED:
            for claim in claims:
                self._give_up(claim, device)
            return []
        if where is identity.Where.MOVED:
            return [self._moved(claim, device) for claim in claims]
        return claims

    def _moved(self, claim, device):
        """Return the claim as it would be where its card is now.

        :raises DeviceUnavailable: the card does not have the handle there, or
            it is another server's.
        """
        if any(c.device_address == device.address
               and self._inventory.table.place(c)[0] is identity.Where.HERE
               for c in self._holdings.all()):
            # another card of the same kind may have the same serial number
            raise exception.DeviceUnavailable(
                f'{claim.handle.address} had to be cleaned after its server, '
                f'and a card with its serial number is at {device.address}, '
                f'where another server has it: see which card that is.')
        address = pci.moved(claim.handle.address, claim.device_address,
                            device.address)
        for handle in device.all_handles:
            if handle.address == address:
                return dataclasses.replace(
                    claim, device_address=device.address, handle=handle)
        raise exception.DeviceUnavailable(
            f'{claim.handle.address} had to be cleaned after its server, and '
            f'its card is at {device.address} now and has no {address} there: '
            f'put it back to {claim.device_address}.')

    def _give_up(self, claim, other):
        """End the claim of a card that is not found, while another one is at
        its address, which is not touched.

        :raises AcceleratorsUnavailable: that cannot be written down.
        """
        if claim.prepared:
            self._clean_first(claim)
        LOG.warning('%s, which server %s had, is released without cleaning: '
                    'the card with the %s is not found, and another one is '
                    'there', claim.handle.address, claim.holder,
                    f'serial number {claim.serial}' if claim.serial
                    else f'product {claim.ids}')
        self._note_handover(claim, other, 'none', values.EXCHANGED)
        if (not (claim.serial and other.serial)
                or self._inventory.driver_of(other).SERVER_CAN_CHANGE_SERIAL):
            # it may be the same one, which its guest made look like another
            self._holdings.await_operator(claim)

    def _release_by(self, driver, claim, device, *args):
        """In the worker of the card, however long it takes."""
        handle = claim.handle
        try:
            # the kernel alone may be wrong: a driver of the host may have left
            # it enabled, and of a mediated device it does not say
            if handle.type is model.HandleType.MDEV or any(
                    pci.is_open(driver.kernel, function)
                    for function in handle.addresses):
                loading.check_not_in_use(
                    self._cloud, driver.kernel, [handle],
                    f'{handle.address} cannot be released')
            done = driver.release(device, *args)
        except Exception as error:
            text = str(error) or repr(error)
            # the same one is not written again at each attempt
            if any(text not in c.error for c in self._holdings.now([claim])):
                self._note_handover(claim, device, 'none', text)
            raise
        self._judge(claim, device, done)

    def _judge(self, claim, device, done):
        """Write down what came of a release, once the driver has done its part.

        :raises AcceleratorsUnavailable: that the operator has to give the
            handle back cannot be written down.
        """
        result = values.CLEAN if done else 'not cleaned'
        policy = handover.policy(device, claim.handle.address)
        left = self._region(
            self._inventory.devices.get(device.address), claim)
        if (done and claim.prepared and left
                and policy is handover.Policy.RESET
                and left.origin != model.OPERATOR):
            # a reset leaves what a project has loaded
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
            LOG.warning('%s, which server %s had, is given to no other server '
                        'before the operator has cleaned it and has given the '
                        'command nova-accel release %s',
                        claim.handle.address, claim.holder,
                        claim.handle.address)
            result = 'waits for the operator'
        elif not done and policy is not handover.Policy.NONE and (
                claim.region_index is None and not claim.created_type):
            LOG.warning('%s, which server %s had, is given to the next server '
                        'as it is: the driver %s has cleaned nothing, and the '
                        'policy is %s', claim.handle.address, claim.holder,
                        device.driver, policy.value)
        self._note(claim, device, policy, done)
        self._note_handover(claim, device, done or 'none', result)
        if waits:
            self._holdings.await_operator(claim)

    def _note(self, claim, device, policy, done):
        """Write down whether the handle is clean, whatever the policy of the
        next release is.

        :raises AcceleratorsUnavailable: that cannot be written down.
        """
        if not claim.prepared or claim.created_type:
            # its server has left nothing
            return
        none = handover.Policy.NONE
        if policy is none or policy is handover.Policy.RESET and not done:
            self._holdings.note_unclean(claim, device, none.value)
        elif policy is handover.Policy.RESET and (
                claim.region_index is not None
                or not self._inventory.driver_of(device).RESET_IS_ALL):
            self._holdings.note_unclean(claim, device, policy.value)
        else:
            self._holdings.note_unclean(claim, device, None)

    def _note_handover(self, claim, device, method, result):
        now = self._inventory.devices.get(claim.device_address)
        self._holdings.note_handover(
            device, self._region(device, claim), self._region(now, claim),
            method, result, claim)

    @staticmethod
    def _region(device, claim):
        """Return the region of a claim; None for a claim without one."""
        return device.find_region(claim.region_index) if device else None

    def _use(self, claim):
        """Return the use of a handle by its server, as the driver sees it."""
        def remember(value):
            text = json.dumps(value)
            if len(text) > _MOST_REMEMBERED:
                raise ValueError(
                    f'{len(text)} characters are too many to be remembered, '
                    f'{_MOST_REMEMBERED} are the most')
            self._holdings.remember(claim, text)
        found = json.loads(claim.driver_request or '{}')
        return base.Use(
            keys=found.get('keys', {}),
            functions=tuple(found.get('functions', ())),
            bitstream_id=found.get('bitstream_id'),
            memory=json.loads(claim.driver_memory or 'null'),
            remember=remember)

    def _on_handle(self, device, claim, what, method, *args, late=None):
        """Call a method of the driver for the handle of a claim, unless the
        claim has ended.

        :param late: called when it has ended well after the limit.
        :raises DeviceTimeout: it goes on.
        """
        def run():
            try:
                # a caller that waited may come when another server has it
                for now in self._holdings.now([claim]):
                    method(device, claim.handle, claim.created_type, *args,
                           self._use(now))
            finally:
                self._inventory.table.reports.invalidate(device.address)
        try:
            self._inventory.cards.call(
                claim.key, what, run, seconds=CONF.accel.device_timeout,
                late=late, patient=True)
        except exception.AcceleratorError:
            raise
        except Exception as error:
            raise exception.DeviceError(
                f'{what} failed ({type(error).__name__}: {error}): check '
                f'the device, and read the kernel log.',
                found=f'{what} failed') from error


def for_driver(wanted: request.AcceleratorRequest) -> str:
    """Return what a request has for the driver, as Claim.driver_request."""
    return json.dumps({
        'keys': dict(wanted.driver_keys), 'bitstream_id': wanted.bitstream_id,
        'functions': [choice.function_id or choice.function_name
                      for choice in wanted.choices if choice.function_id
                      or choice.function_name]})
