# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Release 0.1 of nova_accel, out of the history of this repository.

Its modules have the names of the present ones. They are in their place while a
service of that release starts; afterwards each release goes on with its own.
"""

import contextlib
import json
import os
import subprocess
import sys
from unittest import mock

import fixtures
from oslo_config import cfg

ROOT = os.path.dirname(os.path.dirname(__file__))
#: its claim store has no version, as that of release 0.1
COMMIT = '8a1bcefddf329a5a544387d010aaed8cbf5f1693'


def is_here() -> bool:
    """Whether this repository goes back so far, unlike a shallow clone."""
    return not subprocess.run(['git', 'cat-file', '-e', COMMIT], cwd=ROOT,
                              capture_output=True).returncode


def source(directory):
    """Lay the files of the release into a directory; the directory."""
    archive = subprocess.run(['git', 'archive', COMMIT], cwd=ROOT,
                             stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(['tar', 'x', '-C', str(directory)], input=archive,
                   check=True)
    return directory


def _is_ours(name):
    return name.split('.')[0] == 'nova_accel' or name == 'nova.virt.accel'


class Release(fixtures.Fixture):
    """Release 0.1; both releases read the options of nova.conf by name."""

    def _setUp(self):
        self._directory = source(self.useFixture(fixtures.TempDir()).path)
        self._modules = {}
        with self.in_place():
            with mock.patch.object(cfg.ConfigOpts, 'register_opts', _add):
                import nova_accel.virt.accel
            from nova_accel import sim
            self.sim = sim
            sys.modules['nova.virt.accel'] = nova_accel.virt.accel

    @contextlib.contextmanager
    def in_place(self):
        """Have what is imported be of this release."""
        now = _taken_out()
        sys.modules.update(self._modules)
        sys.path.insert(0, self._directory)
        try:
            yield
        finally:
            sys.path.remove(self._directory)
            self._modules = _taken_out()
            sys.modules.update(now)


def _taken_out():
    return {name: sys.modules.pop(name) for name in list(sys.modules)
            if _is_ours(name)}


def _add(conf, options, group=None):
    """Register options that the other release does not have."""
    for option in options:
        with contextlib.suppress(cfg.DuplicateOptError):
            conf.register_opt(option, group)


def translate(path, sim):
    """Have the state of a simulated host be one of another release's
    simulator, which has a few more or less names.

    :param path: of its description.
    :param sim: the module of the other release.
    """
    with open(f'{path}.state') as file:
        then = json.load(file)
    os.unlink(f'{path}.state')
    sim.SimulatedKernel(path)
    with open(f'{path}.state') as file:
        now = json.load(file)
    with open(f'{path}.state', 'w') as file:
        json.dump(_merged(now, then), file)


def _merged(now, then):
    if not (isinstance(now, dict) and isinstance(then, dict)):
        return then
    return {name: _merged(value, then[name]) if name in then else value
            for name, value in now.items()}
