# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-accel check asks other services, and what it reads of theirs."""

import collections
from collections.abc import Iterable, Iterator
import importlib.metadata
import os
import typing
from urllib import parse
import uuid

from keystoneauth1 import exceptions as ks_exc
from keystoneauth1 import loading as ks_loading
from oslo_config import cfg

from nova_accel.bitstream import glance
from nova_accel.cmd import check_line
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel import naming
from nova_accel import profiles
from nova_accel import request

CONF = conf.CONF
Line = check_line.Line
OK, WARNING = check_line.OK, check_line.WARNING
FAILURE = check_line.FAILURE

_FILTER = 'nova_accel.scheduler.filters.AcceleratorFilter'
_WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'

#: providers of one class on a host from which on a server that asks for as
#: many of them is not scheduled any more: seven were measured with Nova 34
_MANY_PROVIDERS = 7
_PLACEMENT_CONF = '/etc/placement/placement.conf'
#: traits that a query may forbid and that exist (Placement API)
_MICROVERSION = '1.38'
#: seconds for each answer of Placement
_TIMEOUT = 30
#: sections whose credentials are used here
_CREDENTIALS = ('placement', 'service_user')


# Placement

class Refused(Exception):
    """Placement cannot be asked; its argument is the line that says so."""


def _placement(path: str) -> typing.Any:
    """Return what Placement answers nova-compute's own credentials.

    :raises Refused: it does not.
    """
    try:
        auth = ks_loading.load_auth_from_conf_options(CONF, 'placement')
        if auth is None:
            raise Refused(Line(
                FAILURE, '[placement] has no credentials, so that '
                'Placement was not asked',
                'set auth_type, auth_url, username, password and '
                'project_name there'))
        session = ks_loading.load_session_from_conf_options(CONF, 'placement')
        adapter = ks_loading.load_adapter_from_conf_options(
            CONF, 'placement', session=session, auth=auth)
        return adapter.get(path, microversion=_MICROVERSION,
                           timeout=_TIMEOUT).json()
    except (ks_exc.ClientException, OSError, ValueError) as error:
        raise Refused(_unanswered(error, 'Placement', 'placement',
                                  '[placement] region_name and '
                                  'valid_interfaces')) from error


def _unanswered(error, service, section, where) -> Line:
    """Say why a service did not answer.

    :param where: options that say where the service is.
    """
    url = glance.unreachable(error)
    if url.startswith('Keystone'):
        return Line(FAILURE, f'{url} cannot be reached',
                    f'correct [{section}] auth_url, or see that it runs')
    if url:
        return Line(FAILURE, f'{service} at {url} cannot be reached',
                    f'see that it runs, and compare {where}')
    if glance.rejects_credentials(error):
        return Line(FAILURE, f'Keystone rejects the credentials of '
                             f'[{section}] ({check_line.short(error)})',
                    'correct username and password there')
    if isinstance(error, ks_exc.Forbidden):
        return Line(FAILURE, f'{service} refuses the user of [{section}] '
                             f'({check_line.short(error)})',
                    'give it the role service or admin in its project')
    return Line(FAILURE, f'{service} does not answer the credentials of '
                         f'[{section}] ({check_line.short(error)})',
                f'see that it runs, and compare {where}')


def placement_answers(host) -> Iterator[Line]:
    """Check that Placement answers."""
    try:
        _placement('/resource_providers?' + parse.urlencode(
            {'name': CONF.host}))
    except Refused as refused:
        yield refused.args[0]
    yield from _wide(host)


def _wide(host) -> Iterator[Line]:
    counts = collections.Counter(
        name for provider in host.providers for name in provider.inventory)
    wide = {name: count for name, count in counts.items()
            if count >= _MANY_PROVIDERS}
    if not wide:
        return
    name, count = max(wide.items(), key=lambda item: item[1])
    found = (f'{count} providers of this host offer {name}: a server that '
             f'asks for {_MANY_PROVIDERS} of them has too many allocation '
             f'candidates')
    remedy = ('set [placement] max_allocation_candidates = 1000 and '
              'allocation_candidates_generation_strategy = breadth-first in '
              'placement.conf, or share providers ([accel] pools)')
    values: dict = {}
    try:
        cfg.ConfigParser(_PLACEMENT_CONF, values).parse()
    except (OSError, cfg.Error):
        yield Line(OK, f'{found}; placement.conf is not on this host',
                   remedy)
        return
    section = values.get('placement', {})
    limit = section.get('max_allocation_candidates', ['-1'])[-1]
    strategy = section.get(
        'allocation_candidates_generation_strategy', [''])[-1]
    if limit == '-1' or strategy != 'breadth-first':
        yield Line(WARNING, found, remedy)


