# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A file of metrics for the textfile collector of node_exporter.

Text format of Prometheus 0.0.4. The page on health lists the names and their
meanings, which are stable. Sources: prometheus.io/docs/instrumenting/
exposition_formats and /docs/practices/naming.
"""

import collections
from collections.abc import Iterable, Mapping
import grp
import os
import typing

from nova_accel.attach import loading
from nova_accel import conf
from nova_accel import exception
from nova_accel import files
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel.inventory import conditions as device_conditions
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import model
from nova_accel.notify import notices
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text as text_of

CONF = conf.CONF

_GAUGE, _COUNTER = 'gauge', 'counter'
#: name without the prefix -> (type, help)
METRICS = {
    'device_info': (_GAUGE, 'Properties of a device; always 1.'),
    'device_state': (
        _GAUGE, 'State of a device: 1 for its present state, else 0.'),
    'device_disabled': (
        _GAUGE, 'Whether the operator has disabled a device.'),
    'device_finding': (
        _GAUGE, 'A finding about a device: 1 while it exists.'),
    'holds': (_GAUGE, 'Holds by which a device or region is withheld.'),
    'handles': (_GAUGE, 'Handles of a device or region that servers can get.'),
    'claims': (_GAUGE, 'Handles of a device or region that servers have.'),
    'unreleased_claims': (
        _GAUGE, 'Handles that servers released and that are not clean.'),
    'handovers_total': (
        _COUNTER, 'Hand-overs that have ended, by their result.'),
    'programmings_total': (
        _COUNTER, 'Programmings of regions that have ended, by their result.'),
    'programming_seconds_total': (
        _COUNTER, 'Seconds in which regions were being programmed.'),
    'programming_wait_seconds_total': (
        _COUNTER, 'Seconds in which programmings waited for their card.'),
    'devices': (_GAUGE, 'Handles for servers, by project and state.'),
    'claim_seconds_total': (
        _COUNTER, 'Seconds in which servers of a project had devices.'),
    'cache_bytes': (_GAUGE, 'Bytes in the cache of bitstreams.'),
}
_PREFIX = 'nova_accel_'
_RESULTS = (values.CLEAN, *(end for end in values.ENDS if end != values.CLEAN))
_FAILED = 'failed'
_USED = 'claim_seconds_total'
_WELL = signals.State.OK, signals.State.UNKNOWN
_HELD = offers.State.HELD, offers.State.RELEASING
_NONE: Mapping[str, int] = {}
_Sample = tuple[str, Mapping[str, str], float]


class Facts(typing.NamedTuple):
    """The facts about a host that the metrics file contains."""

    devices: Mapping[str, model.Device]
    conditions: Mapping[str, device_conditions.Condition]
    #: (device address, region index) -> name of the provider
    providers: Mapping[tuple[str, int | None], str]
    offered: offers.Offers
    #: result -> number
    handovers: Mapping[str, int]
    #: result -> number
    programmings: Mapping[str, int] = _NONE
    #: seconds of waiting, and seconds in which cards were programmed
    waited: float = 0
    took: float = 0
    #: None before the first image is requested
    cache_bytes: int | None = None
    #: (project, type, product) -> seconds; None if every user can read the
    #: file
    used: Mapping[tuple[str, str, str], float] | None = None


def text(facts: Facts) -> str:
    """Return the content of the file of metrics."""
    found: dict[str, list[str]] = {name: [] for name in METRICS}
    for name, labels, value in _samples(facts):
        shown = ','.join(f'{label}="{_escaped(text)}"'
                         for label, text in labels.items())
        found[name].append(f'{_PREFIX}{name}{{{shown}}} {round(value, 3)}')
    lines = []
    for name, samples in found.items():
        if samples:
            kind, said = METRICS[name]
            lines += [f'# HELP {_PREFIX}{name} {said}',
                      f'# TYPE {_PREFIX}{name} {kind}', *samples]
    return '\n'.join([*lines, ''])


def _escaped(value: str) -> str:
    return value.replace('\\', r'\\').replace('"', r'\"').replace('\n', r'\n')


def _samples(facts: Facts) -> Iterable[_Sample]:
    for address, device in sorted(facts.devices.items()):
        of = {'device': address,
              'provider': facts.providers.get((address, None), '')}
        yield 'device_info', {
            **of, 'type': device.type, 'driver': device.driver,
            'vendor_id': device.vendor_id, 'product_id': device.product_id,
            'product': device.product, 'serial': device.serial}, 1
        known = facts.conditions.get(address)
        for state in signals.State:
            yield 'device_state', {**of, 'state': state.value}, int(
                known is not None and known.state is state)
        yield 'device_disabled', of, int(any(
            hold.kind is holds.Kind.DISABLED
            for hold in facts.offered.holds_of((address, None))))
        for finding in known.findings if known else ():
            yield 'device_finding', {
                **of, 'signal': finding.signal, 'about': finding.about,
                'state': finding.state.value,
                'mode': (signals.Mode.ACT if finding.acts
                         else signals.Mode.OBSERVE).value}, 1
    yield from _use(facts)
    for result in (*_RESULTS, _FAILED):
        yield 'handovers_total', {'result': result}, facts.handovers.get(
            result, 0)
    for result in 'programmed', _FAILED:
        yield 'programmings_total', {
            'result': result}, facts.programmings.get(result, 0)
    yield 'programming_seconds_total', {}, facts.took
    yield 'programming_wait_seconds_total', {}, facts.waited
    if facts.used is not None:
        for (project, type_, product), seconds in sorted(facts.used.items()):
            yield _USED, {'project': project, 'product': product,
                          'type': type_}, seconds
        yield from _accounts(facts)
    if facts.cache_bytes is not None:
        yield 'cache_bytes', {}, facts.cache_bytes


def _accounts(facts: Facts) -> Iterable[_Sample]:
    """Yield the numbers of accelerators by project and state. The project of
    idle or withheld accelerators is ''."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for offer in facts.offered.all():
        if not offer.device:
            continue
        known = facts.conditions.get(offer.device.address)
        states = [('delivered', '')]
        if known is None or known.state in _WELL:
            states.append(('healthy', ''))
        if offer.state is offers.State.HELD:
            states.append(('held', ''))
        elif offer.state is offers.State.FREE:
            states.append(('idle', ''))
        else:
            states.append(('withheld', next((
                hold.kind.value for hold in offer.all_holds
                if hold.kind.withholds), holds.Kind.CLEANING.value)))
        project = (offer.claim.project_id or '' if offer.claim
                   and offer.state is offers.State.HELD else '')
        found.update((project, offer.device.type, offer.device.product, *state)
                     for state in states)
    for labels, number in sorted(found.items()):
        yield 'devices', dict(zip((
            'project', 'type', 'product', 'state', 'kind'), labels)), number


