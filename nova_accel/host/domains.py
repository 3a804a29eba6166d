# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Determine the domains of a host: for example its NVLink domain and its rack.

The operator configures the levels, and for each level where to find the host's
domain. nova-compute reports the domains as traits of the host's provider.
"""

import os
import re
import sys

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel.host import nvml
from nova_accel import log as logging
from nova_accel import naming
from nova_accel import near

CONF = conf.CONF
LOG = logging.getLogger(__name__)
OPTION = '[accel] near'
AUTO, _BY_LIBRARY = 'auto', 'nvlink'
#: characters that are read of a file or an answer
_MOST = 300


def wanted() -> dict[str, str]:
    """Return the levels of [accel] near, each with the source of this host's
    domain: a trait, the path of a file or command, or AUTO.

    :raises ConfigurationError: [accel] near cannot be read.
    """
    found: dict[str, str] = {}
    for item in CONF.accel.near:
        level, _, source = (part.strip() for part in item.partition('='))
        if not re.fullmatch(near.LEVEL, level) or not source:
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, which is not <level>=<trait>, '
                f'<level>=<path> or nvlink=auto: correct it.')
        if level in found:
            raise exception.ConfigurationError(
                f'{OPTION} has the level {level} twice, and a host is in one '
                f'domain of a level: keep one of them.')
        if source == AUTO and level != _BY_LIBRARY:
            raise exception.ConfigurationError(
                f'{OPTION} has {level}=auto, and only the level nvlink can be '
                f'determined automatically: write the trait, or the path of a '
                f'file or command.')
        if source != AUTO and not os.path.isabs(source) and (
                naming.near_trait(level, source, OPTION) != source):
            raise exception.ConfigurationError(
                f'{OPTION} has {level}={source}, which is not a trait of that '
                f'level: write CUSTOM_NEAR_{level.upper()}_<DOMAIN>, or the '
                f'absolute path of a file or command.')
        found[level] = source
    return found


class Domains:

    def __init__(self) -> None:
        #: level -> trait; None before the first look
        self.found: dict[str, str] | None = None
        self.background = limited.Background(
            self.look, f'The domain of this host is not known for a level of '
                       f'{OPTION}')

    def look(self) -> None:
        """Determine the domain of each level.

        :raises ConfigurationError: a domain cannot be determined.
        """
        problems = self.problems()
        if problems:
            raise exception.ConfigurationError(' '.join(problems))

    def problems(self) -> list[str]:
        """Determine the domain of each level, and return why this failed for
        some of the levels. A level whose domain cannot be determined keeps its
        last domain.

        :raises ConfigurationError: the option cannot be read.
        """
        known, failed = self.found or {}, []
        found: dict[str, str] = {}
        for level, source in wanted().items():
            try:
                found[level] = naming.near_trait(
                    level, _said(source), f'{OPTION} {level}={source}')
            except exception.AcceleratorError as error:
                failed.append(str(error))
                if level in known:
                    found[level] = known[level]
        self.found = found
        return failed

    def begin(self) -> None:
        """Call look() for the first time. Wait at most [accel] device_timeout
        for its end, and log errors."""
        future = limited.start(self.look)
        try:
            future.result(CONF.accel.device_timeout)
        except Exception as error:
            LOG.warning('The domains of this host are not known, and servers '
                        'that must be near each other are not scheduled here: '
                        '%s', error or 'it is still looked for')

    def show(self, tree, node: str) -> None:
        """Write the traits into Nova's provider tree.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param node: name of its root.
        """
        if self.found is None:
            return
        shown = set(filter(naming.is_near, tree.data(node).traits))
        traits = set(self.found.values())
        if shown != traits:
            tree.remove_traits(node, *(shown - traits))
            tree.add_traits(node, *traits)


def _said(source):
    if source == AUTO:
        # with -m Python finds modules in the working directory, too
        return _run(sys.executable, '-m', nvml.__name__)
    if not os.path.isabs(source):
        return source
    if os.access(source, os.X_OK) and os.path.isfile(source):
        return _run(source)
    try:
        # a named pipe without a writer is empty
        with open(source, encoding='utf-8', errors='replace',
                  opener=lambda path, flags: os.open(
                      path, flags | os.O_NONBLOCK)) as file:
            return file.read(_MOST).strip()
    except OSError as error:
        raise exception.ConfigurationError(
            f'{source} of {OPTION} cannot be read ({error.strerror}): write '
            f'the name of the domain there.') from None


def _run(*command):
    try:
        return limited.run(command, CONF.accel.device_timeout)[:_MOST]
    except limited.ProgramFailed as error:
        raise exception.ConfigurationError(
            f'{" ".join(command)} of {OPTION} {error}: run it by hand, or '
            f'name the domain in the option.') from None
