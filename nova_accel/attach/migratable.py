# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices whose state moves with the guest in a live migration."""

from collections.abc import Iterable
import dataclasses

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import readiness as device_readiness
from nova_accel import exception
from nova_accel.host import vfio
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request


@dataclasses.dataclass(eq=False)
class MigratableDevices:
    """Describes devices. In a live migration, the destination compares its
    devices with the devices of the source."""

    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _readiness: device_readiness.Readiness
    _accelerators: server_accelerators.Accelerators

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
