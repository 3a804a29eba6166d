# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Migrate servers away from devices that are gone or have failed.

[accel] heal sets the kind of migration. The lasting state is only in Nova's
entries of the migrations that the user of [service_user] has begun. Hence
nothing is lost if nova-compute ends. For example, a GPU falls off the bus. At
its next look (inventory.looks), the host takes one of the slots of the day,
writes ``accel:healing`` into the metadata of the server, and asks Nova for a
migration. A later look confirms the migration, and writes that it has ended.

=======================  ====================================================
At most                  Decided by
=======================  ====================================================
heal_per_day in a cloud  traits of Placement, one for each slot of a day (UTC):
                         only the host that creates a trait gets its slot
one at a time per host   Nova's entries: one of this host has not ended
once for one cause       Nova's entries: the newest of the server
until the first failure  Nova's entries of the last day, of all hosts
=======================  ====================================================

If nova-compute is killed after it took a slot, the slot stays in use.
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import time
import typing

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import conf
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.health import watch
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel import text

CONF = conf.CONF
LOG = logging.getLogger(__name__)

EVENT = 'accel.server.healing'
#: beginning of the traits of slots; the date, and a number from 1 up, follow
SLOT = 'CUSTOM_ACCELERATOR_HEALING_'
_BAD = signals.State.GONE, signals.State.QUARANTINED
_OFF, _OBSERVE, _LIVE = 'off', 'observe', 'live'
#: statuses of Nova's migrations (nova.objects.fields.MigrationStatus) that have
#: failed; have ended otherwise; wait for our confirmation
_FAILED = 'error', 'failed', 'cancelled'
_ENDED = 'completed', 'confirmed', 'reverted', 'done'
_TO_CONFIRM = 'finished'
_BEGUN = 'migrates'
#: hosts with room of which Nova is asked whether their nova-compute is up
_MOST_HOSTS = 20


