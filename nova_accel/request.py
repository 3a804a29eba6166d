# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Parse flavor extra specs into accelerator requests; match them to providers.

A request group of the flavor (Nova's granular resource request syntax) that
has an accelerator class becomes an AcceleratorRequest. Extra specs of a group
are ``resources<g>:``, ``trait<g>:`` and nova_accel's own ``accel<g>:``; <g> is
empty, a number or ``_NAME``.
"""

import collections
from collections.abc import Collection, Mapping
import dataclasses
import functools
import re
import textwrap
from typing import Any
import uuid

from nova_accel import exception
from nova_accel import log as logging
from nova_accel import matching
from nova_accel import model
from nova_accel import naming
from nova_accel import near

LOG = logging.getLogger(__name__)

PROFILE_KEY = 'accel:device_profile'
#: name of the profile from which a flavor was expanded
EXPANDED_KEY = 'accel:profile'
#: beginning of the suffixes of groups that come from a device profile
PROFILE_GROUP = '_ACCEL'
#: extra spec with the number of servers that fit, from nova-accel fits
AVAILABLE_KEY = 'accel:available'
#: required location of all accelerators of a server; for the whole flavor
AFFINITY_KEY = 'accel:numa_affinity'
SAME_KEY = 'accel:same'
PACKING_KEY = 'accel:packing'
#: how a live migration treats the accelerators
LIVE_MIGRATION_KEY = 'accel:live_migration'
#: maximum pause of the guest in that migration, seconds; QEMU allows 2,000
DOWNTIME_KEY = 'accel:max_downtime'
#: maximum lifetime of a server, hours. It informs only: nothing ends a server
MAX_HOURS_KEY = 'accel:max_hours'
#: keys of the whole flavor -> permitted values; () if another function checks
#: the value
FLAVOR_KEYS = {AFFINITY_KEY: ('required', 'preferred', 'none'),
               SAME_KEY: ('numa', 'pcie_root'),
               PACKING_KEY: ('stack', 'spread'),
               LIVE_MIGRATION_KEY: ('detach', 'transparent'),
               DOWNTIME_KEY: tuple(map(str, range(1, 2001))),
               MAX_HOURS_KEY: tuple(map(str, range(1, 8785))),
               near.KEY: ()}
_FLAVOR_NAMES = [key.removeprefix('accel:') for key in FLAVOR_KEYS]
GROUP = '(?:[0-9]+|_[a-zA-Z0-9_-]{1,63})?'
_SPEC = re.compile(f'(resources|trait|accel)({GROUP}):(.+)')
#: the spelling of the first Cyborg specifications for a numbered group
_OTHERS = re.compile('others([0-9]*): *(.*)')
#: property of images that are snapshots of servers with accelerators
SNAPSHOT_PROPERTY = 'accel:snapshot'
#: the function that a region must carry; at most one key for a group
_FUNCTION_KEYS = ('bitstream_id', 'function_id', 'function_name')
#: whether the owner of the server may choose the function: by the image or the
#: metadata of the server, or with an image of their own that has the flavor's
#: function
RUNTIME = 'runtime_programming'
#: preferred traits of devices, the best one first
_PREFER = 'prefer'
_ACCEL_KEYS = (*_FUNCTION_KEYS, RUNTIME, _PREFER)
#: keys that only the driver of the device interprets
_DRIVER_KEY = re.compile('driver_([a-z0-9_]{1,64})')


@dataclasses.dataclass(frozen=True)
class AcceleratorRequest:
    """The accelerators that one request group asks for."""

    group: str
    resource_class: str
    amount: int
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    #: at most one of these three is set; function_id as from model.uuid_hex()
    function_id: str | None = None
    function_name: str | None = None
    bitstream_id: str | None = None
    runtime_programming: bool = False
    #: requests that would do instead, the preferred ones first; each with one
    #: function and no alternatives of its own
    alternatives: tuple['AcceleratorRequest', ...] = ()
    #: whether the owner of the server, by its image or metadata, and not the
    #: flavor, chose the bitstream
    chosen_by_owner: bool = False
    #: for the driver of the device: accel<g>:driver_<name> -> value. From the
    #: flavor or profile only, never from an image
    driver_keys: Mapping[str, str] = dataclasses.field(
        default_factory=dict, hash=False)
    #: memory class -> MiB of the region's memory
    memory: Mapping[str, int] = dataclasses.field(
        default_factory=dict, hash=False)
    #: preferred traits, the best one first
    prefer: tuple[str, ...] = ()
    #: the device profile that contains the group; '' for a group of the flavor
    profile: str = dataclasses.field(default='', compare=False)

    def preferred(self, traits: Collection[str]) -> str | None:
        """Return the most preferred of a device's traits, or None if the
        device has no preferred trait."""
        return next((one for one in self.prefer if one in traits), None)

    @property
    def programs(self) -> bool:
        """Return whether the request names a function or bitstream, so a
        region may have to be programmed."""
        return bool(self.function_id or self.function_name or self.bitstream_id)

    @property
    def choices(self) -> list['AcceleratorRequest']:
        """Return a request for each acceptable function, the preferred one
        first."""
        if not self.alternatives:
            return [self]
        return [dataclasses.replace(self, alternatives=()),
                *self.alternatives]

    def got(self, region: model.Region) -> str | None:
        """Return the function of a region if it satisfies the request: its
        name if the flavor uses names, else its UUID. Otherwise return None."""
        for choice in self.choices:
            if choice.function_id and (
                    choice.function_id == region.function_uuid):
                return str(uuid.UUID(choice.function_id))
            if choice.function_name and (
                    choice.function_name == region.function_name):
                return choice.function_name
        return None

    def only(self, function: str) -> 'AcceleratorRequest':
        """Return the request reduced to one function. Return this request if it
        does not name the function.

        :param function: its id, 32 hex digits.
        """
        return next((choice for choice in self.choices
                     if choice.function_id == function), self)

    @property
    def wanted_traits(self) -> list[str]:
        """Return the traits of acceptable functions. If a region has one of
        these traits, it need not be programmed."""
        return [trait for choice in self.choices
                for trait in choice._traits()]

    def _traits(self):
        if self.function_id:
            yield naming.function_trait(self.function_id)
        if self.function_name:
            yield naming.function_name_trait(self.function_name)
        if self.bitstream_id:
            yield naming.bitstream_trait(self.bitstream_id)

    def carried_by(self, region: model.Region) -> bool:
        """Return whether a new server can use a region without programming it,
        because an acceptable function is already loaded.

        Only content of the operator counts. The bitstream of a project is for
        the server that loaded it, and its function UUID is not verified. A
        UUID of model.SHARED_FUNCTIONS does not identify a function.
        """
        if not self.programs:
            return True
        if self.alternatives:
            return any(choice.carried_by(region) for choice in self.choices)
        if region.origin != model.OPERATOR:
            return False
        if self.function_id:
            return (region.function_uuid == self.function_id
                    and self.function_id not in model.SHARED_FUNCTIONS)
        if self.function_name:
            return region.function_name == self.function_name
        return region.bitstream_id == self.bitstream_id

    def __str__(self) -> str:
        where = f'group {self.group}' if self.group else 'the unnumbered group'
        if self.profile:
            number = self.group.removeprefix(PROFILE_GROUP).partition('_')[0]
            where = f'group {number} of the device profile {self.profile}'
        return f'{where} ({self.resource_class}={self.amount})'


@dataclasses.dataclass(frozen=True)
class Group:
    """A request group of a flavor, as Placement gets it from Nova."""

    #: class -> amount; 0 if the server must not have any
    resources: Mapping[str, int]
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Affinity:
    """The location that all accelerators of a server must have."""

    #: maximum number of NUMA nodes, None: any number
    nodes: int | None = None
    #: whether all must be below one PCI root complex
    one_root: bool = False
    #: whether accelerators close to each other are preferred
    close: bool = True
    #: whether the nodes must be those of the guest, if it has any
    with_guest: bool = False
    #: stack or spread; None: [accel] packing applies
    packing: str | None = None
    #: how near the hosts of several servers must be to each other
    levels: tuple[near.Level, ...] = ()

    @property
    def is_strict(self) -> bool:
        """Return whether a build must fail if the location cannot be
        satisfied."""
        return self.one_root or self.nodes is not None

    def __str__(self) -> str:
        if self.one_root:
            return 'below one PCI root complex'
        return 'on ' + ('any NUMA nodes' if self.nodes is None
                        else 'one NUMA node' if self.nodes == 1
                        else f'{self.nodes} NUMA nodes')


def affinity(extra_specs: Mapping[str, str]) -> Affinity:
    """Return the required location of the accelerators of a flavor.

    With the value ``required``, accelerators may be on as many NUMA nodes as
    the flavor gives the guest (``hw:numa_nodes``, 1 by default).

    :raises InvalidRequest: a value is unknown, or two values exclude each
        other.
    """
    for key, values in FLAVOR_KEYS.items():
        if values and extra_specs.get(key, values[0]) not in values:
            said = (f'one of {", ".join(values)}' if len(values) < 10 else
                    f'a whole number from {values[0]} to {values[-1]}')
            raise exception.InvalidRequest(
                f'{key}={extra_specs[key]} is unknown: write {said}.')
    wish, same, packing = map(
        extra_specs.get, (AFFINITY_KEY, SAME_KEY, PACKING_KEY))
    if same and wish == 'none':
        raise exception.Contradiction(
            f'{SAME_KEY}={same} and {AFFINITY_KEY}=none exclude each other: '
            f'keep one of them.')
    if DOWNTIME_KEY in extra_specs and (
            extra_specs.get(LIVE_MIGRATION_KEY) != 'transparent'):
        raise exception.InvalidRequest(
            f'{DOWNTIME_KEY} is for guests that migrate with the state of '
            f'their accelerators: add {LIVE_MIGRATION_KEY}=transparent, or '
            f'remove it.')
    nodes = None
    if wish == 'required':
        try:
            nodes = max(1, int(extra_specs.get('hw:numa_nodes', 1)))
        except ValueError:
            # Nova refuses such a flavor with an error of its own
            nodes = 1
    return Affinity(nodes=1 if same else nodes, one_root=same == 'pcie_root',
                    close=wish != 'none', with_guest=wish == 'required',
                    packing=packing, levels=near.levels(extra_specs[near.KEY])
                    if near.KEY in extra_specs else ())


def modernize(extra_specs: Mapping[str, str]) -> dict[str, str]:
    """Return extra specs in which early spellings and class names are replaced
    by present ones.

    The first Cyborg specifications have
    ``function:CUSTOM_FPGA_FUNCTION_<VENDOR>_<UUID>=required``,
    ``function_name:<name>=required`` and ``bitstream:<uuid>`` (value ignored)
    for the unnumbered group. Keys of a numbered group begin with
    ``others<N>:``.

    :raises InvalidRequest: a function: key has no function trait, or another
        value than required; or others<N>: is followed by another key.
    """
    result: dict[str, str] = {}
    for key, value in extra_specs.items():
        group, old = '', _OTHERS.fullmatch(key)
        kind, _, name = (old[2] if old else key).partition(':')
        if old:
            group = old[1]
            if kind not in ('function', 'function_name', 'bitstream'):
                raise exception.InvalidRequest(
                    f'The extra spec {key} is neither a function nor a '
                    f'bitstream: write accel{group}:function_id, '
                    f'accel{group}:function_name or accel{group}:bitstream_id '
                    f'in its place.')
        if kind in ('function', 'function_name') and value != 'required':
            raise exception.InvalidRequest(
                f'The extra spec {key} has the value {value!r}, and a function '
                f'can only be required: write {key}=required or remove it.')
        if kind == 'function':
            function = naming.function_of(name)
            if not function:
                raise exception.InvalidRequest(
                    f'The extra spec {key} names no function: use '
                    f'function:CUSTOM_FPGA_FUNCTION_<VENDOR>_<UUID>=required, '
                    f'or accel:function_id=<UUID>.')
            key, value = f'accel{group}:function_id', function
        elif kind == 'function_name':
            key, value = f'accel{group}:function_name', name
        elif kind == 'bitstream':
            key, value = f'accel{group}:bitstream_id', name
        elif kind.startswith('resources'):
            key = f'{kind}:{naming.flavor_class(name)}'
        if key in result and result[key] != value:
            raise exception.InvalidRequest(
                f'The extra specs ask for {key} twice, as {result[key]} and as '
                f'{value}: keep one.')
        result[key] = value
    return result


def parse(extra_specs: Mapping[str, str]) -> list[AcceleratorRequest]:
    """Return the accelerator requests of a flavor with its profile expanded.

    The requests are in the order of their groups, which is the same in all
    processes. The list is empty for a flavor without accelerators.

    :raises InvalidRequest: an extra spec cannot be read or contradicts another
        one.
    """
    written = _groups(modernize(extra_specs))
    requests = []
    for group in sorted(written):
        requests += [dataclasses.replace(wanted, profile=(
            extra_specs.get(EXPANDED_KEY, '')
            if group.startswith(PROFILE_GROUP) else ''))
            for wanted in _parse_group(group, **written[group])]
    affinity(extra_specs)
    for key in FLAVOR_KEYS:
        if key in extra_specs and not requests and (
                PROFILE_KEY not in extra_specs):
            raise exception.InvalidRequest(
                f'{key} has no accelerator to go with: add '
                f'resources1:CUSTOM_ACCELERATOR_<TYPE>=1, or remove it.')
    return requests


def is_plain(extra_specs: Mapping[str, str]) -> bool:
    """Return whether a flavor has no key that could request accelerators, in
    any spelling."""
    return not any(key.startswith(
        ('accel', 'resources', 'function', 'bitstream'))
        for key in extra_specs)


def groups(extra_specs: Mapping[str, str]) -> dict[str, Group]:
    """Return all request groups of a flavor, as Nova passes them to Placement.
    Groups without accelerators are included.

    :param extra_specs: extra specs of a flavor, with its profile expanded.
    :returns: suffix -> group; '' is the suffix of the unnumbered group.
    :raises InvalidRequest: an extra spec cannot be read.
    """
    return {suffix: _group(suffix, found['resources'], found['trait'])
            for suffix, found in _groups(modernize(extra_specs)).items()}


def _group(suffix, resources, trait) -> Group:
    return Group(
        {name: 0 if str(amount).strip() == '0'
         else _amount(suffix, name, amount)
         for name, amount in resources.items()},
        _traits(trait, 'required'), _traits(trait, 'forbidden'))


def _traits(trait, value) -> frozenset[str]:
    return frozenset(name for name, found in trait.items() if found == value)


def _groups(extra_specs) -> dict:
    """Return suffix -> {'resources' | 'trait' | 'accel': {name: value}} for
    each group."""
    written: dict = collections.defaultdict(
        lambda: {'resources': {}, 'trait': {}, 'accel': {}})
    for key, value in extra_specs.items():
        found = _SPEC.fullmatch(key)
        if found and key not in (PROFILE_KEY, EXPANDED_KEY, AVAILABLE_KEY,
                                 *FLAVOR_KEYS):
            kind, group, name = found.groups()
            written[group][kind][name] = value
        elif re.match(r'accel[^a-z:]*:', key) and not found:
            raise exception.InvalidRequest(
                f'The extra spec {key} has no group that Placement knows: use '
                f'accel:, accel<number>: or accel_<NAME>:.')
    return written


def with_image_overrides(extra_specs: Mapping[str, str],
                         properties: Mapping[str, str]) -> dict[str, str]:
    """Return extra specs in which bitstreams that the server's image requests
    replace functions of the flavor.

    Only groups with accel<g>:runtime_programming=true are changed, because an
    operator may sell fixed functions. If a key of the image names no group, it
    applies to the only such group.

    :param properties: properties of the image. Only ``accel<g>:bitstream_id``
        is read: function_id is a property of images that are bitstreams.
    :raises InvalidRequest: a key that names no group could apply to several.
    """
    result = dict(extra_specs)
    asked = {}
    for key, value in properties.items():
        found = _SPEC.fullmatch(key)
        if found and found[1] == 'accel' and found[3] == 'bitstream_id':
            asked[found[2]] = value
    if not asked:
        return result
    free = [r.group for r in parse(extra_specs) if r.runtime_programming]
    for group, image in asked.items():
        if group == '' and '' not in free and free:
            if len(free) > 1:
                raise exception.InvalidRequest(
                    f'accel:bitstream_id={str(image)[:60]} could be for any '
                    f'of the groups {", ".join(free)} of the flavor: write '
                    f'accel{free[0]}:bitstream_id for the first.')
            group = free[0]
        if group in free:
            for key in _FUNCTION_KEYS:
                result.pop(f'accel{group}:{key}', None)
            result[f'accel{group}:bitstream_id'] = image
    return result


@dataclasses.dataclass(frozen=True)
class Server:
    """The properties of a server that affect its accelerators."""

    uuid: str
    project_id: str
    #: of the flavor, with the profile expanded
    extra_specs: Mapping[str, str]
    #: of the image from which the server was created or rebuilt
    image_properties: Mapping[str, str] = dataclasses.field(
        default_factory=dict)
    #: NUMA nodes of the host on which Nova placed the guest's nodes; empty if
    #: the guest has none, or they are unknown
    numa_nodes: frozenset[int] = frozenset()
    #: addresses of PCI devices of the host that Nova assigned to the server
    pci_devices: tuple[str, ...] = ()
    #: id of the flavor in Nova's API; '' if unknown
    flavor: str = ''

    @functools.cached_property
    def requests(self) -> list[AcceleratorRequest]:
        """Return the requests of the flavor, in the order of parse().

        :raises InvalidRequest: the error names the extra spec.
        """
        return parse(self.extra_specs)

    @functools.cached_property
    def affinity(self) -> Affinity:
        """Return the required location of the accelerators of the server.

        :raises InvalidRequest: the value of an extra spec is not allowed.
        """
        return affinity(self.extra_specs)

    @property
    def max_hours(self) -> int:
        """Return the maximum lifetime in hours, or 0 for no limit."""
        return int(self.extra_specs.get(MAX_HOURS_KEY, 0))

    @property
    def detaches(self) -> bool:
        """Return whether the guest releases its devices before a live
        migration, and gets other devices on the new host."""
        return self.extra_specs.get(LIVE_MIGRATION_KEY) == 'detach'

    @property
    def takes_along(self) -> bool:
        """Return whether the state of the devices moves with the guest in a
        live migration."""
        return self.extra_specs.get(LIVE_MIGRATION_KEY) == 'transparent'

    @property
    def max_downtime(self) -> int | None:
        """Return the permitted pause of the guest in seconds, or None if the
        flavor does not set a limit."""
        seconds = self.extra_specs.get(DOWNTIME_KEY)
        return int(seconds) if seconds else None

    @functools.cached_property
    def wanted(self) -> list[AcceleratorRequest]:
        """Return the requests of the flavor, changed by properties of the
        image.

        :raises InvalidRequest: a property of the image cannot be read, or the
            flavor does not allow it.
        """
        return [wanted if wanted in self.requests
                else dataclasses.replace(wanted, chosen_by_owner=True)
                for wanted in parse(with_image_overrides(
                    self.extra_specs, self.image_properties))]


def _parse_group(group, resources, trait, accel) -> list[AcceleratorRequest]:
    classes = sorted(filter(naming.is_accelerator_class, resources))
    for key in accel:
        if key not in _ACCEL_KEYS and not _DRIVER_KEY.fullmatch(key):
            raise exception.InvalidRequest(
                f'The extra spec accel{group}:{key} is unknown: the keys are '
                f'{", ".join(_ACCEL_KEYS)} and driver_<name>, and without '
                f'group device_profile, {", ".join(_FLAVOR_NAMES)}.')
    if not classes:
        if accel:
            raise exception.InvalidRequest(
                f'accel{group}:{sorted(accel)[0]} has no accelerator to go '
                f'with: add resources{group}:CUSTOM_ACCELERATOR_<TYPE>=1.')
        return []
    for name in (*resources, *trait):
        # Placement's pattern for both (POST /resource_classes, PUT /traits)
        if not re.fullmatch('[A-Z0-9_]{1,255}', name):
            kind = 'resources' if name in resources else 'trait'
            raise exception.InvalidRequest(
                f'{kind}{group}:{name[:60]} has a name that Placement does not '
                f'take: use up to 255 of A-Z, 0-9 and "_".')
    for name, value in trait.items():
        if value not in ('required', 'forbidden'):
            raise exception.InvalidRequest(
                f'trait{group}:{name}={value} is neither required nor '
                f'forbidden: write one of them.')
    memory = {name: _amount(group, name, resources[name])
              for name in filter(naming.is_memory_class, resources)}
    if accel and len(classes) > 1:
        raise exception.InvalidRequest(
            f'accel{group}:{sorted(accel)[0]} could mean any of '
            f'{", ".join(classes)}: give each its own numbered group.')
    functions = sorted(set(accel) & set(_FUNCTION_KEYS))
    if len(functions) > 1:
        raise exception.Contradiction(
            f'{" and ".join(f"accel{group}:{k}" for k in functions)} are '
            f'given for one accelerator: keep one of them.')
    wanted: list[dict[str, Any]] = [
        {key: value} for key in functions
        for value in _choices(group, key, accel[key])] or [{}]
    runtime = RUNTIME in accel and _boolean(group, RUNTIME, accel[RUNTIME])
    prefer = (_preferred(group, accel[_PREFER], trait)
              if _PREFER in accel else ())
    requests = []
    for name in classes:
        plain = AcceleratorRequest(
            group=group, resource_class=name,
            amount=_amount(group, name, resources[name]),
            required=_traits(trait, 'required'),
            forbidden=_traits(trait, 'forbidden'),
            memory=memory, runtime_programming=runtime, prefer=prefer,
            driver_keys={found[1]: str(value) for key, value in accel.items()
                         if (found := _DRIVER_KEY.fullmatch(key))})
        first, *others = [dataclasses.replace(plain, **choice)
                          for choice in wanted]
        requests.append(dataclasses.replace(
            first, alternatives=tuple(others)))
    return requests


def _preferred(group, value, trait) -> tuple[str, ...]:
    """Return the preferred traits of a group, the best one first.

    :param value: value of the extra spec, traits separated by ",".
    :param trait: trait of the group -> required or forbidden.
    """
    key = f'accel{group}:{_PREFER}'
    found = tuple(one.strip() for one in str(value).split(','))
    for name in found:
        if not re.fullmatch('[A-Z0-9_]{1,255}', name):
            raise exception.InvalidRequest(
                f'{key} has {name[:60]!r}, which is not a trait: write traits '
                f'of devices, the best one first, with "," between them.')
        if found.count(name) > 1:
            raise exception.InvalidRequest(
                f'{key} has {name} twice: name each trait once.')
        if name in trait:
            raise exception.Contradiction(
                f'{key} has {name}, and trait{group}:{name}={trait[name]}: '
                f'keep one of them.')
    return found


def _choices(group, key, value) -> list[str]:
    """Return the functions in the value of a key, in order. The value of
    bitstream_id is a single image."""
    if key == 'bitstream_id':
        return [_wanted(group, key, value)]
    found = [_wanted(group, key, item) for item in str(value).split(',')]
    for item in found:
        if found.count(item) > 1:
            raise exception.InvalidRequest(
                f'accel{group}:{key}={value} has {item} twice: name each '
                f'alternative once.')
    return found


def _amount(group, name, value) -> int:
    try:
        amount = int(value)
    except (TypeError, ValueError):
        amount = 0
    if amount < 1:
        raise exception.InvalidRequest(
            f'resources{group}:{name}={value} is not an amount: use a whole '
            f'number from 1 up.')
    return amount


def _boolean(group, key, value) -> bool:
    # imported here, because the import compiles 500 patterns of passwords,
    # which would delay other commands
    from oslo_utils import strutils
    try:
        return strutils.bool_from_string(value, strict=True)
    except ValueError:
        raise exception.InvalidRequest(
            f'accel{group}:{key}={value} is neither true nor false: write one '
            f'of them.') from None


def _wanted(group, key, value) -> str:
    value = str(value).strip()
    if key == 'function_name':
        if not value:
            raise exception.InvalidRequest(
                f'accel{group}:function_name has an empty name: give the name '
                f'that the image has in its property accel:function_name.')
        naming.function_name_trait(value)
        return value
    try:
        # an image id keeps its dashes, as in Glance
        value_hex = model.uuid_hex(value)
    except ValueError:
        what = 'function' if key == 'function_id' else 'image'
        raise exception.InvalidRequest(
            # a value of an image may have any length
            f'accel{group}:{key}={value[:60]} is not a UUID: give the UUID of '
            f'the {what}.') from None
    if key == 'function_id':
        return value_hex
    return '-'.join((value_hex[:8], value_hex[8:12], value_hex[12:16],
                     value_hex[16:20], value_hex[20:]))


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The resources that a server was allocated from one provider."""

    provider_uuid: str
    #: accelerator class -> amount
    resources: Mapping[str, int]
    traits: frozenset[str]
    #: memory class -> MiB
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)


