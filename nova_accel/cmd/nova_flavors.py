# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Translate flavors that request Nova's own PCI devices and vGPUs: their extra
specs become requests for nova_accel.

Sources: extra specs of Nova 31 to 34, pci_passthrough:alias (nova.pci.request)
and resources<group>:<class> (nova.api.validation.extra_specs.resources).
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
import re
import typing

ALIAS = 'pci_passthrough:alias'
_GROUPED = re.compile('(resources|trait|member_of|in_tree)'
                      '([A-Za-z0-9_-]{1,64}):.+')
_RESOURCE = re.compile('resources([A-Za-z0-9_-]{0,64}):(.+)')


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A profile that replaces an alias of Nova, or Nova's class of vGPUs."""

    #: name of the alias that it replaces, None if it replaces a resource class
    alias: str | None
    #: resource class of vGPUs that it replaces
    resource_class: str | None
    #: profile of one group, with the keys of a profile file
    profile: Mapping[str, typing.Any]

    @property
    def asked(self) -> str:
        """Return the old extra spec without amount, like resources:VGPU=."""
        return (f'{ALIAS}={self.alias}:' if self.alias
                else f'resources:{self.resource_class}=')

    def profile_spec(self) -> str:
        return f'accel:device_profile={self.profile["name"]}'

    def group_specs(self, suffix: str, amount: object) -> list[str]:
        """Return the extra specs that replace old ones: a group with suffix
        and amount, and the profile's extra specs for the whole server."""
        (resources, _), (trait, _) = self.profile['groups'][0].items()
        return [f'{resources.replace(":", f"{suffix}:")}={amount}',
                f'{trait.replace(":", f"{suffix}:")}=required',
                *(f'{key}={value}' for key, value in self.profile.items()
                  if key.startswith('accel:'))]


def lines(flavors: Iterable[dict], found: Iterable[Replacement],
          ) -> Iterator[str]:
    """Yield the new extra specs of each flavor that requests Nova's devices.

    :param flavors: flavors with extra specs, as Nova's API lists them.
    :param found: replacements for the devices of this host.
    """
    found = list(found)
    for flavor in sorted(flavors, key=lambda f: f['name']):
        specs = flavor['extra_specs']
        wanted = _Wanted(specs, found)
        if wanted.old:
            yield (f'{flavor["name"]}: {" ".join(wanted.old)}  ->  '
                   f'{" ".join(wanted.new())}')
        yield from (f'{flavor["name"]}: {text}' for text in wanted.left)


class _Wanted:
    """The requests of a flavor for Nova's devices, with their replacements."""

    def __init__(self, specs, found):
        self._specs = specs
        #: extra specs that are replaced
        self.old: list[str] = []
        #: sentences about extra specs that stay
        self.left: list[str] = []
        #: aliases that stay, from an extra spec of which others are replaced
        self._stays: list[str] = []
        #: (replacement, suffix of the group or '' for any, amount)
        self._groups: list[tuple[Replacement, str, int]] = []
        aliases = {r.alias: r for r in found if r.alias}
        if specs.get(ALIAS):
            self._read_alias(specs[ALIAS], aliases)
        for key, amount in sorted(specs.items()):
            match = _RESOURCE.fullmatch(key)
            offers = [r for r in found if match
                      and r.resource_class == match[2]]
            if match and offers:
                self._read_resource(f'{key}={amount}', match[1], amount,
                                    offers)
            elif match and match[2] == 'VGPU':
                self.left.append(f'{key}={amount} stays: nova.conf of this '
                                 f'host has no vGPUs that move.')

    def _read_alias(self, value, aliases):
        for part in value.split(','):
            name, _, amount = part.partition(':')
            name = name.strip()
            if name in aliases and amount.strip().isdecimal():
                self._groups.append((aliases[name], '', int(amount)))
            else:
                self._stays.append(part.strip())
        if self._groups:
            self.old.append(f'{ALIAS}={value}')
        else:
            self.left.append(f'{ALIAS}={value} stays: no device of this host '
                             f'that moves has such an alias.')
            self._stays.clear()

    def _read_resource(self, shown, suffix, amount, offers):
        if not str(amount).isdecimal() or not int(amount):
            # 0 removes the flavor's other request
            return
        if len(offers) > 1:
            self.left.append(
                f'{shown} may be any of several types: choose one of '
                + ', '.join(r.profile_spec() for r in offers) + '.')
            return
        self.old.append(shown)
        self._groups.append((offers[0], suffix, int(amount)))
        traits = sorted(key.partition(':')[2] for key in self._specs
                        if suffix and key.startswith(f'trait{suffix}:'))
        if traits:
            self.left.append(
                f'{", ".join(traits)} of group {suffix} stays: set it on the '
                f'providers of nova_accel with "openstack resource provider '
                f'trait set".')

    def new(self) -> list[str]:
        """Return the new extra specs, which replace those in ``old``."""
        stays = [f'{ALIAS}={",".join(self._stays)}'] if self._stays else []
        if (len(self._groups) == 1 and not stays
                and 'accel:device_profile' not in self._specs):
            offer, suffix, amount = self._groups[0]
            if amount == 1 and not suffix:
                return [offer.profile_spec()]
        taken = {match[2] for match in map(
            _GROUPED.fullmatch, self._specs) if match}
        free = (str(n) for n in itertools.count(1) if str(n) not in taken)
        made: dict[str, None] = {}
        for offer, suffix, amount in self._groups:
            suffix = suffix or next(free)
            taken.add(suffix)
            made.update(dict.fromkeys(offer.group_specs(suffix, amount)))
        if len(taken) > 1 and 'group_policy' not in self._specs:
            made['group_policy=none'] = None
        return stays + list(made)
