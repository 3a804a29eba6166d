# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Report guests that QEMU has paused because of an error.

An uncorrectable PCIe error makes QEMU pause each guest that has the device or
a VF of it, permanently (vfio_err_notifier_handler() in hw/vfio/pci.c:
RUN_STATE_INTERNAL_ERROR). For such a pause libvirt reports the reason
"unknown", but for a requested pause the actual reason (qemuProcessHandleStop()
in qemu_process.c). Nova shows the paused server as ACTIVE
(_sync_instance_power_state() of ComputeManager). An error of KVM pauses a
guest in the same way; whether a device caused it is unknown.
"""

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import model

#: Nova's states of servers whose guest has to run (nova.compute.vm_states)
_RUN = ('active', 'rescued')


class Paused:

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self.background = limited.Background(
            self.run, 'Guests that QEMU has paused cannot be detected')

    def run(self) -> None:
        """Set the signal PAUSED on the devices of paused guests. If it is set
        on other devices than before, start a look (inventory.looks)."""
        if self._inventory.health.pause(self._found()):
            self._inventory.looks.background.start()

    def _found(self) -> dict[str, frozenset[str]]:
        """Return the servers with paused guests: address of a device -> UUIDs.
        """
        found: dict[str, frozenset[str]] = {}
        if signals.modes()[signals.PAUSED] is signals.Mode.OFF:
            return found
        claims = [claim for claim in self._holdings.all()
                  if claim.role is model.Role.CURRENT]
        guests = self._cloud.paused({claim.instance_uuid for claim in claims})
        servers = {server.uuid for server in (
            self._cloud.servers(guests) if guests else ())
            if server.task_state is None and server.vm_state in _RUN}
        for claim in claims:
            if claim.instance_uuid in servers:
                found[claim.device_address] = found.get(
                    claim.device_address, frozenset()) | {claim.instance_uuid}
        return found
