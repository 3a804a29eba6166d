# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Device profiles: YAML files of named lists of request groups.

A file is one profile or a list of profiles, with the keys of Cyborg's device
profile API (POST /v2/device_profiles)::

    name: nlb
    description: loopback function
    groups:
      - resources:CUSTOM_ACCELERATOR_FPGA: 1
        trait:CUSTOM_FPGA_INTEL_REGION_<type of the region>: required
        accel:function_id: d8424dc4-a4a3-c413-f89e-433683f9040b

Beside ``groups`` it may have ``accel:numa_affinity`` and ``accel:same``, which
apply to the whole server.

A profile is a macro of the flavor: expand() writes its groups as granular
request groups. Only nova-api reads profiles. It refuses flavors whose groups
cannot be satisfied (check_groups()).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import itertools
import os
import pathlib

import yaml

from nova_accel import conf
from nova_accel import exception
from nova_accel import log as logging
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

_SUFFIXES = ('.yaml', '.yml')


@dataclasses.dataclass(frozen=True)
class Profile:
    """A device profile as written in its file."""

    name: str
    description: str
    #: one mapping per group, keys without a group number
    groups: tuple[Mapping[str, str], ...]
    #: extra specs that apply to the whole server
    whole: Mapping[str, str]
    #: file and line
    where: str


@dataclasses.dataclass(frozen=True)
class Files:
    """The content of the profile files, valid and invalid ones."""

    #: path of a valid file -> its profiles
    good: Mapping[str, tuple[Profile, ...]]
    #: path of an invalid file, or of a directory that cannot be read -> the
    #: reason, in one sentence, with the line
    bad: Mapping[str, str]


def load(path: str) -> Files:
    """Read a file of profiles, or all ``*.yaml`` and ``*.yml`` files of a
    directory."""
    base = pathlib.Path(path)
    try:
        # not glob, which treats an unreadable directory as an empty one
        files = sorted(f for f in base.iterdir() if f.suffix in _SUFFIXES
                       ) if base.is_dir() else [base]
    except OSError as error:
        return Files({}, {path: (
            f'The device profile directory {path} cannot be read ({error}): '
            f'make it readable for nova-api.')})
    good: dict[str, tuple[Profile, ...]] = {}
    bad = {}
    taken: dict[str, str] = {}
    for file in files:
        try:
            profiles = tuple(_read(file))
            good[str(file)] = _with_names_of_their_own(profiles, taken)
        except exception.InvalidProfile as error:
            bad[str(file)] = str(error)
        else:
            taken.update((p.name, p.where) for p in profiles)
    return Files(good, bad)


def _with_names_of_their_own(profiles, taken):
    here: dict[str, str] = {}
    for profile in profiles:
        other = taken.get(profile.name) or here.get(profile.name)
        if other:
            raise exception.InvalidProfile(
                f'{profile.where}: the profile name {profile.name!r} is taken '
                f'by {other}: rename one of the two.')
        here[profile.name] = profile.where
    return profiles


