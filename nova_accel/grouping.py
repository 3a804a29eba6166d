# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Refuse flavors in which a trait of a device is not in the device's request
group.

Placement satisfies the resources and traits of a numbered group from one
provider. Hence no host fits a group that requires a trait of a device, but not
the device. Flavors of existing servers are not checked.
"""

from collections.abc import Mapping

from nova_accel import exception
from nova_accel import naming
from nova_accel import request


def check(extra_specs: Mapping[str, str]) -> None:
    """Check that the groups of a flavor can be satisfied: each has the device
    whose traits it requires.

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
