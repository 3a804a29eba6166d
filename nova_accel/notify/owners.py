# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Show owners the health of their accelerators in the metadata of servers.

If a device of a group is unhealthy, or is not in its guest yet, the owner of
the server reads ``accel<group>:health``: the state, and the number of devices
in it, for example ``degraded: 1 of 2``. The key is removed when all devices are
healthy again. The value contains neither the device of the host, nor the
reason, nor other servers, because these are for the operator.

If the operator will drain a device (nova-accel drain --at), the owner reads
``accel<group>:maintenance``: the time, the number of devices, and the
operator's reason, for example
``2026-12-01T06:00:00+00:00, 1 of 8: new firmware``.

An uncorrectable PCIe error makes QEMU pause each guest that has the device or
a VF of it, permanently (vfio_err_notifier_handler() in hw/vfio/pci.c:
RUN_STATE_INTERNAL_ERROR). For such a pause libvirt reports the reason
"unknown", but for a requested pause the actual reason (qemuProcessHandleStop()
in qemu_process.c). Nova shows the paused server as ACTIVE
(_sync_instance_power_state() of ComputeManager). An error of KVM pauses a
guest in the same way; whether a device caused it is unknown.
"""

from collections.abc import Mapping

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import reconcile
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import naming
from nova_accel import text

_State = signals.State
#: state -> the word for owners
_WORDS = {_State.SUSPECT: 'degraded', _State.QUARANTINED: 'failed',
          _State.GONE: 'gone'}
#: word for a device that is yet to be attached to its running guest
#: (attach.reconcile)
_OUT = 'on its way'
_NONE: Mapping[str, str] = {}
_PAUSED = 'paused by an error: hard reboot the server'
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


class Owners:

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 reconciler: reconcile.Reconciler):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self._reconciler = reconciler
        #: server -> keys of nova_accel in its metadata
        self._written: dict[str, Mapping[str, str]] = {}
        self.background = limited.Background(
            self.run, 'The health of accelerators cannot be written into '
            'the metadata of servers')

    def run(self) -> None:
        """Write the metadata keys that have changed.

        Metadata of servers with such a key are read each time, because the
        owner may have changed them. Metadata of other servers are read only if
        their keys changed.
        """
        now = self._now()
        changed = {server for server, keys in now.items()
                   if keys or self._written.get(server) != keys}
        changed |= {server for server in self._written.keys() - now.keys()
                    if self._written[server]}
        found = {server.uuid: server for server
                 in (self._cloud.servers(changed) if changed else ())}
        for uuid in sorted(changed):
            keys = now.get(uuid, _NONE)
            if uuid in found and found[uuid].task_state:
                # Nova works on the server, and would overwrite its metadata
                continue
            if uuid in found:
                self._write(found[uuid], keys)
            self._written[uuid] = keys
        self._written = {server: keys for server, keys in self._written.items()
                         if server in now or keys}

    def _now(self) -> dict[str, dict[str, str]]:
        """Return the keys that servers must have in their metadata now: UUID
        of the server -> key -> text."""
        inventory, out = self._inventory, self._reconciler.out
        conditions = inventory.health.conditions()
        groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
        servers: dict[str, dict[str, str]] = {}
        work = inventory.table.planned_work()
        drained: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for claim in self._holdings.all():
            if (claim.role is not model.Role.CURRENT
                    or claim.state is model.ClaimState.DELETING):
                continue
            servers.setdefault(claim.instance_uuid, {})
            known = conditions.get(claim.device_address)
            state = known.for_owner if known else _State.OK
            groups.setdefault((claim.instance_uuid, claim.group), []).append((
                state.rank if state in _WORDS else -1,
                _WORDS.get(state, _OUT if claim.uuid in out else '')))
            if row := work.get(claim.device_address):
                drained.setdefault((claim.instance_uuid, claim.group), [
                    ]).append((row.at, row.reason))
        for (server, group), rows in drained.items():
            at, why = min(rows)
            servers[server][naming.maintenance_key(group)] = text.shortened(
                f'{at}, {len(rows)} of {len(groups[server, group])}: {why}',
                exception.FAULT)
        paused = (inventory.health.paused() if signals.modes()[signals.PAUSED]
                  is signals.Mode.ACT else ())
        for (server, group), found in groups.items():
            worst = max(found)
            said = [f'{worst[1]}: {found.count(worst)} of {len(found)}'
                    ] if worst[1] else []
            if server in paused:
                said.append(_PAUSED)
            if said:
                servers[server][naming.health_key(group)] = '; '.join(said)
        return servers

    def _write(self, server: novas.Instance, keys: Mapping[str, str]) -> None:
        written = set(filter(naming.is_for_owner, server.metadata))
        for key in sorted(written | keys.keys()):
            if server.metadata.get(key) != keys.get(key):
                self._cloud.set_metadata(server.uuid, key, keys.get(key))