def published(path: str) -> dict[tuple[str, str, str], float]:
    """Return Facts.used from the previous file, or {} if another user wrote
    that file, or if it cannot be read."""
    found = {}
    try:
        # another user may own the directory, and have put a pipe there
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK),
                  encoding='utf-8', newline='\n') as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                for line in file:
                    if line.startswith(f'{_PREFIX}{_USED}{{'):
                        of = text_of.labels(line)
                        found[of['project'], of['type'], of['product']
                              ] = float(line.rpartition(' ')[2])
    except (OSError, ValueError, KeyError):
        return {}
    return {of: seconds for of, seconds in found.items()
            if 0 <= seconds < float('inf')}


def _use(facts: Facts) -> Iterable[_Sample]:
    for address, device in sorted(facts.devices.items()):
        for part in device.regions or [device]:
            index = part.index if isinstance(part, model.Region) else None
            of = {'device': address, 'region': '' if index is None
                  else str(index),
                  'provider': facts.providers.get((address, index), '')}
            found = facts.offered.of((address, index))
            held = [offer for offer in found if offer.state in _HELD]
            left = [offer for offer in held
                    if offer.state is offers.State.RELEASING
                    and offer.claim and offer.claim.error]
            for kind, number in sorted(collections.Counter(
                    hold.kind.value for hold in facts.offered.why(
                        (address, index))).items()):
                yield 'holds', {**of, 'kind': kind}, number
            yield 'handles', of, len(part.handles)
            yield 'claims', of, len(held) - len(left)
            yield 'unreleased_claims', of, len(left)


class MetricsFile:

    def __init__(self, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory,
                 loader: loading.Loader, usage: notices.Usage):
        self._store = store
        self._inventory = inventory
        self._loader = loader
        self._usage = usage
        self._handovers: collections.Counter[str] = collections.Counter()
        self._programmings: collections.Counter[str] = collections.Counter()
        self._waited = self._took = 0.0
        #: number of the newest hand-over that was counted
        self._seen: int | None = None
        self._goes_on = False
        self.background = limited.Background(
            self._run, '[accel] metrics_file cannot be written')

    def _run(self) -> None:
        path = CONF.accel.metrics_file
        if path:
            self.write(path)

    def write(self, path: str) -> None:
        """Replace the metrics file atomically. Every user can read the file,
        or only the group [accel] metrics_group if this option is set.

        :raises ConfigurationError: the group does not exist.
        :raises OSError: the file cannot be written; the previous one stays.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        # the collector ignores the temporary file, because it reads only names
        # that end in .prom. An unresponsive file server would block the writer
        write = limited.blocking(files.replace)
        group = CONF.accel.metrics_group
        if not group:
            write(path, text(self._facts()), 0o644)
            return
        try:
            number = grp.getgrnam(group).gr_gid
        except KeyError:
            raise exception.ConfigurationError(
                f'[accel] metrics_group is {group!r}, and this host has no '
                f'such group: name the group of the user of '
                f'node_exporter.') from None
        self._usage.count()
        self.go_on()
        write(path, text(self._facts()._replace(used=self._store.used())),
              0o640, number)

    def go_on(self) -> None:
        """Continue the sums of the previous file, because counters of
        Prometheus must not decrease. The store may be new or an older copy."""
        path = CONF.accel.metrics_file
        if path and CONF.accel.metrics_group and not self._goes_on:
            self._store.raise_used(limited.blocking(published)(path))
            self._goes_on = True

    def _facts(self) -> Facts:
        inventory = self._inventory
        shown = inventory.shown.providers()
        newest, results = self._store.ended_handovers(self._seen)
        if self._seen is not None:
            for result, number in results.items():
                self._handovers[
                    result if result in _RESULTS else _FAILED] += number
        self._seen = newest
        self._count_programmings()
        return Facts(
            inventory.devices, inventory.health.conditions(), {
                part: shown[uuid].name
                for part, uuid in inventory.shown.by_part().items()
                if uuid in shown},
            inventory.table.offered(), self._handovers,
            self._programmings, self._waited, self._took,
            self._loader.cached())

    def _count_programmings(self) -> None:
        ended = self._loader.ended
        while ended:
            one = ended.popleft()
            self._programmings[one.result] += 1
            self._waited += one.waited
            self._took += one.took
