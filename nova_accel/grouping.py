# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Refuse flavors that have a trait in another request group than its device.

Placement satisfies a numbered group, resources and traits, from one provider.
Hence a group that requires a trait of a device without requesting the device
fits no host. Flavors of existing servers are not checked.
"""

from collections.abc import Mapping

from nova_accel import exception
from nova_accel import naming
from nova_accel import request


def check(extra_specs: Mapping[str, str]) -> None:
    """Check that a provider can satisfy each group of a flavor.

    :param extra_specs: with the profile expanded.
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
    """Return the suffix of the group whose device can have a trait, or None if
    no group has such a device.

    :param homes: suffix of a group -> its accelerator classes.
    """
    for suffix, classes in sorted(homes.items()):
        if any(naming.is_of_device(trait, naming.type_of(name))
               for name in classes):
            return suffix
    return None
