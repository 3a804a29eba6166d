# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check other services and their configuration, for nova-accel check."""

import collections
from collections.abc import Iterable, Iterator
import dataclasses
import functools
import re
import typing
from urllib import parse

from keystoneauth1 import exceptions as ks_exc
from keystoneauth1 import loading as ks_loading
from oslo_config import cfg

from nova_accel.bitstream import glance
from nova_accel.cmd import cloud
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import domains
from nova_accel import naming
from nova_accel import near
from nova_accel import profiles
from nova_accel import request
from nova_accel.scheduler import slow
from nova_accel import service_user
from nova_accel import text

CONF = conf.CONF

#: number of providers of one class on a host, and number of them that a server
#: requests, from which Placement is slow: it tries each order of them, for 2 to
#: 14 s with five of eight, for minutes with six of eight (Nova 34,
#: docs/source/operate/placement.rst)
_MANY_PROVIDERS, _MANY_WANTED = 7, 5
_PLACEMENT_CONF = '/etc/placement/placement.conf'
#: version that lets a query forbid traits, and list existing ones (Placement
#: API)
_MICROVERSION = '1.38'
#: seconds to wait for each response of Placement
_TIMEOUT = 30
#: version with which Nova shows extra specs in its flavors
_FLAVORS_MICROVERSION = '2.61'
#: status of a response to an invalid token
_UNAUTHORIZED = 401
#: sections whose credentials the checks use
_CREDENTIALS = ('placement', 'service_user')

OK, WARNING, FAILURE = 'ok', 'warning', 'failure'


@dataclasses.dataclass(frozen=True)
class Line:
    """The result of one check."""

    result: str
    found: str
    #: the remedy
    remedy: str = ''


def split(sentence: str) -> tuple[str, str]:
    """Split an error of nova_accel into its finding and its remedy."""
    found, colon, remedy = sentence.rstrip('.').rpartition(': ')
    return (found, remedy) if colon else (remedy, '')


def short(error: object) -> str:
    """Return the text of an error on one line, for use in a sentence."""
    return re.sub(r'\s+', ' ', str(error) or type(error).__name__)[:160]


# Placement

class Refused(Exception):
    """Placement cannot be queried. The argument is the Line to show for it."""


def placement(path: str, part: str) -> typing.Any:
    """Query Placement as nova-compute, and return a part of the response.

    :param part: see cloud.part_of().
    :raises Refused: Placement cannot be queried.
    """
    try:
        auth = ks_loading.load_auth_from_conf_options(CONF, 'placement')
        if auth is None:
            raise Refused(Line(
                FAILURE, 'Placement was not asked, because [placement] has no '
                'credentials',
                'set auth_type, auth_url, username, password and '
                'project_name there'))
        session = ks_loading.load_session_from_conf_options(CONF, 'placement')
        adapter = ks_loading.load_adapter_from_conf_options(
            CONF, 'placement', session=session, auth=auth)
        return cloud.part_of(adapter.get(
            path, microversion=_MICROVERSION, timeout=_TIMEOUT).json(), part)
    except (ks_exc.ClientException, OSError, ValueError,
            RecursionError) as error:
        raise Refused(_unanswered(error, 'Placement', 'placement',
                                  '[placement] region_name and '
                                  'valid_interfaces')) from error


def providers(**which: str) -> list[dict]:
    """Return the resource providers that Placement selects by these fields.

    :raises Refused: Placement cannot be queried.
    """
    return placement('/resource_providers?' + parse.urlencode(which),
                     'resource_providers')


def known_traits() -> set[str]:
    """Return all traits that providers have.

    :raises Refused: Placement cannot be queried.
    """
    return set(placement('/traits?associated=true', 'traits'))