def match(requests: list[AcceleratorRequest], allocations: list[Allocation],
          ) -> list[tuple[AcceleratorRequest, Allocation]]:
    """Assign each request to the provider that satisfies it.

    Nova's allocations do not contain the names of groups. Hence requests are
    matched to providers by class, amount, traits and memory. All classes of a
    numbered group are from one provider. If several assignments fit, the one
    with the least programming is chosen. If there are several of these, the
    first in the order of requests and provider UUIDs is chosen. Hence the
    result is deterministic.

    Allocations beyond the requests are logged and ignored. Nova leaves such a
    surplus after a resize whose host was killed.

    :returns: the requests in their order, each with its allocation.
    :raises DeviceUnavailable: the allocations do not satisfy the requests, for
        example because a provider lost a trait since the scheduling.
    """
    by_uuid = {a.provider_uuid: a
               for a in sorted(allocations, key=lambda a: a.provider_uuid)}
    bundles = collections.defaultdict(list)
    for number, wanted in enumerate(requests):
        # Placement may satisfy the unnumbered group from several providers
        bundles[wanted.group or number].append(wanted)
    chosen = matching.assign(
        [_item(bundle, by_uuid.values()) for bundle in bundles.values()],
        {uuid: a.resources for uuid, a in by_uuid.items()})
    if chosen is None:
        # both texts may be long, and Nova cuts a fault off at 255 characters
        asked = textwrap.shorten(
            ', '.join(str(r) for r in requests) or 'no accelerator', 85)
        given = textwrap.shorten(', '.join(
            f'{uuid[:8]} {dict(a.resources)}'
            for uuid, a in by_uuid.items()), 60)
        raise exception.DeviceUnavailable(
            f'The flavor asks for {asked}, and the allocation has '
            f'{given or "no accelerator"}, which does not fit (any more): the '
            f'build has to be scheduled again.')
    provider = dict(zip(bundles, chosen))
    pairs = [(wanted, by_uuid[provider[wanted.group or number]])
             for number, wanted in enumerate(requests)]
    _log_surplus(pairs, by_uuid)
    return pairs


