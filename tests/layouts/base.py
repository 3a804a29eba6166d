# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Virtual environments of their own, in which Nova and nova_accel meet.

What both need is linked from the environment of the tests, so that one takes
a second to make; pip installs Nova and nova_accel themselves. nova-compute is
Nova's main() up to its driver.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap

import fixtures
import testtools

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = pathlib.Path(sysconfig.get_path('purelib'))
DRIVER = 'accel.AccelLibvirtDriver'
FILTER = 'nova_accel.scheduler.filters.AcceleratorFilter'

#: Nova's main(): a conductor is not waited for, Placement is not asked, and
#: libvirt is a module without content
START = textwrap.dedent('''
    import os
    import sys
    import types
    # before all of Nova: it decides about threads
    from nova.cmd import compute
    from unittest import mock
    from nova.virt import driver
    from nova import version

    load = driver.load_compute_driver

    def loaded(*args):
        found = type(load(*args))
        print('STARTED', found.__module__, found.__name__,
              version.version_string(),
              sys.modules[found.__module__].__file__, flush=True)
        os._exit(0)

    sys.modules.setdefault('libvirt', types.ModuleType('libvirt'))
    with mock.patch('nova.conductor.API'), mock.patch(
            'nova.scheduler.client.report.SchedulerReportClient'), \\
            mock.patch.object(driver, 'load_compute_driver', loaded):
        compute.main()
''')
#: nova-scheduler's main() up to its first worker: no database is asked
START_SCHEDULER = textwrap.dedent('''
    import os
    import sys
    from nova.cmd import scheduler
    from unittest import mock
    from nova.scheduler import host_manager
    from nova import service

    def served(server, **kwargs):
        names = [type(f).__name__
                 for f in server.manager.host_manager.enabled_filters]
        print('STARTED', *names, flush=True)
        exec(os.environ['THEN'])
        sys.stdout.flush()
        os._exit(0)

    with mock.patch('nova.conductor.API'), mock.patch(
            'nova.scheduler.client.report.SchedulerReportClient'), \\
            mock.patch('nova.utils.raise_if_old_compute'), \\
            mock.patch.object(service, 'serve', served), \\
            mock.patch.multiple(
                host_manager.HostManager, refresh_cells_caches=mock.DEFAULT,
                _init_aggregates=mock.DEFAULT,
                _init_instance_info=mock.DEFAULT):
        scheduler.main()
''')
PROGRAM = textwrap.dedent('''\
    #!{python}
    import sys
    from nova.cmd.compute import main
    sys.exit(main())
''')
#: Nova as `pip install -e` has it from a checkout
SETUP = textwrap.dedent('''\
    import setuptools
    setuptools.setup(name='nova', version={version!r}, packages=['nova'],
                     entry_points=open({entry_points!r}).read())
''')
#: with the argument that is the directory of the wheel
BUILD = textwrap.dedent('''
    import sys
    from setuptools import build_meta
    build_meta.build_wheel(sys.argv[1])
''')


def run(*command, **kwargs):
    """Run a command; its process, with all that it wrote in stdout."""
    return subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=900, **kwargs)


def source(target):
    """Copy what git would commit: building leaves its traces beside it."""
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others',
         '--exclude-standard'], cwd=ROOT, capture_output=True, check=True,
        text=True).stdout.split('\0')
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            path = pathlib.Path(target, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path)
    return target


@functools.cache
def wheel():
    """Build the wheel, once for a process of tests."""
    directory = tempfile.TemporaryDirectory()
    # removed with this function, at the end of the process
    wheel.directory = directory
    # the backend that pip would start four processes for
    done = run(sys.executable, '-c', BUILD, directory.name,
               cwd=source(os.path.join(directory.name, 'source')))
    assert done.returncode == 0, done.stdout
    found, = pathlib.Path(directory.name).glob('*.whl')
    return found


