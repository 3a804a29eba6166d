# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Layouts that pip makes in and beside virtual environments."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import fixtures

from nova_accel import versions
from tests import functional
from tests.layouts import base

NOVA = 'nova==34.0.0'
#: a test of Nova's own harness: nova-api and what is behind it
REMOVED = '''
from nova.tests.functional import integrated_helpers as helpers
from nova.tests.functional.api import client
from oslo_config import cfg


class Test(helpers._IntegratedTestBase):

    ADMIN_API = True

    def setUp(self):
        cfg.CONF.set_override('api_paste_config', {paste!r}, group='wsgi')
        super().setUp()

    def test(self):
        flavor = self._create_flavor(
            extra_spec={{'accel:device_profile': 'nlb'}})
        error = self.assertRaises(
            client.OpenStackApiException, self._create_server,
            flavor_id=flavor)
        print('ANSWER', error.response.status_code, error.response.text)
'''


def files(directory):
    """All files below a directory, but for what Python compiles."""
    return {str(path.relative_to(directory))
            for path in pathlib.Path(directory).rglob('*')
            if '__pycache__' not in path.parts}


class EditableTest(base.LayoutTestCase):

    def test_both_at_once(self):
        self.there.install('-e', self.there.nova_checkout(),
                           '-e', self.there.accel_checkout())
        self.assertStarts()

    def test_accel_first(self):
        self.there.accel_editable()
        self.there.nova_editable()
        self.assertStarts()
        self.there.accel_uninstall()
        self.assertNovaIsWhole()

    def test_wheel_beside_nova(self):
        self.there.nova_editable()
        self.there.accel_wheel()
        self.assertStarts()
        self.there.accel_uninstall()
        self.assertNovaIsWhole()

    def test_nova_beside_wheel(self):
        self.there.accel_wheel()
        self.there.nova_editable()
        self.assertStarts()

    def test_beside_nova_wheel(self):
        self.there.nova_wheel()
        self.there.accel_editable()
        self.assertStarts()

    def test_modes_of_setuptools(self):
        for mode in ('strict', 'compat'):
            self.there = self.useFixture(base.Environment())
            self.there.nova_editable()
            self.there.accel_editable('--config-settings',
                                      f'editable_mode={mode}')
            self.assertStarts()

    def test_nova_of_its_source(self):
        """Nova's own sdist in place of what stands for its checkout."""
        directory = self.useFixture(fixtures.TempDir()).path
        done = base.run(sys.executable, '-m', 'pip', 'download', '-q',
                        '--no-deps', '--no-binary', 'nova',
                        '--no-build-isolation', '-d', directory, NOVA)
        if done.returncode:
            self.skipTest(f'{NOVA} cannot be downloaded: {done.stdout}')
        archive, = pathlib.Path(directory).glob('*.tar.gz')
        shutil.unpack_archive(archive, directory)
        checkout, = pathlib.Path(directory).glob('nova-*/')
        for first in (True, False):
            self.there = self.useFixture(base.Environment())
            if first:
                self.there.install('-e', checkout)
            self.there.accel_editable()
            if not first:
                self.there.install('-e', checkout)
            self.assertStarts()


