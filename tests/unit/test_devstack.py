# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The DevStack plugin, run by bash as stack.sh runs it.

DevStack's own functions are stand-ins that write what they are told; the file
is then read by oslo.config, and what it names is looked up in Nova.
"""

import os
import pathlib
import shlex
import subprocess

import fixtures
from nova.conf import opts
from oslo_utils import importutils
import testtools

from nova_accel import conf
from nova_accel.drivers import options
from nova_accel import profiles
from nova_accel.virt import door
from tests.unit import pages

ROOT = pathlib.Path(__file__).parents[2]

#: functions of DevStack (inc/ini-config, functions-common) by what they do to
#: the files here; nothing is installed and sudo changes nothing
STAND_INS = r"""
define_plugin() { echo "plugin $1"; }
echo_summary() { echo "summary $*"; }
setup_develop() { echo "develop $1"; }
is_service_enabled() { [[ " $SERVICES " == *" $1 "* ]]; }
iniset() { printf '[%s]\n%s = %s\n' "$2" "$3" "$4" >> "$1"; }
iniset_multiline() {
    local file=$1 section=$2 option=$3 value
    shift 3
    for value; do iniset "$file" "$section" "$option" "$value"; done
}
sudo() { [[ "$1" == install ]] && cp "${@:8}"; }
"""
NOVA_FILTERS = 'ComputeFilter,ImagePropertiesFilter,SameHostFilter'


class DevStackTest(testtools.TestCase):

    def stack(self, services, **variables):
        """Run the phases of stack.sh; what bash wrote, line by line."""
        self.etc = self.useFixture(fixtures.TempDir()).path
        self.state = self.useFixture(fixtures.TempDir()).path
        os.mkdir(f'{self.etc}/rootwrap.d')
        self.nova_conf = f'{self.etc}/nova.conf'
        there = shlex.quote(f'{ROOT}/devstack')
        plugin = f'source {there}/plugin.sh'
        done = subprocess.run(
            ['bash', '-euc', f'{STAND_INS}\nsource {there}/settings\n'
             + ''.join(f'{plugin} stack {phase}\n' for phase in (
                 'pre-install', 'install', 'post-config', 'extra'))],
            env={'PATH': os.environ['PATH'], 'DEST': str(ROOT.parent),
                 'NOVA_ACCEL_DIR': str(ROOT), 'NOVA_CONF': self.nova_conf,
                 'NOVA_CONF_DIR': self.etc, 'NOVA_STATE_PATH': self.state,
                 'NOVA_FILTERS': NOVA_FILTERS, 'SERVICES': services,
                 **variables},
            stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.assertEqual((0, ''), (done.returncode, done.stderr))
        return done.stdout.splitlines()

    def read(self):
        self.addCleanup(conf.CONF.reset)
        conf.CONF(['--config-file', self.nova_conf], project='nova')
        self.assertEqual([], conf.unknown())
        self.assertEqual([], options.malformed())
        return conf.sections()

    def test_all_in_one(self):
        said = self.stack('n-cpu n-sch n-api', NOVA_ACCEL_DRIVERS='dfl,gpu',
                          NOVA_ACCEL_SIMULATED='True')
        self.assertEqual(
            ['plugin nova_accel', 'summary Installing nova_accel',
             f'develop {ROOT}', 'summary Configuring nova_accel'], said)
        found = self.read()
        self.assertEqual(['dfl', 'gpu'], conf.CONF.accel.enabled_drivers)
        door.open_door()
        importutils.import_class(
            f'nova.virt.{found["DEFAULT"]["compute_driver"][0]}')
        self.assertEqual(
            f'{self.state}/simulated-host.yaml', conf.CONF.accel.simulated_host)
        self.assertTrue(os.path.isfile(conf.CONF.accel.simulated_host))
        self.assertEqual(['nova_accel.filters'],
                         os.listdir(f'{self.etc}/rootwrap.d'))
        files = profiles.load(conf.CONF.accel.device_profiles)
        self.assertTrue(files.good)
        self.assertEqual({}, files.bad)

    def test_scheduler(self):
        """nova-scheduler finds every filter and weigher that is named."""
        self.stack('n-sch')
        found = self.read()['filter_scheduler']
        self.assertEqual(set(), pages.not_found(found))
        self.assertIn('AcceleratorFilter', found['enabled_filters'][0])
        self.assertIn('AcceleratorWeigher', found['weight_classes'][0])
        self.assertNotIn('DEFAULT', self.read())

    def test_compute_node(self):
        self.stack('n-cpu')
        found = self.read()
        self.assertEqual({'DEFAULT', 'accel'}, set(found))
        self.assertIsNone(conf.CONF.accel.simulated_host)
        self.assertEqual(['enabled_drivers'], list(found['accel']))

    def test_names_of_options(self):
        """What is set outside of [accel] are options of Nova."""
        self.stack('n-cpu n-sch n-api', NOVA_ACCEL_SIMULATED='True')
        known = {(group or 'DEFAULT', option.dest)
                 for listed in (opts.list_opts(), conf.list_opts())
                 for group, found in listed for option in found
                 for group in [getattr(group, 'name', group)]}
        self.assertEqual(set(), {
            (section, name) for section, found in self.read().items()
            for name in found} - known)
