# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check the domains of a host ([accel] near), for nova-accel check."""

import collections
from collections.abc import Iterator
from urllib import parse

from nova_accel.cmd import check_line
from nova_accel.cmd import check_services
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import domains
from nova_accel import naming

CONF = conf.CONF
Line = check_line.Line


def levels(host) -> Iterator[Line]:
    """Check [accel] near: this host can determine its domain of each level,
    and other hosts report domains of the same levels."""
    here = domains.Domains()
    try:
        problems = here.problems()
    except exception.ConfigurationError:
        # the line on options has it
        return
    for problem in problems:
        yield Line(check_line.FAILURE, *check_line.split(problem))
    if here.found:
        yield Line(check_line.OK, ', '.join(here.found.values()))
        yield from check_services.as_far_as_answered(
            _others(here.found), 'which levels other hosts report', '')


def _others(here):
    reported = collections.defaultdict(set)
    for trait in check_services.placement(
            '/traits?associated=true', 'traits'):
        for level in naming.near_of([trait]):
            reported[level].add(trait)
    own = _providers(name=CONF.host)
    shown = check_services.placement(
        f'/resource_providers/{own[0]["uuid"]}/traits',
        'traits') if own and reported else ()
    for level, domain in here.items():
        more = [trait for trait in shown
                if trait != domain and naming.near_of([trait]).get(level)]
        if more:
            yield Line(
                check_line.WARNING, f'Placement has this host in '
                f'{", ".join(sorted(more))} as well, and a host is in one '
                f'domain of a level',
                'start nova-compute, which removes the stale trait')
        if not reported[level] - {domain, *more} and not any(
                one['name'] != CONF.host for trait in reported[level]
                for one in _providers(required=trait)):
            yield Line(
                check_line.WARNING, f'no other host reports a domain of the '
                f'level {level}', 'write the level in [accel] near of the '
                'other hosts as well, or correct its name here')


def _providers(**which):
    return check_services.placement(
        '/resource_providers?' + parse.urlencode(which), 'resource_providers')
