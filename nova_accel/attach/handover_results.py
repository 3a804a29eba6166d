# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Write the results of hand-overs into the journal and as holds.

For example, a disk has the policy reset and its driver erases it by a reset:
the result is clean. A reset does not clear everything in a GPU: with the same
policy, its result is "reset only", and the handle counts as unclean if the
operator configures a stricter policy later. With the policy operator the claim
waits until the operator releases it.
"""

from nova_accel.attach import holdings as server_holdings
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import values

LOG = logging.getLogger(__name__)


class HandoverResults:
    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings):
        self._inventory = inventory
        self._holdings = holdings

    def write(self, claim: model.Claim, device: model.Device,
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
        self.note(claim, device, done or 'none', result)
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

    def note(self, claim: model.Claim, device: model.Device, method: str,
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
