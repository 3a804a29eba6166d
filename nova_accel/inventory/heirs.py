# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the operator has said of a provider goes to its heirs: those that show
its devices now. Pure.

A pool gives way where its devices have other traits, or where options change; a
provider of one device, where that joins a pool; and a pool that stays can lose
some of its devices to others.
"""

from collections.abc import Collection, Iterable, Mapping
import dataclasses
import typing

from nova_accel.inventory import ledger
from nova_accel.inventory import providers
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

LOG = logging.getLogger(__name__)

_Rows = Mapping[ledger.Key, model.Reserved]
_Wanted = Mapping[str, providers.Provider]
_Everything = Mapping[str, providers.Shown]


class HandedOver(typing.NamedTuple):
    #: of the ledger, those that change
    rows: dict[ledger.Key, model.Reserved]
    #: provider uuid -> traits of others that it gets from those before it
    traits: dict[str, frozenset[str]]
    #: uuids of those that stay until their heirs are seen to have the traits:
    #: Placement may refuse these
    needed: set[str]


def hand_over(rows: _Rows, everything: _Everything, wanted: _Wanted,
              were_fenced: Collection[str]) -> HandedOver:
    """Find what providers get from those that showed their devices before.

    :param rows: of the ledger.
    :param everything: what Placement has, by uuid.
    :param wanted: our providers by uuid.
    :param were_fenced: uuids of those that had the trait FENCED before this
        pass.
    """
    once = _once_of(rows, everything, wanted)
    by_address: dict[str, list[providers.Provider]] = {}
    for provider in wanted.values():
        if provider.region_index is None:
            for address in provider.addresses:
                by_address.setdefault(address, []).append(provider)
    heirs = {uuid: found for uuid, addresses in once.items() if (found := {
        p.uuid: p for address in addresses
        for p in by_address.get(address, ())})}
    return HandedOver(
        _reserved(rows, everything, wanted, heirs),
        *_traits(rows, everything, heirs, {u: once[u] for u in heirs},
                 were_fenced))


def _once_of(rows, everything, wanted) -> dict[str, Iterable[str]]:
    """Return provider uuid -> addresses of devices that it shows no more."""
    once: dict[str, Iterable[str]] = {}
    for (uuid, _), row in rows.items():
        left = row.addresses if uuid not in wanted else (
            frozenset(row.addresses).difference(wanted[uuid].addresses))
        if left:
            once[uuid] = left
    nodes = {p.parent for p in wanted.values() if p.region_index is None}
    for uuid, shown in everything.items():
        if uuid in wanted or uuid in once:
            continue
        for node in nodes:
            part = naming.part_of_provider(node, shown.name)
            if part and shown.name == naming.device_provider_name(node, part):
                once[uuid] = (part,)
    return once


def _reserved(rows, everything, wanted, heirs,
              ) -> dict[ledger.Key, model.Reserved]:
    changed: dict[ledger.Key, model.Reserved] = {}
    given: dict[str, int] = {}
    for (uuid, name), row in rows.items():
        stays = wanted.get(uuid)
        # of a pool that some have left: what the others cannot have
        amount = row.operators if stays is None else (
            row.operators - stays.inventory.get(name, row.operators))
        if amount <= 0 or uuid not in heirs:
            continue
        shares = ledger.share(amount, {
            p.uuid: p.inventory[name] for p in heirs[uuid].values()
            if name in p.inventory})
        for to, count in shares.items():
            has = changed.get((to, name)) or rows.get((to, name)) or (
                _unknown(everything.get(to), name))
            changed[to, name] = dataclasses.replace(
                has, operators=has.operators + count)
            given[to] = given.get(to, 0) + count
        has = changed.get((uuid, name), row)
        changed[uuid, name] = dataclasses.replace(
            has, operators=has.operators - sum(shares.values()))
    for to, count in given.items():
        _say_given(wanted[to], count)
    return changed


def _unknown(shown, name) -> model.Reserved:
    """Return the row of an inventory that has none: all is the operator's."""
    found = shown and shown.found(name)
    there = found.reserved if found else 0
    return model.Reserved(there, there, found.generation if found else None,
                          None if found else 0)


def _say_given(provider, count) -> None:
    if provider.pool:
        LOG.warning(
            'The operator had reserved %d of the devices that share the '
            'provider %s now. As many are reserved of it, but any of the '
            'devices: name those that no server may get in '
            '[accel] exclude_devices', count, provider.name)
    else:
        LOG.warning(
            'The operator had reserved some of the devices that shared a '
            'provider. They have providers of their own now, and %d of %s is '
            'reserved: see that it is the one that he means', count,
            provider.name)


def _is_complete(shown, heir) -> bool:
    """Return whether a provider has got its traits, which are written at once
    and last, since it was created, or was fenced as one without a device."""
    return bool(shown and shown.traits) and (
        naming.FENCED in heir.traits or naming.FENCED not in shown.traits)


def _traits(rows, everything, heirs, once, were_fenced,
            ) -> tuple[dict[str, frozenset[str]], set[str]]:
    others = {uuid: frozenset(everything[uuid].traits)
              for uuid in once if uuid in everything}
    for (uuid, _), row in rows.items():
        if uuid in others:
            others[uuid] -= frozenset(row.traits or ())
    by_address: dict[str, list[str]] = {}
    for uuid in others:
        for address in once[uuid]:
            by_address.setdefault(address, []).append(uuid)
    moving = frozenset().union(*once.values())
    inherited: dict[str, frozenset[str]] = {}
    needed: set[str] = set()
    for heir in {p.uuid: p for found in heirs.values()
                 for p in found.values()}.values():
        shown = everything.get(heir.uuid)
        if shown and not moving.issuperset(heir.addresses):
            # it has devices of others too
            continue
        has_them = _is_complete(shown, heir)
        each = []
        for address in heir.addresses:
            before = by_address.get(address, [])
            # of several the last one counts; after a kill it is not known which
            # that was
            last = [uuid for uuid in before if uuid not in were_fenced] or (
                [] if has_them else before)
            # one of the same name has to go first
            needed.update(uuid for uuid in last if others[uuid]
                          and everything[uuid].name != heir.name)
            if last:
                each.append(frozenset(heir.merged_traits(frozenset().union(
                    *(others[uuid] for uuid in last)))) - heir.traits)
        if each:
            inherited[heir.uuid] = frozenset.intersection(*each)
            _say_lost(heir, frozenset.union(*each) - inherited[heir.uuid])
    return inherited, needed


def _say_lost(heir, traits) -> None:
    if traits:
        LOG.warning(
            'The traits %s, which others than nova_accel had set on the '
            'providers of some of the devices that share the provider %s now, '
            'are not set on it: set them there if they are true of all',
            ', '.join(sorted(traits)), heir.name)