class SeveralDirectoriesTest(base.LayoutTestCase):

    def test_target(self):
        """Into a directory of its own, and then into Nova's."""
        self.there.nova_wheel()
        target = self.there.directory / 'target'
        self.there.accel_wheel('--target', target)
        variables = {'PYTHONPATH': str(target)}
        program = (self.there.python, '-m', 'nova_accel.cmd.main')
        self.assertStarts(*program, **variables)
        # without the path nova-compute cannot know of it
        self.assertIn("No module named 'nova.virt.accel'", self.there.start())

    def test_target_is_where_nova_is(self):
        """pip itself names --upgrade as the next step: Nova stays."""
        self.there.nova_wheel()
        before = files(self.there.packages / 'nova')
        for arguments in ((), ('--upgrade',)):
            self.there.accel_wheel(
                '--target', self.there.packages, *arguments)
            self.assertEqual(before, files(self.there.packages / 'nova'))
            self.assertStarts(self.there.python, '-m', 'nova_accel.cmd.main')

    def test_user_site(self):
        python, program = self.system()
        self.there.install('--user', base.wheel(), '--break-system-packages',
                           python=python)
        nova_accel, = self.there.directory.glob('.local/bin/nova-accel')
        self.assertStarts(nova_accel, python=python)
        with open(program) as file:
            self.assertIn(str(python), file.readline())

    def test_environment_with_the_packages_of_the_system(self):
        """It works with a nova-compute of its own, not with the system's."""
        python, program = self.system()
        inner = self.there.directory / 'inner'
        self.there.check_call(python, '-m', 'venv', '--without-pip',
                              '--system-site-packages', inner)
        # a virtual environment made by one has the Python of the outer one
        (inner / 'lib' / base.PACKAGES.parent.name / 'site-packages'
         / 'outer.pth').write_text(str(self.there.packages))
        self.there.accel_wheel(python=inner / 'bin' / 'python')
        check = inner / 'bin' / 'nova-accel'
        # the system's nova-compute is first in PATH, and does not see it
        self.assertDoesNotStart(str(program), 'nova.virt.accel',
                                check=[check], python=python)
        self.there.program(inner / 'bin' / 'nova-compute',
                           inner / 'bin' / 'python')
        self.assertStarts(check, python=inner / 'bin' / 'python')

    def system(self):
        """(Python, nova-compute) of an installation as a distribution's."""
        self.there.nova_wheel()
        # pip installs for a user only where that site is enabled
        config = self.there.prefix / 'pyvenv.cfg'
        config.write_text(config.read_text().replace(
            'include-system-site-packages = false',
            'include-system-site-packages = true'))
        return self.there.python, self.there.prefix / 'bin' / 'nova-compute'


class AfterwardsTest(base.LayoutTestCase):

    def setUp(self):
        super().setUp()
        self.there.nova_wheel()
        self.before = files(self.there.packages / 'nova')
        self.there.accel_wheel()

    def test_removed(self):
        self.there.accel_uninstall()
        self.assertEqual(self.before, files(self.there.packages / 'nova'))
        self.assertNovaIsWhole()
        self.assertEqual([], list(self.there.packages.glob('nova_accel*')))

    def test_flavor_of_ours_is_one_of_cyborgs(self):
        self.there.accel_uninstall()
        module = self.there.directory / 'removed.py'
        module.write_text(REMOVED.format(paste=functional.API_PASTE))
        said = self.there.run(
            self.there.python, '-W', 'ignore', '-m', 'testtools.run',
            'removed', OS_NOVA_DISABLE_EVENTLET_PATCHING=os.environ[
                'OS_NOVA_DISABLE_EVENTLET_PATCHING']).stdout
        self.assertIn('ANSWER 400', said)
        self.assertIn('Could not communicate with Cyborg', said)
        self.assertIn('nlb', said)

    def test_reinstalled(self):
        """A wheel of the same version, as from another commit of a clone."""
        module = self.there.packages / 'nova_accel' / 'versions.py'
        module.write_text('# of another commit\n')
        self.there.accel_wheel()
        self.assertEqual('# of another commit\n', module.read_text())
        self.there.accel_wheel('--force-reinstall')
        self.assertNotEqual('# of another commit\n', module.read_text())
        self.assertStarts()

    def test_package_is_gone(self):
        """Its metadata are there: other drivers start, and ours says why."""
        shutil.rmtree(self.there.packages / 'nova_accel')
        self.assertIn("No module named 'nova.virt.accel'", self.there.start())
        self.assertNovaStarts()

    def test_metadata_are_gone(self):
        metadata, = self.there.packages.glob('nova_accel-*')
        shutil.rmtree(metadata)
        self.assertIn("No module named 'nova.virt.accel'", self.there.start())
        self.assertNovaStarts()

    def assertNovaStarts(self):
        self.there.configure('libvirt.LibvirtDriver')
        self.assertIn('STARTED nova.virt.libvirt.driver LibvirtDriver',
                      self.there.start())

    def test_left_in_nova(self):
        """What a distribution or --target left of an earlier release does no
        harm in Nova's directory."""
        left = self.there.packages / 'nova' / 'virt' / 'accel'
        left.mkdir()
        self.assertStarts()
        (left / '__init__.py').write_text(
            'from nova_accel.virt.driver import AccelLibvirtDriver\n')
        self.assertStarts()


