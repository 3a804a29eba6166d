# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Describe the devices of a server to Nova, to its owner, and in a live
migration.

In a live migration with the state of devices, the destination compares its
devices with the devices of the source.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import re
import uuid

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import readiness as device_readiness
from nova_accel import exception
from nova_accel.host import vfio
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request
from nova_accel.store import chain

_CERTIFICATE = re.compile(
    f'accel{request.GROUP}:handover:[0-9]+:[0-9]+', re.ASCII)
#: number of devices of a server that get a certificate in its metadata, which
#: have at most 128 keys by default (Nova's quota metadata_items)
_MOST_CERTIFICATES = 16


@dataclasses.dataclass(eq=False)
class Descriptions:
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _readiness: device_readiness.Readiness
    _accelerators: server_accelerators.Accelerators

    def mediated_devices(self) -> set[str]:
        """Return the UUIDs of nova_accel's mediated devices, present or not."""
        found = [c.handle for c in self._holdings.all()]
        for device in self._inventory.devices.values():
            found += device.handles
        return {h.address for h in found if h.type is model.HandleType.MDEV}

    def metadata_changes(self, server: request.Server,
                         metadata: Mapping[str, str]) -> dict[str, str]:
        """Return changes to the metadata of a server that show its owner which
        function each group got, and which preferred traits the devices have.

        If the metadata have a key from an earlier flavor, and the present
        flavor has the same group, the key is corrected.

        :param metadata: present metadata of the server.
        :returns: ``accel<group>:function`` -> function id or function name, as
            the flavor lists it; ``accel<group>:prefer`` -> trait, or 'none'.
        """
        if not any(wanted.programs or wanted.prefer
                   for wanted in server.requests):
            return {}
        changes = {}
        for wanted, claims in server_holdings.by_request(
                server.requests, self._holdings.of(server.uuid)):
            changes.update(self._preference(wanted, claims, metadata))
            key = f'accel{wanted.group}:function'
            if not wanted.programs or not (
                    wanted.alternatives or key in metadata):
                continue
            _, region = self._inventory.find_held(claims[0])
            got = region and wanted.got(region)
            if got and metadata.get(key) != got:
                changes[key] = got
        return changes

    def certificates(self, server: request.Server,
                     metadata: Mapping[str, str]) -> dict[str, str | None]:
        """Return changes to the metadata that show the owner how each device
        was cleaned before the server got it.

        :param metadata: present metadata of the server.
        :returns: ``accel<group>:handover:<device>:<part>`` -> a part of
            chain.certificate(), of at most 255 characters, or None to remove
            the key of a device that the server had before.
        """
        found, numbers = {}, collections.Counter[str]()
        for claim in self._holdings.of(server.uuid)[:_MOST_CERTIFICATES]:
            numbers[claim.group] += 1
            device = self._inventory.devices.get(claim.device_address)
            one = device and self._holdings.vouching(
                device, claim.handle.address)
            if not one:
                continue
            text = chain.certificate(one)
            for part, at in enumerate(range(0, len(text), exception.FAULT), 1):
                found[f'accel{claim.group}:handover:{numbers[claim.group]}:'
                      f'{part}'] = text[at:at + exception.FAULT]
        gone = {key for key in metadata if _CERTIFICATE.fullmatch(key)
                } - found.keys()
        return {**dict.fromkeys(gone), **{
            key: text for key, text in found.items()
            if metadata.get(key) != text}}

    def _preference(self, wanted, claims, metadata):
        provider = self._inventory.shown.providers().get(
            self._inventory.shown.provider_of(claims[0]) or '')
        if not wanted.prefer or not provider:
            return {}
        key = f'accel{wanted.group}:prefer'
        got = wanted.preferred(provider.traits) or 'none'
        return {key: got} if metadata.get(key) != got else {}

    def numa_nodes(self, server_uuid: str) -> dict[str, int]:
        """Return the NUMA nodes of the devices of a server.

        :returns: address of a handle -> NUMA node of its device, if known.
        """
        devices = self._inventory.devices
        return {
            claim.handle.address: node
            for claim in self._holdings.of(server_uuid)
            if (device := devices.get(claim.device_address))
            and (node := device.numa_node) is not None}

    def roles(self, server_uuid: str) -> dict[str, tuple[str, ...]]:
        """Return the tags that describe the devices of a server to its guest.

        :returns: address of each PCI function -> group in the flavor, type of
            the device, and for an FPGA the name or id of the loaded function.
        """
        found = {}
        for claim in self._holdings.of(server_uuid):
            device = self._inventory.devices.get(claim.device_address)
            region = device.find_region(claim.region_index) if device else None
            found.update(dict.fromkeys(
                claim.handle.functions, tuple(filter(None, (
                    f'accel{claim.group}', device.type if device else '',
                    _function(region) if region else '')))))
        return found

    # Live migrations

    def of_claims(self, claims: Iterable[model.Claim],
                  ) -> list[model.MigratableDevice]:
        """Return descriptions of the devices of a server, on the source.

        :raises DeviceUnavailable: the state of a device cannot be moved.
        """
        claims = list(claims)
        for claim in claims:
            if claim.state is not model.ClaimState.BOUND:
                raise exception.DeviceUnavailable(
                    f'The guest may not have {claim.handle.address} as it '
                    f'needs it ({claim.error or claim.state.value}): reboot '
                    f'the server hard, and then migrate it.')
        return sorted(self._described(
            claim, self._inventory.devices.get(claim.device_address),
            claim.handle, claim.created_type) for claim in claims)

    def by_iommu(self, server_uuid: str) -> set[str]:
        """Return the addresses of a server's devices for which the IOMMU
        tracks writes to guest memory. QEMU must open them by iommufd."""
        devices = self._inventory.devices
        return {
            claim.handle.address for claim in self._holdings.of(server_uuid)
            if (device := devices.get(claim.device_address))
            and vfio.is_by_iommu(device.migrates_by)}

    def memory(self, server_uuid: str) -> int:
        """Return the known memory of the devices of a server, in MiB."""
        devices = self._inventory.devices
        return sum(
            type_.memory for claim in self._holdings.of(server_uuid)
            if (device := devices.get(claim.device_address))
            for type_ in device.creatable if type_.name == claim.created_type)

    def of_allocations(self, server: request.Server,
                       allocations: plan.Allocations,
                       ) -> list[model.MigratableDevice]:
        """Return descriptions of the devices that plug() would claim for a
        server, on the destination.

        :raises AcceleratorError: plug() would fail, or the state of a guest's
            device cannot be moved to one of these devices.
        """
        devices = self._inventory.devices
        return sorted(self._described(
            wanted, device, offer.handle,
            self._readiness.type_for(wanted, device))
            for wanted, offer
            in self._accelerators.would_get(server, allocations, moving=True)
            for device in [devices[offer.part[0]]])

    @staticmethod
    def _described(of, device, handle, created_type):
        """Return the description of a device whose state can move with a
        guest.

        :param of: the claim or the request of the device.
        :raises DeviceUnavailable: the state of the device cannot move.
        """
        if device is None or not device.migrates_by:
            raise exception.DeviceUnavailable(
                f'The state of {handle.address} cannot move with a guest in a '
                f'live migration ({device.stays if device else "it is gone"}): '
                f'migrate it cold.')
        return model.MigratableDevice(
            of.group, of.resource_class, handle.type.value,
            ' '.join(filter(None, (
                f'{device.vendor_id}:{device.product_id}', created_type,
                device.migrates_by))), handle.address)


def _function(region: model.Region) -> str:
    """Return the name of the function in a region, or else the id of the
    function, or '' for an empty region."""
    return region.function_name or (
        str(uuid.UUID(region.function_uuid)) if region.function_uuid else '')
