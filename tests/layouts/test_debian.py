# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova_accel beside the packages of Nova 31 in Debian 13, in a chroot.

As root, with mmdebstrap and a mirror of Debian. The chroot (1.1 GB, two
minutes) is kept in build/debian; remove it to get the packages of today.
"""

import json
import os
import shutil
import subprocess

import testtools

from tests.layouts import base

CHROOT = base.ROOT / 'build' / 'debian'
PACKAGES = 'python3-nova,nova-compute,python3-pip,python3-venv'
MIRROR = os.environ.get('DEBIAN_MIRROR', 'http://deb.debian.org/debian')
#: what a process needs of /dev, by its minor number (major 1)
DEVICES = {'null': 3, 'zero': 5, 'random': 8, 'urandom': 9}
HOME = '/root/layouts'


def make():
    """Make the chroot, unless it is there."""
    done = CHROOT / '.done'
    if done.exists():
        return
    if os.geteuid() or not shutil.which('mmdebstrap'):
        raise testtools.TestCase.skipException('it needs root and mmdebstrap')
    shutil.rmtree(CHROOT, ignore_errors=True)
    CHROOT.parent.mkdir(exist_ok=True)
    made = base.run(
        'mmdebstrap', '--mode=root', '--variant=apt', f'--include={PACKAGES}',
        '--aptopt=APT::Install-Recommends "false"', '--format=directory',
        'trixie', CHROOT, MIRROR)
    if made.returncode:
        raise testtools.TestCase.skipException(made.stdout[-2000:])
    for name, minor in DEVICES.items():
        path = CHROOT / 'dev' / name
        if not path.exists():
            subprocess.run(['mknod', '-m', '666', str(path), 'c', '1',
                            str(minor)], check=True)
    done.touch()


class DebianTest(testtools.TestCase):

    LIMIT = base.LayoutTestCase.LIMIT

    def setUp(self):
        super().setUp()
        make()
        home = CHROOT / HOME[1:]
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        self.addCleanup(shutil.rmtree, home)
        self.wheel = f'{HOME}/{base.wheel().name}'
        shutil.copy(base.wheel(), home)
        (home / 'start.py').write_text(base.START)
        self.config = home / 'nova.conf'
        self.configure('accel.AccelLibvirtDriver')
        self.addCleanup(self.run_in, 'pip', 'uninstall', '-y', '-q',
                        '--break-system-packages', 'nova_accel')

    def configure(self, driver):
        self.config.write_text(
            '[DEFAULT]\nhost = compute1\ntransport_url = fake:/\n'
            f'compute_driver = {driver}\nstate_path = {HOME}\n'
            '[accel]\nenabled_drivers = dfl\n')

    def run_in(self, *command):
        return base.run(
            'chroot', CHROOT, 'env', '-i', f'HOME={HOME}', 'LC_ALL=C.UTF-8',
            'PIP_ROOT_USER_ACTION=ignore', 'PATH=/usr/local/sbin:/usr/local/'
            'bin:/usr/sbin:/usr/bin:/sbin:/bin', *command).stdout

    def start(self):
        return self.run_in('/usr/bin/python3', '-W', 'ignore',
                           f'{HOME}/start.py', '--config-file',
                           f'{HOME}/nova.conf')

    def check(self, *program):
        said = self.run_in(*(program or ('nova-accel',)), 'check', '-f',
                           'json', '--service', 'compute', '--config-file',
                           f'{HOME}/nova.conf')
        lines = json.loads(said[said.index('['):])
        found, = [x for x in lines if x['Check'] == 'compute driver']
        return found

    def assertStarts(self, *program):
        said = self.start()
        self.assertIn('STARTED nova_accel.virt.driver AccelLibvirtDriver 31.',
                      said)
        self.assertEqual('ok', self.check(*program)['Result'])
        return said

    def assertNovaIsWhole(self):
        self.configure('libvirt.LibvirtDriver')
        self.assertIn('STARTED nova.virt.libvirt.driver LibvirtDriver 31.',
                      self.start())
        self.assertEqual('', self.run_in('dpkg', '-V', 'python3-nova'))

    def test_pip(self):
        said = self.run_in('pip', 'install', '--no-deps', self.wheel)
        self.assertIn('externally-managed-environment', said)
        self.run_in('pip', 'install', '--no-deps', '-q',
                    '--break-system-packages', self.wheel)
        self.assertIn('/usr/local/lib/python3.13/dist-packages/nova_accel/',
                      self.assertStarts())
        # Debian's libraries are enough, for all that pip and we ask
        self.assertNotIn('nova-accel', self.run_in('pip', 'check'))
        for arguments, says in (
                (('discover',), 'No device is found'),
                (('claims',), 'claim store'),
                (('profile', 'list'), 'does not exist'),
                (('tree',), 'set OS_CLOUD')):
            said = self.run_in('nova-accel', *arguments, *(
                () if arguments == ('tree',)
                else ('--config-file', f'{HOME}/nova.conf')))
            self.assertIn(says, said)
            self.assertNotIn('Traceback', said)
        self.run_in('pip', 'uninstall', '-y', '--break-system-packages',
                    'nova_accel')
        self.assertNovaIsWhole()

    def test_target_that_deleted_nova(self):
        """pip names --upgrade as the next step, which replaced Nova."""
        target = '/usr/lib/python3/dist-packages'
        self.addCleanup(self.remove, target)
        for arguments in ((), ('--upgrade',)):
            self.run_in('pip', 'install', '-q', '--no-deps',
                        '--break-system-packages', '--target', target,
                        *arguments, self.wheel)
            self.assertStarts('python3', '-m', 'nova_accel.cmd.main')
        self.remove(target)
        self.assertNovaIsWhole()

    @staticmethod
    def remove(target):
        for path in (CHROOT / target[1:]).glob('nova_accel*'):
            shutil.rmtree(path)

    def test_environment_with_the_packages_of_the_system(self):
        """It works by its own Python only, and check says so."""
        self.run_in('python3', '-m', 'venv', '--system-site-packages',
                    f'{HOME}/venv')
        self.run_in(f'{HOME}/venv/bin/pip', 'install', '-q', '--no-deps',
                    self.wheel)
        self.assertNotIn('STARTED', self.start())
        line = self.check(f'{HOME}/venv/bin/nova-accel')
        self.assertEqual('failure', line['Result'])
        self.assertIn('/usr/bin/nova-compute cannot import the driver',
                      line['Found'])
        self.assertIn('/usr/bin/python3', line['What to do'])