def _unanswered(error, service, section, where) -> Line:
    """Return a line with the reason why a service could not be queried.

    :param section: section of nova.conf with the credentials.
    :param where: options that contain the address of the service.
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
                             f'[{section}] ({short(error)})',
                    'correct username and password there')
    if _UNAUTHORIZED in (getattr(error, 'http_status', 0),
                         getattr(error, 'code', 0)):
        # names of the status in keystoneauth and glanceclient
        return Line(FAILURE, f'{service} rejects the token of the user of '
                             f'[{section}] ({short(error)})',
                    f'compare [{section}] auth_url with [keystone_authtoken] '
                    f'of {service}')
    if isinstance(error, ks_exc.Forbidden):
        return Line(FAILURE, f'{service} refuses the user of [{section}] '
                             f'({short(error)})',
                    'give it the role service or admin in its project')
    return Line(FAILURE, f'{service} does not answer the credentials of '
                         f'[{section}] ({short(error)})',
                f'see that it runs, and compare {where}')


def placement_answers(host) -> Iterator[Line]:
    """Check that Placement answers."""
    try:
        providers(name=CONF.host)
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
    try:
        asked, is_all = all_requests()
    except exception.NoCredentials:
        asked, is_all = {}, False
    who = [who for who, requests in asked.items() if sum(
        one.resource_class == name for one in requests) >= _MANY_WANTED]
    if is_all and not who:
        return
    found = (f'{count} providers of this host offer {name}, and for '
             + (f'servers of {text.some(who)}' if who else
                f'a server that asks for {_MANY_WANTED} of them')
             + ' Placement tries each order of them, which takes seconds for '
             'five and minutes for six')
    remedy = (f'set {slow.OPTIONS} in placement.conf, or share providers '
              f'([accel] pools)')
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
    optimized = values.get('workarounds', {}).get(
        'optimize_for_wide_provider_trees', [''])[-1]
    if (limit == '-1' or strategy != 'breadth-first'
            or optimized.lower() not in ('true', '1', 'yes', 'on')):
        yield Line(WARNING, found, remedy)


# Domains

def near_levels(host) -> Iterator[Line]:
    """Check [accel] near: this host can determine its domain of each level,
    and other hosts report domains of the same levels."""
    here = domains.Domains()
    try:
        problems = here.problems()
    except exception.ConfigurationError:
        # the line on options has it
        return
    for problem in problems:
        yield Line(FAILURE, *split(problem))
    if here.found:
        yield Line(OK, ', '.join(here.found.values()))
        yield from as_far_as_answered(
            _others(here.found), 'which levels other hosts report', '')


def _others(here):
    reported = collections.defaultdict(set)
    for trait in known_traits():
        for level in naming.near_of([trait]):
            reported[level].add(trait)
    own = providers(name=CONF.host)
    shown = placement(
        f'/resource_providers/{own[0]["uuid"]}/traits',
        'traits') if own and reported else ()
    for level, domain in here.items():
        more = [trait for trait in shown
                if trait != domain and naming.near_of([trait]).get(level)]
        if more:
            yield Line(
                WARNING, f'Placement has this host in '
                f'{", ".join(sorted(more))} as well, and a host is in one '
                f'domain of a level',
                'start nova-compute, which removes the stale trait')
        if not reported[level] - {domain, *more} and not any(
                one['name'] != CONF.host for trait in reported[level]
                for one in providers(required=trait)):
            yield Line(
                WARNING, f'no other host reports a domain of the '
                f'level {level}', 'write the level in [accel] near of the '
                'other hosts as well, or correct its name here')


# Glance

def programs(drivers: Iterable[base.AcceleratorDriver]) -> bool:
    """Return whether one of these drivers programs regions."""
    return any(type(driver).program is not base.AcceleratorDriver.program
               for driver in drivers)


def glance_answers(host) -> Iterator[Line]:
    """Check that Glance answers nova-compute with its own credentials."""
    if not programs(host.drivers.values()):
        return
    try:
        next(iter(glance.service_client().images.list(limit=1)), None)
    except exception.NoCredentials:
        needed = CONF.accel.bitstream_owners
        yield Line(
            FAILURE if needed else WARNING,
            'Glance was not asked, because [service_user] has no credentials, '
            'with which nova-compute reads bitstreams at run time' + (
                '; [accel] bitstream_owners needs them' if needed else ''),
            'set auth_type, auth_url, username, password and project_name '
            'there')
    except exception.GlanceUnavailable as error:
        yield Line(FAILURE, *split(str(error)))
    except Exception as error:
        # errors of three libraries without a common base class
        yield _unanswered(error, 'Glance', 'service_user',
                          '[glance] api_servers and region_name')


# The database

def database_answers(host) -> Iterator[Line]:
    """Check that the database of flavors answers."""
    url = CONF.api_database.connection
    if not url:
        yield Line(FAILURE, 'the database was not asked, because '
                            '[api_database] connection is not set',
                   'set it, or give check the nova.conf of the service')
        return
    import sqlalchemy
    try:
        with sqlalchemy.create_engine(url).connect() as connection:
            connection.execute(sqlalchemy.text('SELECT 1'))
    except Exception as error:
        # an error of SQLAlchemy or of the database's driver, or a missing
        # driver; the URL contains a password
        why = short(getattr(error, 'orig', None) or error)
        yield Line(FAILURE, f'the database of [api_database] connection '
                            f'does not answer ({why.replace(url, "")})',
                   'see that it runs and that this host may reach it, or '
                   'correct the option')


# The parts of a check

def as_far_as_answered(lines: Iterable[Line], what: str, unasked: str,
                       ) -> Iterator[Line]:
    """Yield the lines of a check until a query of a service fails. Then yield
    a last line, which reports that the rest was not checked.

    :param lines: the lines, which query services while they are generated.
    :param what: the checked thing, as subject of the last line.
    :param unasked: beginning of the last line if [service_user] has no
        credentials.
    """
    try:
        yield from lines
    except Refused:
        # the line on Placement shows the reason
        yield Line(WARNING, f'{what} was not checked, as Placement does not '
                            f'answer', 'see the line on Placement')
    except exception.NoCredentials:
        yield Line(OK, f'{unasked}, because [service_user] has no credentials')
    except (exception.GlanceUnavailable, ks_exc.ClientException) as error:
        yield Line(WARNING, f'{what} was not checked, as Glance does not '
                            f'answer ({short(error)})',
                   'see that it runs')
    except exception.ImageRefused as error:
        yield Line(WARNING, f'{what} was not checked: '
                            f'{split(str(error))[0]}',
                   'correct [service_user], or its roles in its project')


# Flavors

def unknown_trait(who, verb, traits) -> Line:
    """Return a line about a flavor or profile with a trait that no provider
    has."""
    return Line(WARNING, f'{who} {verb} the trait {traits}, which no provider '
                         f'has',
                'correct the trait, or see that nova-compute reports devices '
                'with it')


def traits_of_flavors(host) -> Iterator[Line]:
    """Check that providers have all traits that flavors name for accelerators.

    Nova does not report a preferred trait that no provider has.
    """
    yield from as_far_as_answered(
        _traits_of_flavors(), 'which traits flavors name',
        'Nova was not asked for the traits that flavors name')


def _traits_of_flavors():
    listed, unread = flavors()
    if unread:
        yield unread
    known = functools.cache(known_traits)
    for flavor in listed:
        try:
            requests = request.parse(flavor['extra_specs'])
            profiles.check_groups(flavor['extra_specs'])
        except exception.AcceleratorError as error:
            found, remedy = split(str(error))
            yield Line(WARNING, f'nova-api refuses servers of the flavor '
                                f'{flavor["name"]}: {found}', remedy)
            continue
        levels = request.affinity(flavor['extra_specs']).levels
        for clause in near.unreported(levels, map(
                naming.near_of, zip(known()))).values() if levels else ():
            yield Line(WARNING, f'{clause}, and the flavor {flavor["name"]} '
                                f'asks for it',
                       'set [accel] near of nova-compute, or correct the '
                       'flavor')
        for wanted in requests:
            for verb, named in (('needs', sorted(wanted.required)),
                                ('prefers', wanted.prefer)):
                lacking = [trait for trait in named if trait not in known()
                           and not naming.is_volatile(trait)]
                if lacking:
                    yield unknown_trait(f'the flavor {flavor["name"]}', verb,
                                        ', '.join(lacking))


def all_requests() -> tuple[dict[str, list[request.AcceleratorRequest]], bool]:
    """Return the requests of all profiles and flavors.

    :returns: ({'the flavor x': its requests}, whether no flavor or profile is
        missing).
    :raises NoCredentials: [service_user] has none.
    """
    found = {p.name: p for here in profiles.load(
        CONF.accel.device_profiles).good.values() for p in here}
    specs = {f'the profile {name}': {request.PROFILE_KEY: name}
             for name in sorted(found)}
    listed, unread = flavors()
    is_all = unread is None
    specs.update({f'the flavor {flavor["name"]}': flavor['extra_specs']
                  for flavor in listed})
    asked = {}
    for name, extra in specs.items():
        try:
            asked[name] = request.parse(
                profiles.expand(extra, found.__getitem__))
        except KeyError:
            # the profile may be on another host, with nova-api
            is_all = False
        except exception.AcceleratorError:
            # no server can be built with the flavor
            continue
    return asked, is_all


def flavors() -> tuple[list[dict], Line | None]:
    """Return Nova's flavors with name, extra_specs and ram (MiB).

    :returns: the flavors and None, or [] and a line if they cannot be read.
    :raises NoCredentials: [service_user] has none.
    """
    try:
        return list(_flavors()), None
    except (ks_exc.ClientException, OSError, ValueError, TypeError) as error:
        line = _unanswered(error, 'Nova', 'service_user',
                           '[placement] region_name and valid_interfaces')
        return [], Line(WARNING, f'flavors were not checked: {line.found}',
                        line.remedy)
    except KeyError:
        return [], Line(
            WARNING, 'flavors were not checked, because Nova does not show '
                     'their extra specs to the user of [service_user]',
            'give it the role reader or admin in its project')


def _flavors() -> Iterator[dict]:
    """Return Nova's flavors with their extra specs.

    :raises KeyError: Nova does not show extra specs.
    """
    nova = service_user.nova(_FLAVORS_MICROVERSION)
    if nova is None:
        raise exception.NoCredentials('[service_user] has no credentials.')
    query = {'is_public': 'None'}
    while True:
        found = nova.get('/flavors/detail?' + parse.urlencode(query),
                         timeout=_TIMEOUT).json()['flavors']
        for flavor in found:
            yield {name: flavor[name]
                   for name in ('name', 'extra_specs', 'ram')}
        if not found:
            return
        if found[-1]['id'] == query.get('marker'):
            raise ValueError('its list of flavors has no end')
        query['marker'] = found[-1]['id']


def forget_credentials() -> None:
    """Make the options of credentials in CONF optional again.

    keystoneauth makes options of a section required when it loads the
    section's plugin. The next service to check may lack these options.
    """
    types = {section: CONF[section].auth_type for section in _CREDENTIALS}
    CONF.reset()
    for section, name in types.items():
        if name:
            CONF.unregister_opts(
                ks_loading.get_auth_plugin_conf_options(name), section)
