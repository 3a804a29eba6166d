# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Carry out orders of the operator about devices: clean, program, release and
drill.

``nova-accel clean`` writes a claim without a server, in the state DELETING, for
each handle of the device. Hence the handle is released as after a server: it is
cleaned, and a build waits for it or is retried on another host. After a crash
or a failure the next comparison of claims with guests continues. ``nova-accel
program`` programs a region before any server has it. ``nova-accel release``
releases a claim or a handle. ``nova-accel drill`` adds the reading ``drill`` to
the readings of a disabled device. The reading has the consequences of any other
signal, so the operator can check that their alert arrives.
"""

import dataclasses
import time
import typing

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel.attach import reconcile
from nova_accel.attach import regions
from nova_accel.attach import releases as server_releases
from nova_accel.attach import settling
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel.inventory import offers
from nova_accel import locks
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text


@dataclasses.dataclass(eq=False)
class Maintenance:
    _cloud: novas.Cloud
    _kernel: typing.Any
    _store: claim_store.ClaimStore
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _publisher: publishing.Publisher
    _regions: regions.Regions
    _servers: locks.Locks
    _releases: server_releases.Releases
    _reconciler: reconcile.Reconciler

    # Clean

    def clean(self, name: str) -> str:
        """Clean a device, or a region of one, as after a server.

        :param name: name of a device or region, see inventory.identity.part().
        :returns: what was done, in one sentence.
        :raises DeviceUnavailable: a server has the device, the device is
            withheld, [accel] handover leaves cleaning to the operator, or
            cleaning failed.
        """
        device, region = self._inventory.find_free(name)
        self._check_in_no_guest(name, device, region)
        # a process of the host may have opened it since the last scan
        self._inventory.scanner.scan(addresses=[device.address])
        with self._inventory.claiming:
            device, region = self._inventory.find_free(name)
            claims = self._claims(name, device, region)
            held = {c.handle: c for c in self._holdings.being_released()}
            self._holdings.settle(
                claims=[c for c in claims if c.handle not in held])
        try:
            # wait for a programming that began earlier
            self._regions.gate.wait(claims)
        except exception.DeviceUnavailable as error:
            raise exception.DeviceUnavailable(
                f'{name} waits to be cleaned while it is being programmed, '
                f'which does not end: no server gets it before it is clean; '
                f'nova-compute tries again each minute.') from error
        claims = [held.get(c.handle, c) for c in claims]
        self._publisher.show_devices(claims)
        self._releases.release_to_the_end(claims)
        left = [] if region else self._left_alone(device)
        return self._outcome(name, claims) + (
            f' {", ".join(left)} of it cannot be given to servers now, and '
            f'was left alone.' if left else '')

    def _left_alone(self, device):
        """Return the regions or VFs of a device that cannot be cleaned,
        because they have no handle now. For example, another driver has a VF.
        """
        if device.regions:
            return [r.name for r in device.regions if not r.handles]
        offered = {function for handle in device.handles
                   for function in handle.functions}
        if device.creatable or device.address in offered:
            return []
        return [function for function in pci.virtual_functions(
            self._kernel, device.address)
            if function not in offered]

    def _check_in_no_guest(self, name, device, region):
        """Check that no running guest has a part of the device without a
        claim: the periodic comparison may not have found such a guest yet."""
        parts = {a for handle in (region or device).handles
                 for a in handle.addresses}
        if region is None:
            parts |= device.functions()
        for guest, there in sorted(self._cloud.guest_devices().items()):
            for address in sorted(there & parts):
                raise exception.DeviceUnavailable(
                    f'{name} cannot be worked on, because the guest of '
                    f'server {guest} has {address}: see virsh dumpxml {guest}.')

    def _claims(self, name, device, region):
        """Return new claims without a server, one for each handle."""
        if not device.regions and not self._inventory.prepares_every_handle(
                device):
            raise exception.DeviceUnavailable(
                f'{name} is not cleaned, because the driver '
                f'{device.driver} has neither release() nor RESETS: clean '
                f'it yourself.')
        shown = self._inventory.shown.by_part()
        claims = []
        for part in [region] if region else device.regions or [device]:
            index = part.index if device.regions else None
            for handle in part.handles:
                policy = handover.policy(device, handle.address)
                if policy in (handover.Policy.NONE, handover.Policy.OPERATOR):
                    raise exception.DeviceUnavailable(
                        f'{handle.address} is not cleaned, because '
                        f'{policy.value} is its policy in {handover.OPTION}, '
                        f'with which nova_accel does not clean: do it '
                        f'yourself, or change the policy.')
                if (device.address, index) not in shown:
                    raise exception.DeviceUnavailable(
                        f'{name} cannot be cleaned before nova-compute has '
                        f'reported it to Placement yet: see its log, or wait '
                        f'a minute.')
                claims.append(settling.claim_of_none(
                    self._inventory, device, index, handle,
                    shown[device.address, index], **_content(part)))
        if not claims:
            raise exception.DeviceUnavailable(
                f'{name} is not cleaned, because it has nothing that a '
                f'server could get: see nova-accel discover.')
        return claims

    def _outcome(self, name, claims):
        """Return the result of a release, from the journal, as a sentence."""
        newest = {h.handle: h for h in self._store.handovers()}
        done = [newest[claim.handle.address] for claim in claims
                if claim.handle.address in newest]
        for one in done:
            if one.result not in (values.CLEAN, values.MEMORY_KEPT):
                raise exception.DeviceUnavailable(
                    f'{one.handle} is not cleaned, because its release ended '
                    f'otherwise ({one.result}): see nova-accel handovers.')
        how = ', '.join(dict.fromkeys(one.method for one in done)) or (
            'see the log of nova-compute')
        kept = (', and nothing cleared the memory of its card'
                if any(one.result == values.MEMORY_KEPT for one in done)
                else '')
        return f'{name} is clean ({how}){kept}.'

    # Program

    def program(self, order: str) -> str:
        """Program an idle region with an image of the operator.

        :param order: name of the region (inventory.identity.part()), a space,
            and a name for glance.find_ordered().
        :returns: what was done, in one sentence.
        :raises AcceleratorError: the region cannot be programmed.
        """
        name, _, wanted = order.partition(' ')
        device, region = self._region(name)
        self._check_in_no_guest(name, device, region)

        def check_idle():
            if (device.address, region) != self._idle(name):
                raise exception.DeviceUnavailable(
                    f'{name} cannot be programmed, because it has changed '
                    f'meanwhile: see nova-accel discover, and give the '
                    f'command again.')
        check_idle()
        try:
            image = self._regions.program(
                device, region, wanted, check_idle)
        except (exception.ProgrammingFailed, exception.DeviceError) as error:
            self._note_handover(device, region, 'none', str(error))
            raise
        done = ('is programmed with' if region.programmable
                else 'already has the function of')
        self._note_handover(
            device, region, f'{done.removeprefix("is ")} image {image}',
            'ordered')
        shown = self._inventory.shown.by_part()
        self._publisher.show({shown[key] for key in [
            (device.address, region.index)] if key in shown})
        return (f'{device.address} {region.name} {done} image {image}; no '
                f'server gets it before nova-accel enable {device.address}.')

    def _note_handover(self, device, region, method, result):
        """Write to the journal what was done with a region that no server has.

        :param region: the region as it was before.
        """
        now = self._inventory.devices.get(device.address)
        self._holdings.note_handover(
            device, region, now.find_region(region.index) if now else None,
            method, result)

    def _region(self, name):
        """Return a device and its region. The name may omit the only region of
        a device."""
        device, region = self._inventory.find_free(name)
        if region is None and len(device.regions) == 1:
            region = device.regions[0]
        if region is None:
            what = (
                'has several regions: name one of '
                + ', '.join(f'{name}_{r.name}' for r in device.regions)
                if device.regions else
                f'is a {device.type}, which has no region: name an FPGA')
            raise exception.DeviceUnavailable(
                f'{name} cannot be programmed, because it {what}.')
        return device, region

    def _idle(self, name):
        """Return the address of a device, and its region that may be
        programmed. Does not read the hardware.

        :raises DeviceUnavailable: the operator has not disabled the device, or
            the region is being cleaned.
        """
        device, region = self._region(name)
        part, offered = (device.address, region.index), (
            self._inventory.table.offered())
        if not any(hold.kind is holds.Kind.DISABLED
                   for hold in offered.holds_of(part)):
            raise exception.DeviceUnavailable(
                f'{name} cannot be programmed while a server may get '
                f'it: nova-accel disable {device.address} first.')
        for offer in offered.of(part):
            if offer.claim and offer.state is offers.State.RELEASING:
                raise exception.DeviceUnavailable(
                    f'{name} cannot be programmed while it is cleaned after '
                    f'server {offer.claim.holder} '
                    f'({offer.claim.error or "no error"}): wait for that, see '
                    f'nova-accel claims.')
        return device.address, region

    # Release

    def release(self, name: str) -> str:
        """Release an abandoned claim, which has no guest, allocation or
        server, or a handle that waits for the operator.

        :param name: address of the handle, or UUID of the claim.
        :returns: the evidence, and what was done.
        :raises DeviceUnavailable: no claim has this name, something needs the
            claim, or cleaning failed.
        """
        found = [c for c in self._holdings.all()
                 if name in (c.uuid, c.handle.address)]
        offered = self._inventory.table.offered()
        waiting = [offer.claim for offer in offered.all()
                   if offer.claim and offer.has(holds.Kind.WAITING)
                   and name in (offer.claim.uuid, offer.handle.address)]
        if waiting:
            return self._release_waiting(waiting)
        if not found:
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {text.printable(name)}: '
                f'name a handle that nova-accel claims shows.')
        with self._servers.held(found[0].instance_uuid):
            proof = [line for claim in self._holdings.now(found)
                     for line in self._proof(claim)]
            self._releases.release_to_the_end(found)
        return '\n'.join(proof + [
            f'{c.handle.address} is clean and free.' for c in found])

    def _release_waiting(self, waiting):
        """Offer handles again that waited for the operator."""
        self._holdings.returned(waiting)
        self._publisher.show_devices(waiting)
        return '\n'.join(
            f'{c.handle.address} waited for you, and is free.'
            for c in waiting)

    def _proof(self, claim):
        """Return sentences with the evidence that a claim is abandoned.

        :raises DeviceUnavailable: something needs the claim.
        """
        address, server = claim.handle.address, claim.holder
        if claim.state is model.ClaimState.DELETING:
            return [f'Server {server} has released {address} before.']

        def refuse(what, then):
            raise exception.DeviceUnavailable(
                f'The claim of server {server} on {address} cannot be '
                f'released, because {what}: {then}.')
        for guest, devices in sorted(self._cloud.guest_devices().items()):
            if address in devices and (guest, claim.role) != (
                    # until a resize is confirmed, the old guest is defined
                    claim.instance_uuid, model.Role.OLD):
                refuse(f'the guest of server {guest} has the device',
                       'delete or shelve the server')
        snapshot, failure = self._reconciler.ask([claim])
        if failure:
            raise failure
        if snapshot.has_guest(claim):
            refuse('libvirt has the guest of the server',
                   'delete or shelve the server')
        if snapshot.plugging:
            refuse('the server is being built', 'wait for that')
        if snapshot.is_allocated(claim):
            refuse('Placement has it allocated',
                   f'delete or shelve the server; where it does not exist, '
                   f'openstack resource provider allocation delete '
                   f'{claim.consumer_uuid}')
        if snapshot.open_moves:
            refuse('Nova may revert the resize of the server',
                   'confirm or revert it')
        if claim.role is model.Role.CURRENT and self._cloud.servers(
                [claim.instance_uuid]):
            refuse('Nova has the server on this host', 'delete or shelve it')
        return [f'No guest in libvirt has {address}, and none is of server '
                f'{server}.',
                f'Placement has allocated nothing of it to {server}.',
                *([f'Nova has no server {server} on this host.']
                  if claim.role is model.Role.CURRENT else ())]

    # Drill

    def drill(self, order: str) -> str:
        """Add a false finding to a disabled device for a while.

        :param order: address, a space, and the number of seconds.
        :returns: the expected effects, in one sentence.
        :raises DeviceUnavailable: the operator has not disabled the device, or
            the device has another finding.
        :raises InvalidRequest: the signal is off in [accel] health.
        """
        address, _, seconds = order.partition(' ')
        device, _ = identity.part(address, self._inventory.devices)
        mode = self._may_drill(device)
        with self._inventory.health.drilled(address):
            self._inventory.looks.background.start()
            time.sleep(float(seconds))
        self._inventory.looks.background.start()
        also = (', Placement and the owners of its servers'
                if mode is signals.Mode.ACT else '')
        return (f'{address} reported a false finding (signal {signals.DRILL}) '
                f'for {seconds} s, to the log, notifications, metrics{also}: '
                f'check that your alert arrived.')

    def _may_drill(self, device: model.Device) -> signals.Mode:
        """Check that a drill of a device is permitted. Return the mode of the
        signal ``drill``."""
        address = device.address
        if holds.Kind.DISABLED not in self._inventory.table.kinds(address):
            raise exception.DeviceUnavailable(
                f'A drill of {address} was asked for, and a server might get '
                f'it meanwhile, because the operator has not disabled it: '
                f'nova-accel disable {address} first.')
        known = self._inventory.health.conditions().get(address)
        if known is None or known.findings or (
                known.for_owner is not signals.State.OK):
            raise exception.DeviceUnavailable(
                f'A drill of {address} was asked for, and it is not well '
                f'({known.reason if known else "not read yet"}): name a '
                f'device that is.')
        mode = signals.modes()[signals.DRILL]
        if mode is signals.Mode.OFF:
            raise exception.InvalidRequest(
                f'A drill of {address} was asked for, and {signals.OPTION} has '
                f'it off: add {signals.DRILL}=observe or {signals.DRILL}=act '
                f'there, and restart nova-compute.')
        return mode


def _content(part):
    """Return the claim fields that describe the present content of a region.
    """
    if isinstance(part, model.Device):
        return {}
    return {'restore_function': part.function_uuid,
            'restore_bitstream': part.bitstream_id,
            'restore_origin': part.origin,
            'operators_bitstream': part.operators_bitstream}