def _item(bundle, allocations) -> matching.Item:
    costs = {}
    for allocation in allocations:
        # traits of the unnumbered group may be satisfied by any provider of
        # the tree (Placement API, 1.29), so they do not identify this one
        if not bundle[0].group or all(
                r.required <= allocation.traits
                and not r.forbidden & allocation.traits
                and all(allocation.memory.get(name, 0) >= mib
                        for name, mib in r.memory.items()) for r in bundle):
            costs[allocation.provider_uuid] = sum(
                r.programs and allocation.traits.isdisjoint(r.wanted_traits)
                for r in bundle)
    amounts: dict[str, int] = collections.Counter()
    for wanted in bundle:
        amounts[wanted.resource_class] += wanted.amount
    return matching.Item(amounts, costs)


def _log_surplus(pairs, by_uuid) -> None:
    left = {uuid: collections.Counter(a.resources)
            for uuid, a in by_uuid.items()}
    for wanted, allocation in pairs:
        left[allocation.provider_uuid][wanted.resource_class] -= wanted.amount
    surplus = {uuid: dict(+amounts) for uuid, amounts in left.items()
               if +amounts}
    if surplus:
        LOG.warning(
            'More accelerators are allocated than the flavor asks for: %s is '
            'left over. Nova leaves such allocations after a resize whose '
            'host was killed; compare those of the server with its flavor.',
            ', '.join(f'{amounts} of provider {uuid}'
                      for uuid, amounts in surplus.items()))
