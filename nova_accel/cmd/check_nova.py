# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check that services of Nova load nova_accel, for nova-accel check.

An option in nova.conf replaces Nova's default of the option. Hence each remedy
is a complete line for nova.conf, which keeps the present values of the option.
"""

from collections.abc import Iterable, Iterator
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys

from nova.conf import scheduler as novas

from nova_accel.cmd import check_services
from nova_accel import conf

CONF = conf.CONF
Line = check_services.Line
WARNING, FAILURE = check_services.WARNING, check_services.FAILURE

_FILTER = 'nova_accel.scheduler.filters.AcceleratorFilter'
_NAME = _FILTER.rpartition('.')[2]
_WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'
#: makes Nova's own filters available (nova/conf/scheduler.py)
_ALL_FILTERS = 'nova.scheduler.filters.all_filters'
_ALL_WEIGHERS = 'nova.scheduler.weights.all_weighers'
#: the filter that keeps servers from hosts that are down or disabled
_COMPUTE_FILTER = 'ComputeFilter'
#: the imports of main() in nova/cmd/compute.py until it loads the driver: the
#: first one chooses between threads and eventlet, os-vif loads its plug-ins
#: (nova_accel.virt.door), and nova.virt.driver.load_compute_driver() imports
#: the driver
_PROGRAM = """
import sys
from nova.cmd import compute
import os_vif
from oslo_utils import importutils
os_vif.initialize()
importutils.import_class('nova.virt.' + sys.argv[1])
"""


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


def entry_point(host) -> Iterator[Line]:
    """Check that this Python's nova-api loads nova_accel."""
    group = 'nova.api.extra_spec_validators'
    if not any(point.value.startswith('nova_accel.') for point
               in importlib.metadata.entry_points(group=group)):
        yield Line(FAILURE, f'nova_accel has no entry point in {group}: '
                            f'nova-api takes accel:device_profile for one of '
                            f'Cyborg',
                   'install nova_accel into the Python of nova-api, with pip')


# The driver of nova-compute

def nova_compute() -> str:
    """Return the path of nova-compute, or '' if it is not found. The directory
    of the running command is searched first, then PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), 'nova-compute')
    return (beside if os.path.exists(beside)
            else shutil.which('nova-compute') or '')


def python_of(program: str) -> str:
    """Return the path of the Python interpreter of an installed program, from
    its first line. If that line names none, return sys.executable."""
    try:
        with open(program, encoding='utf-8') as file:
            first = file.readline(1024)
    except (OSError, ValueError):
        return sys.executable
    words = shlex.split(first[2:]) if first.startswith('#!') else []
    if words and os.path.basename(words[0]).startswith('python'):
        return words[0]
    return sys.executable


def failure(driver: str, seconds: float) -> tuple[str, str] | None:
    """Import the driver in a process, as nova-compute does.

    :param driver: a value of [DEFAULT] compute_driver.
    :param seconds: time limit.
    :returns: the finding and the remedy, or None if the import succeeded.
    """
    program = nova_compute()
    python = python_of(program)
    name = program or f'nova-compute of {python}'
    try:
        # the child must not import modules of the working directory
        done = subprocess.run(
            [python, '-W', 'ignore', '-c', _PROGRAM, driver], cwd='/',
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors='replace', timeout=seconds)
    except subprocess.TimeoutExpired:
        return (f'{name} did not import the driver within {seconds} s',
                'run check again when this host has less to do')
    except OSError as error:
        return (f'{python}, which runs {name}, cannot be started '
                f'({error.strerror})', 'install Nova again')
    if done.returncode == 0:
        return None
    why = (done.stderr.strip().splitlines() or [f'status {done.returncode}'])
    kind, _, text = why[-1].partition(': ')
    if kind == 'ImportError' and text.startswith('nova_accel '):
        # the driver exits with a sentence of nova_accel.versions
        return check_services.split(text)
    return (f'{name} cannot import the driver ({why[-1][:160]})',
            f'install nova_accel with pip of {python}, and see that pip check '
            f'finds nothing')
