# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whether a handle is clean is a fact of the device, and not of the policy at
its last release.

What was released under the policies none or reset has a row in the table
``unclean`` of the store until it is cleaned. While the policy is the same, the
handle is given on as it is. Once [accel] handover demands more, it is given to
no server, and gets a claim of no server that is being released: it is cleaned
as after any server, tried again, and fenced where that fails.
"""

from collections.abc import Iterator

from oslo_utils import uuidutils

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel.drivers import handover
from nova_accel import inventory as host_inventory
from nova_accel.inventory import providers
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

LOG = logging.getLogger(__name__)
Policy = handover.Policy


class Unclean:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 publisher: publishing.Publisher, cloud: novas.Cloud):
        self._inventory = inventory
        self._holdings = holdings
        self._publisher = publisher
        self._cloud = cloud

    def handles(self) -> set[model.AttachHandle]:
        """Handles that are given to no server before they are cleaned."""
        return {handle for _, _, handle in self._found()}

    def _found(self) -> Iterator[tuple[
            model.Device, int | None, model.AttachHandle]]:
        """(device, region index, handle) of what its policy has cleaned now.
        """
        rows = self._holdings.unclean()
        if not rows:
            return
        for device in self._inventory.devices.values():
            mine = [row for row in rows
                    if row.means(device, device.address)]
            if not mine or device.health is model.Health.GONE:
                continue
            for index, handle in _parts(device):
                policy = handover.policy(device, handle.address)
                if any(server_holdings.handle_at(row, device.address)
                       == handle.address and (
                        policy is Policy.CLEAR or policy is Policy.RESET
                        and row.policy == Policy.NONE.value) for row in mine):
                    yield device, index, handle

    def run(self) -> None:
        """Have cleaned what has to be; a handle that a server has is cleaned
        after that server."""
        held = {claim.handle for claim in self._holdings.all()}
        shown = providers.by_part(self._inventory.providers())
        claims = [
            claim_of_none(self._inventory, device, index, handle,
                          shown[device.address, index])
            for device, index, handle in self._found()
            if handle not in held and (device.address, index) in shown]
        if not claims:
            return
        with self._inventory.claiming:
            taken = {claim.handle for claim in self._holdings.all()}
            claims = [c for c in claims if c.handle not in taken]
            self._holdings.settle(claims=claims)
        for claim in claims:
            LOG.warning('%s of %s was given back by its last server while '
                        '%s had less done to it than now: it is cleaned '
                        'before it is offered', claim.handle.address,
                        claim.device_address, handover.OPTION)
        self._publisher.show_devices(self._cloud.admin_context(), claims)


def _parts(device):
    for handle in device.handles:
        yield None, handle
    for region in device.regions:
        for handle in region.handles:
            yield region.index, handle


def claim_of_none(inventory: host_inventory.Inventory, device: model.Device,
                  index: int | None, handle: model.AttachHandle,
                  provider_uuid: str, **fields) -> model.Claim:
    """Return a claim of no server, with which a handle is cleaned as after one.

    :param fields: others of model.Claim.
    """
    return model.Claim(
        uuid=uuidutils.generate_uuid(), instance_uuid='', consumer_uuid='',
        role=model.Role.CURRENT, group='', provider_uuid=provider_uuid,
        resource_class=naming.resource_class(device.type),
        device_address=device.address, region_index=index,
        **inventory.identity_for_claim(device.address), handle=handle,
        state=model.ClaimState.DELETING, prepared=True, **fields)
