# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check [filter_scheduler], for nova-accel check.

An option in nova.conf replaces Nova's default of the option. Hence each remedy
is a complete line for nova.conf, which keeps the present values of the option.
"""

from collections.abc import Iterable, Iterator

from nova.conf import scheduler as novas

from nova_accel.cmd import check_line
from nova_accel import conf

CONF = conf.CONF
Line = check_line.Line
WARNING, FAILURE = check_line.WARNING, check_line.FAILURE

_FILTER = 'nova_accel.scheduler.filters.AcceleratorFilter'
_NAME = _FILTER.rpartition('.')[2]
_WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'
#: makes Nova's own filters available (nova/conf/scheduler.py)
_ALL_FILTERS = 'nova.scheduler.filters.all_filters'
_ALL_WEIGHERS = 'nova.scheduler.weights.all_weighers'
#: the filter that keeps servers from hosts that are down or disabled
_COMPUTE_FILTER = 'ComputeFilter'


def _line(option: str, values: Iterable[str]) -> str:
    """Return the line of nova.conf that sets an option to these values,
    followed by the name of the filter or weigher of nova_accel."""
    last = _NAME if option == 'enabled_filters' else _WEIGHER
    before = [value for value in dict.fromkeys(values) if value != last]
    return f'set {option} = {",".join((*before, last))}'


def _default_filters() -> list[str]:
    return next(
        option.default for options in novas.list_opts().values()
        for option in options if option.name == 'enabled_filters')


def filters(host) -> Iterator[Line]:
    """Check AcceleratorFilter in [filter_scheduler]."""
    section = CONF.filter_scheduler
    enabled = section.enabled_filters
    remedy = _line('enabled_filters', enabled)
    if _NAME not in enabled:
        yield Line(FAILURE, '[filter_scheduler] enabled_filters does not '
                            'have AcceleratorFilter: servers may get devices '
                            'that do not fit', remedy)
        return
    if set(enabled) == {_NAME}:
        yield Line(FAILURE, '[filter_scheduler] enabled_filters has '
                            'AcceleratorFilter alone, which replaces all '
                            'filters of Nova: servers are sent to hosts that '
                            'are down or too small',
                   _line('enabled_filters', _default_filters()))
        return
    unavailable = _unavailable(enabled, section.available_filters)
    if unavailable:
        yield unavailable
        return
    if _COMPUTE_FILTER not in enabled:
        yield Line(WARNING, '[filter_scheduler] enabled_filters does not have '
                            'ComputeFilter, without which servers are sent to '
                            'hosts that are down',
                   _line('enabled_filters', (_COMPUTE_FILTER, *enabled)))
    elif enabled.count(_NAME) > 1:
        yield Line(WARNING, f'[filter_scheduler] enabled_filters has '
                            f'AcceleratorFilter {enabled.count(_NAME)} '
                            f'times, and filters each host as often', remedy)
    elif enabled[-1] != _NAME:
        yield Line(WARNING, '[filter_scheduler] enabled_filters has '
                            'filters behind AcceleratorFilter, which sorts '
                            'hosts that they then drop', remedy)


def _unavailable(enabled, available) -> Line | None:
    """Return a line if nova-scheduler cannot find one of the enabled filters,
    otherwise None."""
    names = {item.rpartition('.')[2] for item in available}
    missing = [] if _FILTER in available else [_NAME]
    if _ALL_FILTERS not in available:
        missing += [name for name in enabled
                    if name not in names and name != _NAME]
    if not missing:
        return None
    needed = dict.fromkeys((
        *([] if missing == [_NAME] else [_ALL_FILTERS]), *available, _FILTER))
    return Line(
        FAILURE, f'[filter_scheduler] available_filters does not have '
                 f'{", ".join(missing)} of enabled_filters, and '
                 f'nova-scheduler does not start',
        'set ' + ' and '.join(f'available_filters = {one}'
                              for one in needed)
        + (', a line each' if len(needed) > 1 else ''))


def weigher(host) -> Iterator[Line]:
    """Check AcceleratorWeigher in [filter_scheduler]."""
    classes = CONF.filter_scheduler.weight_classes
    remedy = _line('weight_classes', classes)
    if _WEIGHER not in classes:
        yield Line(FAILURE, '[filter_scheduler] weight_classes does not '
                            'have AcceleratorWeigher: hosts whose regions '
                            'carry the function are not preferred', remedy)
    elif set(classes) == {_WEIGHER}:
        yield Line(FAILURE, '[filter_scheduler] weight_classes has '
                            'AcceleratorWeigher alone, which replaces all '
                            'weighers of Nova: servers are not spread over '
                            'hosts any more',
                   _line('weight_classes', (_ALL_WEIGHERS, *classes)))
    elif classes.count(_WEIGHER) > 1:
        yield Line(WARNING, f'[filter_scheduler] weight_classes has '
                            f'AcceleratorWeigher '
                            f'{classes.count(_WEIGHER)} times, and its '
                            f'weight counts as often', remedy)
    elif not CONF.accel.weight_multiplier:
        yield Line(WARNING, '[accel] weight_multiplier is 0, and the '
                            'weigher has no effect',
                   'remove it, unless aggregates have another one')