class LibrariesTest(base.LayoutTestCase):
    """`pip install --no-deps` leaves them as they are."""

    def test_pip_check(self):
        self.there.nova_wheel()
        self.there.accel_wheel()
        self.assertEqual([], self.there.pip_check())
        metadata, = self.there.packages.glob('cliff-*.dist-info')
        found = (metadata / 'METADATA').read_text()
        metadata.unlink()
        self.assertIn('requires cliff, which is not installed.',
                      ' '.join(self.there.pip_check()))
        metadata.mkdir()
        (metadata / 'METADATA').write_text(
            re.sub('^Version: .*', 'Version: 3.9', found, flags=re.M))
        self.assertIn('has requirement cliff>=4.9, but you have cliff 3.9.',
                      ' '.join(self.there.pip_check()))


class EveryNovaTest(base.LayoutTestCase):
    """nova_accel stays, and Nova is upgraded below it, to each release that
    nova_accel supports."""

    def test_upgrade_of_nova(self):
        releases = re.findall('nova==(.*)',
                              (base.ROOT / 'tox.ini').read_text())
        majors = [int(release.partition('.')[0]) for release in releases]
        self.assertEqual([*range(versions.OLDEST, versions.NEWEST + 1)],
                         majors)
        directory = self.useFixture(fixtures.TempDir()).path
        for release in releases:
            done = base.run(sys.executable, '-m', 'pip', 'download', '-q',
                            '--no-deps', '--only-binary', ':all:', '-d',
                            directory, f'nova=={release}')
            if done.returncode:
                self.skipTest(f'nova {release} cannot be downloaded: '
                              f'{done.stdout}')
        self.there.accel_wheel()
        for release in releases:
            self.there.install('--find-links', directory, '--upgrade',
                               f'nova=={release}')
            self.assertStarts(nova=release)
            self.assertEqual([], [line for line in self.there.pip_check()
                                  if ' nova' in line])


class OtherNovaTest(base.LayoutTestCase):

    def test_too_old(self):
        self.there.nova_editable('30.1.0')
        self.there.accel_wheel()
        self.assertIn('works with Nova 31 to', self.there.start())
        self.assertDoesNotStart('this is Nova 30.1.0', 'upgrade Nova')

    def test_too_new(self):
        self.there.nova_editable('99.0.0')
        self.there.accel_wheel()
        self.assertIn('this is Nova 99.0.0', self.there.start())
        line = self.there.check()
        self.assertEqual('ok', line['compute driver']['Result'])
        self.assertEqual('warning', line['Nova']['Result'])
        self.assertIn('has requirement nova<35,>=31, but you have nova '
                      '99.0.0.', ' '.join(self.there.pip_check()))

    def test_python_that_is_too_old(self):
        python = shutil.which('python3.10')
        if not python or subprocess.run(
                [python, '--version'], capture_output=True).returncode:
            self.skipTest('there is no Python 3.10')
        done = self.there.run(
            sys.executable, '-m', 'pip', '--python', python, 'install',
            '--no-deps', '--no-index', base.wheel(), PATH=os.environ['PATH'])
        self.assertIn('requires a different Python: 3.10', done.stdout)
