# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel discover: show what nova-compute would report for this host."""

import collections
import contextlib
import dataclasses
import json
import traceback

from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel import inventory
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel.inventory import offers
from nova_accel.inventory import shown
from nova_accel import machine
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store

CONF = conf.CONF

_OK = 'ok'
#: kinds of holds that only nova-compute can detect
_NOT_SEEN = frozenset((
    holds.Kind.RECOVERING, holds.Kind.CONFLICT, holds.Kind.IN_GUEST,
    holds.Kind.IN_USE, holds.Kind.UNHEALTHY, holds.Kind.MISPLACED,
    holds.Kind.OWNER_UNKNOWN, holds.Kind.RETURNED, holds.Kind.UNALLOCATED,
    holds.Kind.SUSPECT))
_LONG_COLUMNS = ('Provider', 'NUMA', 'Resource class', 'Total', 'Reserved',
                 'Handles', 'Traits', 'Health')


class Discover(output.Lister):
    """Show the accelerators that the enabled drivers find on this host.

    Prints a row for each device and FPGA region: its type, its function, how
    many of its handles are in use, and the servers that have them, from the
    claim store of nova-compute. With --long, prints a row for each resource
    provider: its inventory in Placement, its handles and traits. With --long
    -f json, prints the devices themselves by PCI address. If a driver failed,
    devices of the other drivers are shown, and the exit status is 1. If no
    driver is enabled, all installed drivers are used, and stderr has the lines
    of nova.conf that offer their devices. Nothing is written, not even the
    state of a simulated host.
    """

    COLUMNS = ('Device', 'What', 'Function', 'Total', 'Used', 'Held by',
               'Health')
    STACKS = {'Device': ('{Device}',), 'What': ('{What}', '{Function}'),
              'Used': ('{Used} of {Total}',), 'Held by': ('{Held by}',),
              'Health': ('{Health}',)}

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument(
            '--long', action='store_true',
            help='show resource providers, with handles and traits')
        parser.add_argument(
            '--simulated-host', metavar='FILE',
            help='show the host that this file describes, in place of '
                 '[accel] simulated_host; no server can start with its '
                 'devices, because libvirt refuses them')
        configuration.add_driver_argument(parser)
        return parser

    def take_action(self, parsed_args):
        # first: --driver reads the configuration, which is overridden below
        known = self._known(parsed_args)
        kernel = _configure(parsed_args)
        self._is_offer = not CONF.accel.enabled_drivers
        if self._is_offer:
            CONF.set_override('enabled_drivers', drivers.installed(),
                              group='accel')
        found = self._discover(known, kernel)
        self._offered = self._offers(found, known)
        self._devices = found.devices
        self.is_search = bool(parsed_args.drivers)
        self.nothing = (
            f'No device is found by the drivers '
            f'{", ".join(CONF.accel.enabled_drivers)}: enable the driver of '
            f'your card, or pci with a rule of [accel] pci_devices.')
        if self._is_offer and self._devices:
            self.app.stderr.write(self._offer())
        if parsed_args.long:
            self.STACKS = {}
            return _LONG_COLUMNS, self._providers(found)
        held = collections.defaultdict(list)
        for claim in known.claims() if known else ():
            held[claim.device_address].append(claim)
        rows: list[tuple] = []
        gone = self._gone(known)
        for address in sorted({*gone, *self._devices}):
            # None: no store shows which servers have it
            mine = held[address] if known else None
            if address in self._devices:
                rows += self._rows_of(self._devices[address], mine)
            else:
                device, hold = gone[address]
                rows.append(self._row_of_gone(device, hold, mine))
        return self.COLUMNS, rows

    def produce_output(self, parsed_args, column_names, data):
        if parsed_args.long and parsed_args.formatter == 'json':
            self.note_empty(not self._devices)
            json.dump({address: {**device.as_dict(),
                                 'holds': self._holds_of(device)}
                       for address, device in sorted(self._devices.items())},
                      self.app.stdout, indent=2)
            self.app.stdout.write('\n')
        else:
            super().produce_output(parsed_args, column_names, data)

    def _offer(self):
        """Return lines of nova.conf that offer the devices of this host."""
        found = self._devices.values()
        return '\n'.join((
            'No driver is enabled. To offer these devices, write into '
            'nova.conf:', '[accel]', 'enabled_drivers = '
            + ','.join(sorted({device.driver for device in found})), *sorted({
                f'include_devices = vendor={device.vendor_id} '
                f'product={device.product_id}' for device in found
                if self._loaded[device.driver].NEEDS_RULE}), ''))

    def _known(self, parsed_args):
        """Return a copy of the claim store. Return None if it cannot be read,
        or if a simulated host is shown, which the store is not about."""
        if parsed_args.simulated_host and not parsed_args.store:
            return None
        try:
            return store.read(parsed_args)
        except exception.AcceleratorsUnavailable as error:
            if (isinstance(error, exception.NoClaimStore)
                    and not parsed_args.store):
                # nova-compute has not started yet
                return None
            self.app.stderr.write(
                f'WARNING: which servers hold devices is not known. {error}\n')
            return None

    def _gone(self, known):
        """Return address -> (device, hold with the reason), for devices in the
        store that drivers did not find."""
        if not known:
            return {}
        notes = known.notes()
        return {address: (device, holds.Hold(
                    holds.kind_of_gone(notes[address]), address,
                    notes[address].gone
                    or 'its driver does not find it any more',
                    since=notes[address].gone_since))
                for address, device in known.devices().items()
                if device.driver in self._loaded}

    def _row_of_gone(self, device, hold, held):
        return (device.address, _what(device), '',
                *self._use(dataclasses.replace(device, handles=()), held),
                self.colored(str(hold), output.RED))

    def _rows_of(self, device, held):
        health = self._health((device.address, None), device)
        if not device.regions:
            yield (device.address, _what(device), '',
                   *self._use(device, held), health)
            return
        yield (device.address, _what(device), '', '', '', '', health)
        for region in device.regions:
            name = f'{device.address}_{region.name}'
            mine = held if held is None else [
                c for c in held if c.region_index == region.index]
            yield (f'  {region.name}' if self.for_people else name, '',
                   output.clean(region.function_name or '')
                   or self.identifier(region.function_uuid),
                   *self._use(region, mine),
                   self._health((device.address, region.index), region))

    def _health(self, part, shown):
        """Return why handles of a device or region are withheld, or OK."""
        unreported = self._unreported.get(part[0])
        if unreported and part[1] is None:
            return self.colored(f'not reported: {unreported}', output.RED)
        found = self._why(part)
        # a region does not repeat the reasons of its card
        said = holds.described(
            hold for hold in found if part[1] is None
            or hold.scope is not holds.Scope.CARD) or ', '.join(
                dict.fromkeys(hold.kind.value for hold in found))
        return (self.colored(said, output.YELLOW) if said
                else shown.reason or _OK)

    def _holds_of(self, device):
        return [{'kind': hold.kind.value, 'scope': hold.scope.value,
                 'region': hold.region,
                 'handle': hold.handle and hold.handle.key,
                 'reason': hold.reason, 'since': hold.since,
                 'lifted-by': hold.kind.lifted_by}
                for hold in dict.fromkeys(
                    hold for part, _ in offers.parts(device)
                    for hold in self._why(part))]

    def _offers(self, found, known):
        """Return which handles nova-compute offers to servers, computed from
        the claim store and from nova-compute's last report."""
        claims = known.all_claims() if known else ()
        listed = shown.listed(known) if known else []
        facts = (*found.table.all_holds(),
                 *offers.of_claims(found.devices, claims),
                 *offers.of_unclean(found.devices.values(),
                                    known.unclean() if known else ()),
                 *(hold for hold in listed if hold.kind in _NOT_SEEN
                   and hold.device in found.devices))
        self._began = {hold.key: hold.since for hold in listed}
        return offers.offers(
            found.devices, claims, map(self._with_why, facts), rules.sets())

    def _why(self, part):
        return [dataclasses.replace(hold, since=hold.since or self._began.get(
            hold.key, '')) for hold in self._offered.why(part)]

    def _with_why(self, hold):
        """Return a hold. If an operator disabled the device, append the
        operator's reason, which owners of servers must not read."""
        why = self._reasons.get((hold.device, hold.kind))
        return dataclasses.replace(
            hold, reason=f'{hold.reason} ({why})') if why else hold

    def _use(self, part, held):
        """Return (total, used, holders) of the handles of a device or region.

        A driver reports only vGPUs that can still be created. Hence the total
        also counts vGPUs of servers.
        """
        if held is None:
            return len(part.handles), '?' if self.for_people else '', ''
        total = len({h.key for h in part.handles}
                    | {c.handle.key for c in held})
        return total, len(held), self.several(sorted(map(_holder, held)))

    def _providers(self, found):
        providers = collections.defaultdict(list)
        for provider in found.shown.providers_of(
                CONF.host, shown.ANY_ROOT).values():
            # a pool is listed once, at its first device
            for address in provider.addresses:
                providers[address].append(provider)
        rows = []
        for address, device in sorted(self._devices.items()):
            rows += [self._row(p, [self._devices[a] for a in p.addresses])
                     for p in providers[address]
                     if p.addresses[0] == address
                     ] if providers[address] else [
                         self._without_provider(device)]
        return rows

    def _row(self, provider, devices):
        """Return the row of a provider for --long."""
        index = provider.region_index
        resource_class = naming.resource_class(devices[0].type)
        total = provider.inventory.get(resource_class, 0)
        reserved = total if provider.fenced else 0
        nodes = sorted({d.numa_node for d in devices
                        if d.numa_node is not None})
        return (provider.name, ', '.join(map(str, nodes)),
                resource_class if total else '', total or '',
                reserved if total else '',
                '\n'.join(filter(None, (_handles(
                    d if index is None else d.region(index))
                    for d in devices))),
                '\n'.join(sorted(provider.traits - {naming.FENCED})),
                '\n'.join(self._healths(devices, index)))

    def _healths(self, devices, index):
        """Return a line for each device of a provider that has holds, or OK.
        """
        lines = []
        for device in devices:
            found = holds.described(self._why((device.address, index)))
            if found:
                lines.append(found if len(devices) == 1
                             else f'{device.address} {found}')
        return lines or [_OK]

    def _without_provider(self, device):
        return (naming.device_provider_name(CONF.host, device.address),
                _numa(device), '', '', '', _handles(device), '',
                f'not reported: {self._unreported.get(device.address)}')

    def _discover(self, known, kernel):
        """Read the host. Return the devices, and the failures of drivers.

        :param known: the claim store, for the content of regions, or None if
            it cannot be used.
        :param kernel: kernel of the host.
        """
        loaded, failed = {}, {}
        for name in CONF.accel.enabled_drivers:
            try:
                loaded.update(drivers.load([name], kernel))
            except Exception as e:
                # a failing driver must not hide the devices of the others
                if self.app.options.debug:
                    traceback.print_exception(e, file=self.app.stderr)
                failed[f'driver {name}'] = str(e) or repr(e)
        self._loaded = loaded
        # an empty store: every card is new to a driver, which then needs no
        # privileges to read it
        memory = claim_store.ClaimStore(claim_store.MEMORY)
        if known:
            memory.set_devices(store.given_whole(known, kernel))
        self._reasons = _disable(memory, known) if known else {}
        found = inventory.Inventory(loaded, memory, reads_serials=False)
        # warnings are shown without tracebacks
        with contextlib.nullcontext() if self.app.options.debug else (
                output.quiet(inventory.__name__)):
            found.scanner.scan()
            # after the scan, because it adds the cards to the store
            there = {(address, region.index) for address, device
                     in found.devices.items() for region in device.regions}
            for (address, index), content in (
                    known.loaded() if known else {}).items():
                if (address, index) in there:
                    found.table.contents.set_loaded(
                        address, index, content)
            self._unreported = found.shown.unreported(CONF.host)
        failed.update(found.failures())
        for what, why in failed.items():
            self.app.stderr.write(f'WARNING: {what}: {why}\n')
        self.status = int(bool(failed))
        return found


