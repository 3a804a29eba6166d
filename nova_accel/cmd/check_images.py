# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check that profiles lead to regions, and that images exist for these regions,
for nova-accel check."""

from collections.abc import Iterable, Iterator
import functools
import os
import uuid

from nova_accel.bitstream import glance
from nova_accel.cmd import check_services
from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from nova_accel import profiles
from nova_accel import request
from nova_accel import text

CONF = conf.CONF
Line = check_services.Line
OK, WARNING = check_services.OK, check_services.WARNING
FAILURE = check_services.FAILURE


def profiles_load(host) -> Iterator[Line]:
    """Check the files of profiles, and that their regions and images exist."""
    path = CONF.accel.device_profiles
    if not os.path.exists(path):
        yield Line(WARNING,
                   f'[accel] device_profiles {path} does not exist',
                   'create it if flavors use accel:device_profile')
        return
    files = profiles.load(path)
    for error in files.bad.values():
        yield Line(FAILURE, *check_services.split(error))
    found = [p for here in files.good.values() for p in here]
    yield from check_services.as_far_as_answered(
        _dead_ends(found), 'where the profiles lead to',
        'Glance was not asked for images of the profiles')
    if not files.bad:
        yield Line(OK, f'{len(found)} profile{"s" * (len(found) != 1)}')


def _dead_ends(found: Iterable[profiles.Profile]) -> Iterator[Line]:
    """Report profiles that cannot work as intended: no provider has a
    preferred trait, or no image exists for regions that the profile permits.

    :raises Refused: Placement cannot be queried.
    :raises ImageRefused: Glance does not show images to [service_user].
    """
    known = functools.cache(check_services.known_traits)
    client = functools.cache(glance.service_client)
    for profile in found:
        specs = profiles.expand({request.PROFILE_KEY: profile.name},
                                lambda name: profile)
        for wanted in request.parse(specs):
            if not (wanted.programs or wanted.prefer):
                continue
            for trait in wanted.prefer:
                if trait not in known():
                    yield check_services.unknown_trait(
                        f'the profile {profile.name}', 'prefers', trait)
            if wanted.programs:
                yield from _dead_ends_of(profile, wanted, known(), client())


def _dead_ends_of(profile, wanted, known, client) -> Iterator[Line]:
    if not known >= wanted.required:
        yield check_services.unknown_trait(
            f'the profile {profile.name}', 'needs',
            ', '.join(sorted(wanted.required - known)))
        return
    unfit, fits = {}, False
    for region_type, traits in _types(wanted.required, known):
        if not _leads_to({
                *traits, *wanted.required,
                *(f'!{trait}' for trait in known & {
                    *wanted.wanted_traits, *wanted.forbidden})}):
            # no region has the type, or all of them carry the function already
            continue
        try:
            glance.find_first(wanted, lambda one: glance.find(
                client, one, region_type, ''))
            fits = True
        except exception.ImageRefused:
            raise
        except (exception.BitstreamError,
                exception.IncompatibleBitstream) as error:
            unfit[str(uuid.UUID(region_type))] = error
    if not unfit:
        return
    shells = ', '.join(sorted(unfit))
    if fits:
        yield Line(WARNING, f'the profile {profile.name} also sends '
                            f'servers to regions of type {shells}, for '
                            f'which no image has its function',
                   'require the trait of the right type in its group, '
                   'trait:CUSTOM_FPGA_..._REGION_<TYPE>: required, or upload '
                   'an image for each type')
    else:
        what, _ = check_services.split(str(next(iter(unfit.values()))))
        yield Line(WARNING, f'the profile {profile.name} sends servers '
                            f'to regions of type {shells}, and {what}',
                   'upload an image for them, and make it public or add its '
                   'project to [accel] bitstream_owners')


def _types(required, known: set[str]) -> list[tuple[str, set[str]]]:
    """Return the region types that can satisfy a request, as (region type,
    traits to query Placement for).

    :param required: traits that the request requires.
    :param known: all traits that providers have.
    """
    candidates = [set(required) & known] if naming.region_type_of(
        required) else [{trait} for trait in sorted(known)]
    return [(region_type, traits) for traits in candidates
            if (region_type := naming.region_type_of(traits))]


def _leads_to(traits: Iterable[str]) -> bool:
    """Return whether, according to Placement, a provider has all of these
    traits. If a trait is written with a leading "!", the provider must not
    have it."""
    query = ','.join(sorted(traits, key=lambda t: (t.startswith('!'), t)))
    return bool(check_services.providers(required=query))


# Clearing images

def clearing_images(host) -> Iterator[Line]:
    """Check that an image exists to clear each type of region that users may
    program."""
    yield from check_services.as_far_as_answered(
        _clearing_images(), 'whether images clear what users program',
        'Nova and Glance were not asked for flavors with which users program, '
        'and for images that clear regions')


def _clearing_images():
    # traits_of_flavors() reports if flavors cannot be read
    asked, _ = check_services.all_requests()
    users = {name: wanted for name, requests in asked.items()
             if (wanted := [one for one in requests
                            if one.runtime_programming])}
    if users:
        yield from _not_cleared(users)


def _not_cleared(users) -> Iterator[Line]:
    known = check_services.known_traits()
    client = glance.service_client()
    #: type of regions -> why no image clears them, '' if an image does
    why: dict[str, str] = {}
    concerned: dict[str, list[str]] = {}
    for name, wanted in users.items():
        for region_type, traits in {
                found for one in wanted if known >= one.required
                for found in [(region_type, frozenset(traits | one.required))
                              for region_type, traits
                              in _types(one.required, known)]}:
            if not _leads_to(traits):
                continue
            if region_type not in why:
                why[region_type] = _why_not_cleared(client, region_type)
            if why[region_type]:
                concerned.setdefault(region_type, []).append(name)
    for region_type, names in sorted(concerned.items()):
        shown = text.some(names)
        lets = 'lets' if len(names) == 1 else 'let'
        yield Line(
            WARNING, f'{shown} {lets} users program regions of type '
                     f'{uuid.UUID(region_type)}, and {why[region_type]}: '
                     f'no other server gets a region that a project '
                     f'programmed',
            f'upload an image with {glance.CLEARS} and '
            f'{glance.REGION_TYPE_ID}={uuid.UUID(region_type)}, and make it '
            f'public or add its project to [accel] bitstream_owners')


def _why_not_cleared(client, region_type: str) -> str:
    try:
        glance.find_clearing(client, region_type)
    except exception.ImageNotFound:
        return 'no image of yours clears them'
    except exception.ImageRefused:
        raise
    except exception.BitstreamError as error:
        return check_services.split(str(error))[0]
    return ''