# Glance

def programs(drivers: Iterable[base.AcceleratorDriver]) -> bool:
    """Return whether regions of one of these drivers are programmed."""
    return any(type(driver).program is not base.AcceleratorDriver.program
               for driver in drivers)


def _images() -> typing.Any:
    servers = CONF.glance.api_servers
    return glance.service_client(servers[0] if servers else None)


def glance_answers(host) -> Iterator[Line]:
    """Check that Glance answers nova-compute's own credentials."""
    if not programs(host.drivers.values()):
        return
    try:
        next(iter(_images().images.list(limit=1)), None)
    except exception.NoCredentials:
        needed = [option for option in ('bitstream_owners', 'program_ahead')
                  if getattr(CONF.accel, option)]
        yield Line(
            FAILURE if needed else WARNING,
            '[service_user] has no credentials, with which nova-compute reads '
            'bitstreams at run time, so that Glance was not asked' + (
                f'; [accel] {" and ".join(needed)} needs them' if needed
                else ''),
            'set auth_type, auth_url, username, password and project_name '
            'there')
    except exception.GlanceUnavailable as error:
        yield Line(FAILURE, *check_line.split(str(error)))
    except Exception as error:
        # of three libraries without a common base
        yield _unanswered(error, 'Glance', 'service_user',
                          '[glance] api_servers and region_name')


# The database

def database_answers(host) -> Iterator[Line]:
    """Check that the database of flavors answers."""
    url = CONF.api_database.connection
    if not url:
        yield Line(FAILURE, '[api_database] connection is not set, so '
                            'that the database was not asked',
                   'set it, or give check the nova.conf of the service')
        return
    import sqlalchemy
    try:
        with sqlalchemy.create_engine(url).connect() as connection:
            connection.execute(sqlalchemy.text('SELECT 1'))
    except Exception as error:
        # of SQLAlchemy, of the driver of the database, or of its absence; the
        # URL has a password
        why = check_line.short(getattr(error, 'orig', None) or error)
        yield Line(FAILURE, f'the database of [api_database] connection '
                            f'does not answer ({why.replace(url, "")})',
                   'see that it runs and that this host may reach it, or '
                   'correct the option')


# nova-scheduler

def filters(host) -> Iterator[Line]:
    """Check how [filter_scheduler] has AcceleratorFilter."""
    section = CONF.filter_scheduler
    name = _FILTER.rpartition('.')[2]
    enabled = section.enabled_filters
    if name not in enabled:
        yield Line(FAILURE, '[filter_scheduler] enabled_filters does not '
                            'have AcceleratorFilter, so that servers get '
                            'devices that do not fit',
                   'add it as the last one')
    elif _FILTER not in section.available_filters:
        yield Line(FAILURE, '[filter_scheduler] available_filters does '
                            'not have AcceleratorFilter, so that '
                            'nova-scheduler does not start',
                   f'add a line available_filters = {_FILTER}')
    elif enabled.count(name) > 1:
        yield Line(WARNING, f'[filter_scheduler] enabled_filters has '
                            f'AcceleratorFilter {enabled.count(name)} '
                            f'times, so that each host is filtered as '
                            f'often', 'leave only the last one')
    elif enabled[-1] != name:
        yield Line(WARNING, '[filter_scheduler] enabled_filters has '
                            'filters behind AcceleratorFilter, so that '
                            'it ranks hosts which they then drop',
                   'move it to the end')


def weigher(host) -> Iterator[Line]:
    """Check how [filter_scheduler] has AcceleratorWeigher."""
    classes = CONF.filter_scheduler.weight_classes
    if _WEIGHER not in classes:
        yield Line(FAILURE, '[filter_scheduler] weight_classes does not '
                            'have AcceleratorWeigher, so that hosts '
                            'whose regions carry the function are not '
                            'preferred', f'add {_WEIGHER}')
    elif classes.count(_WEIGHER) > 1:
        yield Line(WARNING, f'[filter_scheduler] weight_classes has '
                            f'AcceleratorWeigher '
                            f'{classes.count(_WEIGHER)} times, so that '
                            f'its weight counts as often',
                   'leave only one')
    elif not CONF.accel.weight_multiplier:
        yield Line(WARNING, '[accel] weight_multiplier is 0, so that the '
                            'weigher has no effect',
                   'remove it, unless aggregates have another one')


# nova-api