def _disable(memory, known):
    """Copy the disabled devices of the store ``known`` into ``memory``.

    Devices are matched by address, because serial numbers are not read here.

    :returns: (address, kind of the hold) -> reason.
    """
    reasons = {}
    for address, rows in identity.disabled(
            known.devices(), (*known.disabled(), *known.planned())).items():
        for row in rows:
            memory.disable(dataclasses.replace(
                row, device_address=address, serial=''))
            reasons[address, holds.of_disabled(row)] = row.reason
    return reasons


def _configure(parsed_args):
    """Set CONF from the arguments, and return the kernel of the host to read.

    :raises ConfigurationError: the configuration cannot be read.
    :raises InvalidSimulation: the simulated host cannot be used.
    """
    configuration.read(parsed_args.config_file)
    if parsed_args.simulated_host:
        CONF.set_override('simulated_host', parsed_args.simulated_host,
                          group='accel')
    kernel = machine.open_kernel(CONF.host, writes=False)
    if parsed_args.simulated_host:
        _take_options(kernel, parsed_args.simulated_host)
    if parsed_args.drivers:
        CONF.set_override('enabled_drivers', parsed_args.drivers,
                          group='accel')
    return kernel


def _take_options(kernel, path):
    """Set CONF to the options in the capture that simulates the host."""
    options = getattr(kernel, 'options', None)
    # not a capture, or one without options
    if not options:
        return
    for option in conf.CAPTURED_OPTS:
        try:
            CONF.set_override(
                option.dest, options.get(option.dest, option.default),
                group='accel')
        except (TypeError, ValueError) as error:
            raise exception.InvalidSimulation(
                f'The capture {path} has a value of {option.dest} in options '
                f'that cannot be used ({error}): correct it.') from error


def _holder(claim):
    """Return the server of a claim, and the claim's state if it is unusual."""
    unusual = [text for text, is_so in (
        (claim.state.value, claim.state is not model.ClaimState.BOUND),
        ('old', claim.role is not model.Role.CURRENT)) if is_so]
    return claim.holder + (f' ({", ".join(unusual)})' if unusual else '')


def _what(device):
    return ' '.join((device.type, device.vendor, device.product))


def _numa(device):
    return '' if device.numa_node is None else device.numa_node


def _handles(part):
    return '\n'.join(handle.address for handle in part.handles)