@dataclasses.dataclass(eq=False)
class Healing:
    _cloud: novas.Cloud
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings

    def __post_init__(self) -> None:
        #: whether a migration of this host may have to be followed; None
        #: before the first run
        self._follows: bool | None = None
        #: address -> time.monotonic() since which the device is bad
        self._since: dict[str, float] = {}
        #: why Nova has refused a migration; '' if it has not
        self._refused = ''
        #: servers whose migration Nova has accepted, and that is not announced
        self._begun: set[str] = set()
        #: ids of Nova's entries that are announced
        self._announced: set[int] = set()
        self._once = logging.Once()
        self.background = limited.Background(
            self.run, 'Servers of failed devices are not migrated')

    def run(self) -> None:
        """Continue the migration of this host, or begin one.

        :raises AcceleratorError: Nova or Placement does not answer. The next
            call of run() continues.
        """
        mode = CONF.accel.heal
        if self._follows is None:
            self._follows = mode not in (_OFF, _OBSERVE)
        servers = {} if mode == _OFF else self._concerned()
        if not (servers or self._follows):
            return
        rows = self._cloud.migrations(since=text.now(1))
        if mode != _OBSERVE:
            self._follows = self._follow(rows)
        failed = next((row for row in rows if row['status'] in _FAILED), None)
        stopped = self._refused or failed and (
            f'the migration of server {failed["instance_uuid"]} has failed')
        found = self._cloud.servers(sorted({*servers, *self._begun}))
        # without a server here and an entry: it was deleted
        self._begun &= {server.uuid for server in found}.union(
            row['instance_uuid'] for row in rows)
        self._announced &= {row['id'] for row in rows}
        # Nova's entry of a migration comes after the task
        self._follows |= any(server.task_state for server in found)
        for server in found:
            if self._follows:
                # one at a time; a later look goes on
                return
            if server.uuid in self._begun:
                self._refused = (f'Nova has not begun the migration of server '
                                 f'{server.uuid} that it has accepted')
                self._end(server.uuid, False, self._refused)
                return
            why = stopped or self._obstacle(server, mode)
            if not why and mode != _OBSERVE:
                why = self._begin(server, mode, servers[server.uuid])
            if why or mode == _OBSERVE:
                self._report(server.uuid, servers[server.uuid], why)
            if why and mode != _OBSERVE and server.metadata.get(
                    naming.HEALING_KEY, '').startswith(_BEGUN):
                # a process was killed before it asked Nova
                self._cloud.set_metadata(
                    server.uuid, naming.HEALING_KEY, _not_migrated())

    def _report(self, uuid: str, device: str, why: str) -> None:
        """Log and notify once why a server is not migrated. Without a reason,
        report that only [accel] heal = observe prevents the migration."""
        said = (f'is not migrated, because {why}' if why
                else 'would be migrated now ([accel] heal = observe)')
        if not self._once.has((uuid, said)):
            self._notify(uuid, device, 'kept' if why else 'observed', why)
        self._once.log((uuid, said), LOG.warning,
                       'Server %s has device %s, which is gone or has failed, '
                       'and %s', uuid, device, said)

    def _concerned(self) -> dict[str, str]:
        """Return the servers to migrate: server -> address of its device that
        has been bad for a whole [accel] discovery_interval. If several
        devices, and half of their kind, are bad, none counts: the host may be
        the cause."""
        kinds: collections.Counter = collections.Counter()
        bad: dict[tuple, set[str]] = collections.defaultdict(set)
        found, since = self._inventory.devices, {}
        for address, known in self._inventory.health.conditions().items():
            if device := found.get(address):
                kind = device.driver, device.ids
                kinds[kind] += 1
                if known.for_owner in _BAD:
                    bad[kind].add(address)
                    since[address] = self._since.get(
                        address, time.monotonic())
        self._since = since
        end = time.monotonic() - CONF.accel.discovery_interval
        concerned = {address for address, began in since.items()
                     if began <= end}
        for kind, addresses in bad.items():
            if watch.may_be_the_host(len(addresses), kinds[kind]):
                concerned -= addresses
                self._once.log(
                    ('breaker', kind), LOG.error, 'No server is migrated away '
                    'from %d of %d devices of the driver %s that are gone or '
                    'have failed: it may be the host', len(addresses),
                    kinds[kind], kind[0])
        return {
            claim.instance_uuid: claim.device_address
            for claim in self._holdings.all()
            if claim.role is model.Role.CURRENT
            and claim.state is not model.ClaimState.DELETING
            and claim.device_address in concerned}

    # Of migrations that have begun

    def _follow(self, rows: Sequence[Mapping[str, typing.Any]]) -> bool:
        """Confirm and announce migrations away from this host.

        :param rows: Nova's entries of the last day, of all hosts.
        :returns: whether a migration has not ended.
        """
        newest = {row['instance_uuid']: row
                  for row in sorted(rows, key=lambda row: row['id'])}
        goes_on = False
        for uuid, row in newest.items():
            if row['source_compute'] != self._cloud.host:
                continue
            if row['status'] in (*_ENDED, *_FAILED):
                self._announce(row)
                continue
            goes_on = True
            if (row['status'], row['migration_type']) == (
                    _TO_CONFIRM, 'migration'):
                self._cloud.ask_nova(f'/servers/{uuid}/action',
                                     {'confirmResize': None})
        return goes_on

    def _announce(self, row: Mapping[str, typing.Any]) -> None:
        if row['id'] in self._announced:
            return
        uuid = row['instance_uuid']
        # without a server: it was deleted
        with contextlib.suppress(exception.NotThere):
            metadata = self._cloud.ask_nova(
                f'/servers/{uuid}')['server']['metadata']
            # the owner can remove the key
            if uuid in self._begun or metadata.get(
                    naming.HEALING_KEY, '').startswith(_BEGUN):
                self._end(uuid, row['status'] not in _FAILED)
        self._begun.discard(uuid)
        self._announced.add(row['id'])

    def _end(self, uuid: str, is_well: bool, why: str = '') -> None:
        self._cloud.set_metadata(uuid, naming.HEALING_KEY, (
            f'migrated: {text.now()}' if is_well else _not_migrated()))
        self._notify(uuid, '', 'end' if is_well else 'error', why)
        if not is_well:
            LOG.error('Server %s could not be migrated away from a device that '
                      'is gone or has failed%s: no more are migrated, see '
                      'openstack server event list', uuid, why and f' ({why})')
        self._begun.discard(uuid)

    def _notify(self, uuid: str, device: str, state: str, why: str) -> None:
        self._cloud.notify(EVENT, {
            'server': uuid, 'device': device, 'state': state, 'reason': why,
            'heal': CONF.accel.heal})

    # Of those that begin

    def _obstacle(self, server: novas.Instance, mode: str) -> str:
        """Return why a server is not migrated now, as a clause, or '' if it
        may be."""
        entry = self._cloud.ask_nova(f'/servers/{server.uuid}')['server']
        live = mode == _LIVE
        states = ('active',) if live else ('active', 'stopped')
        if server.vm_state not in states:
            return f'it is {server.vm_state}, and not {" or ".join(states)}'
        if entry.get('locked'):
            return 'it is locked'
        if live and not (server.accelerators.detaches
                         or server.accelerators.takes_along):
            return f'its flavor has no {request.LIVE_MIGRATION_KEY}'
        newest = max(self._cloud.migrations(server=server.uuid),
                     key=lambda row: row['id'], default=None)
        if newest and newest['is_own'] and (
                newest['source_compute'] == self._cloud.host):
            return 'it was tried before'
        given = self._cloud.allocations(
            self._cloud.admin_context(), server.uuid)
        return '' if self._has_room(server.accelerators.extra_specs, given) \
            else 'no other host has room for it: see nova-accel fits'

    def _has_room(self, specs: Mapping[str, str],
                  given: Mapping[str, Mapping]) -> bool:
        """Return whether Nova would find another host for a server.

        :param specs: extra specs of the server.
        :param given: allocations of the server, by provider.
        """
        groups = request.groups(specs)
        plain = groups.get('', request.Group({}))
        groups[''] = dataclasses.replace(plain, resources={**{
            name: amount for found in given.values()
            for name, amount in found['resources'].items()
            if not naming.is_accelerator_class(name)}, **plain.resources})
        hosts = self._cloud.hosts_for(groups, specs.get('group_policy'))
        for uuid in sorted(hosts - given.keys())[:_MOST_HOSTS]:
            # of a host that was removed, only the provider may be left
            with contextlib.suppress(exception.NotThere):
                node = self._cloud.ask_nova(
                    f'/os-hypervisors/{uuid}')['hypervisor']
                if (node['state'], node['status']) == ('up', 'enabled'):
                    return True
        return False

    def _begin(self, server: novas.Instance, mode: str, device: str) -> str:
        """Begin a migration of a server. Return '', or as a clause why no
        migration has begun."""
        if not self._take_slot():
            return (f'{CONF.accel.heal_per_day} migrations were begun today, '
                    f'as many as [accel] heal_per_day allows')
        self._cloud.set_metadata(
            server.uuid, naming.HEALING_KEY,
            f'{_BEGUN} ({mode}), because an accelerator has failed: '
            f'{text.now()}')
        self._notify(server.uuid, device, 'start', '')
        LOG.warning('Server %s is migrated (%s), because its device %s is gone '
                    'or has failed', server.uuid, mode, device)
        self._follows = True
        try:
            self._cloud.ask_nova(f'/servers/{server.uuid}/action', {
                'os-migrateLive': {'host': None, 'block_migration': 'auto'}
            } if mode == _LIVE else {'migrate': {'host': None}})
            self._begun.add(server.uuid)
        except exception.InvalidRequest as error:
            self._refused = exception.clause(error)
            self._end(server.uuid, False, self._refused)
        return ''

    def _take_slot(self) -> bool:
        """Take one of today's slots. Return whether a slot was free."""
        day, before = (text.now(days)[:10].replace('-', '') for days in (0, 1))
        taken = self._cloud.known_traits(SLOT)
        for name in taken:
            if name.removeprefix(SLOT)[:len(day)] < before:
                self._cloud.remove_trait(name)
        return any(
            name not in taken and self._cloud.make_trait(name)
            for name in (f'{SLOT}{day}_{number}' for number
                         in range(1, CONF.accel.heal_per_day + 1)))


def _not_migrated() -> str:
    return f'not migrated, and the operator is informed: {text.now()}'