class Environment(fixtures.Fixture):
    """A virtual environment without Nova and nova_accel."""

    def _setUp(self):
        self.directory = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path)
        self.prefix = self.directory / 'venv'
        self.python = self.prefix / 'bin' / 'python'
        self.packages = self.prefix / PACKAGES.relative_to(sys.prefix)
        #: of its processes; stevedore keeps entry points for two minutes
        self.variables = {
            'PATH': f'{self.prefix}/bin:{os.environ["PATH"]}',
            'HOME': str(self.directory), 'LC_ALL': 'C.UTF-8',
            'XDG_CACHE_HOME': str(self.directory / 'cache')}
        self.config = self.directory / 'nova.conf'
        self.configure(DRIVER)
        self.check_call(sys.executable, '-m', 'venv', '--without-pip',
                        self.prefix)
        self.link(PACKAGES, self.packages)

    def link(self, found, target):
        target.mkdir(exist_ok=True)
        for entry in os.scandir(found):
            if entry.name != 'nova' and not entry.name.startswith('nova-') \
                    and 'nova_accel' not in entry.name and (
                        entry.name != 'distutils-precedence.pth'):
                (target / entry.name).symlink_to(entry.path)

    def configure(self, driver):
        self.config.write_text(textwrap.dedent(f'''\
            [DEFAULT]
            host = compute1
            transport_url = fake:/
            compute_driver = {driver}
            state_path = {self.directory}

            [filter_scheduler]
            available_filters = nova.scheduler.filters.all_filters
            available_filters = {FILTER}
            enabled_filters = ComputeFilter,AcceleratorFilter
        '''))

    def run(self, *command, **variables):
        return run(*command, cwd=self.directory,
                   env={**self.variables, **variables})

    def check_call(self, *command, **variables):
        done = self.run(*command, **variables)
        assert done.returncode == 0, f'{command}\n{done.stdout}'
        return done.stdout

    def pip(self, *arguments, python=None, **variables):
        """Run pip, which is linked as all else is."""
        return self.check_call(
            python or self.python, '-m', 'pip', '-q',
            '--disable-pip-version-check', *arguments, **variables)

    def install(self, *arguments, **variables):
        return self.pip('install', '--no-deps', '--no-index',
                        '--no-build-isolation', *arguments, **variables)

    # Nova

    def nova_wheel(self):
        """Nova as pip has installed it from its wheel: links, but for the
        directories into which a wheel of ours could write."""
        for path in PACKAGES.glob('nova-*'):
            (self.packages / path.name).symlink_to(path)
        installed, target = PACKAGES / 'nova', self.packages / 'nova'
        self.link(installed, target)
        (target / 'virt').unlink()
        self.link(installed / 'virt', target / 'virt')
        self.program(self.prefix / 'bin' / 'nova-compute', self.python)

    @staticmethod
    def program(path, python):
        path.write_text(PROGRAM.format(python=python))
        path.chmod(0o755)

    def nova_editable(self, version=None):
        """Nova as DevStack installs its checkout.

        :param version: what its metadata say.
        """
        self.install('-e', self.nova_checkout(version))

    def nova_checkout(self, version=None):
        """What stands for a checkout of Nova; its directory."""
        checkout = self.directory / 'nova'
        checkout.mkdir()
        (checkout / 'nova').symlink_to(PACKAGES / 'nova')
        # DevStack reads it there
        (checkout / 'setup.cfg').write_text('[metadata]\nname = nova\n')
        nova = importlib.metadata.distribution('nova')
        (checkout / 'entry_points.txt').write_text(
            nova.read_text('entry_points.txt'))
        (checkout / 'setup.py').write_text(SETUP.format(
            version=version or nova.version,
            entry_points=str(checkout / 'entry_points.txt')))
        return checkout

    # nova_accel

    def accel_wheel(self, *arguments, **variables):
        self.install(*arguments, wheel(), **variables)

    def accel_editable(self, *arguments):
        self.install('-e', self.accel_checkout(), *arguments)

    def accel_checkout(self):
        return source(self.directory / 'nova_accel')

    def accel_uninstall(self):
        self.pip('uninstall', '-y', 'nova_accel')

    # what an operator does

    def start(self, python=None, **variables):
        """Start nova-compute; what it wrote."""
        return self.run(python or self.python, '-W', 'ignore', '-c', START,
                        '--config-file', self.config, **variables).stdout

    def start_scheduler(self, then=''):
        """Start nova-scheduler; what it wrote.

        :param then: lines of Python that it runs after its start.
        """
        return self.run(self.python, '-W', 'ignore', '-c', START_SCHEDULER,
                        '--config-file', self.config, THEN=then).stdout

    def pip_check(self):
        """The lines of `pip check` that name nova_accel."""
        said = self.run(self.python, '-m', 'pip', 'check').stdout
        return [line for line in said.splitlines()
                if line.startswith('nova-accel ')]

    def check(self, *command, **variables):
        """Run nova-accel check; {check: line}."""
        done = self.run(*(command or [self.prefix / 'bin' / 'nova-accel']),
                        'check', '-f', 'json', '--service', 'compute',
                        '--config-file', self.config, **variables)
        begin = done.stdout.index('[')
        return {line['Check']: line
                for line in json.loads(done.stdout[begin:])}


class LayoutTestCase(testtools.TestCase):

    #: seconds; packages are installed, and programs of Nova start
    LIMIT = 1800

    def setUp(self):
        super().setUp()
        self.there = self.useFixture(Environment())

    def assertStarts(self, *check, python=None, nova=None, **variables):
        """nova-compute starts with our driver, and check says so.

        :param nova: its version, unless it is that of the tests.
        """
        said = self.there.start(python, **variables)
        self.assertIn('STARTED nova_accel.virt.driver AccelLibvirtDriver '
                      f'{nova or importlib.metadata.version("nova")}', said)
        # not the sources that the tests run from
        self.assertNotIn(str(ROOT), said)
        line = self.there.check(*check, **variables)['compute driver']
        self.assertEqual(('ok', None), (line['Result'], line['Found']))

    def assertNovaIsWhole(self):
        """Nova runs as if nova_accel had never been there."""
        self.there.configure('libvirt.LibvirtDriver')
        said = self.there.start()
        self.assertIn('STARTED nova.virt.libvirt.driver LibvirtDriver', said)
        self.assertNotIn('nova_accel', said)

    def assertDoesNotStart(self, *words, check=(), python=None, **variables):
        """nova-compute ends, and check says why."""
        self.assertNotIn('STARTED', self.there.start(python, **variables))
        line = self.there.check(*check, **variables)['compute driver']
        self.assertEqual('failure', line['Result'])
        for word in words:
            self.assertIn(word, f'{line["Found"]}: {line["What to do"]}')