def entry_point(host) -> Iterator[Line]:
    """Check that this Python's nova-api loads nova_accel."""
    group = 'nova.api.extra_spec_validators'
    if not any(point.value.startswith('nova_accel.') for point
               in importlib.metadata.entry_points(group=group)):
        yield Line(FAILURE, f'nova_accel has no entry point in {group}, '
                            f'so that nova-api takes '
                            f'accel:device_profile for one of Cyborg',
                   'install nova_accel into the Python of nova-api, with pip')


def profiles_load(host) -> Iterator[Line]:
    """Check the files of profiles, and where the profiles lead to."""
    path = CONF.accel.device_profiles
    if not os.path.exists(path):
        yield Line(WARNING,
                   f'[accel] device_profiles {path} does not exist',
                   'create it if flavors are to have accel:device_profile')
        return
    files = profiles.load(path)
    for error in files.bad.values():
        yield Line(FAILURE, *check_line.split(error))
    found = [p for here in files.good.values() for p in here]
    try:
        yield from _dead_ends(found)
    except Refused:
        # the line on Placement tells why
        yield Line(WARNING, 'where the profiles lead to was not looked '
                            'at, as Placement does not answer',
                   'see the line on Placement')
    except exception.NoCredentials:
        yield Line(OK, '[service_user] has no credentials, so that '
                       'Glance was not asked for images of the profiles')
    except (exception.GlanceUnavailable, ks_exc.ClientException) as error:
        yield Line(WARNING, f'where the profiles lead to was not looked '
                            f'at, as Glance does not answer '
                            f'({check_line.short(error)})',
                   'see that it runs')
    if not files.bad:
        yield Line(OK, f'{len(found)} profile{"s" * (len(found) != 1)}')


def _dead_ends(found: Iterable[profiles.Profile]) -> Iterator[Line]:
    """Tell of profiles that send servers to regions for which there is no
    image.

    :raises Refused: Placement cannot be asked.
    """
    known: set[str] = set()
    client: typing.Any = None
    for profile in found:
        specs = profiles.expand({request.PROFILE_KEY: profile.name},
                                lambda name: profile)
        for wanted in request.parse(specs):
            if not wanted.programs:
                continue
            if client is None:
                known = set(_placement('/traits?associated=true')['traits'])
                client = _images()
            yield from _dead_ends_of(profile, wanted, known, client)


def _dead_ends_of(profile, wanted, known, client) -> Iterator[Line]:
    if not known >= wanted.required:
        missing = ', '.join(sorted(wanted.required - known))
        yield Line(WARNING, f'the profile {profile.name} needs the trait '
                            f'{missing}, which no provider has',
                   'correct the trait, or see that nova-compute reports '
                   'devices with it')
        return
    types = [wanted.required & known] if naming.region_type_of(
        wanted.required) else [{trait} for trait in sorted(known)
                               if naming.region_type_of([trait])]
    unfit, fits = {}, False
    for trait in types:
        region_type = naming.region_type_of(trait)
        if not _leads_to(wanted, trait, known):
            continue
        try:
            glance.find_first(wanted, lambda one: glance.find(
                client, one, region_type, ''))
            fits = True
        except (exception.BitstreamError,
                exception.IncompatibleBitstream) as error:
            unfit[str(uuid.UUID(region_type))] = error
    if not unfit:
        return
    shells = ', '.join(sorted(unfit))
    if fits:
        yield Line(WARNING, f'the profile {profile.name} also sends '
                            f'servers to regions of type {shells}, for '
                            f'which there is no image with its function',
                   'require the trait of the right type in its group, '
                   'trait:CUSTOM_FPGA_..._REGION_<TYPE>: required, or upload '
                   'an image for each type')
    else:
        what, _ = check_line.split(str(next(iter(unfit.values()))))
        yield Line(WARNING, f'the profile {profile.name} sends servers '
                            f'to regions of type {shells}, and {what}',
                   'upload an image for them, and make it public or add its '
                   'project to [accel] bitstream_owners')


def _leads_to(wanted, traits: Iterable[str], known: set[str]) -> bool:
    """Return whether a provider has these traits and those of a request, and
    does not carry its function already."""
    query = ','.join([*sorted({*traits, *wanted.required}), *(
        f'!{trait}' for trait in sorted(
            {*wanted.wanted_traits, *wanted.forbidden} & known))])
    return bool(_placement('/resource_providers?' + parse.urlencode(
        {'required': query}))['resource_providers'])


def forget_credentials() -> None:
    """Have CONF no longer demand the options of credentials.

    keystoneauth registers some as required, of the plugin that a section
    names; another service may do without them.
    """
    types = {section: CONF[section].auth_type for section in _CREDENTIALS}
    CONF.reset()
    for section, name in types.items():
        if name:
            CONF.unregister_opts(
                ks_loading.get_auth_plugin_conf_options(name), section)
