# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Guests that QEMU has paused because of an error.

An uncorrectable PCIe error makes QEMU pause each guest that has the device or
a VF of it, for good (vfio_err_notifier_handler() in hw/vfio/pci.c:
RUN_STATE_INTERNAL_ERROR). libvirt shows such a guest as paused for an unknown
reason, and each pause that was asked for with its reason
(qemuProcessHandleStop() in qemu_process.c). Nova shows its server ACTIVE
(_sync_instance_power_state() of ComputeManager). An error of KVM pauses a guest
in the same way: which of its devices was the cause, if one was, is not known.
"""

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import cloud as novas
from nova_accel.health import signals
from nova_accel import model

#: states of Nova in which a guest has to run (nova.compute.vm_states)
_RUN = ('active', 'rescued')


class Paused:

    def __init__(self, accelerators: server_accelerators.Accelerators,
                 cloud: novas.Cloud):
        self._accelerators = accelerators
        self._cloud = cloud
        self.background = accelerators.inventory.scanner.after_look(
            self.run, 'It is not known which guests QEMU has paused')

    def run(self) -> None:
        """Have the devices of such guests tell it; where that changes, look
        again at once."""
        inventory = self._accelerators.inventory
        if inventory.health.pause(self._found()):
            inventory.scanner.looks.start()

    def _found(self) -> dict[str, frozenset[str]]:
        """Address of a device -> its servers whose guests are paused."""
        found: dict[str, frozenset[str]] = {}
        if signals.modes()[signals.PAUSED] is signals.Mode.OFF:
            return found
        claims = [claim for claim in self._accelerators.holdings.all()
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
