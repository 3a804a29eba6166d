# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Describe the devices of a server to Nova and to its owner."""

import collections
from collections.abc import Mapping
import re
import uuid

from nova_accel.attach import holdings as server_holdings
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request
from nova_accel.store import chain

_CERTIFICATE = re.compile(
    f'accel{request.GROUP}:handover:[0-9]+:[0-9]+', re.ASCII)
#: number of devices of a server that get a certificate in its metadata, which
#: have at most 128 keys by default (Nova's quota metadata_items)
_MOST_CERTIFICATES = 16


class Descriptions:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings):
        self._inventory = inventory
        self._holdings = holdings

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


def _function(region: model.Region) -> str:
    """Return the name of the function in a region, or else the id of the
    function, or '' for an empty region."""
    return region.function_name or (
        str(uuid.UUID(region.function_uuid)) if region.function_uuid else '')