def _read(file):
    try:
        with open(file, encoding='utf-8') as stream:
            node = yaml.compose(stream, Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise exception.InvalidProfile(
            f'The device profile file {file} does not exist: create it, or '
            f'correct [accel] device_profiles.') from None
    except (OSError, UnicodeDecodeError) as error:
        raise exception.InvalidProfile(
            f'The device profile file {file} cannot be read ({error}): make '
            f'it readable for nova-api.') from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise exception.InvalidProfile(
            f'{file}, line {mark.line + 1}: {error.problem}: correct the '
            f'YAML.') from None
    except yaml.YAMLError as error:
        raise exception.InvalidProfile(
            f'{file}: {error}: correct the YAML.') from None
    except RecursionError:
        raise exception.InvalidProfile(
            f'{file} has brackets within brackets, too many to be read: '
            f'correct the YAML.') from None
    if node is None:
        return
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for item in nodes:
        yield _profile(file, item)


def _where(file, node, key=None) -> str:
    line = f'{file}, line {node.start_mark.line + 1}'
    return f'{line}, key {key!r}' if key else line


def _profile(file, node) -> Profile:
    fields = _mapping(file, node, 'a profile')
    for key, value in fields.items():
        if key not in ('name', 'description', 'groups', 'uuid',
                       *request.FLAVOR_KEYS):
            raise exception.InvalidProfile(
                f'{_where(file, value, key)}: unknown key in a profile, which '
                f'has name, description, groups, '
                f'{" and ".join(request.FLAVOR_KEYS)} only: remove the key.')
    for key in ('name', 'groups'):
        if key not in fields:
            raise exception.InvalidProfile(
                f'{_where(file, node)}: the profile has no {key}: add the key.')
    name = _scalar(file, fields['name'], 'name')
    if not name:
        raise exception.InvalidProfile(
            f'{_where(file, fields["name"], "name")}: the name is empty: give '
            f'one.')
    whole = _whole(file, fields)
    groups = fields['groups']
    if not isinstance(groups, yaml.SequenceNode) or not groups.value:
        raise exception.InvalidProfile(
            f'{_where(file, groups, "groups")}: groups has to be a list with '
            f'at least one group: begin each with "- ".')
    return Profile(
        name=name,
        description=_scalar(file, fields['description'], 'description')
        if 'description' in fields else '',
        groups=tuple(_group(file, group) for group in groups.value),
        whole=whole, where=_where(file, node))


def _whole(file, fields) -> dict[str, str]:
    whole = {key: _scalar(file, fields[key], key)
             for key in request.FLAVOR_KEYS if key in fields}
    for key, value in whole.items():
        try:
            request.affinity({key: value})
        except exception.InvalidRequest as error:
            raise exception.InvalidProfile(
                f'{_where(file, fields[key], key)}: {error}') from None
    return whole


def _group(file, node) -> dict[str, str]:
    group = {}
    for key, value in _mapping(file, node, 'a group').items():
        kind, _, name = key.partition(':')
        if kind not in ('resources', 'trait', 'accel') or not name:
            raise exception.InvalidProfile(
                f'{_where(file, value, key)}: unknown key in a group, which '
                f'has keys resources:, trait: and accel: only, without a '
                f'number: correct the key.')
        if key in request.FLAVOR_KEYS:
            raise exception.InvalidProfile(
                f'{_where(file, value, key)}: {key} is of the whole server and '
                f'not of a group: write it beside groups.')
        if kind == 'resources':
            key = f'resources:{naming.class_in_force(name)}'
        if key in group:
            raise exception.InvalidProfile(
                f'{_where(file, value, key)}: the class is given in both '
                f'spellings: remove one.')
        group[key] = _scalar(file, value, key)
        # check each key alone: the error names the line of the key
        alone = {key: group[key]}
        if kind != 'resources' or naming.is_memory_class(name):
            alone['resources:CUSTOM_ACCELERATOR_FPGA'] = '1'
        try:
            request.parse(alone)
        except exception.AcceleratorError as error:
            raise exception.InvalidProfile(
                f'{_where(file, value, key)}: {error}') from None
    try:
        if not request.parse(group):
            raise exception.InvalidProfile(
                f'{_where(file, node)}: the group does not request an '
                f'accelerator: add resources:CUSTOM_ACCELERATOR_<TYPE>: 1.')
    except exception.InvalidProfile:
        raise
    except exception.InvalidRequest as error:
        raise exception.InvalidProfile(
            f'{_where(file, node)}: {error}') from None
    return group


def _mapping(file, node, what) -> dict:
    if not isinstance(node, yaml.MappingNode):
        raise exception.InvalidProfile(
            f'{_where(file, node)}: {what} has to be a mapping of keys to '
            f'values: write "key: value" lines.')
    fields = {}
    for key_node, value in node.value:
        key = _scalar(file, key_node, 'key')
        if key in fields:
            raise exception.InvalidProfile(
                f'{_where(file, key_node, key)}: duplicate key: remove one.')
        fields[key] = value
    return fields


def _scalar(file, node, key) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise exception.InvalidProfile(
            f'{_where(file, node, key)}: the value is a {node.id} and has to '
            f'be a plain value: write one.')
    return node.value.strip()


class ProfileStore:
    """The profiles of [accel] device_profiles. Changed files are read again.

    If a file becomes invalid, the profiles that it had before stay in use.
    """

    def __init__(self) -> None:
        self._stamp: tuple | None = None
        self._good: dict[str, tuple[Profile, ...]] = {}
        self._once = logging.Once()

    def get(self, name: str) -> Profile:
        """Return a profile.

        :raises InvalidProfile: no profile has this name. The log of nova-api
            has the details, for the operator.
        """
        path = CONF.accel.device_profiles
        stamp = self._fingerprint(path)
        if stamp is None or stamp != self._stamp:
            self._read(path)
            self._stamp = stamp
        profiles = {profile.name: profile for profile
                    in itertools.chain(*self._good.values())}
        try:
            return profiles[name]
        except KeyError:
            LOG.error(
                'A flavor asks for the device profile %r, and %s has %s: '
                'correct accel:device_profile or add the profile.', name, path,
                ', '.join(sorted(profiles)) or 'no profiles')
            raise exception.InvalidProfile(
                f'The flavor asks for the device profile {name!r}, which '
                f'cannot be used: ask the operator of the cloud.') from None

    def _read(self, path):
        files = load(path)
        for file, error in files.bad.items():
            self._once.log(('file', file), LOG.error, '%s', error)
        self._once.only('file', files.bad)
        # of a directory that cannot be read, all profiles are kept
        before = {file: profiles for file, profiles in self._good.items()
                  if file in files.bad or path in files.bad
                  and pathlib.Path(path) in pathlib.Path(file).parents}
        # if two files have a profile of one name, the present one takes
        # precedence over one that was kept
        self._good = {**before, **files.good}

    @staticmethod
    def _fingerprint(path):
        files = [path]
        try:
            if os.path.isdir(path):
                files += (e.path for e in os.scandir(path)
                          if e.name.endswith(_SUFFIXES))
            return tuple(sorted(
                (f, s.st_mtime_ns, s.st_size) for f, s in
                ((f, os.stat(f)) for f in files)))
        except OSError:
            return None


def expand(extra_specs: Mapping[str, str], get: Callable[[str], Profile],
           ) -> dict[str, str]:
    """Return the extra specs from which a server is built.

    * accel:device_profile becomes the granular groups _ACCEL0, _ACCEL1 ...; a
      group of several FPGAs becomes a group for each: _ACCEL0_0, _ACCEL0_1 ...
    * Early spellings are replaced by present ones.
    * A request for a specific bitstream requires a programmable region.
    * group_policy is added if Placement requires it.

    Extra specs without accelerators are returned unchanged.

    :param get: ProfileStore.get.

    :raises InvalidRequest: a request is malformed, or the profile unknown.
    """
    specs = dict(extra_specs)
    name = specs.pop(request.PROFILE_KEY, None)
    if name is not None:
        profile = get(name)
        written = dict(profile.whole)
        for suffix, group in _granular(profile.groups):
            for key, value in group.items():
                kind, _, rest = key.partition(':')
                written[f'{kind}{suffix}:{rest}'] = value
        for key in written:
            if key in specs:
                raise exception.InvalidRequest(
                    f'The flavor has {key}, which the device profile {name!r} '
                    f'writes too: use another group name, or remove it from '
                    f'one of them.')
        specs.update(written)
        specs[request.EXPANDED_KEY] = name
    specs = request.modernize(specs)
    requests = request.parse(specs)
    if not requests:
        return dict(extra_specs)
    for wanted in requests:
        if wanted.bitstream_id:
            specs.setdefault(f'trait{wanted.group}:{naming.PROGRAMMABLE}',
                             'required')
    granular = {key.partition(':')[0] for key in specs
                if key.startswith('resources') and ':' in key} - {'resources'}
    if len(granular) > 1:
        # equal devices share a provider: 'isolate' would refuse two groups for
        # two of them
        specs.setdefault('group_policy', 'none')
    return specs


def _granular(groups: Iterable[Mapping[str, str]],
              ) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield (suffix in the flavor, group) for the groups of a profile.

    Placement satisfies a group from one provider, and each region of an FPGA
    is a provider. Hence a group of several FPGAs becomes several groups of one
    FPGA with the same keys.
    """
    fpgas = f'resources:{naming.resource_class("FPGA")}'
    for index, group in enumerate(groups):
        amount = int(group.get(fpgas, 1))
        if amount == 1:
            yield f'{request.PROFILE_GROUP}{index}', group
        else:
            for number in range(amount):
                yield (f'{request.PROFILE_GROUP}{index}_{number}',
                       {**group, fpgas: '1'})


def check_groups(extra_specs: Mapping[str, str]) -> None:
    """Check that each group of a flavor has the device whose traits it
    requires.

    Placement satisfies the resources and traits of a numbered group from one
    provider. Hence no host fits a group that requires a trait of a device, but
    not the device. Flavors of existing servers are not checked.

    :param extra_specs: extra specs of a flavor, with its profile expanded.
    :raises InvalidRequest: a required trait is not in the group of its device,
        or a numbered group has traits but no resources.
    """
    groups = request.groups(extra_specs)
    # suffix of a group -> its accelerator classes
    homes = {suffix: classes for suffix, group in groups.items()
             if (classes := naming.accelerators(group.resources))}
    if not homes:
        return
    for suffix, group in sorted(groups.items()):
        if suffix in homes or any(
                map(naming.is_our_class, group.resources)):
            continue
        for trait in sorted(group.required):
            home = _home(trait, homes)
            if home is not None:
                raise exception.InvalidRequest(
                    f'trait{suffix}:{trait} is not in the group of a device '
                    f'that can have it, and no host can satisfy that: write '
                    f'trait{home}:{trait}, as resources{home}:'
                    f'{min(homes[home])} has it.')
        named = sorted(group.required | group.forbidden)
        if suffix and named and not group.resources:
            home = min(homes)
            raise exception.InvalidRequest(
                f'trait{suffix}:{named[0]} is in a group without resources, '
                f'which no host can satisfy: write trait{home}:{named[0]} for '
                f'the device of resources{home}:{min(homes[home])}, or remove '
                f'it.')


def _home(trait: str, homes: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the suffix of the first group whose devices can have a trait.
    Return None if no such group exists.

    :param homes: suffix of a group -> its accelerator classes.
    """
    for suffix, classes in sorted(homes.items()):
        if any(naming.is_of_device(trait, naming.type_of(name))
               for name in classes):
            return suffix
    return None
