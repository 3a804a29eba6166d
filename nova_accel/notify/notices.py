# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Notifications about devices and their use, on Nova's notifier.

They are sent after each look (inventory.looks).

One notification is sent for each change of a device's state or signals, except
for a change between OK and UNKNOWN, which servers cause. After a start of
nova-compute, a notification is sent for each device that is neither OK nor
UNKNOWN.

Each use of store.uses has the events accel.claim.begin, accel.claim.exists
every hour, and accel.claim.end. Each event contains the total seconds of the
use so far. Hence sums stay correct if an event is lost, or sent twice because
nova-compute was killed.
"""

from collections.abc import Iterator, Mapping
import dataclasses

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values

#: event type, in the form of Nova's: action and phase
EVENT = 'accel.device.state'
REPORT = 'accel.device.report'
WORK = 'accel.device.maintenance'
#: seconds of a use after which accel.claim.exists is sent again
EXISTS_SECONDS = 3600

_State = signals.State
_WELL = (_State.OK, _State.UNKNOWN)


class Usage:

    def __init__(self, cloud: novas.Cloud, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings):
        self._cloud = cloud
        self._store = store
        self._inventory = inventory
        self._holdings = holdings
        self._is_resumed = False

    def resume(self) -> None:
        """Count the time in which nova-compute did not run, for servers that
        are still on this host.

        If a server was evacuated or deleted meanwhile, its use ends at the
        last count. Called at the start before claims are released.
        """
        claims = [claim for claim in self._holdings.all() if claim.is_use]
        uuids = {claim.instance_uuid for claim in claims}
        here = {server.uuid for server in (
            self._cloud.servers(uuids) if uuids else ())}
        self._store.count_uses(frozenset(
            claim.uuid for claim in claims
            if claim.instance_uuid not in here))
        self._is_resumed = True

    def count(self) -> list[values.Use]:
        """Add the seconds since the last count to all uses, and return the
        uses from ClaimStore.count_uses()."""
        if not self._is_resumed:
            self.resume()
        return self._store.count_uses()

    def run(self) -> None:
        """Count the use, and send the events that are due."""
        sent: list[tuple[values.Use, str]] = []
        try:
            for use in self.count():
                for event in due(use):
                    self._cloud.notify(
                        f'accel.claim.{event}', self._payload(use))
                    sent.append((use, event))
        finally:
            self._store.note_reported(sent)

    def _payload(self, use: values.Use) -> dict[str, object]:
        device = self._inventory.devices.get(use.device)
        return {
            'claim': use.claim, 'server': use.server, 'project': use.project,
            'flavor': use.flavor, 'type': use.type, 'product': use.product,
            'device': use.device, 'part': use.part,
            # the name of a type does not show its memory
            'memory': next((kind.memory for kind in (
                device.creatable if device else ()) if kind.name == use.part),
                0),
            'since': use.since, 'until': use.until,
            'seconds': round(use.seconds, 3)}


def due(use: values.Use) -> Iterator[str]:
    """Yield the events of a use that must be sent now."""
    if not use.sent:
        yield 'begin'
    if not use.counted:
        yield 'end'
    elif use.seconds - use.reported >= EXISTS_SECONDS:
        yield 'exists'


class Notices:

    def __init__(self, cloud: novas.Cloud,
                 store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 usage: Usage):
        self._cloud = cloud
        self._store = store
        self._inventory = inventory
        self._holdings = holdings
        self._usage = usage
        #: address -> state and signals in the last notification
        self._sent: dict[str, tuple[signals.State, tuple[str, ...]]] = {}
        #: address -> payload about planned work in the last notification
        self._work: dict[str, dict[str, object]] = {}
        #: number of the newest report of an owner that was sent, or that
        #: existed when this process began
        self._reported = max(
            (row.number for row in store.owner_reports()), default=0)
        self.background = limited.Background(
            self.run, 'Notifications about devices are not sent')

    def run(self) -> None:
        """Send the use of devices, reports of owners, planned work and changes
        of states. If a call fails, the next call sends the rest."""
        self._usage.run()
        found = self._inventory.devices
        for report in self._store.owner_reports(self._reported):
            device = found.get(report.device)
            self._cloud.notify(REPORT, {
                **(self._about(device) if device else {}),
                **dataclasses.asdict(report)})
            self._reported = report.number
        self._send_work(found)
        if signals.is_off():
            return
        now = self._inventory.health.conditions()
        for address in self._sent.keys() - now.keys():
            del self._sent[address]
        for address, condition in now.items():
            before = self._sent.get(address, (_State.OK, ()))
            new = condition.state, tuple(sorted({
                finding.signal for finding in condition.findings}))
            if new != before and not (
                    condition.state in _WELL and before[0] in _WELL):
                device = found.get(address)
                if device is None:
                    continue
                self._cloud.notify(EVENT, self._payload(
                    device, before[0], condition, new[1]))
            self._sent[address] = new

    def _send_work(self, found: Mapping[str, model.Device]) -> None:
        """Send planned work that is new, changed, canceled, or has begun."""
        now = {address: {
            **self._about(found[address]), 'at': row.at, 'reason': row.reason,
            'state': 'planned' if row.is_planned else 'due',
            'servers': self._servers(address)}
            for address, row in self._inventory.table.planned_work().items()
            if address in found}
        for address, payload in now.items():
            before = self._work.get(address, {})
            if any(before.get(name) != payload[name]
                   for name in ('at', 'reason', 'state')):
                self._cloud.notify(WORK, payload)
                self._work[address] = payload
        for address in self._work.keys() - now.keys():
            self._cloud.notify(WORK, {
                **self._work[address], 'state': 'cancelled',
                'servers': self._servers(address)})
            del self._work[address]

    def _servers(self, address: str) -> list[str]:
        """Return the servers that have a device or a part of it."""
        return sorted({
            claim.instance_uuid for claim in self._holdings.all()
            if claim.device_address == address
            and claim.role is model.Role.CURRENT})

    def _about(self, device: model.Device) -> dict[str, object]:
        return {
            'device': device.address, 'serial': device.serial,
            'type': device.type, 'vendor': device.vendor,
            'product': device.product, 'driver': device.driver,
            'providers': sorted(
                provider.name for provider
                in self._inventory.shown.providers().values()
                if device.address in provider.addresses),
        }

    def _payload(self, device: model.Device, before: signals.State, condition,
                 found: tuple[str, ...]) -> dict[str, object]:
        return {
            **self._about(device),
            'state': condition.state.value, 'old_state': before.value,
            'reason': condition.reason,
            'signals': [*found],
            'servers': self._servers(device.address),
        }
