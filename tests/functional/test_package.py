# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The wheel, installed beside Nova, is all that Nova needs to load us."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import textwrap
import zipfile

import fixtures
import nova
import testtools

ROOT = pathlib.Path(__file__).parent.parent.parent
LOAD = textwrap.dedent('''
    from oslo_config import cfg
    from oslo_utils import importutils
    import nova.conf
    from nova.scheduler import filters, weights
    from nova.api.validation.extra_specs import validators
    from nova.compute import api
    import nova_accel
    # as nova.virt.driver.load_compute_driver does
    driver = importutils.import_class(
        'nova.virt.' + 'accel.AccelLibvirtDriver')
    weigher, = weights.HostWeightHandler().get_matching_classes(
        ['nova_accel.scheduler.weights.AcceleratorWeigher'])
    filter, = filters.HostFilterHandler().get_matching_classes(
        ['nova_accel.scheduler.filters.AcceleratorFilter'])
    assert 'accel{group}:function_id' in validators.VALIDATORS
    assert api.API.create.__wrapped__
    print(nova_accel.__file__, driver.__name__, weigher.__name__,
          filter.__name__, sep='\\n')
''')


class PackageTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path)

    def run_python(self, *args, python=sys.executable, **kwargs):
        done = subprocess.run(
            [python, *args], cwd=self.directory, capture_output=True,
            text=True, **kwargs)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def wheel(self):
        # a copy: building leaves its traces beside the sources
        source = self.directory / 'source'
        files = subprocess.run(
            ['git', 'ls-files', '-z', '--cached', '--others',
             '--exclude-standard'], cwd=ROOT, capture_output=True,
            check=True, text=True).stdout.split('\0')
        for name in filter(None, files):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
        self.run_python('-m', 'pip', 'wheel', '-q', '--no-deps',
                        '--no-build-isolation', '-w', 'wheels', str(source))
        return next((self.directory / 'wheels').glob('*.whl'))

    def environment(self):
        """A virtual environment with all that is in ours but ourselves.

        Links, but for the two directories of Nova into which a wheel could
        write.
        """
        self.run_python('-m', 'venv', '--without-pip', 'venv')
        python = self.directory / 'venv' / 'bin' / 'python'
        target = pathlib.Path(self.run_python(
            '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))',
            python=python).strip())
        ours = pathlib.Path(sysconfig.get_path('purelib'))
        installed = pathlib.Path(nova.__file__).parent
        self.link(ours, target)
        self.link(installed, target / 'nova')
        self.link(installed / 'virt', target / 'nova' / 'virt')
        return python

    @staticmethod
    def link(source, target):
        if target.is_symlink():
            target.unlink()
        target.mkdir(exist_ok=True)
        for entry in os.scandir(source):
            if not (target / entry.name).exists() and (
                    'nova_accel' not in entry.name):
                (target / entry.name).symlink_to(entry.path)

    def test_wheel_beside_nova(self):
        wheel = self.wheel()
        names = zipfile.ZipFile(wheel).namelist()
        # of Nova's directories only the one new file
        self.assertEqual(['nova/virt/accel/__init__.py'],
                         [n for n in names if n.startswith('nova/')])
        self.assertEqual([], [n for n in names if n.startswith('tests')])
        python = self.environment()
        self.run_python('-m', 'pip', '-q', '--python', str(python), 'install',
                        '--no-deps', '--no-index', str(wheel))
        lines = self.run_python('-c', LOAD, python=python).split()
        self.assertIn(str(self.directory), lines[0])
        self.assertEqual(['AccelLibvirtDriver', 'AcceleratorWeigher',
                          'AcceleratorFilter'], lines[1:])

    def test_sample_configuration_is_current(self):
        configuration = ROOT / 'etc' / 'nova_accel'
        self.run_python(
            '-m', 'oslo_config.generator', '--config-file',
            str(configuration / 'config-generator.conf'),
            '--output-file', 'sample')
        self.assertEqual(
            (configuration / 'nova_accel.conf.sample').read_text(),
            (self.directory / 'sample').read_text(),
            'run tox -e genconfig')
